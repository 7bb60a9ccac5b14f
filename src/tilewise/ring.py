"""Every rank's columns pass by once, slice by slice, the next one in flight: all that is sent.

Rows stay. At step t a rank looks at the columns of the rank t places before it in the circle and
hands them on to the next. What is found out about them (their sums, their gradients) follows a
slice behind and is home after the last step. Alone, a ring is its own columns and nothing else.
"""

from __future__ import annotations  # a torch without torch.distributed has not all these names

import contextvars
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.errors import OptionError, RingError
from tilewise.tiles import spans

Group = Any  # a ProcessGroup, or a DeviceMesh of one dimension
Parts = tuple[Tensor, ...]

# Of columns that are on their way at a time.
SLICE_BYTES = 2**26


@dataclass
class Visit:
    """Some columns of one rank, passing by."""

    step: int  # 0: this rank's own, all of them at once
    span: slice  # which of their owner's
    cargo: Parts  # tensors (m, ...)
    found: Tensor | None = None  # about them, to be filled in where there is a `Carry`


@dataclass
class Carry:
    """What follows the columns: of m columns a tensor (m, ...)."""

    like: Tensor  # an empty one
    join: Callable[[Tensor, Tensor], Tensor]  # what came along, and what was found here
    home: Tensor | None = None  # about this rank's own columns, once all have passed


@dataclass
class Message:
    """What was sent and what is to come, until it has."""

    received: Parts
    sent: Parts = ()  # held until it has left
    works: Sequence[dist.Work] = ()
    names: str = ""  # of whom it waits for

    def wait(self) -> Parts:
        """What came; raises if a neighbour does not answer."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise RingError(f"{self.names}: {error}") from error
        self.works, self.sent = (), ()
        return self.received


class Ring:
    """The ranks of a group in a circle."""

    def __init__(self, group: Group | None, sizes: Sequence[int]) -> None:
        """`sizes`: how many columns each rank has, by its rank in the group."""
        self.group: Group = group
        self.sizes = list(sizes)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = len(self.sizes)
        self.sent_bytes = 0

    def visits(self, cargo: Parts, carry: Carry | None = None) -> Iterator[Visit]:
        """This rank's own columns, tensors (m, ...), and then the others', in slices."""
        return _Passage(self, cargo, carry).visits()

    def exchange(self, to_send: Sequence[Tensor], to_fill: Sequence[Tensor]) -> Message:
        """Send to the next rank and receive from the one before, in the background."""
        if self.world == 1:
            return Message(tuple(to_send))
        after, before = (
            dist.get_global_rank(self.group, (self.rank + k) % self.world) for k in (1, -1)
        )
        sent = tuple(x.contiguous() for x in to_send if x.numel())
        operations = [dist.P2POp(dist.isend, x, after, self.group) for x in sent]
        operations += [dist.P2POp(dist.irecv, x, before, self.group) for x in to_fill if x.numel()]
        self.sent_bytes += sum(x.numel() * x.element_size() for x in sent)
        names = (
            f"rank {dist.get_rank()} sent to rank {after} and waited for rank {before}, and one of "
            "them did not answer; look at what it printed, and start all ranks again"
        )
        works = _post(operations, names)
        return Message(tuple(to_fill), sent, works, names)


class _Passage:
    """One way round. All ranks post their messages in the same order, as NCCL needs it."""

    def __init__(self, ring: Ring, cargo: Parts, carry: Carry | None) -> None:
        self.ring, self.cargo, self.carry = ring, cargo, carry
        # By the features alone, so that all ways round are cut alike.
        height = max(1, SLICE_BYTES // (cargo[0].element_size() * cargo[0].shape[1]))
        if ring.world == 1:
            height = max(1, ring.sizes[0])
        cut = [[slice(*span) for span in spans(size, height)] for size in ring.sizes]
        self.cuts = [cut[(ring.rank - step) % ring.world] for step in range(ring.world + 1)]

    def visits(self) -> Iterator[Visit]:
        here, behind = yield from self._stay()
        for step in range(1, self.ring.world):
            here, behind = yield from self._pass(step, here, behind)
        if self.carry is not None:
            parts = [part for message in behind for part in message.wait()]
            self.carry.home = parts[0] if len(parts) == 1 else torch.cat([*parts, self.carry.like])

    def _stay(self) -> Step:
        """Look at one's own columns while they set out."""
        mine, coming = self.cuts[:2]
        count = max(len(mine), len(coming))
        here = [tuple(x[cut] for x in self.cargo) for cut in mine]
        ahead = [self._hand_on(0, here[k : k + 1], k) for k in range(count)]
        visit = Visit(0, slice(0, self.ring.sizes[self.ring.rank]), self.cargo)
        yield visit
        found = [] if visit.found is None else [visit.found[cut] for cut in mine]
        behind = [self._follow(0, found[k : k + 1], k) for k in range(count)]
        visit.found = None
        return _arrived(ahead, coming), behind

    def _pass(self, step: int, here: list[Parts], behind: list[Message]) -> Step:
        """Look at another's columns, slice by slice, while they and the next ones move on."""
        mine, coming = self.cuts[step : step + 2]
        ahead, following = [], []
        for k in range(max(len(mine), len(coming))):
            ahead.append(self._hand_on(step, here[k : k + 1], k))
            found = []
            if k < len(mine):
                visit = Visit(step, mine[k], here[k])
                yield visit
                if self.carry is not None and visit.found is not None:
                    found = [self.carry.join(behind[k].wait()[0], visit.found)]
                # Nothing of it is needed any more.
                behind[k : k + 1], visit.found, here[k] = [Message(())], None, ()
            following.append(self._follow(step, found, k))
            # Once it has left, its memory is free for the slice after the next.
            ahead[k].wait()
        # Those without an answer too: what is dropped before it has left is lost.
        _arrived(behind, [])
        return _arrived(ahead, coming), following

    def _hand_on(self, step: int, parts: list[Parts], k: int) -> Message:
        """Send slice k of the columns that are here, receive that of the next."""
        if step == self.ring.world - 1:  # what would come next is one's own
            return Message(())
        coming = self.cuts[step + 1][k : k + 1]
        return self.ring.exchange(
            [x for part in parts for x in part], [x for cut in coming for x in self._empty(cut)]
        )

    def _follow(self, step: int, found: list[Tensor], k: int) -> Message:
        """Send what was found about slice k, receive what was about that of the next."""
        if self.carry is None:
            return Message(())
        like, coming = self.carry.like, self.cuts[step + 1][k : k + 1]
        to_fill = [like.new_empty(_length(cut), *like.shape[1:]) for cut in coming]
        return self.ring.exchange(found, to_fill)

    def _empty(self, cut: slice) -> Parts:
        return tuple(x.new_empty(_length(cut), *x.shape[1:]) for x in self.cargo)


