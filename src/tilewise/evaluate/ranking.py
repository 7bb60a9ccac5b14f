"""Where the right ones end up: ranks, best k and retrieval metrics, tile by tile.

A score is queries_i . gallery_j in float32, so features of unit norm are ranked by their cosine.
No function here holds a score for every pair.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.errors import DataError, DeviceError, DtypeError, OptionError, ShapeError

DEPTH = 10  # of nDCG@10 and MRR@10
RECALLS = (1, 5, 10)

# Sides of a product are multiples of this, larger than any strip that a BLAS library treats apart.
EDGE = 64
INDEX_BITS = 32


@torch.no_grad()
def ranks(
    queries: Tensor, gallery: Tensor, query_ids: Tensor, gallery_ids: Tensor, *, tile: int = 4096
) -> Tensor:
    """How many of the gallery stand above each query's best positive: 0 is a hit at the top.

    Positives are the items of the query's own id. Others of equal score stand above, so that an
    encoder that cannot tell them apart is never right by luck.

    Args:
        queries, gallery: features (N, D) and (M, D), of any floating dtypes, on one device.
        query_ids, gallery_ids: integers (N,) and (M,).
        tile: scores are held for at most tile x tile pairs.

    Returns:
        (N,) int64.
    """
    check_pair(("queries", queries), ("gallery", gallery), tile)
    positive_counts(queries, gallery, query_ids, gallery_ids)
    return _positions((queries, gallery), (query_ids, gallery_ids), 1, tile)[:, 0]


@torch.no_grad()
def top(queries: Tensor, gallery: Tensor, k: int, *, tile: int = 2048) -> tuple[Tensor, Tensor]:
    """The k of the gallery (M, D) that score highest with each query (N, D), best first.

    Of equal scores the lower index comes first.

    Returns:
        Scores (N, k) float32, and indices into the gallery (N, k) int64.
    """
    check_pair(("queries", queries), ("gallery", gallery), tile)
    if not 1 <= k <= len(gallery):
        raise OptionError(
            f"k must be from 1 to the {len(gallery)} items of the gallery, got {k}; lower it"
        )
    found = []
    with full_float32(queries):
        for strip in _strips(queries, gallery, tile):
            keys = torch.empty(strip.size, 0, dtype=torch.int64, device=queries.device)
            for items in strip.tiles():
                keys = _highest(keys, _keys(strip.scores(items), items.start), k)
            found.append(keys)
    return _of_keys(torch.cat(found))


@torch.no_grad()
def retrieval_metrics(
    queries: Tensor, gallery: Tensor, query_ids: Tensor, gallery_ids: Tensor, *, tile: int = 4096
) -> dict[str, float]:
    """How well queries (N, D) find the items of their ids in a gallery (M, D).

    "R@1", "R@5", "R@10": share of queries with a positive among the first k. "MRR", "MRR@10": mean
    of 1 / rank of the best positive. "nDCG@10": every positive counts, against all of them first.
    "mean_rank", "median_rank": of the best positive, from 1. "queries", "gallery": N and M.
    Ties count against the query, as in `ranks`.
    """
    check_pair(("queries", queries), ("gallery", gallery), tile)
    counts = positive_counts(queries, gallery, query_ids, gallery_ids)
    deep = min(DEPTH, int(counts.max()))
    places = _positions((queries, gallery), (query_ids, gallery_ids), deep, tile).cpu()
    best = places[:, 0].sort().values
    n = len(best)
    inverse = 1 / (best + 1).double()
    return {
        **{f"R@{k}": float((best < k).double().mean()) for k in RECALLS},
        "MRR": float(inverse.mean()),
        f"MRR@{DEPTH}": float((inverse * (best < DEPTH)).mean()),
        f"nDCG@{DEPTH}": _ndcg(places, counts.cpu()),
        "mean_rank": float(best.double().mean()) + 1,
        "median_rank": float(best[(n - 1) // 2] + best[n // 2]) / 2 + 1,
        "queries": float(n),
        "gallery": float(len(gallery)),
    }


def image_text_metrics(
    image: Tensor, text: Tensor, image_ids: Tensor, text_ids: Tensor, *, tile: int = 4096
) -> dict[str, float]:
    """`retrieval_metrics` both ways, as "image_to_text_R@1", "text_to_image_R@1" and so on.

    Args:
        image, text: features (N, D) and (M, D).
        image_ids, text_ids: (N,) and (M,); the captions of an image have its id.
        tile: as in `ranks`.
    """
    there = retrieval_metrics(image, text, image_ids, text_ids, tile=tile)
    back = retrieval_metrics(text, image, text_ids, image_ids, tile=tile)
    return {
        **{f"image_to_text_{name}": value for name, value in there.items()},
        **{f"text_to_image_{name}": value for name, value in back.items()},
    }


class _Strip:
    """Some of the queries, against the whole gallery (M, D), a tile at a time."""

    def __init__(self, queries: Tensor, gallery: Tensor, at: slice, tile: int) -> None:
        self.at, self.gallery, self.tile = at, gallery, tile
        self.size = len(queries[at])
        # One shape for every product: BLAS rounds narrow ones in another order, and then an item
        # in the last tile would not tie with its twin, nor score in two passes the same.
        height, self.width = (_padded(min(tile, len(side))) for side in (queries, gallery))
        self.rows = _ready(queries[at], height)  # (height, D)

    def tiles(self) -> Iterator[slice]:
        """Items of each tile."""
        return _spans(len(self.gallery), self.tile)

    def scores(self, items: slice) -> Tensor:
        """Scores (n, m) with some items."""
        cols = self.gallery[items]
        return (self.rows @ _ready(cols, self.width).T)[: self.size, : len(cols)]


def _strips(queries: Tensor, gallery: Tensor, tile: int) -> Iterator[_Strip]:
    return (_Strip(queries, gallery, at, tile) for at in _spans(len(queries), tile))


def _best_positives(strip: _Strip, ids: Tensor, gallery_ids: Tensor, k: int) -> Tensor:
    """The k highest scores (n, k) of each query's positives, -inf where it has fewer."""
    best = strip.rows.new_full((strip.size, k), -torch.inf)
    for items in strip.tiles():
        same = ids[:, None] == gallery_ids[items]
        if bool(same.any()):  # most tiles hold none, and cost no product
            best = _highest(best, strip.scores(items).where(same, -torch.inf), k)
    return best


