"""A batch as micro-batches that can be read twice, in the same order with the same contents."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.ahead import Make
from tilewise.errors import OptionError, ShapeError
from tilewise.tiles import spans
from tilewise.trees import Tree, is_list, is_sliceable, leaves, length, sizes, take, uncut

Splitter = Callable[[Any, int], Sequence[Tree]]  # (inputs, micro-batch) -> micro-batches


class Piece(NamedTuple):
    """One encoder's part of a micro-batch."""

    slot: int  # which encoder
    make: Make  # its inputs
    last: bool  # whether this encoder has no more
    counted: bool = True  # whether the first dimension of inputs is that of samples


class Batch(Protocol):
    """The inputs of all encoders."""

    count: int | None  # of all pieces, where known
    reading: int | None  # which micro-batch of an iterable, at the moment

    def times(self, slot: int) -> float:
        """How many times an encoder's first piece all of them are, as far as is known."""

    def read(self) -> Iterator[Piece]:
        """All pieces, the same every time."""


class Cut(NamedTuple):
    """One encoder's inputs in pieces."""

    pieces: list[Make]
    times: float  # the first piece that all are
    counted: bool = True  # as a piece's


class Split:
    """Inputs in memory, one for each encoder, cut into micro-batches; encoder by encoder."""

    reading: int | None = None

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self.cuts = cuts
        self.count: int | None = sum(len(cut.pieces) for cut in cuts)

    def times(self, slot: int) -> float:
        return self.cuts[slot].times

    def read(self) -> Iterator[Piece]:
        for slot, cut in enumerate(self.cuts):
            for i, make in enumerate(cut.pieces, 1):
                yield Piece(slot, make, i == len(cut.pieces), cut.counted)


class Stream:
    """An iterable of micro-batches, each a tuple of one input for each encoder.

    It is read with the random state that it was read with the first time, which is not the
    encoders': a shuffling, augmenting loader gives the same samples again.
    """

    count: int | None = None

    def __init__(self, source: Iterable[Tree] | Callable[[], Iterator[Tree]], slots: int) -> None:
        self.source, self.slots = source, slots
        self.seed = int(torch.randint(2**62, (), device="cpu"))
        self.reading: int | None = None

    def times(self, slot: int) -> float:
        return 1.0

    def read(self) -> Iterator[Piece]:
        dice = torch.Generator("cpu").manual_seed(self.seed).get_state()
        self.reading = 0
        items, dice = _apart(lambda: iter(_opened(self.source)), dice)
        item, dice = _apart(lambda: next(items, _END), dice)
        places = _Places()
        for number in count(1):
            if item is _END:
                break
            places.check(item)
            self.reading = number
            following, dice = _apart(lambda: next(items, _END), dice)
            self.reading = None
            for slot, inputs in enumerate(self._parts(item)):
                yield Piece(slot, partial(take, inputs, slice(None)), following is _END)
            item = following

    def _parts(self, item: Tree) -> tuple[Tree, ...]:
        if item is None:
            raise ShapeError("a micro-batch of the iterator must hold samples, got None; skip it")
        if self.slots == 1:
            # What a DataLoader makes of several tensors, or of tensors and texts, is a list.
            some = isinstance(item, list) and any(isinstance(x, Tensor) for x in item)
            several = some and all(isinstance(x, Tensor) or is_list(x) for x in item)
            return (tuple(item) if several else item,)
        if not isinstance(item, (tuple, list)) or len(item) != self.slots:
            got = f"{len(item)} entries" if isinstance(item, (tuple, list)) else type(item).__name__
            raise ShapeError(
                f"a micro-batch of the iterator must be a tuple with one entry for each of "
                f"{self.slots} encoders, got {got}"
            )
        return tuple(item)


_END = object()


