"""Launching the forward kernels: the sums of rows and columns, and the stats made of them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import finishes, fused, kernels, vectors
from tilewise.backends.plan import Plan, Swept
from tilewise.backends.ready import Ready, make_ready
from tilewise.backends.tuning import TileSize
from tilewise.pairs import Pairs
from tilewise.tiles import Tile, balanced, cdiv, row_of_tiles, spans

# Slots a program of a vector kernel takes.
BLOCK = 256
# Parts that a column's sum usually comes in, at most.
SLOTS = 16


def pulls(memo: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Of kept rows, and of columns over them: sums of exponentials times products of features."""
    rows = kept if len(memo) > 2 else 0
    return memo[2 : 2 + rows], memo[2 + rows :]


class SumPanel(NamedTuple):
    """Rows against columns, and how they are swept."""

    tile: Tile
    size: TileSize
    in_gluon: bool  # by `hopper.sums`
    masked: bool  # every tile of it
    kept: Tensor | None  # (n, m), where its exponentials go

    def counts(self) -> tuple[int, int, int, int]:
        """Rows, columns, column blocks and steps down a block."""
        tile, size = self.tile, self.size
        n, m = tile.row_stop - tile.row_start, tile.col_stop - tile.col_start
        # Two groups of warps take a tile each.
        height = 2 * size.rows if self.in_gluon else size.rows
        return n, m, cdiv(m, size.cols), cdiv(n, height)


class Parts(NamedTuple):
    """Partial sums of a panel: of exponentials, and of those times products of features."""

    rows: Tensor  # (blocks, n)
    cols: Tensor  # (parts, m)
    row_pull: Tensor | None
    col_pull: Tensor | None
    share: int  # tiles a program takes


class Sums(NamedTuple):
    """Partial sums of a panel, and where on one side they are added."""

    part: Tensor  # (parts, span)
    total: Tensor  # (N,) or (M,)
    first: int
    span: int
    turn: int  # FIRST and LAST of the slots' sums, or neither

    @classmethod
    def of(
        cls, part: Tensor, total: Tensor, at: tuple[int, int], n: int, across: tuple[int, int]
    ) -> "Sums":
        """Of slots `at`, over the slots `across` of the n on the other side."""
        turn = (across[0] == 0) * finishes.FIRST.value | (across[1] == n) * finishes.LAST.value
        return cls(part, total, at[0], at[1] - at[0], turn)


