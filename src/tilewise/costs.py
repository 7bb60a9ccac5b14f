"""Bytes, FLOP and time of a sweep over several ranks. Numbers only.

A model as simple as it can be and still rank the ways: a step takes as long as its arithmetic or as
the columns that travel meanwhile, whichever is longer.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

SCHEDULES = ("ring", "two-level", "gather")
# How many times the workspace gathered columns and their gradients may take.
GATHER_ROOM = 4


class Link(NamedTuple):
    """Between two ranks, in one direction."""

    bytes_per_s: float
    latency_s: float  # of a message

    def seconds(self, num_bytes: float, messages: float = 1) -> float:
        """Of a message, or of several that together have so many bytes."""
        return messages * self.latency_s + num_bytes / self.bytes_per_s


class Cluster(NamedTuple):
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
CLUSTERS = {
    "cuda": Cluster(6.5e14, 2e-3, Link(3e11, 1e-5), Link(4e10, 2e-5)),
    "cpu": Cluster(1e11, 2e-4, Link(1e9, 1e-4), Link(1e9, 1e-4)),
}


class Load(NamedTuple):
    """What is swept, and what of it travels."""

    columns: int  # of a rank: the most that one has; as many rows
    features: int  # D
    feature_bytes: int  # of one number
    slices: int  # that these columns are cut into
    stats: int  # numbers found out about a column that its backward needs, or 0
    carried: bool  # whether these travel with it in the forward
    grads: bool  # whether the columns' gradients travel

    @property
    def flop(self) -> float:
        """Of one product of a rank's rows and another's columns."""
        return 2.0 * self.columns**2 * self.features

    @property
    def wide_bytes(self) -> int:
        """Of a number that is added up."""
        return max(4, self.feature_bytes)


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
    row, wide = load.features * load.feature_bytes, load.features * load.wide_bytes
    stats = load.stats * load.wide_bytes
    both_ways = 1 + load.grads  # gradients of rows, and of columns
    return (
        Pass(1, row, stats if load.carried else 0),
        Pass(1 + both_ways, row + 2 * stats, wide if load.grads else 0),
    )


def estimate(schedule: str, load: Load, nodes: Sequence[int], cluster: Cluster) -> Estimate:
    """What a schedule costs on ranks that are on such nodes."""
    world, gathers = len(nodes), schedule == "gather"
    time = waiting = 0.0
    for one in passes(load):
        if gathers:
            busy, waits = _gathered(one, load, nodes, cluster)
        else:
            busy, waits = _passed_on(one, load, _crossings(schedule, nodes), cluster)
        time, waiting = time + busy + waits, waiting + waits
    wide = load.wide_bytes if load.grads else 0
    held = load.columns * load.features * (load.feature_bytes + wide)
    return Estimate(schedule, time, waiting, held * (world if gathers else 1))


def _passed_on(
    one: Pass, load: Load, crossings: list[bool], cluster: Cluster
) -> tuple[float, float]:
    """Seconds at work, and waiting, of columns that go from rank to rank."""
    visit = load.slices * cluster.visit_s + one.products * load.flop / cluster.flop_per_s
    messages = load.slices * (2 if one.found_bytes else 1)
    waits = 0.0
    for crosses in crossings:
        hop = cluster.link(crosses).seconds(load.columns * one.hop_bytes, messages)
        waits += max(0.0, hop - visit)
    if one.found_bytes and crossings:  # home, while nothing else is done
        waits += cluster.link(any(crossings)).seconds(load.columns * one.found_bytes)
    return (len(crossings) + 1) * visit, waits


def _crossings(schedule: str, nodes: Sequence[int]) -> list[bool]:
    """Whether the slowest link of each hop but the last is one between nodes."""
    world, count = len(nodes), len(set(nodes))
    if schedule == "ring" or count == 1:
        return [count > 1] * (world - 1)
    width = world // count
    return [step % width == width - 1 for step in range(world - 1)]


def _gathered(one: Pass, load: Load, nodes: Sequence[int], cluster: Cluster) -> tuple[float, float]:
    """Seconds at work, and waiting, of columns that come all at once."""
    world, work = len(nodes), one.products * load.flop / cluster.flop_per_s
    coming = _collective_s(load.columns * one.column_bytes, nodes, cluster)
    waits = max(0.0, coming - cluster.visit_s - work)
    if one.found_bytes:
        waits += _collective_s(load.columns * one.found_bytes, nodes, cluster)
    # One's own columns, and then those of the ranks before and of those after.
    return min(3, world) * cluster.visit_s + world * work, waits


def _collective_s(block_bytes: float, nodes: Sequence[int], cluster: Cluster) -> float:
    """To bring each rank's block to all: over all links of a node at once, as NCCL does it."""
    world, count = len(nodes), len(set(nodes))
    messages = math.ceil(math.log2(max(2, world)))
    inside = cluster.inside.seconds((world - 1) * block_bytes, messages)
    if count == 1:
        return inside
    width = world / count
    return max(inside, cluster.between.seconds((world - width) / width * block_bytes, messages))


def choose(load: Load, nodes: Sequence[int], cluster: Cluster, workspace_bytes: int) -> Schedule:
    """The fastest schedule by estimate; gathering only where the columns fit into its room."""
    if len(nodes) == 1:
        return Schedule("ring", "a ring of one has nothing to send")
    if not load.columns:
        return Schedule("ring", "there is nothing to send")
    levels = len(set(nodes)) > 1 and refusal("two-level", nodes) is None
    # Of two that cost the same the first is taken.
    names = ["two-level", "ring"] if levels else ["ring"]
    told, found = "", estimate("gather", load, nodes, cluster)
    room_bytes = GATHER_ROOM * workspace_bytes
    if found.extra_bytes <= room_bytes:
        names.append("gather")
    else:
        told = (
            f"; gathering would take {found.extra_bytes / 2**20:,.0f} MiB, more than "
            f"{room_bytes / 2**20:,.0f}, {GATHER_ROOM} times the workspace"
        )
    estimates = [estimate(name, load, nodes, cluster) for name in names]
    best = min(estimates, key=lambda one: one.seconds)
    return Schedule(best.schedule, "estimated " + "; ".join(map(str, estimates)) + told)


def refusal(schedule: str, nodes: Sequence[int]) -> str | None:
    """Why a schedule cannot be had on such nodes, or None."""
    counts = {nodes.count(node) for node in set(nodes)}
    if schedule == "two-level" and len(counts) > 1:
        return f"it needs as many ranks on every node, got {sorted(counts)}"
    return None
