"""Kernels that close a log-sum-exp loss: from stats to a number, and from its gradient to theirs.

In plain PyTorch these are fifty launches of a few microseconds, as long as a small batch's sweep.
"""

import triton
import triton.language as tl

from tilewise.backends.kernels import LN2, LOG2E, wide


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) in fp64, to the last digits of a small one too."""
    small = tl.exp2(-tl.abs(x) * LOG2E)
    near = 1.0 + small
    # What rounding took from `near` is made good by the quotient.
    grown = tl.where(near == 1.0, 1.0, near - 1.0)
    log = tl.where(near == 1.0, small, tl.log2(near) * LN2 * (small / grown))
    return tl.where(x > 0.0, x, 0.0) + log


@triton.jit
def _slots(stats, at, size):
    """Logarithm of the odds against each slot's positive, in fp64; and whether it has one."""
    inside, step = at < size, wide(size)
    values = tl.load(stats + at, inside, other=0.0).to(tl.float64)
    positives = tl.load(stats + step + at, inside, other=0.0).to(tl.float64)
    return values - positives, tl.load(stats + 3 * step + at, inside, other=0.0) > 0


@triton.jit
def losses(rows, cols, weight, sums, N, M, BLOCK: tl.constexpr):
    """Sums over a block of slots of one side: their losses, and how many (or how heavy) they are.

    `sums` is (sides, 2, blocks).
    """
    block, side = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    stats, size = rows, tl.where(side == 1, M, N)
    if side == 1:
        stats = cols
    odds, has = _slots(stats, at, size)
    share = tl.where(has, 1.0, 0.0).to(tl.float64)
    if weight is not None:
        share = tl.where(has, tl.load(weight + at, at < size, other=0.0), 0.0).to(tl.float64)
    loss = tl.where(has, _softplus(odds) * share, 0.0)
    out = sums + 2 * side * tl.num_programs(0) + block
    tl.store(out, tl.sum(loss, 0))
    tl.store(out + tl.num_programs(0), tl.sum(share, 0))


@triton.jit
def average(sums, totals, out, divisors, blocks, world, GIVEN: tl.constexpr, MEAN: tl.constexpr,
            SIDES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The loss, the mean of the sides', and what a slot's loss is divided by (sides,).

    `totals` (sides,): how many slots count, written unless it is given, of all ranks of a world.
    """
    value = tl.zeros((1,), tl.float64)
    for side in tl.static_range(SIDES):
        loss, share = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        for start in range(0, blocks, BLOCK):
            at = start + tl.arange(0, BLOCK)
            there = sums + 2 * side * blocks + at
            loss += tl.load(there, at < blocks, other=0.0)
            share += tl.load(there + blocks, at < blocks, other=0.0)
        divisor = tl.full((1,), SIDES, tl.float64) / world
        if MEAN:
            total = tl.sum(share, 0)
            if GIVEN:
                total = tl.load(totals + side)
            else:
                tl.store(totals + side, total)
            # Without a slot that counts the loss is 0.
            divisor *= tl.where(total == 0.0, 1.0, total)
        value += tl.sum(loss, 0) / divisor
        tl.store(divisors + side + tl.arange(0, 1), divisor)
    tl.store(out + tl.arange(0, 1), value.to(tl.float32))


@triton.jit
def pull(rows, cols, weight, divisors, upstream, d_rows, d_cols, N, M, BLOCK: tl.constexpr):
    """Gradients (5, size) of both sides' stats, given that of the loss."""
    side = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stats, out, size = rows, d_rows, tl.where(side == 1, M, N)
    if side == 1:
        stats, out = cols, d_cols
    inside, step = at < size, wide(size)
    odds, has = _slots(stats, at, size)
    d = tl.load(upstream).to(tl.float64) / tl.load(divisors + side)
    d = d / (1.0 + tl.exp2(-odds * LOG2E))
    if weight is not None:
        d *= tl.load(weight + at, inside, other=0.0).to(tl.float64)
    d = tl.where(has, d, 0.0).to(tl.float32)
    tl.store(out + at, d, inside)
    tl.store(out + step + at, -d, inside)
    for k in tl.static_range(2, 5):
        tl.store(out + k * step + at, tl.zeros((BLOCK,), tl.float32), inside)
