"""Launching the softplus kernels: sums and gradients in one sweep."""

import torch
from torch import Tensor

from tilewise.backends import dz as dz_kernels
from tilewise.backends.fused_backward import Backward
from tilewise.backends.plan import Grads
from tilewise.backends.products import DzPanel, add_parts
from tilewise.backends.tuning import TileSize
from tilewise.reductions import power_of_two
from tilewise.tiles import Tile, cdiv


class Softplus(Backward):
    """One sweep of softplus sums, or of their gradients, or of both."""

    def softplus(self, upstream: tuple[Tensor, Tensor], values: bool) -> tuple[Grads, Tensor]:
        """Gradients of softplus sums under weights, and if wanted the sums of rows themselves."""
        peak = torch.stack([side.abs().max() for side in upstream if side.numel()]).max()
        peak = power_of_two(peak) / self.multiplier
        self._softplus_head(peak)
        columns = upstream[1].numel() > 0
        weights = [side[0] / peak if side.numel() else self.flag for side in upstream]
        sums = self.head.new_zeros(self.pairs.shape[0] if values else 0)
        scaled = self.needs.scale or self.needs.bias

        def dz_of(panel: DzPanel) -> None:
            parts = self._softplus_parts(panel, 3 if scaled else 1)
            options = {"VALUES": values, "COLUMNS": columns, "SCALED": scaled, "GRADS": True}
            self._softplus_panel(panel, (*weights, parts, self.flag), options)
            if values:
                add_parts(sums[panel.tile.rows], parts[:, 0])
            if scaled:
                by_scale, by_bias = parts[:, 1:].sum((0, 2), dtype=self.scale.dtype)
                self.scale += by_scale * self.inverse
                self.bias += by_bias

        return self.sweep(dz_of), sums

    def softplus_sums(self) -> tuple[Tensor, Tensor]:
        """Softplus sums of rows (N,) and of columns (M,), or (0,)."""
        self._softplus_head(torch.ones_like(self.head[0]))
        n, m, _ = self.pairs.shape
        columns = self.plan.columns
        rows, cols = self.head.new_zeros(n), self.head.new_zeros(m if columns else 0)

        def sums_of(panel: DzPanel) -> None:
            parts, (height, width) = self._softplus_parts(panel, 1), panel.dz.shape
            count = cdiv(height, self._softplus_size()[0].rows)
            col_part = rows.new_empty(count if columns else 0, width)
            options = {"VALUES": True, "COLUMNS": columns, "SCALED": False, "GRADS": False}
            self._softplus_panel(panel, (self.flag, self.flag, parts, col_part), options)
            add_parts(rows[panel.tile.rows], parts[:, 0])
            if columns:
                add_parts(cols[panel.tile.cols], col_part)

        self.sweep(sums_of)
        return rows, cols

    def _softplus_size(self) -> tuple[TileSize, bool]:
        """The tile, and whether all tiles of it are masked."""
        marked = self.pairs.row_ids is not None or self.pairs.kind in ("index", "label")
        tiles = self.ready.tiles
        return tiles.masked if marked else tiles.softplus, marked

    def _softplus_parts(self, panel: DzPanel, count: int) -> Tensor:
        """Row sums by column tile, of softplus or of dz too; see the kernel. (tiles, count, n)"""
        height, width = panel.dz.shape
        return self.head.new_empty(cdiv(width, self._softplus_size()[0].cols), count, height)

    def _softplus_panel(
        self, panel: DzPanel, args: tuple[Tensor, ...], options: dict[str, bool]
    ) -> None:
        """A panel whose negatives are all but a few pairs, and then those; or all at once."""
        size, marked = self._softplus_size()
        for masked, edges in ((True, False),) if marked else ((False, False), (True, True)):
            if edges and not _meets_an_edge(panel.tile, size):
                continue
            # Of scores in parts `hopper` does not round the sum, which softplus needs.
            gluon = None if self.split or masked or not options["GRADS"] else self.ready.gluon
            if gluon is not None:
                from tilewise.backends import hopper_dz

                self._launch_gluon(
                    hopper_dz.dz_of_softplus, gluon.softplus, panel, *args[:3],
                    **{name: options[name] for name in ("COLUMNS", "VALUES", "SCALED")},
                )  # fmt: skip
                continue
            self._launch(
                dz_kernels.dz_of_softplus, size, panel, *args, *self.ready.marks,
                pieces=4, MASKED=masked, EDGES=edges, WHOLE_AT=self.ready.rows.whole_at, **options,
                **self.ready.masks(),
            )  # fmt: skip

    def _softplus_head(self, peak: Tensor) -> None:
        scale = self.pairs.scale.to(self.head.dtype)
        zero = torch.zeros_like(scale)
        bias = zero if self.pairs.bias is None else self.pairs.bias.to(scale)
        factor = (scale * self.inverse).to(scale)
        parts = (zero, zero, factor, bias, zero, zero, peak, scale * peak)
        self.head.copy_(torch.stack(parts))


def _meets_an_edge(tile: Tile, size: TileSize) -> bool:
    """Whether a panel has pairs (i, i), or columns that do not fill its last tile."""
    return bool(tile.diagonal) or (tile.col_stop - tile.col_start) % size.cols != 0
