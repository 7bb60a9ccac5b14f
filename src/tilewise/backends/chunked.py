"""The sweep in plain PyTorch, tile by tile: any device, workspace constant in the batch.

Tiles are cut so that the products dominate: logits are written into one buffer that stays in
cache, exponentials and weights are applied in place, gradients accumulate in fp32 (fp64 for fp64).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.blocks import (
    Block,
    blocks,
    inner_rows,
    mirrored,
    narrow,
    panels,
    row_spans,
    store,
)
from tilewise.backends.plan import Attended, Grads, Needs, Plan, Scaled, Swept
from tilewise.pairs import Pairs, exact_dtype
from tilewise.positives import Mask, Slots, exclude, find, lift, poison
from tilewise.reductions import (
    INFINITY,
    LogSums,
    PairWeights,
    Side,
    Stats,
    fixed_offset,
    fold_both,
    merge_stats,
    offset_holds,
    power_of_two,
    softplus,
)
from tilewise.tiles import Tile

DzOf = Callable[[Block], Tensor]
Gains = tuple[Tensor, Tensor] | tuple[None, None]


merge = merge_stats


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot run here: it always can."""
    return None


def reduce(pairs: Pairs, plan: Plan) -> Swept:
    """The stats of rows and columns."""
    stats = _softplus_sums if plan.reduction == "softplus" else _log_sums
    rows, cols = stats(pairs, plan)
    return Swept(rows, cols, cols.new_empty(0), cols.new_empty(0))


def _log_sums(pairs: Pairs, plan: Plan) -> tuple[Tensor, Tensor]:
    offset = fixed_offset(pairs)
    rows, cols = _tally(pairs, plan, offset)
    if offset is not None:
        # A sum of 0 is either a row without negatives or underflow: the second sweep will tell.
        sides = [side for side in (rows, cols) if side is not None]
        whole = torch.cat([torch.log(side.negatives.total) + offset for side in sides])
        if not offset_holds(offset, whole, max(pairs.shape[:2])):
            rows, cols = _tally(pairs, plan, None)
    return _finish(pairs, rows, None if pairs.symmetric else cols)


def differentiate(
    pairs: Pairs,
    plan: Plan,
    swept: Swept,
    upstream: tuple[Tensor, Tensor],
    needs: Needs,
    into: Tensor | None = None,
) -> Grads:
    """Gradients of what `reduce` returned, given the gradient of each of its numbers."""
    # A power of two, so exact, keeps weights in range however small the upstream gradient is.
    peak = power_of_two(torch.stack([side.abs().max() for side in upstream if side.numel()]).max())
    d_rows, d_cols = (Stats.unpack(side / peak) if side.numel() else None for side in upstream)
    assert d_rows is not None
    if plan.reduction == "softplus":
        dz_of = _softplus_dz(pairs, d_rows.values, d_cols.values if d_cols is not None else None)
    else:
        rows = Side(Stats.unpack(swept.rows), d_rows)
        cols = Side(Stats.unpack(swept.cols), d_cols) if d_cols is not None else None
        dz_of = _log_sum_dz(pairs, plan, rows, rows if pairs.symmetric else cols)
    return _Gradients(pairs, needs, peak, wide=plan.wide, into=into).sweep(plan, dz_of)


def attend(pairs: Pairs, plan: Plan) -> Attended:
    """Row stats; the mean column (N, D) under each row's softmax; its product with the row.

    d lse_i / d rows_i = scale * mean_i: over frozen columns the gradient comes with the forward.
    """
    rows = _Tally(pairs.shape[0], pairs, plan, None)
    mean = pairs.rows.new_zeros(pairs.rows.shape, dtype=pairs.dtype)
    for block in blocks(pairs, plan):
        _lift_positives(pairs, block, rows, None)
        acc = mean[block.tile.rows]
        acc.mul_(rows.negatives.fold(block.tile.rows, block.z, 1, out=block.z)[:, None])
        acc.addmm_(block.z, block.right)
    # A row without negatives has total 0 and mean 0.
    mean.div_(torch.where(rows.negatives.total == 0, 1.0, rows.negatives.total)[:, None])
    return Attended(_finish(pairs, rows, None)[0], mean, inner_rows(pairs, mean))


