"""Launching the kernels that close a loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends import entropies
from tilewise.tiles import cdiv

# Slots a program takes.
BLOCK = 256


def _grid(rows: Tensor, cols: Tensor) -> tuple[int, int]:
    """Blocks, and sides: columns may be (0,), not wanted."""
    sides = 2 if cols.dim() == 2 else 1
    return cdiv(max(rows.shape[-1], cols.shape[-1], 1), BLOCK), sides


def entropy(
    rows: Tensor,
    cols: Tensor,
    weight: Tensor | None,
    mean: bool,
    world: int = 1,
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss () of packed stats, and what its backward divides by; see `tilewise.entropy`.

    `add_up` is how the numbers of all ranks of a world become one.
    """
    blocks, sides = _grid(rows, cols)
    sums = rows.new_empty(sides, 2, blocks, dtype=torch.float64)
    value, totals, divisors = rows.new_empty(()), sums.new_empty(sides), sums.new_empty(sides)
    entropies.losses[(blocks, sides)](
        rows, cols, weight, sums, rows.shape[-1], cols.shape[-1], BLOCK=BLOCK
    )

    def average(given: bool) -> None:
        entropies.average[(1,)](
            sums, totals, value, divisors, blocks, world, GIVEN=given, MEAN=mean, SIDES=sides,
            BLOCK=256,
        )  # fmt: skip

    average(given=False)
    if mean and add_up is not None:
        totals = add_up(totals)
        average(given=True)
    return value, divisors


def pull_stats(
    rows: Tensor, cols: Tensor, weight: Tensor | None, divisors: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of packed stats."""
    d_rows, d_cols = torch.empty_like(rows), torch.empty_like(cols)
    entropies.pull[_grid(rows, cols)](
        rows, cols, weight, divisors, upstream, d_rows, d_cols, rows.shape[-1], cols.shape[-1],
        BLOCK=BLOCK,
    )  # fmt: skip
    return d_rows, d_cols
