"""How N x M pairs are cut into tiles. Integers only: nothing here knows a tensor."""

from collections.abc import Iterator
from typing import NamedTuple

# Numbers a pair may need at work: logits, cosines and scratch, masks, and temporaries of theirs.
NUMBERS_PER_PAIR = 8


class Tile(NamedTuple):
    """Rows [row_start, row_stop) against columns [col_start, col_stop)."""

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int

    @property
    def rows(self) -> slice:
        return slice(self.row_start, self.row_stop)

    @property
    def cols(self) -> slice:
        return slice(self.col_start, self.col_stop)

    @property
    def diagonal(self) -> range:
        """Indices i for which the pair (i, i) lies in this tile."""
        return range(max(self.row_start, self.col_start), min(self.row_stop, self.col_stop))


def spans(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut [0, size) into pieces of `step`, the last one shorter."""
    return ((start, min(start + step, size)) for start in range(0, size, step))


def row_of_tiles(rows: tuple[int, int], num_cols: int, width: int) -> Iterator[Tile]:
    """All tiles of one row panel, left to right."""
    return (Tile(*rows, *cols) for cols in spans(num_cols, width))


def upper_row_of_tiles(rows: tuple[int, int], size: int) -> Iterator[Tile]:
    """The tiles of one row panel on and above the diagonal of a square cut into square tiles."""
    start, stop = rows
    yield Tile(start, stop, start, stop)
    for col_start, col_stop in spans(size - stop, stop - start):
        yield Tile(start, stop, stop + col_start, stop + col_stop)


def tile_shape(num_features: int, room: int, most: tuple[int, int]) -> tuple[int, int]:
    """The largest (n, m), halved from `most`, that needs at most `room` numbers; (1, 1) at least.

    Beside the tile itself a sweep holds blocks of features: of the rows two and their gradient,
    of the columns two.
    """
    n, m = most
    while n * m > 1 and _numbers(n, m, num_features) > room:
        n, m = (n, max(1, m // 2)) if m >= n else (max(1, n // 2), m)
    return n, m


def _numbers(n: int, m: int, num_features: int) -> int:
    return NUMBERS_PER_PAIR * n * m + num_features * (3 * n + 2 * m)


def cdiv(size: int, step: int) -> int:
    """Into how many pieces. (Triton's own takes ten times as long, for each of its calls.)"""
    return -(-size // step)


def balanced(size: int, most: int, multiple: int) -> int:
    """The step that cuts `size` into as few equal pieces as `most` allows; a multiple of it."""
    pieces = cdiv(size, max(most, multiple))
    return padded(cdiv(size, pieces), multiple)


def padded(size: int, multiple: int) -> int:
    """The next multiple, at least `size`."""
    return cdiv(size, multiple) * multiple