Step = Generator[Visit, None, tuple[list[Parts], list[Message]]]


def _arrived(messages: list[Message], cuts: list[slice]) -> list[Parts]:
    """What came of each slice, once all has come and gone."""
    return [message.wait() for message in messages][: len(cuts)]


def _length(cut: slice) -> int:
    return int(cut.stop - cut.start)


def _post(operations: list[dist.P2POp], names: str) -> Sequence[dist.Work]:
    try:
        return dist.batch_isend_irecv(operations) if operations else ()
    except RuntimeError as error:
        raise RingError(f"{names}: {error}") from error


# Groups, and what their ranks agree on


def name_of(group: Group | None) -> str:
    """The name under which an op finds a group again; "" for none."""
    if group is None:
        return ""
    group = _process_group(group)
    if dist.get_rank(group) < 0:
        raise OptionError(f"group must have this rank in it, got one without {dist.get_rank()}")
    return str(group.group_name)


def ring_of(name: str, sizes: Sequence[int]) -> Ring:
    """The ring of a group by its name."""
    if not name:
        return Ring(None, sizes)
    find: Any = dist.distributed_c10d.__dict__["_resolve_process_group"]
    return Ring(find(name), sizes)


def world_size(group: Group | None) -> int:
    """How many ranks."""
    return 1 if group is None else dist.get_world_size(_process_group(group))


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
    number = number.detach().clone()
    try:
        dist.all_reduce(number, group=_process_group(group))
    except RuntimeError as error:
        raise RingError(
            f"rank {dist.get_rank()} waited for the sum of all ranks' counts, and one did not "
            f"answer; look at what it printed, and start all ranks again: {error}"
        ) from error
    return number


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


def agree(group: Group, facts: dict[str, object], size: int) -> list[int]:
    """Every rank's `size`, after all have found that they have the same facts in mind.

    A few integers go round; words only where there is something to say.
    """
    whole, call = _process_group(group), calling.get() or Call()
    words = {name: str(fact) for name, fact in (call.facts | facts).items()}
    table = _gather(whole, [0, zlib.crc32(repr(words).encode()), size])
    call.agreed = True
    _refuse_together(whole, table, "")
    if len({row[1] for row in table}) > 1:
        said: list[dict[str, str]] = [{}] * len(table)
        dist.all_gather_object(said, words, group=whole)
        raise RingError(_difference(whole, said))
    return [row[2] for row in table]


def refuse(group: Group, error: Exception) -> None:
    """Tell the other ranks, who wait to agree, that this one cannot go on."""
    whole = _process_group(group)
    _refuse_together(whole, _gather(whole, [1, 0, 0]), f"{type(error).__name__}: {error}")


def _refuse_together(whole: dist.ProcessGroup, table: list[list[int]], reason: str) -> None:
    """Raise the same error on every rank if one has a reason to."""
    if not any(row[0] for row in table):
        return
    reasons: list[str] = [""] * len(table)
    dist.all_gather_object(reasons, reason, group=whole)
    rank = next(rank for rank, text in enumerate(reasons) if text)
    raise RingError(f"rank {dist.get_global_rank(whole, rank)} refused: {reasons[rank]}")


def _gather(whole: dist.ProcessGroup, numbers: list[int]) -> list[list[int]]:
    device = "cuda" if dist.get_backend(whole) == "nccl" else "cpu"
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size(whole))]
    try:
        dist.all_gather(table, mine, group=whole)
    except RuntimeError as error:
        raise RingError(
            f"rank {dist.get_rank()} waited for the others to agree on sizes, and one did not "
            f"answer; every rank must call the same losses in the same order: {error}"
        ) from error
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
    if not dist.is_available() or not dist.is_initialized():
        raise OptionError(
            "group needs torch.distributed, which is not initialised; call "
            "torch.distributed.init_process_group first, or leave group out for a local loss"
        )
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise OptionError(
                f"group as a DeviceMesh must have one dimension, got {group.ndim}; pass mesh['dp']"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            f"group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}; pass "
            "torch.distributed.group.WORLD for all ranks"
        )
    return group
