"""Memory and time of one rank of many, with the real ring and kernels, on one GPU.

    python benchmarks/one_rank.py [--cases 8x1024k,32x1024k] [--schedule ring] [--output FOLDER]

The other ranks are copies of this one (`mirror.py`): their columns are there at once. What links
would add is a model (`tilewise.costs`), with this GPU's speed as measured: nodes of eight ranks.
"""

import argparse
import csv
import gc
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import mirror
import torch
import torch.distributed as dist
from run import make_product, provenance, sustained_s
from torch import Tensor
from torch.nn import functional

import tilewise as tw
from tilewise import costs, measure, ring

# Loss memory of a GPU in the paper, 10^9 bytes, and how many times less ours must be.
PAPER = {
    "8x1024k": (6.53, 3),
    "32x1024k": (1.44, 3),
    "8x4096k": (26.12, 4),
    "32x12288k": (19.59, 4),
}
CASES = (*PAPER, "128x12288k")
PER_NODE = 8
SCALE = 14.3


class Row(NamedTuple):
    """One rank of a step."""

    case: str
    ranks: int
    batch: int
    local: int
    dim: int
    schedule: str
    workspace_mib: float
    extra_gb: float  # most memory above inputs and gradients
    with_gradients_gb: float
    paper_gb: float | None
    bar_gb: float | None
    step_s: float
    floor_s: float  # 8 N M D FLOP at the speed of a matrix product
    efficiency: float
    predicted_s: float  # on nodes of eight, with links
    waiting_s: float  # of that: for links


def parse_case(text: str) -> tuple[int, int]:
    """(ranks, batch) of 8x1024k."""
    found = re.fullmatch(r"(\d+)x(\d+)(k?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"a case is RANKSxBATCH as 8x1024k, got {text!r}")
    ranks, batch = int(found[1]), int(found[2]) * (1024 if found[3] else 1)
    if batch % ranks:
        raise argparse.ArgumentTypeError(f"{ranks} ranks cannot share {batch} pairs equally")
    return ranks, batch


def features(local: int, dim: int, device: torch.device) -> list[Tensor]:
    """Two sides of unit length."""
    maker = torch.Generator(device=device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sides = []
    for _ in range(2):
        side = torch.empty(local, dim, device=device, dtype=dtype)
        for part in side.split(2**16):
            made = torch.randn(part.shape, generator=maker, device=device)
            part.copy_(functional.normalize(made, dim=1))
        sides.append(side.requires_grad_())
    return sides


def measure_case(text: str, options: argparse.Namespace) -> Row:
    """One rank of a case: a step to compile, one for its memory, and that or five for its time."""
    ranks, batch = parse_case(text)
    local, device = batch // ranks, options.device
    sides = features(local, options.dim, device)
    block_mib = local * options.dim * sides[0].element_size() / 2**20
    workspace_mib = min(256.0, max(128.0, 2 * block_mib))
    os.environ["LOCAL_WORLD_SIZE"] = str(PER_NODE)
    group = make_group(ranks)
    how = {"workspace_mib": workspace_mib, "group": group, "schedule": options.schedule}

    def step(size: int = local) -> None:
        here = [x.detach()[:size].requires_grad_() for x in sides]
        tw.clip_loss(here[0], here[1], SCALE, **how).backward()

    step(min(local, 32768))
    gc.collect()
    times: list[float] = []
    peak = measure.peak_bytes(lambda: times.append(timed_s(step, device)), device)
    # Long ones are steady, and the first of the short ones may still load something.
    if times[0] < 2:
        times = [timed_s(step, device) for _ in range(5)]
    step_s = statistics.median(times)
    gradients = 2 * sides[0].numel() * sides[0].element_size()
    flop = 8.0 * local * batch * options.dim
    # As hot as the step has left the GPU.
    product, product_flop = make_product(device)
    speed = product_flop / sustained_s(product, 1.0, device)
    found = predict(flop / step_s, ranks, sides[0], options.schedule)
    paper, share = PAPER.get(text, (None, None))
    return Row(
        text, ranks, batch, local, options.dim, options.schedule, workspace_mib,
        (peak - gradients) / 1e9, peak / 1e9,
        paper, None if paper is None or share is None else paper / share,
        step_s, flop / speed, flop / speed / step_s, found.seconds, found.waiting_s,
    )  # fmt: skip


def make_group(ranks: int) -> dist.ProcessGroup:
    """All ranks, of which only this one is real."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("mirror", rank=0, world_size=ranks, store=store)
    assert dist.get_backend() == "mirror", mirror
    return dist.group.WORLD


def timed_s(step: Callable[[], None], device: torch.device) -> float:
    """Of one call."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def predict(flop_per_s: float, ranks: int, side: Tensor, schedule: str) -> costs.Estimate:
    """A step with links, at the speed that was measured without."""
    cluster = costs.CLUSTERS["cuda"]._replace(flop_per_s=flop_per_s, visit_s=0.0)
    slices = -(-len(side) // ring.slice_height(side, [len(side)] * ranks))
    load = costs.Load(
        len(side), side.shape[1], side.element_size(), slices, stats=5, carried=True, grads=True
    )
    nodes = [rank // PER_NODE for rank in range(ranks)]
    return costs.estimate(schedule, load, nodes, cluster)


def line_of(row: Row) -> str:
    """What people read."""
    paper = "" if row.paper_gb is None else f" (paper {row.paper_gb:.2f}, bar {row.bar_gb:.2f})"
    return (
        f"{row.case:>11} {row.local:>7} pairs here  loss memory {row.extra_gb:.2f} GB{paper}, with "
        f"gradients {row.with_gradients_gb:.2f}  step {row.step_s:.3f} s, {row.efficiency:.3f} of "
        f"its floor  with links {row.predicted_s:.3f} s, {row.waiting_s:.3f} waiting"
    )


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Each as soon as it is measured."""
    for text in options.cases.split(","):
        row = measure_case(text, options)
        print(line_of(row), flush=True)
        yield row
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()


def main(arguments: Sequence[str]) -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="RANKSxBATCH, with commas")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--schedule", default="two-level", choices=costs.SCHEDULES)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for text in options.cases.split(","):
        parse_case(text)
    about = provenance(options.device, arguments, "", script="one_rank.py")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"one-rank-{about['date'][:10]}-{options.device.type}.csv"
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*Row._fields, *about])
        if file.tell() == 0:
            writer.writeheader()
        for row in rows_of(options):
            writer.writerow({**row._asdict(), **about})
            file.flush()
    print(f"saved {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
