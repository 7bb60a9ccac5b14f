"""How a tile of logits is folded into one number per row and per column.

A log-sum-exp is carried as a partial (offset, total), value = offset + log(total), and handed on as
(whole, rest), whose sum is never formed: at scale 100 it would lose the digits that matter.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.pairs import Pairs, accumulate_dtype, exact_dtype
from tilewise.tiles import Tile

INFINITY = float("inf")
# log 2 in two parts: whole multiples of the first, 355 / 512, are exact in every precision.
LN2_HIGH = 0.693359375
LN2_LOW = math.log(2) - LN2_HIGH


class Stats(NamedTuple):
    """What a sweep tells of each row (or column): vectors of one length, empty if not asked for.

    Logits of a row are counted from its offset, which no softmax sees. A log-sum-exp is thus
    values + offset, but a loss takes values - positives and keeps the digits that a number of
    about 100 would lose. Softplus has only `values`; the last two come with `sums`. A row
    without negatives has values -inf, one without a positive has positives and positive_sum 0.
    """

    values: Tensor  # logsumexp z over its negatives, or softplus summed over what counts
    positives: Tensor  # logsumexp z over its positives; the logit itself where there is one
    positive_sum: Tensor  # sum of z over its positives
    positive_count: Tensor  # number of positives
    offset: Tensor  # a number near the row's largest z; not differentiable
    negative_sum: Tensor  # sum of z over its negatives, for label smoothing
    negative_count: Tensor  # number of negatives

    @classmethod
    def unpack(cls, packed: Tensor) -> "Stats":
        """From the (1, N), (5, N) or (7, N) tensor that the custom ops hand over."""
        vectors = list(packed.unbind(0))
        return cls(*vectors, *[packed.new_empty(0)] * (len(cls._fields) - len(vectors)))

    def pack(self) -> Tensor:
        """As one tensor: (1, N) of softplus, (5, N) of log-sum-exp, with sums (7, N)."""
        return torch.stack([vector for vector in self if vector.numel()])

    def with_bias(self, bias: Tensor) -> "Stats":
        """The stats of z + bias: only the offset moves, but the gradient passes to the bias."""
        zero = bias - bias.detach()
        return self._replace(
            values=self.values + zero,
            positives=self.positives + zero * (self.positive_count > 0),
            positive_sum=self.positive_sum + zero * self.positive_count,
            offset=self.offset + bias.detach(),
            negative_sum=self.negative_sum + zero * self.negative_count,
        )


class LogSums:
    """Running log of sums of exp, one slot per row (or column).

    With a fixed offset one exp per pair serves rows and columns alike; without, each side keeps
    the running maximum of its slots.
    """

    def __init__(self, size: int, like: Tensor, dtype: torch.dtype, fixed: float | None) -> None:
        start = -INFINITY if fixed is None else fixed
        self.fixed = fixed
        self.offset = torch.full((size,), start, dtype=dtype, device=like.device)
        self.total = torch.zeros(size, dtype=dtype, device=like.device)

    def fold(self, slots: slice, z: Tensor, dim: int, out: Tensor) -> Tensor:
        """Add exp(z) summed over `dim`, keeping the running maximum.

        `out`, shaped like `z` and possibly `z` itself, receives exp(z - maximum). Returns what
        the older total was multiplied with.
        """
        old = self.offset[slots]
        new = torch.maximum(old, z.amax(dim))
        # A slot that has seen only excluded pairs stays at -inf; exp(-inf - 0) is 0, not NaN.
        base = torch.where(new == -INFINITY, 0.0, new)
        shrink = torch.exp(old - base)
        torch.sub(z, base.unsqueeze(dim), out=out).exp_()
        self.total[slots] = self.total[slots] * shrink + out.sum(dim)
        self.offset[slots] = new
        return shrink

    def value(self) -> tuple[Tensor, Tensor]:
        """log of the sums as (whole, rest), a number near it and what is left.

        Where nothing was added the whole part is 0 and the rest -inf.
        """
        empty = self.total == 0
        total = torch.where(empty, 1.0, self.total)
        exponent = torch.floor(torch.log2(total))
        base = torch.where(empty, 0.0, self.offset)
        step = exponent * LN2_HIGH
        whole = base + step
        # What the rounding of whole took away goes to the rest (Knuth's two-sum).
        added = whole - base
        lost = (base - (whole - added)) + (step - added)
        rest = torch.log(total * torch.exp2(-exponent)) + exponent * LN2_LOW + lost
        return whole, torch.where(empty, -INFINITY, rest)


def fold_both(z: Tensor, tile: Tile, rows: LogSums, cols: LogSums | None, spare: Tensor) -> None:
    """Fold a tile of logits (n, m) into its rows and columns; overwrites `z` and `spare`."""
    if rows.fixed is None:
        if cols is not None:
            cols.fold(tile.cols, z, 0, out=spare)
        rows.fold(tile.rows, z, 1, out=z)
        return
    exp_from(z, rows.fixed)
    rows.total[tile.rows] += z.sum(1)
    if cols is not None:
        cols.total[tile.cols] += z.sum(0)


def exp_from(z: Tensor, offset: float) -> Tensor:
    """exp(z - offset), in place."""
    if offset:
        z.sub_(offset)
    return z.exp_()


def fixed_offset(pairs: Pairs) -> float | None:
    """An offset that keeps every exp(z - offset) below overflow, or None to run a maximum.

    |z| is at most scale * max |row| * max |col|. Reading it back would stall a device, so
    elsewhere than on CPU the running maximum is taken.
    """
    if pairs.rows.device.type != "cpu":
        return None
    bound = abs(float(pairs.scale)) * _longest(pairs.rows) * _longest(pairs.columns)
    if not bound < torch.finfo(pairs.dtype).max:
        return None
    # As the sums' own dtype has it, since vectors of that dtype are counted from it.
    return float(torch.tensor(max(0.0, bound - _headroom(pairs.dtype)), dtype=pairs.dtype))


def offset_holds(offset: float, whole: Tensor, terms: int) -> bool:
    """Whether sums of `terms` terms, about exp(whole), lost nothing to underflow under an offset.

    Terms below the smallest normal number flush to 0: harmless while the sum is so large that
    all of them together are below its rounding.
    """
    info = torch.finfo(whole.dtype)
    least = math.log(info.tiny) - math.log(info.eps) + 1 + math.log(terms)
    return bool(((whole - offset) >= least).all())


def _longest(features: Tensor) -> float:
    """The largest norm of a row, a piece at a time: the norm of half precision copies it."""
    step = max(1, 2**20 // features.shape[1])
    pieces = features.split(step)
    return max(float(piece.norm(dim=1, dtype=accumulate_dtype(features)).max()) for piece in pieces)


def _headroom(dtype: torch.dtype) -> float:
    """Exponent range left below overflow: room for sums of 2^30 terms and for their inverses."""
    return 0.7 * math.log(torch.finfo(dtype).max)


class PairWeights:
    """dz of the negatives: d_row_i exp(z_ij - row_i) + d_col_j exp(z_ij - col_j).

    With a fixed offset this is exp(z - offset) * (row gain + column gain): one exp per pair.
    """

    def __init__(self, fixed: float | None, rows: "Side", cols: "Side | None") -> None:
        self.fixed = fixed
        self.rows = rows.gain_and_shift(fixed)
        self.cols = cols.gain_and_shift(fixed) if cols is not None else None

    def apply(self, z: Tensor, tile: Tile, spare: Tensor) -> Tensor:
        """Overwrite the logits `z` (n, m) by dz; `spare` is scratch of the same shape."""
        row_gain, row_shift = (side[tile.rows, None] for side in self.rows)
        if self.cols is None:
            shift = row_shift if self.fixed is None else self.fixed
            return z.sub_(shift).exp_().mul_(row_gain)
        col_gain, col_shift = (side[None, tile.cols] for side in self.cols)
        if self.fixed is not None:
            return exp_from(z, self.fixed).mul_(torch.add(row_gain, col_gain, out=spare))
        torch.sub(z, col_shift, out=spare).exp_().mul_(col_gain)
        return z.sub_(row_shift).exp_().mul_(row_gain).add_(spare)


class Side(NamedTuple):
    """Of rows or columns: what the forward found, and the gradient of each of those numbers."""

    known: Stats
    d: Stats

    def gain_and_shift(self, fixed: float | None) -> tuple[Tensor, Tensor]:
        """dz = gain * exp(z - shift), or from a fixed offset; 0 for a slot without negatives."""
        shift = self.known.offset
        # A gain stands in all weights of its row: it is rounded once.
        exact = exact_dtype(shift)
        gain = self.d.values * torch.exp(-self.known.values.to(exact))
        if fixed is not None:
            gain = gain * torch.exp(fixed - shift.to(exact))
        return torch.where(self.known.values == -INFINITY, 0.0, gain).to(shift.dtype), shift


def softplus(z: Tensor) -> Tensor:
    """log(1 + exp(z)) without a threshold, exact in every dtype; -inf gives 0."""
    return torch.log1p(torch.exp(-z.abs())).add_(z.clamp(min=0))


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two not above each x >= 0, so that dividing by it is exact; 1 for 0."""
    return torch.where(x > 0, torch.exp2(torch.floor(torch.log2(x))), torch.ones_like(x))


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """log(exp a + exp b); where both are -inf it is -inf, with no gradient instead of NaN."""
    neither = (a == -INFINITY) & (b == -INFINITY)
    sums = torch.logaddexp(torch.where(neither, 0.0, a), torch.where(neither, 0.0, b))
    return torch.where(neither, -INFINITY, sums)


