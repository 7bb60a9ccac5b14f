"""The first pass of a cached step: features of every micro-batch, graphs of those that fit."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tilewise import groups, measure
from tilewise.errors import DtypeError, OptionError, ShapeError
from tilewise.gradsync import Averager, averagers, forward_of, modules_of
from tilewise.microbatches import Piece
from tilewise.randomness import Dice
from tilewise.trees import Tree, call, map_tensors, tensors

MIB = 2**20
# Of free memory, for "auto": the rest is left to whoever else allocates.
AUTO_SHARE = 0.9
LOSS_BYTES = 256 * MIB  # of a loss at work


class Towers:
    """Encoders by slot, and what they are made of."""

    def __init__(
        self, encoders: Sequence[Callable[..., Tree] | None], names: Sequence[str]
    ) -> None:
        self.encoders, self.names = encoders, names
        self.modules = list(
            {id(m): m for encoder in encoders for m in modules_of(encoder)}.values()
        )

    def __len__(self) -> int:
        return len(self.encoders)

    def find_owners(self) -> None:
        """Look for modules that average gradients: they may have been wrapped since last time."""
        self.owners: list[list[Averager]] = averagers(self.encoders)
        self.every_owner = list({id(o): o for owners in self.owners for o in owners}.values())

    def forward(self, slot: int, inputs: Tree, graph: bool, final: Sequence[Averager] = ()) -> Tree:
        """Features of some inputs; those in `final` average gradients in the backward of it."""
        encoder = self.encoders[slot]
        if encoder is None:
            return inputs
        try:
            with torch.set_grad_enabled(graph), forward_of(self.owners[slot], final.__contains__):
                return call(encoder, inputs)
        finally:
            # Without a graph autocast would remember weights that no gradient reaches.
            if not graph:
                torch.clear_autocast_cache()


@dataclass(eq=False)
class Part:
    """A micro-batch of one encoder, embedded."""

    slot: int
    index: int  # among all parts
    spans: list[slice | None]  # rows of each output among those of the batch; None: all share it
    dice: Dice | None = None  # to run it again from; None where that is not needed
    outputs: list[Tensor] = field(default_factory=list)  # with their graph, where it is kept
    probe: list[Tensor] = field(default_factory=list)  # the first row of each, to be met again


class Features:
    """Outputs of one encoder for the whole batch, and their gradients."""

    def __init__(self, device: torch.device, host: bool, times: float) -> None:
        """`times` as much as the first micro-batch's will come, or more."""
        self.device, self.host, self.times = device, host, times
        self.tree: Tree = None  # without the tensors, but at the end
        self.buffers: list[Tensor] = []
        self.rows: list[int] = []
        self.trained = True
        self.grads: list[Tensor | None] = []

    def add(self, out: Tree) -> list[slice | None]:
        """Store a micro-batch's outputs; returns where."""
        parts = tensors(out)
        if not self.buffers:
            self.tree, self.rows = map_tensors(lambda x: x.new_empty(0), out), [0] * len(parts)
            self.trained = any(x.requires_grad for x in parts)
            self.buffers = [self._room(x) for x in parts]
        if [_kind(x) for x in parts] != [_kind(x) for x in self.buffers]:
            raise ShapeError(
                "an encoder must return features of the same shape and dtype every time, got "
                f"{[_kind(x) for x in parts]} after {[_kind(x) for x in self.buffers]}"
            )
        return [self._store(i, x.detach()) for i, x in enumerate(parts)]

    def _store(self, i: int, x: Tensor) -> slice | None:
        if is_shared(x):
            if not self.rows[i]:
                self.buffers[i], self.rows[i] = x.clone(), 1
            return None
        start, stop = self.rows[i], self.rows[i] + len(x)
        if stop > len(self.buffers[i]):
            old, self.buffers[i] = self.buffers[i][:start], self._empty(2 * stop, x)
            self.buffers[i][:start] = old
        self.buffers[i][start:stop].copy_(x, non_blocking=True)
        self.rows[i] = stop
        return slice(start, stop)

    def _room(self, x: Tensor) -> Tensor:
        return x.detach() if is_shared(x) else self._empty(math.ceil(len(x) * self.times), x)

    def _empty(self, size: int, x: Tensor) -> Tensor:
        if not self.host:
            return torch.empty(size, *x.shape[1:], dtype=x.dtype, device=x.device)
        pinned = self.device.type == "cuda"
        return torch.empty(size, *x.shape[1:], dtype=x.dtype, pin_memory=pinned)

    def finish(self) -> list[Tensor]:
        """All features, as leaves of the loss."""
        whole = [
            (x if is_shared(x) else x[:rows]).detach().requires_grad_(self.trained and _floats(x))
            for x, rows in zip(self.buffers, self.rows, strict=True)
        ]
        self.buffers, parts = [], iter(whole)
        self.tree = map_tensors(lambda _: next(parts), self.tree)
        return whole

    @property
    def samples(self) -> int:
        """Rows of the longest of them."""
        return max(self.rows, default=0)


