"""The main kernels for Hopper, in Gluon: one group of warps multiplies, one makes use of it.

A warp loads, two groups of four take tile after tile in turn. While one has the tensor cores, the
other folds or stores what it has just multiplied, so that exp and stores are hidden. The meaning
of each kernel is that of its namesake in `kernels` and `dz`, which other devices run.
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

from tilewise.backends import kernels

# The head of a sweep, as the other kernels read it.
SCALE2 = gl.constexpr(kernels.SCALE2.value)
OFFSET2 = gl.constexpr(kernels.OFFSET2.value)
SCALE = gl.constexpr(kernels.SCALE.value)
BIAS = gl.constexpr(kernels.BIAS.value)
LOG2E = gl.constexpr(kernels.LOG2E.value)
LN2 = gl.constexpr(kernels.LN2.value)
FARTHEST = gl.constexpr(3e38)

# The same text, read as Gluon.
_stored = gluon.jit(kernels.stored.fn)


@gluon.jit
def ring_of(rows, cols, STAGES: gl.constexpr):
    """Slots for features on their way, and barriers: filled, emptied, whose turn it is."""
    left = gl.allocate_shared_memory(rows.dtype, [STAGES] + rows.block_type.shape, rows.layout)
    right = gl.allocate_shared_memory(cols.dtype, [STAGES] + cols.block_type.shape, cols.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(STAGES):
        mbarrier.init(full.index(k), 1)
        mbarrier.init(empty.index(k), 1)
    for k in gl.static_range(2):
        mbarrier.init(turn.index(k), 1)
    fence_async_shared()
    return left, right, full, empty, turn


@gluon.jit
def product(ring, count, ME: gl.constexpr, D: gl.constexpr):
    """Products of features (TN, TM) of this group's tile number `count`, when it has its turn."""
    left, right, full, empty, turn = ring
    STAGES: gl.constexpr = left.shape[0]
    TN: gl.constexpr = left.shape[1]
    TM: gl.constexpr = right.shape[1]
    STEPS: gl.constexpr = (D + left.shape[2] - 1) // left.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TM, 16])
    k = (2 * count + ME) * STEPS
    mbarrier.wait(turn.index(ME), count & 1 ^ (1 - ME))
    s = gl.zeros((TN, TM), gl.float32, layout=layout)
    for step in range(STEPS):
        slot = k % STAGES
        mbarrier.wait(full.index(slot), k // STAGES & 1)
        s = warpgroup_mma(
            left.index(slot), right.index(slot).permute((1, 0)), s, use_acc=step > 0, is_async=True
        )
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(empty.index((k + STAGES - 1) % STAGES), pred=step > 0)
        k += 1
    mbarrier.arrive(turn.index(1 - ME))
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(empty.index((k + STAGES - 1) % STAGES))
    return s


# Strips


@gluon.jit
def blocks_of(share, height, num_m, LANES: gl.constexpr):
    """Column blocks that a group of LANES programs takes: its share of all tiles, in order."""
    start = gl.program_id(0) // LANES * share
    return start // height, gl.minimum(gl.cdiv(start + share, height), num_m)


@gluon.jit
def strip_of(block, share, height, LANES: gl.constexpr):
    """Steps of a block that this program walks down: of its group's, an equal part.

    A step is two tiles, one for each group of warps; the last rows' second may lie past the edge.
    """
    start = gl.program_id(0) // LANES * share - block * height
    lane = gl.program_id(0) % LANES
    first, last = gl.maximum(start, 0), gl.minimum(start + share, height)
    return first + lane * (last - first) // LANES, first + (lane + 1) * (last - first) // LANES


@gluon.jit
def _load_tile(rows, cols, ring, k, i, j, D: gl.constexpr):
    """Load the features of a tile into slots from number k on, as they become empty."""
    left, right, full, empty, _ = ring
    STAGES: gl.constexpr = left.shape[0]
    TN: gl.constexpr = left.shape[1]
    TM: gl.constexpr = right.shape[1]
    TD: gl.constexpr = left.shape[2]
    BYTES: gl.constexpr = (TN + TM) * TD * rows.dtype.primitive_bitwidth // 8
    for d in range(0, D, TD):
        slot = k % STAGES
        mbarrier.wait(empty.index(slot), k // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(slot), BYTES)
        tma.async_copy_global_to_shared(rows, [i * TN, d], full.index(slot), left.index(slot))
        tma.async_copy_global_to_shared(cols, [j * TM, d], full.index(slot), right.index(slot))
        k += 1
    return k


@gluon.jit
def load_strips(
    rows, cols, ring, share, height, num_m, D: gl.constexpr, LANES: gl.constexpr
):  # fmt: skip
    """What the loading warp does."""
    k = 0
    begin, end = blocks_of(share, height, num_m, LANES)
    for block in range(begin, end):
        first, last = strip_of(block, share, height, LANES)
        for i in range(2 * first, 2 * last):
            k = _load_tile(rows, cols, ring, k, i, block, D)


@gluon.jit
def exponent_of(head):
    """What `exp_scaled` needs of the head, loaded once."""
    scale2 = gl.load(head + SCALE2)
    # So little is nothing to a logit, but leaves FARTHEST far below all others.
    scale2 = gl.where(gl.abs(scale2) < 1e-30, 1e-30, scale2)
    return scale2, gl.load(head + OFFSET2)


@gluon.jit
def exp_scaled(s, exponent):
    """exp2(z - offset) of products of features, z in units of log 2."""
    scale2, offset2 = exponent
    return gl.exp2(s * scale2 - offset2)


@gluon.jit
def slots(s, row, col):
    """Rows (TN,) and columns (TM,) of a tile `s` that begins at (row, col)."""
    rows = row + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))
    cols = col + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    return rows, cols


