"""Features in host memory, block by block on the device: the sweep out of core.

A block of rows stays while blocks of columns pass by, the next one on its way; each pair of blocks
is an ordinary sweep. What is found about columns is joined on the device, their gradients are added
up in host memory. Where all features are on the device there is one block, and this is `rounds`.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import rounds
from tilewise.ahead import Ahead, Make
from tilewise.backends.blocks import rounded, row_spans
from tilewise.backends.plan import Attended, Grads, Needs, Plan, Scaled, Swept
from tilewise.pairs import NO_POSITIVE, Pairs, exact_dtype, impossible_positives
from tilewise.tiles import spans

# Of the features of a block. On an H200 two of them keep the device busy for a tenth of a second,
# ten times as long as the next one and its gradient take to come and go.
BLOCK_BYTES = 2**28


def is_hosted(pairs: Pairs) -> bool:
    """Whether some features are elsewhere than where they are computed on."""
    return any(Blocks.is_away(x, pairs) for x in (pairs.rows, pairs.columns))


class BlockVisit(NamedTuple):
    """A block of rows and one of columns, on the device."""

    number: int  # among all visits
    row: slice
    col: slice
    pairs: Pairs
    plan: Plan
    total: Tensor | None  # the columns' gradient so far, where it was brought along
    last_col: bool  # of this block of rows


class Blocks:
    """Pairs, cut into blocks of rows and of columns.

    Both sides are cut at the same places where pairs (i, i) are special, so that those are on the
    diagonal of a block; else a side that is on the device stays whole.
    """

    def __init__(self, pairs: Pairs, plan: Plan) -> None:
        self.pairs, self.plan = pairs, plan._replace(keep_bytes=0)
        most = max(1, BLOCK_BYTES // (pairs.columns.element_size() * pairs.shape[2]))
        height = 1 << most.bit_length() - 1  # a power of two: tiles of any size fit
        square = pairs.kind == "aligned" or pairs.skip_self or pairs.symmetric
        # A rank with fewer columns than another has empty blocks: all ranks visit the same.
        sizes = pairs.shape[0], max(pairs.shape[1], *plan.sizes, 0)
        self.rows, self.cols = (
            [slice(*span) for span in spans(size, height)] or [slice(0, 0)]
            if square or self.is_away(side, pairs)
            else [slice(0, size)]
            for size, side in zip(sizes, (pairs.rows, pairs.columns), strict=True)
        )
        self.ahead = Ahead(pairs.device)

    @staticmethod
    def is_away(side: Tensor, pairs: Pairs) -> bool:
        """Whether features are elsewhere than where they are computed on."""
        return side.device != pairs.device

    def visits(self, totals: Tensor | None = None) -> Iterator[BlockVisit]:
        """Every block of rows with every block of columns, its own first.

        From the second block of rows on `totals` (M, D) are brought along with the columns.
        """
        feed, number = self.ahead.over(self._makers(totals)), 0
        for i in range(len(self.rows)):
            (rows,) = next(feed)
            order = self._order(i)
            for col in order:
                cols, *total = next(feed)
                yield BlockVisit(
                    number, self.rows[i], col, self._pairs(self.rows[i], col, rows, cols),
                    self._plan(col), total[0] if total else None, col is order[-1],
                )  # fmt: skip
                del cols, total
                number += 1

    def _order(self, i: int) -> list[slice]:
        first = self.cols[i : i + 1]
        return first + [col for j, col in enumerate(self.cols) if j != i]

    def _makers(self, totals: Tensor | None) -> Iterator[Make]:
        for i, row in enumerate(self.rows):
            yield partial(_cut, row, self.pairs.rows)
            brought = [totals] if totals is not None and i > 0 else []
            for col in self._order(i):
                yield partial(_cut, col, self.pairs.columns, *brought)

    def _plan(self, col: slice) -> Plan:
        sizes = [min(max(size - col.start, 0), col.stop - col.start) for size in self.plan.sizes]
        return self.plan._replace(sizes=sizes)

    def _pairs(self, row: slice, col: slice, rows: Tensor, cols: Tensor) -> Pairs:
        """The pairs of two blocks."""
        pairs, own = self.pairs, row.start == col.start
        kind = "none" if pairs.kind == "aligned" and not own else pairs.kind
        return pairs._replace(
            rows=rows,
            cols=None if pairs.symmetric and own else cols,
            positives=_positives(pairs, row, col),
            row_ids=_or_none(pairs.row_ids, row),
            col_ids=_or_none(pairs.col_ids, col),
            row_labels=_or_none(pairs.row_labels, row),
            col_labels=_or_none(pairs.col_labels, col),
            kind=kind,
            skip_self=pairs.skip_self and own,
        )

    def mirrors(self, visit: BlockVisit) -> bool:
        """Whether the columns are rows of another block, which will meet these rows as columns."""
        return self.pairs.symmetric and visit.row != visit.col


def _cut(span: slice, *sides: Tensor) -> tuple[Tensor, ...]:
    return tuple(side[span] for side in sides)


def _or_none(marks: Tensor | None, span: slice) -> Tensor | None:
    return None if marks is None else marks[span]


def _positives(pairs: Pairs, row: slice, col: slice) -> Tensor | None:
    """Positives by index among some columns; what cannot be stays so."""
    if pairs.positives is None:
        return None
    index = pairs.positives[row].long() - col.start
    inside = (index >= 0) & (index < min(col.stop, pairs.shape[1]) - col.start)
    found = torch.where(inside, index, NO_POSITIVE)
    return torch.where(impossible_positives(pairs)[row], NO_POSITIVE - 1, found)


def reduce(pairs: Pairs, plan: Plan) -> Swept:
    """As `rounds.reduce`."""
    if not is_hosted(pairs):
        return rounds.reduce(pairs, plan)
    blocks, merge = Blocks(pairs, plan), rounds.backend_of(pairs, plan).merge
    memos: list[Tensor] = []
    rows: dict[int, Tensor] = {}
    cols: dict[int, Tensor] = {}
    for visit in blocks.visits():
        swept = rounds.reduce(visit.pairs, visit.plan)
        for side, start, found in ((rows, visit.row.start, swept.rows),
                                   (cols, visit.col.start, swept.cols)):  # fmt: skip
            if side is rows or plan.columns:
                side[start] = merge(side[start], found) if start in side else found
        memos.append(swept.memo)
    like = next(iter(rows.values())).new_empty(0)
    every_col = torch.cat([cols[start] for start in sorted(cols)], 1) if plan.columns else like
    every_row = torch.cat([rows[start] for start in sorted(rows)], 1)
    return Swept(every_row, every_col, rounds.by_visit(memos), like.clone())


def differentiate(
    pairs: Pairs, plan: Plan, swept: Swept, upstream: tuple[Tensor, Tensor], needs: Needs
) -> Grads:
    """As `rounds.differentiate`; gradients are where the features are."""
    if not is_hosted(pairs):
        return rounds.differentiate(pairs, plan, swept, upstream, needs)
    blocks = Blocks(pairs, plan._replace(wide=True))
    total = _Total(blocks, needs)
    for visit in blocks.visits(total.acc):
        known, d_stats = _known(visit, blocks, swept, upstream)
        found = rounds.differentiate(visit.pairs, visit.plan, known, d_stats, needs, total.into)
        # A pair of two blocks that are rows of both is met twice.
        total.add(visit, found, 0.5 if blocks.mirrors(visit) else 1.0)
    return total.grads()


def _known(
    visit: BlockVisit, blocks: Blocks, swept: Swept, upstream: tuple[Tensor, Tensor]
) -> tuple[Swept, tuple[Tensor, Tensor]]:
    """What the forward found about two blocks, and the gradient of each of those numbers."""
    # What weighs without a forward has no memos.
    memo = swept.memo[visit.number] if swept.memo.dim() > 1 else swept.memo
    rows, d_rows = (_part(x, visit.row) for x in (swept.rows, upstream[0]))
    cols, d_cols = (_part(x, visit.col) for x in (swept.cols, upstream[1]))
    if blocks.mirrors(visit):
        cols, d_cols = (_part(x, visit.col) for x in (swept.rows, upstream[0]))
        # Whether a fixed offset held was found out for these rows, not for the columns.
        memo = memo[:0]
    return Swept(rows, cols, memo, rows.new_empty(0)), (d_rows, d_cols)


def _part(stats: Tensor, span: slice) -> Tensor:
    """Some slots of packed stats; (0,) stays so."""
    return stats[:, span].contiguous() if stats.dim() == 2 else stats


def attend(pairs: Pairs, plan: Plan) -> Attended:
    """As `rounds.attend`, the columns being read once."""
    if not is_hosted(pairs):
        return rounds.attend(pairs, plan)
    merge, blocks = rounds.backend_of(pairs, plan).merge, Blocks(pairs, plan)
    totals: dict[int, Attended] = {}
    shared = _Shared(blocks)
    for visit in blocks.visits():
        for part in shared.apart(visit):
            found, start = rounds.attend(part, visit.plan), visit.row.start
            totals[start] = totals[start].join(found, merge) if start in totals else found
    first, *others = (totals[start] for start in sorted(totals))
    if not others:
        return first
    stats, mean, product = zip(first, *others, strict=True)
    return Attended(torch.cat(stats, 1), torch.cat(mean), torch.cat(product))


class _Shared:
    """Columns that have an id that some row has: few of a pool.

    They are put aside and swept together, and all others as if there were no ids, which is faster.
    Ranks of a group must sweep alike, so not there.
    """

    def __init__(self, blocks: Blocks) -> None:
        pairs, self.blocks = blocks.pairs, blocks
        by_place = pairs.kind != "none" or pairs.skip_self
        self.counts: dict[int, int] = {}  # of blocks of columns, by where they start
        self.aside: list[tuple[Tensor, Tensor]] = []  # features and ids
        if pairs.row_ids is None or by_place or blocks.plan.group:
            return
        assert pairs.col_ids is not None
        known = pairs.row_ids.sort().values
        self.masks = {col.start: _is_in(pairs.col_ids[col], known) for col in blocks.cols}
        found = torch.stack([mask.sum() for mask in self.masks.values()]).tolist()
        self.counts = dict(zip(self.masks, found, strict=True))

    def apart(self, visit: BlockVisit) -> Iterator[Pairs]:
        """A visit's pairs without those; and those of many visits, once they are many."""
        count, m = self.counts.get(visit.col.start, -1), visit.pairs.shape[1]
        # Without ids, or with so many that it does not pay.
        if count < 0 or 2 * count > m:
            yield visit.pairs
        else:
            cols = self._without(visit, count) if count else visit.pairs.cols
            yield visit.pairs._replace(cols=cols, row_ids=None, col_ids=None)
        height = self.blocks.cols[0].stop
        if self.aside and (visit.last_col or sum(len(x) for x, _ in self.aside) >= height):
            cols, ids = (torch.cat(parts) for parts in zip(*self.aside, strict=True))
            self.aside.clear()
            yield visit.pairs._replace(cols=cols, col_ids=ids)

    def _without(self, visit: BlockVisit, count: int) -> Tensor:
        """The block's columns but for so many that are put aside, in another order."""
        pairs, mask = visit.pairs, self.masks[visit.col.start]
        assert pairs.cols is not None
        assert pairs.col_ids is not None
        left, copied = len(mask) - count, pairs.cols.device != self.blocks.pairs.columns.device
        cols = pairs.cols if copied else pairs.cols.clone()
        (places,) = mask.nonzero_static(size=count).T
        self.aside.append((cols[places], pairs.col_ids[places]))
        # The last ones take their places: of those first that stay. What is left over goes to
        # places beyond.
        cols[places] = cols[left + mask[left:].to(torch.uint8).argsort(stable=True)]
        return cols[:left]