def weigh(
    pairs: Pairs, plan: Plan, weight: Tensor, needs: Needs, into: Tensor | None = None
) -> tuple[Tensor, Scaled]:
    """Sum over i of weight_i times the softplus sum of row i, with its gradients, in one sweep."""
    values = pairs.rows.new_zeros(pairs.shape[0], dtype=pairs.dtype)
    peak = power_of_two(weight.abs().max())
    dz_of = _softplus_dz(pairs, weight / peak, None, values)
    gains = (torch.ones_like(values), values.new_ones(pairs.shape[1]))
    apart = (None, None) if plan.wide else gains
    grads = _Gradients(pairs, needs, peak, apart, plan.wide, into).sweep(plan, dz_of)
    return (weight * (values + poison(pairs)[0])).sum(), Scaled(grads, *gains)


# Forward


class _Tally:
    """What has been seen of each row (or column) so far."""

    def __init__(self, size: int, pairs: Pairs, plan: Plan, offset: float | None) -> None:
        self.negatives = LogSums(size, pairs.rows, pairs.dtype, offset)
        self.positives = LogSums(size, pairs.rows, pairs.dtype, None)
        self.positive_sum, self.positive_count = torch.zeros_like(
            self.negatives.total.expand(2, -1)
        )
        counted = size if plan.sums else 0
        self.negative_sum, self.negative_count = self.negatives.total.new_zeros(2, counted)

    def add_positives(self, slots: slice, logits: Tensor, present: Tensor, dim: int) -> None:
        """Fold logits that are -inf where there is no positive."""
        self.positive_sum[slots] += logits.masked_fill(~present, 0.0).sum(dim)
        self.positive_count[slots] += present.sum(dim)
        self.positives.fold(slots, logits, dim, out=torch.empty_like(logits))

    def add_negative_sums(self, slots: slice, z: Tensor, dim: int) -> None:
        absent = z == -INFINITY
        self.negative_sum[slots] += z.masked_fill(absent, 0.0).sum(dim)
        self.negative_count[slots] += (~absent).sum(dim)

    def finish(self, poison: Tensor) -> Tensor:
        """Packed stats; `poison` is 0, or NaN where they cannot be right."""
        whole, rest = self.positives.value()
        offset, value = self.negatives.value()
        offset = torch.where(value == -INFINITY, whole, offset)
        positives = torch.where(self.positive_count > 0, (whole - offset) + rest, 0.0)
        # A row that cannot be right counts, so that the loss shows it.
        return Stats(
            values=value + poison,
            positives=positives + poison,
            positive_sum=self.positive_sum - self.positive_count * offset,
            positive_count=torch.where(poison.isnan(), 1.0, self.positive_count),
            offset=offset,
            negative_sum=self.negative_sum - self.negative_count * offset[: len(self.negative_sum)],
            negative_count=self.negative_count,
        ).pack()


def _tally(pairs: Pairs, plan: Plan, offset: float | None) -> tuple[_Tally, _Tally | None]:
    n, m, _ = pairs.shape
    rows = _Tally(n, pairs, plan, offset)
    cols = rows if pairs.symmetric else _Tally(m, pairs, plan, offset) if plan.columns else None
    for block in blocks(pairs, plan):
        tile, z = block.tile, block.z
        mirror = cols if mirrored(pairs, tile) else None
        _lift_positives(pairs, block, rows, mirror)
        if plan.sums:
            rows.add_negative_sums(tile.rows, z, 1)
            if mirror is not None:
                mirror.add_negative_sums(tile.cols, z, 0)
        fold_both(
            z, tile, rows.negatives, mirror.negatives if mirror is not None else None, block.spare
        )
    return rows, cols


