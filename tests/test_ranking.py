"""Ranks, best k and retrieval metrics against the whole matrix of scores in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tilewise.errors import DataError, DeviceError, DtypeError, OptionError, ShapeError
from tilewise.evaluate import ranking
from tilewise.evaluate.ranking import image_text_metrics, ranks, retrieval_metrics, top
from tilewise.measure import peak_bytes

HALVES = (torch.bfloat16, torch.float16)


def unit(n, d=16, seed=0):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    return functional.normalize(x, dim=1)


def whole(n, m, d, seed):
    """Features of few small integers: every score is exact, and ties are everywhere."""
    dice = torch.Generator().manual_seed(seed)
    make = lambda size: torch.randint(-2, 3, (size, d), generator=dice).float()  # noqa: E731
    gallery_ids = torch.randint(0, 6, (m,), generator=dice) - 3
    query_ids = gallery_ids[torch.randint(0, m, (n,), generator=dice)]
    return make(n), make(m), query_ids, gallery_ids


def naive_order(queries, gallery, query_ids, gallery_ids):
    """For each query whether it is right, down the whole gallery, the wrong one of equals first."""
    scores = queries.double() @ gallery.double().T
    for row, own in zip(scores, query_ids, strict=True):
        right = gallery_ids == own
        order = sorted(range(len(row)), key=lambda j: (-float(row[j]), bool(right[j])))
        yield [bool(right[j]) for j in order]


def naive_ranks(*case):
    """Wrong ones above the best right one."""
    return [order.index(True) for order in naive_order(*case)]


def naive_metrics(*case):
    orders = list(naive_order(*case))
    first = [order.index(True) + 1 for order in orders]
    mean = lambda values: sum(values) / len(orders)  # noqa: E731

    def dcg(order):
        return sum(1 / math.log2(place + 2) for place, right in enumerate(order[:10]) if right)

    middle = sorted(first)[(len(first) - 1) // 2 : len(first) // 2 + 1]
    return {
        "R@1": mean(place <= 1 for place in first),
        "R@5": mean(place <= 5 for place in first),
        "R@10": mean(place <= 10 for place in first),
        "MRR": mean(1 / place for place in first),
        "MRR@10": mean(1 / place if place <= 10 else 0 for place in first),
        "nDCG@10": mean(dcg(order) / dcg(sorted(order, reverse=True)) for order in orders),
        "mean_rank": mean(first),
        "median_rank": sum(middle) / len(middle),
        "queries": len(case[0]),
        "gallery": len(case[1]),
    }


def naive_top(queries, gallery, k):
    scores = queries.double() @ gallery.double().T
    return scores, [
        sorted(range(len(row)), key=lambda j: (-float(row[j]), j))[:k] for row in scores
    ]


SHAPES = {
    "n": st.integers(1, 30),
    "m": st.integers(1, 30),
    "d": st.integers(1, 4),
    "tile": st.integers(1, 40),
    "seed": st.integers(0, 9999),
}


@settings(max_examples=50)
@given(**SHAPES)
def test_metrics_are_those_of_the_whole_matrix(n, m, d, tile, seed):
    """Ragged tiles, several positives, more than ten of them, and ties."""
    case = whole(n, m, d, seed)
    assert ranks(*case, tile=tile).tolist() == naive_ranks(*case)
    assert retrieval_metrics(*case, tile=tile) == pytest.approx(naive_metrics(*case), abs=1e-12)


@settings(max_examples=50)
@given(**SHAPES, k=st.integers(1, 30))
def test_top_is_that_of_the_whole_matrix(n, m, d, tile, seed, k):
    queries, gallery, *_ = whole(n, m, d, seed)
    k = min(k, m)
    scores, indices = top(queries, gallery, k, tile=tile)
    truth, order = naive_top(queries, gallery, k)
    assert indices.tolist() == order
    assert scores.dtype == torch.float32
    assert torch.equal(scores.double(), truth.gather(1, indices))


def test_top_of_what_is_no_integer():
    queries, gallery = unit(70), unit(130, seed=1)
    scores, indices = top(queries, gallery, 7, tile=32)
    truth, order = naive_top(queries, gallery, 7)
    assert indices.tolist() == order
    assert (scores - truth.gather(1, indices)).abs().max() < 1e-6


def test_zeros_of_both_signs_are_equal():
    _, indices = top(torch.tensor([[1.0], [-1.0]]), torch.tensor([[-0.0], [0.0], [-0.0]]), 3)
    assert indices.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES])
def test_scores_are_in_float32(dtype):
    """Of half-precision features too: rounding a score to bfloat16 would make ties of most."""
    queries, gallery = unit(100).to(dtype), unit(300, seed=1).to(dtype)
    case = (queries, gallery, torch.arange(100), torch.arange(300) % 150)
    found = ranks(*case, tile=64)
    assert found.dtype == torch.int64
    assert found.tolist() == naive_ranks(*case)
    rounded = (queries @ gallery.T).to(torch.bfloat16).double()
    assert (rounded.topk(2).values.diff() == 0).any(), "the test would not notice rounding"
    assert top(queries, gallery, 5, tile=64)[1].tolist() == naive_top(queries, gallery, 5)[1]


def test_dtypes_may_differ():
    queries, gallery = unit(20).bfloat16(), unit(30, seed=1)
    case = (queries, gallery, torch.arange(20), torch.arange(30, dtype=torch.int32))
    assert ranks(*case).tolist() == naive_ranks(*case)


@pytest.mark.parametrize("trainer", ["autocast", "precision", "legacy"])
def test_what_the_trainer_has_set_makes_no_difference(trainer):
    """Neither autocast nor fast products; and it is set again afterwards."""
    queries, gallery = unit(200, 64), unit(200, 64, seed=1)
    ids = torch.arange(200)
    expected = ranks(queries, gallery, ids, ids)
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    try:
        if trainer == "precision":
            setting.fp32_precision = "bf16"
        if trainer == "legacy":
            torch.set_float32_matmul_precision("medium")
        held = setting.fp32_precision
        with torch.autocast("cpu", torch.bfloat16, enabled=trainer == "autocast"):
            assert torch.equal(ranks(queries, gallery, ids, ids), expected)
            with ranking.full_float32(queries):
                assert setting.fp32_precision == "ieee"
                assert (queries @ gallery.T).dtype == torch.float32
            assert torch.is_autocast_enabled("cpu") == (trainer == "autocast")
        assert setting.fp32_precision == held
    finally:
        torch.set_float32_matmul_precision("highest")
        setting.fp32_precision = before


@pytest.mark.parametrize("size", [1, 2, 5, 65, 129])
@pytest.mark.parametrize("d", [3, 64, 512])
def test_a_constant_encoder_is_always_last(size, d):
    """Twins tie wherever they are: also the only one in the last tile, and in a single row."""
    for n in (1, min(2, size), size):
        queries, gallery = unit(1, d).expand(n, d), unit(1, d, seed=1).expand(size, d)
        ids = torch.arange(size)
        for shift in (0, size - 1):
            found = ranks(queries, gallery, (ids[:n] + shift) % size, ids, tile=64)
            assert found.tolist() == [size - 1] * n
    _, indices = top(queries, gallery, size, tile=64)
    assert torch.equal(indices, ids.expand(size, size))


def test_the_best_of_several_positives_counts():
    queries, gallery = torch.tensor([[1.0]]), torch.tensor([[9.0], [8.0], [7.0], [6.0]])
    ids = lambda *values: torch.tensor(values)  # noqa: E731
    assert ranks(queries, gallery, ids(5), ids(1, 5, 5, 5)).tolist() == [1]
    assert ranks(queries, gallery, ids(5), ids(5, 5, 5, 1)).tolist() == [0]
    found = retrieval_metrics(queries, gallery, ids(5), ids(5, 1, 5, 1))
    ideal = 1 + 1 / math.log2(3)
    assert found["nDCG@10"] == pytest.approx((1 + 1 / 2) / ideal)


def test_both_ways():
    """Five captions to an image; the names are open_clip's."""
    image, text = unit(12), unit(60, seed=1)
    image_ids, text_ids = torch.arange(12), torch.arange(60) // 5
    found = image_text_metrics(image, text, image_ids, text_ids, tile=7)
    there = naive_metrics(image, text, image_ids, text_ids)
    back = naive_metrics(text, image, text_ids, image_ids)
    assert {"image_to_text_R@1", "text_to_image_R@10", "text_to_image_mean_rank"} < set(found)
    for name in there:
        assert found[f"image_to_text_{name}"] == pytest.approx(there[name])
        assert found[f"text_to_image_{name}"] == pytest.approx(back[name])
    assert len(found) == 2 * len(there)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, g, i: ranks(q, g, i, i, tile=128),
        lambda q, g, i: top(q, g, 10, tile=128),
        lambda q, g, i: retrieval_metrics(q, g, i // 5, i // 5, tile=128),
    ],
    ids=["ranks", "top", "metrics"],
)
def test_no_matrix_is_held(call):
    """Not even a byte for every pair."""
    size = 2000
    queries, gallery, ids = unit(size, 4), unit(size, 4, seed=1), torch.arange(size)
    assert peak_bytes(lambda: call(queries, gallery, ids), queries.device) < size * size


