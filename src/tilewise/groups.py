"""Groups of ranks: what they are called, which of them share a node, and what they agree on."""

from __future__ import annotations  # a torch without torch.distributed has not all these names

import contextlib
import contextvars
import datetime
import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.errors import OptionError, RingError

Group = Any  # a ProcessGroup, or a DeviceMesh of one dimension or of two: nodes, ranks on each

NO_TAG = 2**20 + 1  # of a message that nobody sends


def name_of(group: Group | None) -> str:
    """The name under which an op finds a group again; "" for none."""
    if group is None:
        return ""
    group = _process_group(group)
    if dist.get_rank(group) < 0:
        raise OptionError(f"group must have this rank in it, got one without {dist.get_rank()}")
    return str(group.group_name)


def own_node(group: Group) -> int:
    """Which node this rank is on: by its mesh, or by what torchrun or SLURM tell it; else 0."""
    rank = dist.get_rank()
    if getattr(group, "ndim", 1) == 2:
        return next(node for node, row in enumerate(group.mesh.tolist()) if rank in row)
    told = {name: os.environ.get(name, "") for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE",
                                                        "SLURM_NODEID")}  # fmt: skip
    if told["GROUP_RANK"].isdigit():
        return int(told["GROUP_RANK"])
    if told["LOCAL_WORLD_SIZE"].isdigit() and int(told["LOCAL_WORLD_SIZE"]):
        return rank // int(told["LOCAL_WORLD_SIZE"])
    return int(told["SLURM_NODEID"]) if told["SLURM_NODEID"].isdigit() else 0


def nodes_of(group: Group) -> list[int]:
    """Which node each rank of a group is on, as they last told each other: all of them, or none."""
    whole = _process_group(group)
    if whole not in _nodes:
        _nodes[whole] = [row[0] for row in _gather(whole, [own_node(group)])]
    return _nodes[whole]


_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]] = weakref.WeakKeyDictionary()


def world_size(group: Group | None) -> int:
    """How many ranks."""
    return 1 if group is None else dist.get_world_size(_process_group(group))


def is_initialized() -> bool:
    """Whether there are ranks at all."""
    return dist.is_available() and dist.is_initialized()


def world() -> Group:
    """All ranks."""
    return _process_group(dist.group.WORLD)


def world_of(count: int) -> Group:
    """All ranks, of which there must be so many: what open_clip's modules are told."""
    if dist.get_world_size(world()) != count:
        raise OptionError(
            f"world_size must be that of torch.distributed, {dist.get_world_size()}, got {count}; "
            "pass group= for a part of the ranks"
        )
    return world()


def add_up(number: Tensor, group: Group | None) -> Tensor:
    """A number summed over the ranks of a group; without gradient."""
    if group is None:
        return number
    what = "the sum of all ranks' counts", "look at what it printed, and start all ranks again"
    return _reduced(number.detach().clone(), _process_group(group), dist.ReduceOp.SUM, *what)


def average(number: Tensor, group: Group) -> Tensor:
    """A tensor averaged over the ranks of a group; without gradient."""
    return add_up(number, group) / world_size(group)


def least(number: float, group: Group) -> float:
    """The smallest number that a rank of a group has."""
    whole = _process_group(group)
    device = "cuda" if dist.get_backend(whole) == "nccl" else "cpu"
    found = torch.tensor(number, dtype=torch.float64, device=device)
    what = "all ranks to say what fits", "every rank must run the same steps"
    return float(_reduced(found, whole, dist.ReduceOp.MIN, *what))


def is_same(number: Tensor, name: str) -> bool:
    """Whether all ranks of a group have the same number; the host waits for it."""
    both = torch.stack([number, -number]).detach()
    # A maximum may pass NaN over; two infinities are never the same number.
    both = torch.where(number.isnan(), torch.inf, both)
    what = "all ranks' upstream gradients", "every rank must call backward"
    both = _reduced(both, find(name), dist.ReduceOp.MAX, *what)
    return bool(both[0] == -both[1])


def _reduced(x: Tensor, whole: dist.ProcessGroup, op: Any, awaited: str, remedy: str) -> Tensor:
    """x over all ranks, in its place."""
    told = f"rank {dist.get_rank()} waited for {awaited}, and one did not answer; {remedy}"
    watched(whole, told, lambda: dist.all_reduce(x, op=op, group=whole))
    return x


def watched(whole: dist.ProcessGroup, names: str, call: Callable[[], Any]) -> Any:
    """What a call returns; an error of torch.distributed becomes one that says who was missing."""
    try:
        return call()
    except RuntimeError as error:
        _hang_up(whole)
        raise RingError(f"{names}: {error}") from error


def _hang_up(whole: dist.ProcessGroup) -> None:
    """Close this rank's connections, so that whoever waits for it learns of the failure too.

    gloo does so when a wait runs out of time; NCCL has a watchdog for it.
    """
    if "gloo" not in str(dist.get_backend_config(whole)):
        return
    for rank in dist.get_process_group_ranks(whole):
        if rank != dist.get_rank():
            with contextlib.suppress(RuntimeError):
                never = dist.irecv(torch.empty(1), rank, whole, tag=NO_TAG)
                assert never is not None
                never.wait(datetime.timedelta(milliseconds=1))