@gluon.jit
def on_diagonal(s, row, col):
    """Whether a tile that begins at (row, col) has pairs (i, i)."""
    return (row < col + s.shape[1]) & (col < row + s.shape[0])


@gluon.jit
def _mixed(s, row, col, N, M, DIAGONAL: gl.constexpr):
    """Whether a tile at (row, col) has pairs that are no negatives: (i, i), or past the edge."""
    past = (row + s.shape[0] > N) | (col + s.shape[1] > M)
    if DIAGONAL:
        past = past | on_diagonal(s, row, col)
    return past


@gluon.jit
def _negatives(s, instead, row, col, N, M, DIAGONAL: gl.constexpr):
    """Products of a tile at (row, col), with `instead` wherever a pair is no negative."""
    # Counted from the tile's own corner, columns are constants and take no registers.
    rows, cols = slots(s, 0, 0)
    rows, cols = gl.expand_dims(rows, 1), gl.expand_dims(cols, 0)
    inside = (rows < N - row) & (cols < M - col)
    if DIAGONAL:
        inside = inside & (rows + (row - col) != cols)
    return gl.where(inside, s, instead)


@gluon.jit
def halves(s):
    """A tile (TN, TM) in two, left and right."""
    return gl.split(gl.permute(gl.reshape(s, (s.shape[0], 2, s.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def joined(left, right):
    """Two halves of a tile made one again."""
    both = gl.permute(gl.join(left, right), (0, 2, 1))
    return gl.reshape(both, (left.shape[0], 2 * left.shape[1]))


@gluon.jit
def quarters(s):
    """A tile (TN, TM) in four, left to right: what is made of one fits beside the others."""
    left, right = halves(s)
    return halves(left) + halves(right)


@gluon.jit
def way_out(out):
    """Where halves of tiles go, and where they wait to leave: one for each group of warps."""
    shape: gl.constexpr = out.block_type.shape
    return out, gl.allocate_shared_memory(out.dtype, [2] + shape, out.layout)


@gluon.jit
def store_quarter(way, x, h: gl.constexpr, i, j, ME: gl.constexpr):
    """Put quarter h of tile (i, j) beside the one before and let the half leave, or be first."""
    out, staging = way
    place = staging.index(ME)
    if h % 2 == 0:
        tma.store_wait(0)
    place.slice(h % 2 * x.shape[1], x.shape[1], 1).store(_stored(x, out.dtype))
    if h % 2 == 1:
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [i * x.shape[0], (4 * j + h - 1) * x.shape[1]], place)


@gluon.jit
def row_folded(x):
    """Row sums of a tile, left as partial ones (TN, 4): no lane waits for another.

    A thread holds two neighbours of every 8 columns.
    """
    parts = gl.reshape(x, (x.shape[0], x.shape[1] // 8, 4, 2))
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def store_rows(part, sums, i, j, n):
    """Row sums (TN,) of tile (i, j): part (column tiles, n)."""
    local = i * sums.shape[0] + gl.arange(0, sums.shape[0], layout=sums.type.layout)
    gl.store(part + j.to(gl.int64) * n + local, sums, local < n)


# Forward


@gluon.jit
def _fold(x):
    """Column sums of a tile, left as partial ones (4, 8, TM): no lane waits for another.

    A thread holds rows r and r + 8 of every 16, and so it does 64 rows further down.
    """
    parts = gl.reshape(x, (x.shape[0] // 64, 4, 2, 8, x.shape[1]))
    return gl.sum(gl.sum(parts, 2), 0)


@gluon.jit
def _sum_tile(
    s, way, exponent, folded, pulled, i, block, ME: gl.constexpr, COLUMNS: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    """Row sums of a tile (TN,), and likewise of what it pulls; the columns' sums, folded."""
    pieces = quarters(s)
    total = row_folded(gl.zeros_like(pieces[0]))
    pull = total
    more_folded, more_pulled = (), ()
    for h in gl.static_range(4):
        p = exp_scaled(pieces[h], exponent)
        total += row_folded(p)
        if COLUMNS:
            more_folded = more_folded + (folded[h] + _fold(p),)
        if SCALED:
            pull += row_folded(p * pieces[h])
        if SCALED and COLUMNS:
            more_pulled = more_pulled + (pulled[h] + _fold(p * pieces[h]),)
        if len(way) > 0:
            store_quarter(way, p, h, i, block, ME)
    return gl.sum(total, 1), gl.sum(pull, 1), more_folded, more_pulled


@gluon.jit
def _store_folded(part, folded, block, slot, m):
    """Column sums of a block, quarter by quarter: part (slots, m)."""
    for h in gl.static_range(len(folded)):
        # Lanes first: what warps tell each other goes through shared memory.
        sums = gl.sum(gl.sum(folded[h], 1), 0)
        local = gl.arange(0, sums.shape[0], layout=sums.type.layout)
        local += (4 * block + h) * sums.shape[0]
        gl.store(part + slot.to(gl.int64) * m + local, sums, local < m)


@gluon.jit
def _nothing_folded(TN: gl.constexpr, TM: gl.constexpr, WANTED: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TM, 16])
    zeros = quarters(gl.zeros((TN, TM), gl.float32, layout=layout))
    folded = ()
    if WANTED:
        for h in gl.static_range(4):
            folded = folded + (_fold(zeros[h]),)
    return folded


@gluon.jit
def _sum_strips(
    ring, way, head, parts, panel, share, ME: gl.constexpr, D: gl.constexpr,
    LANES: gl.constexpr, DIAGONAL: gl.constexpr, COLUMNS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    row_part, col_part, row_pull, col_pull = parts
    row0, col0, n, m, N, M = panel
    TN: gl.constexpr = ring[0].shape[1]
    TM: gl.constexpr = ring[1].shape[1]
    height, num_m = gl.cdiv(n, 2 * TN), gl.cdiv(m, TM)
    begin, end = blocks_of(share, height, num_m, LANES)
    exponent, done = exponent_of(head), 0
    for block in range(begin, end):
        first, last = strip_of(block, share, height, LANES)
        folded = _nothing_folded(TN, TM, COLUMNS)
        pulled = _nothing_folded(TN, TM, SCALED and COLUMNS)
        for i in range(2 * first + ME, 2 * last, 2):
            s = product(ring, done, ME, D)
            done += 1
            row, col = row0 + i * TN, col0 + block * TM
            if _mixed(s, row, col, N, M, DIAGONAL):
                away = gl.where(exponent[0] > 0, -FARTHEST, FARTHEST)
                s = _negatives(s, away, row, col, N, M, DIAGONAL)
            total, pull, folded, pulled = _sum_tile(
                s, way, exponent, folded, pulled, i, block, ME, COLUMNS, SCALED
            )
            store_rows(row_part, total, i, block, n)
            if SCALED:
                store_rows(row_pull, pull, i, block, n)
        slot = 2 * (gl.program_id(0) - block * height // share * LANES) + ME
        _store_folded(col_part, folded, block, slot, m)
        _store_folded(col_pull, pulled, block, slot, m)
    tma.store_wait(0)


@gluon.jit
def sums(
    rows, cols, kept, head, row_part, col_part, row_pull, col_pull, row0, col0, n, m, N, M, share,
    D: gl.constexpr, STAGES: gl.constexpr, LANES: gl.constexpr, DIAGONAL: gl.constexpr,
    COLUMNS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """`kernels.sums`, where a share is that of LANES programs side by side in the same columns.

    They walk down a block in LANES strips, so that fewer blocks are at work and stay in L2.
    col_part (2 * programs that met a block, m) takes the sums of both groups of warps.
    """
    ring = ring_of(rows, cols, STAGES)
    TN: gl.constexpr = ring[0].shape[1]
    TM: gl.constexpr = ring[1].shape[1]
    way = ()
    if kept is not None:
        way = way_out(kept)
    height, num_m = gl.cdiv(n, 2 * TN), gl.cdiv(m, TM)
    parts, panel = (row_part, col_part, row_pull, col_pull), (row0, col0, n, m, N, M)
    gl.warp_specialize(
        [
            (_sum_strips, (ring, way, head, parts, panel, share, 0, D, LANES, DIAGONAL, COLUMNS,
                           SCALED)),
            (_sum_strips, (ring, way, head, parts, panel, share, 1, D, LANES, DIAGONAL, COLUMNS,
                           SCALED)),
            (load_strips, (rows, cols, ring, share, height, num_m, D, LANES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
