"""The second pass of a cached step: gradients of features become those of parameters."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import groups
from tilewise.embedding import Part, Towers
from tilewise.errors import OptionError, ShapeError
from tilewise.featurebuffers import Features, Probe
from tilewise.gradsync import Averager
from tilewise.microbatches import Piece
from tilewise.randomness import graph_leaves, replayed
from tilewise.trees import Tree, tensors

# How far a feature may be off when it is computed again, over the length of its row: kernels round
# otherwise with a graph than without. Other random numbers, or other samples, change it more.
MOST_DIFFERENCE = {torch.float64: 1e-6, torch.float32: 2e-2}
COARSE_DIFFERENCE = 0.1  # in half precision, or under autocast

Root = tuple[Tensor, Tensor]  # a tensor and its gradient


class Around(NamedTuple):
    """What the second pass asks of the step."""

    feed: Callable[[Iterable[Piece]], Iterator[tuple[Piece, Tree]]]
    """Pieces with their inputs on the device."""
    watch: Callable[[Sequence[Tensor]], None]
    """These are about to get a gradient."""
    settle: Callable[[], None]
    """Called before a gradient is touched; raises if none is to be."""


class Pushing:
    """Backward of all parts that are trained: of graphs that were kept, then of those made again.

    A module averages its gradients over ranks in its last backward. DDP is told so in the forward,
    so that its last part is always run again, and modules average in the same order on every rank,
    whatever was kept there. An output that all parts of an encoder share gets its gradient once.
    """

    def __init__(
        self,
        towers: Towers,
        features: list[Features],
        parts: list[Part],
        in_loss: Sequence[Averager],
    ) -> None:
        self.towers, self.features, self.parts = towers, features, parts
        self.in_loss = in_loss  # modules that the loss ran
        self.owners, self.every_owner = towers.owners, towers.every_owner
        self.trained = [part for part in parts if self._is_trained(part.slot)]
        last_by_owner = {o: part for part in self.trained for o in self.owners[part.slot]}
        for owner, part in last_by_owner.items():
            if owner.by_forward:
                part.outputs = []
        self.kept = [part for part in self.trained if part.outputs]
        self.again = [part for part in self.trained if not part.outputs]
        order = self.kept + self.again
        self.last_of_slot = {part.slot: part for part in order}
        self.final = {o: part for part in order for o in self.owners[part.slot]}
        self.owed: list[Root] = []
        self.watched: set[int] = set()  # slots of which a graph was looked at
        self.current: Part | None = None  # the one that is run again
        # What was found again and what it should be, by encoder and output: rows of another one
        # may be so long that a change of these is nothing to them.
        self.met = defaultdict[tuple[int, int], list[tuple[Probe, Probe]]](list)
        self.bounds: dict[int, float] = {}  # how far an encoder's features may be off

    def _is_trained(self, slot: int) -> bool:
        """Whether some output has a gradient; DDP and FSDP2 want one of everything, be it 0."""
        features = self.features[slot]
        if self.owners[slot] and any(features.learns):
            return True
        return any(grad is not None for grad in features.grads)

    def push(self, parameters: list[Root], pieces: Iterator[Piece], step: Around) -> Iterator[Part]:
        """Everything, with the loss's own parameters; yields parts when they are done."""
        self.owed = parameters
        self._check_owed()
        if self.every_owner:
            # They would wait for the backward of a forward that was run.
            step.settle()
        for owner in self.every_owner:
            owner.set_average(False)
        for part in self.kept:
            step.settle()
            outputs, part.outputs = part.outputs, []
            self._watch(part, outputs, step)
            roots = self._roots(part, outputs)
            del outputs
            self._backward_of_kept(part, roots)
            del roots
            yield part
        yield from self._run_again(pieces, step)
        step.settle()
        self._push_owed()

    def _check_owed(self) -> None:
        """Raise if FSDP2, which averages in its own backwards, has a parameter and none to come."""
        sharded = [o for o in self.every_owner if not o.by_forward and o not in self.final]
        names = [o.parameters[id(p)] for o in sharded for p, _ in self.owed
                 if id(p) in o.parameters]  # fmt: skip
        if names:
            raise OptionError(
                f"the loss uses {names[0]} of a module that fully_shard has sharded, got one whose "
                "forward trains nothing, which then does not average it; return it from the forward"
            )

    def _push_owed(self) -> None:
        """Parameters of the loss that no module's last backward took along."""
        for p, d in self.owed:
            owners = [*self.every_owner, *self.in_loss]
            owner = next((o for o in owners if id(p) in o.parameters), None)
            # A module of which nothing else is trained here averages nothing by itself.
            shared = d if owner is None else groups.average(d, owner.group)
            torch.autograd.backward([p], [shared])

    def _run_again(self, pieces: Iterator[Piece], step: Around) -> Iterator[Part]:
        if not self.again:
            return
        wanted, coming = set(self.again), list[Part]()

        def chosen() -> Iterator[Piece]:
            for part, piece in zip(self.parts, _as_many(pieces, len(self.parts)), strict=True):
                if part in wanted:
                    coming.append(part)
                    yield piece

        for _, inputs in step.feed(chosen()):
            self.current = part = coming.pop(0)
            final = [o for o in self.owners[part.slot] if self.final[o] is part]
            with replayed(part.dice, part.state):
                out = self.towers.forward(part.slot, inputs, True, final)
            self.features[part.slot].check_form(self.towers.names[part.slot], out)
            outputs = tensors(out)
            self._watch(part, outputs, step)
            roots = self._roots(part, outputs)
            self._compare(part, outputs)
            del out, outputs, inputs
            # Only now: meanwhile the device goes on.
            step.settle()
            self._backward(part, roots)
            self.current = None
            yield part

    def _watch(self, part: Part, outputs: Sequence[Tensor], step: Around) -> None:
        """What gets a gradient and is no parameter of a module: seen once, of functions always."""
        if part.slot in self.towers.functions or part.slot not in self.watched:
            step.watch(graph_leaves(outputs))
            self.watched.add(part.slot)

    def _roots(self, part: Part, outputs: Sequence[Tensor]) -> list[Root]:
        """A part's outputs and their gradients."""
        features, roots = self.features[part.slot], list[Root]()
        sizes = [None if shared else len(x)
                 for x, shared in zip(outputs, features.shared, strict=True)]  # fmt: skip
        if sizes != [None if span is None else span.stop - span.start for span in part.spans]:
            raise ShapeError(
                f"a micro-batch must be the same when it is read again, got outputs of {sizes} "
                "rows; the inputs must not change within a step"
            )
        last = self.last_of_slot[part.slot] is part
        for x, span, grad in zip(outputs, part.spans, features.grads, strict=True):
            if grad is None and x.requires_grad and self.owners[part.slot]:
                roots.append((x, torch.zeros_like(x)))
            elif grad is not None and features.assumed and not x.requires_grad:
                # It was taken to be trained, and is no longer: next time it is looked at.
                self.towers.trains_all.discard(part.slot)
            elif grad is not None and (span is not None or last):
                share = grad if span is None else grad[span]
                roots.append((x, share.to(x.device, non_blocking=True)))
        return roots

    def _compare(self, part: Part, outputs: Sequence[Tensor]) -> None:
        """Note what features are now; looked at in the end, so that the device goes on."""
        trained = [x for x, learns in zip(outputs, self.features[part.slot].learns, strict=True)
                   if learns and x.dim()]  # fmt: skip
        coarse = torch.is_autocast_enabled(outputs[0].device.type)
        found = zip(self.features[part.slot].probe(outputs), part.probe, strict=True)
        for i, (x, old) in enumerate(found):
            if len(x.length):
                self.bounds[part.slot] = COARSE_DIFFERENCE if coarse else _bound(trained)
                self.met[part.slot, i].append((x, old))

    def difference(self) -> float:
        """How far features were off when they were computed again, at most; raises if by much."""
        if not self.met:
            return 0.0
        on_devices = [_difference(pairs) for pairs in self.met.values()]
        found = [(float(x), self.bounds[slot])
                 for x, (slot, _) in zip(on_devices, self.met, strict=True)]  # fmt: skip
        # One that is not a number first.
        worst, bound = max(found, key=lambda x: math.inf if math.isnan(x[0]) else x[0] / x[1])
        if not worst <= bound:
            raise OptionError(
                f"features must be the same when a micro-batch is run again, got some that differ "
                f"by {worst:.1%} of their length: other samples, or random numbers that torch's "
                "own generators did not draw (numpy, Python, a compiled encoder past its recompile "
                "limit), or an encoder that computes otherwise without a graph; make them "
                "repeatable, or keep all graphs with keep=float('inf')"
            )
        return worst

    def _backward(self, part: Part, roots: list[Root]) -> None:
        """Push gradients through, and those of a module's parameters that the loss itself uses."""
        final = [owner for owner, last in self.final.items() if last is part]
        for owner in final:
            owner.set_average(True)
            due = [root for root in self.owed if id(root[0]) in owner.parameters]
            self.owed = [root for root in self.owed if id(root[0]) not in owner.parameters]
            roots = roots + due
        with _reached(p for owner in final if owner.waits_for_all for p in owner.trained) as rest:
            _push(roots)
        # Since other parts used them. No graph tells beforehand: a checkpoint in it hides some.
        _push([(p, torch.zeros_like(p)) for p in rest.values()])
        for owner in final:
            owner.set_average(False)

    def _backward_of_kept(self, part: Part, roots: list[Root]) -> None:
        try:
            self._backward(part, roots)
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                raise OptionError(
                    "the loss must take what it needs of an encoder from its outputs, got a tensor "
                    "that the encoder left elsewhere (an attribute, a hook), whose graph is that "
                    "of one micro-batch; return it, with a row for each sample"
                ) from error
            places = self.towers.changing.get(part.slot)
            if not places or "modified by an inplace operation" not in str(error):
                raise
            raise OptionError(
                f"a graph that is kept must find what it needs as it was, got buffers that later "
                f"forwards change, {places[0].name} among them: {error}; pass keep=0, or clone a "
                "buffer before it is used"
            ) from error


