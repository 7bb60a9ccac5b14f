"""Gradients of float32 features on Hopper, in Gluon: the meaning is that of `split_products`.

A warp loads, two groups of four have the upper and the lower half of every tile. What a group adds
up outside of the tensor cores is hidden behind its own small products, and behind the other group.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends import convert
from tilewise.backends.hopper import halves, slots

REST = gl.constexpr(convert.REST.value)


@gluon.jit
def _ring(parts, STAGES: gl.constexpr):
    """Slots for both parts of dz, two tiles of each, and of features; barriers: full, empty."""
    high, rest, upper, lower = parts
    places = (
        gl.allocate_shared_memory(high.dtype, [2 * STAGES] + high.block_type.shape, high.layout),
        gl.allocate_shared_memory(rest.dtype, [2 * STAGES] + rest.block_type.shape, rest.layout),
        gl.allocate_shared_memory(upper.dtype, [STAGES] + upper.block_type.shape, upper.layout),
        gl.allocate_shared_memory(lower.dtype, [STAGES] + lower.block_type.shape, lower.layout),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(STAGES):
        mbarrier.init(full.index(k), 1)
        mbarrier.init(empty.index(k), 2)
    fence_async_shared()
    return places, full, empty


@gluon.jit
def _load(parts, ring, size, TURNED: gl.constexpr):
    """What the loading warp does: a step is TK pairs of a tile."""
    high, rest, upper, lower = parts
    places, full, empty = ring
    highs, rests, uppers, lowers = places
    count, blocks, k = size
    STAGES: gl.constexpr = uppers.shape[0]
    TK: gl.constexpr = uppers.shape[1]
    TD: gl.constexpr = uppers.shape[2]
    TN: gl.constexpr = highs.shape[2] if TURNED else highs.shape[1]
    BYTES: gl.constexpr = 2 * (2 * TN + TD) * TK * high.dtype.primitive_bitwidth // 8
    step = 0
    for t in range(gl.program_id(0), count, gl.num_programs(0)):
        i, j = t // blocks, t % blocks
        for pair in range(0, k, TK):
            slot = step % STAGES
            barrier = full.index(slot)
            mbarrier.wait(empty.index(slot), step // STAGES & 1 ^ 1)
            mbarrier.expect(barrier, BYTES)
            for h in gl.static_range(2):
                row = (2 * i + h) * TN
                if TURNED:
                    first, second = pair, row
                else:
                    first, second = row, pair
                place = 2 * slot + h
                tma.async_copy_global_to_shared(high, [first, second], barrier, highs.index(place))
                tma.async_copy_global_to_shared(rest, [first, second], barrier, rests.index(place))
            tma.async_copy_global_to_shared(upper, [pair, j * TD], barrier, uppers.index(slot))
            tma.async_copy_global_to_shared(lower, [pair, j * TD], barrier, lowers.index(slot))
            step += 1


@gluon.jit
def _as_rows(tile, TURNED: gl.constexpr):
    """A tile of dz (rows, pairs)."""
    if TURNED:
        return tile.permute((1, 0))
    else:
        return tile


@gluon.jit
def _store(out, total, small, row, col, n, D, ADD: gl.constexpr):
    """total + small / REST at (row, col) of out (n, D), or added to what there is."""
    pieces, less = halves(total), halves(small)
    for h in gl.static_range(2):
        x = pieces[h] + less[h] * (1 / REST)
        rows, cols = slots(x, row, col + h * x.shape[1])
        rows, cols = gl.expand_dims(rows, 1), gl.expand_dims(cols, 0)
        inside = (rows < n) & (cols < D)
        at = out + (rows.to(gl.int64) * D + cols)
        if ADD:
            x += gl.load(at, inside, other=0.0)
        gl.store(at, x, inside)


@gluon.jit
def _multiply(ring, out, n, D, size, ME: gl.constexpr, TURNED: gl.constexpr, ADD: gl.constexpr):
    """One group's half of every tile."""
    places, full, empty = ring
    highs, rests, uppers, lowers = places
    count, blocks, k = size
    STAGES: gl.constexpr = uppers.shape[0]
    TK: gl.constexpr = uppers.shape[1]
    TD: gl.constexpr = uppers.shape[2]
    TN: gl.constexpr = highs.shape[2] if TURNED else highs.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TD, 16])
    step = 0
    for t in range(gl.program_id(0), count, gl.num_programs(0)):
        total = gl.zeros((TN, TD), gl.float32, layout=layout)
        part, small = total, total
        for _ in range(0, k, TK):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            large = _as_rows(highs.index(2 * slot + ME), TURNED)
            little = _as_rows(rests.index(2 * slot + ME), TURNED)
            near, far = uppers.index(slot), lowers.index(slot)
            # A tensor core cuts off what it adds up. The large products begin anew with every TK
            # pairs, and their sums are rounded; of the small ones, 2^-11 of that is lost.
            part = warpgroup_mma(large, near, part, use_acc=False, is_async=True)
            small = warpgroup_mma(large, far, small, is_async=True)
            small = warpgroup_mma(little, near, small, is_async=True)
            part = warpgroup_mma_wait(2, deps=(part,))
            total += part
            small = warpgroup_mma_wait(0, deps=(small,))
            mbarrier.arrive(empty.index(slot))
            step += 1
        _store(out, total, small, (2 * (t // blocks) + ME) * TN, t % blocks * TD, n, D, ADD)


@gluon.jit
def split_product(
    high, rest, upper, lower, out, n, k, D,
    STAGES: gl.constexpr, TURNED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """`split_products.split_product`: out (n, D), in fp32, of tiles of twice as many rows."""
    parts = (high, rest, upper, lower)
    TN: gl.constexpr = high.block_type.shape[1 if TURNED else 0]
    TD: gl.constexpr = upper.block_type.shape[1]
    blocks = gl.cdiv(D, TD)
    ring, size = _ring(parts, STAGES), (gl.cdiv(n, 2 * TN) * blocks, blocks, k)
    gl.warp_specialize(
        [
            (_multiply, (ring, out, n, D, size, 0, TURNED, ADD)),
            (_multiply, (ring, out, n, D, size, 1, TURNED, ADD)),
            (_load, (parts, ring, size, TURNED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