def _places(strip: _Strip, ids: Tensor, gallery_ids: Tensor, best: Tensor) -> Tensor:
    """0-based places (n, k) among the whole gallery of positives that score `best` (n, k).

    Where a query has fewer positives, what stands there means nothing.
    """
    places = torch.arange(best.shape[1], device=best.device).repeat(strip.size, 1)
    for items in strip.tiles():
        same = ids[:, None] == gallery_ids[items]
        scores = strip.scores(items)
        for j in range(best.shape[1]):
            # Whatever is not below stands above: an equal score, and NaN.
            below = (scores < best[:, j, None]).logical_or_(same)
            places[:, j] += below.shape[1] - below.sum(1)
    return places


def _positions(
    features: tuple[Tensor, Tensor], ids: tuple[Tensor, Tensor], k: int, tile: int
) -> Tensor:
    """Places (N, k) of each query's k best positives; features and ids of queries and gallery."""
    found = []
    with full_float32(features[0]):
        for strip in _strips(*features, tile):
            own = ids[0][strip.at]
            best = _best_positives(strip, own, ids[1], k)
            found.append(_places(strip, own, ids[1], best))
    return torch.cat(found)


def _highest(best: Tensor, new: Tensor, k: int) -> Tensor:
    """The k highest (n, k) of each row of both, in falling order; all where there are fewer."""
    both = torch.cat([best, new.topk(min(k, new.shape[1])).values], 1)
    return both.topk(min(k, both.shape[1])).values


def _keys(scores: Tensor, start: int) -> Tensor:
    """Integers (n, m) in the order of scores, of equal ones the lower index `start` + j higher.

    A choice of the highest keys, unlike one of the highest scores, is never left to chance.
    """
    bits = _flip((scores + 0.0).view(torch.int32))  # + 0.0: -0 and 0 are equal and must tie
    keys = bits.long().bitwise_left_shift_(INDEX_BITS)
    index = torch.arange(start, start + scores.shape[1], device=scores.device)
    return keys.add_(2**INDEX_BITS - 1 - index)


def _of_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and indices that `_keys` were made from."""
    index = (2**INDEX_BITS - 1) - (keys & (2**INDEX_BITS - 1))
    return _flip((keys >> INDEX_BITS).int()).view(torch.float32), index


def _flip(bits: Tensor) -> Tensor:
    """Between a float32's bits and an int32 of the same order; its own inverse.

    Bits of negative floats, without their sign, rise as the float falls.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _ready(features: Tensor, size: int) -> Tensor:
    """Features (n, D) as float32, with rows of zeros up to `size`."""
    return functional.pad(features.float(), (0, 0, 0, size - len(features)))


def _padded(size: int) -> int:
    return -(-size // EDGE) * EDGE


def _spans(size: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, size)) for start in range(0, size, tile))


