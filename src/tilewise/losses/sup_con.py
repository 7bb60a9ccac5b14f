"""SupCon: every sample against all others, those of its label being positives."""

from torch import Tensor
from typing_extensions import Unpack

from tilewise.agreement import together
from tilewise.losses.common import Reduction, make_ending, pick_scale
from tilewise.options import SweepOptions
from tilewise.pairs import beside, check_features, check_marks
from tilewise.sweep import reduce_pairs


@together
def sup_con(
    features: Tensor,
    labels: Tensor,
    scale: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    ids: Tensor | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    decoupled: bool = False,
    reduction: Reduction = "mean",
    **how: Unpack[SweepOptions],
) -> Tensor:
    """Mean over i of logsumexp_{j != i} z_ij - mean_{p in P(i)} z_ip,  z = scale * x @ x.T.

    x are the features and P(i) the other samples of label i (the loss that the
    paper calls L_out). A sample whose label is unique has no positive and is not counted.

    Args:
        features: (N, D), usually of unit length; several views of a sample are rows of one label.
        labels: (N,) integers.
        scale, temperature: the factor on the cosines, or its inverse; temperature 0.1 by default.
        ids: (N,) samples of equal ids and different labels are not negatives.
        weight: (N,) weight of each sample in the sum and the mean.
        label_smoothing: share of the target spread over all pairs that count.
        decoupled: leave the positives out of the logsumexp.
        reduction: "mean", "sum" or "none".
        how: backend, device, group, workspace_mib and others, as every loss takes them: the table
            in docs/api.md, or `SweepOptions`.

    Returns:
        A scalar, or (N,) with reduction "none"; float32 (float64 for float64 features).
    """
    check_features("features", features, empty=how.get("group") is not None)
    like = beside(features, how.get("device"))
    check_marks("labels", labels, (features.shape[0],), labels if how.get("device") else like)
    ending = make_ending(
        features.shape[0], like, how, weight=weight, reduction=reduction,
        label_smoothing=label_smoothing, decoupled=decoupled,
    )  # fmt: skip
    swept = reduce_pairs(
        features,
        None,
        pick_scale(scale, temperature, 10.0, like),
        labels=labels,
        ids=ids,
        skip_self=True,
        sums=ending.sums,
        **how,
    )
    return ending.of(swept.rows, several=True)
