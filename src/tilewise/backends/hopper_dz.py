"""The backward kernels for Hopper, in Gluon: see `hopper`, whose meaning is that of `dz`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilewise.backends import dz as triton_dz
from tilewise.backends.hopper import (
    BIAS,
    SCALE,
    exp_scaled,
    halves,
    load_tile,
    mixed,
    negative,
    product,
    quarters,
    ring_of,
    slots,
    store_rows,
)

# The same text, read as Gluon.
_place = gluon.jit(triton_dz.place.fn)
_softplus_and_sigmoid = gluon.jit(triton_dz.softplus_and_sigmoid.fn)


@gluon.jit
def _load(rows, cols, ring, count, num_n, num_m, D: gl.constexpr, GROUP: gl.constexpr):
    k = 0
    for t in range(gl.program_id(0), count, gl.num_programs(0)):
        i, j = _place(t, num_n, num_m, GROUP)
        k = load_tile(rows, cols, ring, k, i, j, D)


@gluon.jit
def _eighths(s):
    first, second, third, fourth = quarters(s)
    return halves(first) + halves(second) + halves(third) + halves(fourth)


@gluon.jit
def _dz_tile(
    s, staging, head, gains, scale_part, panel, i, j,
    DIAGONAL: gl.constexpr, COLUMNS: gl.constexpr, SCALED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    row_gain, col_gain = gains
    row0, col0, n, _, N, M = panel
    WIDTH: gl.constexpr = s.shape[1] // 4
    pieces = quarters(s)
    row, _ = slots(pieces[0], row0 + i * s.shape[0], 0)
    row_own = gl.expand_dims(gl.load(row_gain + row, row < N, other=0.0), 1)
    pulled = gl.zeros_like(pieces[0])
    for h in gl.static_range(4):
        _, col = slots(pieces[h], 0, col0 + j * s.shape[1] + h * WIDTH)
        x = exp_scaled(pieces[h], head)
        if COLUMNS:
            col_own = gl.load(col_gain + col, col < M, other=0.0)
            x = x * (row_own + gl.expand_dims(col_own, 0))
        else:
            x = x * row_own
        if SCALED:
            if MASKED:
                x = gl.where(negative(row, col, N, M, DIAGONAL), x, 0.0)
            pulled += x * pieces[h]
        staging.slice(h * WIDTH, WIDTH, 1).store(x.to(staging.dtype))
    if SCALED:
        store_rows(scale_part, gl.sum(pulled, 1), j, row, row0, n)


@gluon.jit
def _dz_tiles(
    dz, staging, ring, head, gains, scale_part, panel, count, ME: gl.constexpr, D: gl.constexpr,
    GROUP: gl.constexpr, DIAGONAL: gl.constexpr, COLUMNS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    row0, col0, n, m, N, M = panel
    TN: gl.constexpr = ring[0].shape[1]
    TM: gl.constexpr = ring[1].shape[1]
    num_n, num_m = gl.cdiv(n, TN), gl.cdiv(m, TM)
    programs, done = gl.num_programs(0), 0
    for t in range(gl.program_id(0) + ME * programs, count, 2 * programs):
        i, j = _place(t, num_n, num_m, GROUP)
        s = product(ring, done, D, ME)
        done += 1
        # Past the edge the product is 0, but dz may be infinite.
        tma.store_wait(0)
        if SCALED and mixed(s, row0 + i * TN, col0 + j * TM, N, M, DIAGONAL):
            _dz_tile(s, staging, head, gains, scale_part, panel, i, j, DIAGONAL, COLUMNS, True,
                     True)  # fmt: skip
        else:
            _dz_tile(s, staging, head, gains, scale_part, panel, i, j, DIAGONAL, COLUMNS, SCALED,
                     False)  # fmt: skip
        fence_async_shared()
        tma.async_copy_shared_to_global(dz, [i * TN, j * TM], staging)
    tma.store_wait(0)


@gluon.jit
def dz_of_sums(
    rows, cols, dz, head, flag, row_gain, col_gain, scale_part, row0, col0, n, m, N, M,
    D: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, DIAGONAL: gl.constexpr,
    COLUMNS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """`dz.dz_of_sums`."""
    ring = ring_of(rows, cols, STAGES)
    TN: gl.constexpr = ring[0].shape[1]
    TM: gl.constexpr = ring[1].shape[1]
    staging = gl.allocate_shared_memory(dz.dtype, [2, TN, TM], dz.layout)
    num_n, num_m = gl.cdiv(n, TN), gl.cdiv(m, TM)
    count = gl.where(gl.load(flag) == 0, num_n * num_m, 0)
    gains, panel = (row_gain, col_gain), (row0, col0, n, m, N, M)
    gl.warp_specialize(
        [
            (_dz_tiles, (dz, staging.index(0), ring, head, gains, scale_part, panel, count, 0, D,
                         GROUP, DIAGONAL, COLUMNS, SCALED)),
            (_dz_tiles, (dz, staging.index(1), ring, head, gains, scale_part, panel, count, 1, D,
                         GROUP, DIAGONAL, COLUMNS, SCALED)),
            (_load, (rows, cols, ring, count, num_n, num_m, D, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _softplus_tile(
    s, staging, head, weights, row_parts, panel, i, j,
    COLUMNS: gl.constexpr, VALUES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    row_weight, col_weight = weights
    row0, col0, n, _, N, M = panel
    PLANES: gl.constexpr = 3 if SCALED else 1
    WIDTH: gl.constexpr = s.shape[1] // 8
    pieces = _eighths(s)
    scale, bias = gl.load(head + SCALE), gl.load(head + BIAS)
    row, _ = slots(pieces[0], row0 + i * s.shape[0], 0)
    row_own = gl.expand_dims(gl.load(row_weight + row, row < N, other=0.0), 1)
    values = gl.zeros_like(pieces[0])
    by_scale, by_bias = values, values
    for h in gl.static_range(8):
        value, x = _softplus_and_sigmoid(pieces[h] * scale + bias)
        if VALUES:
            values += value
        if COLUMNS:
            _, col = slots(pieces[h], 0, col0 + j * s.shape[1] + h * WIDTH)
            col_own = gl.load(col_weight + col, col < M, other=0.0)
            x = x * (row_own + gl.expand_dims(col_own, 0))
        else:
            x = x * row_own
        if SCALED:
            by_scale += x * pieces[h]
            by_bias += x
        staging.slice(h * WIDTH, WIDTH, 1).store(x.to(staging.dtype))
    if VALUES:
        store_rows(row_parts, gl.sum(values, 1), PLANES * j, row, row0, n)
    if SCALED:
        store_rows(row_parts, gl.sum(by_scale, 1), PLANES * j + 1, row, row0, n)
        store_rows(row_parts, gl.sum(by_bias, 1), PLANES * j + 2, row, row0, n)


@gluon.jit
def _softplus_tiles(
    dz, staging, ring, head, weights, row_parts, panel, ME: gl.constexpr, D: gl.constexpr,
    GROUP: gl.constexpr, COLUMNS: gl.constexpr, VALUES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    _, _, n, m, _, _ = panel
    TN: gl.constexpr = ring[0].shape[1]
    TM: gl.constexpr = ring[1].shape[1]
    num_n, num_m = gl.cdiv(n, TN), gl.cdiv(m, TM)
    programs, done = gl.num_programs(0), 0
    for t in range(gl.program_id(0) + ME * programs, num_n * num_m, 2 * programs):
        i, j = _place(t, num_n, num_m, GROUP)
        s = product(ring, done, D, ME)
        done += 1
        tma.store_wait(0)
        _softplus_tile(s, staging, head, weights, row_parts, panel, i, j, COLUMNS, VALUES,
                       SCALED)  # fmt: skip
        fence_async_shared()
        tma.async_copy_shared_to_global(dz, [i * TN, j * TM], staging)
    tma.store_wait(0)


@gluon.jit
def dz_of_softplus(
    rows, cols, dz, head, row_weight, col_weight, row_parts, row0, col0, n, m, N, M,
    D: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, COLUMNS: gl.constexpr,
    VALUES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """`dz.dz_of_softplus` without masks: its run over the edges must follow."""
    ring = ring_of(rows, cols, STAGES)
    TN: gl.constexpr = ring[0].shape[1]
    TM: gl.constexpr = ring[1].shape[1]
    staging = gl.allocate_shared_memory(dz.dtype, [2, TN, TM], dz.layout)
    num_n, num_m = gl.cdiv(n, TN), gl.cdiv(m, TM)
    weights, panel = (row_weight, col_weight), (row0, col0, n, m, N, M)
    gl.warp_specialize(
        [
            (_softplus_tiles, (dz, staging.index(0), ring, head, weights, row_parts, panel, 0, D,
                               GROUP, COLUMNS, VALUES, SCALED)),
            (_softplus_tiles, (dz, staging.index(1), ring, head, weights, row_parts, panel, 1, D,
                               GROUP, COLUMNS, VALUES, SCALED)),
            (_load, (rows, cols, ring, num_n * num_m, num_n, num_m, D, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
