"""The backward sweep as Triton kernels: tiles of logits, turned into dz for the products.

Every kernel is persistent: a program takes tile after tile of a panel, and loads of the next one
are on their way while this one is stored.
"""

import triton
import triton.language as tl

from tilewise.backends.convert import high_low
from tilewise.backends.kernels import (
    ALIGNED,
    BIAS,
    INDEX,
    INF,
    LABEL,
    LN2,
    LOG2E,
    LOG2E_REST,
    OFFSET2,
    SCALE,
    SCALE2,
    exp_scaled,
    exponent,
    opened,
    product,
    which,
    whole,
    wide,
)


@triton.jit
def place(t, num_n, num_m, GROUP: tl.constexpr):
    """Tile t as (row tile, column tile): GROUP row tiles at a time, so that features stay in L2."""
    first = t // (GROUP * num_m) * GROUP
    height = tl.minimum(num_n - first, GROUP)
    rest = t % (GROUP * num_m)
    return first + rest % height, rest // height


@triton.jit
def halves(s):
    """A tile (TN, TM) as its left and right half: what is made of one fits beside the other."""
    return tl.split(tl.permute(tl.reshape(s, (s.shape[0], 2, s.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _store_dz(dz, rest, row, col, x):
    """A piece of dz in its dtype; or, with `rest`, its high and low part in fp16."""
    if rest is None:
        dz.store([row, col], x.to(dz.dtype))
    else:
        high, low = high_low(x)
        dz.store([row, col], high)
        rest.store([row, col], low)


@triton.jit
def _store_rows(part, sums, j, local, n):
    """Row sums of column tile j, of rows counted from the panel's first: part (tiles, n)."""
    tl.store(part + wide(j) * n + local, sums, local < n)


@triton.jit
def dz_of_sums(
    rows, cols, dz, rest, head, flag, row_gain, col_gain, scale_part, row0, col0, n, m, N, M,
    D: tl.constexpr, TN: tl.constexpr, TM: tl.constexpr, TD: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, SELF: tl.constexpr, COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """dz = exp2(z - offset) * (row gain + column gain) of a panel (n, m) at (row0, col0).

    Positives and self-pairs are left to `mend`, unless SCALED: then they are 0, and sums of dz
    times the product of features go to scale_part (column tiles, n).
    """
    if tl.load(flag) != 0:
        return
    rows, cols = opened(rows, D, TN, TD), opened(cols, D, TM, TD)
    dz = opened(dz, whole(m), TN, TM // 2)
    if rest is not None:
        rest = opened(rest, whole(m), TN, TM // 2)
    offset2 = tl.load(head + OFFSET2)
    num_n, num_m = tl.cdiv(n, TN), tl.cdiv(m, TM)
    for t in tl.range(tl.program_id(0), num_n * num_m, tl.num_programs(0), flatten=True):
        i, j = place(t, num_n, num_m, GROUP)
        s = product(rows, cols, i * TN, j * TM, D, TN, TM, TD)
        sides = halves(s)
        row = row0 + i * TN + tl.arange(0, TN)
        row_own = tl.load(row_gain + row, row < N, other=0.0)[:, None]
        pulled = tl.zeros((TN,), tl.float32)
        for h in tl.static_range(2):
            start = j * TM + h * (TM // 2)
            x = exp_scaled(sides[h], head, offset2)
            col = col0 + start + tl.arange(0, TM // 2)
            if COLUMNS:
                x = x * (row_own + tl.load(col_gain + col, col < M, other=0.0)[None, :])
            else:
                x = x * row_own
            if SCALED:
                if KIND == ALIGNED or SELF:
                    x = tl.where(row[:, None] == col[None, :], 0.0, x)
                # Past the edge the product is 0, but x may be infinite.
                x = tl.where((col < M)[None, :], x, 0.0)
                pulled += tl.sum(x * sides[h], 1)
            _store_dz(dz, rest, i * TN, start, x)
        if SCALED:
            _store_rows(scale_part, pulled, j, row - row0, n)


@triton.jit
def dz_of_kept(kept, dz, stride, flag, row_gain, col_gain, row0, col0, n, m, COLUMNS: tl.constexpr,
               TN: tl.constexpr, TM: tl.constexpr):  # fmt: skip
    """As `dz_of_sums`, from exponentials (n, m), `stored` as int16, that lie where dz is to be."""
    if tl.load(flag) != 0:
        return
    row = tl.program_id(1) * TN + tl.arange(0, TN)
    col = tl.program_id(0) * TM + tl.arange(0, TM)
    inside = (row < n)[:, None] & (col < m)[None, :]
    at = row.to(tl.int64)[:, None] * stride + col[None, :]
    gain = tl.load(row_gain + row0 + row, row < n, other=0.0)[:, None]
    if COLUMNS:
        gain = gain + tl.load(col_gain + col0 + col, col < m, other=0.0)[None, :]
    bits = tl.load(kept + at, inside, other=0).to(tl.uint16, bitcast=True).to(tl.uint32) << 15
    x = bits.to(tl.float32, bitcast=True) * gain
    tl.store(dz + at, x.to(dz.dtype.element_ty), inside)


@triton.jit
def _mend_at(dz, rest, at, x, inside):
    """`_store_dz` of single pairs."""
    if rest is None:
        tl.store(dz + at, x.to(dz.dtype.element_ty), inside)
    else:
        high, low = high_low(x)
        tl.store(dz + at, high, inside)
        tl.store(rest + at, low, inside)


@triton.jit
def mend(dz, rest, stride, index, at_positive, row0, col0, n, m, KIND: tl.constexpr,
         SELF: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the positives' own dz into a panel, and 0 at self-pairs."""
    local = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = local < n
    start = local.to(tl.int64) * stride
    if SELF:
        own = row0 + local - col0
        _mend_at(dz, rest, start + own, tl.zeros((BLOCK,), tl.float32),
                 inside & (own >= 0) & (own < m))  # fmt: skip
    if KIND == ALIGNED or KIND == INDEX:
        col = row0 + local
        if KIND == INDEX:
            col = tl.load(index + row0 + local, inside, other=-1)
            if SELF:
                col = tl.where(col == row0 + local, -1, col)
        col = col - col0
        inside = inside & (col >= 0) & (col < m)
        own_dz = tl.load(at_positive + row0 + local, inside, other=0.0)
        _mend_at(dz, rest, start + col, own_dz, inside)


@triton.jit
def _side_dz(s, scale, kinds, vectors, at, inside, KIND: tl.constexpr, SUMS: tl.constexpr):
    """One side's share of dz: gain * exp2(z - shift) at negatives, likewise at positives by label.

    `vectors` (6, size): gain and shift of negatives, of positives; what each positive, each
    negative has by its sum. Rows as (TN, 1), columns as (1, TM).
    """
    positive, negative = kinds
    base, step = vectors
    gain = tl.load(base + at, inside, other=0.0)
    shift = tl.load(base + step + at, inside, other=0.0)
    x = tl.where(negative, tl.exp2(tl.where(negative, exponent(s, scale, shift), 0.0)) * gain, 0.0)
    if SUMS:
        x += tl.where(negative, tl.load(base + 5 * step + at, inside, other=0.0), 0.0)
    if KIND == LABEL:
        gain = tl.load(base + 2 * step + at, inside, other=0.0)
        shift = tl.load(base + 3 * step + at, inside, other=0.0)
        own = tl.exp2(tl.where(positive, exponent(s, scale, shift), 0.0)) * gain
        x += tl.where(positive, own + tl.load(base + 4 * step + at, inside, other=0.0), 0.0)
    return x


@triton.jit
def dz_of_marked(
    rows, cols, dz, rest, head, flag, row_vectors, col_vectors, scale_part, index, row_ids, col_ids,
    row_labels, col_labels, row0, col0, n, m, N, M,
    D: tl.constexpr, TN: tl.constexpr, TM: tl.constexpr, TD: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, IDS: tl.constexpr, SELF: tl.constexpr,
    SUMS: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr, ON_FLAG: tl.constexpr,
):  # fmt: skip
    """dz of any marked pairs from offsets of each row and column: right for all numbers.

    As `dz_of_sums`; by label the positives' dz is part of it.
    """
    if ON_FLAG:
        if tl.load(flag) == 0:
            return
    rows, cols = opened(rows, D, TN, TD), opened(cols, D, TM, TD)
    dz = opened(dz, whole(m), TN, TM // 2)
    if rest is not None:
        rest = opened(rest, whole(m), TN, TM // 2)
    scale = tl.load(head + SCALE2)
    num_n, num_m = tl.cdiv(n, TN), tl.cdiv(m, TM)
    marks = (index, row_ids, col_ids, row_labels, col_labels)
    for t in tl.range(tl.program_id(0), num_n * num_m, tl.num_programs(0)):
        i, j = place(t, num_n, num_m, GROUP)
        s = product(rows, cols, i * TN, j * TM, D, TN, TM, TD)
        sides = halves(s)
        row = row0 + i * TN + tl.arange(0, TN)
        pulled = tl.zeros((TN,), tl.float32)
        for h in tl.static_range(2):
            start = j * TM + h * (TM // 2)
            col = col0 + start + tl.arange(0, TM // 2)
            kinds = which(row, col, N, M, marks, KIND, IDS, SELF, False)
            x = _side_dz(sides[h], scale, kinds, (row_vectors, wide(N)), row[:, None],
                         row[:, None] < N, KIND, SUMS)  # fmt: skip
            if COLUMNS:
                x += _side_dz(sides[h], scale, kinds, (col_vectors, wide(M)), col[None, :],
                              col[None, :] < M, KIND, SUMS)  # fmt: skip
            if SCALED:
                pulled += tl.sum(x * sides[h], 1)
            _store_dz(dz, rest, i * TN, start, x)
        if SCALED:
            _store_rows(scale_part, pulled, j, row - row0, n)


@triton.jit
def softplus_and_sigmoid(z):
    """log2(1 + exp(z)), and the sigmoid; both keep their digits far below 0.

    log2(1 + e) for e in [0, 1] is e times a polynomial, to 3e-8 of its value. No logarithm and no
    division: they would cost more than the product that made z. Logits are often all alike, and
    what is rounded alike adds up: z times what LOG2E lacks comes first, and the sigmoid far below 0
    is a product, since a difference there would be rounded as coarsely as z is.
    """
    z2 = tl.fma(z, LOG2E, z * LOG2E_REST)
    e = tl.exp2(-tl.abs(z2))
    p = 0.007650775834918022 * e - 0.04299873486161232
    p = p * e + 0.11361118406057358
    p = p * e - 0.19781923294067383
    p = p * e + 0.2760109603404999
    p = p * e - 0.35851889848709106
    p = p * e + 0.48071038722991943
    p = p * e - 0.7213414311408997
    p = (p * e + 1.4426950216293335) * e
    inverse = tl.exp2(-p)
    return tl.maximum(z2, 0.0) + p, tl.where(z2 > 0.0, inverse, e * inverse)


@triton.jit
def _edge(t, row0, col0, num_n, num_m, TN: tl.constexpr, TM: tl.constexpr):
    """Tile t of those that need masks: row by row on the diagonal, then down the last column."""
    PER_ROW: tl.constexpr = (TN + TM - 1) // TM
    i, k = t // PER_ROW, t % PER_ROW
    j = (row0 + i * TN - col0) // TM + k
    last = i >= num_n
    return tl.where(last, t - num_n * PER_ROW, i), tl.where(last, num_m - 1, j)


@triton.jit
def dz_of_softplus(
    rows, cols, dz, rest, head, row_weight, col_weight, row_parts, col_part, index, row_ids,
    col_ids, row_labels, col_labels, row0, col0, n, m, N, M,
    D: tl.constexpr, TN: tl.constexpr, TM: tl.constexpr, TD: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, IDS: tl.constexpr, SELF: tl.constexpr,
    VALUES: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr, GRADS: tl.constexpr,
    MASKED: tl.constexpr, EDGES: tl.constexpr, WHOLE_AT: tl.constexpr,
):  # fmt: skip
    """Softplus of a panel of signed logits (-z at positives): its sums, and dz.

    dz = sign * sigmoid * (row weight + column weight). row_parts (column tiles, 3, n) takes the
    rows' sums of softplus, of dz times the product of features, and of dz; col_part (row
    tiles, m) the columns' of softplus. Without MASKED every pair is a negative; a second run with
    EDGES then does the tiles over where that was wrong.
    """
    PLANES: tl.constexpr = 3 if SCALED else 1
    rows, cols = opened(rows, D, TN, TD), opened(cols, D, TM, TD)
    dz = opened(dz, whole(m), TN, TM // 4)
    if rest is not None:
        rest = opened(rest, whole(m), TN, TM // 4)
    scale, bias = tl.load(head + SCALE), tl.load(head + BIAS)
    num_n, num_m = tl.cdiv(n, TN), tl.cdiv(m, TM)
    marks = (index, row_ids, col_ids, row_labels, col_labels)
    count = num_n * num_m
    if EDGES:
        count = num_n * ((TN + TM - 1) // TM + tl.where(m % TM != 0, 1, 0))
    for t in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=not EDGES):
        i, j = place(t, num_n, num_m, GROUP)
        if EDGES:
            i, j = _edge(t, row0, col0, num_n, num_m, TN, TM)
            j = tl.where((j >= 0) & (j < num_m), j, 0)  # an innocent tile, done over for nothing
        s = product(rows, cols, i * TN, j * TM, D, TN, TM, TD, WHOLE_AT)
        sides = halves(s)
        quarters = halves(sides[0]) + halves(sides[1])
        row = row0 + i * TN + tl.arange(0, TN)
        weight = tl.load(row_weight + row, row < N, other=0.0)[:, None]
        values, by_scale = tl.zeros((TN,), tl.float32), tl.zeros((TN,), tl.float32)
        by_bias = tl.zeros((TN,), tl.float32)
        for h in tl.static_range(4):
            start = j * TM + h * (TM // 4)
            col = col0 + start + tl.arange(0, TM // 4)
            z = quarters[h] * scale + bias
            if MASKED:
                positive, negative = which(row, col, N, M, marks, KIND, IDS, SELF, False)
                z = tl.where(positive, -z, tl.where(negative, z, -INF))
            value, x = softplus_and_sigmoid(z)
            if VALUES:
                values += tl.sum(value, 1)
                if COLUMNS:
                    at = col_part + wide(i) * m + col - col0
                    value = tl.where(row[:, None] < N, value, 0.0)
                    tl.store(at, tl.sum(value, 0) * LN2, col - col0 < m)
            if GRADS:
                if MASKED:
                    x = tl.where(positive, -x, x)
                if COLUMNS:
                    x = x * (weight + tl.load(col_weight + col, col < M, other=0.0)[None, :])
                else:
                    x = x * weight
                if SCALED:
                    by_scale += tl.sum(x * quarters[h], 1)
                    by_bias += tl.sum(x, 1)
                _store_dz(dz, rest, i * TN, start, x)
        if VALUES:
            _store_rows(row_parts, values * LN2, PLANES * j, row - row0, n)
        if SCALED:
            _store_rows(row_parts, by_scale, PLANES * j + 1, row - row0, n)
            _store_rows(row_parts, by_bias, PLANES * j + 2, row - row0, n)
