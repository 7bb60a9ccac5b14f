"""A sweep over the columns of all ranks: one backend call for each visit, and what they add up to.

Without a group there is one visit, of one's own columns, and these functions are the backend's.
"""

import torch
from torch import Tensor

from tilewise import backends
from tilewise.backends.blocks import rounded
from tilewise.backends.plan import Attended, Backend, Grads, Needs, Plan, Scaled, Swept
from tilewise.groups import is_same
from tilewise.pairs import Pairs, exact_dtype
from tilewise.reductions import nothing
from tilewise.ring import Carry, Parts, Ring, Visit, ring_of


def backend_of(pairs: Pairs, plan: Plan) -> Backend:
    """The backend that a plan runs on."""
    choice = backends.choose(plan.backend, pairs.device, pairs.rows.dtype, plan.precision)
    return backends.BACKENDS[choice.name]


def reduce(pairs: Pairs, plan: Plan) -> Swept:
    """The stats of this rank's rows and columns over all columns and rows there are."""
    ring = _ring(pairs, plan)
    like = pairs.rows.new_empty(0, plan.num_stats, dtype=pairs.dtype)
    merge = backend_of(pairs, plan).merge
    carry = Carry(like, lambda a, b: merge(a.t(), b.t()).t()) if plan.columns else None
    rows, memos, kept = None, [], like.new_empty(0)
    for visit in ring.visits(_cargo(pairs), carry):
        swept = _reduce(_at(pairs, visit), plan)
        rows = swept.rows if rows is None else merge(rows, swept.rows)
        memos.append(swept.memo)
        kept = swept.kept if visit.own else kept
        visit.found = swept.cols.t() if plan.columns else None
    assert rows is not None
    cols = rows.new_empty(0) if carry is None else _home(carry, like.dtype).t().contiguous()
    return Swept(rows, cols, memos[0] if len(memos) == 1 else by_visit(memos), kept)


def _reduce(pairs: Pairs, plan: Plan) -> Swept:
    n, m, _ = pairs.shape
    if n and m:
        return backend_of(pairs, plan).reduce(pairs, plan)
    like, k = pairs.rows.new_empty(0, dtype=pairs.dtype), plan.num_stats
    # Four tensors: an op's results may not share memory.
    cols = nothing(k, like, m) if plan.columns else like.new_empty(0)
    return Swept(nothing(k, like, n), cols, like.new_empty(0), like)


def differentiate(
    pairs: Pairs,
    plan: Plan,
    swept: Swept,
    upstream: tuple[Tensor, Tensor],
    needs: Needs,
    into: Tensor | None = None,
) -> Grads:
    """Gradients of what `reduce` returned on all ranks, given those of this rank's numbers.

    Those of the rows are added to `into`, as for a backend.
    """
    ring, dtype = _ring(pairs, plan), _grad_dtype(pairs, plan)
    plan = plan._replace(wide=plan.wide or ring.world > 1)
    # Where the columns are the rows, a pair of two ranks is swept by both: each finds the gradient
    # of its own rows, from the stats of both ends, and half of the scale's.
    sides = (swept.rows, upstream[0]) if pairs.symmetric else (swept.cols, upstream[1])
    cargo = _cargo(pairs, *(x.t() for x in sides if ring.world > 1 and x.dim() == 2))
    like = pairs.rows.new_empty(0, pairs.shape[2], dtype=pairs.dtype)
    carry = Carry(like, Tensor.add_) if needs.cols else None
    total = _Total(pairs, needs, into)
    for i, visit in enumerate(ring.visits(cargo, carry)):
        known = swept._replace(memo=swept.memo[i] if swept.memo.dim() == 2 else swept.memo)
        d_stats = upstream
        if not visit.own:
            cols, d_cols = _vectors(pairs, visit)
            known, d_stats = known._replace(cols=cols, kept=cols[:0]), (upstream[0], d_cols)
        share = 1.0
        if pairs.symmetric and not visit.own:
            # Whether a fixed offset held was found out for this rank's rows, not for the columns.
            known, share = known._replace(memo=known.memo[:0]), 0.5
        visit.found = total.add(
            _differentiate(_at(pairs, visit), plan, known, d_stats, needs, total.rows), share
        )
    # One side after the other: what was added up is twice as large as what it is rounded to.
    return total.grads(dtype, None if carry is None else _home(carry, dtype))


