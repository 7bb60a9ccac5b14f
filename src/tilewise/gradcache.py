"""A step whose batch is bounded by host memory and time, not by the device: the gradient cache.

Embed every micro-batch, those that do not fit without a graph; compute the loss on all features,
once; run the others again with a graph and the same randomness, and push the gradient through.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tilewise import groups
from tilewise.ahead import Ahead, Make
from tilewise.embedding import Budget, Embedding, Towers, listed
from tilewise.errors import FiniteError, GradError, ShapeError, StepError
from tilewise.featurebuffers import Features
from tilewise.gradsync import Averager, noticing
from tilewise.microbatches import Batch, Piece, Splitter, make_batch
from tilewise.pairs import check_choice, checked_device
from tilewise.phases import Phases, StepMetrics
from tilewise.pushing import Around, Pushing, Root
from tilewise.randomness import counted_once, graph_leaves
from tilewise.stepchecks import (
    AFTER,
    TWICE,
    call_loss,
    check_in_loss,
    check_keep,
    check_loss,
    checked_sizes,
    refuse_cache,
    refuse_changed,
    refuse_clash,
    refuse_graph,
    refuse_hooks,
    refuse_inside,
    refuse_trained,
    versions,
)
from tilewise.trees import Tree, map_tensors, tensors

Encoder = Callable[..., Tree]


class StepResult(NamedTuple):
    """What a step gives back; gradients are in `.grad`."""

    loss: Tensor  # (), detached
    metrics: StepMetrics
    features: Tree = None  # of all encoders, as the loss took them, where they were asked for


class CachedStep:
    """Forward and backward of any batch in the memory of a micro-batch.

    The plain program it replaces, with the same gradients:

        loss(encoder(inputs), other_encoder(other_inputs)).backward()

    Args:
        encoders: one, several, or a mapping from names to them. Modules, methods or functions from
            inputs to features: a tensor, or a tuple or mapping of tensors, a row for each sample; a
            single number, such as a learnable scale, belongs to all. None: inputs are the features.
            The same module may stand twice. One without parameters to train is run once.
        loss: called once with the features of all samples, encoder by encoder (by name if they have
            names; with what a single encoder returns, if that is a tuple or a mapping), and with
            the step's keywords. Parameters in it, such as a scale, get their gradient once.
        micro_batch: samples that an encoder takes at once; a number, or one for each encoder.
        keep: MiB for graphs of micro-batches that need not be run again, or "auto": what is free.
        device: where to compute; that of the encoders by default. Inputs elsewhere (host memory,
            pinned or not, memory maps, iterables) are copied there a micro-batch ahead.
        features: "device", or "host" to hold features and their gradients in host memory, for a
            loss that takes them there (`device=` of tilewise's losses).
        split: (inputs, micro-batch) -> micro-batches, for inputs that are not cut by their first
            dimension; where some inputs cannot be cut otherwise, only those are given to it.
        scaler: a GradScaler, for fp16; unscale and step it as usual.
        batch_norm: allow BatchNorm in train mode, whose statistics are then of micro-batches.
        return_features: hand back the features of all samples, detached, to put into a pool.
        progress: show a bar; by default where someone watches.
    """

    def __init__(  # noqa: PLR0913 - options, by keyword
        self,
        encoders: Encoder | Sequence[Encoder | None] | Mapping[str, Encoder | None] | None,
        loss: Callable[..., Tensor],
        *,
        micro_batch: int | Sequence[int],
        keep: float | Literal["auto"] = "auto",
        device: torch.device | str | None = None,
        features: Literal["device", "host"] = "device",
        split: Splitter | None = None,
        scaler: Any = None,
        batch_norm: bool = False,
        return_features: bool = False,
        progress: bool | None = None,
    ) -> None:
        each, self.names = listed(encoders)
        shown = [f"encoder {name!r}" for name in self.names or range(len(each))]
        self.towers = Towers(each, shown, batch_norm)
        self.loss, self.scaler, self.split = loss, scaler, split
        self.micro_batch = checked_sizes(micro_batch, len(each))
        check_keep(keep)
        check_choice("features", features, ("device", "host"))
        self.keep, self.host, self.progress = keep, features == "host", progress
        self.return_features = return_features
        self.device = None if device is None else checked_device(device)

    def __call__(self, *inputs: Any, **options: Any) -> StepResult:
        """Loss and gradients of a batch: one input for each encoder, or one iterable for all.

        An input is a tensor, array or list of samples, a tuple of those (the encoder's arguments)
        or a mapping (its keywords). An iterable gives micro-batches, each a tuple of one input for
        each encoder, and is read twice. Options go to the loss.
        """
        if not torch.is_grad_enabled():
            raise GradError("a step computes gradients, got torch.no_grad(); call it outside")
        refuse_cache()
        refuse_inside()
        self.towers.look()
        parameters = self.towers.parameters
        refuse_hooks(parameters, *AFTER)
        batch = make_batch(inputs, len(self.towers), self.micro_batch, self.split)
        for slot, encoder in enumerate(self.towers.encoders[: len(inputs)]):
            refuse = refuse_graph if encoder is not None else refuse_trained
            refuse(f"input {slot}", inputs[slot])
        refuse_clash(options, self.names or (), "the encoder")
        device = self.device or _device_of(parameters, inputs)
        with Phases(device, self.progress) as phases:
            return _Run(self, batch, device, phases).all(options)

    def arranged(self, features: list[Tree]) -> tuple[Tree, ...] | dict[str, Tree]:
        """Features of all encoders as the loss takes them: one after the other, or by name."""
        if self.names is not None:
            return dict(zip(self.names, features, strict=True))
        if len(features) == 1 and isinstance(features[0], Mapping):
            return dict(features[0])
        single = len(features) == 1 and isinstance(features[0], tuple)
        return tuple(features[0] if single else features)


class _Run:
    """One step."""

    def __init__(
        self, step: CachedStep, batch: Batch, device: torch.device, phases: Phases
    ) -> None:
        self.step, self.batch, self.phases = step, batch, phases
        self.towers, self.ahead = step.towers, Ahead(device)
        self.features = [
            Features(device, step.host, batch.times(slot)) for slot in range(len(self.towers))
        ]
        self.embedding = Embedding(
            self.towers, self.features, Budget(step.keep, device, self.towers)
        )
        self.undo = _Undo()
        self.pushing: Pushing | None = None
        self.verdict: _Verdict | None = None  # of the loss, until it is read
        self.settling = False
        self.found: Tree = None
        self.in_loss: list[Averager] = []
        self.where = "the batch"

    def all(self, options: dict[str, Any]) -> StepResult:
        # Weights cast without a graph before, in the same autocast: see `Towers.forward`.
        torch.clear_autocast_cache()
        # No context manager of a generator: it would let a StopIteration pass as it is.
        try:
            self._embed()
            # Not before: the first forward need not wait for it.
            self.undo.watch(self.towers.parameters)
            loss, parameters = self._differentiate(options)
            counts = self._push(parameters)
        except BaseException as error:
            state = self.undo.take_back()
            for owner in self.towers.every_owner:
                owner.forget()
            if not isinstance(error, Exception):
                raise
            place = self.place()
            raise StepError(f"{place}: {type(error).__name__}: {error}; {state}") from error
        finally:
            for owner in self.towers.every_owner:
                owner.set_average(True)
        samples = max(each.samples for each in self.features)
        return StepResult(loss, self.phases.metrics(samples=samples, **counts), self.found)

    def _embed(self) -> None:
        parts = self.embedding.parts
        with self.phases.phase("embed", self.batch.count):
            for piece, inputs in self._feed(self.batch.read()):
                self.where = f"micro-batch {len(parts)}, {self.towers.names[piece.slot]}"
                own = graph_leaves([x for x in tensors(inputs) if x.requires_grad])
                before = versions(inputs)
                out = self.embedding.add(piece, inputs)
                refuse_changed(self.towers.names[piece.slot], inputs, before)
                self._watch(own)
                if piece.slot in self.towers.functions:
                    self._watch(graph_leaves(tensors(out)))
                del own, out, inputs
                self.phases.advance()
        if not parts:
            raise ShapeError("the batch must not be empty, got no micro-batch; skip an empty batch")

    def _watch(self, leaves: Sequence[Tensor]) -> None:
        """These are about to get a gradient, micro-batch by micro-batch."""
        refuse_hooks(self.undo.watch(leaves), *AFTER)

    def _differentiate(self, options: dict[str, Any]) -> tuple[Tensor, list[Root]]:
        """The loss; its gradients for features are left with them, for parameters returned."""
        self.where = "the loss"
        with self.phases.phase("loss"):
            leaves = [each.finish() for each in self.features]
            args = self.step.arranged([each.tree for each in self.features])
            if isinstance(args, dict):
                refuse_clash(options, args, "an output")
            noticed = noticing(self.in_loss, self.towers.parts)
            with noticed if groups.is_initialized() else nullcontext():
                loss = call_loss(partial(self.step.loss, **options), args)
            check_loss(loss)
            check_in_loss(self.in_loss)
            if self.step.return_features:
                self.found = map_tensors(Tensor.detach, args)
            del args
            wanted = [x for own in leaves for x in own if x.requires_grad]
            known = {id(x) for x in wanted}
            parameters = [p for p in graph_leaves([loss]) if id(p) not in known]
            for owner in self.towers.every_owner:
                owner.look_again()
                owner.check_owns(parameters)
            refuse_hooks(parameters, *TWICE)
            self.undo.watch(parameters)
            scaled = loss if self.step.scaler is None else self.step.scaler.scale(loss)
            with torch.autocast(loss.device.type, enabled=False):
                grads = torch.autograd.grad(scaled, [*wanted, *parameters], allow_unused=True)
            self.verdict = _Verdict(loss.detach(), self.towers.every_owner)
            by_leaf = dict(zip(map(id, wanted), grads, strict=False))
            for each, own in zip(self.features, leaves, strict=True):
                each.grads, each.tree = [by_leaf.get(id(x)) for x in own], None
        found = zip(parameters, grads[len(wanted) :], strict=True)
        return loss.detach().reshape(()), [(p, d) for p, d in found if d is not None]

    def _settle(self) -> None:
        """Raise if the loss is of no use, before the first gradient is touched."""
        if self.verdict is not None:
            self.settling = True
            self.verdict.check()
            for each in self.features:
                each.check_shared()
            self.verdict, self.settling, self.undo.touched = None, False, True

    def _push(self, parameters: list[Root]) -> dict[str, Any]:
        parts = self.embedding.parts
        self.pushing = pushing = Pushing(self.towers, self.features, parts, self.in_loss)
        around = Around(self._feed, self._watch, self._settle)
        kept, total = len(pushing.kept), len(pushing.trained)
        self.where = "the backward"
        changing = (place for found in self.towers.changing.values() for place in found)
        with self.phases.phase("replay", total), counted_once(self.towers.parts, changing):
            for part in pushing.push(parameters, self.batch.read(), around):
                self.where = f"the backward, after micro-batch {part.index}"
                self.phases.advance()
        counts = {"kept": kept, "replayed": total - kept}
        # Last of all: here the host waits for the device.
        return {**counts, "replay_difference": pushing.difference()}

    def place(self) -> str:
        """Where the step is."""
        if self.batch.reading is not None:  # ahead of what is at work
            return f"reading micro-batch {self.batch.reading} of the iterable"
        part = None if self.pushing is None else self.pushing.current
        if part is None or self.settling:
            return "the loss" if self.settling else self.where
        return f"micro-batch {part.index}, {self.towers.names[part.slot]}, run again"

    def _feed(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Tree]]:
        """Pieces with their inputs on the device."""
        known = list[Piece]()

        def makers() -> Iterator[Make]:
            for piece in pieces:
                known.append(piece)
                yield piece.make

        for inputs in self.ahead.over(makers()):
            yield known.pop(0), inputs


class _Verdict:
    """Whether a loss is finite on all ranks: the device finds out, the host reads it later.

    Where gradients are averaged all ranks must raise, or one would wait for another.
    """

    def __init__(self, loss: Tensor, owners: Sequence[Averager]) -> None:
        bad = (~torch.isfinite(loss)).float()
        by_group = {o.group: o for o in owners if o.trained}
        for group, owner in by_group.items():
            bad = groups.add_up(bad.to(owner.trained[0].device), group)
        self.loss, self.together = loss, bool(by_group)
        self.bad = bad.to("cpu", non_blocking=bad.is_cuda)
        self.found = torch.cuda.current_stream(bad.device).record_event() if bad.is_cuda else None

    def check(self) -> None:
        """Wait for it, and raise if the loss is not."""
        if self.found is not None:
            self.found.synchronize()
        if float(self.bad):
            ranks = " on this rank, and on some rank one that is not" if self.together else ""
            raise FiniteError(
                f"the loss must be finite, got {float(self.loss)}{ranks}; look for features "
                "that are not, lower the learning rate, or clamp the scale"
            )


class _Undo:
    """Gradients as they were, if a step fails."""

    def __init__(self) -> None:
        # Not held: a forward may make leaves of its own, as large as activations.
        self.had: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        self.touched = False

    def watch(self, more: Iterable[Tensor]) -> list[Tensor]:
        """Remember whether these had a gradient; returns those that are new."""
        new = list[Tensor]()
        for p in more:
            known = self.had.get(id(p))
            if known is None or known[0]() is not p:
                self.had[id(p)] = weakref.ref(p), p.grad is not None
                new.append(p)
        return new

    def take_back(self) -> str:
        """Drop what was added to gradients that were None; says what became of the others."""
        accumulated = False
        for found, had in self.had.values():
            p = found()
            accumulated = accumulated or had
            if p is not None and not had:
                p.grad = None
        if self.touched and accumulated:
            return "gradients were being accumulated and are invalid now: set them to None"
        return "gradients are as they were"


def _device_of(parameters: Sequence[Tensor], inputs: tuple[Any, ...]) -> torch.device:
    """Of the first parameter, or of the first input that is on one."""
    known = parameters or tensors(inputs)
    return known[0].device if known else torch.device("cpu")
