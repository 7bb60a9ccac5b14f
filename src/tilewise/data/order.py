"""Order and chance of data: pure functions of (seed, epoch, position).

Nothing is drawn in sequence and nothing is remembered, so a run can go on from any position, on any
number of ranks and workers, with the same samples, crops and captions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]
_Word = NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = (
    6  # of the Feistel network; four give a pseudo-random permutation of random round functions
)


def _mix(x: _Word) -> _Word:
    """A bijection of 64-bit words that leaves no pattern (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Word = x ^ (x >> np.uint64(31))
    return mixed


def _key(*parts: int | Whole) -> _Word:
    """One word from several numbers (broadcast); their order matters."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        # At least one dimension: NumPy warns when scalars overflow, as they are meant to.
        word = np.atleast_1d(np.asarray(part, np.int64)).view(np.uint64) + np.uint64(GOLDEN)
        key = _mix(key * np.uint64(3) ^ _mix(word))
    return key


def permuted(index: Whole, count: int | Whole, key: _Word) -> Whole:
    """Where a random permutation of range(count) takes each index: a Feistel network.

    It permutes the next power of four; what falls outside the range walks on until it is inside.
    """
    count = np.broadcast_to(np.asarray(count, np.int64), index.shape)
    # Each index by its own count: where it goes must not depend on what is asked for beside it.
    bits = np.frexp(count - 1)[1]  # exact below 2**53
    half = np.maximum(1, (bits + 1) // 2).astype(np.uint64)
    key = np.broadcast_to(key, index.shape)
    out, todo = index.astype(np.int64), np.ones(index.shape, bool)
    while todo.any():
        moved = _network(out[todo].astype(np.uint64), half[todo], key[todo])
        out[todo] = moved.astype(np.int64)
        todo = out >= count
    return out


def _network(x: _Word, half: _Word, key: _Word) -> _Word:
    """x: of 2 * half bits each."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_mix(right ^ _mix(key + np.uint64(number))) & mask)
    joined: _Word = (left << half) | right
    return joined


def uniforms(seed: int, epoch: Whole, index: Whole, width: int) -> NDArray[np.float64]:
    """(n, width) numbers in [0, 1) that belong to a sample in an epoch."""
    key = _key(seed, epoch, index, 1)[:, None] + np.arange(width, dtype=np.uint64)
    found: NDArray[np.float64] = (_mix(_mix(key)) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return found


@dataclass(frozen=True)
class Order:
    """Endless shuffled epochs of `count` samples.

    With a window, runs of so many samples in storage order are shuffled as wholes and inside, so
    that reads stay near each other; the rest that fills no window comes last.
    """

    count: int
    seed: int
    window: int = 0

    def at(self, positions: Whole) -> tuple[Whole, Whole]:
        """(epoch, index) of the samples at these positions."""
        epoch, place = np.divmod(np.asarray(positions, np.int64), self.count)
        window = min(self.window or self.count, self.count)
        block, inside = np.divmod(place, window)
        whole = self.count // window
        size = np.where(block < whole, window, self.count - whole * window)
        inside = permuted(inside, size, _key(self.seed, epoch, block))
        moved = permuted(np.minimum(block, whole - 1), whole, _key(self.seed, epoch, -1))
        return epoch, np.where(block < whole, moved, block) * window + inside
