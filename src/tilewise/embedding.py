"""The first pass of a cached step: features of every micro-batch, graphs of those that fit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tilewise import groups, measure
from tilewise.errors import OptionError
from tilewise.featurebuffers import Features
from tilewise.gradsync import Averager, averagers, forward_of, modules_of
from tilewise.microbatches import Piece
from tilewise.randomness import Dice
from tilewise.trees import Tree, call, map_tensors, tensors

MIB = 2**20
# Of free memory, for "auto": the rest is left to whoever else allocates.
AUTO_SHARE = 0.9
LOSS_BYTES = 256 * MIB  # of a loss at work
# Graphs of an encoder that are measured. The first may hold copies that all share: what autocast
# makes of the weights.
MEASURED = 2


class Towers:
    """Encoders by slot, and what they are made of."""

    def __init__(
        self, encoders: Sequence[Callable[..., Tree] | None], names: Sequence[str]
    ) -> None:
        self.encoders, self.names = encoders, names
        found = (module for encoder in encoders for module in modules_of(encoder))
        self.modules = list({id(module): module for module in found}.values())
        # Of which not all that they train need be known.
        self.functions = {k for k, e in enumerate(encoders) if not isinstance(e, nn.Module)}

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
            return map_tensors(Tensor.detach, inputs)
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
    dice: Dice  # to run it again from
    probe: list[Tensor]  # a few numbers of its features, to be met again
    outputs: list[Tensor] = field(default_factory=list)  # with their graph, where it is kept
    averages: list[Averager] = field(default_factory=list)  # told so in that graph's forward


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
        self.measured: dict[int, int] = {}

    def allows(self, slot: int) -> bool:
        """Whether one more graph of this encoder fits, as far as is known."""
        return self.left > 0 and self.costs.get(slot, 0.0) <= self.left

    @contextmanager
    def measure(self, slot: int, graph: bool) -> Iterator[None]:
        """Find out what the first graphs of an encoder take."""
        if not graph or self.measured.get(slot, 0) == MEASURED:
            yield
            return
        with measure.held_bytes(self.device) as held:
            yield
        largest = max(self.costs.values(), default=0.0)
        cost = -groups.least(-held.bytes) if self.together else held.bytes
        self.costs[slot] = min(cost, self.costs.get(slot, cost))
        self.measured[slot] = self.measured.get(slot, 0) + 1
        if self.auto and self.measured[slot] == 1:
            # One is run again while others are kept, and its backward takes about as much.
            self.left -= 2 * max(0.0, cost - largest)

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
        # The first one of an encoder tells whether it is trained, and what its graph takes.
        first = not features.buffers
        keep = features.trained and self.budget.allows(slot)
        averages = [o for o in self.towers.owners[slot] if keep and self._may_end(o, piece)]
        dice, graph = Dice(), first or keep
        with self.budget.measure(slot, graph):
            out = self.towers.forward(slot, inputs, graph, averages)
        spans = features.add(self.towers.names[slot], out, graph)
        if first:
            self.budget.reserve(sum(x.numel() * x.element_size() for x in features.buffers))
        part = Part(slot, len(self.parts), spans, dice, features.probe(tensors(out)))
        self.parts.append(part)
        if features.trained and keep and (self.budget.take(slot) or averages):
            part.outputs, part.averages = tensors(out), averages
        return out

    def _may_end(self, owner: Averager, piece: Piece) -> bool:
        """Whether a module's last backward may be of this piece, all before it being kept."""
        later = any(owner in owners for owners in self.towers.owners[piece.slot + 1 :])
        earlier = (part for part in self.parts if owner in self.towers.owners[part.slot])
        kept = all(part.outputs or not self.features[part.slot].trained for part in earlier)
        apart = owner.one_by_one or not owner.by_forward
        return piece.last and not apart and not later and kept


def listed(encoders: Any) -> tuple[list[Any], list[str] | None]:
    """One encoder, several, or a mapping of them, as a list, with names if they have any."""
    if isinstance(encoders, (Mapping, nn.ModuleDict)):
        return list(encoders.values()), list(encoders)
    several = isinstance(encoders, (list, tuple, nn.ModuleList))
    if several and not len(encoders):
        raise OptionError("encoders must hold at least one, got none")
    return list(encoders) if several else [encoders], None