class Forward:
    """One log-sum-exp sweep: what it needs beforehand, its sums, and the stats made of them."""

    def __init__(self, pairs: Pairs, plan: Plan) -> None:
        self.pairs, self.plan, self.ready = pairs, plan, make_ready(pairs, plan.precision)
        n, m, _ = pairs.shape
        self.head = pairs.rows.new_empty(kernels.HEAD_SIZE, dtype=torch.float32)
        self.memo, self.kept = fused.empty_memo(pairs, plan), fused.empty_kept(pairs, plan)
        self.flag = self.memo[1:2]
        if len(self.kept):
            self.kept[:, m:].zero_()
        self.row_pull, self.col_pull = pulls(self.memo, len(self.kept))
        self.row_pull.zero_()
        self.col_pull.zero_()
        self.row_norm, self.dot = self.head.new_empty(2, n)
        self.col_norm = self.row_norm if pairs.symmetric else self.head.new_empty(m)
        self.row_stats = self.head.new_empty(plan.num_stats, n)
        self.col_stats = self.head.new_empty((plan.num_stats, m) if self.plan.columns else 0)

    def run(self) -> Swept:
        self._begin()
        marked = not fused.has_offset(self.pairs, self.plan)
        if not marked:
            self._sums()
        self._marked(on_flag=not marked)
        return Swept(self.row_stats, self.col_stats, self.memo, self.kept)

    def _begin(self) -> None:
        n, m, _ = self.pairs.shape
        paired = n == m and self.pairs.kind == "aligned" and not self.pairs.symmetric
        self.ready.measure(self.row_norm, self.dot, self.col_norm if paired else None)
        if not paired and not self.pairs.symmetric:
            self.ready.measure(self.col_norm, self.dot, cols=True)
        vectors.begin[(1,)](
            self.head, self.memo, self.row_norm, self.col_norm, self.pairs.scale,
            self.ready.units, n, m, BLOCK=8192, num_warps=16,
        )  # fmt: skip

    def _call_shape(self, ready: Ready, size: TileSize, part_bytes: int) -> tuple[int, int]:
        """Rows and columns of a call: as many as fit into the workspace, converted features too.

        Half of it is for columns, for `part_bytes` a row and column block and for SLOTS such parts
        of a column; a quarter is for rows.
        """
        n, m, room = len(ready.rows), len(ready.cols), self.plan.workspace_bytes // 2
        row_bytes, col_bytes = ready.rows.bytes_per_row, ready.cols.bytes_per_row
        height = balanced(n, room // (2 * row_bytes), size.rows) if row_bytes else n
        height = min(height, fused.CHUNK) if part_bytes else height
        # What pulls at the scale is summed up likewise.
        part_bytes *= 2 if self.plan.wants_scale and len(self.kept) else 1
        block_bytes = part_bytes * (height + SLOTS * size.cols) + col_bytes * size.cols
        return height, max(1, room // block_bytes) * size.cols if block_bytes else m

    def _sums(self) -> None:
        """Panel after panel, small enough for the rows to stay in L2 while all columns pass by."""
        (n, m, _), symmetric = self.pairs.shape, self.pairs.symmetric
        make = self.head.new_zeros if symmetric else self.head.new_empty
        self.totals = rows = make(n, dtype=torch.float64)
        cols = rows if symmetric else make(m if self.plan.columns else 0, dtype=torch.float64)
        for panel in self._panels():
            tile, parts = panel.tile, self._parts(panel)
            self._sweep(panel, parts)
            self._use(panel)
            of_rows = Sums.of(parts.rows, rows, tile[:2], n=m, across=tile[2:])
            of_cols = Sums.of(parts.cols, cols, tile[2:], n=n, across=tile[:2])
            if symmetric:
                # Both are added to the rows'.
                self._finish(of_rows._replace(turn=0))
                self._finish(of_cols._replace(turn=0))
            else:
                self._finish(of_rows, of_cols if self.plan.columns else None)
            if parts.row_pull is not None and parts.col_pull is not None:
                self.row_pull[tile.rows] += parts.row_pull.sum(0)
                if self.plan.columns:
                    self.col_pull[tile.cols] += parts.col_pull.sum(0)
            del parts  # before the next, so that there is one
        if symmetric:
            self._finish(Sums(self.head[:0], rows, 0, n, finishes.LAST.value))

    def _use(self, panel: SumPanel) -> None:
        """For whoever wants more of a panel than its sums."""

    def _panels(self) -> Iterator[SumPanel]:
        n, known = self.pairs.shape[0], len(self.kept)
        yield from self._panels_of(0, known, keep=True)
        yield from self._panels_of(known, n, keep=False)

    def _panels_of(self, start: int, stop: int, keep: bool) -> Iterator[SumPanel]:
        """Rows [start, stop) against all columns."""
        (size, in_gluon), marked, m = self._size(keep), self._masks, self.pairs.shape[1]
        # A ragged block goes last, on its own: all of its tiles are masked.
        clean = m if in_gluon else 0 if marked else m // size.cols * size.cols
        height, width = self._call_shape(self.ready, size, 4)
        calls = [(*span, marked) for span in spans(clean, balanced(m, width, size.cols))]
        calls += [(clean + a, clean + b, True) for a, b in spans(m - clean, width)]
        for top, bottom in spans(stop - start, height):
            for first, last, masked in calls:
                tile = Tile(start + top, start + bottom, first, last)
                # Half of a symmetric z tells everything.
                if not self.pairs.symmetric or last > tile.row_start:
                    place = self._place(tile) if keep else None
                    yield SumPanel(tile, size, in_gluon, masked, place)

    def _size(self, keep: bool) -> tuple[TileSize, bool]:
        """The tile of the sums, with exponentials stored or not; whether it is one of `hopper`."""
        gluon = self.ready.gluon if not (self._masks or self.pairs.symmetric) else None
        tiles = gluon or self.ready.tiles
        plain = tiles.masked if self._masks else tiles.sums
        return tiles.kept if keep else plain, gluon is not None

    def _place(self, tile: Tile) -> Tensor:
        """Where the exponentials of a panel are kept."""
        return self.kept[tile.rows, tile.cols]

    @property
    def _masks(self) -> bool:
        """Whether pairs are told apart by more than their place."""
        return self.pairs.kind == "index" or self.pairs.row_ids is not None

    def _parts(self, panel: SumPanel) -> Parts:
        """Memory for partial sums, as many as the kernel leaves."""
        n, m, blocks, tiles = panel.counts()
        symmetric, lanes = self.pairs.symmetric, panel.size.group if panel.in_gluon else 1
        # Above the diagonal blocks have unequal work: many small shares even that out.
        share = cdiv(tiles, 8)
        if not symmetric:
            share = cdiv(blocks * tiles, max(1, self.ready.processors // lanes))
        # What nobody sweeps stays 0: tiles below the diagonal, parts that a block does not have.
        rows = (self.head.new_zeros if symmetric else self.head.new_empty)(blocks, n)
        count = lanes * (2 if panel.in_gluon else 1) * (cdiv(tiles, share) + 1)
        cols = self.head.new_zeros(count, m if symmetric or self.plan.columns else 0)
        if panel.kept is None or not self.plan.wants_scale:
            return Parts(rows, cols, None, None, share)
        return Parts(rows, cols, torch.empty_like(rows), torch.zeros_like(cols), share)

    def _sweep(self, panel: SumPanel, parts: Parts) -> None:
        """Fill the parts of a panel, and what is kept of it."""
        n, m, blocks, tiles = panel.counts()
        tile, size = panel.tile, panel.size
        args = (self.head, *parts[:4])
        # Whatever lies past the panel is loaded as 0 and must not count.
        where = (tile.row_start, tile.col_start, n, m, tile.row_stop, tile.col_stop, parts.share)
        programs = cdiv(blocks * tiles, parts.share)
        options = {"SCALED": parts.row_pull is not None}
        if panel.in_gluon:
            from tilewise.backends import hopper

            hopper.sums[(size.group * programs,)](
                *self.ready.gluon_loads(size, tile, panel.kept), *args, *where,
                COLUMNS=self.plan.columns, **self.ready.gluon_options(size),
                DIAGONAL=self.pairs.skip_self or self.pairs.kind == "aligned", **options,
            )  # fmt: skip
            return
        kept = panel.kept
        if kept is not None:
            kept = self.ready.tiled(kept, size.rows, size.cols)
        kernels.sums[(programs,)](
            *self.ready.loads(size, tile), kept, *args, *self.ready.marks[:3], *where,
            FOLD=min(size.rows, 16 * size.warps), UPPER=self.pairs.symmetric,
            COLUMNS=self.plan.columns or self.pairs.symmetric, MASKED=panel.masked, **options,
            **self.ready.masks(), **self.ready.product(size),
        )  # fmt: skip

    def _finish(self, rows: "Sums", cols: "Sums | None" = None) -> None:
        """Add partial sums to each side's; the last ones make its stats."""
        n, m, _ = self.pairs.shape
        most = rows.span if cols is None else max(rows.span, cols.span)
        count, cols = (1, rows) if cols is None else (2, cols)
        finishes.finish[(cdiv(most, 32), count)](
            rows.part, rows.total, self.row_stats, self.row_norm, cols.part, cols.total,
            self.col_stats, self.col_norm, self.head, self.flag, self.dot, self.ready.marks[0],
            len(rows.part), *rows[2:4], len(cols.part), *cols[2:4], n, m,
            SYMMETRIC=self.pairs.symmetric, ROWS=rows.turn, COLS=cols.turn, PARTS=256, BLOCK=32,
            num_warps=8, **self.ready.kind(),
        )  # fmt: skip

    def _marked(self, on_flag: bool) -> None:
        """Rows and columns with running maxima, if the flag is up."""
        n, m, _ = self.pairs.shape
        rows = cols = self._marked_sums(self.ready, on_flag)
        if self.plan.columns:
            cols = self._marked_sums(self.ready.mirrored(), on_flag)
        most, sides = (max(n, m), 2) if self.plan.columns else (n, 1)
        finishes.finish_marked[(cdiv(most, BLOCK), sides)](
            rows, self.row_stats, self.row_norm, cols, self.col_stats, self.col_norm, self.head,
            self.flag, self.dot, self.ready.marks[0], n, m, SYMMETRIC=self.pairs.symmetric,
            SUMS=self.plan.sums, ON_FLAG=on_flag, BLOCK=BLOCK, **self.ready.kind(),
        )  # fmt: skip

    def _marked_sums(self, ready: Ready, on_flag: bool) -> Tensor:
        """What `marked_sums` finds of rows (8, N); nothing unless the flag is up."""
        n, m, size = len(ready.rows), len(ready.cols), ready.tiles.marked
        found = self.head.new_empty(8, n)
        height, width = self._call_shape(ready, size, 0)
        for panel in (tile for rows in spans(n, height) for tile in row_of_tiles(rows, m, width)):
            features = ready.loads(size, panel, self.flag if on_flag else None)
            kernels.marked_sums[(cdiv(panel.row_stop - panel.row_start, size.rows),)](
                *features, self.head, self.flag, found, *ready.marks, panel.row_start,
                panel.col_start, panel.col_stop - panel.col_start, n, m, SUMS=self.plan.sums,
                ON_FLAG=on_flag, **ready.masks(), **ready.product(size),
            )  # fmt: skip
        return found
