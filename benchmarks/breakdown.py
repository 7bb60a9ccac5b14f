"""Where a step of ours goes: GPU time by kernel, for a case of `cases.py`.

python benchmarks/breakdown.py [CASE] [--keep MIB]
"""

import argparse

import torch
from cases import eager, find_case, find_contender

import tilewise

STEPS = 4


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="?", default="clip-bf16-65536x768")
    parser.add_argument("--keep", type=float, default=0.0)
    options = parser.parse_args()
    case = find_case(options.case)
    inputs = case.inputs(torch.device("cuda"))
    loss = find_contender("tilewise").load(case)
    if options.keep:
        loss = lambda x: tilewise.clip_loss(x.image, x.text, x.scale, keep_mib=options.keep)  # noqa: E731
    step = eager(case, loss, inputs)
    for _ in range(2 * STEPS):  # compiled, and warm
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    spent = [x for x in profile.key_averages() if x.self_device_time_total > 0]
    for kernel in sorted(spent, key=lambda x: -x.self_device_time_total)[:24]:
        ms = kernel.self_device_time_total / 1e3 / STEPS
        print(f"{kernel.key[:70]:70} {ms:8.3f} ms {kernel.count / STEPS:6.1f} launches")


if __name__ == "__main__":
    main()
