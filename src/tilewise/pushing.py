"""The second pass of a cached step: gradients of features become those of parameters."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tilewise import groups
from tilewise.embedding import Part, Towers
from tilewise.errors import OptionError, ShapeError
from tilewise.featurebuffers import Features
from tilewise.gradsync import Averager
from tilewise.microbatches import Piece
from tilewise.randomness import graph_leaves, replayed
from tilewise.trees import Tree, tensors

# How far a feature may be off when it is computed again, over the length of its row: kernels round
# otherwise with a graph than without. Other random numbers, or other samples, change it more.
MOST_DIFFERENCE = {torch.float64: 1e-6, torch.float32: 2e-2}
COARSE_DIFFERENCE = 0.1  # in half precision, or under autocast

Root = tuple[Tensor, Tensor]  # a tensor and its gradient
Feed = Callable[[Iterable[Piece]], Iterator[tuple[Piece, Tree]]]
Watch = Callable[[Iterable[Tensor]], None]


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
        self.current: Part | None = None  # the one that is run again
        self.differences: list[tuple[Tensor, float]] = []

    def _is_trained(self, slot: int) -> bool:
        """Whether some output has a gradient; DDP and FSDP2 want one of everything, be it 0."""
        features = self.features[slot]
        if self.owners[slot] and any(features.learns):
            return True
        return any(grad is not None for grad in features.grads)

    def push(
        self, parameters: list[Root], feed: Feed, pieces: Iterator[Piece], watch: Watch
    ) -> Iterator[Part]:
        """Everything, with the loss's own parameters; yields parts when they are done."""
        self.owed = parameters
        for owner in self.every_owner:
            owner.set_average(False)
        for part in self.kept:
            outputs, part.outputs = part.outputs, []
            self._backward(part, self._roots(part, outputs))
            del outputs
            yield part
        yield from self._run_again(feed, pieces, watch)
        self._push_owed()

    def _push_owed(self) -> None:
        """Parameters of the loss that no module's last backward took along."""
        for p, d in self.owed:
            owners = [*self.every_owner, *self.in_loss]
            owner = next((o for o in owners if id(p) in o.parameters), None)
            # A module of which nothing else is trained here averages nothing by itself.
            shared = d if owner is None else groups.average(d, owner.group or groups.world())
            torch.autograd.backward([p], [shared])

    def _run_again(self, feed: Feed, pieces: Iterator[Piece], watch: Watch) -> Iterator[Part]:
        if not self.again:
            return
        wanted, coming = set(self.again), list[Part]()

        def chosen() -> Iterator[Piece]:
            for part, piece in zip(self.parts, _as_many(pieces, len(self.parts)), strict=True):
                if part in wanted:
                    coming.append(part)
                    yield piece

        for _, inputs in feed(chosen()):
            self.current = part = coming.pop(0)
            final = [o for o in self.owners[part.slot] if self.final[o] is part]
            with replayed(part.dice):
                out = self.towers.forward(part.slot, inputs, True, final)
            outputs = tensors(out)
            watch(graph_leaves(outputs) if part.slot in self.towers.functions else ())
            roots = self._roots(part, outputs)
            self._compare(part, outputs)
            del out, outputs, inputs
            self._backward(part, roots)
            self.current = None
            yield part

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
            elif grad is not None and (span is not None or last):
                share = grad if span is None else grad[span]
                roots.append((x, share.to(x.device, non_blocking=True)))
        return roots

    def _compare(self, part: Part, outputs: Sequence[Tensor]) -> None:
        """Note how far features are off."""
        trained = [x for x, learns in zip(outputs, self.features[part.slot].learns, strict=True)
                   if learns and x.dim()]  # fmt: skip
        coarse = torch.is_autocast_enabled(outputs[0].device.type)
        for x, old in zip(self.features[part.slot].probe(outputs), part.probe, strict=True):
            if len(x):
                bound = COARSE_DIFFERENCE if coarse else _bound(trained)
                self.differences.append((_difference(x, old), bound))

    def difference(self) -> float:
        """How far features were off when they were computed again, at most; raises if by much."""
        if not self.differences:
            return 0.0
        device = self.differences[0][0].device
        found = torch.stack([x.to(device) for x, _ in self.differences]).cpu()
        bounds = torch.tensor([bound for _, bound in self.differences])
        worst = float(found[(found / bounds).argmax()])
        if not bool((found <= bounds).all()):
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
            roots = roots + _untouched(owner, roots)
        if roots:
            with torch.autocast(roots[0][0].device.type, enabled=False):
                torch.autograd.backward([x for x, _ in roots], [d for _, d in roots])
        for owner in final:
            owner.set_average(False)


def _untouched(owner: Averager, roots: Sequence[Root]) -> list[Root]:
    """Parameters of DDP that its last backward does not reach, since other parts used them.

    It waits for a gradient of everything.
    """
    if not owner.by_forward or owner.looks_for_unused:
        return []
    reached = {id(p) for p in graph_leaves([x for x, _ in roots])}
    return [(p, torch.zeros_like(p)) for p in owner.trained if id(p) not in reached]


def _bound(outputs: Sequence[Tensor]) -> float:
    return max(MOST_DIFFERENCE.get(x.dtype, COARSE_DIFFERENCE) for x in outputs)


def _difference(x: Tensor, old: Tensor) -> Tensor:
    """The largest change of a row's numbers, over its length; equal infinities are equal."""
    change = torch.where(x == old, 0.0, (x - old).abs()).amax(1)
    return (change / old[:, 1].clamp(min=torch.finfo(old.dtype).tiny)).max().double()


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
