"""Panels of dz: how they are cut, multiplied with features, and rounded into gradients."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import adding, split_products
from tilewise.backends.ready import Ready
from tilewise.tiles import Tile, balanced, cdiv, padded


class DzPanel(NamedTuple):
    """Rows against columns, and where their dz goes."""

    tile: Tile
    dz: Tensor  # (n, m), rows at multiples of 16 bytes
    rest: Tensor | None = None  # (n, m) likewise: what rounding dz took away, times REST

    @property
    def parts(self) -> list[Tensor]:
        return [part for part in self[1:] if part is not None]


def piece(length: int, best: int, most: int, unit: int) -> int:
    """Into which pieces to cut a side: the best ones where they are needed and fit."""
    return best if best <= min(most, length) else balanced(length, max(1, min(best, most)), unit)


def round_into(out: Tensor, x: Tensor, factor: Tensor, add: bool = False) -> Tensor:
    """x times a factor, rounded into `out` of its shape; both lie in memory without gaps."""
    adding.scaled[(cdiv(x.numel(), 2048),)](
        out, x, factor, None, x.numel(), 1, ADD=add, BLOCK=2048, num_warps=8
    )
    return out


def add_parts(total: Tensor, part: Tensor) -> None:
    """Add partial sums (parts, n), each one's side by side, to a total (n,), in its place."""
    count, size = part.shape
    adding.parts[(cdiv(size, 32),)](
        total, part, part.stride(0), count, size, PARTS=128, BLOCK=32, num_warps=4
    )


def merge(total: Tensor, more: Tensor) -> Tensor:
    """Packed stats (k, N) over two sets of pairs as one, in the place of the first."""
    k, size = total.shape
    adding.merge[(cdiv(size, 256),)](
        total, *total.stride(), more, *more.stride(), size, K=k, BLOCK=256
    )
    return total


def rescale(grads: Tensor, gain: Tensor) -> None:
    """Multiply each row of a gradient (N, D) by its gain (N,), in place."""
    adding.scaled[(cdiv(grads.numel(), 2048),)](
        grads, grads, gain, gain, grads.numel(), grads.shape[1], ADD=False, BLOCK=2048,
        num_warps=8,
    )  # fmt: skip


def doubling(size: int, step: int) -> Iterator[slice]:
    """[0, size) in pieces that each end before twice their start, but for the first."""
    start, stop = 0, min(step, size)
    while start < size:
        yield slice(start, stop)
        start, stop = stop, min(2 * stop, size)


def cut(work: Tensor, tile: Tile) -> Tensor:
    """A panel of the workspace, its rows at multiples of 16 bytes."""
    n, m = tile.row_stop - tile.row_start, tile.col_stop - tile.col_start
    return work[: n * padded(m, 8)].view(n, padded(m, 8))[:, :m]


def side_of_square(pair_bytes: int, row_bytes: int, room: int) -> int:
    """The largest side of a square of pairs, with something for each of its rows, in `room`."""
    half = row_bytes / (2 * pair_bytes)
    return int((half**2 + room / pair_bytes) ** 0.5 - half)


def add_products(
    ready: Ready, acc: Tensor, dz: Sequence[Tensor], features: Sequence[Tensor],
    *, turned: bool, first: bool,
) -> None:  # fmt: skip
    """acc += dz @ features, or = where it is the first; `turned`, dz.t() @ features."""
    if len(dz) == 1:
        add_product(acc, dz[0].t() if turned else dz[0], features[0], first)
        return
    (n, d), (k, _) = acc.shape, features[0].shape
    if ready.gluon is not None:
        _add_on_hopper(ready, acc, (*dz, *features), turned=turned, first=first)
        return
    size = ready.tiles.product
    block = (size.features, size.rows) if turned else (size.rows, size.features)
    split_products.split_product[(cdiv(n, size.rows) * cdiv(d, size.cols),)](
        *(ready.tiled(part, *block) for part in dz),
        *(ready.tiled(part, size.features, size.cols) for part in features),
        acc, n, k, d, padded(d, 8), TURNED=turned, ADD=not first, TN=size.rows, TD=size.cols,
        TK=size.features, num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip


def _add_on_hopper(
    ready: Ready, acc: Tensor, parts: Sequence[Tensor], *, turned: bool, first: bool
) -> None:
    """The same by the kernel of `hopper_split`, of two parts of dz and two of features."""
    from tilewise.backends import hopper_split

    assert ready.gluon is not None
    size, (n, d), k = ready.gluon.product, acc.shape, len(parts[-1])
    half = size.rows // 2
    block = (size.features, half) if turned else (half, size.features)
    count = cdiv(n, size.rows) * cdiv(d, size.cols)
    hopper_split.split_product[(min(count, ready.processors),)](
        *(ready.gluon_tiled(part, *block) for part in parts[:2]),
        *(ready.gluon_tiled(part, size.features, size.cols) for part in parts[2:]),
        acc, n, k, d, STAGES=size.stages, TURNED=turned, ADD=not first, num_warps=size.warps,
    )  # fmt: skip


def add_product(acc: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """acc += a @ b, or = where it is the first: in fp32, whatever the inputs' dtype."""
    if not acc.is_cuda or torch.version.hip:
        a, b = a.to(acc.dtype), b.to(acc.dtype)
        torch.addmm(acc, a, b, beta=0.0 if first else 1.0, out=acc)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=acc)
    else:
        torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)
