"""Kernels that add up what several calls found: gradients, and packed stats."""

import triton
import triton.language as tl

from tilewise.backends.kernels import INF, LN2, LOG2E, wide


@triton.jit
def scaled(out, x, factor, gain, count, D, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """x (rows, D) times a factor, or where there are none times each row's gain, rounded once.

    Or added to what is there already.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if gain is None:
        value = value * tl.load(factor)
    else:
        value = value * tl.load(gain + at // D, inside, other=0.0)
    if ADD:
        value += tl.load(out + at, inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), inside)


@triton.jit
def parts(total, part, step, count, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add `count` partial sums of each slot, `step` numbers apart, to its total (size,)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros((PARTS, BLOCK), tl.float64)
    for k in range(0, count, PARTS):
        at_part = k + tl.arange(0, PARTS)
        inside = (at_part < count)[:, None] & (at < size)[None, :]
        there = part + at_part.to(tl.int64)[:, None] * step + at[None, :]
        found += tl.load(there, inside, other=0.0)
    sums = tl.load(total + at, at < size, other=0.0).to(tl.float64) + tl.sum(found, 0)
    tl.store(total + at, sums.to(tl.float32), at < size)


@triton.jit
def _log_add(a, b):
    """log(exp a + exp b) in fp64; -inf of two."""
    none = (a == -INF) & (b == -INF)
    top = tl.where(none, 0.0, tl.maximum(a, b))
    total = tl.exp2((a - top) * LOG2E) + tl.exp2((b - top) * LOG2E)
    lse = top + tl.log2(tl.where(none, 1.0, total)) * LN2
    return tl.where(none, -INF, tl.where((a == INF) | (b == INF), a + b, lse))


@triton.jit
def merge(a, a_step, a_slot, b, b_step, b_slot, size, K: tl.constexpr, BLOCK: tl.constexpr):
    """Packed `Stats` (K, size) over two sets of pairs as one, in the place of a.

    The same as `reductions.merge`.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    a_step, b_step = wide(a_step), wide(b_step)
    a += at.to(tl.int64) * a_slot
    b += at.to(tl.int64) * b_slot
    value, other = tl.load(a, inside).to(tl.float64), tl.load(b, inside).to(tl.float64)
    if K == 1:
        tl.store(a, (value + other).to(tl.float32), inside)
        return
    count = tl.load(a + 3 * a_step, inside).to(tl.float64)
    other_count = tl.load(b + 3 * b_step, inside).to(tl.float64)
    shift = tl.load(a + 4 * a_step, inside).to(tl.float64)
    other_shift = tl.load(b + 4 * b_step, inside).to(tl.float64)
    # Counted from the offset of the larger sum, or, without negatives, of the positives.
    none = (value == -INF) & (other == -INF)
    own = tl.where(none, count > 0, value + shift >= other + other_shift)
    offset = tl.where(own, shift, other_shift)
    shift -= offset
    other_shift -= offset
    tl.store(a, _log_add(value + shift, other + other_shift).to(tl.float32), inside)
    top = tl.load(a + a_step, inside).to(tl.float64) + shift
    other_top = tl.load(b + b_step, inside).to(tl.float64) + other_shift
    top = _log_add(tl.where(count > 0, top, -INF), tl.where(other_count > 0, other_top, -INF))
    tl.store(a + a_step, tl.where(count + other_count > 0, top, 0.0).to(tl.float32), inside)
    tl.store(a + 3 * a_step, (count + other_count).to(tl.float32), inside)
    tl.store(a + 4 * a_step, offset.to(tl.float32), inside)
    for k in tl.static_range(2, K, 3):  # sums of positives, and of negatives with their count
        if k == 5:
            count = tl.load(a + 6 * a_step, inside).to(tl.float64)
            other_count = tl.load(b + 6 * b_step, inside).to(tl.float64)
            tl.store(a + 6 * a_step, (count + other_count).to(tl.float32), inside)
        total = tl.load(a + k * a_step, inside).to(tl.float64) + count * shift
        total += tl.load(b + k * b_step, inside).to(tl.float64) + other_count * other_shift
        tl.store(a + k * a_step, total.to(tl.float32), inside)