def is_shared(x: Tensor) -> bool:
    """Whether an output is a single number, such as a scale, that belongs to all samples."""
    return x.numel() == 1 and x.dim() <= 1


def probe_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The first row of each output."""
    return [x.detach()[:1].clone() for x in outputs if not is_shared(x) and _floats(x)]


def _kind(x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(x.shape[1:]), x.dtype


def _floats(x: Tensor) -> bool:
    return x.is_floating_point()


class Budget:
    """How many graphs may be kept: in MiB, or "auto", what is free beside what a step needs.

    Modules that talk to other ranks in every forward must run as often as theirs: then all ranks
    keep as many as the one with the least room.
    """

    def __init__(self, keep: float | str, device: torch.device, towers: Towers) -> None:
        self.device, self.auto = device, keep == "auto"
        self.together = any(not owner.by_forward for owner in towers.every_owner)
        self.left = float(keep) * MIB if keep != "auto" else AUTO_SHARE * measure.free_bytes(device)
        if self.auto:
            self.left -= _missing_grad_bytes(towers.modules) + LOSS_BYTES
        self.costs: dict[int, float] = {}

    def allows(self, slot: int) -> bool:
        """Whether one more graph of this encoder fits, as far as is known."""
        return self.left > 0 and self.costs.get(slot, 0.0) <= self.left

    @contextmanager
    def measure(self, slot: int, first: bool) -> Iterator[None]:
        """Find out what the first graph of an encoder takes."""
        if not first:
            yield
            return
        with measure.held_bytes(self.device) as held:
            yield
        if self.auto:
            # A backward takes about as much for gradients, of one graph at a time.
            self.left -= max(0.0, held.bytes - max(self.costs.values(), default=0.0))
        self.costs[slot] = held.bytes
        if self.together:
            self.costs[slot] = -groups.least(-held.bytes)

    def reserve(self, feature_bytes: int) -> None:
        """Leave room for the loss: features, gradients and their sums."""
        if self.auto:
            self.left -= 4 * feature_bytes
        if self.together:
            self.left = groups.least(self.left)

    def take(self, slot: int) -> bool:
        """Whether it fits; if so it is taken."""
        fits = self.costs[slot] <= self.left
        if fits:
            self.left -= self.costs[slot]
        return fits


def _missing_grad_bytes(modules: Sequence[nn.Module]) -> int:
    """What gradients will take that are not there yet."""
    parameters = {id(p): p for module in modules for p in module.parameters()}
    missing = (p for p in parameters.values() if p.requires_grad and p.grad is None)
    return sum(p.numel() * p.element_size() for p in missing)


class Embedding:
    """Features of each encoder, and the parts that gradients go back to."""

    def __init__(self, towers: Towers, features: list[Features], budget: Budget) -> None:
        self.towers, self.features, self.budget = towers, features, budget
        self.parts: list[Part] = []

    def add(self, piece: Piece, inputs: Tree) -> Tree:
        """Embed a micro-batch; returns the outputs."""
        slot, features = piece.slot, self.features[piece.slot]
        first, owners = not features.buffers, self.towers.owners[piece.slot]
        # The first one of an encoder tells whether it is trained, and what its graph takes.
        keep = features.trained and self.budget.allows(slot)
        final = [o for o in owners if keep and piece.last and self._is_final(o, slot)]
        dice = Dice()
        with self.budget.measure(slot, first):
            out = self.towers.forward(slot, inputs, first or keep, final)
        if not tensors(out):
            raise DtypeError(
                f"{self.towers.names[slot]} must return features, a tensor or a tuple or mapping "
                f"of tensors, got {type(out).__name__}"
            )
        part = Part(slot, len(self.parts), features.add(out))
        self.parts.append(part)
        if first:
            self.budget.reserve(sum(x.numel() * x.element_size() for x in features.buffers))
        if features.trained and keep and (self.budget.take(slot) or final):
            part.outputs = tensors(out)
        elif features.trained:
            part.dice, part.probe = dice, probe_of(tensors(out))
        return out

    def _is_final(self, owner: Averager, slot: int) -> bool:
        """Whether a module that averages has all its parts kept, and none to come after this."""
        later = any(owner in owners for owners in self.towers.owners[slot + 1 :])
        earlier = (part for part in self.parts if owner in self.towers.owners[part.slot])
        return owner.by_forward and not later and all(part.outputs for part in earlier)


def listed(encoders: Any) -> tuple[list[Any], list[str] | None]:
    """One encoder, several, or a mapping of them, as a list, with names if they have any."""
    if isinstance(encoders, (Mapping, nn.ModuleDict)):
        return list(encoders.values()), list(encoders)
    several = isinstance(encoders, (list, tuple, nn.ModuleList))
    if several and not len(encoders):
        raise OptionError("encoders must hold at least one, got none")
    return list(encoders) if several else [encoders], None
