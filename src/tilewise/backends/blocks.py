"""Feature blocks and their logits, tile by tile, and where the gradients of a sweep end up."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.plan import Plan
from tilewise.pairs import Pairs, exact_dtype
from tilewise.positives import positive_columns
from tilewise.reductions import power_of_two
from tilewise.tiles import Tile, row_of_tiles, spans, tile_shape, upper_row_of_tiles

# On 2 cores with 1 MiB of L2 each the products of such tiles run as fast as a large one. An
# accelerator wants larger tiles to fill its processors. docs/log.md has the sizes tried.
CPU_TILE = (1024, 2048)
ACCELERATOR_TILE = (4096, 4096)


class Block(NamedTuple):
    """One tile at work."""

    tile: Tile
    z: Tensor  # (n, m) logits, to be overwritten
    cosines: Tensor  # (n, m) products of features; `z` itself unless they are kept
    left: Tensor  # (n, D) row features in the dtype of the sums
    right: Tensor  # (m, D) column features, likewise
    spare: Tensor  # (n, m) scratch


class Panel(NamedTuple):
    """A span of rows and, one after the other, its blocks."""

    rows: slice
    left: Tensor  # (n, D)
    blocks: Iterator[Block]


def panels(pairs: Pairs, plan: Plan, keep: bool = False) -> Iterator[Panel]:
    """All pairs, row panel by row panel, with logits still without the bias.

    With `keep` each block holds the products of features too, untouched by what becomes of z.
    """
    n, m, _ = pairs.shape
    height, width = _shape(pairs, plan)
    area = min(height, n) * min(width, m)
    # One by one, so that each is aligned: a product may round otherwise by where it is written,
    # and the backward must meet the very logits of the forward.
    buffers = [pairs.rows.new_empty(area, dtype=pairs.dtype) for _ in range(3 if keep else 2)]
    for span in spans(n, height):
        left = pairs.rows[slice(*span)].to(pairs.dtype)
        tiles = upper_row_of_tiles(span, n) if pairs.symmetric else row_of_tiles(span, m, width)
        yield Panel(slice(*span), left, _blocks(pairs, tiles, left, buffers))


def blocks(pairs: Pairs, plan: Plan) -> Iterator[Block]:
    """The blocks of all panels."""
    return (block for panel in panels(pairs, plan) for block in panel.blocks)


def mirrored(pairs: Pairs, tile: Tile) -> bool:
    """Whether a tile speaks for its columns too: on the diagonal of a symmetric z it does not."""
    return not (pairs.symmetric and tile.row_start == tile.col_start)


def _blocks(
    pairs: Pairs, tiles: Iterator[Tile], left: Tensor, buffers: list[Tensor]
) -> Iterator[Block]:
    scale = pairs.scale.to(pairs.dtype)
    for tile in tiles:
        right = pairs.columns[tile.cols].to(pairs.dtype)
        shape = (len(left), len(right))
        z, spare, *kept = (buffer[: shape[0] * shape[1]].view(shape) for buffer in buffers)
        cosines = kept[0] if kept else z
        torch.mm(left, right.t(), out=cosines)
        if not mirrored(pairs, tile):
            # A product rounds (i, j) and (j, i) apart, but one pair stands for both.
            cosines.copy_((cosines + cosines.t()) / 2)
        yield Block(tile, torch.mul(cosines, scale, out=z), cosines, left, right, spare)


def _shape(pairs: Pairs, plan: Plan) -> tuple[int, int]:
    most = CPU_TILE if pairs.rows.device.type == "cpu" else ACCELERATOR_TILE
    room = plan.workspace_bytes // pairs.dtype.itemsize
    height, width = tile_shape(pairs.shape[2], room, most)
    return (min(height, width),) * 2 if pairs.symmetric else (height, width)


def store(out: Tensor, span: slice, block: Tensor, gain: Tensor | None) -> None:
    """Round a finished block (n, D) into a gradient; `gain` (N,) takes each row's power of two."""
    if gain is not None:
        gain[span] = power_of_two(block.abs().amax(1))
        block = block / gain[span, None]
    out[span] = block


def rounded(x: Tensor, dtype: torch.dtype, gain: Tensor | None) -> Tensor:
    """A gradient (N, D) in another dtype, with each row's power of two in `gain` (N,)."""
    if gain is None:
        return x.to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    for span in row_spans(x):
        store(out, span, x[span], gain)
    return out


def narrow(acc: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of `acc`'s shape and a dtype no wider, in the same memory, to be stored in order.

    Row i of it ends before row i of `acc` begins to matter, so rounding needs no second buffer.
    """
    if acc.dtype == dtype:
        return acc
    return acc.view(-1).view(dtype)[: acc.numel()].view(acc.shape)


def row_spans(features: Tensor) -> Iterator[slice]:
    """Rows in pieces of about 16 MiB in fp32, for passes over (N, D) that must not copy it all."""
    step = max(1, 2**22 // max(1, features.shape[1:].numel()))
    return (slice(*span) for span in spans(features.shape[0], step))


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The product of each row of `a` with the same row of `b`, in the dtype of `a`. (N,)"""
    return (a * b).sum(1)


def inner_rows(pairs: Pairs, mean: Tensor) -> Tensor:
    """The product of each row with its mean column, (N,)."""
    return torch.cat([inner(mean[span], pairs.rows[span]) for span in row_spans(mean)])


def pull_rows(pairs: Pairs, mean: Tensor, product: Tensor, d_stats: Tensor) -> Tensor:
    """Turn the means of `attend` into d_rows, in their own memory; returns the scale's gradient.

    d_rows_i = scale * (d_value_i mean_i + d_positive_i cols_positive(i)); see `narrow`.
    """
    d_value, d_positive = d_stats[0], d_stats[1] + d_stats[2]
    exact = exact_dtype(mean)
    d_rows, d_scale = narrow(mean, pairs.rows.dtype), (d_value.to(exact) * product).sum()
    for span in row_spans(mean):
        pull = torch.zeros_like(mean[span])
        # A rank may have rows and no columns of its own, among which its positives would be.
        if pairs.kind != "none" and pairs.shape[1]:
            column, present = positive_columns(pairs, span)
            positive = pairs.columns[column.to(pairs.columns.device)].to(mean.device)
            pull = (d_positive[span] * present)[:, None] * positive
        d_scale += inner(pull, pairs.rows[span]).to(exact).sum()
        pull.addcmul_(mean[span], d_value[span, None])
        d_rows[span] = pull * pairs.scale
    return d_scale.to(mean.dtype)
