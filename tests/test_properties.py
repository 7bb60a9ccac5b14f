"""What must hold whatever the numbers: hypothesis draws shapes, tiles, marks and scales."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise import backends
from tilewise.backends import blocks
from tilewise.backends.plan import Needs, Plan
from tilewise.pairs import make_pairs
from tilewise.tiles import row_of_tiles, spans, tile_shape, upper_row_of_tiles

SIZES = st.integers(1, 24)
SCALES = st.sampled_from([0.1, 3.0, 40.0, 100.0, 3000.0])
quick = settings(max_examples=40)


def unit(n, d, seed):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1)


def step(loss, *features):
    leaves = [x.clone().requires_grad_() for x in features]
    value = loss(*leaves)
    value.backward()
    return value.detach(), [x.grad for x in leaves]


@quick
@given(n=SIZES, d=st.integers(1, 9), scale=SCALES, seed=st.integers(0, 999))
def test_permuting_pairs_permutes_gradients(n, d, scale, seed):
    a, b = unit(n, d, seed), unit(n, d, seed + 1)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    ids = torch.arange(n) % 3
    for name in ("clip", "siglip"):
        loss = tw.clip_loss if name == "clip" else tw.siglip_loss
        value, grads = step(lambda x, y, loss=loss: loss(x, y, scale, ids=ids), a, b)
        other, moved = step(
            lambda x, y, loss=loss: loss(x, y, scale, ids=ids[order]), a[order], b[order]
        )
        assert torch.allclose(value, other, rtol=1e-10)
        for x, y in zip(grads, moved, strict=True):
            assert torch.allclose(x[order], y, rtol=1e-8, atol=1e-12 * scale)


@quick
@given(n=SIZES, m=SIZES, d=st.integers(1, 9), scale=SCALES, seed=st.integers(0, 999))
def test_transposing_swaps_rows_and_columns(n, m, d, scale, seed):
    a, b = unit(n, d, seed), unit(m, d, seed + 1)
    ids = torch.arange(n) % 4, torch.arange(m) % 4
    straight = tw.reduce_pairs(a, b, scale, ids=ids, sums=True)
    turned = tw.reduce_pairs(b, a, scale, ids=ids[::-1], sums=True)
    for x, y in ((straight.rows, turned.cols), (straight.cols, turned.rows)):
        assert torch.allclose(x.values + x.offset, y.values + y.offset, rtol=1e-12, atol=1e-11)
        assert torch.allclose(x.positives + x.offset, y.positives + y.offset, rtol=1e-12, atol=1e-9)
        assert torch.equal(x.positive_count, y.positive_count)
        assert torch.equal(x.negative_count, y.negative_count)


@quick
@given(
    n=SIZES, m=SIZES, d=st.integers(1, 9), scale=SCALES, seed=st.integers(0, 999),
    tile=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    reduction=st.sampled_from(["logsumexp", "softplus"]),
)  # fmt: skip
def test_tiles_of_any_size_give_the_same_values(n, m, d, scale, seed, tile, reduction):
    a, b = unit(n, d, seed), unit(m, d, seed + 1)
    labels = (torch.arange(n) % 3, torch.arange(m) % 3) if seed % 2 else None
    options = {"positives": "aligned", "ids": None, "labels": labels, "skip_self": False}
    pairs = make_pairs(a, b, (torch.tensor(scale).double(), None), **options)
    check_tiles(
        pairs, Plan(reduction, True, reduction == "logsumexp", "chunked", 2**28, False), tile
    )


@quick
@given(
    n=SIZES, d=st.integers(1, 9), scale=SCALES, seed=st.integers(0, 999), tile=st.integers(1, 30)
)
def test_tiles_of_any_size_where_the_columns_are_the_rows(n, d, scale, seed, tile):
    x = unit(n, d, seed)
    labels = torch.arange(n) % 3
    scale = torch.tensor(scale).double()
    pairs = make_pairs(
        x, None, (scale, None), positives="aligned", ids=None, labels=labels, skip_self=True
    )
    check_tiles(pairs, Plan("logsumexp", False, True, "chunked", 2**28, False), (tile, tile))


def check_tiles(pairs, plan, tile):
    """Forward and backward of the chunked backend under one cut, against the dense one."""
    needs = Needs(True, not pairs.symmetric, True, True)
    chunked, dense = backends.BACKENDS["chunked"], backends.BACKENDS["dense"]
    whole = blocks.CPU_TILE
    try:
        blocks.CPU_TILE = tile
        packed = chunked.reduce(pairs, plan)
        upstream = tuple(torch.rand_like(x) for x in packed[:2])
        grads = chunked.differentiate(pairs, plan, packed, upstream, needs)
    finally:
        blocks.CPU_TILE = whole
    truth = dense.reduce(pairs, plan)
    for ours, theirs in zip(packed[:2], truth[:2], strict=True):
        assert ours.shape == theirs.shape
        if ours.shape[0] > 1:  # values, positives and sums are counted from each backend's offset
            shift = ours[4] - theirs[4]
            assert torch.allclose(ours[0] + shift, theirs[0], rtol=1e-10, atol=1e-9)
            assert torch.allclose(ours[3], theirs[3])
        elif ours.numel():
            assert torch.allclose(ours, theirs, rtol=1e-12)
    true = dense.differentiate(pairs, plan, truth, upstream, needs)
    for name in Needs._fields:
        ours, theirs = getattr(grads, name), getattr(true, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            scale = 1e-9 * (1 + float(pairs.scale))
            assert torch.allclose(ours, theirs, rtol=1e-8, atol=scale), name


@quick
@given(n=SIZES, m=SIZES, d=st.integers(1, 9), bias=st.floats(-1e4, 1e4), seed=st.integers(0, 999))
def test_a_bias_leaves_info_nce_unchanged(n, m, d, bias, seed):
    a, b = unit(n, d, seed), unit(m, d, seed + 1)
    plain, grads = step(lambda x, y: tw.info_nce(x, y, 10.0), a, b)
    moved, others = step(lambda x, y: tw.info_nce(x, y, 10.0, bias=bias), a, b)
    assert torch.equal(plain, moved)
    for x, y in zip(grads, others, strict=True):
        assert torch.equal(x, y)


@settings(max_examples=300)
@given(n=st.integers(1, 40), m=st.integers(1, 40), d=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_float64_against_the_oracle_over_random_shapes(n, m, d, seed):
    """R1: loss and gradients to 1e-12 over 300 random shapes."""
    import oracle

    a, b = unit(n, d, seed), unit(m, d, seed + 1)
    value, (d_a, d_b) = step(lambda x, y: tw.info_nce(x, y, 14.3, workspace_mib=0.01), a, b)
    truth = oracle.evaluate(oracle.info_nce, a, b, 14.3, 0.0, upstream=1.0, compute=torch.float64)
    assert abs(value - truth.loss) <= 1e-12 * max(1.0, abs(truth.loss))
    for got, name in ((d_a, "d_rows"), (d_b, "d_cols")):
        size = truth.sizes[name]
        assert (got - getattr(truth, name)).norm() <= 1e-12 * size or size == 0


@given(size=st.integers(1, 1000), step=st.integers(1, 1000))
def test_spans_cover_once(size, step):
    covered = [i for start, stop in spans(size, step) for i in range(start, stop)]
    assert covered == list(range(size))


@given(size=st.integers(1, 60), step=st.integers(1, 60))
def test_upper_tiles_cover_each_pair_once(size, step):
    seen = torch.zeros(size, size, dtype=torch.int)
    for span in spans(size, step):
        for tile in upper_row_of_tiles(span, size):
            seen[tile.rows, tile.cols] += 1
            if tile.row_start != tile.col_start:
                seen[tile.cols, tile.rows] += 1
    assert (seen == 1).all()


@given(rows=st.integers(1, 50), cols=st.integers(1, 50), width=st.integers(1, 60))
def test_rows_of_tiles_cover_each_pair_once(rows, cols, width):
    tiles = list(row_of_tiles((0, rows), cols, width))
    assert [j for t in tiles for j in range(t.col_start, t.col_stop)] == list(range(cols))
    assert all((t.row_start, t.row_stop) == (0, rows) for t in tiles)


@given(d=st.integers(1, 10**6), room=st.integers(1, 2**30))
def test_tile_shapes_fit_the_workspace(d, room):
    n, m = tile_shape(d, room, (1024, 2048))
    assert 1 <= n <= 1024
    assert 1 <= m <= 2048
    assert n * m == 1 or 8 * n * m + d * (3 * n + 2 * m) <= room
