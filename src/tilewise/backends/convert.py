"""Kernels that make features ready for a product: the forms that `operands.py` describes."""

import triton
import triton.language as tl

from tilewise.backends.kernels import INF

COPY = tl.constexpr(0)
SPLIT = tl.constexpr(1)
FP8 = tl.constexpr(2)


@triton.jit
def _entries(x, x_row, x_col, row, at, n, D):
    """Entries (rows, features) of x (n, D), 0 outside."""
    start = x + row.to(tl.int64)[:, None] * x_row
    inside = (row < n)[:, None] & (at < D)[None, :]
    return tl.load(start + at.to(tl.int64)[None, :] * x_col, inside, other=0.0)


@triton.jit
def split(x, unit):
    """High and low part of x * unit, both fp16."""
    scaled = x.to(tl.float32) * unit
    high = scaled.to(tl.float16)
    return high, (scaled - high.to(tl.float32)).to(tl.float16)


@triton.jit
def largest(x, x_row, x_col, out, n, D, BLOCK: tl.constexpr, TD: tl.constexpr):
    """The largest finite |entry| of every BLOCK rows of x (n, D)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK, TD), tl.float32)
    for d in range(0, D, TD):
        v = tl.abs(_entries(x, x_row, x_col, row, d + tl.arange(0, TD), n, D).to(tl.float32))
        found = tl.maximum(found, tl.where(v < INF, v, 0.0))
    tl.store(out + tl.program_id(0), tl.max(tl.max(found, 1), 0))


@triton.jit
def _unit(found, size, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """The power of two that brings the largest of `found` (size,) to about 2^TOP."""
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(found + at, at < size, other=0.0))
    peak = tl.max(most, 0)
    # Denormal entries stay below 2^TOP: their unit would be no float.
    exponent = tl.minimum(TOP - tl.floor(tl.log2(tl.where(peak > 0, peak, 1.0))), 126.0)
    return tl.exp2(exponent)


@triton.jit
def store_units(out, rows, cols, num_rows, num_cols, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Units of rows and columns (2,), from what `largest` found."""
    tl.store(out, _unit(rows, num_rows, TOP, BLOCK))
    tl.store(out + 1, _unit(cols, num_cols, TOP, BLOCK))


@triton.jit
def convert(
    x, x_row, x_col, out, out_row, unit, flag, n, D,
    WIDTH: tl.constexpr, FORM: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    TD: tl.constexpr,
):  # fmt: skip
    """A panel of features (n, D) in another form, unless there is a flag and it is down.

    Split features are WIDTH = D and some zeros wide: 2 WIDTH of pairs, then high, then low parts.
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
    else:
        high, low = split(v, tl.load(unit))
        both = tl.interleave(high, low) if COLS else tl.interleave(low, high)
        twice = 2 * tl.program_id(1) * TD + tl.arange(0, 2 * TD)
        tl.store(there + twice[None, :], both, (row < n)[:, None] & (twice < 2 * WIDTH)[None, :])
        tl.store(there + 2 * WIDTH + at[None, :], high, inside)
        tl.store(there + 3 * WIDTH + at[None, :], low, inside)
