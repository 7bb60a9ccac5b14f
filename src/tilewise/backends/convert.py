"""Kernels that make features ready for a product: the forms that `operands.py` describes."""

import triton
import triton.language as tl

COPY = tl.constexpr(0)
SPLIT = tl.constexpr(1)
FP8 = tl.constexpr(2)
HIGH_LOW = tl.constexpr(3)

# Half an ulp of fp16 times this is as large as the number itself, so it goes under no sooner.
REST = tl.constexpr(2048.0)
# Added to a float below 2^22 and taken away again, it leaves the nearest integer.
TO_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def _entries(x, x_row, x_col, row, at, n, D):
    """Entries (rows, features) of x (n, D), 0 outside."""
    start = x + row.to(tl.int64)[:, None] * x_row
    inside = (row < n)[:, None] & (at < D)[None, :]
    return tl.load(start + at.to(tl.int64)[None, :] * x_col, inside, other=0.0)


@triton.jit
def split(x, unit):
    """x * unit as a whole number and what is left of it, both fp16."""
    scaled = x.to(tl.float32) * unit
    whole = ((scaled + TO_INTEGER) - TO_INTEGER).to(tl.float16)
    return whole, (scaled - whole.to(tl.float32)).to(tl.float16)


@triton.jit
def high_low(x):
    """High part of x in fp16, and what that leaves, times REST."""
    high = x.to(tl.float16)
    return high, ((x - high.to(tl.float32)) * REST).to(tl.float16)


@triton.jit
def longest(x, x_row, x_col, out, n, D, BLOCK: tl.constexpr, TD: tl.constexpr):
    """The length of the longest of every BLOCK rows of x (n, D), of finite entries only."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    square = tl.zeros((BLOCK, TD), tl.float64)
    for d in range(0, D, TD):
        v = _entries(x, x_row, x_col, row, d + tl.arange(0, TD), n, D).to(tl.float64)
        square += tl.where(v * 0.0 == 0.0, v * v, 0.0)
    length = tl.sqrt(tl.max(tl.sum(square, 1), 0))
    # A row of floats may be longer than a float.
    tl.store(out + tl.program_id(0), tl.minimum(length, 3.4e38).to(tl.float32))


@triton.jit
def _unit(found, size, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """The power of two that brings the largest of `found` (size,) to about 2^TOP."""
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(found + at, at < size, other=0.0))
    peak = tl.max(most, 0)
    # Nearest, so that rows of length 1, give or take a rounding, come to 2^TOP. Denormal rows stay
    # shorter: their unit would be no float.
    exponent = tl.floor(tl.log2(tl.where(peak > 0, peak, 1.0)) + 0.5)
    return tl.exp2(tl.minimum(TOP - exponent, 126.0))


@triton.jit
def store_units(out, rows, cols, num_rows, num_cols, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Units of rows and columns (2,), from what `longest` found."""
    tl.store(out, _unit(rows, num_rows, TOP, BLOCK))
    tl.store(out + 1, _unit(cols, num_cols, TOP, BLOCK))


@triton.jit
def convert(
    x, x_row, x_col, out, out_row, unit, flag, n, D,
    WIDTH: tl.constexpr, WHOLE_AT: tl.constexpr, FORM: tl.constexpr, COLS: tl.constexpr,
    BLOCK: tl.constexpr, TD: tl.constexpr,
):  # fmt: skip
    """A panel of features (n, D) in another form, unless there is a flag and it is down.

    Parts of features are WIDTH = D and some zeros wide. SPLIT: what is left, 2 WIDTH of pairs,
    zeros, and from WHOLE_AT whole numbers. HIGH_LOW: high, then low parts.
    """
    if flag is not None:
        if tl.load(flag) == 0:
            return
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1) * TD + tl.arange(0, TD)
    v = _entries(x, x_row, x_col, row, at, n, D)
    there = out + row.to(tl.int64)[:, None] * out_row
    inside = (row < n)[:, None] & (at < WIDTH)[None, :]
    if FORM == COPY:
        tl.store(there + at[None, :], v, inside)
    elif FORM == FP8:
        v = v.to(tl.float32) * tl.load(unit)
        tl.store(there + at[None, :], v.to(tl.float8e4nv), inside)
    elif FORM == HIGH_LOW:
        high, low = high_low(v * tl.load(unit))
        tl.store(there + at[None, :], high, inside)
        tl.store(there + WIDTH + at[None, :], low, inside)
    else:
        whole, left = split(v, tl.load(unit))
        both = tl.interleave(whole, left) if COLS else tl.interleave(left, whole)
        twice = 2 * tl.program_id(1) * TD + tl.arange(0, 2 * TD)
        pair = (row < n)[:, None] & (twice < 2 * WIDTH)[None, :]
        tl.store(there + at[None, :], left, inside)
        tl.store(there + WIDTH + twice[None, :], both, pair)
        gap = (row < n)[:, None] & (at < WHOLE_AT - 3 * WIDTH)[None, :]
        tl.store(there + 3 * WIDTH + at[None, :], tl.zeros_like(whole), gap)
        tl.store(there + WHOLE_AT + at[None, :], whole, inside)
