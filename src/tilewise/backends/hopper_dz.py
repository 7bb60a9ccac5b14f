"""The backward kernels for Hopper, in Gluon: see `hopper`, whose meaning is that of `dz`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewise.backends import convert
from tilewise.backends import dz as triton_dz
from tilewise.backends.hopper import (
    BIAS,
    LN2,
    LOG2E,
    SCALE,
    blocks_of,
    exp_scaled,
    exponent_of,
    halves,
    joined,
    load_strips,
    on_diagonal,
    product,
    quarters,
    ring_of,
    row_folded,
    slots,
    store_quarter,
    store_rows,
    strip_of,
    way_out,
)

# Where exp(z) < 2^-8.
FAR = gl.constexpr(-5.55)
# How far a logit may lie above the offset of its slot, in units of log 2.
ABOVE = gl.constexpr(64.0)

# The same text, read as Gluon.
_softplus_and_sigmoid = gluon.jit(triton_dz.softplus_and_sigmoid.fn)
_high_low = gluon.jit(convert.high_low.fn)


@gluon.jit
def _load_rows(by_row, row, N, TN: gl.constexpr, TM: gl.constexpr):
    """What the rows of a tile are multiplied with, (TN, 1) as quarters of it lie."""
    rows, _ = slots(_quarter(TN, TM), row, 0)
    return gl.expand_dims(gl.load(by_row + rows, rows < N, other=0.0), 1)


@gluon.jit
def _load_quarter(by_col, col, M, h: gl.constexpr, TN: gl.constexpr, TM: gl.constexpr):
    """What the columns of quarter h of a tile are multiplied with, (1, TM / 4)."""
    _, cols = slots(_quarter(TN, TM), 0, col + h * (TM // 4))
    return gl.expand_dims(gl.load(by_col + cols, cols < M, other=0.0), 0)


@gluon.jit
def _load_columns(by_col, col, M, TN: gl.constexpr, TM: gl.constexpr, COLUMNS: gl.constexpr):
    """What the columns of a tile are multiplied with, quarter by quarter."""
    own = ()
    if COLUMNS:
        for h in gl.static_range(4):
            own = own + (_load_quarter(by_col, col, M, h, TN, TM),)
    return own


@gluon.jit
def _quarter(TN: gl.constexpr, TM: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TM, 16])
    return quarters(gl.zeros((TN, TM), gl.float32, layout=layout))[0]


@gluon.jit
def _apart(s, scale2, gain, shift):
    """gain * exp2(z - shift) where no offset serves all: each slot has its own.

    A slot's sum over several visits counts from the offset of one of them, and negatives of others
    exceed that by the logarithm of their number. What exceeds it by more is a positive, or past the
    edge, and need only be finite: it is mended, or never stored.
    """
    return gl.exp2(gl.minimum(s * scale2 - shift, ABOVE)) * gain


@gluon.jit
def _store_dz(ways, x, h: gl.constexpr, i, j, ME: gl.constexpr):
    """Store quarter h of tile (i, j): in the dtype of dz, or in two parts, each its own way."""
    if len(ways) == 1:
        store_quarter(ways[0], x, h, i, j, ME)
    else:
        store_quarter(ways[0], _high_low(x)[0], h, i, j, ME)
        # Made after the other has left for shared memory: both at once spill.
        store_quarter(ways[1], _high_low(x)[1], h, i, j, ME)


@gluon.jit
def _dz_tile(
    s, ways, exponent, flag, vectors, gains, scale_part, panel, i, j, ME: gl.constexpr,
    COLUMNS: gl.constexpr, SCALED: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    by_row, by_col = vectors
    row_gain, col_gain = gains
    row0, col0, n, _, N, M = panel
    TN: gl.constexpr = s.shape[0]
    TM: gl.constexpr = s.shape[1]
    pieces = quarters(s)
    pulled = row_folded(gl.zeros_like(pieces[0]))
    none = 0
    if len(col_gain) == 0:
        # 0, but asked for every tile, so that no addresses of columns stay in registers meanwhile.
        none = (gl.load(flag) == 2).to(gl.int32)
    for h in gl.static_range(4):
        if FIXED:
            gain = row_gain
            if len(col_gain) > 0:
                gain = gain + col_gain[h]
            elif COLUMNS:
                gain = gain + _load_quarter(by_col, col0 + j * TM + none, M, h, TN, TM)
            x = exp_scaled(pieces[h], exponent) * gain
        else:
            # Shifts lie behind gains.
            shift = _load_rows(by_row + N, row0 + i * TN, N, TN, TM)
            x = _apart(pieces[h], exponent[0], row_gain, shift)
            if COLUMNS:
                col = col0 + j * TM + none
                gain = _load_quarter(by_col, col, M, h, TN, TM)
                shift = _load_quarter(by_col + M, col, M, h, TN, TM)
                x += _apart(pieces[h], exponent[0], gain, shift)
        if SCALED:
            pulled += row_folded(x * pieces[h])
        _store_dz(ways, x, h, i, j, ME)
    if SCALED:
        store_rows(scale_part, gl.sum(pulled, 1), i, j, n)


@gluon.jit
def _dz_strips(
    ways, ring, head, flag, vectors, scale_part, panel, share, num_m, ME: gl.constexpr,
    D: gl.constexpr, LANES: gl.constexpr, DIAGONAL: gl.constexpr, COLUMNS: gl.constexpr,
    SCALED: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    row0, col0, n, _, N, M = panel
    TN: gl.constexpr = ring[0].shape[1]
    TM: gl.constexpr = ring[1].shape[1]
    height = gl.cdiv(n, 2 * TN)
    begin, end = blocks_of(share, height, num_m, LANES)
    exponent, done = exponent_of(head), 0
    for block in range(begin, end):
        first, last = strip_of(block, share, height, LANES)
        col = col0 + block * TM
        # Two ways out leave no registers for them.
        HELD: gl.constexpr = COLUMNS and FIXED and len(ways) == 1
        col_gain = _load_columns(vectors[1], col, M, TN, TM, HELD)
        for i in range(2 * first + ME, 2 * last, 2):
            row = row0 + i * TN
            # Before the product, which hides how long this takes.
            row_gain = _load_rows(vectors[0], row, N, TN, TM)
            s = product(ring, done, ME, D)
            done += 1
            if DIAGONAL and SCALED:
                if on_diagonal(s, row, col):
                    # A pair (i, i) must not pull at the scale; its dz is mended. Past the edge
                    # the product is 0, and dz is finite.
                    rows, cols = slots(s, row - col, 0)
                    s = gl.where(gl.expand_dims(rows, 1) == gl.expand_dims(cols, 0), 0.0, s)
            _dz_tile(s, ways, exponent, flag, vectors, (row_gain, col_gain), scale_part, panel, i,
                     block, ME, COLUMNS, SCALED, FIXED)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _dz_strips_of_either(
    ways, ring, head, flag, vectors, scale_part, panel, share, num_m, ME: gl.constexpr,
    D: gl.constexpr, LANES: gl.constexpr, DIAGONAL: gl.constexpr, COLUMNS: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    # A loop each: what one keeps in registers is none of the other's business.
    if gl.load(flag) == 0:
        _dz_strips(ways, ring, head, flag, vectors, scale_part, panel, share, num_m, ME, D, LANES,
                   DIAGONAL, COLUMNS, SCALED, True)  # fmt: skip
    else:
        _dz_strips(ways, ring, head, flag, vectors, scale_part, panel, share, num_m, ME, D, LANES,
                   DIAGONAL, COLUMNS, SCALED, False)  # fmt: skip


@gluon.jit
def dz_of_sums(
    rows, cols, dz, rest, head, flag, row_vectors, col_vectors, scale_part, row0, col0, n, m, N, M,
    share,
    D: gl.constexpr, STAGES: gl.constexpr, LANES: gl.constexpr, DIAGONAL: gl.constexpr,
    COLUMNS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """`dz.dz_of_sums`, and where the flag is up what `dz.dz_of_marked` makes of pairs (i, j).

    Of the vectors (6, N) and (6, M) the first two, gains and shifts.
    """
    ring, ways = ring_of(rows, cols, STAGES), (way_out(dz),)
    if rest is not None:
        ways = ways + (way_out(rest),)
    height, num_m = gl.cdiv(n, 2 * ring[0].shape[1]), gl.cdiv(m, ring[1].shape[1])
    vectors, panel = (row_vectors, col_vectors), (row0, col0, n, m, N, M)
    gl.warp_specialize(
        [
            (_dz_strips_of_either, (ways, ring, head, flag, vectors, scale_part, panel, share,
                                    num_m, 0, D, LANES, DIAGONAL, COLUMNS, SCALED)),
            (_dz_strips_of_either, (ways, ring, head, flag, vectors, scale_part, panel, share,
                                    num_m, 1, D, LANES, DIAGONAL, COLUMNS, SCALED)),
            (load_strips, (rows, cols, ring, share, height, num_m, D, LANES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _far_below(z):
    """`softplus_and_sigmoid` where all z < FAR: exp(z) is so small that three terms will do."""
    e = gl.exp2(z * LOG2E)
    value = e * ((e * 0.4808983469629878 - 0.7213475204444817) * e + 1.4426950408889634)
    return value, e * ((e - 1.0) * e + 1.0)


@gluon.jit
def _softplus_quarter(s, scale, bias, own, folded, VALUES: gl.constexpr, SCALED: gl.constexpr,
                      BELOW: gl.constexpr):  # fmt: skip
    """dz of a quarter (TN, TM / 4), and the row sums that it adds to."""
    values, by_scale, by_bias = folded
    eighths, weight, dz = halves(s), halves(own), ()
    for k in gl.static_range(2):
        z = eighths[k] * scale + bias
        if BELOW:
            value, x = _far_below(z)
        else:
            value, x = _softplus_and_sigmoid(z)
        x = x * weight[k]
        if VALUES:
            values += row_folded(value)
        if SCALED:
            by_scale += row_folded(x * eighths[k])
            by_bias += row_folded(x)
        dz = dz + (x,)
    return joined(dz[0], dz[1]), (values, by_scale, by_bias)


@gluon.jit
def _softplus_tile(
    s, below, way, scale, bias, weights, row_parts, n, i, j, ME: gl.constexpr,
    VALUES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    row_weight, col_weight = weights
    PLANES: gl.constexpr = 3 if SCALED else 1
    pieces = quarters(s)
    zeros = row_folded(halves(gl.zeros_like(pieces[0]))[0])
    folded = (zeros, zeros, zeros)
    for h in gl.static_range(4):
        own, _ = gl.broadcast(row_weight, pieces[h])
        if len(col_weight) > 0:
            own = own + col_weight[h]
        if below:
            x, folded = _softplus_quarter(pieces[h], scale, bias, own, folded, VALUES, SCALED, True)
        else:
            x, folded = _softplus_quarter(pieces[h], scale, bias, own, folded, VALUES, SCALED,
                                          False)  # fmt: skip
        store_quarter(way, x, h, i, j, ME)
    values, by_scale, by_bias = folded
    if VALUES:
        store_rows(row_parts, gl.sum(values, 1) * LN2, i, PLANES * j, n)
    if SCALED:
        store_rows(row_parts, gl.sum(by_scale, 1), i, PLANES * j + 1, n)
        store_rows(row_parts, gl.sum(by_bias, 1), i, PLANES * j + 2, n)


@gluon.jit
def _softplus_strips(
    way, ring, head, weights, row_parts, panel, share, num_m, ME: gl.constexpr, D: gl.constexpr,
    LANES: gl.constexpr, COLUMNS: gl.constexpr, VALUES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    row0, col0, n, _, N, M = panel
    TN: gl.constexpr = ring[0].shape[1]
    TM: gl.constexpr = ring[1].shape[1]
    height = gl.cdiv(n, 2 * TN)
    begin, end = blocks_of(share, height, num_m, LANES)
    scale, bias, done = gl.load(head + SCALE), gl.load(head + BIAS), 0
    for block in range(begin, end):
        first, last = strip_of(block, share, height, LANES)
        col_weight = _load_columns(weights[1], col0 + block * TM, M, TN, TM, COLUMNS)
        for i in range(2 * first + ME, 2 * last, 2):
            own = _load_rows(weights[0], row0 + i * TN, N, TN, TM), col_weight
            s = product(ring, done, ME, D)
            done += 1
            below = gl.max(gl.max(gl.abs(s), 1), 0) * gl.abs(scale) + bias < FAR
            _softplus_tile(s, below, way, scale, bias, own, row_parts, n, i, block, ME, VALUES,
                           SCALED)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def dz_of_softplus(
    rows, cols, dz, rest, head, row_weight, col_weight, row_parts, row0, col0, n, m, N, M, share,
    D: gl.constexpr, STAGES: gl.constexpr, LANES: gl.constexpr, COLUMNS: gl.constexpr,
    VALUES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """`dz.dz_of_softplus` without masks: its run over the edges must follow. No `rest`."""
    ring, way = ring_of(rows, cols, STAGES), way_out(dz)
    height, num_m = gl.cdiv(n, 2 * ring[0].shape[1]), gl.cdiv(m, ring[1].shape[1])
    weights, panel = (row_weight, col_weight), (row0, col0, n, m, N, M)
    gl.warp_specialize(
        [
            (_softplus_strips, (way, ring, head, weights, row_parts, panel, share, num_m, 0, D,
                                LANES, COLUMNS, VALUES, SCALED)),
            (_softplus_strips, (way, ring, head, weights, row_parts, panel, share, num_m, 1, D,
                                LANES, COLUMNS, VALUES, SCALED)),
            (load_strips, (rows, cols, ring, share, height, num_m, D, LANES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
