"""Which column belongs to which row, and where in a tile.

Positives are lifted out of a tile of logits before its negatives are reduced (their place becomes
-inf, which no sum sees), and their own derivative is put back before the products. Two forms share
one interface: `Slots` (at most one positive per row, O(n) work) and `Mask` (any number, by label).
"""

import torch
from torch import Tensor

from tilewise.pairs import NO_POSITIVE, Pairs, impossible_positives
from tilewise.reductions import INFINITY
from tilewise.tiles import Tile


class Slots:
    """The one positive of each row of a tile, if it lies there. Values at positives are (n, 1)."""

    def __init__(self, column: Tensor, width: int) -> None:
        """`column` (n,) counts from the tile's first column and may lie outside of it."""
        self.width = width
        self.present = ((column >= 0) & (column < width))[:, None]
        self.column = column.clamp(0, width - 1)[:, None]

    def get(self, x: Tensor) -> Tensor:
        """Values of a tile (n, m) at the positives; arbitrary where `present` is false."""
        return x.gather(1, self.column)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write values at the positives of a tile, in place."""
        x.scatter_(1, self.column, torch.where(self.present, values, self.get(x)))

    def share(self, logits: Tensor, value: Tensor) -> Tensor:
        """Share of each positive in the log-sum-exp `value` of all: the only one has it whole."""
        return torch.ones_like(logits)

    def of_columns(self, vector: Tensor) -> Tensor:
        """A vector (m,) of the tile's columns, at the positives."""
        return vector[self.column]

    def by_column(self, values: Tensor, absent: float) -> Tensor:
        """Values at the positives as (1, m), to be reduced over dim 0; a column has one at most."""
        spread = values.new_full((self.width + 1,), absent)
        spread.scatter_(0, torch.where(self.present, self.column, self.width)[:, 0], values[:, 0])
        return spread[None, : self.width]


class Mask:
    """Any number of positives per row and column. Values at positives are (n, m)."""

    def __init__(self, present: Tensor) -> None:
        self.present = present

    def get(self, x: Tensor) -> Tensor:
        return x

    def put(self, x: Tensor, values: Tensor) -> None:
        torch.where(self.present, values, x, out=x)

    def share(self, logits: Tensor, value: Tensor) -> Tensor:
        return torch.exp(logits - value)

    def of_columns(self, vector: Tensor) -> Tensor:
        return vector[None, :]

    def by_column(self, values: Tensor, absent: float) -> Tensor:
        return values


def positive_columns(pairs: Pairs, rows: slice) -> tuple[Tensor, Tensor]:
    """The positive's column of some rows, and whether they have one; for at most one a row."""
    m = pairs.shape[1]
    column = _columns(pairs, rows)
    return column.clamp(0, m - 1), (column >= 0) & (column < m)


def find(pairs: Pairs, tile: Tile) -> Slots | Mask | None:
    """The positives of a tile; None where it is known beforehand that there are none."""
    if pairs.kind == "label":
        return Mask(_equal_labels(pairs, tile))
    if pairs.kind == "none" or (pairs.kind == "aligned" and not tile.diagonal):
        return None
    return Slots(_columns(pairs, tile.rows) - tile.col_start, tile.col_stop - tile.col_start)


def lift(found: Slots | Mask, z: Tensor) -> Tensor:
    """Take the positives' logits out of a tile: returned, -inf where absent, and -inf in `z`."""
    logits = torch.where(found.present, found.get(z), -INFINITY)
    found.put(z, torch.full_like(logits, -INFINITY))
    return logits


def exclude(pairs: Pairs, tile: Tile, z: Tensor) -> None:
    """Make -inf of the pairs that do not count: self-pairs and equal ids. Lift positives first."""
    if pairs.row_ids is not None and pairs.col_ids is not None:
        z.masked_fill_(pairs.row_ids[tile.rows, None] == pairs.col_ids[None, tile.cols], -INFINITY)
    if pairs.skip_self:
        fill_diagonal(z, tile, -INFINITY)


def fill_diagonal(x: Tensor, tile: Tile, value: float) -> None:
    """Write `value` at the pairs (i, i) of a tile, in place."""
    inside = tile.diagonal
    if inside:
        rows = slice(inside.start - tile.row_start, inside.stop - tile.row_start)
        cols = slice(inside.start - tile.col_start, inside.stop - tile.col_start)
        x[rows, cols].diagonal().fill_(value)


def masks(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """All positives and all negatives as two boolean matrices (N, M): the meaning of `Pairs`."""
    n, m, _ = pairs.shape
    whole = Tile(0, n, 0, m)
    counted = torch.zeros(n, m, device=pairs.rows.device)
    exclude(pairs, whole, counted)
    positive = torch.zeros(n, m, dtype=torch.bool, device=pairs.rows.device)
    found = find(pairs, whole)
    if found is not None:
        found.put(positive, torch.ones_like(found.present))
    return positive, (counted == 0) & ~positive


def poison(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """0 or NaN for each row (N,) and column (M,): NaN where its numbers cannot be right.

    An infinite feature may give logits of -inf alone, which look like pairs that do not count;
    a positive that cannot be would leave its row without one.
    """
    rows, cols = (
        torch.linalg.vector_norm(features, ord=INFINITY, dim=1).to(pairs.dtype) * 0
        for features in (pairs.rows, pairs.columns)
    )
    common = pairs.scale.to(pairs.dtype) * 0
    own = torch.where(impossible_positives(pairs), torch.nan, rows)
    return own + cols.max() + common, cols + rows.max() + common


def _columns(pairs: Pairs, rows: slice) -> Tensor:
    if pairs.positives is not None:
        column = pairs.positives[rows].long()
        if not pairs.skip_self:
            return column
        own = torch.arange(rows.start, rows.stop, device=column.device)
        return torch.where(column == own, NO_POSITIVE, column)
    if pairs.kind == "aligned":
        return torch.arange(rows.start, rows.stop, device=pairs.rows.device)
    return torch.full((rows.stop - rows.start,), NO_POSITIVE, device=pairs.rows.device)


def _equal_labels(pairs: Pairs, tile: Tile) -> Tensor:
    assert pairs.row_labels is not None
    assert pairs.col_labels is not None
    same = pairs.row_labels[tile.rows, None] == pairs.col_labels[None, tile.cols]
    if pairs.skip_self:
        fill_diagonal(same, tile, False)
    return same
