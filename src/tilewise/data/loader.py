"""Batches of a rank, step after step, loaded ahead: the same ones whatever the ranks and
workers.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tilewise.data.order import Order, Whole, uniforms
from tilewise.data.samples import Sample, Source
from tilewise.errors import DataError

CHUNK = 128  # samples that a worker loads at a time
TOKENS = (torch.int32, torch.int64, torch.bool)  # and their masks
SUBSTITUTES = 32  # samples that are tried in place of a damaged one

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """How samples become the inputs of a model."""

    prepare: Callable[[Sample, NDArray[np.float64]], dict[str, Any]]
    """A sample and its chances, numbers in [0, 1) -> what `collate` puts together."""
    collate: Callable[[list[dict[str, Any]]], Inputs]
    """Several of those -> tensors with a row for each."""
    chances: int
    """How many numbers a sample takes."""


class Batch(NamedTuple):
    """What one rank has of one step."""

    inputs: Inputs  # of n rows each
    ids: Tensor  # (n,) int64
    bad: Counter[str]  # damaged samples that others stand in for, by kind


class _Chunks(Dataset["Batch | DataError"]):
    """Chunks by the position of their first sample and their size; or what is wrong with the data,
    which a worker would raise with all of its own traceback for a message.
    """

    def __init__(self, source: Source, form: Form, order: Order) -> None:
        self.source, self.form, self.order = source, form, order

    def __getitem__(self, where: tuple[int, int]) -> Batch | DataError:
        first, size = where
        epochs, indices = self.order.at(np.arange(first, first + size))
        chances = uniforms(self.order.seed, epochs, indices, self.form.chances)
        try:
            return load(self.source, self.form, indices, chances)
        except DataError as error:
            return error


def load(
    source: Source, form: Form, indices: Whole | Sequence[int], chances: NDArray[np.float64]
) -> Batch:
    """These samples; for a damaged one another that is not."""
    bad: Counter[str] = Counter()
    prepared, ids = [], []
    for index, own in zip(indices, chances, strict=True):
        sample, ready = _sound(source, form, (int(index), own), bad)
        prepared.append(ready)
        ids.append(sample["id"])
    return Batch(form.collate(prepared), torch.tensor(ids, dtype=torch.int64), bad)


def _sound(
    source: Source, form: Form, at: tuple[int, NDArray[np.float64]], bad: Counter[str]
) -> tuple[Sample, dict[str, Any]]:
    index, chances = at
    for tried, place in enumerate(_places(index, chances, len(source))):
        try:
            sample = source[place]
            return sample, form.prepare(sample, chances)
        except DataError as error:
            bad[error.kind] += not tried  # one sample is missed, however many are tried
            last = error
    raise DataError(
        f"sample {index} is damaged, and so are {SUBSTITUTES} others that were drawn to stand in "
        f"for it; the last: {last}; most samples must be sound: repair the data, or name others"
    ) from last


def _places(index: int, chances: NDArray[np.float64], count: int) -> Iterator[int]:
    """A sample's place, and those that stand in for it: anywhere, since damage comes in runs.

    They follow from its chances, and so from seed, epoch and index.
    """
    yield index
    drawn = uniforms(index, chances[:1].view(np.int64), np.zeros(1, np.int64), SUBSTITUTES)
    yield from (drawn[0] * count).astype(np.int64).tolist()


def join(chunks: Sequence[Inputs], buffers: "Buffers | None" = None) -> Inputs:
    """One after the other; shorter texts are filled up with zeros."""
    kinds = sorted({_kind(chunk) for chunk in chunks})
    if len(kinds) > 1:
        found = (", ".join(f"{name} {shape}" for name, shape in kind) for kind in kinds)
        raise DataError(
            "all samples must have the same fields, and as many hard negatives, got "
            + " and ".join(found)
        )
    joined = {}
    for name in chunks[0]:
        parts = [chunk[name] for chunk in chunks]
        longest = max(part.shape[-1] for part in parts) if parts[0].ndim > 1 else 0
        if longest:
            parts = [functional.pad(part, (0, longest - part.shape[-1])) for part in parts]
        if buffers is None:
            joined[name] = torch.cat(parts)
        else:
            shape = (sum(map(len, parts)), *parts[0].shape[1:])
            joined[name] = torch.cat(parts, out=buffers.take(name, shape, parts[0].dtype))
    return joined


def _kind(chunk: Inputs) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names of inputs, and what of their shapes must not differ: of tokens all but how many."""
    return tuple(
        (name, tuple(x.shape[1:-1] if x.dtype in TOKENS else x.shape[1:]))
        for name, x in sorted(chunk.items())
    )


