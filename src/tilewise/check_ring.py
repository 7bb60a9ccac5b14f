"""Whether a group of ranks computes what one process does, and how fast its links are.

Started on every rank by torchrun or SLURM, on any cluster. All schedules are compared with one
process in float64, on uneven ranks; then steps are timed against their arithmetic alone and their
messages alone.
"""

import datetime
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import tilewise
from tilewise import explain_schedule
from tilewise.errors import OptionError
from tilewise.train import setup

TOLERANCE = 1e-10  # relative, in float64
SCALE = 10.0
Sides = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What to check and how large."""

    pairs: int = 4096
    """Of each rank in the timed steps."""
    dim: int = 512
    """Feature size of the timed steps."""
    repeats: int = 5
    """Timed steps; their median counts."""
    timeout_s: float = 300.0
    """After which a rank that waits gives up."""

    def __post_init__(self) -> None:
        for name in ("pairs", "dim", "repeats", "timeout_s"):
            if getattr(self, name) <= 0:
                raise OptionError(f"{name} must be above 0, got {getattr(self, name)}")


class Difference(NamedTuple):
    """Between the ranks and one process: the largest, relative to the largest number there is."""

    loss: str
    schedule: str
    found: float

    @property
    def fine(self) -> bool:
        # Written so that NaN is not.
        return self.found <= TOLERANCE


class Speed(NamedTuple):
    """Of a step, on the slowest rank."""

    schedule: str
    step_ms: float
    alone_ms: float  # the same arithmetic on columns that are there already
    messages_ms: float  # the same columns and gradients, sent and waited for
    overlap: float | None  # share of the messages' own time that the step does not show


class MeasuredLink(NamedTuple):
    """From each rank to the next, all at once; the slowest counts."""

    gb_per_s: float
    latency_us: float
    hop_ms: float  # of the columns of a rank and their gradients


class Report(NamedTuple):
    """What was found, the same on every rank."""

    world: int
    backend: str
    nodes: int
    differences: list[Difference]
    link: MeasuredLink | None
    speeds: list[Speed]
    chosen: str

    @property
    def fine(self) -> bool:
        """Whether all ranks agree with one process."""
        return all(difference.fine for difference in self.differences)


def start(timeout_s: float) -> torch.device:
    """Join the others that torchrun or SLURM started, or a group of one; this rank's device."""
    ranks = setup.start("auto", timeout_s)
    if ranks.world == 1:
        dist.init_process_group(
            "nccl" if ranks.device.type == "cuda" else "gloo",
            rank=0,
            world_size=1,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    return ranks.device


def is_first() -> bool:
    """Whether this rank is the one that prints."""
    return dist.get_rank() == 0


def stop() -> None:
    """Leave the group, once all are here: a rank that ends early takes its connections with it."""
    dist.barrier()
    dist.destroy_process_group()


def run(config: CheckConfig, device: torch.device) -> Report:
    """Compare, then measure. All ranks of the default group call it."""
    world, hosts = dist.get_world_size(), [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    schedules = [name for name in ("ring", "two-level", "gather") if _is_offered(name, device)]
    differences = [
        Difference(loss, schedule, _difference(loss, schedule, device))
        for loss in ("clip", "siglip", "nt_xent")
        for schedule in schedules
    ]
    sides = _features(config.pairs, config.dim, device, dist.get_rank())
    link = _link(config, sides[0]) if world > 1 else None
    alone_ms = _slowest_ms(lambda: _alone(sides), config.repeats, device)
    speeds = [_speed(schedule, sides, config, alone_ms, link) for schedule in schedules]
    why = str(explain_schedule(*sides, group=dist.group.WORLD))
    backend = str(dist.get_backend())
    return Report(world, backend, len(set(hosts)), differences, link, speeds, why)


def _is_offered(schedule: str, device: torch.device) -> bool:
    """Whether these ranks can have it: unequal nodes have no two-level ring."""
    x = torch.ones(1, 1, device=device)
    try:
        tilewise.clip_loss(x, x, SCALE, group=dist.group.WORLD, schedule=schedule)
    except OptionError:
        return False
    return True


# Differences


def _loss(name: str, a: Tensor, b: Tensor, scale: Tensor, **how: object) -> Tensor:
    losses: dict[str, Callable[..., Tensor]] = {
        "clip": tilewise.clip_loss, "siglip": tilewise.siglip_loss, "nt_xent": tilewise.nt_xent,
    }  # fmt: skip
    return losses[name](a, b, scale, **how)


def _difference(name: str, schedule: str, device: torch.device) -> float:
    """The same on every rank: the largest of all."""
    world, rank = dist.get_world_size(), dist.get_rank()
    # Uneven, and one of several empty.
    sizes = [0 if r == 2 else 5 + 7 * (r % 3) for r in range(world)]
    start = sum(sizes[:rank])
    maker = torch.Generator().manual_seed(0)
    made = torch.randn(2, sum(sizes), 24, generator=maker, dtype=torch.float64)
    every = functional.normalize(made, dim=-1).to(device).requires_grad_()
    scale = torch.tensor(SCALE, dtype=torch.float64, device=device, requires_grad=True)
    truth = _loss(name, every[0], every[1], scale)
    truth_grad, truth_d_scale = torch.autograd.grad(truth, [every, scale])
    mine = every.detach()[:, start : start + sizes[rank]].requires_grad_()
    share = _loss(name, mine[0], mine[1], scale, group=dist.group.WORLD, schedule=schedule)
    grad, d_scale = torch.autograd.grad(share, [mine, scale])
    dist.all_reduce(d_scale)
    dist.all_reduce(total := share.detach() / world)
    worst = (total / truth.detach() - 1).abs()
    worst = torch.maximum(worst, (d_scale / world / truth_d_scale - 1).abs())
    # Gradients are of the sum over ranks of what each returns: of the mean, times their number.
    wanted = world * truth_grad[:, start : start + sizes[rank]]
    if grad.numel():
        off = (grad - wanted).abs().max() / (world * truth_grad).abs().max()
        worst = torch.maximum(worst, off)
    # A maximum passes NaN over.
    worst = torch.where(worst.isnan(), torch.inf, worst)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


# Speed


def _features(size: int, dim: int, device: torch.device, seed: int) -> Sides:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    maker = torch.Generator().manual_seed(seed)
    made = torch.randn(2, size, dim, generator=maker)
    a, b = functional.normalize(made, dim=-1).to(device, dtype)
    return a.requires_grad_(), b.requires_grad_()


def _alone(sides: Sides) -> None:
    """As many pairs as a rank has against all columns, its own repeated."""
    for _ in range(dist.get_world_size()):
        tilewise.clip_loss(*sides, SCALE).backward()


def _step(sides: Sides, schedule: str) -> None:
    tilewise.clip_loss(*sides, SCALE, group=dist.group.WORLD, schedule=schedule).backward()


def _speed(
    schedule: str, sides: Sides, config: CheckConfig, alone_ms: float, link: MeasuredLink | None
) -> Speed:
    step_ms = _slowest_ms(lambda: _step(sides, schedule), config.repeats, sides[0].device)
    messages_ms = 0.0 if link is None else link.hop_ms * (dist.get_world_size() - 1)
    overlap = None
    if messages_ms:
        overlap = min(1.0, max(0.0, 1.0 - (step_ms - alone_ms) / messages_ms))
    return Speed(schedule, step_ms, alone_ms, messages_ms, overlap)


def _link(config: CheckConfig, side: Tensor) -> MeasuredLink:
    """By messages of 32 MiB and of one byte, and of what a step sends at a hop."""
    large, small = (side.new_zeros(size, dtype=torch.uint8) for size in (2**25, 1))
    hop = side.new_zeros(config.pairs * config.dim * (2 * side.element_size() + 4),
                         dtype=torch.uint8)  # fmt: skip
    times = [_slowest_ms(partial(_pass_on, x), config.repeats, side.device)
             for x in (large, small, hop)]  # fmt: skip
    return MeasuredLink(2**25 / times[0] / 1e6, 1e3 * times[1], times[2])


def _pass_on(x: Tensor) -> None:
    """To the next rank, from the one before."""
    world, rank = dist.get_world_size(), dist.get_rank()
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, x, (rank + 1) % world),
        dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % world),
    ])  # fmt: skip
    for work in works:
        work.wait()


def _slowest_ms(call: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Median of several after one to warm up, on the slowest rank."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        _wait(device)
        start_s = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start_s)
    slowest = torch.tensor(1e3 * statistics.median(times[1:]), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
