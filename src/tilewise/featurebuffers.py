"""What an encoder returned for all samples, and the gradients of that."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import DtypeError, OptionError, ShapeError
from tilewise.trees import Tree, form, is_dense, leaves, map_tensors, tensors

# How many units in the last place an output that all micro-batches share may be off.
SAME = 8


class Probe(NamedTuple):
    """Two numbers of every row, by which it is known again."""

    product: Tensor  # (n,), with something
    length: Tensor  # (n,)


class Features:
    """Outputs of one encoder for the whole batch, and their gradients.

    An output has a row for each sample, or is one number that all micro-batches share.
    """

    def __init__(self, device: torch.device, host: bool, times: float) -> None:
        """`times` as much as the first micro-batch's will come, or more."""
        self.device, self.host, self.times = device, host, times
        self.tree: Tree = None  # without the tensors, but at the end
        self.form = ""  # of it
        self.buffers: list[Tensor] = []
        self.shared: list[bool] = []
        self.learns: list[bool] = []  # whether an output has a gradient
        self.assumed = False  # so, and not seen
        self.rows: list[int] = []
        self.per_sample: list[int] = []  # rows, once they were counted
        self.grads: list[Tensor | None] = []
        self.unlike: list[Tensor] = []
        self.ways: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    @property
    def trained(self) -> bool:
        """Whether some output has a gradient, as far as is known."""
        return not self.learns or any(self.learns)

    @property
    def samples(self) -> int:
        """Rows of the longest of them."""
        return max(self.rows, default=0)

    def add(self, name: str, out: Tree, graph: bool, samples: int | None) -> list[slice | None]:
        """Store a micro-batch's outputs, which had a chance of a `graph`; returns where.

        `samples` of inputs, where they can be counted.
        """
        parts = tensors(out)
        if not self.buffers:
            _check_outputs(name, out)
            self._begin(out, parts, graph)
        self.check_form(name, out)
        kinds = [self._kind(i, x) for i, x in enumerate(parts)]
        known = [self._kind(i, x) for i, x in enumerate(self.buffers)]
        if kinds != known:
            raise ShapeError(
                f"{name} must return features of the same shape and dtype every time, got {kinds} "
                f"after {known}"
            )
        if graph and [x.requires_grad for x in parts] != self.learns:
            raise OptionError(
                f"{name} must train the same outputs in every micro-batch, got "
                f"{[x.requires_grad for x in parts]} after {self.learns}"
            )
        self._check_rows(name, parts, samples)
        return [self._store(i, x.detach()) for i, x in enumerate(parts)]

    def check_form(self, name: str, out: Tree) -> None:
        """Raise unless outputs are where they were: they are stored by place."""
        if form(out) != self.form:
            raise ShapeError(
                f"{name} must return the same outputs in the same places every time, got "
                f"{form(out)} after {self.form}"
            )

    def _check_rows(self, name: str, parts: list[Tensor], samples: int | None) -> None:
        """Raise unless all outputs have a row for each sample, or as many more every time."""
        if not samples:
            return
        rows = [samples if shared else len(x) for x, shared in zip(parts, self.shared, strict=True)]
        times = [n // samples for n in rows]
        if any(n % samples for n in rows) or times != (self.per_sample or times):
            raise ShapeError(
                f"{name} must return a row for each sample, got outputs of {rows} rows for "
                f"{samples} samples; put samples first, and what belongs to all of them (means, "
                "prototypes) into the loss; a number that all share must have shape ()"
            )
        self.per_sample = times

    def _begin(self, out: Tree, parts: list[Tensor], graph: bool) -> None:
        self.tree, self.rows = map_tensors(lambda x: x.new_empty(0), out), [0] * len(parts)
        self.form = form(out)
        samples = max(len(x) if x.dim() else 1 for x in parts)
        # Of one sample (1,) is a row; FSDP2 makes such a thing of a scale.
        self.shared = [x.dim() == 0 or (x.shape == (1,) and samples > 1) for x in parts]
        # Without a graph nobody knows.
        self.assumed = not graph
        self.learns = [x.requires_grad if graph else x.is_floating_point() for x in parts]
        self.buffers = [
            x.detach().clone() if shared else self._empty(math.ceil(len(x) * self.times), x)
            for x, shared in zip(parts, self.shared, strict=True)
        ]

    def _kind(self, i: int, x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        shape = ("n", *x.shape[1:]) if x.dim() and not self.shared[i] else tuple(x.shape)
        return shape, x.dtype

    def _store(self, i: int, x: Tensor) -> slice | None:
        if self.shared[i]:
            bound = SAME * (torch.finfo(x.dtype).eps if x.is_floating_point() else 0)
            if bound:
                self.unlike.append((x - self.buffers[i]).abs() > bound * self.buffers[i].abs())
            else:
                self.unlike.append(x != self.buffers[i])
            return None
        start, stop = self.rows[i], self.rows[i] + len(x)
        if stop > len(self.buffers[i]):
            if self.host and self.device.type == "cuda":
                # What is on its way to host memory must be there before the host copies it.
                torch.cuda.current_stream(self.device).synchronize()
            old, self.buffers[i] = self.buffers[i][:start], self._empty(2 * stop, x)
            self.buffers[i][:start] = old
        self.buffers[i][start:stop].copy_(x, non_blocking=True)
        self.rows[i] = stop
        return slice(start, stop)

    def _empty(self, size: int, x: Tensor) -> Tensor:
        if not self.host:
            return torch.empty(size, *x.shape[1:], dtype=x.dtype, device=x.device)
        pinned = self.device.type == "cuda"
        return torch.empty(size, *x.shape[1:], dtype=x.dtype, device="cpu", pin_memory=pinned)

    def finish(self) -> list[Tensor]:
        """All features, as leaves of the loss."""
        if self.host and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        whole = [
            (x if shared else x[:rows]).detach().requires_grad_(learns)
            for x, shared, rows, learns in zip(
                self.buffers, self.shared, self.rows, self.learns, strict=True
            )
        ]
        self.buffers, parts = [], iter(whole)
        self.tree = map_tensors(lambda _: next(parts), self.tree)
        return whole

    def check_shared(self) -> None:
        """Raise if an output that all micro-batches share was not the same in all; waits for it."""
        if self.unlike and bool(torch.stack([x.any() for x in self.unlike]).any()):
            raise OptionError(
                "an output that is a single number must be the same for every micro-batch, such as "
                "a scale; got one that is not: return what depends on samples with a row for each"
            )

    def probe(self, outputs: Sequence[Tensor]) -> list[Probe]:
        """Of each output that is trained."""
        chosen = zip(outputs, self.learns, self.shared, strict=True)
        return [self._probe(x.detach()) for x, learns, shared in chosen if learns and not shared]

    def _probe(self, x: Tensor) -> Probe:
        rows = x.flatten(1) if x.dim() > 1 else x[:, None]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        kind = rows.shape[1], rows.dtype, rows.device
        if kind not in self.ways:
            order = torch.arange(rows.shape[1], device=x.device, dtype=rows.dtype)
            self.ways[kind] = order.add_(1).cos_()
        return Probe(rows @ self.ways[kind], rows.norm(dim=1))


def _check_outputs(name: str, out: Tree) -> None:
    strange = [x for x in leaves(out) if not isinstance(x, Tensor) and x is not None]
    if strange or not tensors(out):
        got = strange[0] if strange else out
        raise DtypeError(
            f"{name} must return features, a tensor or a tuple or mapping of tensors, got "
            f"{type(got).__name__}"
        )
    if not all(map(is_dense, tensors(out))):
        raise DtypeError(
            f"{name} must return dense tensors, got a sparse or nested one; call .to_dense() on a "
            "sparse one, pad a nested one"
        )
    if any(x.is_complex() for x in tensors(out)):
        raise DtypeError(f"{name} must return real numbers, got complex ones; view_as_real them")
