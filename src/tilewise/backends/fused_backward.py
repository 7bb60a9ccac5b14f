"""Launching the backward kernels: dz of a panel at a time, and the two products of it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.backends import dz as dz_kernels
from tilewise.backends import kernels, vectors
from tilewise.backends.blocks import narrow, row_spans, store
from tilewise.backends.convert import SPLIT
from tilewise.backends.fused_forward import BLOCK, make_ready
from tilewise.backends.plan import Grads, Needs, Plan
from tilewise.backends.tuning import TileSize
from tilewise.pairs import Pairs, exact_dtype
from tilewise.reductions import power_of_two
from tilewise.tiles import Tile, balanced, row_of_tiles, spans, upper_row_of_tiles

# fp16 has no room below 1e-8: dz is stored times this power of two, which leaves room for 8 above.
MULTIPLIER = {torch.float16: 4096.0}
PANEL_ROWS = 8192
# Of the workspace: what rounding a block of gradients and summing a panel's parts takes.
SPARE_BYTES = 2**24


class Panel(NamedTuple):
    """Rows against columns, and where their dz goes."""

    tile: Tile
    dz: Tensor  # (n, m), rows at multiples of 16 bytes
    rest: Tensor | None = None  # (n, m) likewise: what rounding dz took away, times REST


class Backward:
    """One sweep for gradients; with `gains` the rows of a gradient keep a power of two apart."""

    def __init__(
        self,
        pairs: Pairs,
        plan: Plan,
        needs: Needs,
        gains: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    ) -> None:
        self.pairs, self.plan, self.needs = pairs, plan, needs
        self.gains, self.ready = gains, make_ready(pairs, plan.precision)
        self.head = torch.empty(kernels.HEAD_SIZE, device=pairs.rows.device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=pairs.rows.device)
        # fp32 is split in two: its gradients are products of fp16.
        self.split = self.ready.rows.form == SPLIT.value
        self.dtype = torch.float16 if self.split else pairs.rows.dtype
        self.multiplier = MULTIPLIER.get(self.dtype, 1.0)
        units = self.ready.units
        # What products of tiles are too large by, inverted; a number where nothing is converted.
        self.inverse = 1.0 if units is None else units.double().prod().reciprocal()
        self.rows, self.acc = None, None
        if needs.rows and not pairs.symmetric:
            self.rows = pairs.rows.new_empty(pairs.rows.shape)
        if needs.rows if pairs.symmetric else needs.cols:
            make = self.head.new_zeros if pairs.symmetric else self.head.new_empty
            self.acc = make(pairs.columns.shape)
        self.acc_pointer = None if self.acc is None else self.acc.data_ptr()
        self.factors = (self.head[kernels.FACTOR.value],) * 2
        self.scale, self.bias = self.head.new_zeros(2, dtype=exact_dtype(pairs.rows))

    # Panels and products

    def sweep(self, dz_of: Callable[[Panel], None]) -> Grads:
        """Fill panel after panel with dz, and multiply."""
        height, width = self._panel_shape()
        n, m, d = self.pairs.shape
        area = min(height, n) * _padded(min(width, m))
        work = self.head.new_empty(2 if self.split else 1, area, dtype=self.dtype)
        self._spread_factor()
        row_acc = self.head.new_empty(min(height, n), d) if self.rows is not None else None
        for span in spans(n, height):
            rows = slice(*span)
            here = None if row_acc is None else row_acc[: span[1] - span[0]]
            if self.pairs.symmetric and self.acc is not None:
                here = self.acc[rows]
            for tile in self._tiles(span, width):
                panel = Panel(tile, *(_panel(part, tile) for part in work))
                dz_of(panel)
                self._multiply(panel, here)
            if self.rows is not None and here is not None:
                self._round(self.rows, rows, here, 0)
        return self._finish()

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
        size, room = self.pairs.rows.element_size(), self.plan.workspace_bytes
        room = max(room - SPARE_BYTES, room // 2)
        # Of every tile: one that reached into the next panel would count its pairs twice.
        unit = max(max(tile.rows, tile.cols) for tile in self.ready.tiles[1:])
        # Converted features lie beside dz: panels of rows, whose gradients do too, and of columns.
        row_bytes, col_bytes = (x.bytes_per_row for x in (self.ready.rows, self.ready.cols))
        if self.pairs.symmetric:
            side = balanced(n, _side(size, row_bytes + col_bytes, room), unit)
            return side, side
        row_bytes += 4 * d
        height = balanced(n, min(PANEL_ROWS, max(1, room // (2 * row_bytes))), unit)
        most = (room - row_bytes * height) // (size * height + col_bytes)
        return height, balanced(m, most, unit)

    def _multiply(self, panel: Panel, row_acc: Tensor | None) -> None:
        tile, symmetric = panel.tile, self.pairs.symmetric
        dz = tuple(part for part in panel[1:] if part is not None)
        if row_acc is not None:
            first = tile.col_start == 0 and not symmetric
            _add_products(row_acc, dz, self.ready.cols.parts(tile.cols), first)
        if self.acc is not None and not (symmetric and tile.row_start == tile.col_start):
            first = tile.row_start == 0 and not symmetric
            turned = tuple(part.t() for part in dz)
            _add_products(self.acc[tile.cols], turned, self.ready.rows.parts(tile.rows), first)

    def _round(self, out: Tensor, span: slice, acc: Tensor, side: int) -> None:
        """A finished block, rounded into a gradient that may lie in its own memory."""
        gain, factor = self.gains[side], self.factors[side]
        if gain is not None:
            store(out, span, acc * factor, gain)
        elif out.data_ptr() == self.acc_pointer:
            out[span] = torch.mul(acc, factor, out=torch.empty_like(out[span]))
        else:
            torch.mul(acc, factor, out=out[span])

    def _finish(self) -> Grads:
        cols = None
        if self.acc is not None:
            cols = narrow(self.acc, self.pairs.rows.dtype)
            for span in row_spans(self.acc):
                self._round(cols, span, self.acc[span], 1)
        sides = (cols, None) if self.pairs.symmetric else (self.rows, cols)
        peak = self.head[kernels.PEAK.value]
        return Grads(*sides, *((x * peak).to(self.pairs.dtype) for x in (self.scale, self.bias)))

    def _launch(
        self, kernel: Any, size: TileSize, panel: Panel, *args: Any, pieces: int = 2, **options: Any
    ) -> None:
        """A persistent kernel over the tiles of a panel."""
        tile, *parts = panel
        n, m, _ = self.pairs.shape
        height, width = tile.row_stop - tile.row_start, tile.col_stop - tile.col_start
        count = triton.cdiv(height, size.rows) * triton.cdiv(width, size.cols)
        block = [size.rows, size.cols // pieces]
        kernel[(min(count, size.programs * self.ready.processors),)](
            *self.ready.descriptors(size, tile),
            *(x if x is None else TensorDescriptor.from_tensor(x, block) for x in parts),
            self.head, *args, tile.row_start, tile.col_start, height, width, n, m,
            GROUP=size.group, **self.ready.product(size), **options,
        )  # fmt: skip

    # Log-sum-exp

    def log_sums(self, stats: tuple[Tensor, Tensor], upstream: tuple[Tensor, Tensor]) -> Grads:
        """Gradients of the stats of a log-sum-exp."""
        pairs, (n, m, _) = self.pairs, self.pairs.shape
        row_stats, d_rows = stats[0], upstream[0].contiguous()
        columns = upstream[1].numel() > 0
        col_stats, d_cols = (stats[1], upstream[1].contiguous()) if columns else (row_stats, d_rows)
        vectors.survey[(1,)](
            self.head, self.flag, row_stats, d_rows, col_stats, d_cols, pairs.scale,
            self.ready.units, n, m, MULTIPLIER=self.multiplier, SUMS=self.plan.sums,
            COLUMNS=columns, BLOCK=4096, num_warps=16,
        )  # fmt: skip
        both = columns or pairs.symmetric
        row_vectors, at_positive = self.head.new_empty(6, n), self.head.new_empty(n)
        col_vectors = row_vectors if not columns else self.head.new_empty(6, m)
        fixed = not self._marked()
        shared = {
            "KIND": self.ready.kind()["KIND"], "SUMS": self.plan.sums, "FIXED": fixed,
            "BLOCK": BLOCK,
        }  # fmt: skip
        vectors.gains[(triton.cdiv(n, BLOCK),)](
            self.head, self.flag, row_stats, d_rows, d_cols, self.ready.marks[0], row_vectors,
            at_positive, n, m, COLUMNS=both, **shared,
        )  # fmt: skip
        if columns:
            vectors.gains[(triton.cdiv(m, BLOCK),)](
                self.head, self.flag, col_stats, d_cols, d_rows, self.ready.marks[0], col_vectors,
                None, m, n, COLUMNS=both, **shared,
            )  # fmt: skip
        if self.needs.scale and pairs.kind in ("aligned", "index"):
            self._add_positives_to_scale(at_positive)
        taken = (row_vectors, col_vectors, at_positive)
        return self.sweep(lambda panel: self._log_sums_dz(panel, taken, both))

    def _marked(self) -> bool:
        """Whether pairs are told apart by more than their place, so that every tile has masks."""
        by_index = self.pairs.kind == "index" and self.needs.scale
        ids = self.pairs.row_ids is not None
        return self.pairs.kind == "label" or self.plan.sums or ids or by_index

    def _log_sums_dz(self, panel: Panel, taken: tuple[Tensor, ...], both: bool) -> None:
        row_vectors, col_vectors, at_positive = taken
        kind, tiles = self.ready.kind(), self.ready.tiles
        scaled, marked = self.needs.scale, self._marked()
        # Either kernel fills as many column tiles as it has; the rest stays 0.
        width = triton.cdiv(panel.dz.shape[1], min(tiles.dz.cols, tiles.marked.cols))
        parts = self.head.new_zeros(width if scaled else 0, panel.dz.shape[0])
        flags = {"COLUMNS": both, "SCALED": scaled}
        if not marked:
            self._launch(
                dz_kernels.dz_of_sums, tiles.dz, panel, self.flag, row_vectors[0], col_vectors[0],
                parts, KIND=kind["KIND"], SELF=kind["SELF"], **flags,
            )  # fmt: skip
        self._launch(
            dz_kernels.dz_of_marked, tiles.marked, panel, self.flag, row_vectors, col_vectors,
            parts, *self.ready.marks, SUMS=self.plan.sums, ON_FLAG=not marked, **flags, **kind,
        )  # fmt: skip
        tile = panel.tile
        if scaled:
            self._add_to_scale(tile, parts)
        if self.pairs.kind == "aligned" and not tile.diagonal:
            return
        vectors_kind = {"KIND": kind["KIND"], "SELF": kind["SELF"]}
        dz_kernels.mend[(triton.cdiv(panel.dz.shape[0], BLOCK),)](
            *panel[1:], panel.dz.stride(0), self.ready.marks[0], at_positive, tile.row_start,
            tile.col_start, *panel.dz.shape, BLOCK=BLOCK, **vectors_kind,
        )  # fmt: skip

    def _add_to_scale(self, tile: Tile, parts: Tensor) -> None:
        """Sums (column tiles, n) of dz times the products of features."""
        diagonal = self.pairs.symmetric and tile.row_start == tile.col_start
        share = self.inverse * (0.5 if diagonal else 1.0)
        self.scale += parts.sum(0).to(self.scale.dtype).sum() * share

    def _add_positives_to_scale(self, at_positive: Tensor) -> None:
        """What the positives' dz adds to the scale's gradient, outside of the tiles."""
        (n, m, _), index = self.pairs.shape, self.ready.marks[0]
        norm, dot = self.head.new_empty(2, n)
        self.ready.measure(norm, dot)
        some = torch.arange(n, device=index.device) < m
        if self.pairs.positives is not None:
            some = (index >= 0) & (index < m)
            if self.pairs.skip_self:
                some &= index != torch.arange(n, device=index.device)
        # A symmetric pair stands twice among the rows, with the weight of both its ends each time.
        share = 0.5 if self.pairs.symmetric else 1.0
        self.scale += share * torch.where(some, at_positive.double() * dot, 0.0).sum()

    # Softplus

    def softplus(self, upstream: tuple[Tensor, Tensor], values: bool) -> tuple[Grads, Tensor]:
        """Gradients of softplus sums under weights, and if wanted the sums of rows themselves."""
        peak = torch.stack([side.abs().max() for side in upstream if side.numel()]).max()
        peak = power_of_two(peak) / self.multiplier
        self._softplus_head(peak)
        columns = upstream[1].numel() > 0
        weights = [side[0] / peak if side.numel() else self.flag for side in upstream]
        sums = self.head.new_zeros(self.pairs.shape[0] if values else 0)
        scaled = self.needs.scale or self.needs.bias

        def dz_of(panel: Panel) -> None:
            parts = self._softplus_parts(panel, 3 if scaled else 1)
            options = {"VALUES": values, "COLUMNS": columns, "SCALED": scaled, "GRADS": True}
            self._softplus_panel(panel, (*weights, parts, self.flag), options)
            if values:
                sums[panel.tile.rows] += parts[0].sum(0)
            if scaled:
                by_scale, by_bias = parts[1:].sum(1).to(self.scale.dtype).sum(1)
                self.scale += by_scale * self.inverse
                self.bias += by_bias

        return self.sweep(dz_of), sums

    def softplus_sums(self) -> tuple[Tensor, Tensor]:
        """Softplus sums of rows (N,) and of columns (M,), or (0,)."""
        self._softplus_head(torch.ones_like(self.head[0]))
        n, m, _ = self.pairs.shape
        columns = self.plan.columns
        rows, cols = self.head.new_zeros(n), self.head.new_zeros(m if columns else 0)

        def sums_of(panel: Panel) -> None:
            parts, (height, width) = self._softplus_parts(panel, 1), panel.dz.shape
            count = triton.cdiv(height, self._softplus_size()[0].rows)
            col_part = rows.new_empty(count if columns else 0, width)
            options = {"VALUES": True, "COLUMNS": columns, "SCALED": False, "GRADS": False}
            self._softplus_panel(panel, (self.flag, self.flag, parts, col_part), options)
            rows[panel.tile.rows] += parts[0].sum(0)
            if columns:
                cols[panel.tile.cols] += col_part.sum(0)

        self.sweep(sums_of)
        return rows, cols

    def _softplus_size(self) -> tuple[TileSize, bool]:
        """The tile, and whether all tiles of it are masked."""
        marked = self.pairs.row_ids is not None or self.pairs.kind in ("index", "label")
        return self.ready.tiles.masked if marked else self.ready.tiles.softplus, marked

    def _softplus_parts(self, panel: Panel, count: int) -> Tensor:
        """Row sums by column tile, of softplus or of dz too; see the kernel. (count, tiles, n)"""
        height, width = panel.dz.shape
        return self.head.new_empty(count, triton.cdiv(width, self._softplus_size()[0].cols), height)

    def _softplus_panel(
        self, panel: Panel, args: tuple[Tensor, ...], options: dict[str, bool]
    ) -> None:
        """A panel whose negatives are all but a few pairs, and then those; or all at once."""
        size, marked = self._softplus_size()
        for masked, edges in ((True, False),) if marked else ((False, False), (True, True)):
            if edges and not _meets_an_edge(panel.tile, size):
                continue
            self._launch(
                dz_kernels.dz_of_softplus, size, panel, *args, *self.ready.marks,
                pieces=4, MASKED=masked, EDGES=edges, **options, **self.ready.kind(),
            )  # fmt: skip

    def _softplus_head(self, peak: Tensor) -> None:
        scale = self.pairs.scale.to(self.head.dtype)
        zero = torch.zeros_like(scale)
        bias = zero if self.pairs.bias is None else self.pairs.bias.to(scale)
        factor = (scale * self.inverse).to(scale)
        parts = (zero, zero, factor, bias, zero, zero, peak, scale * peak, zero)
        self.head.copy_(torch.stack(parts))


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


def _meets_an_edge(tile: Tile, size: TileSize) -> bool:
    """Whether a panel has pairs (i, i), or columns that do not fill its last tile."""
    return bool(tile.diagonal) or (tile.col_stop - tile.col_start) % size.cols != 0


def _padded(width: int) -> int:
    """Numbers of 2 bytes from one row of dz to the next: a multiple of 16 bytes."""
    return -(-width // 8) * 8


def _panel(work: Tensor, tile: Tile) -> Tensor:
    """A panel of the workspace, its rows at multiples of 16 bytes."""
    n, m = tile.row_stop - tile.row_start, tile.col_stop - tile.col_start
    return work[: n * _padded(m)].view(n, _padded(m))[:, :m]


def _side(pair_bytes: int, row_bytes: int, room: int) -> int:
    """The largest side of a square of pairs, with something for each of its rows, in `room`."""
    half = row_bytes / (2 * pair_bytes)
    return int((half**2 + room / pair_bytes) ** 0.5 - half)


def _add_products(
    acc: Tensor, dz: tuple[Tensor, ...], features: tuple[Tensor, ...], first: bool
) -> None:
    """acc += dz @ features, or = where it is the first; small terms first where both are split."""
    if len(dz) == 2:
        _add_product(acc, dz[0], features[1], first)
        _add_product(acc, dz[1], features[0], False, 1 / dz_kernels.REST.value)
        first = False
    _add_product(acc, dz[0], features[0], first)


def _add_product(acc: Tensor, a: Tensor, b: Tensor, first: bool, alpha: float = 1.0) -> None:
    """acc += alpha a @ b, or = a @ b where it is the first: in fp32, whatever the inputs' dtype."""
    if not acc.is_cuda or torch.version.hip:
        a, b, beta = a.to(acc.dtype), b.to(acc.dtype), 0.0 if first else 1.0
        torch.addmm(acc, a, b, beta=beta, alpha=alpha, out=acc)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=acc)
    else:
        torch.addmm(acc, a, b, out_dtype=torch.float32, alpha=alpha, out=acc)
