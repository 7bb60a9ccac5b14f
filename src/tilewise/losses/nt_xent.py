"""NT-Xent (SimCLR): two views of each sample, against each other and among themselves."""

import torch
from torch import Tensor
from typing_extensions import Unpack

from tilewise.agreement import together
from tilewise.errors import ShapeError
from tilewise.groups import check_sizes
from tilewise.losses.common import Reduction, check_sides, make_ending, pick_scale
from tilewise.options import SweepOptions
from tilewise.pairs import check_marks
from tilewise.sweep import contrast_pairs, reduce_pairs


@together
def nt_xent(
    first: Tensor,
    second: Tensor,
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
    """Mean over i of logsumexp_{j != i} z_ij - z_ip,  z = scale * x @ x.T,  x = [first; second].

    Row i's positive p is the other view of its sample. z is symmetric, so half of it is swept.

    Args:
        first, second: features (N, D) of the two views, usually of unit length.
        scale, temperature: the factor on the cosines, or its inverse; temperature 0.5 by default.
        ids: (N,) samples of equal ids are not negatives.
        weight: (N,) weight of each sample in the sum and the mean.
        label_smoothing: share of the target spread over all pairs that count.
        decoupled: leave the positive out of the logsumexp (DCL).
        reduction: "mean", "sum" or "none".
        how: backend, device, group, workspace_mib and others, as every loss takes them: the table
            in docs/api.md, or `SweepOptions`.

    Returns:
        A scalar, or (2N,) with reduction "none"; float32 (float64 for float64 features).
    """
    first, second, like = check_sides("first", first, "second", second, how)
    if first.shape[0] != second.shape[0]:
        raise ShapeError(
            f"first and second must be two views of the same samples, got {first.shape[0]} and "
            f"{second.shape[0]} rows; drop samples that have one view only"
        )
    n = first.shape[0]
    ending = make_ending(
        n, like, how, weight=weight, reduction=reduction, label_smoothing=label_smoothing,
        decoupled=decoupled,
    )  # fmt: skip
    if ids is not None:
        check_marks("ids", ids, (n,), ids if how.get("device") else like)
    if how.get("sizes") is not None and how.get("group") is not None:
        check_sizes(how["group"], how["sizes"], n)
        how = {**how, "sizes": [2 * size for size in how["sizes"]]}  # both views are columns
    views = torch.cat([first, second])
    scale = pick_scale(scale, temperature, 2.0, like)
    others = torch.arange(2 * n, device=like.device).roll(n)
    ids = None if ids is None else ids.repeat(2)
    if ending.weight is not None:
        ending = ending._replace(weight=ending.weight.repeat(2))
    if ending.at_once:
        return contrast_pairs(
            views, None, scale, positives=others, ids=ids, skip_self=True, weight=ending.weight,
            mean=reduction == "mean", **how,
        )  # fmt: skip
    swept = reduce_pairs(
        views, None, scale, positives=others, ids=ids, skip_self=True, sums=ending.sums, **how
    )
    return ending.of(swept.rows, several=False)
