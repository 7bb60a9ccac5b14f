"""The one differentiable operation, a sweep over all pairs, as custom ops. Only autograd here.

`reduce` and its backward `differentiate`; `attend`, a reduce over frozen columns that brings the
gradient along; and `weigh`, a softplus sum under known weights that does the same. Arguments are
those of `Pairs`, one after the other, and the text of a `Plan`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import hosted, rounds
from tilewise.backends import fused
from tilewise.backends.blocks import narrow, pull_rows, row_spans
from tilewise.backends.plan import IN_WORKSPACE, Grads, Needs, Plan, Swept
from tilewise.errors import GradError
from tilewise.pairs import Pairs, check_values

PAIRS = (
    "Tensor rows, Tensor? cols, Tensor scale, Tensor? bias, Tensor? positives, Tensor? row_ids, "
    "Tensor? col_ids, Tensor? row_labels, Tensor? col_labels, str kind, bool skip_self"
)
NEEDS = "bool rows_need, bool cols_need, bool scale_needs, bool bias_needs"
NUM_PAIRS = len(Pairs._fields)


class Call(NamedTuple):
    """The arguments of an op, taken apart."""

    pairs: Pairs
    plan: Plan
    rest: tuple[Any, ...]


def _parse(args: tuple[Any, ...]) -> Call:
    pairs, plan, rest = args[:NUM_PAIRS], args[NUM_PAIRS], args[NUM_PAIRS + 1 :]
    return Call(Pairs(*pairs), Plan.parse(plan), rest)


def _checked(args: tuple[Any, ...]) -> Call:
    """The arguments, with values read back where that is free or asked for."""
    call = _parse(args)
    if call.plan.check_values or call.pairs.device.type == "cpu":
        check_values(call.pairs)
    return call


def plain(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of an op, run as it is written whatever autocast is in force around it."""

    @functools.wraps(body)
    def run(*args: Any) -> Any:
        kinds = {x.device.type for x in args if isinstance(x, Tensor)}
        with torch.autocast(max(kinds, key="cpu".__ne__), enabled=False):
            return body(*args)

    return run


# reduce: stats of rows (k, N) and of columns (k, M), or (0,) where not wanted; and what the backend
# wants back


@torch.library.custom_op(
    "tilewise::reduce",
    mutates_args=(),
    schema=f"({PAIRS}, str plan) -> (Tensor, Tensor, Tensor, Tensor)",
)
@plain
def reduce(*args: Any) -> Swept:
    """Packed `Stats` of rows and columns, differentiable in rows, cols, scale and bias."""
    pairs, plan, _ = _checked(args)
    return hosted.reduce(pairs, plan)


@reduce.register_fake
def _(*args: Any) -> Swept:
    pairs, plan, _ = _parse(args)
    n, m, _ = pairs.shape
    k = plan.num_stats
    rows = pairs.scale.new_empty(k, n, dtype=pairs.dtype)
    memo, kept = rows.new_empty(0), rows.new_empty(0)
    if rounds.backend_of(pairs, plan) is fused:
        memo, kept = fused.empty_memo(pairs, plan), fused.empty_kept(pairs, plan)
    return Swept(rows, rows.new_empty((k, m) if plan.columns else 0), memo, kept)


