"""CLIP: images and texts against each other, both directions from one sweep."""

from torch import Tensor
from typing_extensions import Unpack

from tilewise.agreement import together
from tilewise.errors import ShapeError
from tilewise.losses.common import (
    Reduction,
    aggregate,
    bias_or_none,
    check_reduction,
    check_sides,
    closes_at_once,
    cross_entropy,
    pick_scale,
    weight_or_none,
    with_no_pull,
)
from tilewise.options import SweepOptions
from tilewise.pairs import Both, check_fraction
from tilewise.sweep import contrast_pairs, reduce_pairs


@together
def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    bias: float | Tensor | None = None,
    ids: Tensor | Both | None = None,
    labels: Tensor | Both | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    decoupled: bool = False,
    reduction: Reduction = "mean",
    **how: Unpack[SweepOptions],
) -> Tensor:
    """Mean over i of (logsumexp_j z_ij + logsumexp_j z_ji) / 2 - z_ii,  z = scale * image @ text.T.

    Args:
        image, text: features (N, D) each, usually of unit length; image i belongs to text i.
        scale, temperature: the factor on the cosines (already exponentiated), or its inverse;
            1 / 0.07 by default.
        bias: added to every logit; it cancels in a softmax: loss unchanged, its gradient 0.
        ids: pairs of equal ids are not negatives (duplicates); (N,), or (image ids, text ids).
        labels: pairs of equal labels are positives; each direction takes the mean over them. As
            `ids`.
        weight: (N,) weight of each pair in the sum and the mean.
        label_smoothing: share of the target spread over all pairs that count.
        decoupled: leave the positives out of the logsumexp.
        reduction: "mean", "sum" or "none".
        how: backend, device, group, workspace_mib and others, as every loss takes them: the table
            in docs/api.md, or `SweepOptions`.

    Returns:
        A scalar, or (N,) with reduction "none"; float32 (float64 for float64 features).
    """
    image, text, like = check_sides("image", image, "text", text, how)
    if image.shape[0] != text.shape[0]:
        raise ShapeError(
            f"image and text must come in pairs, got {image.shape[0]} and {text.shape[0]} rows; "
            "for more texts than images use info_nce, for several captions labels="
        )
    check_reduction(reduction)
    smoothing = check_fraction("label_smoothing", label_smoothing)
    weight = weight_or_none(weight, image.shape[0], like, how.get("group"))
    scale = pick_scale(scale, temperature, 1 / 0.07, like)
    bias = bias_or_none(bias, like)
    plain = labels is None and not (decoupled or smoothing)
    if plain and closes_at_once(weight, reduction):
        mean = reduction == "mean"
        loss = contrast_pairs(image, text, scale, ids=ids, weight=weight, mean=mean, **how)
        return with_no_pull(loss, bias)
    swept = reduce_pairs(
        image, text, scale, bias, ids=ids, labels=labels, sums=smoothing > 0, **how
    )
    directions = [
        aggregate(
            cross_entropy(
                side, several=labels is not None, decoupled=decoupled, label_smoothing=smoothing
            ),
            side.positive_count > 0,
            weight,
            reduction,
            how.get("group"),
        )
        for side in swept
    ]
    return (directions[0] + directions[1]) / 2
