"""The forward sweep as Triton kernels: tiles of logits, folded into sums. What all kernels share.

Exponents are in units of log 2. A tile of negatives only is folded as it is. Where pairs must be
told apart (the diagonal, a ragged edge, marks) `which` does it, and such tiles are kept out of the
main loop where they are few. Nothing here is atomic: the same bits every run.
"""

import triton
import triton.language as tl

# Where the positives are: `Pairs.kind`, as the kernels take it.
KINDS = {"none": 0, "aligned": 1, "index": 2, "label": 3}
ALIGNED = tl.constexpr(1)
INDEX = tl.constexpr(2)
LABEL = tl.constexpr(3)
INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.92596298909109e-08)  # what a float32 takes away from it
LN2 = tl.constexpr(0.6931471805599453)

# The head of a sweep: numbers on the device that every kernel reads.
SCALE2 = tl.constexpr(0)  # scale in units of log 2, rounded: the factor on products of tiles
OFFSET2 = tl.constexpr(1)  # the fixed offset, likewise
SCALE = tl.constexpr(2)  # the scale; for softplus, whose positives are in the tiles, their factor
BIAS = tl.constexpr(3)
ROW_POISON = tl.constexpr(4)  # 0, or NaN where a row feature is not finite
COL_POISON = tl.constexpr(5)
PEAK = tl.constexpr(6)  # gradients are divided by this power of two
FACTOR = tl.constexpr(7)  # what an accumulated gradient is multiplied with
HEAD_SIZE = 8


@triton.jit
def whole(m):
    """Columns of a matrix of 16-bit numbers up to where its next row may begin, at 16 bytes.

    What is stored past column m is never read, and no access is cut short.
    """
    return tl.cdiv(m, 8) * 8


@triton.jit
def opened(x, width, TN: tl.constexpr, TM: tl.constexpr):
    """A matrix with so many columns, to be loaded or stored in tiles (TN, TM): its descriptor.

    Where none came along it is made of pointer, number of rows and stride in units of 16 bytes:
    without an engine that copies tiles it becomes plain accesses, as wide as the compiler can see
    that they are aligned, and of a descriptor from outside it sees nothing.
    """
    if isinstance(x, tl.tensor_descriptor):
        return x
    else:
        NUMBERS: tl.constexpr = 128 // x[0].dtype.element_ty.primitive_bitwidth
        return tl.make_tensor_descriptor(x[0], [x[1], width], [wide(x[2]) * NUMBERS, 1], [TN, TM])


@triton.jit
def product(rows, cols, row0, col0, D: tl.constexpr, TN: tl.constexpr, TM: tl.constexpr,
             TD: tl.constexpr, WHOLE_AT: tl.constexpr = 0):  # fmt: skip
    """Products of features (TN, TM) of one tile, in fp32.

    A tensor core cuts sums off, which makes each too small by a third of a rounding. Of features
    in parts, with WHOLE_AT, the large one is exact by itself; added to the other it is rounded.
    """
    s = tl.zeros((TN, TM), tl.float32)
    for d in range(WHOLE_AT, D, TD):
        s = tl.dot(rows.load([row0, d]), cols.load([col0, d]).T, s)
    if WHOLE_AT > 0:
        rest = tl.zeros((TN, TM), tl.float32)
        for d in range(0, WHOLE_AT, TD):
            rest = tl.dot(rows.load([row0, d]), cols.load([col0, d]).T, rest)
        # A plain sum Triton would hand to the tensor core.
        s = tl.fma(rest, 1.0, s)
    return s


@triton.jit
def wide(x):
    """An integer as int64, also where Triton took an argument of 1 for a constant."""
    return tl.zeros((), tl.int64) + x


@triton.jit
def exponent(s, scale, offset2):
    """z - offset of products of features, in units of log 2.

    The offset is taken away before it is rounded: what is left is small, and so is what rounding
    takes of it.
    """
    return s * scale - offset2


@triton.jit
def scale_of_tiles(scale):
    """The scale that tiles multiply with, in fp64: what SCALE2 is, in natural units.

    A positive's logit must be of the same scale, then all numbers are those of a scale half a
    rounding away, and none is off by a difference of two.
    """
    return (scale.to(tl.float64) * LOG2E).to(tl.float32).to(tl.float64) * LN2


@triton.jit
def exp_scaled(s, head, offset2):
    """exp2(z - offset) of products of features."""
    return tl.exp2(exponent(s, tl.load(head + SCALE2), offset2))


