"""The first pass of a cached step: features of every micro-batch, graphs of those that fit."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tilewise import groups, measure
from tilewise.errors import OptionError
from tilewise.featurebuffers import Features, Probe
from tilewise.gradsync import (
    Averager,
    all_quiet,
    modules_of,
    noticing,
    share_buffers,
    within,
)
from tilewise.microbatches import Piece
from tilewise.randomness import Dice, Place, State, all_buffers
from tilewise.stepchecks import (
    refuse_batch_norm,
    refuse_bypassed,
    refuse_scattered,
    refuse_unknown_averagers,
)
from tilewise.trees import Tree, call, length, map_tensors, tensors

MIB = 2**20
# Of free memory, for "auto": the rest is left to whoever else allocates.
AUTO_SHARE = 0.9
LOSS_BYTES = 256 * MIB  # of a loss at work


class Towers:
    """Encoders by slot, and what they are made of."""

    def __init__(
        self,
        encoders: Sequence[Callable[..., Tree] | None],
        names: Sequence[str],
        batch_norm: bool = False,
    ) -> None:
        self.encoders, self.names, self.batch_norm = encoders, names, batch_norm
        found = (module for encoder in encoders for module in modules_of(encoder))
        self.modules = list({id(module): module for module in found}.values())
        # Slots whose encoder is no nn.Module: it may train parameters that nobody can list.
        self.functions = {k for k, e in enumerate(encoders) if not isinstance(e, nn.Module)}
        # Slots all of whose outputs had a gradient when they were last run with a graph; cleared
        # when a parameter is frozen or unfrozen.
        self.trains_all: set[int] = set()
        # By slot: buffers that its forward changes, once it was seen to.
        self.changing: dict[int, list[Place]] = {}
        # By slot: a buffer that its forward changes without autograd's notice. A kept graph would
        # use the changed one in silence.
        self.unkept: dict[int, str] = {}
        self.modes: list[tuple[int, bool]] = []
        self.to_train: list[bool] = []

    def __len__(self) -> int:
        return len(self.encoders)

    def look(self) -> None:
        """Walk through all modules, once a step: they may have been changed since last time."""
        self.parts = _walked(self.modules)
        self._check(self.parts)
        share_buffers(self.parts)
        owned = (p for part in self.parts for p in part._parameters.values() if p is not None)
        self.parameters = list({id(p): p for p in owned}.values())
        before, self.to_train = self.to_train, [p.requires_grad for p in self.parameters]
        if self.to_train != before:
            self.trains_all.clear()
        modes = _modes(self.parts)
        if modes != self.modes:
            self.modes = modes
            self.changing.clear()
            self.unkept.clear()
        self.known: list[list[Averager] | None] = [within(encoder) for encoder in self.encoders]

    def state_of(self, slot: int) -> State:
        """What a forward of this encoder may change, as it is now; all there is, if unknown."""
        places = self.changing.get(slot)
        return State(all_buffers(self.parts) if places is None else places)

    def least(self, number: float) -> float:
        """The smallest of all ranks that modules talk to in every forward."""
        sharded = [owner.group for owner in self.every_owner if not owner.by_forward]
        norms = [part.process_group or groups.world() for part in self.parts
                 if isinstance(part, nn.SyncBatchNorm) and part.training]  # fmt: skip
        for group in dict.fromkeys(sharded + norms if groups.is_initialized() else sharded):
            number = groups.least(number, group)
        return number

    def learn(self, slot: int, state: State, out: Tree) -> State:
        """What a forward of this encoder changed of its state; from now on that is known.

        Ranks that talk in every forward know the same.
        """
        if slot in self.changing:
            return state
        refuse_bypassed(self.names[slot], tensors(out), self.parts, self.owners[slot])
        state = state.that_changed()
        unseen, made = (self.least(-float(x)) < 0 for x in (bool(state.unseen), state.made))
        if unseen:
            names = [place.name for place in state.unseen]
            self.unkept[slot] = names[0] if names else "one of another rank"
        # What was None may be made once and for all, or change every time: the next forward tells.
        if not made:
            self.changing[slot] = state.places
        return state

    def _check(self, parts: Sequence[nn.Module]) -> None:
        refuse_unknown_averagers(parts)
        if not self.batch_norm:
            refuse_batch_norm(parts)

    @contextmanager
    def meeting(self, slot: int, state: State) -> Iterator[None]:
        """Take in the modules that a function runs and does not show, their buffers into `state`.

        In the forward in which one sees what changes. A compiled function would be compiled again
        for the hook.
        """
        if slot in self.changing or slot not in self.functions or self._is_compiled(slot):
            yield
            return
        known, thread = set(map(id, self.parts)), threading.get_ident()

        def meet(module: nn.Module, _: Any) -> None:
            # The hook is everybody's: other threads run modules of their own.
            if threading.get_ident() != thread or torch.compiler.is_compiling():
                return
            if id(module) in known:
                return
            new = [part for part in _walked([module]) if id(part) not in known]
            self._check(new)
            known.update(map(id, new))
            # A dropout that is made anew every time has nothing to be remembered for.
            if any(part._parameters or part._buffers for part in new):
                self.modules.append(module)
                self.parts += new
                self.modes += _modes(new)
                state.add(all_buffers(new))

        handle = nn.modules.module.register_module_forward_pre_hook(meet)
        try:
            yield
        finally:
            handle.remove()

    def _is_compiled(self, slot: int) -> bool:
        parts = (self.encoders[slot], *self.modules)
        return any(hasattr(x, "_torchdynamo_orig_callable") or hasattr(x, "_orig_mod")
                   for x in parts)  # fmt: skip

    @property
    def owners(self) -> list[list[Averager]]:
        """Those of each encoder, as far as is known."""
        return [found or [] for found in self.known]

    @property
    def every_owner(self) -> list[Averager]:
        """All of them, once."""
        return list(dict.fromkeys(owner for found in self.owners for owner in found))

    def forward(self, slot: int, inputs: Tree, graph: bool, final: Sequence[Averager] = ()) -> Tree:
        """Features of some inputs; those in `final` average gradients in the backward of it."""
        encoder = self.encoders[slot]
        if encoder is None:
            return map_tensors(Tensor.detach, inputs)
        try:
            with torch.set_grad_enabled(graph), self._told(slot, final):
                return call(encoder, inputs)
        finally:
            # Autocast of a torch before 2.13 would remember weights that no gradient reaches.
            if not graph:
                torch.clear_autocast_cache()

    @contextmanager
    def _told(self, slot: int, final: Sequence[Averager]) -> Iterator[None]:
        """Those of an encoder average in `final` only; in a first forward one sees who they are."""
        known = self.known[slot]
        if known is not None:
            with all_quiet(owner for owner in known if owner not in final):
                yield
            return
        found = list[Averager]()
        with noticing(found, self.parts):
            yield
        same = {owner: owner for owner in self.every_owner}
        self.known[slot] = [same.get(owner, owner) for owner in found]


def _modes(parts: Sequence[nn.Module]) -> list[tuple[int, bool]]:
    return [(id(part), part.training) for part in parts]


def _walked(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules and all within them, each once, in the order of `modules()`.

    Which takes three times as long, for names; meanwhile a device has nothing to do.
    """
    found, todo = dict[int, nn.Module](), list(reversed(modules))
    while todo:
        part = todo.pop()
        if id(part) not in found:
            found[id(part)] = part
            todo += [x for x in reversed(list(part._modules.values())) if x is not None]
    return list(found.values())