@contextmanager
def full_float32(like: Tensor) -> Iterator[None]:
    """Products of float32 without TF32, bfloat16 or autocast, whatever the trainer has set."""
    legacy = not hasattr(torch.backends.cuda.matmul, "fp32_precision")  # before PyTorch 2.9
    backends: tuple[Any, ...] = (torch.backends.cuda, torch.backends.mkldnn)
    settings = [] if legacy else [backend.matmul for backend in backends]
    before = [setting.fp32_precision for setting in settings]
    level = torch.get_float32_matmul_precision() if legacy else ""
    try:
        if legacy:
            torch.set_float32_matmul_precision("highest")
        for setting in settings:
            setting.fp32_precision = "ieee"
        with torch.autocast(like.device.type, enabled=False):
            yield
    finally:
        if legacy:
            torch.set_float32_matmul_precision(level)
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def _ndcg(places: Tensor, counts: Tensor) -> float:
    """Mean over queries of sum_j 1 / log2(place_j + 2) over places below 10, by the best such sum.

    `places` (N, k) are of the k best positives, of as many as `counts` (N,), k up to 10.
    """
    order = torch.arange(places.shape[1])
    there = order < counts[:, None]
    gain = (there & (places < DEPTH)) / torch.log2(places.double() + 2)
    ideal = there / torch.log2(order.double() + 2)
    return float((gain.sum(1) / ideal.sum(1)).mean())


def positive_counts(
    queries: Tensor, gallery: Tensor, query_ids: Tensor, gallery_ids: Tensor
) -> Tensor:
    """How many items have each query's id (N,); raise unless each has at least one."""
    check_marks("query_ids", query_ids, queries)
    check_marks("gallery_ids", gallery_ids, gallery)
    known = gallery_ids.long().sort().values
    wanted = query_ids.long()
    counts = torch.searchsorted(known, wanted, right=True) - torch.searchsorted(known, wanted)
    lost = int((counts == 0).sum())
    if lost:
        first = wanted[counts == 0][:3].tolist()
        raise DataError(
            f"every query must have an item of its id in the gallery, got {lost} of {len(counts)} "
            f"without one (ids {', '.join(map(str, first))}{', ...' if lost > 3 else ''}); leave "
            "these queries out, or add their items to the gallery"
        )
    return counts


def check_pair(one: tuple[str, Tensor], other: tuple[str, Tensor], tile: int = 1) -> None:
    """Raise unless two named tensors are features of one size, on one device."""
    for name, features in (one, other):
        check_features(name, features)
    (name, features), (other_name, others) = one, other
    if features.shape[1] != others.shape[1]:
        raise ShapeError(
            f"{name} and {other_name} must share a feature size, got {features.shape[1]} and "
            f"{others.shape[1]}; take both from one model"
        )
    if features.device != others.device:
        raise DeviceError(
            f"{other_name} must be on the device of {name} ({features.device}), got "
            f"{others.device}; move it with .to('{features.device}')"
        )
    for name, features in (one, other):
        check_finite(name, features)
    if tile < 1:
        raise OptionError(f"tile must be above 0, got {tile}; 4096 is a good size")


def check_features(name: str, features: Tensor) -> None:
    """Raise unless `features` is a floating tensor (N, D), not empty."""
    if not isinstance(features, Tensor) or not features.is_floating_point():
        got = getattr(features, "dtype", type(features).__name__)
        raise DtypeError(f"{name} must be a floating tensor, got {got}; cast it with .float()")
    if features.dim() != 2 or 0 in features.shape:
        raise ShapeError(
            f"{name} must be features (N, D), none of both 0, got shape {tuple(features.shape)}; "
            "stack one vector for each sample"
        )


def check_finite(name: str, features: Tensor) -> None:
    """Raise if there is NaN or infinity in features (N, D)."""
    # Not isfinite of all: it would make tensors as large as the features.
    finite = features.amin(1).isfinite() & features.amax(1).isfinite()
    bad = len(features) - int(finite.sum())
    if bad:
        raise DataError(
            f"{name} must be finite, got {bad} of {len(features)} vectors with NaN or infinity; "
            "the model has diverged, or its dtype is too narrow: evaluate an earlier checkpoint"
        )


def check_marks(name: str, marks: Tensor, features: Tensor) -> None:
    """Raise unless `marks` (ids or labels) are integers (N,), one beside each of `features`."""
    if not isinstance(marks, Tensor) or marks.is_floating_point() or marks.dtype == torch.bool:
        got = getattr(marks, "dtype", type(marks).__name__)
        raise DtypeError(f"{name} must be an integer tensor, got {got}; cast it with .long()")
    if marks.shape != (len(features),):
        raise ShapeError(
            f"{name} must hold one integer for each vector, shape ({len(features)},), got "
            f"{tuple(marks.shape)}; index or repeat it to match"
        )
    if marks.device != features.device:
        raise DeviceError(
            f"{name} must be on the device of its features ({features.device}), got "
            f"{marks.device}; move it with .to('{features.device}')"
        )
