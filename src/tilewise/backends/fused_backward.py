"""Launching the backward kernels: dz of a panel at a time, and the two products of it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.backends import dz as dz_kernels
from tilewise.backends import fused, hopper, kernels, vectors
from tilewise.backends.blocks import narrow, store
from tilewise.backends.fused_forward import BLOCK, make_ready, pulls
from tilewise.backends.plan import Grads, Needs, Plan, Swept
from tilewise.backends.tuning import PANEL, TileSize
from tilewise.pairs import Pairs, exact_dtype
from tilewise.reductions import power_of_two
from tilewise.tiles import Tile, balanced, row_of_tiles, spans, upper_row_of_tiles

# fp16 has no room below 1e-8: dz is stored times this power of two, which leaves room for 8 above.
MULTIPLIER = {torch.float16: 4096.0}
# Of the workspace: what rounding a block of gradients and summing a panel's parts takes.
SPARE_BYTES = 2**24


class Panel(NamedTuple):
    """Rows against columns, and where their dz goes."""

    tile: Tile
    dz: Tensor  # (n, m), rows at multiples of 16 bytes


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
        self.gains, self.ready = gains, make_ready(pairs)
        self.head = torch.empty(kernels.HEAD_SIZE, device=pairs.rows.device)
        self.flag = self.head.new_zeros(1)
        self.multiplier = MULTIPLIER.get(pairs.rows.dtype, 1.0)
        self.rows, self.acc = None, None
        if needs.rows and not pairs.symmetric:
            self.rows = pairs.rows.new_empty(pairs.rows.shape)
        if needs.rows if pairs.symmetric else needs.cols:
            make = self.head.new_zeros if pairs.symmetric else self.head.new_empty
            self.acc = make(pairs.columns.shape)
        self.acc_pointer = None if self.acc is None else self.acc.data_ptr()
        self.factor = self.head[kernels.FACTOR.value]
        self.scale, self.bias = self.head.new_zeros(2, dtype=exact_dtype(pairs.rows))
        self.kept = pairs.rows.new_empty(0)  # exponentials of the first rows, to become their dz

    # Panels and products

    def sweep(self, dz_of: Callable[[Panel], None]) -> Grads:
        """Fill panel after panel with dz, and multiply."""
        height, width = self._panel_shape()
        n, m, d = self.pairs.shape
        unit = 16 // self.pairs.rows.element_size()
        work = self.pairs.rows.new_empty(min(height, n) * (-(-min(width, m) // unit) * unit))
        row_acc = self.head.new_empty(min(height, n), d) if self.rows is not None else None
        self._sweep_kept(dz_of, row_acc)
        kept = len(self.kept)
        for span in ((kept + start, kept + stop) for start, stop in spans(n - kept, height)):
            rows = slice(*span)
            here = None if row_acc is None else row_acc[: span[1] - span[0]]
            if self.pairs.symmetric and self.acc is not None:
                here = self.acc[rows]
            for tile in self._tiles(span, width):
                panel = Panel(tile, _panel(work, tile, unit))
                dz_of(panel)
                self._multiply(panel, here)
            if self.rows is not None and here is not None:
                self._round(self.rows, rows, here, self.gains[0])
        return self._finish()

    def _sweep_kept(self, dz_of: Callable[[Panel], None], row_acc: Tensor | None) -> None:
        """The rows whose exponentials were kept: dz takes their place, and products are large."""
        (_, m, _), kept = self.pairs.shape, self.kept
        for span in spans(len(kept), fused.CHUNK):
            for tile in row_of_tiles(span, m, fused.CHUNK):
                dz_of(Panel(tile, kept[tile.rows, tile.cols]))
        if row_acc is not None and self.rows is not None:
            for span in spans(len(kept), len(row_acc)):
                here = row_acc[: span[1] - span[0]]
                _add_product(here, kept[slice(*span)], self.ready.cols, True)
                self._round(self.rows, slice(*span), here, self.gains[0])
        if len(kept) and self.acc is not None:
            _add_product(self.acc, kept.t(), self.ready.rows[: len(kept)], True)

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
        if self.pairs.symmetric:
            side = balanced(n, int((room / size) ** 0.5), unit)
            return side, side
        height = _piece(n, PANEL[0], room // (8 * d), unit)
        return height, _piece(m, PANEL[1], (room - 4 * height * d) // (size * height), unit)

    def _multiply(self, panel: Panel, row_acc: Tensor | None) -> None:
        tile, dz = panel
        symmetric = self.pairs.symmetric
        if row_acc is not None:
            first = tile.col_start == 0 and not symmetric
            _add_product(row_acc, dz, self.ready.cols[tile.cols], first)
        if self.acc is not None and not (symmetric and tile.row_start == tile.col_start):
            first = tile.row_start == 0 and not symmetric
            _add_product(self.acc[tile.cols], dz.t(), self.ready.rows[tile.rows], first)

    def _round(self, out: Tensor, span: slice, acc: Tensor, gain: Tensor | None) -> None:
        """A finished block, rounded into a gradient that may lie in its own memory."""
        if gain is not None:
            store(out, span, acc * self.factor, gain)
        elif out.data_ptr() == self.acc_pointer and span.stop > 2 * span.start:
            # The block would be overwritten while it is read.
            out[span] = _scaled(torch.empty_like(out[span]), acc, self.factor)
        else:
            _scaled(out[span], acc, self.factor)

    def _finish(self) -> Grads:
        cols = None
        if self.acc is not None:
            cols = narrow(self.acc, self.pairs.rows.dtype)
            for span in _doubling(len(cols), 1 + SPARE_BYTES // (4 * self.pairs.shape[2])):
                self._round(cols, span, self.acc[span], self.gains[1])
        sides = (cols, None) if self.pairs.symmetric else (self.rows, cols)
        peak = self.head[kernels.PEAK.value]
        return Grads(*sides, *((x * peak).to(self.pairs.dtype) for x in (self.scale, self.bias)))

    def _launch(
        self, kernel: Any, size: TileSize, panel: Panel, *args: Any, pieces: int = 2, **options: Any
    ) -> None:
        """A persistent kernel over the tiles of a panel."""
        tile, dz = panel
        n, m, _ = self.pairs.shape
        height, width = tile.row_stop - tile.row_start, tile.col_stop - tile.col_start
        count = triton.cdiv(height, size.rows) * triton.cdiv(width, size.cols)
        kernel[(min(count, size.programs * self.ready.processors),)](
            *self.ready.descriptors(size, tile),
            TensorDescriptor.from_tensor(dz, [size.rows, size.cols // pieces]),
            self.head, *args, tile.row_start, tile.col_start, height, width, n, m,
            GROUP=size.group, **self.ready.product(size), **options,
        )  # fmt: skip

    def _launch_in_turn(
        self, kernel: Any, size: TileSize, panel: Panel, *args: Any, **options: Any
    ) -> None:
        """A kernel of `hopper` over the tiles of a panel."""
        tile, dz = panel
        n, m, d = self.pairs.shape
        kernel[(self.ready.processors,)](
            *self.ready.in_turn(size, tile, dz), self.head, *args, tile.row_start, tile.col_start,
            *dz.shape, n, m, D=d, STAGES=size.stages, GROUP=size.group, num_warps=4, **options,
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
        # What was swept without a fixed offset has none to go by.
        memo = swept.memo if swept.memo.numel() else self.head.new_tensor([0.0, 1.0])
        self.flag = memo[1:2]
        if len(swept.kept):
            # In the features' dtype from now on, which is as wide.
            self.kept = swept.kept.view(pairs.rows.dtype)[:, :m]
        vectors.survey[(1,)](
            self.head, memo, d_rows, d_cols, pairs.scale, n, m, MULTIPLIER=self.multiplier,
            SUMS=self.plan.sums, COLUMNS=columns, BLOCK=4096, num_warps=16,
        )  # fmt: skip
        both = columns or pairs.symmetric
        row_vectors, at_positive = self.head.new_empty(6, n), self.head.new_empty(n)
        col_vectors = row_vectors if not columns else self.head.new_empty(6, m)
        fixed = fused.has_offset(pairs, self.plan)
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
        if self.needs.scale and len(self.kept):
            self._add_kept_to_scale(memo, row_vectors[0], col_vectors[0] if both else None)
        taken = (row_vectors, col_vectors, at_positive)
        return self.sweep(lambda panel: self._log_sums_dz(panel, taken, both))

    def _marked(self) -> bool:
        """Whether pairs are told apart by more than their place, so that every tile has masks."""
        by_index = self.pairs.kind == "index" and self.needs.scale
        ids = self.pairs.row_ids is not None
        return ids or by_index or not fused.has_offset(self.pairs, self.plan)

    def _log_sums_dz(self, panel: Panel, taken: tuple[Tensor, ...], both: bool) -> None:
        row_vectors, col_vectors, at_positive = taken
        kind, tiles = self.ready.kind(), self.ready.tiles
        scaled, marked = self.needs.scale, self._marked()
        # Either kernel fills as many column tiles as it has; the rest stays 0.
        width = triton.cdiv(panel.dz.shape[1], min(tiles.dz.cols, tiles.marked.cols))
        parts = self.head.new_zeros(width if scaled else 0, panel.dz.shape[0])
        flags = {"COLUMNS": both, "SCALED": scaled}
        args = (self.flag, row_vectors[0], col_vectors[0], parts)
        if panel.tile.row_stop <= len(self.kept):
            self._kept_dz(panel, row_vectors[0], col_vectors[0], both)
            marked = False
        elif not marked and self.ready.turns is not None:
            aligned = self.pairs.skip_self or self.pairs.kind == "aligned"
            self._launch_in_turn(
                hopper.dz_of_sums, self.ready.turns.dz, panel, *args, DIAGONAL=aligned, **flags
            )
        elif not marked:
            self._launch(
                dz_kernels.dz_of_sums, tiles.dz, panel, *args, KIND=kind["KIND"],
                SELF=kind["SELF"], **flags,
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
            panel.dz, panel.dz.stride(0), self.ready.marks[0], at_positive, tile.row_start,
            tile.col_start, *panel.dz.shape, BLOCK=BLOCK, **vectors_kind,
        )  # fmt: skip

    def _kept_dz(self, panel: Panel, row_gain: Tensor, col_gain: Tensor, both: bool) -> None:
        tile, dz = panel
        n, m = dz.shape
        dz_kernels.dz_of_kept[(triton.cdiv(m, 1024), triton.cdiv(n, 16))](
            dz.view(torch.bfloat16), dz, dz.stride(0), self.flag, row_gain, col_gain,
            tile.row_start, tile.col_start, n, m, COLUMNS=both, TN=16, TM=1024, num_warps=8,
        )  # fmt: skip

    def _add_kept_to_scale(self, memo: Tensor, row_gain: Tensor, col_gain: Tensor | None) -> None:
        """What kept exponentials pull, as the forward summed it up, unless they are no good."""
        row_pull, col_pull = pulls(memo, len(self.kept))
        pull = (row_gain[: len(row_pull)].double() * row_pull).sum()
        if col_gain is not None:
            pull = pull + (col_gain.double() * col_pull).sum()
        self.scale += torch.where(self.flag[0] == 0, pull, 0.0)

    def _add_to_scale(self, tile: Tile, parts: Tensor) -> None:
        """Sums (column tiles, n) of dz times the products of features."""
        diagonal = self.pairs.symmetric and tile.row_start == tile.col_start
        self.scale += parts.sum(0).to(self.scale.dtype).sum() * (0.5 if diagonal else 1.0)

    def _add_positives_to_scale(self, at_positive: Tensor) -> None:
        """What the positives' dz adds to the scale's gradient, outside of the tiles."""
        n, m, d = self.pairs.shape
        norm, dot = self.head.new_empty(2, n)
        rows, cols, index = self.ready.rows, self.ready.cols, self.ready.marks[0]
        vectors.measure[(triton.cdiv(n, 16),)](
            rows, *rows.stride(), cols, *cols.stride(), index, norm, dot, n, m, d,
            KIND=self.ready.kind()["KIND"], PRECISION=self.ready.precision, BLOCK=16, TD=64,
        )  # fmt: skip
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
                self.scale += by_scale
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
        tiles = self.ready.turns or self.ready.tiles
        return tiles.masked if marked else tiles.softplus, marked

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
            if not masked and self.ready.turns is not None and options["GRADS"]:
                self._launch_in_turn(
                    hopper.dz_of_softplus, size, panel, *args[:3], COLUMNS=options["COLUMNS"],
                    VALUES=options["VALUES"], SCALED=options["SCALED"],
                )  # fmt: skip
                continue
            self._launch(
                dz_kernels.dz_of_softplus, size, panel, *args, *self.ready.marks,
                pieces=4, MASKED=masked, EDGES=edges, **options, **self.ready.kind(),
            )  # fmt: skip

    def _softplus_head(self, peak: Tensor) -> None:
        scale = self.pairs.scale.to(self.head.dtype)
        zero = torch.zeros_like(scale)
        bias = zero if self.pairs.bias is None else self.pairs.bias.to(scale)
        parts = (zero, zero, scale, bias, zero, zero, peak, scale * peak, zero)
        self.head.copy_(torch.stack(parts))


class Means(Backward):
    """Mean columns (N, D) in fp32, and their products with the rows (N,); see `attend`."""

    def __init__(self, pairs: Pairs, plan: Plan) -> None:
        super().__init__(pairs, plan, Needs(True, False, True, False))
        self.rows = self.mean = self.head.new_empty(pairs.rows.shape)
        self.product = self.head.new_zeros(pairs.shape[0])

    def _round(self, out: Tensor, span: slice, acc: Tensor, gain: Tensor | None) -> None:
        torch.mul(acc, self.head[kernels.PEAK.value], out=out[span])

    def _add_to_scale(self, tile: Tile, parts: Tensor) -> None:
        self.product[tile.rows] += parts.sum(0) * self.head[kernels.PEAK.value]


def _piece(length: int, best: int, most: int, unit: int) -> int:
    """Into which pieces to cut a side: the best ones where they are needed and fit."""
    return best if best <= min(most, length) else balanced(length, max(1, min(best, most)), unit)


def _scaled(out: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """x times a factor, rounded into `out` of its shape; both lie in memory without gaps."""
    vectors.scaled[(triton.cdiv(x.numel(), 2048),)](
        out, x, factor, None, x.numel(), 1, BLOCK=2048, num_warps=8
    )
    return out


def rescale(grads: Tensor, gain: Tensor) -> None:
    """Multiply each row of a gradient (N, D) by its gain (N,), in place."""
    vectors.scaled[(triton.cdiv(grads.numel(), 2048),)](
        grads, grads, gain, gain, grads.numel(), grads.shape[1], BLOCK=2048, num_warps=8
    )


def _doubling(size: int, step: int) -> Iterator[slice]:
    """[0, size) in pieces that each end before twice their start, but for the first."""
    start, stop = 0, min(step, size)
    while start < size:
        yield slice(start, stop)
        start, stop = stop, min(2 * stop, size)


def _meets_an_edge(tile: Tile, size: TileSize) -> bool:
    """Whether a panel has pairs (i, i), or columns that do not fill its last tile."""
    return bool(tile.diagonal) or (tile.col_stop - tile.col_start) % size.cols != 0


def _panel(work: Tensor, tile: Tile, unit: int) -> Tensor:
    """A panel of the workspace, its rows at multiples of 16 bytes."""
    n, m = tile.row_stop - tile.row_start, tile.col_stop - tile.col_start
    stride = -(-m // unit) * unit
    return work[: n * stride].view(n, stride)[:, :m]


def _add_product(acc: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """acc += a @ b, or = where it is the first: accumulated in fp32, whatever the inputs' dtype."""
    beta = 0.0 if first else 1.0
    if acc.dtype == a.dtype:
        torch.addmm(acc, a, b, beta=beta, out=acc)
    elif acc.is_cuda and not torch.version.hip:
        if first:
            torch.mm(a, b, out_dtype=torch.float32, out=acc)
        else:
            torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)
    else:
        torch.addmm(acc, a.to(acc.dtype), b.to(acc.dtype), beta=beta, out=acc)