def merged(a: Tensor, b: Tensor) -> Tensor:
    """Packed stats of the same slots over two sets of pairs, as one; all (k, N)."""
    exact = exact_dtype(a)
    if len(a) == 1 or a.numel() == 0:
        return (a.to(exact) + b.to(exact)).to(a.dtype)
    x, y = Stats.unpack(a.to(exact)), Stats.unpack(b.to(exact))
    # Counted from the offset of the larger sum, or, without negatives, of the positives.
    larger = x.values + x.offset >= y.values + y.offset
    none = (x.values == -INFINITY) & (y.values == -INFINITY)
    offset = torch.where(torch.where(none, x.positive_count > 0, larger), x.offset, y.offset)
    x, y = (_counted_from(offset, side) for side in (x, y))
    count = x.positive_count + y.positive_count
    positives = log_add(
        *(torch.where(s.positive_count > 0, s.positives, -INFINITY) for s in (x, y))
    )
    return (
        Stats(
            values=log_add(x.values, y.values),
            positives=torch.where(count > 0, positives, 0.0),
            positive_sum=x.positive_sum + y.positive_sum,
            positive_count=count,
            offset=offset,
            negative_sum=x.negative_sum + y.negative_sum,
            negative_count=x.negative_count + y.negative_count,
        )
        .pack()
        .to(a.dtype)
    )


def merge_stats(total: Tensor, more: Tensor) -> Tensor:
    """`merged`, written into `total`."""
    return total.copy_(merged(total, more))


def _counted_from(offset: Tensor, stats: Stats) -> Stats:
    """Stats with another offset."""
    shift = stats.offset - offset
    return stats._replace(
        values=stats.values + shift,
        positives=stats.positives + shift,
        positive_sum=stats.positive_sum + stats.positive_count * shift,
        negative_sum=stats.negative_sum + stats.negative_count * shift[: len(stats.negative_sum)],
    )


def nothing(k: int, like: Tensor, size: int) -> Tensor:
    """Packed stats (k, size) of slots without pairs."""
    packed = like.new_zeros(k, size)
    if k > 1:
        Stats.unpack(packed).values.fill_(-INFINITY)
    return packed
