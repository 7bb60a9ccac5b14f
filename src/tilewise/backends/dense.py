"""The meaning of the sweep, with the whole N x M matrix: what the other backends must equal."""

import torch
from torch import Tensor

from tilewise.backends.blocks import inner_rows, rounded
from tilewise.backends.plan import Attended, Grads, Needs, Plan, Scaled, Swept
from tilewise.pairs import Pairs, exact_dtype
from tilewise.positives import masks, poison
from tilewise.reductions import INFINITY, Stats, merge_stats, softplus

merge = merge_stats


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot run here: it always can."""
    return None


def reduce(pairs: Pairs, plan: Plan) -> Swept:
    """The stats of rows and columns."""
    wanted = (1, 0) if plan.columns else (1,)
    packed = [_stats(pairs, plan, dim) for dim in wanted]
    empty = packed[0].new_empty
    return Swept(packed[0], packed[1] if len(packed) == 2 else empty(0), empty(0), empty(0))


def differentiate(
    pairs: Pairs,
    plan: Plan,
    swept: Swept,
    upstream: tuple[Tensor, Tensor],
    needs: Needs,
    into: Tensor | None = None,
) -> Grads:
    """Gradients of what `reduce` returned, given the gradient of each of its numbers."""
    z = _logits(pairs)
    dz = torch.zeros_like(z)
    for packed, d_packed, dim in zip(swept[:2], upstream, (1, 0), strict=True):
        if d_packed.numel():
            d = Stats.unpack(d_packed)
            if plan.reduction == "softplus":
                dz += _softplus_dz(pairs, z, d.values.unsqueeze(dim))
            else:
                dz += _log_sum_dz(pairs, z, Stats.unpack(packed), d, dim)
    return _added(_gradients(pairs, dz, needs), into)


def attend(pairs: Pairs, plan: Plan) -> Attended:
    """Row stats; the mean column (N, D) under each row's softmax; its product with the row."""
    packed = _stats(pairs, plan, 1)
    known = Stats.unpack(packed)
    share = torch.exp(_logits(pairs) - known.offset[:, None] - known.values[:, None])
    share = share.masked_fill(~masks(pairs)[1], 0.0)
    mean = share @ pairs.columns.to(pairs.dtype)
    return Attended(packed, mean, inner_rows(pairs, mean))


def weigh(
    pairs: Pairs, plan: Plan, weight: Tensor, needs: Needs, into: Tensor | None = None
) -> tuple[Tensor, Scaled]:
    """Sum over i of weight_i times the softplus sum of row i, and its gradients."""
    value = (weight * _stats(pairs, plan, 1)[0]).sum()
    grads = _gradients(pairs, _softplus_dz(pairs, _logits(pairs), weight[:, None]), needs)
    gains = weight.new_ones(pairs.shape[0]), weight.new_ones(pairs.shape[1])
    if plan.wide:
        return value, Scaled(_added(grads, into), *gains)
    rows, cols = (
        None if d is None else rounded(d, pairs.rows.dtype, gain)
        for d, gain in zip(grads[:2], gains, strict=True)
    )
    return value, Scaled(Grads(rows, cols, grads.scale, grads.bias), *gains)


def _added(grads: Grads, into: Tensor | None) -> Grads:
    """Gradients, those of the rows added to what there is."""
    if into is None or grads.rows is None:
        return grads
    return grads._replace(rows=into.add_(grads.rows))


def _logits(pairs: Pairs) -> Tensor:
    rows, cols = pairs.rows.to(pairs.dtype), pairs.columns.to(pairs.dtype)
    z = pairs.scale.to(pairs.dtype) * (rows @ cols.t())
    return z if pairs.bias is None else z + pairs.bias.to(pairs.dtype)


def _stats(pairs: Pairs, plan: Plan, dim: int) -> Tensor:
    z = _logits(pairs)
    positive, negative = masks(pairs)
    bad = poison(pairs)[1 - dim]
    if plan.reduction == "softplus":
        value = softplus(torch.where(positive, -z, z)).masked_fill(~(positive | negative), 0.0)
        return (value.sum(dim) + bad)[None]
    lse = torch.where(negative, z, -INFINITY).logsumexp(dim)
    offset = torch.where(lse.isfinite(), lse, 0.0)
    z = z - offset.unsqueeze(dim)
    count = positive.sum(dim).to(z.dtype)
    positives = torch.where(positive, z, -INFINITY).logsumexp(dim).masked_fill(count == 0, 0.0)
    # A row that cannot be right counts, so that the loss shows it.
    positives, count = positives + bad, count.masked_fill(bad.isnan(), 1.0)
    sums = (z * negative).sum(dim), negative.sum(dim).to(z.dtype)
    return Stats(
        torch.where(negative, z, -INFINITY).logsumexp(dim) + bad,
        positives,
        (z * positive).sum(dim),
        count,
        offset,
        *(sums if plan.sums else (z.new_empty(0), z.new_empty(0))),
    ).pack()


def _log_sum_dz(pairs: Pairs, z: Tensor, known: Stats, d: Stats, dim: int) -> Tensor:
    positive, negative = masks(pairs)
    z = z - known.offset.unsqueeze(dim)
    values, positives, d_values, d_positives, d_sum = (
        vector.unsqueeze(dim)
        for vector in (known.values, known.positives, d.values, d.positives, d.positive_sum)
    )
    dz = d_values * torch.exp(z - values).masked_fill(~negative, 0.0)
    if d.negative_sum.numel():
        dz += d.negative_sum.unsqueeze(dim) * negative
    return torch.where(positive, d_positives * torch.exp(z - positives) + d_sum, dz)


def _softplus_dz(pairs: Pairs, z: Tensor, d: Tensor) -> Tensor:
    positive, negative = masks(pairs)
    return d * torch.where(positive, -torch.sigmoid(-z), torch.sigmoid(z) * negative)


def _gradients(pairs: Pairs, dz: Tensor, needs: Needs) -> Grads:
    """In the dtype of the sums, still to be rounded."""
    rows, cols, scale = (x.to(pairs.dtype) for x in (pairs.rows, pairs.columns, pairs.scale))
    d_rows, d_cols = dz @ cols, dz.t() @ rows
    d_scale = _total(pairs, dz * (rows @ cols.t())) if needs.scale else dz.new_zeros(())
    if pairs.symmetric:
        d_rows = d_rows + d_cols
    return Grads(
        scale * d_rows if needs.rows else None,
        scale * d_cols if needs.cols else None,
        d_scale,
        _total(pairs, dz),
    )


def _total(pairs: Pairs, x: Tensor) -> Tensor:
    return x.sum(dtype=exact_dtype(pairs.rows)).to(pairs.dtype)
