"""From packed stats to a loss: the op that most losses end with.

The plain program it replaces, for each side, rows and columns:

    loss = where(count > 0, softplus(values - positives), 0) * weight
    loss.sum() / (weight * (count > 0)).sum()        # or the sum alone

and then the mean of the sides. With a group of W ranks the divisor is that of all ranks, over W:
what DDP, which averages over ranks, makes the whole of.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilewise import groups
from tilewise.autograd import no_second_derivative, plain, save_nothing
from tilewise.backends import fused
from tilewise.pairs import exact_dtype
from tilewise.reductions import Stats

STATS = "Tensor rows, Tensor cols, Tensor? weight"
WHOLE = torch.contiguous_format


@torch.library.custom_op(
    "tilewise::entropy",
    mutates_args=(),
    schema=f"({STATS}, bool mean, str backend, str group) -> (Tensor, Tensor)",
)
@plain
def entropy(*args: Any) -> tuple[Tensor, Tensor]:
    """Of packed stats (5, N) and (5, M), or (0,): the loss (), and what a slot's is divided by.

    Differentiable in the stats; the weight (N,) is a constant, and of both sides.
    """
    rows, cols, weight, mean, backend, name = args
    group = groups.find(name) if name else None
    world, add_up = groups.world_size(group), functools.partial(groups.add_up, group=group)
    if _has_kernels(rows, backend):
        rows, cols = rows.contiguous(), cols.contiguous()
        return fused.entropy(
            rows, cols, _whole(weight), mean, world, add_up if group is not None else None
        )
    sides = [_slots(side, weight) for side in (rows, cols) if side.dim() == 2]
    # Past the threshold softplus is its argument, in float64 too.
    losses = [(functional.softplus(odds, threshold=40.0) * share).sum() for odds, share in sides]
    divisors = torch.full_like(torch.stack(losses), len(sides) / world)
    if mean:
        totals = add_up(torch.stack([share.sum() for _, share in sides]))
        divisors *= torch.where(totals == 0, 1.0, totals)
    return (torch.stack(losses) / divisors).sum().to(rows.dtype), divisors


def _has_kernels(stats: Tensor, backend: str) -> bool:
    """Decided in the op: torch.compile cannot look at what is installed."""
    return backend in ("auto", "fused") and fused.refusal(stats.device, stats.dtype) is None


def _whole(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def _slots(stats: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logarithm of the odds against each slot's positive, and the slot's share in the sum."""
    exact = exact_dtype(stats)
    known = Stats.unpack(stats.to(exact))
    has = known.positive_count > 0
    share = has.to(exact) if weight is None else torch.where(has, weight.to(exact), 0.0)
    return torch.where(has, known.values - known.positives, 0.0), share


@entropy.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    rows, cols, *_ = args
    return rows.new_empty(()), rows.new_empty(1 + (cols.dim() == 2), dtype=exact_dtype(rows))


@torch.library.custom_op(
    "tilewise::pull_stats",
    mutates_args=(),
    schema=f"({STATS}, Tensor divisors, Tensor upstream, str backend) -> (Tensor, Tensor)",
)
@plain
def _pull_stats(*args: Any) -> tuple[Tensor, Tensor]:
    rows, cols, weight, divisors, upstream, backend = args
    if _has_kernels(rows, backend):
        rows, cols = rows.contiguous(), cols.contiguous()
        return fused.pull_stats(rows, cols, _whole(weight), divisors, upstream)
    found = [torch.zeros_like(side, memory_format=WHOLE) for side in (rows, cols)]
    for out, side, divisor in zip(found, (rows, cols), divisors, strict=False):
        odds, share = _slots(side, weight)
        d = torch.sigmoid(odds) * share * (upstream / divisor)
        d_stats = Stats.unpack(out)
        d_stats.values[:], d_stats.positives[:] = d, -d
    return found[0], found[1]


@_pull_stats.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    rows, cols = (torch.empty_like(side, memory_format=WHOLE) for side in args[:2])
    return rows, cols


_pull_stats.register_autograd(no_second_derivative, setup_context=save_nothing)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, cols, weight, _, ctx.backend, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, cols, weight, output[1])


def _backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * 6
    rows, cols, *rest = ctx.saved_tensors
    d_rows, d_cols = _pull_stats(rows, cols, *rest, upstream, ctx.backend)
    return d_rows, d_cols if cols.dim() == 2 else None, *(None,) * 4


entropy.register_autograd(_backward, setup_context=_save)
