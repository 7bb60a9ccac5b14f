"""Arithmetic that the losses share, on what a sweep returns: O(N) and differentiable."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilewise import groups
from tilewise.errors import OptionError
from tilewise.options import SweepOptions
from tilewise.pairs import (
    accumulate_dtype,
    as_scalar,
    autocast,
    beside,
    check_choice,
    check_features,
    check_fraction,
    check_match,
    check_number,
    check_weight,
    exact_dtype,
    is_readable,
)
from tilewise.reductions import INFINITY, Stats

Reduction = Literal["mean", "sum", "none"]
Scalar = float | Tensor
REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    stats: Stats, *, several: bool, decoupled: bool = False, label_smoothing: float = 0.0
) -> Tensor:
    """Each row's mean over its positives p of -log(exp z_p / sum of exp z over all that counts).

    With one positive that is softplus(logsumexp over negatives - z_p): no two near-equal numbers
    are subtracted, so confident pairs keep their digits. 0 for a row without a positive. (N,)
    """
    # Only where it is needed: on a GPU small batches wait for every operation.
    mean_positive = stats.positive_sum
    if several or decoupled or label_smoothing:
        mean_positive = stats.positive_sum / stats.positive_count.clamp(min=1)
    if decoupled:
        loss = torch.where(stats.values == -INFINITY, 0.0, stats.values - mean_positive)
    else:
        # Past the threshold softplus is its argument, in float64 too.
        loss = functional.softplus(stats.values - stats.positives, threshold=40.0)
        if several:
            loss = loss + (stats.positives - mean_positive)
    if label_smoothing:
        counted = stats.positive_count + stats.negative_count
        mean_logit = (stats.positive_sum + stats.negative_sum) / counted.clamp(min=1)
        loss = loss + label_smoothing * (mean_positive - mean_logit)
    return torch.where(stats.positive_count > 0, loss, 0.0)


class Ending(NamedTuple):
    """How a log-sum-exp loss ends, checked: from the stats of a side to what is returned."""

    weight: Tensor | None  # (N,)
    reduction: Reduction
    label_smoothing: float
    decoupled: bool
    group: groups.Group | None

    @property
    def sums(self) -> bool:
        """Whether sums of the negatives are wanted, for label smoothing."""
        return self.label_smoothing > 0

    @property
    def at_once(self) -> bool:
        """Whether `contrast_pairs` will do of one positive a row: a number, weights fixed."""
        plain = not (self.decoupled or self.label_smoothing) and self.reduction != "none"
        return plain and (self.weight is None or not self.weight.requires_grad)

    def of(self, stats: Stats, *, several: bool) -> Tensor:
        """The loss of one side; `several`, with any number of positives a row."""
        loss = cross_entropy(
            stats, several=several, decoupled=self.decoupled, label_smoothing=self.label_smoothing
        )
        counts = stats.positive_count > 0
        return aggregate(loss, counts, self.weight, self.reduction, self.group)


def make_ending(
    size: int, like: Tensor, how: SweepOptions, *,
    weight: Tensor | None, reduction: Reduction, label_smoothing: float, decoupled: bool,
) -> Ending:  # fmt: skip
    """Check what a loss was told of its end."""
    check_choice("reduction", reduction, REDUCTIONS)
    smoothing, group = check_fraction("label_smoothing", label_smoothing), how.get("group")
    weight = weight_or_none(weight, size, like, group)
    return Ending(weight, reduction, smoothing, decoupled, group)


def bias_or_none(bias: Scalar | None, like: Tensor) -> Tensor | None:
    """A checked bias, if there is one."""
    return None if bias is None else as_scalar("bias", bias, like)


def with_no_pull(loss: Tensor, bias: Tensor | None) -> Tensor:
    """A loss that a bias, added to all logits alike, does not change: its gradient is 0."""
    return loss if bias is None else loss + 0 * bias.to(loss.dtype)


def aggregate(
    loss: Tensor,
    counts: Tensor,
    weight: Tensor | None,
    reduction: Reduction,
    group: groups.Group | None = None,
) -> Tensor:
    """Weighted mean over the rows that count (N, bool), their sum, or the rows (N,) themselves.

    With a group of W ranks mean and sum are W times this rank's share of the whole: what DDP, which
    averages over ranks, makes the whole of.
    """
    if weight is not None:
        loss = loss * weight
    if reduction == "none":
        return loss
    summed = loss.sum(dtype=exact_dtype(loss))
    if group is not None:
        summed = summed * groups.world_size(group)
    if reduction == "mean":
        if weight is None:
            return (summed / groups.add_up(counts.sum(), group).clamp(min=1)).to(loss.dtype)
        total = groups.add_up((counts * weight).sum(dtype=summed.dtype), group)
        summed = summed / torch.where(total == 0, 1.0, total)
    return summed.to(loss.dtype)


def check_sides(
    name: str, a: Tensor, other_name: str, b: Tensor, how: SweepOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Two feature tensors that may be multiplied, cast as under autocast, or an error by name.

    And what numbers and vectors must be like. They may be empty where other ranks have more.
    """
    empty, device = how.get("group") is not None, how.get("device")
    check_features(name, a, empty=empty)
    check_features(other_name, b, empty=empty)
    like = beside(a, device)
    a, b = autocast(a, device), autocast(b, device)
    check_match(name, a, other_name, b, device)
    return a, b, like.to(a.dtype)


def check_reduction(reduction: str) -> None:
    """Raise unless `reduction` is mean, sum or none."""
    check_choice("reduction", reduction, REDUCTIONS)


def weight_or_none(
    weight: Tensor | None, size: int, like: Tensor, group: groups.Group | None = None
) -> Tensor | None:
    """A checked weight (size,), if there is one; with a group it must be a fixed one."""
    if group is not None and isinstance(weight, Tensor) and weight.requires_grad:
        raise OptionError(
            "weight must not require a gradient where there is a group, whose other ranks' losses "
            "would be in it; pass weight.detach()"
        )
    return None if weight is None else check_weight(weight, size, like)


def check_given(name: str, positives: object) -> None:
    """Raise on None, which would mean that no row counts."""
    if positives is None:
        raise OptionError(
            f"{name} must be 'aligned' or an index tensor, got None; a loss without positives is 0"
        )


def pick_scale(
    scale: float | Tensor | None, temperature: float | Tensor | None, default: float, like: Tensor
) -> float | Tensor:
    """The factor on the cosines: `scale`, or 1 / `temperature`, or the default; not both."""
    if scale is not None and temperature is not None:
        raise OptionError("scale and temperature both set the same factor; pass one of them")
    if temperature is None:
        return default if scale is None else scale
    if not isinstance(temperature, Tensor):
        number = check_number("temperature", temperature, "a number or a tensor")
        if not number > 0:
            raise OptionError(f"temperature must be above 0, got {number}")
        return 1.0 / number
    inverse = as_scalar("temperature", temperature, like).to(accumulate_dtype(like))
    if is_readable(inverse) and not bool(inverse > 0):
        raise OptionError(f"temperature must be above 0, got {float(inverse)}")
    return inverse.reciprocal()
