"""The meaning of every loss in plain float64 PyTorch, and the yardstick for lower precision.

Imports nothing from tilewise. A loss is a function of the whole logit matrix z (N, M); its
gradient comes from autograd through z, so nothing here shares a formula with the library's
backward. As the truth a loss is written so that float64 keeps its digits for confident
pairs; as the baseline for lower precision it is the textbook formula.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

INF = float("inf")


def pair_masks(n, m, *, positives="aligned", ids=None, labels=None, skip_self=False):
    """(positive, negative) boolean matrices."""
    plain = lambda x: None if x is None else tuple(tuple(side.tolist()) for side in x)  # noqa: E731
    index = tuple(positives.tolist()) if isinstance(positives, Tensor) else positives
    return _pair_masks(n, m, index, plain(ids), plain(labels), skip_self)


@functools.cache
def _pair_masks(n, m, positives, ids, labels, skip_self):
    """Written as loops over pairs, to be read aloud."""
    positive = torch.zeros(n, m, dtype=torch.bool)
    negative = torch.zeros(n, m, dtype=torch.bool)
    for i in range(n):
        for j in range(m):
            if skip_self and i == j:
                continue
            if labels is not None:
                is_positive = labels[0][i] == labels[1][j]
            elif positives is None:
                is_positive = False
            elif isinstance(positives, str):
                is_positive = i == j
            else:
                is_positive = positives[i] == j
            same_id = ids is not None and ids[0][i] == ids[1][j]
            positive[i, j] = is_positive
            negative[i, j] = not is_positive and not same_id
    return positive, negative


def softmax_rows(z, positive, negative, *, decoupled=False, smoothing=0.0, extra=None):
    """(loss of each row, whether it counts); `extra` (N, H) are further negatives of each row."""
    if extra is not None:
        no_extra = torch.zeros_like(extra, dtype=torch.bool)
        z, positive = torch.cat([z, extra], 1), torch.cat([positive, no_extra], 1)
        negative = torch.cat([negative, extra > -INF], 1)
    counts, some_negative = positive.any(1), negative.any(1)
    counted = positive | negative
    mean_positive = masked_mean(z, positive)
    if decoupled:
        hard = torch.where(some_negative, masked_lse(z, negative) - mean_positive, 0.0)
    elif z.dtype == torch.float64:
        # With no digit lost where the positives are far above the negatives.
        one = positive.sum(1) == 1
        top = torch.where(one, mean_positive, masked_lse(z, positive))
        gap = torch.where(some_negative, masked_lse(z, negative) - top, -INF)
        spread = torch.where(one, 0.0, masked_lse(z, positive) - mean_positive)
        hard = spread + torch.logaddexp(gap, torch.zeros_like(gap))
    else:
        hard = masked_lse(z, counted) - mean_positive
    rows = hard + smoothing * (mean_positive - masked_mean(z, counted))
    return torch.where(counts, rows, 0.0), counts


def masked_lse(z, mask):
    """logsumexp over the masked entries of each row; 0 (and no gradient) where there are none."""
    some = mask.any(1, keepdim=True)
    return torch.where(mask, z, torch.where(some, -INF, 0.0)).logsumexp(1) * some[:, 0]


def masked_mean(z, mask):
    return torch.where(mask, z, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def mean(rows, counts, weight=None):
    weight = torch.ones_like(rows) if weight is None else weight.to(rows.dtype)
    total = (weight * counts).sum()
    return (weight * rows).sum() / total if total != 0 else rows.sum() * 0


def info_nce(z, weight=None, decoupled=False, smoothing=0.0, extra=None, **which):
    masks = pair_masks(*z.shape, **which)
    rows, counts = softmax_rows(z, *masks, decoupled=decoupled, smoothing=smoothing, extra=extra)
    return mean(rows, counts, weight)


def clip(z, weight=None, decoupled=False, smoothing=0.0, **which):
    positive, negative = pair_masks(*z.shape, **which)
    options = {"decoupled": decoupled, "smoothing": smoothing}
    rows, row_counts = softmax_rows(z, positive, negative, **options)
    cols, col_counts = softmax_rows(z.T, positive.T, negative.T, **options)
    return (mean(rows, row_counts, weight) + mean(cols, col_counts, weight)) / 2


def siglip(z, weight=None, **which):
    positive, negative = pair_masks(*z.shape, **which)
    value = torch.logaddexp(torch.where(positive, -z, z), torch.zeros_like(z))
    rows = torch.where(positive | negative, value, 0.0).sum(1)
    return mean(rows, torch.ones(len(z), dtype=torch.bool), weight)


def nt_xent(z, **options):
    n = len(z) // 2
    return info_nce(z, positives=torch.arange(2 * n).roll(n), skip_self=True, **options)


def sup_con(z, labels, **options):
    return info_nce(z, labels=(labels, labels), skip_self=True, **options)


@dataclass
class Outcome:
    """A loss and its gradients, with the size each gradient's terms have before they cancel."""

    loss: Tensor
    d_rows: Tensor
    d_cols: Tensor
    d_scale: Tensor
    d_bias: Tensor
    sizes: dict[str, float] | None = None


def product(a: Tensor, b: Tensor, block: int | None) -> Tensor:
    """a @ b.T, in blocks of so many rows and columns."""
    pieces = [[x @ y.T for y in b.split(block or len(b))] for x in a.split(block or len(a))]
    return torch.cat([torch.cat(row, 1) for row in pieces])


def evaluate(
    loss_of_z: Callable[[Tensor], Tensor],
    rows: Tensor,
    cols: Tensor,
    scale: float,
    bias: float,
    *,
    upstream: float,
    compute: torch.dtype,
    block: int | None = None,
    scale_first: bool = False,
    products: Tensor | None = None,
) -> Outcome:
    """Plain PyTorch: z in `compute`, ds = scale * dz rounded to the features' dtype, two products.

    With float64 features and compute this is the truth; with the features' dtype and float32 it is
    the baseline that tilewise is measured against. With `block` z comes in blocks of so many rows
    and columns: equal features then give equal logits no longer, since a product's rounding depends
    on its size. With `scale_first` the rows are scaled before the product, as open_clip does it.
    `products` are those of rows and columns where a device has computed them.
    """
    a, b = rows.to(compute), cols.to(compute)
    s = product(a, b, block) if products is None else products
    z = (product(scale * a, b, block) if scale_first else scale * s) + bias
    z = z.detach().requires_grad_()
    loss = loss_of_z(z)
    (dz,) = torch.autograd.grad(loss * upstream, z)
    ds = (scale * dz).to(rows.dtype).to(compute)
    sizes = {
        "d_rows": (abs(scale) * dz.abs() @ b.abs()).norm().item(),
        "d_cols": (abs(scale) * dz.abs().T @ a.abs()).norm().item(),
        "d_scale": (dz * s).abs().sum().item(),
        "d_bias": dz.abs().sum().item(),
    }
    return Outcome(
        loss.detach(),
        (ds @ b).to(rows.dtype),
        (ds.T @ a).to(rows.dtype),
        (dz * s).sum(),
        dz.sum(),
        sizes,
    )
