"""Tile sizes of the fused kernels by architecture and dtype: the only place that knows them.

Measured on an H200 by `python benchmarks/tune_kernels.py` (docs/log.md has the table); the other
rows are bounded by their shared memory and registers, which `tests/test_compile.py` checks by
compiling.
"""

from typing import NamedTuple

import torch
import triton


class TileSize(NamedTuple):
    """One kernel's tile and how it is run."""

    rows: int
    cols: int
    features: int
    warps: int
    stages: int
    group: int = 0  # tiles of rows that share a column tile in L2; of `hopper`, programs that do
    programs: int = 1  # on one processor, so that one multiplies while another stores


class Tiles(NamedTuple):
    """The tile of each sweep."""

    sums: TileSize  # forward: rows must be a multiple of cols
    masked: TileSize  # where every tile is looked at: ids, positives by index; likewise
    kept: TileSize  # where exponentials are stored beside the sums; likewise
    dz: TileSize  # backward, negatives without marks
    softplus: TileSize  # forward and backward of SigLIP in one
    marked: TileSize  # labels, label smoothing, running maximum: masks and two exps a pair
    product: TileSize  # gradients from parts: rows of dz, features, pairs at a time


class Target(NamedTuple):
    """What a kernel is compiled for: "cuda" and 90, "hip" and 942, or "cpu" (the interpreter)."""

    kind: str
    version: int


HOPPER = Tiles(
    sums=TileSize(256, 128, 64, 8, 4),
    masked=TileSize(128, 64, 64, 8, 4, 16),
    kept=TileSize(128, 64, 64, 8, 4),
    dz=TileSize(128, 128, 64, 4, 3, 32, 2),
    softplus=TileSize(128, 128, 64, 8, 3, 32),
    marked=TileSize(128, 32, 64, 8, 3, 16),
    product=TileSize(128, 128, 32, 8, 3),
)
# Of `hopper`, whose two groups of warps have a tile each. The softplus tile is HOPPER's, which does
# the edges over.
GLUON = Tiles(
    sums=TileSize(128, 128, 64, 4, 6, 4),
    masked=HOPPER.masked,
    kept=TileSize(128, 128, 64, 4, 6, 4),
    dz=TileSize(128, 128, 64, 4, 6, 1),
    softplus=TileSize(128, 128, 64, 4, 6, 1),
    marked=HOPPER.marked,
    product=TileSize(128, 128, 32, 4, 4),
)
# dz in two parts has two ways out, which leave room for one stage less.
GLUON_SPLIT = GLUON._replace(dz=TileSize(128, 128, 64, 4, 5, 1))
# Not measured: tiles that compile without spilling.
BLACKWELL = Tiles(
    sums=TileSize(128, 64, 64, 4, 4),
    masked=TileSize(64, 64, 64, 4, 4, 16),
    kept=TileSize(64, 64, 64, 4, 4),
    dz=TileSize(128, 128, 64, 4, 4, 16),
    softplus=TileSize(128, 64, 64, 4, 4, 16),
    marked=TileSize(64, 32, 64, 8, 3, 16),
    product=TileSize(64, 128, 32, 8, 3),
)
# All before Hopper, and the smaller Blackwells: 99 KiB of shared memory, no asynchronous products.
AMPERE = Tiles(
    sums=TileSize(128, 128, 64, 8, 3),
    masked=TileSize(128, 128, 64, 8, 3, 16),
    kept=TileSize(64, 64, 64, 4, 3),
    dz=TileSize(128, 128, 64, 8, 3, 16),
    softplus=TileSize(128, 128, 64, 8, 3, 16),
    marked=TileSize(64, 32, 64, 8, 3, 16),
    product=TileSize(128, 64, 32, 8, 3),
)
# 64 KiB of shared memory.
CDNA = Tiles(
    sums=TileSize(128, 128, 32, 8, 2),
    masked=TileSize(128, 64, 32, 8, 2, 16),
    kept=TileSize(128, 64, 32, 8, 2),
    dz=TileSize(128, 64, 32, 8, 2, 16),
    softplus=TileSize(128, 64, 32, 8, 2, 16),
    marked=TileSize(64, 32, 32, 8, 2, 16),
    product=TileSize(64, 64, 32, 8, 2),
)
# One program a tile costs the interpreter a millisecond and more: these are for its tests.
INTERPRETER = Tiles(
    sums=TileSize(64, 32, 32, 4, 1),
    masked=TileSize(32, 32, 32, 4, 1, 2),
    kept=TileSize(64, 32, 32, 4, 1),
    dz=TileSize(32, 64, 32, 4, 1, 2),
    softplus=TileSize(32, 64, 32, 4, 1, 2),
    marked=TileSize(32, 32, 32, 4, 1, 2),
    product=TileSize(32, 32, 64, 4, 1),
)


def panel_for(features: int, split: bool) -> tuple[int, int]:
    """Rows and columns of dz at a time, for products of it in whole waves, or nearly so.

    An H200 has 132 processors, and a product of cuBLAS for s slots has s / 256 times D / 128 tiles:
    for 8,192 slots 128 at D = 512, 256 at 1,024. At D = 768 the other panels are faster, whose
    66 x 88 tiles of dz are whole waves. Split features leave less room, and a product of s slots
    has s / 128 times D / 128 tiles: 264 either way (132 at D = 512). Of these only those at
    D = 768 have run on a GPU.
    """
    if split:
        return (4224, 4224) if features % 512 == 0 else (5632, 5632)
    return (8192, 8192) if features % 512 == 0 else (8448, 11264)


def target_of(device: torch.device) -> Target:
    """What kernels on `device` are compiled for."""
    if device.type == "cpu":
        return Target("cpu", 0)
    major, minor = torch.cuda.get_device_capability(device)
    return Target("hip" if torch.version.hip else "cuda", major * 10 + minor)


def copies_tiles(target: Target) -> bool:
    """Whether it has an engine that copies tiles, given a descriptor: TMA, from Hopper on."""
    return target.kind == "cuda" and target.version >= 90


def tiles_for(target: Target, dtype: torch.dtype) -> Tiles:
    """The tiles for features of one dtype on one target; of fp8 twice the features at a time."""
    if target.kind == "cpu":
        return INTERPRETER
    if target.kind == "hip":
        tiles = CDNA
    else:
        tiles = {90: HOPPER, 100: BLACKWELL, 103: BLACKWELL}.get(target.version, AMPERE)
    if dtype.itemsize == 1:
        return Tiles(*(size._replace(features=2 * size.features) for size in tiles))
    return tiles


def gluon_tiles(target: Target, dtype: torch.dtype) -> Tiles | None:
    """The tiles of `hopper` for features of one dtype, where it runs.

    Gluon is experimental and changes: it runs under the Triton that it was written for.
    """
    if target != ("cuda", 90) or dtype.itemsize == 1:
        return None
    if triton.__version__.split(".")[:2] != ["3", "6"]:
        return None
    return GLUON_SPLIT if dtype == torch.float32 else GLUON
