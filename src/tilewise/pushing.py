"""The second pass of a cached step: gradients of features become those of parameters."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tilewise.embedding import Features, Part, Towers, is_shared, probe_of
from tilewise.errors import OptionError, ShapeError
from tilewise.gradsync import Averager
from tilewise.microbatches import Piece
from tilewise.randomness import replayed
from tilewise.trees import Tree, tensors

# Kernels that round otherwise with a graph than without change a feature by a few units in the last
# place; other random numbers, or other samples, by about its size.
MOST_DIFFERENCE = 0.1

Root = tuple[Tensor, Tensor]  # a tensor and its gradient
Feed = Callable[[Iterable[Piece]], Iterator[tuple[Piece, Tree]]]


class Pushing:
    """Backward of the parts: first of those whose graph was kept, then of the others, run again.

    What must happen once, happens with the last of them: a module averages its gradients over ranks
    in its last backward, and an output that all parts share gets its gradient in one.
    """

    def __init__(self, towers: Towers, features: list[Features], parts: list[Part]) -> None:
        self.towers, self.features, self.parts = towers, features, parts
        self.kept = [part for part in parts if part.outputs]
        self.order = self.kept + [part for part in parts if part.dice is not None]
        self.last_of_slot = {part.slot: part for part in self.order}
        self.final: dict[Averager, Part] = {}
        for part in self.order:
            self.final.update(dict.fromkeys(towers.owners[part.slot], part))
        self.extra: list[Root] = []
        self.current: Part | None = None  # the one that is run again
        self.differences: list[Tensor] = []

    def push(self, parameters: list[Root], feed: Feed, pieces: Iterator[Piece]) -> Iterator[Part]:
        """Everything, with the loss's own parameters; yields parts when they are done."""
        self.extra = parameters
        for owner in self.towers.every_owner:
            owner.set_average(False)
        for together in self._kept_together():
            roots = [root for part in together for root in self._roots(part, part.outputs)]
            for part in together:
                part.outputs = []
            self._backward(together, roots)
            yield from together
        yield from self._run_again(feed, pieces)
        if not self.order:
            self._backward([], [])

    def _kept_together(self) -> Iterator[list[Part]]:
        """One by one; at once where DDP has been told in a forward that its backward is the last.

        In one backward a parameter is ready when all its parts are.
        """
        kept = set(self.kept)
        if any(owner.by_forward and part in kept for owner, part in self.final.items()):
            yield self.kept
        else:
            yield from ([part] for part in self.kept)

    def _run_again(self, feed: Feed, pieces: Iterator[Piece]) -> Iterator[Part]:
        again = list[Part]()

        def wanted() -> Iterator[Piece]:
            for part, piece in zip(self.parts, _as_many(pieces, len(self.parts)), strict=True):
                if part.dice is not None:
                    again.append(part)
                    yield piece

        if len(self.kept) == len(self.order):
            return
        for _, inputs in feed(wanted()):
            self.current = part = again.pop(0)
            assert part.dice is not None
            final = [o for o in self.towers.owners[part.slot] if self.final[o] is part]
            with replayed(part.dice):
                out = self.towers.forward(part.slot, inputs, True, final)
            roots = self._roots(part, tensors(out))
            self.differences += map(_difference, probe_of(tensors(out)), part.probe)
            del out, inputs
            self._backward([part], roots)
            self.current = None
            yield part

    def _roots(self, part: Part, outputs: Sequence[Tensor]) -> list[Root]:
        """A part's outputs and their gradients."""
        sizes = [None if is_shared(x) else len(x) for x in outputs]
        if sizes != [None if span is None else span.stop - span.start for span in part.spans]:
            raise ShapeError(
                f"a micro-batch must be the same when it is read again, got outputs of {sizes} "
                "rows; the inputs must not change within a step"
            )
        roots, last = list[Root](), self.last_of_slot[part.slot] is part
        for x, span, grad in zip(outputs, part.spans, self.features[part.slot].grads, strict=True):
            if grad is not None and x.requires_grad and (span is not None or last):
                share = grad if span is None else grad[span]
                roots.append((x, share.to(x.device, non_blocking=True)))
        return roots

    def difference(self) -> float:
        """How far features were off when they were computed again, at most; raises if by much."""
        if not self.differences:
            return 0.0
        worst = float(torch.stack([x.cpu() for x in self.differences]).max())
        if not worst <= MOST_DIFFERENCE:
            raise OptionError(
                f"features must be the same when a micro-batch is run again, got some that differ "
                f"by {worst:.0%} of their size: other samples, or random numbers that torch's own "
                "generators did not draw (numpy, Python, a compiled encoder past its recompile "
                "limit); make them repeatable, or keep all graphs with keep=float('inf')"
            )
        return worst

    def _backward(self, parts: Sequence[Part], roots: list[Root]) -> None:
        final = [owner for owner, part in self.final.items() if part in parts]
        for owner in final:
            owner.set_average(True)
        roots = roots + [root for root in self.extra if self._goes_with(root[0], final, parts)]
        if roots:
            with torch.autocast(roots[0][0].device.type, enabled=False):
                torch.autograd.backward([x for x, _ in roots], [d for _, d in roots])
        for owner in final:
            owner.set_average(False)

    def _goes_with(self, p: Tensor, final: list[Averager], parts: Sequence[Part]) -> bool:
        """Whether a parameter of the loss takes its gradient now.

        With the last backward of the module that owns it, or with the last of all.
        """
        owner = next((o for o in self.final if id(p) in o.parameters), None)
        if owner is not None:
            return owner in final
        return not parts or self.order[-1] in parts


def _difference(x: Tensor, probe: Tensor) -> Tensor:
    """The largest difference of two rows, over the largest number in them."""
    largest = probe.abs().max().clamp(min=torch.finfo(probe.dtype).tiny)
    return ((x - probe).abs().max() / largest).float()


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
