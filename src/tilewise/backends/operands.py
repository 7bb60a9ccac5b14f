"""Features made ready for the kernels, a panel at a time: the only place that knows their form.

A panel of plain features is a slice of them. Features whose rows do not begin at multiples of 16
bytes are copied. fp32 is split: with a power of two `unit` that makes the largest entry about 2^14,
h = fp16(x * unit) and l = fp16(x * unit - h) hold 22 bits of x, and one product over features

    rows (l, h, l, h, ... | h)    columns (h, l, h, l, ... | h)

is l*h + h*l + h*h, small terms first. Mirrored, the two small ones trade places within one step of
a tensor core: pair (i, j) and pair (j, i) are the same number. For fp8 the unit makes the largest
entry less than 2^8. Scores of converted features are too large by the units of both sides.
"""

import torch
from torch import Tensor

from tilewise.backends.convert import COPY, FP8, SPLIT, convert, largest, store_units
from tilewise.pairs import Pairs
from tilewise.tiles import cdiv, padded

# The largest entry lies in [2^top, 2^(top + 1)): fp16 ends at 65504, e4m3 at 448.
TOP = {SPLIT.value: 14, FP8.value: 7}


class Operand:
    """One side's features (N, D), converted a span of rows at a time into a buffer of its own."""

    def __init__(self, features: Tensor, precision: str, unit: Tensor | None, cols: bool) -> None:
        self.features, self.unit, self.cols = features, unit, cols
        self.form = form_of(features, precision)
        self.even = _begins_at_16_bytes(features)
        self._held: dict[int, tuple[slice | None, Tensor]] = {}

    def __len__(self) -> int:
        return self.features.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """What the kernels multiply."""
        return _dtype(self.features, self.form)

    @property
    def width(self) -> int:
        """How many features the kernels multiply."""
        d = self.features.shape[1]
        return 3 * _padded(d, torch.float16) if self.form == SPLIT.value else d

    @property
    def bytes_per_row(self) -> int:
        """What converting a row takes; 0 for slices of the features themselves."""
        forms = self._forms()
        return sum(self._row_size(form) * _dtype(self.features, form).itemsize for form in forms)

    def scores(self, span: slice, flag: Tensor | None = None) -> Tensor:
        """Rows of the product z is made of, (n, width); with a flag only while that is up."""
        if self.form == COPY.value and self.even:
            return self.features[span]
        return self._hold(self.form, span, flag)[:, : self.width]

    def parts(self, span: slice) -> tuple[Tensor, ...]:
        """What gradients are products with, (n, D): the features, or high and low part of them."""
        d = self.features.shape[1]
        if self.form == SPLIT.value:
            panel, start = self._hold(self.form, span), 2 * self.width // 3
            return panel[:, start : start + d], panel[:, start + self.width // 3 :][:, :d]
        return (self.features[span] if self.even else self._hold(COPY.value, span)[:, :d],)

    def _forms(self) -> set[int]:
        """Those in which panels are held."""
        if self.form == SPLIT.value:
            return {self.form}
        return ({self.form} - {COPY.value}) | (set() if self.even else {COPY.value})

    def _row_size(self, form: int) -> int:
        """Numbers from one row of a buffer to the next."""
        size = _padded(self.features.shape[1], _dtype(self.features, form))
        return 4 * size if form == SPLIT.value else size

    def _hold(self, form: int, span: slice, flag: Tensor | None = None) -> Tensor:
        """The buffer (n, row size), filled with a span unless that is in it."""
        source = self.features[span]
        (n, d), size = source.shape, self._row_size(form)
        last, buffer = self._held.pop(form, (None, source[:0]))
        if len(buffer) < n:
            del buffer  # before the next, so that there is one
            buffer = source.new_empty(n, size, dtype=_dtype(source, form))
        if last != span:
            width = size // 4 if form == SPLIT.value else d
            convert[(cdiv(n, 16), cdiv(width, 64))](
                source, *source.stride(), buffer, size, self.unit, flag, n, d,
                WIDTH=width, FORM=form, COLS=self.cols, BLOCK=16, TD=64,
            )  # fmt: skip
        self._held[form] = (span if flag is None else None, buffer)
        return buffer[:n]


def form_of(features: Tensor, precision: str) -> int:
    """How scores of such features are made; COPY where the features themselves will do."""
    if features.dtype == torch.float32:
        return int(SPLIT.value)
    return int(FP8.value if precision == "fp8" else COPY.value)


def units_of(pairs: Pairs, precision: str) -> Tensor | None:
    """The units (2,) of rows and columns, found on the device; None where features stay as is."""
    form = form_of(pairs.rows, precision)
    if form == COPY.value:
        return None
    rows = _largest(pairs.rows)
    cols = rows if pairs.symmetric else _largest(pairs.columns)
    out = rows.new_empty(2)
    store_units[(1,)](out, rows, cols, len(rows), len(cols), TOP=TOP[form], BLOCK=1024)
    return out


def _largest(features: Tensor) -> Tensor:
    n, d = features.shape
    out = features.new_empty(cdiv(n, 16), dtype=torch.float32)
    largest[(len(out),)](features, *features.stride(), out, n, d, BLOCK=16, TD=64)
    return out


def _dtype(features: Tensor, form: int) -> torch.dtype:
    if form == COPY.value:
        return features.dtype
    return torch.float16 if form == SPLIT.value else torch.float8_e4m3fn


def _padded(d: int, dtype: torch.dtype) -> int:
    """Features of a row that ends at a multiple of 16 bytes."""
    return padded(d, 16 // dtype.itemsize)


def _begins_at_16_bytes(features: Tensor) -> bool:
    """Whether every row does, and holds its features side by side, as a descriptor wants it."""
    return (
        features.stride(1) == 1
        and features.stride(0) % (16 // features.element_size()) == 0
        and features.stride(0) >= features.shape[1]
        and features.data_ptr() % 16 == 0
    )
