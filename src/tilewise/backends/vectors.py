"""Kernels over vectors: what a sweep needs beforehand.

Whatever stands in a whole row of numbers is computed in fp64 and rounded once.
"""

import triton
import triton.language as tl

from tilewise.backends.convert import split
from tilewise.backends.kernels import (
    ALIGNED,
    COL_POISON,
    FACTOR,
    INDEX,
    INF,
    LABEL,
    LOG2E,
    OFFSET2,
    PEAK,
    ROW_POISON,
    SCALE,
    SCALE2,
    wide,
)

# Room below fp32's overflow, in log 2, for sums of 2^30 terms and their inverses.
HEADROOM = tl.constexpr(89.0)


@triton.jit
def _inverse(units):
    """What a product of features converted by `units` is to be multiplied with, in fp64."""
    return 1.0 / (tl.load(units).to(tl.float64) * tl.load(units + 1).to(tl.float64))


@triton.jit
def _length(square, spoilt):
    """Of rows, from squares of their numbers (rows, TD); NaN where one is `spoilt`."""
    # A finite row may be longer than a float: then it is the longest float, and no offset holds.
    return tl.minimum(tl.sqrt(tl.sum(square, 1)), 3.4e38) + tl.sum(spoilt, 1)


@triton.jit
def _add_product(products, left, right, units, PART: tl.constexpr):
    """Products of features (rows, TD) of both sides, added; of split ones a PART of the three."""
    if units is not None:
        whole, rest = split(left, tl.load(units))
        far_whole, far_rest = split(right, tl.load(units + 1))
        if PART == 0:
            left, right = rest, far_rest
        elif PART == 1:
            left, right = tl.interleave(rest, whole), tl.interleave(far_whole, far_rest)
        else:
            left, right = whole, far_whole
    return tl.dot(left, right.T, products)


@triton.jit
def measure(
    x, x_row, x_col, other, other_row, other_col, units, index, norm, other_norm, dot, N, M, D,
    KIND: tl.constexpr, BLOCK: tl.constexpr, TD: tl.constexpr,
):  # fmt: skip
    """Length of each row of x (N, D), and its product with its positive in `other` (M, D).

    Where row i of x and of `other` are such a pair, `other_norm` may take the other lengths too.
    The product is made as those of the tiles are, split by `units` where they are: tensor cores
    cut off what they add up, and a gradient that is the difference of positives and negatives must
    see the same on both sides.
    """
    PAIRED: tl.constexpr = KIND == ALIGNED or KIND == INDEX
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = x + row.to(tl.int64)[:, None] * x_row
    partner = row
    if KIND == INDEX:
        partner = tl.load(index + row, row < N, other=0)
    partner = tl.minimum(tl.maximum(partner, 0), M - 1)
    there = other + partner.to(tl.int64)[:, None] * other_row
    products = tl.zeros((BLOCK, BLOCK), tl.float32)
    # Summed up at the end: within the loop, lanes would wait for each other at every step.
    square, spoilt = tl.zeros((BLOCK, TD), tl.float32), tl.zeros((BLOCK, TD), tl.float32)
    other_square, other_spoilt = square, spoilt
    for d in range(0, D, TD):
        at = d + tl.arange(0, TD)[None, :]
        inside = (row[:, None] < N) & (at < D)
        left = tl.load(start + at.to(tl.int64) * x_col, inside, other=0.0)
        v = left.to(tl.float32)
        square += v * v
        spoilt += v * 0.0
        if PAIRED:
            right = tl.load(there + at.to(tl.int64) * other_col, inside, other=0.0)
            if other_norm is not None:
                v = right.to(tl.float32)
                other_square += v * v
                other_spoilt += v * 0.0
            products = _add_product(products, left, right, units, 0)
    if units is not None and PAIRED:
        for part in tl.static_range(1, 3):
            for d in range(0, D, TD):
                at = d + tl.arange(0, TD)[None, :]
                inside = (row[:, None] < N) & (at < D)
                left = tl.load(start + at.to(tl.int64) * x_col, inside, other=0.0)
                right = tl.load(there + at.to(tl.int64) * other_col, inside, other=0.0)
                products = _add_product(products, left, right, units, part)
    tl.store(norm + row, _length(square, spoilt), row < N)
    if other_norm is not None:
        tl.store(other_norm + row, _length(other_square, other_spoilt), row < N)
    if PAIRED:
        own = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
        product = tl.sum(tl.where(own, products, 0.0), 1)
        if units is not None:
            product = (product.to(tl.float64) * _inverse(units)).to(tl.float32)
        tl.store(dot + row, product, row < N)


@triton.jit
def _longest(norm, size, BLOCK: tl.constexpr):
    """The largest of norms, and 0 or NaN where one is not finite."""
    longest, spoilt = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(norm + at, at < size, other=0.0)
        longest = tl.maximum(longest, x)
        spoilt += x * 0.0
    return tl.max(longest, 0), tl.sum(spoilt, 0)


@triton.jit
def _store_scale(head, scale, units):
    """The scale, and in units of log 2; returned as both.

    What tiles multiply with takes back the `units` of the features, powers of two.
    """
    factor = tl.load(scale).to(tl.float32)
    scale2 = (factor.to(tl.float64) * LOG2E).to(tl.float32)
    tl.store(head + SCALE, factor)
    inverse = 1.0 if units is None else _inverse(units)
    tl.store(head + SCALE2, (scale2.to(tl.float64) * inverse).to(tl.float32))
    return factor, scale2