def find(name: str) -> dist.ProcessGroup:
    """The group of a name."""
    resolve: Any = dist.distributed_c10d.__dict__["_resolve_process_group"]
    group: dist.ProcessGroup = resolve(name)
    return group


def check_sizes(group: Group, sizes: Sequence[int], own: int) -> None:
    """Raise unless there is a size for every rank, and this rank's own is right."""
    world, rank = world_size(group), dist.get_rank(_process_group(group))
    if len(sizes) != world or sizes[rank] != own:
        raise OptionError(
            f"sizes must have one entry for each of {world} ranks, {own} for rank {rank} of the "
            f"group, got {list(sizes)}; leave sizes out and the ranks ask each other"
        )


@dataclass
class Call:
    """What a loss says of itself while it runs: its own facts, and whether the ranks agreed."""

    facts: dict[str, object] = field(default_factory=dict)
    agreed: bool = False


calling: contextvars.ContextVar[Call | None] = contextvars.ContextVar("calling", default=None)


class Agreed(NamedTuple):
    """What the ranks told each other, by rank."""

    sizes: list[int]
    nodes: list[int]


def agree(group: Group, facts: dict[str, object], size: int) -> Agreed:
    """Every rank's `size` and node, after all have found that they have the same facts in mind.

    A few integers go round; words only where there is something to say.
    """
    whole, call = _process_group(group), calling.get() or Call()
    words = {name: str(fact) for name, fact in (call.facts | facts).items()}
    table = _gather(whole, [0, zlib.crc32(repr(words).encode()), size, own_node(group)])
    call.agreed = True
    _refuse_together(whole, table, "")
    if len({row[1] for row in table}) > 1:
        raise RingError(_difference(whole, _gather_objects(whole, words)))
    _nodes[whole] = [row[3] for row in table]
    return Agreed([row[2] for row in table], _nodes[whole])


def refuse(group: Group, error: Exception) -> None:
    """Tell the other ranks, who wait to agree, that this one cannot go on."""
    whole = _process_group(group)
    _refuse_together(whole, _gather(whole, [1, 0, 0, 0]), f"{type(error).__name__}: {error}")


def _refuse_together(whole: dist.ProcessGroup, table: list[list[int]], reason: str) -> None:
    """Raise the same error on every rank if one has a reason to."""
    if not any(row[0] for row in table):
        return
    reasons: list[str] = _gather_objects(whole, reason)
    rank = next(rank for rank, text in enumerate(reasons) if text)
    raise RingError(f"rank {dist.get_global_rank(whole, rank)} refused: {reasons[rank]}")


def _gather_objects(whole: dist.ProcessGroup, mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size(whole)
    names = f"rank {dist.get_rank()} waited for what the others have to say, and one did not answer"
    watched(whole, names, lambda: dist.all_gather_object(every, mine, group=whole))
    return every


def _gather(whole: dist.ProcessGroup, numbers: list[int]) -> list[list[int]]:
    device = "cuda" if dist.get_backend(whole) == "nccl" else "cpu"
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size(whole))]
    names = (
        f"rank {dist.get_rank()} waited for the others to agree on sizes, and one did not answer; "
        "every rank must call the same losses in the same order"
    )
    watched(whole, names, lambda: dist.all_gather(table, mine, group=whole))
    return [row.tolist() for row in table]


def _difference(whole: dist.ProcessGroup, said: list[dict[str, str]]) -> str:
    """Which fact is not the same everywhere."""
    for name, first in said[0].items():
        for rank, other in enumerate(said):
            if other.get(name) != first:
                ranks = [dist.get_global_rank(whole, r) for r in (0, rank)]
                return (
                    f"all ranks must have the same {name}, got {first} on rank {ranks[0]} and "
                    f"{other.get(name)} on rank {ranks[1]}"
                )
    return "all ranks must call the same loss"


def _process_group(group: Group) -> dist.ProcessGroup:
    # First: a compiler that traces this knows no other question that it could ask of one.
    if isinstance(group, dist.ProcessGroup):
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise OptionError(
            "group needs torch.distributed, which is not initialised; call "
            "torch.distributed.init_process_group first, or leave group out for a local loss"
        )
    if not hasattr(group, "get_group"):
        raise OptionError(
            f"group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}; pass "
            "torch.distributed.group.WORLD for all ranks"
        )
    found: dist.ProcessGroup = _flat(group).get_group()
    return found


def _flat(mesh: Any) -> Any:
    """A mesh of one dimension with the same ranks."""
    if mesh.ndim == 1:
        return mesh
    if mesh.ndim != 2 or not mesh.mesh_dim_names:
        raise OptionError(
            f"group as a DeviceMesh must have one dimension, or two with names (nodes, ranks on "
            f"each), got {mesh.ndim} dimensions named {mesh.mesh_dim_names}; pass mesh['dp']"
        )
    return mesh._flatten()