def _differentiate(
    pairs: Pairs,
    plan: Plan,
    swept: Swept,
    upstream: tuple[Tensor, Tensor],
    needs: Needs,
    into: Tensor | None,
) -> Grads:
    n, m, _ = pairs.shape
    if n and m:
        return backend_of(pairs, plan).differentiate(pairs, plan, swept, upstream, needs, into)
    return _no_gradients(pairs, needs, into)


def weigh(
    pairs: Pairs, plan: Plan, weight: Tensor, needs: Needs, into: Tensor | None = None
) -> tuple[Tensor, Scaled]:
    """This rank's sum of weight_i times the softplus sum of row i over all columns there are.

    Gradients are those of the sum of it over all ranks; `into` as for a backend.
    """
    ring, (n, m, d), dtype = _ring(pairs, plan), pairs.shape, _grad_dtype(pairs, plan)
    plan = plan._replace(wide=plan.wide or ring.world > 1)
    like = pairs.rows.new_empty(0, d, dtype=pairs.dtype)
    carry = Carry(like, Tensor.add_) if needs.cols else None
    total, value, found = _Total(pairs, needs, into), like.new_zeros(()), None
    for visit in ring.visits(_cargo(pairs), carry):
        part, found = _weigh(_at(pairs, visit), plan, weight, needs, total.rows)
        value += part
        visit.found = total.add(found.grads, 1.0)
    assert found is not None
    gains = found[1:] if ring.world == 1 else (weight.new_ones(n), weight.new_ones(m))
    # bf16 has the range of fp32: only fp16 keeps its rows' powers of two apart.
    apart = gains if plan.wide and dtype == torch.float16 else (None, None)
    cols = None if carry is None else _home(carry, dtype, apart[1])
    return value, Scaled(total.grads(dtype, cols, apart[0]), *gains)


def _weigh(
    pairs: Pairs, plan: Plan, weight: Tensor, needs: Needs, into: Tensor | None
) -> tuple[Tensor, Scaled]:
    n, m, _ = pairs.shape
    if n and m:
        return backend_of(pairs, plan).weigh(pairs, plan, weight, needs, into)
    nothing = _no_gradients(pairs, needs, into)
    return nothing.scale, Scaled(nothing, weight.new_ones(n), weight.new_ones(m))


def _no_gradients(pairs: Pairs, needs: Needs, into: Tensor | None) -> Grads:
    """Of no pairs."""
    n, m, d = pairs.shape
    like = pairs.rows.new_zeros((), dtype=pairs.dtype)
    rows, cols = (like.new_zeros(size, d) if wanted else None
                  for size, wanted in ((n, needs.rows), (m, needs.cols)))  # fmt: skip
    # Two tensors: an op's results may not share memory.
    return Grads(rows if into is None else into, cols, like, like.clone())


def is_common(upstream: Tensor, plan: Plan) -> bool:
    """Whether all ranks have the same number; alone it always is."""
    return not plan.group or is_same(upstream, plan.group)


class _Total:
    """Gradients of this rank's rows, scale and bias so far."""

    def __init__(self, pairs: Pairs, needs: Needs, into: Tensor | None) -> None:
        self.pairs, self.needs = pairs, needs
        self.rows = into
        self.scale: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, grads: Grads, share: float) -> Tensor | None:
        """Add those of a visit, of the scale a share; returns the columns' own."""
        self.rows = grads.rows  # in the same memory, but for the first
        if self.needs.scale:
            self.scale = _plus(self.scale, grads.scale, share)
        if self.needs.bias:
            self.bias = _plus(self.bias, grads.bias, share)
        return grads.cols

    def grads(self, dtype: torch.dtype, cols: Tensor | None, gain: Tensor | None = None) -> Grads:
        """All of them, those of the rows rounded."""
        rows = None if self.rows is None else rounded(self.rows, dtype, gain)
        like = self.pairs.rows.new_empty(0, dtype=self.pairs.dtype)
        # Two tensors: an op's results may not share memory. What nobody wants is not written.
        numbers = (like.new_empty(()) if x is None else x.to(like) for x in (self.scale, self.bias))
        return Grads(rows, cols, *numbers)


