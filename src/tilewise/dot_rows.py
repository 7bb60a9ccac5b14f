"""The logits of each row's own negatives as a custom op: rows_i . own_ih, (N, H)."""

from typing import Any

import torch
from torch import Tensor

from tilewise.autograd import no_second_derivative, plain, save_nothing
from tilewise.backends.blocks import row_spans
from tilewise.pairs import accumulate_dtype


@torch.library.custom_op(
    "tilewise::dot_rows", mutates_args=(), schema="(Tensor rows, Tensor own) -> Tensor"
)
@plain
def dot_rows(rows: Tensor, own: Tensor) -> Tensor:
    """Products (N, H) of rows (N, D) with their own features (N, H, D), summed in fp32 or fp64."""
    dtype = accumulate_dtype(rows)
    out = rows.new_empty(own.shape[:2], dtype=dtype)
    for span in row_spans(own):
        torch.bmm(
            own[span].to(dtype), rows[span].to(dtype).unsqueeze(2), out=out[span].unsqueeze(2)
        )
    return out


@dot_rows.register_fake
def _(rows: Tensor, own: Tensor) -> Tensor:
    return rows.new_empty(own.shape[:2], dtype=accumulate_dtype(rows))


@torch.library.custom_op(
    "tilewise::dot_rows_backward",
    mutates_args=(),
    schema="(Tensor rows, Tensor own, Tensor d, bool need_rows, bool need_own) -> (Tensor, Tensor)",
)
@plain
def _dot_rows_backward(*args: Any) -> tuple[Tensor, Tensor]:
    rows, own, d, need_rows, need_own = args
    d_rows, d_own = _fake_dot_rows_backward(*args)
    for span in row_spans(own):
        if need_rows:
            d_rows[span] = torch.bmm(d[span].unsqueeze(1), own[span].to(d.dtype)).squeeze(1)
        if need_own:
            d_own[span] = d[span].unsqueeze(2) * rows[span].to(d.dtype).unsqueeze(1)
    return d_rows, d_own


@_dot_rows_backward.register_fake
def _fake_dot_rows_backward(*args: Any) -> tuple[Tensor, Tensor]:
    rows, own, _, need_rows, need_own = args
    d_rows = rows.new_empty(rows.shape if need_rows else 0)
    return d_rows, own.new_empty(own.shape if need_own else 0)


def _save_dot_rows(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _dot_rows_grads(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
    needs = ctx.needs_input_grad
    grads = _dot_rows_backward(*ctx.saved_tensors, d, *needs)
    return grads[0] if needs[0] else None, grads[1] if needs[1] else None


dot_rows.register_autograd(_dot_rows_grads, setup_context=_save_dot_rows)
_dot_rows_backward.register_autograd(no_second_derivative, setup_context=save_nothing)