class _Places:
    """Where the last micro-batches lie: the next two are read while one is at work."""

    def __init__(self) -> None:
        self.last: list[dict[int, tuple[Any, object]]] = []

    def check(self, item: Tree) -> None:
        """Raise if it lies where another did; a tensor that did not change may come again."""
        here = {_address(x): (x, _state(x)) for x in leaves(item) if _address(x)}
        for place, (_, state) in here.items():
            if any(place in other and other[place][1] != state for other in self.last):
                raise OptionError(
                    "micro-batches of an iterable must have memory of their own, got two in the "
                    "same: the next are read ahead; clone what is yielded"
                )
        self.last = [*self.last[-2:], here]


def _state(x: Any) -> object:
    """Equal while a tensor's memory is not written to; of an array nobody knows."""
    return (x.untyped_storage()._cdata, x._version) if isinstance(x, Tensor) else object()


def _address(x: Any) -> int:
    """Where a tensor or an array lies; 0 for nothing."""
    if isinstance(x, Tensor):
        return x.data_ptr() if x.numel() else 0
    found = getattr(x, "__array_interface__", None)
    return int(found["data"][0]) if found and getattr(x, "size", 0) else 0


def _same(tree: Tree) -> Tree:
    return tree


def _apart(call: Callable[[], Any], dice: Tensor) -> tuple[Any, Tensor]:
    """What a call returns and the random state it leaves, without touching that of others."""
    others = torch.get_rng_state()
    torch.set_rng_state(dice)
    try:
        return call(), torch.get_rng_state()
    finally:
        torch.set_rng_state(others)


def _opened(source: Any) -> Iterable[Tree]:
    opened: Iterable[Tree] = source() if callable(source) else source
    return opened


def make_batch(
    inputs: tuple[Any, ...], slots: int, micro_batch: Sequence[int], split: Splitter | None
) -> Batch:
    """One input for each encoder, or one iterable of micro-batches for all of them."""
    if len(inputs) == 1 and split is None and _is_stream(inputs[0]):
        return Stream(inputs[0], slots)
    if len(inputs) != slots:
        raise OptionError(
            f"a step takes one input for each of its {slots} encoders, or one iterable of "
            f"micro-batches for all; got {len(inputs)} inputs"
        )
    odd = [not is_sliceable(x) for x in inputs]
    return Split([
        _cut(f"input {slot}", x, micro_batch[slot], split if odd[slot] or not any(odd) else None)
        for slot, x in enumerate(inputs)
    ])  # fmt: skip


def _is_stream(source: Any) -> bool:
    # A few that could be read as micro-batches, and are samples if anything.
    samples = (Tensor, list, tuple, Mapping, Set, str, range, deque)
    if isinstance(source, samples) or is_sliceable(source):
        return False
    if not callable(source) and not isinstance(source, Iterable):
        return False
    if isinstance(source, Iterator):
        raise OptionError(
            f"micro-batches are read twice, got a {type(source).__name__} that can be read once; "
            "pass what it was made of (a DataLoader), or a function that makes it"
        )
    return True


def _cut(name: str, inputs: Tree, step: int, split: Splitter | None) -> Cut:
    if split is not None:
        pieces = list(split(inputs, step))
        if not pieces:
            raise ShapeError(f"split must give micro-batches, got none for {name}")
        return Cut([partial(_same, piece) for piece in pieces], len(pieces), counted=False)
    if not is_sliceable(inputs):
        raise OptionError(
            f"{name} must be a tensor, array, list, tuple or mapping of those, got "
            f"{next(uncut(inputs))}; pass split= to say how it is cut"
        )
    size = length(inputs)
    if size is None:
        raise ShapeError(
            f"all parts of {name} must have the same number of samples as their first dimension, "
            f"got {[n if n >= 0 else 'none' for n in sizes(inputs)]}; pass what all samples share "
            "by a function around the encoder, or split= for anything else"
        )
    if size < 1:
        raise ShapeError(f"{name} must not be empty, got no samples; skip an empty batch")
    cuts: list[Make] = [partial(take, inputs, slice(*span)) for span in spans(size, step)]
    return Cut(cuts, size / min(size, step))