def _is_in(ids: Tensor, known: Tensor) -> Tensor:
    """Which of some ids (m,) are among sorted ones."""
    at = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    return known[at] == ids


def weigh(pairs: Pairs, plan: Plan, weight: Tensor, needs: Needs) -> tuple[Tensor, Scaled]:
    """As `rounds.weigh`; gradients are where the features are."""
    if not is_hosted(pairs):
        return rounds.weigh(pairs, plan, weight, needs)
    blocks = Blocks(pairs, plan._replace(wide=True))
    apart = pairs.rows.dtype == torch.float16  # see `Scaled`: bf16 has the range of fp32
    total, value = _Total(blocks, needs, apart), weight.new_zeros(())
    for visit in blocks.visits(total.acc):
        part, found = rounds.weigh(visit.pairs, visit.plan, weight[visit.row], needs, total.into)
        value += part
        total.add(visit, found.grads, 1.0)
    return value, Scaled(total.grads(), *total.gains)


class _Total:
    """Gradients so far: of one block of rows on the device, of columns where the columns are."""

    def __init__(self, blocks: Blocks, needs: Needs, apart: bool = False) -> None:
        self.blocks, self.needs, self.apart = blocks, needs, apart
        pairs = blocks.pairs
        zero = torch.zeros((), dtype=exact_dtype(pairs.scale), device=pairs.device)
        self.scale, self.bias = zero, zero.clone()
        ones = torch.ones(max(pairs.shape[:2]), dtype=pairs.dtype, device=pairs.device)
        self.gains = ones[: pairs.shape[0]].clone(), ones[: pairs.shape[1]].clone()
        self.into: Tensor | None = None  # of the block of rows that is there
        self.rows, self.cols = (
            _room(side, side.dtype, pairs) if wanted else None
            for side, wanted in ((pairs.rows, needs.rows), (pairs.columns, needs.cols))
        )
        # Columns meet several blocks of rows, and are added up in between.
        several = len(blocks.rows) > 1 and needs.cols
        self.acc = _room(pairs.columns, pairs.dtype, pairs) if several else None

    def add(self, visit: BlockVisit, found: Grads, share: float) -> None:
        """Add those of a visit, of the scale a share."""
        if self.needs.scale:
            self.scale += share * found.scale
        if self.needs.bias:
            self.bias += share * found.bias
        self.into = found.rows
        if self.rows is not None and visit.last_col:
            assert found.rows is not None
            self._send(self.rows, visit.row, found.rows, 0)
            self.into = None
        if self.cols is not None:
            assert found.cols is not None
            total = found.cols if visit.total is None else found.cols.add_(visit.total)
            if visit.row is self.blocks.rows[-1]:
                self._send(self.cols, visit.col, total, 1)
            else:
                assert self.acc is not None
                self.blocks.ahead.send(total, self.acc[visit.col])

    def _send(self, home: Tensor, span: slice, x: Tensor, side: int) -> None:
        gain = self.gains[side][span] if self.apart else None
        self.blocks.ahead.send(rounded(x, home.dtype, gain), home[span])

    def grads(self) -> Grads:
        """All of them, once they are where they belong."""
        self.blocks.ahead.wait()
        dtype = self.blocks.pairs.dtype
        return Grads(self.rows, self.cols, self.scale.to(dtype), self.bias.to(dtype))


def _room(features: Tensor, dtype: torch.dtype, pairs: Pairs) -> Tensor:
    """Memory for gradients of features where those are, pinned if it is the host's."""
    pinned = features.device.type == "cpu" and pairs.device.type == "cuda"
    return torch.empty(features.shape, dtype=dtype, device=features.device, pin_memory=pinned)


def rescale(grads: Tensor, gain: Tensor) -> None:
    """Multiply each row of a gradient in host memory by its gain, on the gain's device."""
    for span in row_spans(grads):
        grads[span].copy_(grads[span].to(gain.device) * gain[span, None])