class Buffers:
    """Pinned memory for batches, two of a kind in turns: one is read while the other is filled."""

    def __init__(self) -> None:
        self.known: dict[str, list[Tensor]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory that was last given out two calls ago."""
        pair = self.known.setdefault(name, [])
        old = pair.pop(0) if len(pair) == 2 else None
        fits = old is not None and tuple(old.shape) == shape and old.dtype == dtype
        new = old if old is not None and fits else torch.empty(shape, dtype=dtype, pin_memory=True)
        pair.append(new)
        return new


def _as_it_is(batch: Any) -> Any:
    """In place of what DataLoader does to whatever it meets: it would count damaged samples
    twice.
    """
    return batch


def _keep_apart(worker: int) -> None:
    """Ctrl-C and torchrun signal all processes of a group: the run decides when loading ends."""
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Batches from any step on: `for batch in batches.since(step)`, without an end."""

    source: Source
    form: Form
    order: Order
    size: int
    """Samples of a step, over all ranks."""
    rank: int = 0
    world: int = 1
    workers: int = 0
    """Processes; with none, a thread."""
    pin: bool = False
    """Whether for a GPU."""
    bad: Counter[str] = field(default_factory=Counter)
    """Damaged samples so far, by kind."""

    def local_size(self) -> int:
        """Samples of this rank: those that are left over go to the first ranks."""
        return self.size // self.world + (self.rank < self.size % self.world)

    def since(self, step: int) -> Iterator[Batch]:
        """The batches of this rank."""
        buffers = Buffers() if self.pin else None
        per_step = -(-self.local_size() // CHUNK)
        loader: DataLoader[Batch | DataError] = DataLoader(
            _Chunks(self.source, self.form, self.order),
            batch_size=None,
            collate_fn=_as_it_is,
            sampler=_Places(self, step),
            num_workers=self.workers,
            worker_init_fn=_keep_apart,
            prefetch_factor=-(-per_step // self.workers) + 1 if self.workers else None,
        )
        chunks = iter(loader)

        def following() -> Batch:
            parts = [_sure(next(chunks)) for _ in range(per_step)]
            bad = sum((part.bad for part in parts), Counter[str]())
            ids = torch.cat([part.ids for part in parts])
            return Batch(join([part.inputs for part in parts], buffers), ids, bad)

        with ThreadPoolExecutor(1, thread_name_prefix="tilewise-data") as thread:
            coming = thread.submit(following)
            while True:
                batch = coming.result()
                coming = thread.submit(following)
                self.bad.update(batch.bad)
                yield batch


def _sure(part: Batch | DataError) -> Batch:
    if isinstance(part, DataError):
        raise part
    return part


class _Places:
    """(first position, size) of every chunk of a rank, step after step."""

    def __init__(self, batches: Batches, step: int) -> None:
        self.batches, self.step = batches, step

    def __iter__(self) -> Iterator[tuple[int, int]]:
        own = self.batches
        before = own.rank * (own.size // own.world) + min(own.rank, own.size % own.world)
        step = self.step
        while True:
            begin = step * own.size + before
            end = begin + own.local_size()
            yield from ((at, min(CHUNK, end - at)) for at in range(begin, end, CHUNK))
            step += 1


class _Tolerant(Dataset["Sample | DataError"]):
    """Samples as they are prepared, or what is wrong with them."""

    def __init__(self, source: Source, prepare: Callable[[Sample], Sample]) -> None:
        self.source, self.prepare = source, prepare

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> "Sample | DataError":
        try:
            return self.prepare(self.source[index])
        except DataError as error:
            return error


def in_order(
    source: Source,
    batches: Sequence[range],
    prepare: Callable[[Sample], Sample],
    workers: int = 0,
) -> Iterator[tuple[list[Sample], list[DataError]]]:
    """Samples by their places, for evaluation: those that are not damaged, prepared where they are
    loaded, and what is wrong with the others.
    """
    places: Any = batches  # DataLoader is said to take lists only
    loader: DataLoader[Any] = DataLoader(
        _Tolerant(source, prepare), batch_sampler=places, num_workers=workers, collate_fn=list,
        worker_init_fn=_keep_apart,
    )  # fmt: skip
    for found in loader:
        bad = [each for each in found if isinstance(each, DataError)]
        yield [each for each in found if not isinstance(each, DataError)], bad


def moved(inputs: Mapping[str, Tensor], device: torch.device) -> Inputs:
    """On a device."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