def _push(roots: Sequence[Root]) -> None:
    if roots:
        with torch.autocast(roots[0][0].device.type, enabled=False):
            torch.autograd.backward([x for x, _ in roots], [d for _, d in roots])


@contextmanager
def _reached(parameters: Iterable[Tensor]) -> Iterator[dict[int, Tensor]]:
    """Those of them that a backward inside does not reach are left in the end."""
    left = {id(p): p for p in parameters}
    # Where DDP itself looks: the node that adds to a gradient runs also where there is none to add.
    nodes = {key: _adding(p) for key, p in left.items()}

    def reach(key: int, *_: Any) -> None:
        left.pop(key, None)

    handles = [node.register_hook(partial(reach, key)) for key, node in nodes.items()]
    try:
        yield left
    finally:
        for handle in handles:
            handle.remove()


def _adding(parameter: Tensor) -> Any:
    """The node of a graph that adds to its gradient."""
    with torch.enable_grad():
        made_of = parameter.view_as(parameter).grad_fn
    assert made_of is not None
    return made_of.next_functions[0][0]


def _bound(outputs: Sequence[Tensor]) -> float:
    return max(MOST_DIFFERENCE.get(x.dtype, COARSE_DIFFERENCE) for x in outputs)


def _difference(pairs: Sequence[tuple[Probe, Probe]]) -> Tensor:
    """The largest change of a row's numbers, over its length; what is not finite may be equal.

    Over the usual length of a row, where that is more: one number may be near 0 by chance, and is
    rounded as the others are.
    """
    again, before = (Probe(*map(torch.cat, zip(*side, strict=True)))
                     for side in zip(*pairs, strict=True))  # fmt: skip
    changes = [torch.where((x == old) | (x.isnan() & old.isnan()), 0.0, (x - old).abs())
               for x, old in zip(again, before, strict=True)]  # fmt: skip
    lengths = before.length.nan_to_num(posinf=0.0)
    usual = (lengths.norm() / len(lengths) ** 0.5).clamp(min=torch.finfo(lengths.dtype).tiny)
    return (torch.maximum(*changes) / lengths.maximum(usual)).max().double()


def _as_many(pieces: Iterator[Piece], count: int) -> Iterator[Piece]:
    """The pieces, of which there must be so many again."""
    seen = 0
    for seen, piece in enumerate(pieces, 1):
        if seen > count:
            break
        yield piece
    if seen != count:
        more = "more" if seen > count else f"only {seen}"
        raise ShapeError(
            f"micro-batches must be the same when they are read again, got {count} the first time "
            f"and {more} the second; the iterable must give the same samples in the same order"
        )
