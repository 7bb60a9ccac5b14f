"""Python's share of a fused step, its launches, and what a first call compiles: without a GPU.

    python benchmarks/host_time.py [--capability 90] [--cases clip-bf16,...] [--repeats 200]

Kernels are compiled for the device and not run (`no_device.py`). The batch is one of a single
panel, so that launches are those of up to 8,448 pairs; to the time on a GPU come some 5 us for each
launch and allocation. Compile times are those of an empty cache; beside Triton's compiler each
kernel's first launch takes 0.2 s of a C compiler, once for each machine.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())

import torch
from no_device import pretend, waits
from torch import Tensor

import tilewise

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def marks(x: Tensor) -> Tensor:
    """Two rows of each."""
    return torch.arange(len(x)) // 2


HOW = {"backend": "fused"}
LOSSES: dict[str, Loss] = {
    "clip": lambda a, b, s: tilewise.clip_loss(a, b, 14.3, **HOW),
    "clip-anew": lambda a, b, s: tilewise.clip_loss(a, b, 14.3, keep_mib=0, **HOW),
    "clip-scale": lambda a, b, s: tilewise.clip_loss(a, b, s, **HOW),
    "clip-ids": lambda a, b, s: tilewise.clip_loss(a, b, s, ids=marks(a), **HOW),
    "clip-labels": lambda a, b, s: tilewise.clip_loss(a, b, s, labels=marks(a), **HOW),
    "siglip": lambda a, b, s: tilewise.siglip_loss(a, b, s, -5.0, **HOW),
    "siglip-rows": lambda a, b, s: tilewise.siglip_loss(
        a, b, s, -5.0, reduction="none", **HOW
    ).sum(),
    "info_nce-frozen": lambda a, b, s: tilewise.info_nce(a, b.detach(), 14.3, **HOW),
    "info_nce-smooth": lambda a, b, s: tilewise.info_nce(a, b, s, label_smoothing=0.1, **HOW),
    "info_nce-index": lambda a, b, s: tilewise.info_nce(
        a, b, s, positives=torch.arange(len(a)).flip(0), **HOW
    ),
    "info_nce-hard": lambda a, b, s: tilewise.info_nce(
        a, b, s, negatives=torch.stack([a, b], 1), weight=s.expand(len(a)), **HOW
    ),
    "nt_xent": lambda a, b, s: tilewise.nt_xent(a, b, s, **HOW),
    "sup_con": lambda a, b, s: tilewise.sup_con(a, marks(a), s, **HOW),
}


def make_step(name: str, batch: int, features: int) -> Callable[[], None]:
    """Forward and backward of a case, such as "clip-ids-bf16"."""
    loss_name, _, dtype = name.rpartition("-")
    loss = LOSSES[loss_name]
    a, b = (torch.randn(batch, features).to(DTYPES[dtype]).requires_grad_() for _ in range(2))
    scale = torch.tensor(14.3, requires_grad=True)

    def step() -> None:
        a.grad = b.grad = scale.grad = None
        loss(a, b, scale).backward()

    return step


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90, help="90 is Hopper's")
    parser.add_argument("--cases", default="clip-bf16,clip-anew-bf16,clip-scale-bf16,siglip-bf16,"
                        "info_nce-frozen-bf16,clip-fp32")  # fmt: skip
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="where Python spends it, too")
    parser.add_argument("--json", action="store_true", help="a line of JSON a case, no table")
    options = parser.parse_args(arguments)
    driver, compilations = pretend(options.capability)
    names = options.cases.split(",")
    if options.cases == "all":
        names = [f"{loss}-{dtype}" for loss in LOSSES for dtype in DTYPES]
    if not options.json:
        print(f"{'case':24}{'kernels':>8}{'products':>9}{'Python':>11}{'compiled':>10}")
    for name in names:
        step = make_step(name, options.batch, options.features)
        compilations.clear()
        step()
        driver.launched.clear()
        times = []
        for _ in range(options.repeats):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        count = driver.launched.count("product") // options.repeats
        found = {
            "case": name,
            "kernels": len(driver.launched) // options.repeats - count,
            "products": count,
            "python_ms": statistics.median(times),
            "compiled": [kernel for kernel, _ in compilations],
            "compile_s": sum(seconds for _, seconds in compilations),
            "waits": waits(step),
        }
        if options.json:
            sys.stdout.write(json.dumps(found) + "\n")
            continue
        print(f"{name:24}{found['kernels']:8}{count:9}{found['python_ms']:8.2f} ms"
              f"{len(compilations):4} in {found['compile_s']:.1f} s", *found["waits"],
              flush=True)  # fmt: skip
        if options.profile:
            profile(step, options.repeats)


def profile(step: Callable[[], None], repeats: int) -> None:
    """The functions that take the longest, without what they call."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(repeats):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