@triton.jit
def stored(x, dtype: tl.constexpr):
    """Numbers as they are stored: rounded to `dtype`, where int16 stands for floats without a sign.

    Exponentials have none, which leaves 8 bits for the exponent and one more than in bf16, 8, for
    the fraction. Of what is not finite nothing is read: the flag is up then.
    """
    if dtype == tl.int16:
        return (((x.to(tl.uint32, bitcast=True) << 1) + 0x8000) >> 16).to(tl.int16)
    else:
        return x.to(dtype)


@triton.jit
def which(row, col, N, M, marks, KIND: tl.constexpr, IDS: tl.constexpr, SELF: tl.constexpr,
           UPPER: tl.constexpr):  # fmt: skip
    """Which pairs of a tile are positive, and which negative, (TN, TM) each.

    `marks` points to the positives' columns, row and column ids, row and column labels. With
    UPPER only pairs above the diagonal count: each stands for its mirror image too.
    """
    inside = (row[:, None] < N) & (col[None, :] < M)
    if UPPER:
        inside = inside & (row[:, None] < col[None, :])
    elif SELF:
        inside = inside & (row[:, None] != col[None, :])
    if KIND == ALIGNED:
        positive = inside & (row[:, None] == col[None, :])
    elif KIND == INDEX:
        positive = inside & (tl.load(marks[0] + row, row < N, other=-1)[:, None] == col[None, :])
    elif KIND == LABEL:
        own = tl.load(marks[3] + row, row < N, other=0)
        positive = inside & (own[:, None] == tl.load(marks[4] + col, col < M, other=0)[None, :])
    else:
        positive = inside & (row[:, None] < 0)
    negative = inside & (positive == 0)
    if IDS:
        own = tl.load(marks[1] + row, row < N, other=0)
        negative = negative & (own[:, None] != tl.load(marks[2] + col, col < M, other=0)[None, :])
    return positive, negative