@dataclass(eq=False)
class Part:
    """A micro-batch of one encoder, embedded."""

    slot: int
    index: int  # among all parts
    spans: list[slice | None]  # rows of each output among those of the batch; None: all share it
    dice: Dice  # to run it again from
    state: State  # likewise
    probe: list[Probe]  # of its features, to be met again
    outputs: list[Tensor] = field(default_factory=list)  # with their graph, where it is kept


class Budget:
    """How many graphs may be kept: in MiB, or "auto", what is free beside what a step needs.

    Modules that talk to other ranks in every forward must run as often as theirs: then all ranks
    keep as many as the one with the least room.
    """

    def __init__(self, keep: float | str, device: torch.device, towers: Towers) -> None:
        self.device, self.auto, self.none = device, keep == "auto", keep == 0
        self.decided = keep in (0, float("inf"))  # whatever a graph takes
        self.towers = towers
        self.left = float(keep) * MIB if keep != "auto" else AUTO_SHARE * measure.free_bytes(device)
        if self.auto:
            self.left -= _missing_grad_bytes(towers.parameters) + LOSS_BYTES
        self.costs: dict[int, float] = {}  # of each encoder's last graph
        self.largest = 0.0

    def allows(self, slot: int) -> bool:
        """Whether one more graph of this encoder fits, if it is like the last."""
        return self.left > 0 and self.costs.get(slot, 0.0) <= self.left

    @contextmanager
    def measure(self, slot: int, graph: bool) -> Iterator[None]:
        """Find out what a graph takes. The first may hold what all share: autocast's copies."""
        if not graph or self.decided:
            self.costs.setdefault(slot, 0.0)
            yield
            return
        with measure.held_bytes(self.device) as held:
            yield
        self.costs[slot] = held.bytes

    def settle(self, slot: int) -> None:
        """Agree on what was measured; leave room for one such graph and its backward."""
        self.costs[slot] = -self.towers.least(-self.costs[slot])
        if self.auto:
            self.left -= 2 * max(0.0, self.costs[slot] - self.largest)
        self.largest = max(self.largest, self.costs[slot])

    def refuse_unseen(self, buffer: str) -> None:
        """Raise if graphs must be kept that cannot be: of an encoder that changes a buffer so."""
        if self.decided and not self.none:
            raise OptionError(
                f"keep=float('inf') keeps graphs that may need buffers as they were, got {buffer}, "
                "which a forward changes unseen by autograd (.data, numpy); change it in place "
                "without .data, or pass keep=0"
            )

    def reserve(self, feature_bytes: int) -> None:
        """Leave room for the loss: features, gradients and their sums."""
        if self.auto:
            self.left -= 4 * feature_bytes
        self.left = self.towers.least(self.left)

    def take(self, slot: int) -> bool:
        """Whether it fits; if so it is taken."""
        fits = self.allows(slot)  # again: another rank may have less room
        if fits:
            self.left -= self.costs[slot]
        return fits