def _lift_positives(pairs: Pairs, block: Block, rows: _Tally, cols: _Tally | None) -> None:
    """Leave only the negatives in the block's logits; the positives go to the tallies."""
    found = find(pairs, block.tile)
    if found is not None:
        logits = lift(found, block.z)
        rows.add_positives(block.tile.rows, logits, found.present, 1)
        if cols is not None:
            present = found.by_column(found.present, False)
            cols.add_positives(block.tile.cols, found.by_column(logits, -INFINITY), present, 0)
    exclude(pairs, block.tile, block.z)


def _finish(pairs: Pairs, rows: _Tally, cols: _Tally | None) -> tuple[Tensor, Tensor]:
    row_poison, col_poison = poison(pairs)
    packed = rows.finish(row_poison)
    return packed, packed.new_empty(0) if cols is None else cols.finish(col_poison)


def _softplus_sums(pairs: Pairs, plan: Plan) -> tuple[Tensor, Tensor]:
    n, m, _ = pairs.shape
    rows = pairs.rows.new_zeros(n, dtype=pairs.dtype)
    cols = rows.new_zeros(m if plan.columns else 0)
    for block in blocks(pairs, plan):
        value = softplus(_signed(pairs, block))
        rows[block.tile.rows] += value.sum(1)
        if plan.columns:
            cols[block.tile.cols] += value.sum(0)
    row_poison, col_poison = poison(pairs)
    return (rows + row_poison)[None], (cols + col_poison)[None] if plan.columns else cols


def _signed(pairs: Pairs, block: Block) -> Tensor:
    """Logits with the sign turned at positives and -inf where a pair does not count, in place."""
    z = block.z if pairs.bias is None else block.z.add_(pairs.bias)
    found = find(pairs, block.tile)
    if found is None:
        exclude(pairs, block.tile, z)
    else:
        logits = lift(found, z)
        exclude(pairs, block.tile, z)
        found.put(z, -logits)
    return z


# Backward


def _log_sum_dz(pairs: Pairs, plan: Plan, rows: Side, cols: Side | None) -> DzOf:
    """dz of a block: the negatives' weights, and the positives' own derivative in their place."""
    offset = fixed_offset(pairs)
    if offset is not None:
        known = [side.known for side in (rows, cols) if side is not None]
        whole = torch.cat([side.offset[side.values != -INFINITY] for side in known])
        if not offset_holds(offset, whole, max(pairs.shape[:2])):
            offset = None
    weights = PairWeights(offset, rows, cols)

    def dz_of(block: Block) -> Tensor:
        tile, z = block.tile, block.z
        found = find(pairs, tile)
        at_positives = None
        if found is not None:
            at_positives = _positives_dz(found, lift(found, z), tile, (rows, cols))
        exclude(pairs, tile, z)
        extra = _sums_dz(block, rows.d, cols.d if cols is not None else None) if plan.sums else None
        dz = weights.apply(z, tile, block.spare)
        if extra is not None:
            dz.add_(extra)
        if found is not None and at_positives is not None:
            found.put(dz, at_positives)
        return dz

    return dz_of


def _sums_dz(block: Block, rows: Stats, cols: Stats | None) -> Tensor:
    """What the sums of negative logits add to each negative's dz (n, m)."""
    extra = rows.negative_sum[block.tile.rows, None].expand_as(block.z)
    if cols is not None:
        extra = extra + cols.negative_sum[None, block.tile.cols]
    return extra.masked_fill(block.z == -INFINITY, 0.0)


def _positives_dz(
    found: Slots | Mask, logits: Tensor, tile: Tile, sides: tuple[Side, Side | None]
) -> Tensor:
    """dz at the positives: what their log-sum-exp and their sum pass on, for rows and columns."""
    rows, cols = sides
    dz = _positives_dz_of([side[tile.rows, None] for side in _vectors(rows)], found, logits)
    if cols is not None:
        at = [found.of_columns(side[tile.cols]) for side in _vectors(cols)]
        dz = dz + _positives_dz_of(at, found, logits)
    return dz


def _vectors(side: Side) -> tuple[Tensor, ...]:
    return side.known.offset, side.known.positives, side.d.positives, side.d.positive_sum


def _positives_dz_of(vectors: list[Tensor], found: Slots | Mask, logits: Tensor) -> Tensor:
    offset, value, d_value, d_sum = vectors
    return d_value * found.share(logits - offset, value) + d_sum