@triton.jit
def _fold(x, FOLD: tl.constexpr):
    """Column sums of a tile, left as partial ones (FOLD / 16, 8, TM): no lane waits for another.

    A thread holds rows r and r + 8 of every 16, and so does it FOLD rows further down.
    """
    parts = tl.reshape(x, (x.shape[0] // FOLD, FOLD // 16, 2, 8, x.shape[1]))
    return tl.sum(tl.sum(parts, 2), 0)


@triton.jit
def _walk(
    rows, cols, kept, head, row_part, row_pull, marks, block, first, last, row0, col0, n, N, M,
    D: tl.constexpr, TN: tl.constexpr, TM: tl.constexpr, TD: tl.constexpr, FOLD: tl.constexpr,
    KIND: tl.constexpr, IDS: tl.constexpr, SELF: tl.constexpr,
    UPPER: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Walk down row tiles [first, last) of one column block; see `sums`.

    The rows' sums are stored tile by tile, the columns' returned, folded: of exponentials, and of
    those times the products of features.
    """
    offset2 = tl.load(head + OFFSET2)
    start = wide(block) * n
    local = block * TM
    col = col0 + local + tl.arange(0, TM)
    folded = tl.zeros((FOLD // 16, 8, TM), tl.float32)
    pulled = folded
    # The one tile with pairs (i, i); it may lie above the panel or below it.
    diagonal = tl.where(col0 + local >= row0, (col0 + local - row0) // TN, -1)
    if UPPER:
        last = tl.minimum(last, diagonal + 1)
    stop, meets = first, 0
    if not MASKED:
        stop = tl.maximum(tl.minimum(last, n // TN), first)
        if KIND == ALIGNED or SELF or UPPER:
            meets = ((diagonal >= first) & (diagonal < stop)).to(tl.int32)
        for k in tl.range(first, stop - meets, flatten=True):
            i = k + meets * (k >= diagonal).to(tl.int32)
            s = product(rows, cols, i * TN, local, D, TN, TM, TD)
            p = exp_scaled(s, head, offset2)
            at = start + i * TN + tl.arange(0, TN)
            tl.store(row_part + at, tl.sum(p, 1))
            if COLUMNS:
                folded += _fold(p, FOLD)
            if SCALED:
                tl.store(row_pull + at, tl.sum(p * s, 1))
            if SCALED and COLUMNS:
                pulled += _fold(p * s, FOLD)
            if kept is not None:
                kept.store([i * TN, local], stored(p, kept.dtype))
    for k in tl.range(stop - meets, last, flatten=MASKED):
        i = tl.where((k < stop) & (meets > 0), diagonal, k)
        at = i * TN + tl.arange(0, TN)
        s = product(rows, cols, i * TN, local, D, TN, TM, TD)
        p = exp_scaled(s, head, offset2)
        p = tl.where(which(row0 + at, col, N, M, marks, KIND, IDS, SELF, UPPER)[1], p, 0.0)
        tl.store(row_part + start + at, tl.sum(p, 1), at < n)
        if COLUMNS:
            folded += _fold(p, FOLD)
        if SCALED:
            tl.store(row_pull + start + at, tl.sum(p * s, 1), at < n)
        if SCALED and COLUMNS:
            pulled += _fold(p * s, FOLD)
        if kept is not None:
            kept.store([i * TN, local], stored(p, kept.dtype))
    return folded, pulled


@triton.jit
def sums(
    rows, cols, kept, head, row_part, col_part, row_pull, col_pull, index, row_ids, col_ids,
    row0, col0, n, m, N, M, share,
    D: tl.constexpr, TN: tl.constexpr, TM: tl.constexpr, TD: tl.constexpr, FOLD: tl.constexpr,
    KIND: tl.constexpr, IDS: tl.constexpr, SELF: tl.constexpr,
    UPPER: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Sums of exp2(z - offset) over the negatives of rows and of columns: one exp a pair.

    Of rows (n, D) from row0 on against columns (m, D) from col0 on. All tiles, column block by
    column block, are shared out evenly: a program takes the next `share` of them and walks down
    its part of each block. The columns' sums stay in registers meanwhile, the rows' are one store
    a tile: row_part (blocks, n); col_part (programs that met a block, m). Unless MASKED all columns
    exist, and only tiles on the diagonal and at the ragged end of the rows need a look at which
    pairs count: they come after the others. Exponentials go to `kept` (n, m) if there is one; with
    SCALED their sums times products of features to row_pull and col_pull.
    """
    rows, cols = opened(rows, D, TN, TD), opened(cols, D, TM, TD)
    if kept is not None:
        kept = opened(kept, whole(m), TN, TM)
    tiles = tl.cdiv(n, TN)
    start = tl.program_id(0) * share
    stop = tl.minimum(start + share, tiles * tl.cdiv(m, TM))
    marks = (index, row_ids, col_ids)
    for block in range(start // tiles, tl.cdiv(stop, tiles)):
        first = tl.maximum(start - block * tiles, 0)
        last = tl.minimum(stop - block * tiles, tiles)
        folded, pulled = _walk(
            rows, cols, kept, head, row_part, row_pull, marks, block, first, last, row0, col0, n,
            N, M, D, TN, TM, TD, FOLD, KIND, IDS, SELF, UPPER, COLUMNS, MASKED, SCALED
        )  # fmt: skip
        slot = tl.program_id(0) - block * tiles // share
        at = block * TM + tl.arange(0, TM)
        if COLUMNS:
            tl.store(col_part + wide(slot) * m + at, tl.sum(tl.sum(folded, 0), 0), at < m)
        if SCALED and COLUMNS:
            tl.store(col_pull + wide(slot) * m + at, tl.sum(tl.sum(pulled, 0), 0), at < m)


@triton.jit
def _online(m, total, s, scale, wanted):
    """A running maximum (n,) of z and sum of exp2 from it, with products (n, m) added."""
    top = tl.maximum(m, tl.max(tl.where(wanted, exponent(s, scale, 0.0), -INF), 1))
    base = tl.where(top == -INF, 0.0, top)
    x = tl.where(wanted, exponent(s, scale, base[:, None]), -INF)
    return top, total * tl.exp2(m - base) + tl.sum(tl.exp2(x), 1)


@triton.jit
def marked_sums(
    rows, cols, head, flag, out, index, row_ids, col_ids, row_labels, col_labels, row0, col0, m,
    N, M,
    D: tl.constexpr, TN: tl.constexpr, TM: tl.constexpr, TD: tl.constexpr,
    KIND: tl.constexpr, IDS: tl.constexpr, SELF: tl.constexpr,
    SUMS: tl.constexpr, ON_FLAG: tl.constexpr,
):  # fmt: skip
    """Sums of any marked pairs, rows only, with a running maximum: right for all numbers.

    Of rows from row0 on against m columns from col0 on. out (8, N) fp32: maximum and sum over
    negatives, the same of positives; sum of the positives' logits and their count, the same of
    negatives. Logits in units of log 2. Columns further on continue from what is in `out`.
    """
    if ON_FLAG:
        if tl.load(flag) == 0:
            return
    rows, cols = opened(rows, D, TN, TD), opened(cols, D, TM, TD)
    scale = tl.load(head + SCALE2)
    local = tl.program_id(0) * TN
    row = row0 + local + tl.arange(0, TN)
    marks = (index, row_ids, col_ids, row_labels, col_labels)
    inside, out, step = row < N, out + row, wide(N)
    more = inside & (col0 > 0)
    top = tl.load(out, more, other=-INF)
    total = tl.load(out + step, more, other=0.0)
    positive_top = tl.load(out + 2 * step, more, other=-INF)
    positive_total = tl.load(out + 3 * step, more, other=0.0)
    positive_sum = tl.load(out + 4 * step, more, other=0.0)
    positive_count = tl.load(out + 5 * step, more, other=0.0)
    negative_sum = tl.load(out + 6 * step, more, other=0.0)
    negative_count = tl.load(out + 7 * step, more, other=0.0)
    for j in tl.range(0, tl.cdiv(m, TM)):
        col = col0 + j * TM + tl.arange(0, TM)
        s = product(rows, cols, local, j * TM, D, TN, TM, TD)
        z = exponent(s, scale, 0.0)
        positive, negative = which(row, col, N, M, marks, KIND, IDS, SELF, False)
        top, total = _online(top, total, s, scale, negative)
        if SUMS:
            negative_sum += tl.sum(tl.where(negative, z, 0.0), 1)
            negative_count += tl.sum(negative.to(tl.float32), 1)
        if KIND == LABEL:
            positive_top, positive_total = _online(positive_top, positive_total, s, scale, positive)
            positive_sum += tl.sum(tl.where(positive, z, 0.0), 1)
            positive_count += tl.sum(positive.to(tl.float32), 1)
    tl.store(out, top, inside)
    tl.store(out + step, total, inside)
    tl.store(out + 2 * step, positive_top, inside)
    tl.store(out + 3 * step, positive_total, inside)
    tl.store(out + 4 * step, positive_sum, inside)
    tl.store(out + 5 * step, positive_count, inside)
    tl.store(out + 6 * step, negative_sum, inside)
    tl.store(out + 7 * step, negative_count, inside)


@triton.jit
def marked_means(
    rows, cols, head, flag, stats, mean, product_of, index, row_ids, col_ids, row0, col0, m, N, M,
    D: tl.constexpr, TN: tl.constexpr, TM: tl.constexpr, TD: tl.constexpr,
    KIND: tl.constexpr, IDS: tl.constexpr, SELF: tl.constexpr,
):  # fmt: skip
    """Mean columns (N, D) of rows under their softmax, and their products with the rows (N,).

    From finished stats, where no fixed offset holds; else it exits at once. A program finds TD
    features of TN rows and computes their logits anew: right for all numbers, at D / TD times the
    cost. Columns further on are added to what is there.
    """
    if tl.load(flag) == 0:
        return
    rows, cols = opened(rows, D, TN, TD), opened(cols, D, TM, TD)
    scale = tl.load(head + SCALE2)
    local, part = tl.program_id(0) * TN, tl.program_id(1) * TD
    row, feature = row0 + local + tl.arange(0, TN), part + tl.arange(0, TD)
    inside, more = row < N, col0 > 0
    value = tl.load(stats + row, inside, other=0.0)
    # A row without negatives has none to weigh.
    value = tl.where(value == -INF, 0.0, value) * LOG2E
    offset = tl.load(stats + 4 * wide(N) + row, inside, other=0.0) * LOG2E
    marks = (index, row_ids, col_ids)
    mean += wide(row)[:, None] * D + feature[None, :]
    there = inside[:, None] & (feature < D)[None, :]
    acc = tl.load(mean, there & more, other=0.0)
    pull = tl.load(product_of + row, inside & more, other=0.0)
    for j in tl.range(0, tl.cdiv(m, TM)):
        col = col0 + j * TM + tl.arange(0, TM)
        s = product(rows, cols, local, j * TM, D, TN, TM, TD)
        z = exponent(s, scale, offset[:, None])
        negative = which(row, col, N, M, marks, KIND, IDS, SELF, False)[1]
        p = tl.where(negative, tl.exp2(z - value[:, None]), 0.0)
        features = cols.load([j * TM, part])
        acc = tl.dot(p.to(features.dtype), features, acc)
        pull += tl.sum(p * s, 1)
    tl.store(mean, acc, there)
    if part == 0:
        tl.store(product_of + row, pull, inside)
