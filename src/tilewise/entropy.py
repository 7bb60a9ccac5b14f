"""From packed stats to a loss: the op that most losses end with.

The plain program it replaces, for each side, rows and columns:

    loss = where(count > 0, softplus(values - positives), 0) * weight
    loss.sum() / (weight * (count > 0)).sum()        # or the sum alone

and then the mean of the sides.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.autograd import no_second_derivative, plain, save_nothing
from tilewise.backends import fused
from tilewise.pairs import exact_dtype

STATS = "Tensor rows, Tensor cols, Tensor? weight"


@torch.library.custom_op(
    "tilewise::entropy",
    mutates_args=(),
    schema=f"({STATS}, bool mean, bool kernels) -> (Tensor, Tensor)",
)
@plain
def entropy(*args: Any) -> tuple[Tensor, Tensor]:
    """Of packed stats (5, N) and (5, M), or (0,): the loss (), and what a slot's is divided by.

    Differentiable in the stats; the weight (N,) is a constant, and of both sides. With `kernels`
    of the fused backend.
    """
    rows, cols, weight, mean, kernels = args
    if kernels:
        return fused.entropy(rows.contiguous(), cols.contiguous(), _whole(weight), mean)
    losses, divisors = [], []
    sides = [side for side in (rows, cols) if side.dim() == 2]
    for side in sides:
        odds, share = _slots(side, weight)
        # Past the threshold softplus is its argument, in float64 too.
        losses.append((functional.softplus(odds, threshold=40.0) * share).sum())
        total = share.sum() if mean else losses[-1].new_ones(())
        none = total == 0 if weight is not None else total < 1
        divisors.append(len(sides) * torch.where(none, 1.0, total))
    divided = torch.stack(divisors)
    return (torch.stack(losses) / divided).sum().to(rows.dtype), divided


def _whole(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def _slots(stats: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logarithm of the odds against each slot's positive, and the slot's share in the sum."""
    exact = stats.to(exact_dtype(stats))
    has = exact[3] > 0
    share = has.to(exact.dtype) if weight is None else torch.where(has, weight.to(exact.dtype), 0.0)
    return torch.where(has, exact[0] - exact[1], 0.0), share


@entropy.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    rows, cols, *_ = args
    return rows.new_empty(()), rows.new_empty(1 + (cols.dim() == 2), dtype=exact_dtype(rows))


@torch.library.custom_op(
    "tilewise::pull_stats",
    mutates_args=(),
    schema=f"({STATS}, Tensor divisors, Tensor upstream, bool kernels) -> (Tensor, Tensor)",
)
@plain
def _pull_stats(*args: Any) -> tuple[Tensor, Tensor]:
    rows, cols, weight, divisors, upstream, kernels = args
    if kernels:
        rows, cols = rows.contiguous(), cols.contiguous()
        return fused.pull_stats(rows, cols, _whole(weight), divisors, upstream)
    found = [torch.zeros_like(side) for side in (rows, cols)]
    for out, side, divisor in zip(found, (rows, cols), divisors, strict=False):
        odds, share = _slots(side, weight)
        d = torch.sigmoid(odds) * share * (upstream / divisor)
        out[0], out[1] = d, -d
    return found[0], found[1]


@_pull_stats.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args[0]), torch.empty_like(args[1])


_pull_stats.register_autograd(no_second_derivative, setup_context=save_nothing)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, cols, weight, _, ctx.kernels = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, cols, weight, output[1])


def _backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * 5
    rows, cols, *rest = ctx.saved_tensors
    d_rows, d_cols = _pull_stats(rows, cols, *rest, upstream, ctx.kernels)
    return d_rows, d_cols if cols.dim() == 2 else None, None, None, None


entropy.register_autograd(_backward, setup_context=_save)