def _missing_grad_bytes(parameters: Sequence[Tensor]) -> int:
    """What gradients will take that are not there yet."""
    missing = (p for p in parameters if p.requires_grad and p.grad is None and not is_lazy(p))
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
        known = slot in self.towers.trains_all and self.budget.none
        # Ranks may keep unlike much, and ask each other.
        asked = first and (not known or groups.is_initialized())
        # DDP averages in the backward of a forward that was told so: the last one is run again.
        ends = piece.last and any(owner.by_forward for owner in self.towers.owners[slot])
        keep = features.trained and self.budget.allows(slot) and not ends
        keep = keep and slot not in self.towers.unkept
        dice, state, graph = Dice(), self.towers.state_of(slot), asked or keep
        with self.budget.measure(slot, graph), self.towers.meeting(slot, state):
            out = self.towers.forward(slot, inputs, graph)
        state = self.towers.learn(slot, state, out)
        if slot in self.towers.unkept:
            self.budget.refuse_unseen(self.towers.unkept[slot])
            keep = False
        samples = length(inputs) if piece.counted else None
        # Of a list nobody knows: a document may have several parts.
        counted = not isinstance(inputs, list)
        if first:
            refuse_scattered(self.towers.names[slot], out, samples, counted)
        spans = features.add(self.towers.names[slot], out, graph, samples if counted else None)
        if graph:
            self.budget.settle(slot)
        if first:
            self.budget.reserve(sum(x.numel() * x.element_size() for x in features.buffers))
        if asked and all(features.learns) and slot not in self.towers.functions:
            self.towers.trains_all.add(slot)
        part = Part(slot, len(self.parts), spans, dice, state, features.probe(tensors(out)))
        self.parts.append(part)
        if features.trained and keep and self.budget.take(slot):
            part.outputs = tensors(out)
        # Of DDP the last part is run again whether it is kept or not.
        if not features.trained or (part.outputs and not self.towers.owners[slot]):
            part.state = State([])
        return out


def listed(encoders: Any) -> tuple[list[Any], list[str] | None]:
    """One encoder, several, or a mapping of them, as a list, with names if they have any."""
    named = isinstance(encoders, (Mapping, nn.ModuleDict))
    several = isinstance(encoders, (list, tuple, nn.ModuleList))
    if (named or several) and not len(encoders):
        raise OptionError("encoders must hold at least one, got none")
    if named:
        return list(encoders.values()), list(encoders)
    return list(encoders) if several else [encoders], None