def test_features_with_a_graph():
    queries = unit(5).requires_grad_()
    assert not top(queries, queries, 2)[0].requires_grad
    assert ranks(queries, queries, torch.arange(5), torch.arange(5)).tolist() == [0] * 5


def test_a_query_without_positive():
    ids = torch.arange(6)
    with pytest.raises(DataError, match=r"4 of 6 without one \(ids 2, 3, 4, ...\); leave"):
        ranks(unit(6), unit(6), ids, ids % 2)
    with pytest.raises(DataError, match=r"1 of 6 without one \(ids 5\)"):
        retrieval_metrics(unit(6), unit(6), ids, ids.clamp(max=4))


IDS = torch.arange(4)
BAD = unit(4).index_fill(0, torch.tensor([2]), torch.nan)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: ranks(BAD, unit(4), IDS, IDS), DataError, "queries must be finite, got 1 of 4"),
        (lambda: top(unit(4), BAD / 0, 1), DataError, "gallery must be finite, got 4 of 4"),
        (lambda: top(unit(4), unit(4), 5), OptionError, "from 1 to the 4 items"),
        (lambda: top(unit(4), unit(4), 0), OptionError, "got 0"),
        (lambda: top(unit(4), unit(4), 1, tile=0), OptionError, "tile must be above 0"),
        (lambda: ranks(unit(4), unit(4, 5), IDS, IDS), ShapeError, "share a feature size, got 16"),
        (lambda: ranks(unit(4)[0], unit(4), IDS, IDS), ShapeError, r"\(N, D\)"),
        (lambda: ranks(unit(4)[:0], unit(4), IDS[:0], IDS), ShapeError, r"got shape \(0, 16\)"),
        (lambda: ranks(unit(4), unit(4), IDS[:3], IDS), ShapeError, "query_ids must hold one"),
        (lambda: ranks(unit(4), unit(4), IDS, IDS / 1), DtypeError, "gallery_ids must be an int"),
        (lambda: ranks(IDS[:, None], unit(4, 1), IDS, IDS), DtypeError, "queries must be a float"),
        (lambda: ranks(unit(4), unit(4).to("meta"), IDS, IDS), DeviceError, "gallery must be on"),
        (lambda: ranks(unit(4), unit(4), IDS.to("meta"), IDS), DeviceError, "query_ids must be on"),
    ],
)
def test_what_is_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
