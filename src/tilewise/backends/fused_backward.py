"""Launching the backward kernels: dz of a panel at a time, and the two products of it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tilewise.backends import dz as dz_kernels
from tilewise.backends import fused, kernels, vectors
from tilewise.backends.blocks import narrow, store
from tilewise.backends.convert import SPLIT
from tilewise.backends.fused import SPARE_BYTES
from tilewise.backends.fused_forward import BLOCK, pulls
from tilewise.backends.plan import Grads, Needs, Plan, Swept
from tilewise.backends.products import (
    DzPanel,
    add_product,
    add_products,
    cut,
    doubling,
    piece,
    round_into,
    side_of_square,
)
from tilewise.backends.ready import make_ready
from tilewise.backends.tuning import TileSize, panel_for
from tilewise.pairs import Pairs, exact_dtype
from tilewise.tiles import Tile, balanced, cdiv, padded, row_of_tiles, spans, upper_row_of_tiles

# fp16 has no room below 1e-8: dz is stored times this power of two, which leaves room for 8 above.
MULTIPLIER = {torch.float16: 4096.0}


class Backward:
    """One sweep for gradients; with `gains` the rows of a gradient keep a power of two apart.

    Those of rows are added to `into` (N, D), float32, where it is given.
    """

    def __init__(
        self,
        pairs: Pairs,
        plan: Plan,
        needs: Needs,
        gains: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
        into: Tensor | None = None,
    ) -> None:
        self.pairs, self.plan, self.needs = pairs, plan, needs
        self.gains, self.into = gains, into
        self.ready = make_ready(pairs, plan.precision)
        self.head = pairs.rows.new_empty(kernels.HEAD_SIZE, dtype=torch.float32)
        self.flag = self.head.new_empty(1)
        # fp32 is split in two: its gradients are products of fp16.
        self.split = self.ready.rows.form == SPLIT.value
        self.dtype = torch.float16 if self.split else pairs.rows.dtype
        self.multiplier = MULTIPLIER.get(self.dtype, 1.0)
        units = self.ready.units
        # What products of tiles are too large by, inverted; a number where nothing is converted.
        self.inverse = 1.0 if units is None else units.double().prod().reciprocal()
        self.rows, self.acc = None, None
        if needs.rows and not pairs.symmetric:
            self.rows = into
            if into is None:
                self.rows = pairs.rows.new_empty(pairs.rows.shape, dtype=self._grad_dtype)
        if needs.rows if pairs.symmetric else needs.cols:
            make = self.head.new_zeros if pairs.symmetric else self.head.new_empty
            self.acc = make(pairs.columns.shape)
        self.acc_pointer = None if self.acc is None else self.acc.data_ptr()
        self.factors = (self.head[kernels.FACTOR.value],) * 2
        make = self.head.new_zeros if needs.scale or needs.bias else self.head.new_empty
        self.scale, self.bias = make(2, dtype=exact_dtype(pairs.rows))
        self.kept = pairs.rows.new_empty(0)  # exponentials of the first rows, to become their dz

    # Panels and products

    def sweep(self, dz_of: Callable[[DzPanel], None]) -> Grads:
        """Fill panel after panel with dz, and multiply."""
        height, width = self._panel_shape()
        n, m, d = self.pairs.shape
        kept = len(self.kept)
        area = min(height, n) * padded(min(width, m), 8) if kept < n else 0
        work = self.head.new_empty(2 if self.split else 1, area, dtype=self.dtype)
        self._spread_factor()
        row_acc = self.head.new_empty(min(height, n), d) if self.rows is not None else None
        self._sweep_kept(dz_of, row_acc)
        for span in ((kept + start, kept + stop) for start, stop in spans(n - kept, height)):
            rows = slice(*span)
            here = None if row_acc is None else row_acc[: span[1] - span[0]]
            if self.pairs.symmetric and self.acc is not None:
                here = self.acc[rows]
            for tile in self._tiles(span, width):
                panel = DzPanel(tile, *(cut(part, tile) for part in work))
                dz_of(panel)
                self._add_to_rows(panel, here)
                if self.rows is not None and here is not None and tile.col_stop == m:
                    # At once, while the cache has them.
                    self._round(self.rows, rows, here, 0)
                self._add_to_cols(panel)
        return self._finish()

    def _sweep_kept(self, dz_of: Callable[[DzPanel], None], row_acc: Tensor | None) -> None:
        """The rows whose exponentials were kept: dz takes their place, and products are large."""
        (_, m, _), kept = self.pairs.shape, self.kept
        # Wide panels are few launches, but what is summed up for the scale would grow with them.
        width = fused.CHUNK if self.needs.scale else 4 * fused.CHUNK
        for span in spans(len(kept), fused.CHUNK):
            for tile in row_of_tiles(span, m, width):
                dz_of(DzPanel(tile, kept[tile.rows, tile.cols]))
        if row_acc is not None and self.rows is not None:
            for span in spans(len(kept), len(row_acc)):
                here = row_acc[: span[1] - span[0]]
                add_product(here, kept[slice(*span)], self.pairs.columns, True)
                self._round(self.rows, slice(*span), here, 0)
        if len(kept) and self.acc is not None:
            add_product(self.acc, kept.t(), self.pairs.rows[: len(kept)], True)

    def _spread_factor(self) -> None:
        """Rows are products with the columns as they are converted, columns with the rows."""
        if self.split and self.ready.units is not None:
            rows, cols = self.ready.units
            self.factors = self.factors[0] / cols, self.factors[1] / rows

    def _tiles(self, span: tuple[int, int], width: int) -> Iterator[Tile]:
        n, m, _ = self.pairs.shape
        return upper_row_of_tiles(span, n) if self.pairs.symmetric else row_of_tiles(span, m, width)

    def _panel_shape(self) -> tuple[int, int]:
        """As large as the workspace allows beside the panel's row gradients, in equal pieces."""
        n, m, d = self.pairs.shape
        size, room = self.pairs.rows.element_size(), fused.panel_bytes(self.plan)
        # Of every tile: one that reached into the next panel would count its pairs twice.
        unit = max(max(tile.rows, tile.cols) for tile in self.ready.tiles[1:])
        # Converted features lie beside dz: panels of rows, whose gradients do too, and of columns.
        row_bytes, col_bytes = (x.bytes_per_row for x in (self.ready.rows, self.ready.cols))
        if self.pairs.symmetric:
            side = balanced(n, side_of_square(size, row_bytes + col_bytes, room), unit)
            return side, side
        row_bytes += 4 * d
        rows, cols = panel_for(d, self.split)
        height = piece(n, rows, room // (2 * row_bytes), unit)
        most = (room - row_bytes * height) // (size * height + col_bytes)
        return height, piece(m, cols, most, unit)

    def _add_to_rows(self, panel: DzPanel, row_acc: Tensor | None) -> None:
        """Add dz times the columns to the gradient of the panel's rows."""
        if row_acc is None:
            return
        first = panel.tile.col_start == 0 and not self.pairs.symmetric
        features = self.ready.cols.parts(panel.tile.cols)
        add_products(self.ready, row_acc, panel.parts, features, turned=False, first=first)

    def _add_to_cols(self, panel: DzPanel) -> None:
        """Add dz, turned, times the rows to the gradient of the panel's columns."""
        tile, symmetric = panel.tile, self.pairs.symmetric
        if self.acc is None or (symmetric and tile.row_start == tile.col_start):
            return
        acc, features = self.acc[tile.cols], self.ready.rows.parts(tile.rows)
        first = tile.row_start == 0 and not symmetric
        add_products(self.ready, acc, panel.parts, features, turned=True, first=first)

    def _round(self, out: Tensor, span: slice, acc: Tensor, side: int) -> None:
        """A finished block, rounded into a gradient that may lie in its own memory."""
        gain, factor = self.gains[side], self.factors[side]
        if gain is not None:
            # In pieces: three copies of one fit into what is spare.
            for start, stop in spans(len(acc), 1 + SPARE_BYTES // (16 * acc.shape[1])):
                here = slice(span.start + start, span.start + stop)
                store(out, here, acc[start:stop] * factor, gain)
        elif self._overwrites(out) and span.stop > 2 * span.start:
            # The block would be overwritten while it is read.
            out[span] = round_into(torch.empty_like(out[span]), acc, factor)
        else:
            round_into(out[span], acc, factor, add=out is self.into)

    @property
    def _grad_dtype(self) -> torch.dtype:
        return torch.float32 if self.plan.wide else self.pairs.rows.dtype

    def _overwrites(self, out: Tensor) -> bool:
        """Whether a gradient lies in the accumulator's memory, and not number by number."""
        return out.data_ptr() == self.acc_pointer and out.dtype != torch.float32

    def _finish(self) -> Grads:
        cols = None
        if self.acc is not None:
            cols = self._narrowed(self.acc)
        sides = (cols, None) if self.pairs.symmetric else (self.rows, cols)
        wanted = zip((self.scale, self.bias), (self.needs.scale, self.needs.bias), strict=True)
        peak, dtype = self.head[kernels.PEAK.value], self.pairs.dtype
        return Grads(
            *sides,
            *((x * peak).to(dtype) if needed else x.new_empty((), dtype=dtype)
              for x, needed in wanted),
        )  # fmt: skip

    def _narrowed(self, acc: Tensor) -> Tensor:
        """The accumulator, rounded: in memory of its own where that is little, else in its own."""
        dtype, whole = self._grad_dtype, slice(0, len(acc))
        if acc.numel() * dtype.itemsize <= SPARE_BYTES and acc.dtype != dtype:
            out = torch.empty_like(acc, dtype=dtype)
            self._round(out, whole, acc, 1)
            return out
        out = narrow(acc, dtype)
        # Few, but for the first one none so large that it would overwrite itself.
        for span in doubling(len(acc), 1 + SPARE_BYTES // (4 * acc.shape[1])):
            self._round(out, span, acc[span], 1)
        return out

    def _launch(
        self, kernel: Any, size: TileSize, panel: DzPanel, *args: Any, pieces: int = 2,
        on_flag: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        """A persistent kernel over the tiles of a panel; `on_flag`, if the flag is up."""
        tile, *parts = panel
        n, m, _ = self.pairs.shape
        height, width = tile.row_stop - tile.row_start, tile.col_stop - tile.col_start
        count = cdiv(height, size.rows) * cdiv(width, size.cols)
        kernel[(min(count, size.programs * self.ready.processors),)](
            *self.ready.loads(size, tile, self.flag if on_flag else None),
            *(x if x is None else self.ready.tiled(x, size.rows, size.cols // pieces)
              for x in parts),
            self.head, *args, tile.row_start, tile.col_start, height, width, n, m,
            GROUP=size.group, **self.ready.product(size), **options,
        )  # fmt: skip

    def _launch_gluon(
        self, kernel: Any, size: TileSize, panel: DzPanel, *args: Any, **options: Any
    ) -> None:
        """A kernel of `hopper` over the tiles of a panel."""
        tile, *parts = panel
        (n, m, _), (height, width) = self.pairs.shape, panel.dz.shape
        steps = cdiv(height, 2 * size.rows) * cdiv(width, size.cols)
        share = cdiv(steps, max(1, self.ready.processors // size.group))
        kernel[(size.group * cdiv(steps, share),)](
            *self.ready.gluon_loads(size, tile, *parts), self.head, *args, tile.row_start,
            tile.col_start, height, width, n, m, share, **self.ready.gluon_options(size), **options,
        )  # fmt: skip

    # Log-sum-exp

    def log_sums(self, swept: Swept, upstream: tuple[Tensor, Tensor]) -> Grads:
        """Gradients of the stats of a log-sum-exp."""
        pairs, (n, m, _) = self.pairs, self.pairs.shape
        row_stats, d_rows = swept.rows, upstream[0].contiguous()
        columns = upstream[1].numel() > 0
        col_stats, d_cols = (row_stats, d_rows)
        if columns:
            col_stats, d_cols = swept.cols, upstream[1].contiguous()
        # What was swept without a fixed offset has none to go by: 0, and the flag is up.
        memo = swept.memo
        if not memo.numel():
            memo = torch.arange(2, dtype=self.head.dtype, device=self.head.device)
        self.flag = memo[1:2]
        if len(swept.kept):
            # In the features' dtype from now on, which is as wide.
            self.kept = swept.kept.view(pairs.rows.dtype)[:, :m]
        vectors.survey[(1,)](
            self.head, memo, d_rows, d_cols, pairs.scale, self.ready.units, n, m,
            MULTIPLIER=self.multiplier, SUMS=self.plan.sums, COLUMNS=columns, BLOCK=8192,
            num_warps=16,
        )  # fmt: skip
        both = columns or pairs.symmetric
        row_vectors, at_positive = self.head.new_empty(6, n), self.head.new_empty(n)
        col_vectors = row_vectors if not columns else self.head.new_empty(6, m)
        fixed = fused.has_offset(pairs, self.plan)
        vectors.gains[(cdiv(max(n, m) if columns else n, BLOCK), 2 if columns else 1)](
            self.head, self.flag, row_stats, d_rows, row_vectors, at_positive, col_stats, d_cols,
            col_vectors, self.ready.marks[0], n, m, KIND=self.ready.kind()["KIND"],
            SUMS=self.plan.sums, COLUMNS=both, FIXED=fixed, BLOCK=BLOCK,
        )  # fmt: skip
        if self.needs.scale and pairs.kind in ("aligned", "index"):
            self._add_positives_to_scale(at_positive)
        if self.needs.scale and len(self.kept):
            self._add_kept_to_scale(memo, row_vectors[0], col_vectors[0] if both else None)
        taken = (row_vectors, col_vectors, at_positive)
        return self.sweep(lambda panel: self._log_sums_dz(panel, taken, both))

    @property
    def _masks(self) -> bool:
        """Whether pairs are told apart by more than their place, so that every tile has masks."""
        by_index = self.pairs.kind == "index" and self.needs.scale
        ids = self.pairs.row_ids is not None
        return ids or by_index or not fused.has_offset(self.pairs, self.plan)

    def _log_sums_dz(self, panel: DzPanel, taken: tuple[Tensor, ...], both: bool) -> None:
        row_vectors, col_vectors, at_positive = taken
        kind, tiles, scaled = self.ready.kind(), self.ready.tiles, self.needs.scale
        flags = {"COLUMNS": both, "SCALED": scaled}
        tile, kept = panel.tile, panel.tile.row_stop <= len(self.kept)
        gluon = None if kept or self._masks else self.ready.gluon
        parts = self._scale_parts(panel, gluon and gluon.dz)
        if kept:
            self._kept_dz(panel, row_vectors[0], col_vectors[0], both)
        elif gluon is not None:
            from tilewise.backends import hopper_dz

            aligned = self.pairs.skip_self or self.pairs.kind == "aligned"
            self._launch_gluon(
                hopper_dz.dz_of_sums, gluon.dz, panel, self.flag, row_vectors, col_vectors, parts,
                DIAGONAL=aligned, **flags,
            )  # fmt: skip
        elif not self._masks:
            self._launch(
                dz_kernels.dz_of_sums, tiles.dz, panel, self.flag, row_vectors[0], col_vectors[0],
                parts, **flags, **kind,
            )  # fmt: skip
        # The kernel of `hopper` needs no second one for where the flag is up.
        if gluon is None:
            on_flag = kept or not self._masks
            self._launch(
                dz_kernels.dz_of_marked, tiles.marked, panel, self.flag, row_vectors, col_vectors,
                parts, *self.ready.marks, SUMS=self.plan.sums, ON_FLAG=on_flag, on_flag=on_flag,
                **flags, **self.ready.masks(),
            )  # fmt: skip
        if scaled:
            self._add_to_scale(tile, parts)
        if self.pairs.kind == "aligned" and not tile.diagonal:
            return
        dz_kernels.mend[(cdiv(panel.dz.shape[0], BLOCK),)](
            *panel[1:], panel.dz.stride(0), self.ready.marks[0], at_positive, tile.row_start,
            tile.col_start, *panel.dz.shape, BLOCK=BLOCK, **kind,
        )  # fmt: skip

    def _scale_parts(self, panel: DzPanel, size: TileSize | None) -> Tensor:
        """What tiles add to the scale's gradient (column tiles, n): of one kernel, or of any."""
        height, width = panel.dz.shape
        if not self.needs.scale:
            return self.head.new_empty(0, height)
        if size is not None:
            return self.head.new_empty(cdiv(width, size.cols), height)
        # Either kernel fills as many column tiles as it has; the rest stays 0.
        tiles = self.ready.tiles
        return self.head.new_zeros(cdiv(width, min(tiles.dz.cols, tiles.marked.cols)), height)

    def _kept_dz(self, panel: DzPanel, row_gain: Tensor, col_gain: Tensor, both: bool) -> None:
        tile, dz, _ = panel
        n, m = dz.shape
        dz_kernels.dz_of_kept[(cdiv(m, 1024), cdiv(n, 16))](
            dz.view(torch.int16), dz, dz.stride(0), self.flag, row_gain, col_gain,
            tile.row_start, tile.col_start, n, m, COLUMNS=both, TN=16, TM=1024, num_warps=8,
        )  # fmt: skip

    def _add_kept_to_scale(self, memo: Tensor, row_gain: Tensor, col_gain: Tensor | None) -> None:
        """What kept exponentials pull, as the forward summed it up, unless they are no good."""
        row_pull, col_pull = pulls(memo, len(self.kept))
        assert len(row_pull) == len(self.kept), "plan.wants_scale must say that d_scale is wanted"
        pull = (row_gain[: len(row_pull)].double() * row_pull).sum()
        if col_gain is not None:
            pull = pull + (col_gain.double() * col_pull).sum()
        self.scale += torch.where(self.flag[0] == 0, pull * self.inverse, 0.0)

    def _add_to_scale(self, tile: Tile, parts: Tensor) -> None:
        """Sums (column tiles, n) of dz times the products of features."""
        diagonal = self.pairs.symmetric and tile.row_start == tile.col_start
        found = parts.sum(dtype=self.scale.dtype)
        if isinstance(self.inverse, Tensor):
            found *= self.inverse
        self.scale.add_(found, alpha=0.5 if diagonal else 1.0)

    def _add_positives_to_scale(self, at_positive: Tensor) -> None:
        """What the positives' dz adds to the scale's gradient, outside of the tiles."""
        (n, m, _), index = self.pairs.shape, self.ready.marks[0]
        norm, dot = self.head.new_empty(2, n)
        self.ready.measure(norm, dot)
        pull = at_positive.double() * dot
        if self.pairs.positives is not None:
            some = (index >= 0) & (index < m)
            if self.pairs.skip_self:
                some &= index != torch.arange(n, device=index.device)
            pull = torch.where(some, pull, 0.0)
        else:
            pull = pull[:m]  # aligned
        # A symmetric pair stands twice among the rows, with the weight of both its ends each time.
        self.scale.add_(pull.sum(), alpha=0.5 if self.pairs.symmetric else 1.0)


class Means(Backward):
    """Mean columns (N, D) in fp32, and their products with the rows (N,); see `attend`."""

    def __init__(self, pairs: Pairs, plan: Plan) -> None:
        super().__init__(pairs, plan, Needs(True, False, True, False))
        self.rows = self.mean = self.head.new_empty(pairs.rows.shape)
        self.product = self.head.new_zeros(pairs.shape[0])
        # Not times the scale.
        self.factors = (self.head[kernels.PEAK.value],) * 2

    def _add_to_scale(self, tile: Tile, parts: Tensor) -> None:
        peak = self.head[kernels.PEAK.value]
        self.product[tile.rows] += parts.sum(0) * (peak * self.inverse)
