"""The door: what people call, checked and handed to the ops."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypedDict, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from tilewise import autograd, backends, ring
from tilewise.backends import fused
from tilewise.backends.plan import PRECISIONS, Plan, Swept
from tilewise.errors import DtypeError, OptionError, RingError, TilewiseError
from tilewise.pairs import (
    Both,
    Pairs,
    check_choice,
    check_features,
    check_number,
    check_values,
    check_weight,
    make_pairs,
)
from tilewise.reductions import Stats
from tilewise.tiles import padded


class SweepOptions(TypedDict, total=False):
    """How to sweep: keywords that every loss takes."""

    backend: str  # "auto" (default), "fused", "chunked" or "dense"
    workspace_mib: float  # most memory for tiles at work, 256 by default
    # Most memory for exponentials kept for the backward, 0 by default, or "auto". With retain_graph
    # or under torch.compile the backward works on a copy of them: as much again.
    keep_mib: float | Literal["auto"]
    check_values: bool  # read scale and indices back from a device to check them
    precision: str  # "exact" (default), or "fp8": scores of half-precision features rounded to e4m3
    # The ranks whose columns all count: a ProcessGroup, or a DeviceMesh of one dimension. Without,
    # a loss is this process's own, however many there are.
    group: ring.Group | None
    # How many columns (keys, texts, samples) each rank has, by its rank in the group: a promise
    # that saves asking.
    sizes: Sequence[int]


class Reduced(NamedTuple):
    """What a sweep tells of rows and columns.

    `cols` is empty unless the columns were asked for, and `rows` again where they are the rows.
    """

    rows: Stats  # vectors (N,)
    cols: Stats  # vectors (M,)


Args = ParamSpec("Args")
Result = TypeVar("Result")


def together(loss: Callable[Args, Result]) -> Callable[Args, Result]:
    """What is refused on one rank of its group is raised on all, so that none waits."""
    signature = inspect.signature(loss)

    def run(*args: Args.args, **options: Args.kwargs) -> Result:
        given = signature.bind(*args, **options).arguments
        call = ring.Call(_said(loss.__name__, given))
        token = ring.calling.set(call)
        try:
            return loss(*args, **options)
        except RingError:
            raise
        except TilewiseError as error:
            if given["how"].get("sizes") is None and not call.agreed:
                ring.refuse(given["how"]["group"], error)
            raise
        finally:
            ring.calling.reset(token)

    @functools.wraps(loss)
    def choose(*args: Args.args, **options: Args.kwargs) -> Result:
        # Within another call, that one speaks for both.
        if options.get("group") is None or ring.calling.get() is not None:
            return loss(*args, **options)
        if torch.compiler.is_compiling():  # what goes round is nothing for a compiler
            opaque: Any = torch.compiler.disable(run)
            result: Result = opaque(*args, **options)
            return result
        return run(*args, **options)

    return choose


def _said(name: str, given: dict[str, Any]) -> dict[str, object]:
    """What decides how the ranks talk to each other."""
    negatives, weight = given.get("negatives"), given.get("weight")
    learnt = [key for key in ("scale", "temperature", "bias")
              if isinstance(given.get(key), Tensor) and given[key].requires_grad]  # fmt: skip
    return {
        "loss": name,
        "reduction": given.get("reduction", "mean"),
        "weight": "none" if weight is None else "given",
        "negatives": "none"
        if negatives is None
        else f"{getattr(negatives, 'ndim', '?')} dimensions",
        "learnable numbers": learnt,
    }


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
        how: backend, workspace_mib, keep_mib, check_values, precision, group and sizes, see
            `SweepOptions`.

    Returns:
        Stats of the rows (N,) and of the columns (M,), differentiable once in rows, cols, scale
        and bias, in float32 (float64 for float64 features).
    """
    check_choice("reduction", reduction, ("logsumexp", "softplus"))
    pairs = make_pairs(
        rows, cols, (scale, bias), positives=positives, ids=ids, labels=labels,
        skip_self=skip_self, empty=how.get("group") is not None,
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
    plan = _with_group(_with_keep(_plan(how, reduction, columns, sums), how, pairs), how, pairs)
    if reduction == "softplus":
        return _reduced(pairs, _reduce(pairs, plan), None)
    pairs, shift = pairs._replace(bias=None), pairs.bias
    if columns or sums or pairs.kind == "label" or plan.group or not _frozen(pairs):
        return _reduced(pairs, _reduce(pairs, plan), shift)
    rows_only = autograd.attend(*pairs, *plan)[0]
    return _reduced(pairs, (rows_only, rows_only.new_empty(0)), shift)


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
    instead of four: the weights (N,) are known before the sweep, so nothing is recomputed.
    """
    together = how.get("group") is not None
    check_features("cols", cols, empty=together)
    pairs = make_pairs(
        rows, cols, (scale, bias), positives=positives, ids=ids, labels=labels, skip_self=False,
        empty=together,
    )  # fmt: skip
    weight = check_weight(weight, pairs.shape[0], pairs.rows)
    plan = _with_group(_plan(how, "softplus", False, False), how, pairs)
    if plan.group:
        # The gradients of other ranks' columns need this rank's upstream gradient, not yet known.
        return (weight * Stats.unpack(_reduce(pairs, plan)[0]).values).sum()
    if weight.requires_grad:
        return (weight * Stats.unpack(autograd.reduce(*pairs, *plan)[0]).values).sum()
    needs = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in pairs[:4]]
    value: Tensor = autograd.weigh(*pairs, *plan, weight, *needs)[0]
    return value


def _plan(how: SweepOptions, reduction: str, columns: bool, sums: bool) -> Plan:
    unknown = set(how) - set(SweepOptions.__annotations__)
    if unknown:
        raise OptionError(
            f"unknown option {sorted(unknown)[0]!r}; the sweep takes "
            f"{', '.join(SweepOptions.__annotations__)}"
        )
    backend = how.get("backend", "auto")
    check_choice("backend", backend, backends.NAMES)
    workspace_mib = check_number("workspace_mib", how.get("workspace_mib", 256))
    if workspace_mib <= 0:
        raise OptionError(f"workspace_mib must be positive, got {workspace_mib}")
    _check_keep(how.get("keep_mib", 0))
    check_values = how.get("check_values", False)
    if not isinstance(check_values, bool):
        raise DtypeError(f"check_values must be True or False, got {check_values!r}")
    precision = how.get("precision", "exact")
    check_choice("precision", precision, PRECISIONS)
    workspace_bytes = int(workspace_mib * 2**20)
    return Plan(reduction, columns, sums, backend, workspace_bytes, check_values, precision)


def _with_keep(plan: Plan, how: SweepOptions, pairs: Pairs) -> Plan:
    """The plan, with a budget for exponentials where a backward will come."""
    budget = _keep_bytes(how.get("keep_mib", 0), pairs, plan)
    wanted = (x.requires_grad for x in (pairs.rows, pairs.columns))
    if not (torch.is_grad_enabled() and any(wanted)):
        return plan
    return plan._replace(keep_bytes=budget, scaled=pairs.scale.requires_grad)


def _with_group(plan: Plan, how: SweepOptions, pairs: Pairs) -> Plan:
    """The plan for all ranks, once they agree on what is to be done."""
    group, sizes = how.get("group"), how.get("sizes")
    if group is None:
        if sizes is not None:
            raise OptionError("sizes are those of the ranks of a group, which was not given")
        return plan
    if plan.check_values or pairs.rows.device.type == "cpu":
        check_values(pairs)
    backends.choose(plan.backend, pairs.rows.device, pairs.rows.dtype, plan.precision)
    # What is kept for the backward would be of some columns only.
    plan = plan._replace(group=ring.name_of(group), keep_bytes=0)
    if sizes is None:
        sizes = ring.agree(group, _facts(pairs, plan), pairs.shape[1])
    ring.check_sizes(group, sizes, pairs.shape[1])
    return plan._replace(sizes=list(sizes))


def _facts(pairs: Pairs, plan: Plan) -> dict[str, object]:
    """What the ranks must have in common, in words."""
    wanted = (torch.is_grad_enabled() and x.requires_grad for x in (pairs.rows, pairs.columns))
    return {
        "feature size": pairs.shape[2],
        "dtype": pairs.rows.dtype,
        "kind of loss": (
            f"{plan.reduction}{' of rows and columns' if plan.columns else ''}"
            f"{' with sums' if plan.sums else ''}{' among themselves' if pairs.symmetric else ''}"
        ),
        "kind of positives": pairs.kind,
        "ids": _dtype_or_none(pairs.col_ids),
        "labels": _dtype_or_none(pairs.col_labels),
        "need of gradients (rows, columns)": tuple(wanted),
    }


def _dtype_or_none(marks: Tensor | None) -> object:
    return None if marks is None else marks.dtype


def _reduce(pairs: Pairs, plan: Plan) -> Swept:
    return Swept(*autograd.reduce(*pairs, *plan))


def _check_keep(keep_mib: float | str) -> None:
    if keep_mib == "auto":
        return
    if isinstance(keep_mib, str):
        raise OptionError(f"keep_mib must be a number or 'auto', got {keep_mib!r}")
    number = check_number("keep_mib", keep_mib)
    if number < 0:
        raise OptionError(f"keep_mib must not be negative, got {number}; 0 keeps nothing")


def _keep_bytes(keep_mib: float | str, pairs: Pairs, plan: Plan) -> int:
    if keep_mib != "auto":
        return int(float(keep_mib) * 2**20)
    if pairs.rows.device.type != "cuda":
        return 0
    if torch.compiler.is_compiling():
        raise OptionError(
            "keep_mib='auto' asks the device for its free memory, which a compiled graph cannot; "
            "pass a number"
        )
    device = pairs.rows.device
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached
    n, m, d = pairs.shape
    # What forward and backward take beside it; and a tenth for the caller's own.
    own = plan.workspace_bytes + (n * pairs.rows.element_size() + 4 * m) * d
    return max(0, int(0.9 * free) - own)


def _frozen(pairs: Pairs) -> bool:
    """Whether the rows want a gradient and the columns none."""
    frozen = pairs.cols is not None and not pairs.cols.requires_grad
    return frozen and pairs.rows.requires_grad and torch.is_grad_enabled()


def _reduced(pairs: Pairs, packed: tuple[Tensor, ...], bias: Tensor | None) -> Reduced:
    rows, cols = (Stats.unpack(side) if side.dim() == 2 else None for side in packed[:2])
    assert rows is not None
    if cols is None:
        cols = rows if pairs.symmetric else Stats.unpack(packed[1][None])
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


def explain_keep(rows: Tensor, cols: Tensor, keep_mib: float | Literal["auto"]) -> Kept:
    """What `clip_loss` and `info_nce` keep of such features for their backward under a budget.

    Chunks are of 8,192 rows. The same number of them gives the same bits. The other losses, labels
    and label smoothing keep none.
    """
    pairs = make_pairs(
        rows, cols, (1.0, None), positives=None, ids=None, labels=None, skip_self=False
    )
    plan = _plan({"keep_mib": keep_mib}, "logsumexp", True, False)
    kept = 0
    if backends.choose("auto", rows.device, rows.dtype).name == "fused":
        plan = plan._replace(keep_bytes=_keep_bytes(keep_mib, pairs, plan))
        kept = fused.kept_rows(pairs, plan)
    chunks = -(-kept // fused.CHUNK)
    return Kept(chunks, -(-len(rows) // fused.CHUNK), 2 * kept * padded(len(cols), 8) / 2**20)


def explain_backend(features: Tensor, backend: str = "auto") -> backends.Choice:
    """Which backend a loss on such features takes, and why the others were passed over.

    >>> print(explain_backend(torch.zeros(8, 4)))
    fused: passed over, it needs a CUDA or ROCm device, got cpu
    chunked: chosen
    """
    return backends.choose(backend, features.device, features.dtype)