@torch.library.custom_op(
    "tilewise::differentiate",
    mutates_args=(),
    schema=(
        f"({PAIRS}, str plan, Tensor row_stats, Tensor col_stats, Tensor memo, Tensor d_row_stats, "
        f"Tensor d_col_stats, {NEEDS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
@plain
def _differentiate(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, plan, (rows, cols, memo, *rest) = _parse(args)
    return _gradients(pairs, plan, Swept(rows, cols, memo, rows.new_empty(0)), tuple(rest))


@_differentiate.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, _, rest = _parse(args)
    return _fake_grads(pairs, Needs(*rest[5:]))


# The same from exponentials that were kept; they are overwritten. An op that overwrites can have no
# derivative, not even one that refuses, so this is another one.
@torch.library.custom_op(
    "tilewise::differentiate_kept_",
    mutates_args=("kept",),
    schema=(
        f"({PAIRS}, str plan, Tensor row_stats, Tensor col_stats, Tensor memo, Tensor(a!) kept, "
        f"Tensor d_row_stats, Tensor d_col_stats, {NEEDS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
@plain
def _differentiate_kept(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, plan, rest = _parse(args)
    return _gradients(pairs, plan, Swept(*rest[:4]), rest[4:])


@_differentiate_kept.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, _, rest = _parse(args)
    return _fake_grads(pairs, Needs(*rest[6:]))


def _gradients(
    pairs: Pairs, plan: Plan, swept: Swept, rest: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    upstream, needs = rest[:2], Needs(*rest[2:])
    return _rounded(pairs, hosted.differentiate(pairs, plan, swept, upstream, needs), needs)


def _rounded(pairs: Pairs, grads: Grads, needs: Needs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features' gradients in the features' dtype; an op returns tensors, so (0,) for None."""
    rows, cols = (
        pairs.rows.new_empty(0) if d is None else d.to(pairs.rows.dtype) for d in grads[:2]
    )
    none = pairs.scale.new_empty(0, dtype=pairs.dtype)
    scale = grads.scale if needs.scale else none
    return rows, cols, scale, grads.bias if needs.bias else torch.empty_like(none)


def _fake_grads(pairs: Pairs, needs: Needs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    none = pairs.scale.new_empty(0, dtype=pairs.dtype)
    return (
        pairs.rows.new_empty(pairs.rows.shape if needs.rows else 0),
        pairs.columns.new_empty(pairs.columns.shape if needs.cols else 0),
        none.new_empty(() if needs.scale else 0),
        none.new_empty(() if needs.bias else 0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], *more: Tensor) -> None:
    """Keep tensors where autograd can free them, and everything else beside them."""
    ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.slots = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(inputs[i] for i in ctx.slots), *more)


def _restore(ctx: Any) -> tuple[Call, tuple[Tensor, ...]]:
    """The call, and whatever else was kept."""
    saved = ctx.saved_tensors
    inputs = list(ctx.constants)
    for i, tensor in zip(ctx.slots, saved, strict=False):
        inputs[i] = tensor
    return _parse(tuple(inputs)), saved[len(ctx.slots) :]


def _for_inputs(
    ctx: Any, call: Call, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """One entry for each input of the op, None where no gradient is due."""
    sources = (call.pairs.rows, call.pairs.cols, call.pairs.scale, call.pairs.bias)
    due = [
        d.to(source.dtype) if needed and source is not None and d is not None else None
        for d, source, needed in zip(grads, sources, ctx.needs_input_grad, strict=False)
    ]
    return *due, *[None] * (len(ctx.constants) - len(due))


def _spend(ctx: Any) -> list[Tensor]:
    """What the forward kept, to be turned into gradients in place if nobody else can see it."""
    if not _may_spend(ctx):
        return [x.clone() for x in ctx.kept]
    kept: list[Tensor] = ctx.kept
    ctx.kept = None
    return kept


def _may_spend(ctx: Any) -> bool:
    """Whether nobody can see what the forward kept, now or, with retain_graph=True, later."""
    # Where torch cannot tell, the graph is assumed to stay.
    stays = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return not stays() and all(_is_ours_alone(x) for x in ctx.kept)


def _is_ours_alone(x: Tensor) -> bool:
    """Whether no other tensor shares x's memory; never of a tracer's stand-in for a tensor."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    # The storage is held by x and by the handle that asks.
    return type(x) is Tensor and count is not None and count(x.untyped_storage()._cdata) <= 2


def _save_reduce(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, *output[:3])
    ctx.mark_non_differentiable(*output[2:])
    ctx.kept = [output[3].detach()]


def _reduce_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    call, known = _restore(ctx)
    d_stats = [
        torch.zeros_like(x) if d is None else d
        for x, d in zip(known[:2], upstream[:2], strict=True)
    ]
    rest = (*d_stats, *ctx.needs_input_grad[:4])
    if call.plan.keep_bytes == IN_WORKSPACE and not _may_spend(ctx):
        # The workspace has no room for a copy, nor for a backward beside them: computed again.
        ctx.kept = [ctx.kept[0].new_empty(0)]
    # create_graph=True is left to the op that refuses to go on.
    if ctx.kept[0].numel() and not torch.is_grad_enabled():
        grads = _differentiate_kept(*call.pairs, call.plan.text(), *known, *_spend(ctx), *rest)
    else:
        grads = _differentiate(*call.pairs, call.plan.text(), *known, *rest)
    return _for_inputs(ctx, call, grads)


reduce.register_autograd(_reduce_backward, setup_context=_save_reduce)


def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """For a backward that raises."""


def no_second_derivative(ctx: Any, *upstream: Tensor | None) -> tuple[None, ...]:
    """The backward of a backward."""
    raise GradError(
        "the sweep has first derivatives only, got a backward through its backward; call "
        "backward without create_graph=True, or write the loss in plain PyTorch for a small batch"
    )


_differentiate.register_autograd(no_second_derivative, setup_context=save_nothing)


# attend: row stats (k, N) over frozen columns, the mean column (N, D) of each row, and its product
# with the row (N,)


@torch.library.custom_op(
    "tilewise::attend", mutates_args=(), schema=f"({PAIRS}, str plan) -> (Tensor, Tensor, Tensor)"
)
@plain
def attend(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Packed `Stats` of rows, differentiable in rows and scale, and the means; see the backends."""
    pairs, plan, _ = _checked(args)
    return hosted.attend(pairs, plan)


@attend.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    pairs, plan, _ = _parse(args)
    n = pairs.shape[0]
    mean = pairs.rows.new_empty(pairs.rows.shape, dtype=pairs.dtype)
    return mean.new_empty(plan.num_stats, n), mean, mean.new_empty(n)


@torch.library.custom_op(
    "tilewise::pull_rows_",
    mutates_args=("mean",),
    schema=f"({PAIRS}, str plan, Tensor(a!) mean, Tensor product, Tensor d_row_stats) -> Tensor",
)
@plain
def _pull_rows(*args: Any) -> Tensor:
    """Turn the means into d_rows in their own memory; returns the scale's gradient."""
    pairs, _, (mean, product, d_stats) = _parse(args)
    return pull_rows(pairs, mean, product, d_stats)


@_pull_rows.register_fake
def _(*args: Any) -> Tensor:
    pairs = _parse(args).pairs
    return pairs.rows.new_empty((), dtype=pairs.dtype)


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, output[0], output[2])
    ctx.mark_non_differentiable(*output[1:])
    ctx.kept = [output[1].detach()]


def _attend_backward(ctx: Any, d_stats: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    call, (stats, product) = _restore(ctx)
    if d_stats is None:
        return (None,) * len(ctx.constants)
    if torch.is_grad_enabled():  # create_graph=True: leave it to the op that refuses to go on
        nothing = stats.new_empty(0)
        needs = Needs(ctx.needs_input_grad[0], False, ctx.needs_input_grad[2], False)
        args = (*call.pairs, call.plan.text(), stats, nothing, nothing, d_stats, nothing, *needs)
        return _for_inputs(ctx, call, _differentiate(*args))
    (mean,) = _spend(ctx)
    d_scale = _pull_rows(*call.pairs, call.plan.text(), mean, product, d_stats)
    d_rows = narrow(mean, call.pairs.rows.dtype)
    return _for_inputs(ctx, call, (d_rows, None, d_scale, None))


attend.register_autograd(_attend_backward, setup_context=_save_attend)


# weigh: a softplus sum under known weights, with its gradients up to the upstream scalar


@torch.library.custom_op(
    "tilewise::weigh",
    mutates_args=(),
    schema=(
        f"({PAIRS}, str plan, Tensor weight, {NEEDS}) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
@plain
def weigh(*args: Any) -> tuple[Tensor, ...]:
    """A scalar, differentiable in rows, cols, scale and bias, and what its backward needs."""
    pairs, plan, (weight, *needs) = _checked(args)
    value, scaled = hosted.weigh(pairs, plan, weight, Needs(*needs))
    return value, *_rounded(pairs, scaled.grads, Needs(*needs)), *scaled[1:]


@weigh.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    pairs, _, rest = _parse(args)
    value = pairs.scale.new_empty((), dtype=pairs.dtype)
    gains = value.new_empty(pairs.shape[0]), value.new_empty(pairs.shape[1])
    return value, *_fake_grads(pairs, Needs(*rest[1:])), *gains


@torch.library.custom_op(
    "tilewise::gain_", mutates_args=("grads",), schema="(Tensor(a!) grads, Tensor gain) -> ()"
)
@plain
def _gain(grads: Tensor, gain: Tensor) -> None:
    """Multiply each row of a gradient by its gain, in the gain's precision, in place."""
    if grads.device != gain.device:
        hosted.rescale(grads, gain)
        return
    if grads.is_contiguous() and fused.refusal(grads.device, grads.dtype) is None:
        fused.rescale(grads, gain.contiguous())
        return
    for rows in row_spans(grads):
        grads[rows] = grads[rows] * gain[rows, None]


@_gain.register_fake
def _(grads: Tensor, gain: Tensor) -> None:
    return None


def _save_weigh(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.kept = [x.detach() for x in output[1:]]


def _weigh_backward(ctx: Any, upstream: Tensor | None, *_unused: None) -> tuple[Tensor | None, ...]:
    call, _ = _restore(ctx)
    if upstream is None and call.plan.group:  # other ranks may have one, and ask
        upstream = call.rest[0].new_zeros(())
    if upstream is None:
        return (None,) * len(ctx.constants)
    # create_graph=True is left to the op that refuses to go on. Where ranks have upstream gradients
    # of their own, what was added up without them is of no use.
    if not rounds.is_common(upstream, call.plan) or torch.is_grad_enabled():
        weight, *needs = call.rest
        nothing = weight.new_empty(0)
        rest = (nothing, nothing, nothing, (upstream * weight)[None], nothing, *needs)
        return _for_inputs(ctx, call, _differentiate(*call.pairs, call.plan.text(), *rest))
    d_rows, d_cols, d_scale, d_bias, row_gain, col_gain = _spend(ctx)
    for grads, gain in ((d_rows, row_gain), (d_cols, col_gain)):
        if grads.numel():
            _gain(grads, gain * upstream)
    return _for_inputs(ctx, call, (d_rows, d_cols, d_scale * upstream, d_bias * upstream))


weigh.register_autograd(_weigh_backward, setup_context=_save_weigh)
