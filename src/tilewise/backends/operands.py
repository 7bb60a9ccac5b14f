"""Features made ready for the kernels, a panel at a time: the only place that knows their form.

A panel of plain features is a slice of them; features whose rows do not begin at multiples of 16
bytes are copied. fp8 and fp32 features are first multiplied with a power of two, their `unit`.

fp8: the unit makes the longest row about 2^8 long.

fp32 is split, in one way for scores and in another for gradients. Scores are products of whole
numbers and of what is left of the features: the unit makes the longest row about 2^12 long, so
that a sum of products of whole numbers is below 2^24, and a tensor core, which cuts off sums to 24
bits, has nothing to cut off. One product over features

    rows (l | l, w, l, w, ... | w)    columns (l | w, l, w, l, ... | w)

is l*l + (l*w + w*l) + w*w, small terms first. Mirrored, the two in brackets trade places within one
step of a tensor core: pair (i, j) and pair (j, i) are the same number. Where whole numbers begin, a
kernel may begin a second sum, so that the score is rounded and not cut off. Scores of converted
features are too large by the units of both sides. Gradients are products with high = fp16(x * unit)
and low = fp16(2^11 (x * unit - high)), which hold 22 bits of every x.
"""

import torch
from torch import Tensor

from tilewise.backends.convert import (
    COPY,
    FP8,
    HIGH_LOW,
    SPLIT,
    convert,
    longest,
    store_units,
)
from tilewise.pairs import Pairs
from tilewise.tiles import cdiv, padded

# The longest row is made 2^(top - 1/2) to 2^(top + 1/2) long. fp16 has all integers up to 2^11 and
# every other one up to 2^12; e4m3 ends at 448.
TOP = {SPLIT.value: 12, FP8.value: 8}
# No kernel multiplies more features of fp16 at a time, and no such slice holds both parts of a sum.
SLICE = 64


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
        return self._row_size(self.form) if self.form == SPLIT.value else self.features.shape[1]

    @property
    def whole_at(self) -> int:
        """Of features in parts, where the whole numbers begin; 0 of others."""
        return _whole_at(self.features.shape[1]) if self.form == SPLIT.value else 0

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
            panel = self._hold(HIGH_LOW.value, span)
            return panel[:, :d], panel[:, panel.shape[1] // 2 :][:, :d]
        return (self.features[span] if self.even else self._hold(COPY.value, span)[:, :d],)

    def _forms(self) -> set[int]:
        """Those in which panels are held."""
        if self.form == SPLIT.value:
            return {SPLIT.value, HIGH_LOW.value}
        return ({self.form} - {COPY.value}) | (set() if self.even else {COPY.value})

    def _row_size(self, form: int) -> int:
        """Numbers from one row of a buffer to the next."""
        d = self.features.shape[1]
        width = _padded(d, _dtype(self.features, form))
        if form == SPLIT.value:
            return _whole_at(d) + width
        return 2 * width if form == HIGH_LOW.value else width

    def _hold(self, form: int, span: slice, flag: Tensor | None = None) -> Tensor:
        """The buffer (n, row size), filled with a span unless that is in it."""
        source = self.features[span]
        (n, d), size = source.shape, self._row_size(form)
        last, buffer = self._held.pop(form, (None, source[:0]))
        if len(buffer) < n:
            del buffer  # before the next, so that there is one
            buffer = source.new_empty(n, size, dtype=_dtype(source, form))
        if last != span:
            width = d if form in (COPY.value, FP8.value) else _padded(d, buffer.dtype)
            convert[(cdiv(n, 16), cdiv(width, 64))](
                source, *source.stride(), buffer, size, self.unit, flag, n, d,
                WIDTH=width, WHOLE_AT=_whole_at(d), FORM=form, COLS=self.cols, BLOCK=16, TD=64,
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
    rows = _longest(pairs.rows)
    cols = rows if pairs.symmetric else _longest(pairs.columns)
    out = rows.new_empty(2)
    store_units[(1,)](out, rows, cols, len(rows), len(cols), TOP=TOP[form], BLOCK=1024)
    return out


def _longest(features: Tensor) -> Tensor:
    n, d = features.shape
    out = features.new_empty(cdiv(n, 16), dtype=torch.float32)
    longest[(len(out),)](features, *features.stride(), out, n, d, BLOCK=16, TD=64)
    return out


def _dtype(features: Tensor, form: int) -> torch.dtype:
    if form == COPY.value:
        return features.dtype
    return torch.float8_e4m3fn if form == FP8.value else torch.float16


def _padded(d: int, dtype: torch.dtype) -> int:
    """Features of a row that ends at a multiple of 16 bytes."""
    return padded(d, 16 // dtype.itemsize)


def _whole_at(d: int) -> int:
    """The first slice after what is left over of d features, and zeros."""
    return padded(3 * _padded(d, torch.float16), SLICE)


def _begins_at_16_bytes(features: Tensor) -> bool:
    """Whether every row does, and holds its features side by side, as a descriptor wants it."""
    return (
        features.stride(1) == 1
        and features.stride(0) % (16 // features.element_size()) == 0
        and features.stride(0) >= features.shape[1]
        and features.data_ptr() % 16 == 0
    )
