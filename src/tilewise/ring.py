"""Every rank's columns pass by once, the next ones in flight: all that is sent.

Rows stay. In a ring columns go from rank to rank slice by slice, and what is found out about them
(their sums, their gradients) follows a slice behind and is home after the last step. Gathered, all
columns come at once, and what is found out about them goes home at once. Alone, a ring is its own
columns and nothing else.
"""

from __future__ import annotations  # a torch without torch.distributed has not all these names

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.groups import Group, find, watched
from tilewise.routes import route_of
from tilewise.tiles import spans

Parts = tuple[Tensor, ...]

# Of columns that are on their way at a time. A few slices of a block will do, of about so many
# bytes at least, as each visit costs, and twice as many at most, as each takes memory.
SLICE_BYTES = 2**25
NUM_SLICES = 4


def slice_height(features: Tensor, sizes: Sequence[int]) -> int:
    """Columns of a slice: by what all ranks know, so that all ways round are cut alike.

    A power of two, so that tiles of any size fit.
    """
    if len(sizes) == 1:
        return max(1, sizes[0])
    least = max(1, SLICE_BYTES // (features.element_size() * features.shape[1]))
    height = min(max(least, max(sizes) // NUM_SLICES), 2 * least)
    return 1 << height.bit_length() - 1


@dataclass
class Visit:
    """Some columns, passing by."""

    own: bool  # this rank's, all of them at once: always the first
    cargo: Parts  # tensors (m, ...)
    found: Tensor | None = None  # about them, to be filled in where there is a `Carry`


@dataclass
class Carry:
    """What follows the columns: of m columns a tensor (m, ...)."""

    like: Tensor  # an empty one
    join: Callable[[Tensor, Tensor], Tensor]  # what came along, and what was found here
    adds: bool = False  # whether joining is adding
    home: list[Tensor] = field(default_factory=list)  # about one's own, once all have passed


@dataclass
class Message:
    """What was sent and what is to come, until it has."""

    received: Parts
    sent: Parts = ()  # held until it has left
    works: Sequence[dist.Work] = ()
    watch: Callable[[Callable[[], Any]], Any] = lambda call: call()  # says whom it waits for

    def wait(self) -> Parts:
        """What came; raises if a neighbour does not answer."""
        self.release()
        return self.received

    def release(self) -> Parts:
        """The memory of what was sent, free again once it has left."""
        self.watch(lambda: [work.wait() for work in self.works])
        sent, self.works, self.sent = self.sent, (), ()
        return sent


class Ring:
    """The ranks of a group in a circle, or in one of circles."""

    def __init__(self, group: Group | None, sizes: Sequence[int], nodes: Sequence[int]) -> None:
        """`sizes`: how many columns each rank has; `nodes`: which it is on; by rank in the group.

        Without nodes columns do not go round but are gathered.
        """
        self.group: Group = group
        self.sizes, self.nodes = list(sizes), tuple(nodes)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = len(self.sizes)
        self.sent_bytes = 0

    def visits(self, cargo: Parts, carry: Carry | None = None) -> Iterator[Visit]:
        """This rank's own columns, tensors (m, ...), and then the others', in slices."""
        way = _Passage if self.nodes else _Gathering
        return way(self, cargo, carry).visits()

    def exchange(
        self, ranks: tuple[int, int], to_send: Sequence[Tensor], to_fill: Sequence[Tensor]
    ) -> Message:
        """Send to one rank and receive from another, in the background."""
        if self.world == 1:
            return Message(tuple(to_send))
        after, before = (dist.get_global_rank(self.group, rank) for rank in ranks)
        sent = tuple(x.contiguous() for x in to_send)
        operations = [dist.P2POp(dist.isend, x, after, self.group) for x in sent]
        operations += [dist.P2POp(dist.irecv, x, before, self.group) for x in to_fill]
        self.sent_bytes += sum(map(_bytes, sent))
        names = (
            f"rank {dist.get_rank()} sent to rank {after} and waited for rank {before}, and one of "
            "them did not answer; look at what it printed, and start all ranks again"
        )
        watch = functools.partial(watched, self.group, names)
        works = watch(lambda: dist.batch_isend_irecv(operations))
        return Message(tuple(to_fill), sent, works, watch)

    def collect(self, call: Callable[..., Any], size: int, x: Tensor) -> Message:
        """A collective of all ranks that makes (size, ...) of x, in the background."""
        out = x.new_empty(size, *x.shape[1:])
        names = (
            f"rank {dist.get_rank()} waited for all ranks, and one did not answer; look at what "
            "the others printed, and start all ranks again"
        )
        self.sent_bytes += max(_bytes(x), _bytes(out)) // self.world * (self.world - 1)
        watch = functools.partial(watched, self.group, names)
        work = watch(lambda: call(out, x, group=self.group, async_op=True))
        return Message((out,), (x,), [work], watch)


class _Passage:
    """One way round. All ranks post the same messages in the same order, as NCCL needs it.

    And as TORCH_DISTRIBUTED_DEBUG checks it: one that has no slice left sends a number instead.
    """

    def __init__(self, ring: Ring, cargo: Parts, carry: Carry | None) -> None:
        self.ring, self.cargo, self.carry = ring, cargo, carry
        self.route = route_of(ring.rank, ring.nodes)
        self.height = slice_height(cargo[0], ring.sizes)
        cut = [[slice(*span) for span in spans(size, self.height)] for size in ring.sizes]
        self.cuts = [cut[owner] for owner in self.route.owners]
        self.count = max(map(len, cut))
        self.slots: dict[int, Tensor] = {}  # memory for what was found, by where it begins
        self.spare: list[Tensor] = []  # of which what was found has left
        self.leaving: list[Message] = []

    def visits(self) -> Iterator[Visit]:
        here, behind = yield from self._stay()
        for step in range(1, self.ring.world):
            here, behind = yield from self._pass(step, here, behind)
        if self.carry is not None:
            home = [x for parts in _arrived(behind, self.cuts[0]) for x in parts]
            slot = self.slots.get(home[0].data_ptr(), home[0]) if len(home) == 1 else None
            # What is in one piece may stay: without the rest of a slot that it does not fill.
            fills = slot is None or len(slot) == len(home[0])
            self.carry.home = home if fills else [home[0].clone()]

    def _stay(self) -> Step:
        """Look at one's own columns while they set out."""
        mine, coming = self.cuts[:2]
        here = [tuple(x[cut] for x in self.cargo) for cut in mine]
        ahead = [self._hand_on(0, here[k : k + 1], k) for k in range(self.count)]
        visit = Visit(True, self.cargo)
        yield visit
        found = [] if visit.found is None else [visit.found[cut] for cut in mine]
        self.slots = {x.data_ptr(): x for x in found}
        visit.found, behind = None, list[Message]()
        for k in range(self.count):
            self._follow(0, found[k : k + 1], behind)
        return _arrived(ahead, coming), behind

    def _pass(self, step: int, here: list[Parts], behind: list[Message]) -> Step:
        """Look at another's columns, slice by slice, while they and the next ones move on."""
        mine, coming = self.cuts[step : step + 2]
        ahead, following = list[Message](), list[Message]()
        for k in range(self.count):
            ahead.append(self._hand_on(step, here[k : k + 1], k))
            found = []
            if k < len(mine):
                visit = Visit(False, here[k])
                yield visit
                if self.carry is not None and visit.found is not None:
                    self._free(behind[k])
                    found = [self.carry.join(behind[k].received[0], visit.found)]
                # Nothing of it is needed any more.
                behind[k : k + 1], visit.found, here[k] = [Message(())], None, ()
            self._follow(step, found, following)
            # Once it has left, its memory is free for the slice after the next.
            ahead[k].wait()
        # Those without an answer too: what is dropped before it has left is lost.
        _arrived(behind, [])
        return _arrived(ahead, coming), following

    def _hand_on(self, step: int, parts: list[Parts], k: int) -> Message:
        """Send slice k of the columns that are here, receive that of the next."""
        if step == self.ring.world - 1:  # what would come next is one's own
            return Message(())
        to_fill = [self._empty(cut) for cut in self.cuts[step + 1][k : k + 1]]
        send, fill = (
            some[0] if some else tuple(x.new_zeros(1) for x in self.cargo)
            for some in (parts, to_fill)
        )
        return self.ring.exchange(self._neighbours(step), send, fill)

    def _follow(self, step: int, found: list[Tensor], following: list[Message]) -> None:
        """Send what was found about a slice, receive what was about that of the next."""
        if self.carry is None or self.ring.world == 1:
            following.append(Message(tuple(found)))
            return
        # Two are on their way; what comes takes the place of what has left before.
        if len(self.leaving) == 2:
            self._free(self.leaving.pop(0))
        k = len(following)
        to_fill = [self._slot(_length(cut)) for cut in self.cuts[step + 1][k : k + 1]]
        send, fill = (some or [self.carry.like.new_zeros(1)] for some in (found, to_fill))
        following.append(self.ring.exchange(self._neighbours(step), send, fill))
        self.leaving.append(following[-1])

    def _slot(self, size: int) -> Tensor:
        """Memory for what was found about so many columns: the smallest that is free, or new."""
        assert self.carry is not None
        fits = [i for i, spare in enumerate(self.spare) if len(spare) >= size]
        if fits:
            return self.spare.pop(min(fits, key=lambda i: len(self.spare[i])))[:size]
        height = min(self.height, max(self.ring.sizes))
        slot = self.carry.like.new_empty(height, *self.carry.like.shape[1:])
        self.slots[slot.data_ptr()] = slot
        return slot[:size]

    def _free(self, message: Message) -> None:
        """What it sent lies in memory that can be used again, all of it where part was used."""
        sent = (self.slots.get(x.data_ptr(), x) for x in message.release())
        self.spare += (x for x in sent if x.dim() > 1)

    def _neighbours(self, step: int) -> tuple[int, int]:
        return self.route.after[step], self.route.before[step]

    def _empty(self, cut: slice) -> Parts:
        return tuple(x.new_empty(_length(cut), *x.shape[1:]) for x in self.cargo)


Step = Generator[Visit, None, tuple[list[Parts], list[Message]]]


def _arrived(messages: list[Message], cuts: list[slice]) -> list[Parts]:
    """What came of each slice, once all has come and gone."""
    return [message.wait() for message in messages][: len(cuts)]


class _Gathering:
    """All columns at once, each rank's in a room of the same height."""

    def __init__(self, ring: Ring, cargo: Parts, carry: Carry | None) -> None:
        self.ring, self.cargo, self.carry = ring, cargo, carry
        self.height = max(ring.sizes)
        self.own = slice(ring.rank * self.height, ring.rank * self.height + len(cargo[0]))
        self.found: Tensor | None = None  # about all columns (W height, ...)

    def visits(self) -> Iterator[Visit]:
        ring, size = self.ring, self.ring.world * self.height
        coming = [ring.collect(_all_gather(), size, self._padded(x)) for x in self.cargo]
        if self.carry is not None:
            self.found = self.carry.like.new_zeros(size, *self.carry.like.shape[1:])
        yield from self._show(Visit(True, self.cargo), self.own)
        everyone = [coming.pop(0).wait()[0] for _ in self.cargo]
        for cut in self._others():
            yield from self._show(Visit(False, tuple(x[cut] for x in everyone)), cut)
        del everyone
        if self.carry is not None:
            home, size = self._bring_home(self.carry), len(self.cargo[0])
            self.carry.home = [home if len(home) == size else home[:size].clone()]

    def _show(self, visit: Visit, cut: slice) -> Iterator[Visit]:
        yield visit
        if self.found is not None and visit.found is not None:
            self.found[cut] = visit.found
        visit.cargo, visit.found = (), None

    def _others(self) -> Iterator[slice]:
        """Runs of others' columns without a gap, in slices."""
        ring, runs = self.ring, list[tuple[int, int]]()
        for rank, size in enumerate(ring.sizes):
            start = rank * self.height
            if rank == ring.rank or not size:
                continue
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, rank * self.height + size))
        for start, stop in runs:
            for first, last in spans(stop - start, slice_height(self.cargo[0], ring.sizes)):
                yield slice(start + first, start + last)

    def _padded(self, x: Tensor) -> Tensor:
        missing = self.height - len(x)
        return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x.contiguous()

    def _bring_home(self, carry: Carry) -> Tensor:
        """What all ranks found about this one's columns (height, ...)."""
        assert self.found is not None
        if carry.adds:
            return self.ring.collect(_reduce_scatter(), self.height, self.found).wait()[0]
        every = self.ring.collect(dist.all_to_all_single, len(self.found), self.found).wait()[0]
        first, *others = torch.split(every, self.height)
        return functools.reduce(carry.join, others, first)


def _all_gather() -> Callable[..., Any]:
    """Under the name that this torch has for it."""
    new: Any = getattr(dist, "all_gather_single", None)
    return new or dist.all_gather_into_tensor


def _reduce_scatter() -> Callable[..., Any]:
    new: Any = getattr(dist, "reduce_scatter_single", None)
    return new or dist.reduce_scatter_tensor


def _length(cut: slice) -> int:
    return int(cut.stop - cut.start)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def ring_of(name: str, sizes: Sequence[int], nodes: Sequence[int]) -> Ring:
    """The ring of a group by its name; "" for none."""
    if not name:
        return Ring(None, sizes, [0])
    return Ring(find(name), sizes, nodes)