def _softplus_dz(
    pairs: Pairs, d_rows: Tensor, d_cols: Tensor | None, values: Tensor | None = None
) -> DzOf:
    """dz of a block, sigmoid(signed z) * sign * (d_row + d_col); `values` gathers the row sums."""

    def dz_of(block: Block) -> Tensor:
        tile = block.tile
        t = _signed(pairs, block)
        if values is not None:
            values[tile.rows] += softplus(t).sum(1)
        d = d_rows[tile.rows, None]
        if d_cols is not None:
            d = torch.add(d, d_cols[None, tile.cols], out=block.spare)
        dz = t.sigmoid_().mul_(d)
        found = find(pairs, tile)
        if found is not None:
            found.put(dz, -found.get(dz))
        return dz

    return dz_of


class _Gradients:
    """Multiplies dz into the features: d_rows panel by panel, d_cols in one accumulator.

    Where z is symmetric both products go to the one accumulator. dz comes divided by `peak`, which
    returns before anything is rounded; with `gains` each row of a gradient is divided by a power
    of two that is left there instead. d_rows are added to `into` where it is given.
    """

    def __init__(
        self,
        pairs: Pairs,
        needs: Needs,
        peak: Tensor,
        gains: Gains = (None, None),
        wide: bool = False,
        into: Tensor | None = None,
    ) -> None:
        self.pairs, self.needs, self.peak, self.gains = pairs, needs, peak, gains
        self.into = into
        self.dtype = pairs.dtype if wide else pairs.rows.dtype
        self.factor = pairs.scale.to(pairs.dtype) * peak
        self.scale, self.bias = pairs.rows.new_zeros(2, dtype=exact_dtype(pairs.rows))
        self.rows, self.acc = None, None
        if needs.rows and not pairs.symmetric:
            self.rows = into
            if into is None:  # contiguous, as the op promises
                self.rows = pairs.rows.new_empty(pairs.rows.shape, dtype=self.dtype)
        if needs.rows if pairs.symmetric else needs.cols:
            self.acc = pairs.rows.new_zeros(pairs.columns.shape, dtype=pairs.dtype)

    def sweep(self, plan: Plan, dz_of: DzOf) -> Grads:
        """Sweep all pairs once, with dz from `dz_of`."""
        for panel in panels(self.pairs, plan, keep=self.needs.scale):
            row_acc = (
                self.acc[panel.rows] if self.pairs.symmetric and self.acc is not None else None
            )
            if self.rows is not None:
                row_acc = torch.zeros_like(panel.left)
            for block in panel.blocks:
                self._add(block, dz_of(block), row_acc)
            if self.into is not None and row_acc is not None:
                self.into[panel.rows] += row_acc.mul_(self.factor)
            elif self.rows is not None and row_acc is not None:
                store(self.rows, panel.rows, row_acc.mul_(self.factor), self.gains[0])
        return self._finish()

    def _add(self, block: Block, dz: Tensor, row_acc: Tensor | None) -> None:
        twice = mirrored(self.pairs, block.tile)
        if row_acc is not None:
            row_acc.addmm_(dz, block.right)
        if self.acc is not None and twice:
            self.acc[block.tile.cols].addmm_(dz.t(), block.left)
        # On the diagonal of a symmetric z each pair carries the weight of both its ends.
        share = 1.0 if twice else 0.5
        if self.needs.bias:
            self.bias += share * dz.sum(dtype=self.bias.dtype)
        if self.needs.scale:
            self.scale += share * block.cosines.mul_(dz).sum(1).to(self.scale.dtype).sum()

    def _finish(self) -> Grads:
        cols = None
        if self.acc is not None:
            cols = narrow(self.acc, self.dtype)
            for span in row_spans(self.acc):
                store(cols, span, self.acc[span] * self.factor, self.gains[1])
        sides = (cols, None) if self.pairs.symmetric else (self.rows, cols)
        return Grads(
            *sides, *((x * self.peak).to(self.pairs.dtype) for x in (self.scale, self.bias))
        )
