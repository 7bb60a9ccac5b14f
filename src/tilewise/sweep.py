"""The door: what people call, checked and handed to the ops."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from tilewise import autograd, backends, measure
from tilewise.agreement import together, with_group
from tilewise.backends import fused
from tilewise.backends.plan import IN_WORKSPACE, Plan, Swept
from tilewise.entropy import entropy
from tilewise.errors import OptionError
from tilewise.options import SweepOptions, bytes_of, make_plan
from tilewise.pairs import (
    Both,
    Pairs,
    beside,
    check_choice,
    check_features,
    check_weight,
    make_pairs,
)
from tilewise.reductions import Stats
from tilewise.tiles import cdiv, padded


class Reduced(NamedTuple):
    """What a sweep tells of rows and columns.

    `cols` is empty unless the columns were asked for, and `rows` again where they are the rows.
    """

    rows: Stats  # vectors (N,)
    cols: Stats  # vectors (M,)


@together
def reduce_pairs(
    rows: Tensor,
    cols: Tensor | None,
    scale: float | Tensor = 1.0,
    bias: float | Tensor | None = None,
    *,
    positives: Tensor | Literal["aligned"] | None = "aligned",
    ids: Tensor | Both | None = None,
    labels: Tensor | Both | None = None,
    skip_self: bool = False,
    reduction: Literal["logsumexp", "softplus"] = "logsumexp",
    columns: bool = True,
    sums: bool = False,
    **how: Unpack[SweepOptions],
) -> Reduced:
    """Reduce z_ij = scale * rows_i . cols_j + bias over the negatives of each row and column.

    The plain program it replaces, without ever holding an (N, M) matrix:

        z = scale * rows @ cols.T + bias
        logsumexp(where(negative, z, -inf), dim)       # or the softplus sum, see below

    Args:
        rows: features (N, D).
        cols: features (M, D); None stands for the rows themselves, at half the cost.
        scale, bias: numbers, or tensors of shape () or (1,).
        positives: "aligned" for the pairs (i, i), an index tensor (N,) with NO_POSITIVE for none,
            or None where all pairs are negatives. With `cols=None` an index must be mutual.
        ids: pairs of equal ids are left out unless they are positives; (N,), or (row, column) ids.
        labels: pairs of equal labels are the positives, instead of `positives`.
        skip_self: leave out the pairs (i, i).
        reduction: "logsumexp" over negatives, or "softplus": the sum of softplus(z) over negatives
            and softplus(-z) over positives.
        columns: whether the columns are reduced too, in the same sweep.
        sums: whether sums and counts of the negatives are wanted, for label smoothing.
        how: backend, device, group, workspace_mib and others, as every loss takes them: the table
            in docs/api.md, or `SweepOptions`.

    Returns:
        Stats of the rows (N,) and of the columns (M,), differentiable once in rows, cols, scale
        and bias, in float32 (float64 for float64 features).
    """
    check_choice("reduction", reduction, ("logsumexp", "softplus"))
    pairs = make_pairs(
        rows, cols, (scale, bias), positives=positives, ids=ids, labels=labels,
        skip_self=skip_self, empty=how.get("group") is not None, device=how.get("device"),
    )  # fmt: skip
    if pairs.symmetric and reduction == "softplus":
        raise OptionError(
            "reduction='softplus' needs columns of its own, got cols=None; pass cols=rows"
        )
    if columns and pairs.kind == "index" and not pairs.symmetric and reduction == "logsumexp":
        raise OptionError(
            "columns=True needs positives that a column can find, got an index per row; pass "
            "labels, or columns=False"
        )
    own = columns and not pairs.symmetric
    plan = with_group(_with_keep(make_plan(how, reduction, own, sums), how, pairs), how, pairs)
    if reduction == "softplus":
        return _reduced(pairs, _reduce(pairs, plan), None)
    pairs, shift = pairs._replace(bias=None), pairs.bias
    return _reduced(pairs, _log_sums(pairs, plan), shift)


@together
def contrast_pairs(
    rows: Tensor,
    cols: Tensor | None,
    scale: float | Tensor,
    *,
    weight: Tensor | None,
    mean: bool,
    positives: Tensor | Literal["aligned"] = "aligned",
    ids: Tensor | Both | None = None,
    skip_self: bool = False,
    columns: bool = True,
    **how: Unpack[SweepOptions],
) -> Tensor:
    """The mean (or sum) over rows of -log softmax of their positive, of columns too; half each.

    Of the stats of `reduce_pairs`, `softplus(values - positives)` under constant weights (N,), in
    three kernels instead of fifty: small batches wait for every one.
    """
    pairs = make_pairs(
        rows, cols, (scale, None), positives=positives, ids=ids, labels=None, skip_self=skip_self,
        empty=how.get("group") is not None, device=how.get("device"),
    )  # fmt: skip
    own = columns and not pairs.symmetric
    plan = with_group(_with_keep(make_plan(how, "logsumexp", own, False), how, pairs), how, pairs)
    value: Tensor = entropy(*_log_sums(pairs, plan), weight, mean, plan.backend, plan.group)[0]
    return value


@together
def weigh_pairs(
    rows: Tensor,
    cols: Tensor,
    scale: float | Tensor,
    bias: float | Tensor | None,
    *,
    weight: Tensor,
    positives: Tensor | Literal["aligned"] | None = "aligned",
    ids: Tensor | Both | None = None,
    labels: Tensor | Both | None = None,
    **how: Unpack[SweepOptions],
) -> Tensor:
    """Sum over i of weight_i * (softplus sum of row i), gradients computed in the same sweep.

    Like `(weight * reduce_pairs(..., reduction="softplus").rows.values).sum()` at three products
    instead of four: the weights (N,) are known before the sweep, so nothing is recomputed. The
    other arguments are those of `reduce_pairs`.
    """
    empty = how.get("group") is not None
    check_features("cols", cols, empty=empty)
    pairs = make_pairs(
        rows, cols, (scale, bias), positives=positives, ids=ids, labels=labels, skip_self=False,
        empty=empty, device=how.get("device"),
    )  # fmt: skip
    weight = check_weight(weight, pairs.shape[0], beside(pairs.rows, how.get("device")))
    plan = with_group(make_plan(how, "softplus", False, False), how, pairs)
    if weight.requires_grad:
        return (weight * Stats.unpack(autograd.reduce(*pairs, plan.text())[0]).values).sum()
    needs = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in pairs[:4]]
    value: Tensor = autograd.weigh(*pairs, plan.text(), weight, *needs)[0]
    return value


def _with_keep(plan: Plan, how: SweepOptions, pairs: Pairs) -> Plan:
    """The plan, with a budget for exponentials where a backward will come."""
    wanted = pairs.rows.requires_grad or pairs.columns.requires_grad
    if not (wanted and torch.is_grad_enabled()):
        return plan
    budget = _keep_bytes(how.get("keep_mib"), pairs, plan)
    return plan._replace(keep_bytes=budget, wants_scale=pairs.scale.requires_grad)


def _log_sums(pairs: Pairs, plan: Plan) -> tuple[Tensor, Tensor]:
    """Packed stats; of frozen columns with what the backward needs, in the same sweep."""
    if plan.columns or plan.sums or pairs.kind == "label" or not _frozen(pairs):
        return _reduce(pairs, plan)[:2]
    rows = autograd.attend(*pairs, plan.text())[0]
    return rows, rows.new_empty(0)


def _reduce(pairs: Pairs, plan: Plan) -> Swept:
    return Swept(*autograd.reduce(*pairs, plan.text()))


def _keep_bytes(keep_mib: float | str | None, pairs: Pairs, plan: Plan) -> int:
    if keep_mib is None:
        # A compiled backward works on a copy of what was kept.
        return 0 if torch.compiler.is_compiling() else IN_WORKSPACE
    if keep_mib != "auto":
        return bytes_of(float(keep_mib))
    if pairs.device.type != "cuda":
        return 0
    if torch.compiler.is_compiling():
        raise OptionError(
            "keep_mib='auto' asks the device for its free memory, which a compiled graph cannot; "
            "pass a number"
        )
    n, m, d = pairs.shape
    # What forward and backward take beside it; and a tenth for the caller's own.
    own = plan.workspace_bytes + (n * pairs.rows.element_size() + 4 * m) * d
    return max(0, int(0.9 * measure.free_bytes(pairs.device)) - own)


def _frozen(pairs: Pairs) -> bool:
    """Whether the rows, on the device, want a gradient and the columns none."""
    frozen = pairs.cols is not None and not pairs.cols.requires_grad
    here = pairs.rows.device == pairs.device
    return frozen and here and pairs.rows.requires_grad and torch.is_grad_enabled()


def _reduced(pairs: Pairs, packed: tuple[Tensor, ...], bias: Tensor | None) -> Reduced:
    rows = Stats.unpack(packed[0])
    cols = rows if pairs.symmetric else Stats.unpack(torch.atleast_2d(packed[1]))  # (0,) is (1, 0)
    if bias is None:
        return Reduced(rows, cols)
    return Reduced(rows.with_bias(bias), cols.with_bias(bias))


class Kept(NamedTuple):
    """How much of a sweep a budget saves from being computed again."""

    chunks: int  # of rows, kept for the backward
    num_chunks: int
    mib: float  # that they take

    def __str__(self) -> str:
        return f"keeps {self.chunks} of {self.num_chunks} chunks in {self.mib:,.0f} MiB"


def explain_keep(
    rows: Tensor,
    cols: Tensor,
    keep_mib: float | Literal["auto"] | None = None,
    workspace_mib: float = 256,
) -> Kept:
    """What `clip_loss` and `info_nce` keep of such features for their backward.

    Chunks are of 8,192 rows. The same number of them gives the same bits. The other losses, labels
    and label smoothing keep none.

    Args:
        rows, cols: features (N, D) and (M, D).
        keep_mib: the budget, "auto" for what the device has free, or None: all of them where they
            fit into the workspace (up to about 9,000 pairs), else none.
        workspace_mib: as the loss is given it.
    """
    check_features("cols", cols)
    pairs = make_pairs(
        rows, cols, (1.0, None), positives=None, ids=None, labels=None, skip_self=False
    )
    how: SweepOptions = {"keep_mib": keep_mib, "workspace_mib": workspace_mib}
    plan = make_plan(how, "logsumexp", True, False)
    kept = 0
    if backends.choose("auto", rows.device, rows.dtype).name == "fused":
        plan = plan._replace(keep_bytes=_keep_bytes(keep_mib, pairs, plan))
        kept = fused.kept_rows(pairs, plan)
    chunks = cdiv(kept, fused.CHUNK)
    return Kept(chunks, cdiv(len(rows), fused.CHUNK), 2 * kept * padded(len(cols), 8) / 2**20)


def explain_backend(features: Tensor, backend: str = "auto") -> backends.Choice:
    """Which backend a loss on such features (N, D) takes, and why the others were passed over.

    >>> print(explain_backend(torch.zeros(8, 4)))
    fused: passed over, it needs a CUDA or ROCm device, got cpu
    chunked: chosen
    """
    check_features("features", features)
    return backends.choose(backend, features.device, features.dtype)
