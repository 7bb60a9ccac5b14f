"""Bytes, FLOP and time of a sweep over several ranks. Numbers only.

A model as simple as it can be and still rank the ways: a step takes as long as its arithmetic or as
the columns that travel meanwhile, whichever is longer.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

SCHEDULES = ("ring", "two-level", "gather")


class Link(NamedTuple):
    """Between two ranks, in one direction."""

    bytes_per_s: float
    latency_s: float  # of a message

    def seconds(self, num_bytes: float, messages: float = 1) -> float:
        """Of a message, or of several that together have so many bytes."""
        return messages * self.latency_s + num_bytes / self.bytes_per_s


class Machine(NamedTuple):
    """What ranks and their links can do."""

    flop_per_s: float  # of products, kernels around them included
    visit_s: float  # that a visit takes the host at least
    inside: Link  # a node
    between: Link  # nodes, for each rank its own

    def link(self, crosses: bool) -> Link:
        """That columns go over when they leave a node, or stay."""
        return self.between if crosses else self.inside


# An H200 as measured (docs/distributed.md), NVLink and a 400 Gbit/s card as specified, less a fifth
# to a third; a core and loopback TCP. Equal on all ranks, so that all choose alike.
MACHINES = {
    "cuda": Machine(6.5e14, 2e-3, Link(3e11, 1e-5), Link(4e10, 2e-5)),
    "cpu": Machine(1e11, 2e-4, Link(1e9, 1e-4), Link(1e9, 1e-4)),
}


class Load(NamedTuple):
    """What is swept, and what of it travels."""

    columns: int  # of a rank: the most that one has; as many rows
    features: int  # D
    feature_bytes: int  # of one number
    stats: int  # numbers found out about a column in the forward that travel with it, or 0
    grads: bool  # whether the columns' gradients travel

    @property
    def flop(self) -> float:
        """Of one product of a rank's rows and another's columns."""
        return 2.0 * self.columns**2 * self.features


class Pass(NamedTuple):
    """One way round: forward or backward."""

    products: int
    column_bytes: int  # of a column that travels
    found_bytes: int  # of what follows it

    @property
    def hop_bytes(self) -> int:
        return self.column_bytes + self.found_bytes


class Estimate(NamedTuple):
    """What a schedule costs: a forward and a backward."""

    schedule: str
    seconds: float
    waiting_s: float  # of these: for what travels
    extra_bytes: int  # above the workspace
    sent_bytes: int  # by each rank

    def __str__(self) -> str:
        return (
            f"{self.schedule} {1e3 * self.seconds:,.3g} ms, of which {1e3 * self.waiting_s:,.3g} "
            f"waiting, {self.extra_bytes / 2**20:,.0f} MiB"
        )


class Schedule(NamedTuple):
    """How columns travel, and why."""

    name: str  # one of `SCHEDULES`
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def passes(load: Load) -> tuple[Pass, Pass]:
    """Forward and backward."""
    row = load.features * load.feature_bytes
    wide = load.features * max(4, load.feature_bytes)
    both_ways = 1 + load.grads  # gradients of rows, and of columns
    return (
        Pass(1, row, 4 * load.stats),
        Pass(1 + both_ways, row + 8 * load.stats, wide if load.grads else 0),
    )


def estimate(
    schedule: str, load: Load, nodes: Sequence[int], machine: Machine, slice_bytes: int
) -> Estimate:
    """What a schedule costs on ranks that are on such nodes."""
    world, many = len(nodes), len(set(nodes)) > 1
    row = load.features * load.feature_bytes
    slices = max(1, math.ceil(load.columns * row / slice_bytes))
    time = waiting = 0.0
    for one in passes(load):
        visit = machine.visit_s + one.products * load.flop / machine.flop_per_s
        visit += (slices - 1) * machine.visit_s
        if schedule == "gather":
            busy, waits = _gathered(one, load, world, machine, many)
        else:
            crossings = _crossings(schedule, nodes)
            hops = [
                machine.link(x).seconds(load.columns * one.hop_bytes, slices) for x in crossings
            ]
            waits = sum(max(0.0, hop - visit) for hop in hops)
            if one.found_bytes and world > 1:
                waits += machine.link(many).seconds(load.columns * one.found_bytes)
            busy = world * visit
        time, waiting = time + busy + waits, waiting + waits
    blocks = world if schedule == "gather" else 1
    wide = load.features * max(4, load.feature_bytes) if load.grads else 0
    return Estimate(
        schedule,
        time,
        waiting,
        blocks * load.columns * (row + wide),
        sum(load.columns * sent_per_column(one, world) for one in passes(load)),
    )


def sent_per_column(one: Pass, world: int) -> int:
    """Bytes that a pass sends of each column: the last hop brings home only what was found."""
    return (world - 1) * one.column_bytes + (world * one.found_bytes if world > 1 else 0)


def _crossings(schedule: str, nodes: Sequence[int]) -> list[bool]:
    """Whether the slowest link of each hop but the last is one between nodes."""
    world, count = len(nodes), len(set(nodes))
    if schedule == "ring" or count == 1:
        return [count > 1] * (world - 1)
    width = world // count
    return [step % width == width - 1 for step in range(world - 1)]


def _gathered(
    one: Pass, load: Load, world: int, machine: Machine, many: bool
) -> tuple[float, float]:
    """Seconds at work, and waiting."""
    link, work = machine.link(many), one.products * load.flop / machine.flop_per_s
    messages = math.ceil(math.log2(max(2, world)))
    coming = link.seconds((world - 1) * load.columns * one.column_bytes, messages)
    waits = max(0.0, coming - machine.visit_s - work)
    if one.found_bytes:
        waits += link.seconds((world - 1) * load.columns * one.found_bytes, messages)
    # One's own columns, and one visit for those before and one for those after.
    return min(3, world) * machine.visit_s + world * work, waits


def choose(
    load: Load, nodes: Sequence[int], machine: Machine, slice_bytes: int, room_bytes: int
) -> Schedule:
    """The fastest schedule by estimate; gathering only where its columns fit into `room_bytes`."""
    if len(nodes) == 1:
        return Schedule("ring", "a ring of one has nothing to send")
    levels = len(set(nodes)) > 1 and refusal("two-level", nodes) is None
    names = ["ring", "two-level"] if levels else ["ring"]
    told = ""
    found = estimate("gather", load, nodes, machine, slice_bytes)
    if found.extra_bytes <= room_bytes and load.columns:
        names.append("gather")
    else:
        told = (
            f"; gathering would take {found.extra_bytes / 2**20:,.0f} MiB, more than "
            f"{room_bytes / 2**20:,.0f}, four times the workspace"
        )
    estimates = [estimate(name, load, nodes, machine, slice_bytes) for name in names]
    best = min(estimates, key=lambda one: one.seconds)
    return Schedule(best.schedule, "estimated " + "; ".join(map(str, estimates)) + told)


def refusal(schedule: str, nodes: Sequence[int]) -> str | None:
    """Why a schedule cannot be had on such nodes, or None."""
    counts = {nodes.count(node) for node in set(nodes)}
    if schedule == "two-level" and len(counts) > 1:
        return f"it needs as many ranks on every node, got {sorted(counts)}"
    return None
