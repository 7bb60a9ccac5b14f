"""InfoNCE: each query against all keys, in one direction."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from tilewise.agreement import together
from tilewise.dot_rows import dot_rows
from tilewise.errors import OptionError, ShapeError
from tilewise.losses.common import (
    Reduction,
    Scalar,
    bias_or_none,
    check_given,
    check_sides,
    make_ending,
    pick_scale,
    with_no_pull,
)
from tilewise.options import SweepOptions
from tilewise.pairs import (
    Both,
    as_scalar,
    autocast,
    beside,
    both,
    check_device,
    check_features,
    check_marks,
    check_match,
)
from tilewise.reductions import INFINITY, Stats, log_add
from tilewise.sweep import contrast_pairs, reduce_pairs


@together
def info_nce(
    query: Tensor,
    key: Tensor,
    scale: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    bias: float | Tensor | None = None,
    positives: Tensor | Literal["aligned"] = "aligned",
    negatives: Tensor | None = None,
    negative_ids: Tensor | None = None,
    ids: Tensor | Both | None = None,
    labels: Tensor | Both | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    decoupled: bool = False,
    reduction: Reduction = "mean",
    **how: Unpack[SweepOptions],
) -> Tensor:
    """Mean over i of logsumexp_j z_ij - z_ii,  z = scale * query @ key.T + bias.

    Args:
        query, key: features (N, D) and (M, D), usually of unit length. A query beyond the last
            key has no positive and is not counted.
        scale, temperature: the factor on the cosines, or its inverse; 1 / 0.07 by default.
        bias: added to every logit; it cancels in a softmax: loss unchanged, its gradient 0.
        positives: (N,) index of each query's key where they are not aligned; NO_POSITIVE for none.
            With a group it counts from this rank's first key.
        negatives: hard negatives, (K, D) shared by all queries (and all ranks of a group), or
            (N, H, D) for each its own.
        negative_ids: ids of the hard negatives, (K,) or (N, H), compared with the queries' ids.
        ids: pairs of equal ids are not negatives; (N,), or a tuple (query ids, key ids).
        labels: pairs of equal labels are positives; the loss is the mean over them. As `ids`.
        weight: (N,) weight of each query in the sum and the mean.
        label_smoothing: share of the target spread over all pairs that count.
        decoupled: leave the positives out of the logsumexp.
        reduction: "mean", "sum" or "none".
        how: backend, device, group, workspace_mib and others, as every loss takes them: the table
            in docs/api.md, or `SweepOptions`.

    Returns:
        A scalar, or (N,) with reduction "none"; float32 (float64 for float64 features).
    """
    query, key, like = check_sides("query", query, "key", key, how)
    check_given("positives", positives)
    ending = make_ending(
        query.shape[0], like, how, weight=weight, reduction=reduction,
        label_smoothing=label_smoothing, decoupled=decoupled,
    )  # fmt: skip
    scale = pick_scale(scale, temperature, 1 / 0.07, like)
    hard = _hard_negatives(query, key, negatives, ids, negative_ids, how)
    shift = bias_or_none(bias, like)
    if labels is None and hard is None and ending.at_once:
        loss = contrast_pairs(
            query, key, scale, positives=positives, ids=ids, weight=ending.weight,
            mean=reduction == "mean", columns=False, **how,
        )  # fmt: skip
        return with_no_pull(loss, shift)
    stats = reduce_pairs(
        query, key, scale, positives=positives, ids=ids, labels=labels,
        columns=False, sums=ending.sums, **how,
    ).rows  # fmt: skip
    if hard is not None:
        if hard.features.dim() == 2:
            more = _reduce_shared(query, hard, scale, ending.sums, how)
        else:
            more = _reduce_own(query, hard, scale)
        stats = _joined(stats, more)
    if shift is not None:
        stats = stats.with_bias(shift)
    return ending.of(stats, several=labels is not None)


class _Hard(NamedTuple):
    """Hard negatives and the ids that say which of them are false."""

    features: Tensor  # (K, D) or (N, H, D)
    row_ids: Tensor | None  # (N,)
    ids: Tensor | None  # (K,) or (N, H)


def _hard_negatives(
    query: Tensor,
    key: Tensor,
    negatives: Tensor | None,
    ids: Tensor | Both | None,
    own_ids: Tensor | None,
    how: SweepOptions,
) -> _Hard | None:
    """Check hard negatives against the queries; there may be none where other ranks have some."""
    if negatives is None:
        if own_ids is not None:
            raise OptionError("negative_ids name the rows of negatives, which were not given")
        return None
    if not isinstance(negatives, Tensor) or negatives.dim() not in (2, 3):
        got = getattr(negatives, "shape", type(negatives).__name__)
        raise ShapeError(
            "negatives must be a tensor (K, D) shared by all queries or (N, H, D) for each its "
            f"own, got {got}"
        )
    if negatives.shape[:1] == (0,) and negatives.dim() == 2 and how.get("group") is None:
        return None  # a pool that holds nothing yet
    check_features("negatives", negatives, dims=negatives.dim(), empty=how.get("group") is not None)
    device = how.get("device") if negatives.dim() == 2 else None
    if negatives.dim() == 3:
        check_device("query", query, "negatives", beside(negatives, how.get("device")))
    negatives = autocast(negatives, device)
    check_match("query", query, "negatives", negatives, device)
    if negatives.dim() == 3 and negatives.shape[0] != query.shape[0]:
        raise ShapeError(
            f"negatives (N, H, D) need one entry for each of the {query.shape[0]} queries, got "
            f"{negatives.shape[0]}; pass (K, D) for negatives that all queries share"
        )
    if own_ids is None:
        return _Hard(negatives, None, None)
    if ids is None:
        raise OptionError("negative_ids are compared with the queries' ids; pass ids too")
    place = query if device is None else own_ids
    check_marks("negative_ids", own_ids, tuple(negatives.shape[:-1]), place)
    return _Hard(negatives, both("ids", ids, query.shape[0], key.shape[0])[0], own_ids)


def _reduce_shared(
    query: Tensor, hard: _Hard, scale: Scalar, sums: bool, how: SweepOptions
) -> Stats:
    """Extra columns, all of them negatives."""
    ids = None if hard.row_ids is None or hard.ids is None else (hard.row_ids, hard.ids)
    how = how.copy()
    how.pop("sizes", None)  # they are those of the keys
    return reduce_pairs(
        query, hard.features, scale, positives=None, ids=ids, columns=False, sums=sums, **how
    ).rows


def _reduce_own(query: Tensor, hard: _Hard, scale: Scalar) -> Stats:
    """The O(N H D) term of each query's own negatives."""
    z = dot_rows(query, hard.features)
    z = z * as_scalar("scale", scale, query).to(z.dtype)
    counts = torch.ones_like(z, dtype=torch.bool)
    if hard.row_ids is not None and hard.ids is not None:
        counts = hard.row_ids[:, None] != hard.ids
    # Counted from each row's largest, as the sweep does: see Stats.
    offset = torch.where(counts, z.detach(), -INFINITY).amax(1)
    offset = torch.where(offset.isfinite(), offset, 0.0)
    z = z - offset[:, None]
    some = counts.any(1)
    values = torch.where(counts | ~some[:, None], z, -INFINITY).logsumexp(1)
    # NaN where a feature is not finite: its logit may be -inf, which looks like no pair.
    poison = torch.linalg.vector_norm(hard.features.detach(), ord=INFINITY, dim=(1, 2)) * 0
    nothing = torch.zeros_like(offset)
    # As the sweep has it, a row that cannot be right counts, so that the loss shows it.
    return Stats(
        values=torch.where(some, values, -INFINITY) + poison,
        positives=nothing,
        positive_sum=nothing,
        positive_count=poison.isnan().to(z.dtype),
        offset=offset,
        negative_sum=torch.where(counts, z, 0.0).sum(1),
        negative_count=counts.sum(1).to(z.dtype),
    )


def _joined(stats: Stats, more: Stats) -> Stats:
    """Stats with further negatives added; rows that these spoil count from now on."""
    shift = more.offset - stats.offset
    joined = stats._replace(
        values=log_add(stats.values, more.values + shift),
        positive_count=torch.maximum(stats.positive_count, more.positive_count),
    )
    if not stats.negative_sum.numel():
        return joined
    return joined._replace(
        negative_sum=stats.negative_sum + more.negative_sum + more.negative_count * shift,
        negative_count=stats.negative_count + more.negative_count,
    )
