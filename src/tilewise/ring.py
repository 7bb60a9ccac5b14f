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
    # What came along, and what was found here; the backend's merge, or Tensor.add_.
    join: Callable[[Tensor, Tensor], Tensor]
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
    """One way round. At step s the columns of rank owners[s] are here; for each slice k of them:

        hand on   slice k goes to the next rank, slice k of the next columns comes,
        visit     the caller works on it,
        follow    what was found about it, here and before, goes after it; that of the next comes.

    All ranks post the same messages in the same order, as NCCL needs it and TORCH_DISTRIBUTED_DEBUG
    checks it: one that has no slice k, its columns being fewer, sends or receives a number instead.
    """

    def __init__(self, ring: Ring, cargo: Parts, carry: Carry | None) -> None:
        self.ring, self.cargo, self.carry = ring, cargo, carry
        self.route = route_of(ring.rank, ring.nodes)
        height = slice_height(cargo[0], ring.sizes)
        cut = [[slice(*span) for span in spans(size, height)] for size in ring.sizes]
        self.cuts = [cut[owner] for owner in self.route.owners]  # of the columns here, by step
        self.count = max(map(len, cut))  # messages of a step
        self.slots = _Slots(min(height, max(ring.sizes)))
        self.leaving: list[Message] = []  # with what was found, the last two

    def visits(self) -> Iterator[Visit]:
        here, behind = yield from self._stay()
        for step in range(1, self.ring.world):
            here, behind = yield from self._pass(step, here, behind)
        if self.carry is not None:
            home = [x for parts in _arrived(behind, self.cuts[0]) for x in parts]
            # What is in one piece may stay: without the rest of a slot that it does not fill.
            fills = len(home) != 1 or len(self.slots.whole(home[0])) == len(home[0])
            self.carry.home = home if fills else [home[0].clone()]

    def _stay(self) -> Step:
        """Look at one's own columns, all at once, while they set out."""
        mine, coming = self.cuts[:2]
        here = [tuple(x[cut] for x in self.cargo) for cut in mine]
        ahead = [self._hand_on(0, k, here) for k in range(self.count)]
        visit = Visit(True, self.cargo)
        yield visit
        found = [] if visit.found is None else [visit.found[cut] for cut in mine]
        self.slots.adopt(found)
        visit.found, behind = None, list[Message]()
        for k in range(self.count):
            behind.append(self._follow(0, k, found[k] if k < len(found) else None))
        return _arrived(ahead, coming), behind

    def _pass(self, step: int, here: list[Parts], behind: list[Message]) -> Step:
        """Look at another's columns, slice by slice, while they and the next ones move on."""
        ahead, following = list[Message](), list[Message]()
        for k in range(self.count):
            ahead.append(self._hand_on(step, k, here))
            found = None
            if k < len(here):
                visit = Visit(False, here[k])
                yield visit
                if self.carry is not None and visit.found is not None:
                    self.slots.give_back(behind[k])
                    found = self.carry.join(behind[k].received[0], visit.found)
                # Nothing of it is needed any more.
                behind[k], visit.found, here[k] = Message(()), None, ()
            following.append(self._follow(step, k, found))
            # Once it has left, its memory is free for the slice after the next.
            ahead[k].wait()
        # Those without an answer too: what is dropped before it has left is lost.
        _arrived(behind, [])
        return _arrived(ahead, self.cuts[step + 1]), following

    def _hand_on(self, step: int, k: int, here: list[Parts]) -> Message:
        """Send slice k of the columns that are here, receive that of the next."""
        if step == self.ring.world - 1:  # what would come next is one's own
            return Message(())
        coming = self.cuts[step + 1]
        send = here[k] if k < len(here) else self._numbers()
        fill = self._empty(coming[k]) if k < len(coming) else self._numbers()
        return self.ring.exchange(self._neighbours(step), send, fill)

    def _follow(self, step: int, k: int, found: Tensor | None) -> Message:
        """Send what was found about slice k, receive what was about that of the next."""
        if self.carry is None or self.ring.world == 1:
            return Message(() if found is None else (found,))
        # Two are on their way; what comes takes the place of what has left before.
        if len(self.leaving) == 2:
            self.slots.give_back(self.leaving.pop(0))
        like, coming = self.carry.like, self.cuts[step + 1]
        fill = self.slots.take(_length(coming[k]), like) if k < len(coming) else like.new_zeros(1)
        send = like.new_zeros(1) if found is None else found
        self.leaving.append(self.ring.exchange(self._neighbours(step), [send], [fill]))
        return self.leaving[-1]

    def _neighbours(self, step: int) -> tuple[int, int]:
        return self.route.after[step], self.route.before[step]

    def _empty(self, cut: slice) -> Parts:
        return tuple(x.new_empty(_length(cut), *x.shape[1:]) for x in self.cargo)

    def _numbers(self) -> Parts:
        """In place of a slice."""
        return tuple(x.new_zeros(1) for x in self.cargo)


# Returns the next columns, by slice, and what is behind them: messages of what was found so far.
Step = Generator[Visit, None, tuple[list[Parts], list[Message]]]


def _arrived(messages: list[Message], cuts: list[slice]) -> list[Parts]:
    """What came of each slice, once all has come and gone."""
    return [message.wait() for message in messages][: len(cuts)]


class _Slots:
    """Memory for what is found about slices, used again once what was in it has left."""

    def __init__(self, height: int) -> None:
        self.height = height
        self.known: dict[int, Tensor] = {}  # all of each, by where it begins
        self.free: list[Tensor] = []

    def adopt(self, tensors: list[Tensor]) -> None:
        """Count memory among the slots that somebody else has made."""
        self.known |= {x.data_ptr(): x for x in tensors}

    def take(self, size: int, like: Tensor) -> Tensor:
        """Room for so many columns: of the smallest slot that is free, or of a new one."""
        fits = [i for i, slot in enumerate(self.free) if len(slot) >= size]
        if fits:
            return self.free.pop(min(fits, key=lambda i: len(self.free[i])))[:size]
        slot = like.new_empty(self.height, *like.shape[1:])
        self.adopt([slot])
        return slot[:size]

    def whole(self, x: Tensor) -> Tensor:
        """All of the slot of which x is the beginning; x itself of other memory."""
        return self.known.get(x.data_ptr(), x)

    def give_back(self, message: Message) -> None:
        """What it sent lies in memory that can be used again, but for a number."""
        sent = (self.whole(x) for x in message.release())
        self.free += (x for x in sent if x.dim() > 1)


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
        if carry.join is Tensor.add_:
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