def _plus(total: Tensor | None, more: Tensor, share: float) -> Tensor:
    """A sum so far and a share of something, exactly; of the first as it is."""
    if total is None and share == 1.0:
        return more
    own = share * more.to(exact_dtype(more))
    return own if total is None else total + own


def _home(carry: Carry, dtype: torch.dtype, gain: Tensor | None = None) -> Tensor:
    """What was found about one's own columns, in one piece; `gain` as for `rounded`."""
    parts, carry.home = carry.home, []
    if len(parts) == 1:
        return rounded(parts[0], dtype, gain)
    whole, start = carry.like.new_empty(sum(map(len, parts)), *carry.like.shape[1:], dtype=dtype), 0
    for part in parts:
        stop = start + len(part)
        whole[start:stop] = rounded(part, dtype, None if gain is None else gain[start:stop])
        start = stop
    return whole


def attend(pairs: Pairs, plan: Plan) -> Attended:
    """This rank's rows over all columns there are, all of them frozen: each passes by once."""
    ring, backend, total = _ring(pairs, plan), backend_of(pairs, plan), None
    for visit in ring.visits(_cargo(pairs)):
        found = _attend(_at(pairs, visit), plan, backend)
        total = found if total is None else total.join(found, backend.merge)
    assert total is not None
    return total


def _attend(pairs: Pairs, plan: Plan, backend: Backend) -> Attended:
    n, m, d = pairs.shape
    if n and m:
        return backend.attend(pairs, plan)
    like = pairs.rows.new_zeros(n, d, dtype=pairs.dtype)
    return Attended(nothing(plan.num_stats, like, n), like, like.new_zeros(n))


def _grad_dtype(pairs: Pairs, plan: Plan) -> torch.dtype:
    """What the features' gradients are handed over in."""
    return pairs.dtype if plan.wide else pairs.rows.dtype


def _ring(pairs: Pairs, plan: Plan) -> Ring:
    return ring_of(plan.group, plan.sizes or [pairs.shape[1]], plan.nodes)


def _cargo(pairs: Pairs, *more: Tensor) -> Parts:
    """What of the columns travels: features, marks, and vectors (m, k)."""
    marks = (x for x in (pairs.col_ids, pairs.col_labels) if x is not None)
    # NCCL has no integers of 16 bits.
    wide = (x if x.dtype == torch.int64 else x.int() for x in marks)
    return (pairs.columns, *wide, *more)


def _at(pairs: Pairs, visit: Visit) -> Pairs:
    """This rank's rows against some columns; positives by place are among one's own."""
    if visit.own:
        return pairs
    features, *marks = visit.cargo
    col_ids = None if pairs.col_ids is None else marks.pop(0)
    col_labels = None if pairs.col_labels is None else marks.pop(0)
    return pairs._replace(
        cols=features,
        positives=None,
        col_ids=col_ids,
        col_labels=col_labels,
        kind="label" if pairs.kind == "label" else "none",
        skip_self=False,
    )


def _vectors(pairs: Pairs, visit: Visit) -> tuple[Tensor, Tensor]:
    """The columns' stats and the gradient of each of those, or (0,) twice where none travel."""
    more = visit.cargo[len(_cargo(pairs)) :]
    if not more:
        empty = pairs.rows.new_empty(0, dtype=pairs.dtype)
        return empty, empty
    return more[0].t().contiguous(), more[1].t().contiguous()


def by_visit(memos: list[Tensor]) -> Tensor:
    """What the backend wants to know again, of each visit, 0s of those without pairs."""
    largest = max(memos, key=Tensor.numel)
    return torch.stack([memo if memo.numel() else torch.zeros_like(largest) for memo in memos])
