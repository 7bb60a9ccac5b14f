"""Pairs made ready for the fused kernels: operands, marks and tiles."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.backends import kernels, vectors
from tilewise.backends.convert import SPLIT
from tilewise.backends.operands import Operand, units_of
from tilewise.backends.tuning import (
    Tiles,
    TileSize,
    copies_tiles,
    gluon_tiles,
    target_of,
    tiles_for,
)
from tilewise.pairs import Pairs
from tilewise.tiles import Tile, cdiv

# An offset is taken away before a logit is rounded; Triton may not always do so unasked.
FUSED = {"enable_fp_fusion": True}


class Ready(NamedTuple):
    """Pairs as the kernels take them."""

    pairs: Pairs
    rows: Operand
    cols: Operand
    units: Tensor | None  # (2,) what features were multiplied with, where they are converted
    marks: tuple[Tensor, ...]  # positives' columns, row and column ids, row and column labels
    tiles: Tiles
    gluon: Tiles | None  # of the kernels in `hopper`, where they run
    copies_tiles: bool  # whether the device does, given a descriptor
    processors: int

    def kind(self) -> dict[str, Any]:
        """What a kernel is told at compile time about where positives are."""
        return {"KIND": kernels.KINDS[self.pairs.kind], "SELF": self.pairs.skip_self}

    def masks(self) -> dict[str, Any]:
        """What a kernel that looks at every pair is told about which ones count."""
        return {**self.kind(), "IDS": self.pairs.row_ids is not None}

    def product(self, size: TileSize) -> dict[str, Any]:
        """What a kernel is told about its tile."""
        return {
            "D": self.rows.width,
            "TN": size.rows,
            "TM": size.cols,
            "TD": size.features,
            "num_warps": size.warps,
            "num_stages": size.stages,
            **FUSED,
        }

    def tiled(self, x: Tensor, *block: int) -> Any:
        """A matrix whose rows are multiples of 16 bytes apart, as `kernels.opened` takes it."""
        if self.copies_tiles:
            return TensorDescriptor.from_tensor(x, list(block))
        return x, x.shape[0], x.stride(0) * x.element_size() // 16

    def loads(self, size: TileSize, of: Tile, flag: Tensor | None = None) -> tuple[Any, Any]:
        """Rows and columns of a panel, to be loaded tile by tile; see `Operand.scores`."""
        rows, cols = self.rows.scores(of.rows, flag), self.cols.scores(of.cols, flag)
        return self.tiled(rows, size.rows, size.features), self.tiled(
            cols, size.cols, size.features
        )

    def gluon_tiled(self, x: Tensor, *block: int) -> Any:
        """A matrix whose rows are multiples of 16 bytes apart, as kernels in Gluon take it."""
        from triton.experimental.gluon.nvidia import hopper as gluon

        return gluon.TensorDescriptor.from_tensor(x, list(block), _shared_layout(block[1]))

    def gluon_loads(self, size: TileSize, of: Tile, *out: Tensor | None) -> list[Any]:
        """What a kernel of `hopper` loads from and stores to, as it takes them."""
        return [
            self.gluon_tiled(self.rows.scores(of.rows), size.rows, size.features),
            self.gluon_tiled(self.cols.scores(of.cols), size.cols, size.features),
            *(x if x is None else self.gluon_tiled(x, size.rows, size.cols // 2) for x in out),
        ]

    def gluon_options(self, size: TileSize) -> dict[str, int]:
        """What a kernel of `hopper` is told about its tiles."""
        return {
            "D": self.rows.width,
            "STAGES": size.stages,
            "LANES": size.group,
            "num_warps": size.warps,
            **FUSED,
        }

    def measure(
        self, norm: Tensor, dot: Tensor, other_norm: Tensor | None = None, cols: bool = False
    ) -> None:
        """Lengths of the rows, and their products with their positives; or lengths of columns.

        Of pairs (i, i) both lengths, with `other_norm`.
        """
        sides = (self.rows, self.cols)[:: -1 if cols else 1]
        x, other = (side.features for side in sides)
        # fp8 is for the negatives: the one positive of a row is worth its own digits.
        units = self.units if self.rows.form == SPLIT.value else None
        vectors.measure[(cdiv(len(x), 16),)](
            x, *x.stride(), other, *other.stride(), units, self.marks[0], norm, other_norm, dot,
            len(x), len(other), x.shape[1], KIND=0 if cols else self.kind()["KIND"], BLOCK=16,
            TD=128, num_stages=1,
        )  # fmt: skip

    def mirrored(self) -> "Ready":
        """The columns as rows: positives that are aligned or by label are so from both sides."""
        index, row_ids, col_ids, row_labels, col_labels = self.marks
        return self._replace(
            rows=self.cols, cols=self.rows, marks=(index, col_ids, row_ids, col_labels, row_labels)
        )


@cache  # made once: a descriptor is made for every panel
def _shared_layout(width: int) -> Any:
    """How a tile of 16-bit numbers, so many in a row, lies in shared memory."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(min(128, 2 * width), 16, 2)


def make_ready(pairs: Pairs, precision: str) -> Ready:
    """Features to be converted panel by panel, marks as int32."""
    device = pairs.rows.device
    index = torch.empty(0, dtype=torch.int32, device=device)
    if pairs.positives is not None:
        # What is no column and not NO_POSITIVE stays so.
        index = pairs.positives.clamp(-2, pairs.shape[1]).to(torch.int32).contiguous()
    ids, labels = (
        _codes(a, b) if a is not None and b is not None else (index, index)
        for a, b in ((pairs.row_ids, pairs.col_ids), (pairs.row_labels, pairs.col_labels))
    )
    units = units_of(pairs, precision)
    of_rows, of_cols = (None, None) if units is None else (units[:1], units[1:])
    rows = Operand(pairs.rows, precision, of_rows, cols=False)
    target, count = target_of(device), 4
    dtype = rows.dtype if precision == "fp8" else pairs.rows.dtype
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return Ready(
        pairs,
        rows,
        Operand(pairs.columns, precision, of_cols, cols=True),
        units,
        (index, *ids, *labels),
        tiles_for(target, dtype),
        gluon_tiles(target, dtype),
        copies_tiles(target),
        count,
    )


def _codes(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Marks as int32 that are equal where these are, found without asking the device."""
    if torch.int64 not in (rows.dtype, cols.dtype):
        return rows.to(torch.int32).contiguous(), cols.to(torch.int32).contiguous()
    marks = rows if rows is cols else torch.cat([rows.long(), cols.long()])
    ordered, places = marks.sort()
    new = torch.zeros_like(ordered, dtype=torch.int32)
    new[1:] = ordered[1:] != ordered[:-1]
    codes = torch.empty_like(new).scatter_(0, places, new.cumsum(0, dtype=torch.int32))
    return (codes, codes) if rows is cols else (codes[: len(rows)], codes[len(rows) :])
