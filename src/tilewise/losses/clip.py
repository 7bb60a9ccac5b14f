"""CLIP: images and texts against each other, both directions from one sweep."""

from torch import Tensor
from typing_extensions import Unpack

from tilewise.agreement import together
from tilewise.errors import ShapeError
from tilewise.losses.common import (
    Reduction,
    bias_or_none,
    check_sides,
    make_ending,
    pick_scale,
    with_no_pull,
)
from tilewise.options import SweepOptions
from tilewise.pairs import Both
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
    ending = make_ending(
        image.shape[0], like, how, weight=weight, reduction=reduction,
        label_smoothing=label_smoothing, decoupled=decoupled,
    )  # fmt: skip
    scale = pick_scale(scale, temperature, 1 / 0.07, like)
    bias = bias_or_none(bias, like)
    if labels is None and ending.at_once:
        loss = contrast_pairs(
            image, text, scale, ids=ids, weight=ending.weight, mean=reduction == "mean", **how
        )
        return with_no_pull(loss, bias)
    swept = reduce_pairs(image, text, scale, bias, ids=ids, labels=labels, sums=ending.sums, **how)
    rows, cols = (ending.of(side, several=labels is not None) for side in swept)
    return (rows + cols) / 2
