"""SigLIP: every pair its own yes-or-no question."""

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from tilewise import groups
from tilewise.agreement import together
from tilewise.losses.common import (
    Reduction,
    check_given,
    check_reduction,
    check_sides,
    pick_scale,
    weight_or_none,
)
from tilewise.options import SweepOptions
from tilewise.pairs import Both, accumulate_dtype
from tilewise.sweep import reduce_pairs, weigh_pairs


@together
def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: float | Tensor | None = None,
    bias: float | Tensor | None = -10.0,
    *,
    temperature: float | Tensor | None = None,
    positives: Tensor | Literal["aligned"] = "aligned",
    ids: Tensor | Both | None = None,
    labels: Tensor | Both | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    **how: Unpack[SweepOptions],
) -> Tensor:
    """Mean over i of sum_j softplus(-y_ij z_ij),  z = scale * image @ text.T + bias,  y = +1 or -1.

    y_ij is +1 at positives and -1 elsewhere. Every row counts, with or without a positive.

    Args:
        image, text: features (N, D) and (M, D), usually of unit length; image i belongs to text i.
        scale, temperature: the factor on the cosines, or its inverse; 10 by default.
        bias: added to every logit, learnable as a tensor; -10 by default, None for no bias.
        positives: (N,) index of each image's text where they are not aligned; NO_POSITIVE for none.
        ids: pairs of equal ids are left out unless positive; (N,), or (image ids, text ids).
        labels: pairs of equal labels are positives. As `ids`.
        weight: (N,) weight of each image in the sum and the mean.
        reduction: "mean" (sum over pairs / N, as open_clip has it), "sum" or "none".
        how: backend, device, group, workspace_mib and others, as every loss takes them: the table
            in docs/api.md, or `SweepOptions`.

    Returns:
        A scalar, or (N,) with reduction "none"; float32 (float64 for float64 features).
    """
    image, text, like = check_sides("image", image, "text", text, how)
    check_given("positives", positives)
    check_reduction(reduction)
    weight = weight_or_none(weight, image.shape[0], like, how.get("group"))
    scale = pick_scale(scale, temperature, 10.0, like)
    if reduction == "none":
        swept = reduce_pairs(
            image, text, scale, bias, positives=positives, ids=ids, labels=labels,
            reduction="softplus", columns=False, **how,
        )  # fmt: skip
        values = swept.rows.values
        return values if weight is None else values * weight
    if weight is None:
        weight = torch.ones(image.shape[0], dtype=accumulate_dtype(like), device=like.device)
    summed = weigh_pairs(
        image, text, scale, bias, weight=weight, positives=positives, ids=ids, labels=labels, **how
    )
    group = how.get("group")
    if group is not None:
        summed = summed * groups.world_size(group)
    if reduction == "sum":
        return summed
    # Divided here and not in the weights, whose own rounding would be in every number.
    total = groups.add_up(weight.sum(), group)
    return summed / torch.where(total == 0, 1.0, total)