@triton.jit
def begin(head, memo, row_norm, col_norm, scale, units, N, M, BLOCK: tl.constexpr):
    """The head of a forward: scale, a fixed offset that no exponent exceeds by HEADROOM, poison."""
    factor, scale2 = _store_scale(head, scale, units)
    rows, row_spoilt = _longest(row_norm, N, BLOCK)
    cols, col_spoilt = _longest(col_norm, M, BLOCK)
    bound = tl.abs(scale2) * rows * cols
    offset = tl.maximum(0.0, bound - HEADROOM)
    bad = (bound < INF) == 0
    tl.store(head + OFFSET2, tl.where(bad, 0.0, offset))
    tl.store(memo, tl.where(bad, 0.0, offset))
    tl.store(memo + 1, tl.where(bad, 1.0, 0.0))
    tl.store(head + ROW_POISON, row_spoilt + factor * 0.0)
    tl.store(head + COL_POISON, col_spoilt + factor * 0.0)


@triton.jit
def _largest(d, size, largest, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest gradient of a side's numbers, or `largest`."""
    step = wide(size)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < size
        for k in tl.static_range(3):
            largest = tl.maximum(largest, tl.abs(tl.load(d + k * step + at, inside, other=0.0)))
        if SUMS:
            largest = tl.maximum(largest, tl.abs(tl.load(d + 5 * step + at, inside, other=0.0)))
    return largest


@triton.jit
def survey(head, memo, d_rows, d_cols, scale, units, N, M, MULTIPLIER: tl.constexpr,
           SUMS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The head of a backward. Its offset is the forward's: the same logits, to the last bit."""
    largest = _largest(d_rows, N, tl.zeros((BLOCK,), tl.float32), SUMS, BLOCK)
    if COLUMNS:
        largest = _largest(d_cols, M, largest, SUMS, BLOCK)
    top = tl.max(largest, 0)
    # Powers of two divide exactly. exp2 of an integer is one.
    peak = tl.where(top > 0, tl.exp2(tl.floor(tl.log2(top))), 1.0)
    factor, _ = _store_scale(head, scale, units)
    tl.store(head + OFFSET2, tl.load(memo))
    tl.store(head + PEAK, peak / MULTIPLIER)
    tl.store(head + FACTOR, factor * (peak / MULTIPLIER))


@triton.jit
def _gain(d, lse2, shift2):
    """d * exp2(shift - lse), in fp64 and rounded once; 0 where nothing was summed."""
    # Compared so that NaN stays NaN: a row that cannot be right must not have a quiet gradient.
    none = lse2 == -INF
    gain = d * tl.exp2(tl.where(none, 0.0, shift2.to(tl.float64) - lse2))
    return tl.where(none, 0.0, gain).to(tl.float32)


@triton.jit
def gains(
    head, flag, row_stats, d_rows, row_vectors, at_positive, col_stats, d_cols, col_vectors, index,
    N, M, KIND: tl.constexpr, SUMS: tl.constexpr, COLUMNS: tl.constexpr, FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of rows and, in programs (_, 1), of columns; see `_gains`."""
    if tl.program_id(1) == 0:
        _gains(head, flag, row_stats, d_rows, d_cols, index, row_vectors, at_positive, N, M,
               KIND, SUMS, COLUMNS, FIXED, BLOCK)  # fmt: skip
    else:
        _gains(head, flag, col_stats, d_cols, d_rows, index, col_vectors, None, M, N,
               KIND, SUMS, COLUMNS, FIXED, BLOCK)  # fmt: skip


@triton.jit
def _gains(
    head, flag, stats, d, other_d, index, vectors, at_positive, size, others,
    KIND: tl.constexpr, SUMS: tl.constexpr, COLUMNS: tl.constexpr, FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What `_side_dz` takes for one side (6, size), and for rows the dz of their one positive.

    Gains count from the fixed offset where it serves all, else from each slot's own.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, step = at < size, wide(size)
    peak = tl.load(head + PEAK)
    value = tl.load(stats + at, inside, other=-INF).to(tl.float64)
    offset = tl.load(stats + 4 * step + at, inside, other=0.0).to(tl.float64)
    shift = (offset * LOG2E).to(tl.float32)
    if FIXED:
        shift = tl.where(tl.load(flag) == 0, tl.load(head + OFFSET2), shift)
    by_value = tl.load(d + at, inside, other=0.0) / peak
    by_top = tl.load(d + step + at, inside, other=0.0) / peak
    by_sum = tl.load(d + 2 * step + at, inside, other=0.0) / peak
    tl.store(vectors + at, _gain(by_value.to(tl.float64), (value + offset) * LOG2E, shift), inside)
    tl.store(vectors + step + at, shift, inside)
    if KIND == LABEL:
        top = (tl.load(stats + step + at, inside, other=0.0).to(tl.float64) + offset) * LOG2E
        near = top.to(tl.float32)
        tl.store(vectors + 2 * step + at, _gain(by_top.to(tl.float64), top, near), inside)
        tl.store(vectors + 3 * step + at, near, inside)
        tl.store(vectors + 4 * step + at, by_sum, inside)
    elif at_positive is not None:
        own = by_top + by_sum
        if COLUMNS:
            column = at.to(tl.int64)
            if KIND == INDEX:
                column = tl.load(index + at, inside, other=-1).to(tl.int64)
            there = inside & (column >= 0) & (column < others)
            step_there = wide(others)
            own += tl.load(other_d + step_there + column, there, other=0.0) / peak
            own += tl.load(other_d + 2 * step_there + column, there, other=0.0) / peak
        tl.store(at_positive + at, own, inside)
    if SUMS:
        tl.store(
            vectors + 5 * step + at, tl.load(d + 5 * step + at, inside, other=0.0) / peak, inside
        )
