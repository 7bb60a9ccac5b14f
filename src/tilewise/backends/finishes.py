"""Kernels that make `Stats` of what a sweep summed up, of rows and columns in one launch.

In fp64, rounded once.
"""

import triton
import triton.language as tl

from tilewise.backends.kernels import (
    ALIGNED,
    COL_POISON,
    INDEX,
    INF,
    LABEL,
    LN2,
    OFFSET2,
    ROW_POISON,
    SCALE,
    scale_of_tiles,
    wide,
)

# Of partial sums of a slot: there are none yet, there will be no more.
FIRST, LAST = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def finish(
    row_part, row_more, row_out, row_norm, col_part, col_more, col_out, col_norm, head, flag, dot,
    index, row_parts, row_first, row_span, col_parts, col_first, col_span, N, M,
    KIND: tl.constexpr, SELF: tl.constexpr, SYMMETRIC: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial sums of rows and, in programs (_, 1), of columns; see `_finish` and `Sums.turn`."""
    if tl.program_id(1) == 0:
        _finish(row_part, row_more, row_out, head, flag, row_norm, dot, index, row_parts, row_first,
                row_span, N, M, KIND, SELF, SYMMETRIC, False, ROWS, PARTS, BLOCK)  # fmt: skip
    else:
        _finish(col_part, col_more, col_out, head, flag, col_norm, dot, index, col_parts, col_first,
                col_span, M, N, KIND, SELF, SYMMETRIC, True, COLS, PARTS, BLOCK)  # fmt: skip


@triton.jit
def _finish(
    part, more, out, head, flag, norm, dot, index, parts, first, span, size, others,
    KIND: tl.constexpr, SELF: tl.constexpr, SYMMETRIC: tl.constexpr, COLS: tl.constexpr,
    TURN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add partial sums (parts, span) to slots from `first` on of `more` (size,), in fp64.

    The FIRST ones there are no others; the LAST ones make `Stats` of them. A sum that may have lost
    terms to underflow, or that overflowed, raises the flag.
    """
    local = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = first + local
    inside = (local < span) & (at < size)
    total = tl.zeros((BLOCK,), tl.float64)
    if (FIRST & TURN) == 0:
        total = tl.load(more + at, inside, other=0.0)
    # PARTS of them at a time: one by one, each load would wait for the last.
    found = tl.zeros((PARTS, BLOCK), tl.float64)
    for k in range(0, parts, PARTS):
        at_part = k + tl.arange(0, PARTS)
        there = part + at_part.to(tl.int64)[:, None] * span + local[None, :]
        found += tl.load(there, (at_part < parts)[:, None] & inside[None, :], other=0.0)
    total += tl.sum(found, 0)
    tl.store(more + at, total, inside)
    if (LAST & TURN) != 0:
        least = others * 2.0**-102
        fine = (total >= least) & (total < INF)
        if tl.sum((inside & (fine == 0)).to(tl.int32), 0) > 0:
            tl.store(flag, 1.0)
        lse = tl.where(total > 0, (tl.log2(tl.where(total > 0, total, 1.0))
                                   + tl.load(head + OFFSET2)) * LN2, -INF)  # fmt: skip
        logit, count, poison = _one_positive(
            dot, index, norm, head, at, size, others, KIND, SELF, SYMMETRIC, COLS
        )
        _write(out, at, inside, wide(size), lse, logit, logit, count, poison)


@triton.jit
def finish_marked(
    row_found, row_out, row_norm, col_found, col_out, col_norm, head, flag, dot, index, N, M,
    KIND: tl.constexpr, SELF: tl.constexpr, SYMMETRIC: tl.constexpr, SUMS: tl.constexpr,
    ON_FLAG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`Stats` of rows and, in programs (_, 1), of columns, where the flag is up or ON_FLAG not."""
    if ON_FLAG:
        if tl.load(flag) == 0:
            return
    if tl.program_id(1) == 0:
        _finish_marked(row_found, row_out, head, row_norm, dot, index, N, M, KIND, SELF, SYMMETRIC,
                       False, SUMS, BLOCK)  # fmt: skip
    else:
        _finish_marked(col_found, col_out, head, col_norm, dot, index, M, N, KIND, SELF, SYMMETRIC,
                       True, SUMS, BLOCK)  # fmt: skip


@triton.jit
def _finish_marked(
    found, out, head, norm, dot, index, size, others,
    KIND: tl.constexpr, SELF: tl.constexpr, SYMMETRIC: tl.constexpr, COLS: tl.constexpr,
    SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`Stats` from what `marked_sums` found (8, size)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, step = at < size, wide(size)
    top = tl.load(found + at, inside, other=0.0).to(tl.float64)
    total = tl.load(found + step + at, inside, other=0.0).to(tl.float64)
    # A sum of NaN is no sum of nothing.
    none = (total == 0.0) & (top == -INF)
    lse = tl.where(none, -INF, (top + tl.log2(tl.where(none, 1.0, total))) * LN2)
    logit, count, poison = _one_positive(
        dot, index, norm, head, at, size, others, KIND, SELF, SYMMETRIC, COLS
    )
    logits = logit
    if KIND == LABEL:
        top = tl.load(found + 2 * step + at, inside, other=0.0).to(tl.float64)
        total = tl.load(found + 3 * step + at, inside, other=0.0).to(tl.float64)
        logits = tl.load(found + 4 * step + at, inside, other=0.0).to(tl.float64) * LN2
        count = tl.load(found + 5 * step + at, inside, other=0.0).to(tl.float64)
        logit = (top + tl.log2(tl.where(count > 0, total, 1.0))) * LN2
    offset = _write(out, at, inside, step, lse, logit, logits, count, poison)
    if SUMS:
        summed = tl.load(found + 6 * step + at, inside, other=0.0).to(tl.float64) * LN2
        number = tl.load(found + 7 * step + at, inside, other=0.0)
        tl.store(
            out + 5 * step + at, (summed - number * offset.to(tl.float64)).to(tl.float32), inside
        )
        tl.store(out + 6 * step + at, number, inside)


@triton.jit
def _one_positive(dot, index, norm, head, at, size, others, KIND: tl.constexpr,
                  SELF: tl.constexpr, SYMMETRIC: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Of slots with at most one positive: its logit and count in fp64, and the slots' poison."""
    inside = at < size
    poison = tl.load(norm + at, inside, other=0.0) * 0.0
    poison += tl.load(head + (ROW_POISON if COLS else COL_POISON))
    partner = at.to(tl.int64)
    if KIND == INDEX:
        partner = tl.load(index + at, inside, other=-1).to(tl.int64)
        wrong = (partner < -1) | (partner >= others)
        if SYMMETRIC:
            legal = (partner >= 0) & (partner < others)
            back = tl.load(index + tl.where(legal, partner, 0)).to(tl.int64)
            wrong = wrong | (legal & (back != at))
        poison = tl.where(wrong, float("nan"), poison)
        if SELF:
            partner = tl.where(partner == at, -1, partner)
    logit = tl.zeros(at.shape, tl.float64)
    count = tl.zeros(at.shape, tl.float64)
    if KIND == ALIGNED or KIND == INDEX:
        has = inside & (partner >= 0) & (partner < others)
        scale = scale_of_tiles(tl.load(head + SCALE))
        logit = tl.load(dot + at, has, other=0.0).to(tl.float64) * scale
        count = has.to(tl.float64)
    return logit, count, poison


@triton.jit
def _write(out, at, inside, step, lse, positive, positive_sum, positive_count, poison):
    """`Stats` of slots from log-sum-exps in fp64 (-inf for none) and a poison of 0 or NaN."""
    some = positive_count > 0
    near = tl.where(lse > -INF, lse, tl.where(some, positive, 0.0))
    near = tl.where((near < INF) & (near > -INF), near, 0.0)
    offset = near.to(tl.float32)
    gap = tl.where(some, positive - offset, 0.0)
    spoilt = (poison == 0.0) == 0
    tl.store(out + at, (lse - offset).to(tl.float32) + poison, inside)
    tl.store(out + step + at, gap.to(tl.float32) + poison, inside)
    total = (positive_sum - positive_count * offset).to(tl.float32)
    tl.store(out + 2 * step + at, tl.where(some, total, 0.0), inside)
    tl.store(out + 3 * step + at, tl.where(spoilt, 1.0, positive_count.to(tl.float32)), inside)
    tl.store(out + 4 * step + at, offset, inside)
    return offset
