"""Launching a row-only log-sum-exp over frozen columns that brings its gradient along.

Exponentials of a panel are written while it is summed up, and multiplied with the columns at once:
two products in all, and columns are seen once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.backends import fused, kernels
from tilewise.backends.fused_forward import Forward, SumPanel
from tilewise.backends.plan import Attended, Plan
from tilewise.backends.products import add_product, cut
from tilewise.backends.ready import Ready
from tilewise.backends.tuning import TileSize
from tilewise.pairs import Pairs
from tilewise.tiles import Tile, cdiv, padded, row_of_tiles, spans


class Attending(Forward):
    """Mean columns from exponentials in bf16; where no fixed offset holds, from logits anew."""

    def __init__(self, pairs: Pairs, plan: Plan) -> None:
        super().__init__(pairs, plan._replace(keep_bytes=0, columns=False))
        self.mean = self.head.new_empty(pairs.rows.shape)
        self.row_pull = self.head.new_zeros(pairs.shape[0])
        height, width = self._call_shape(self.ready, self._size(keep=True)[0], 4)
        area = min(height, pairs.shape[0]) * padded(min(width, pairs.shape[1]), 8)
        self.work = pairs.rows.new_empty(area, dtype=torch.bfloat16)

    def attend(self) -> Attended:
        """Everything."""
        stats = self.run().rows
        total = torch.where(self.totals > 0, self.totals, 1.0)
        self.mean.div_(total[:, None])
        product = (self.row_pull / total).to(self.mean.dtype)
        self._mend(stats, product)
        return Attended(stats, self.mean, product)

    def _call_shape(self, ready: Ready, size: TileSize, part_bytes: int) -> tuple[int, int]:
        """Panels whose exponentials take most of the workspace: each costs the host a launch."""
        height, width = super()._call_shape(ready, size, part_bytes)
        if not part_bytes:  # of what leaves none
            return height, width
        rows = min(height, fused.CHUNK)
        most = 7 * self.plan.workspace_bytes // (16 * rows) // size.cols * size.cols
        return rows, min(width, max(size.cols, most))

    def _panels(self) -> Iterator[SumPanel]:
        return self._panels_of(0, self.pairs.shape[0], keep=True)

    def _place(self, tile: Tile) -> Tensor:
        return cut(self.work, tile)

    def _use(self, panel: SumPanel) -> None:
        tile, exponentials = panel.tile, panel.kept
        assert exponentials is not None
        cols = self.pairs.columns
        add_product(self.mean[tile.rows], exponentials, cols[tile.cols], tile.col_start == 0)

    def _mend(self, stats: Tensor, product: Tensor) -> None:
        """The same where no fixed offset holds, which only the device knows."""
        n, m, d = self.pairs.shape
        size = self.ready.tiles.marked
        most, width = self._call_shape(self.ready, size, 0)
        for panel in (tile for rows in spans(n, most) for tile in row_of_tiles(rows, m, width)):
            features = self.ready.loads(size, panel, self.flag)
            height = panel.row_stop - panel.row_start
            kernels.marked_means[(cdiv(height, size.rows), cdiv(d, size.features))](
                *features, self.head, self.flag, stats, self.mean, product, *self.ready.marks[:3],
                panel.row_start, panel.col_start, panel.col_stop - panel.col_start, n, m,
                **self.ready.masks(), **self.ready.product(size),
            )  # fmt: skip
