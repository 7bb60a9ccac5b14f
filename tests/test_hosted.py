"""The sweep out of core, block by block, against the ordinary one.

Here both are on the CPU, and blocks are small: `test_gpu_any_batch.py` has host and device.
"""

import threading

import pytest
import torch
from torch.nn import functional

import ranks
import tilewise as tw
from tilewise import ahead, hosted

D = 8


def unit(n, seed=0, dtype=torch.float64):
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return functional.normalize(x, dim=1).to(dtype)


@pytest.fixture
def blocks(monkeypatch):
    """Everything counts as hosted, in blocks of 16 rows of float64."""
    make_small(monkeypatch.setattr)


def make_small(put=setattr):
    put(hosted, "BLOCK_BYTES", 16 * D * 8)
    put(hosted.Blocks, "is_away", staticmethod(lambda side, pairs: True))


MARKS = torch.arange(50) % 7
WEIGHT = torch.linspace(0.5, 2.0, 50, dtype=torch.float64)
INDEX = torch.arange(50).flip(0) - 1  # the last has none

LOSSES = {
    "clip": lambda a, b, s, **k: tw.clip_loss(a, b, s, **k),
    "clip-ids": lambda a, b, s, **k: tw.clip_loss(a, b, s, ids=MARKS, **k),
    "clip-labels": lambda a, b, s, **k: tw.clip_loss(a, b, s, labels=MARKS, **k),
    "clip-smooth": lambda a, b, s, **k: tw.clip_loss(a, b, s, label_smoothing=0.1, **k),
    "clip-weight": lambda a, b, s, **k: tw.clip_loss(a, b, s, weight=WEIGHT, bias=s / 9, **k),
    "siglip": lambda a, b, s, **k: tw.siglip_loss(a, b, s, -s, **k) * 0.7,
    "siglip-weight": lambda a, b, s, **k: tw.siglip_loss(a, b, s, weight=WEIGHT, **k),
    "siglip-labels": lambda a, b, s, **k: tw.siglip_loss(a, b, s, labels=MARKS, **k),
    "siglip-rows": lambda a, b, s, **k: (
        tw.siglip_loss(a, b, s, reduction="none", **k).square().sum()
    ),
    "info_nce-more-keys": lambda a, b, s, **k: tw.info_nce(a[:30], b, s, **k),
    "info_nce-more-queries": lambda a, b, s, **k: tw.info_nce(a, b[:30], s, **k),
    "info_nce-index": lambda a, b, s, **k: tw.info_nce(a, b, s, positives=INDEX, **k),
    "info_nce-frozen": lambda a, b, s, **k: tw.info_nce(a, b.detach(), s, **k) + 0 * b.sum(),
    "info_nce-frozen-index": lambda a, b, s, **k: (
        tw.info_nce(a, b.detach(), s, positives=INDEX, ids=MARKS, **k) + 0 * b.sum()
    ),
    "info_nce-frozen-queries": lambda a, b, s, **k: (
        tw.info_nce(a.detach(), b, s, **k) + 0 * a.sum()
    ),
    "info_nce-pool": lambda a, b, s, **k: tw.info_nce(
        a[:20], b[:20], s, negatives=b[20:].detach(), ids=MARKS[:20], negative_ids=MARKS[20:], **k
    ),
    "nt_xent": lambda a, b, s, **k: tw.nt_xent(a, b, s, **k),
    "nt_xent-ids": lambda a, b, s, **k: tw.nt_xent(a, b, s, ids=MARKS, label_smoothing=0.2, **k),
    "sup_con": lambda a, b, s, **k: tw.sup_con(a + b, MARKS, s, **k),
}


def step(loss, dtype=torch.float64, scale=3.0, draw=0, **how):
    a, b = (unit(50, 2 * draw + side, dtype).requires_grad_() for side in (0, 1))
    s = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    value = loss(a, b, s, **how)
    value.backward()
    return value.detach(), a.grad, b.grad, s.grad


@pytest.mark.parametrize("backend", ["chunked", "dense"])
@pytest.mark.parametrize("name", LOSSES)
def test_blocks_add_up(name, backend, monkeypatch):
    wanted = step(LOSSES[name])
    make_small(monkeypatch.setattr)
    for scale in (3.0, 900.0):
        if scale > 3:
            monkeypatch.undo()
            wanted = step(LOSSES[name], scale=scale)
            make_small(monkeypatch.setattr)
        for x, y in zip(step(LOSSES[name], scale=scale, backend=backend), wanted, strict=True):
            assert (x - y).norm() <= 1e-12 * max(1.0, float(y.norm()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["clip", "siglip", "nt_xent", "info_nce-frozen"])
def test_low_precision(name, dtype, monkeypatch):
    """As far from float64 as the sweep in one block: twice its error and one rounding.

    Over several draws, since the error of a single number may be nothing by luck.
    """
    many = lambda *how: [step(LOSSES[name], *how, draw=draw) for draw in range(8)]  # noqa: E731
    truth, alone = many(), many(dtype)
    make_small(monkeypatch.setattr)
    outputs = (zip(*runs, strict=True) for runs in (many(dtype), truth, alone))
    for ours, true, base in zip(*outputs, strict=True):
        wanted = torch.stack(true)
        error, allowed = ((torch.stack(x).double() - wanted).norm() for x in (ours, base))
        assert error <= 2 * allowed + torch.finfo(ours[0].dtype).eps * wanted.norm()


@pytest.mark.parametrize("same", [0, 3, 16, 40])
def test_columns_that_share_an_id_are_swept_apart(same, monkeypatch):
    """None of a block, a few, or most of them."""
    ids = torch.arange(50) + 100
    ids[:same] = torch.arange(same)

    def loss(a, b, s, **how):
        pool = {"negatives": b.detach(), "ids": torch.arange(50), "negative_ids": ids}
        return tw.info_nce(a, b, s, **pool, **how)

    wanted = step(loss)
    make_small(monkeypatch.setattr)
    seen = []
    attend = hosted.rounds.attend
    monkeypatch.setattr(
        hosted.rounds,
        "attend",
        lambda p, plan: (seen.append(p.row_ids is None), attend(p, plan))[1],
    )
    for x, y in zip(step(loss), wanted, strict=True):
        assert (x - y).norm() <= 1e-12 * max(1.0, float(y.norm()))
    # Four blocks of columns for each of four of rows.
    assert sum(seen) == 4 * {0: 4, 3: 4, 16: 3, 40: 2}[same]


@pytest.mark.parametrize("kind", ["spread", "last of a block", "all of the last"])
def test_columns_that_share_an_id_are_swept_together(kind, monkeypatch):
    """One masked sweep for each block of rows; features that are here already stay as they are."""
    few = {
        "spread": [0, 5, 15, 16, 17, 29, 33, 46, 47],
        "last of a block": [14, 15, 31, 47],
        "all of the last": [20, 48, 49],
    }[kind]
    ids = torch.arange(50) + 100
    ids[few] = torch.arange(len(few)) * 5
    held = unit(50, 1)

    def loss(a, b, s, **how):
        pool = {"negatives": held, "ids": torch.arange(50), "negative_ids": ids}
        return tw.info_nce(a, b, s, **pool, **how)

    wanted = step(loss)
    make_small(monkeypatch.setattr)
    seen, attend = [], hosted.rounds.attend

    def noted(pairs, plan):
        seen.append((pairs.shape[1], pairs.row_ids is not None))
        return attend(pairs, plan)

    monkeypatch.setattr(hosted.rounds, "attend", noted)
    for x, y in zip(step(loss), wanted, strict=True):
        assert (x - y).norm() <= 1e-12 * max(1.0, float(y.norm()))
    assert torch.equal(held, unit(50, 1))
    masked = [count for count, with_ids in seen if with_ids]
    whole = 2 if kind == "all of the last" else 0  # most of a block: it is swept as it is
    assert sum(masked) == 4 * len(few)
    assert masked.count(len(few) - whole) == 4
    assert sum(count for count, _ in seen) == 4 * 50


@pytest.mark.usefixtures("blocks")
def test_an_index_that_cannot_be():
    index = INDEX.clone()
    index[3] = 50
    a, b = unit(50), unit(50, 1)
    with pytest.raises(tw.OptionError, match="got 50 at row 3"):
        tw.info_nce(a, b, positives=index)


def test_what_may_be_where():
    """Without `device` features of two places raise; here there is one place, and a wrong name."""
    a = unit(5)
    tw.clip_loss(a, a, device="cpu")
    with pytest.raises(tw.DeviceError, match="text must be on the device of image"):
        tw.clip_loss(a, a.to("meta"))
    with pytest.raises(tw.DeviceError, match=r"text must be on cpu, .*got meta"):
        tw.clip_loss(a, a.to("meta"), device="cpu")


def test_pairs_by_place_are_not_reordered(monkeypatch):
    """Few ids in common, and pairs (i, i) left out."""
    ids = (torch.arange(50), torch.arange(50) + 45)

    def loss(a, b, s, **how):
        found = tw.reduce_pairs(
            a, b.detach(), s, columns=False, positives=None, ids=ids, skip_self=True, **how
        )
        return (found.rows.values + found.rows.offset).sum() + 0 * b.sum()

    wanted = step(loss)
    make_small(monkeypatch.setattr)
    for x, y in zip(step(loss), wanted, strict=True):
        assert (x - y).norm() <= 1e-12 * max(1.0, float(y.norm()))


@pytest.mark.parametrize("rows", [10, 40])
def test_every_visit_gets_its_own_memo_back(rows, monkeypatch):
    """Of one block too, where a memo has several lines, one for each rank's columns."""
    make_small(monkeypatch.setattr)
    made, met = [], []
    reduce, differentiate = hosted.rounds.reduce, hosted.rounds.differentiate

    def spy_reduce(pairs, plan):
        made.append(torch.rand(3, 2))
        return reduce(pairs, plan)._replace(memo=made[-1])

    def spy_differentiate(pairs, plan, swept, *rest):
        met.append(swept.memo)
        return differentiate(pairs, plan, swept._replace(memo=swept.memo.new_empty(0)), *rest)

    monkeypatch.setattr(hosted.rounds, "reduce", spy_reduce)
    monkeypatch.setattr(hosted.rounds, "differentiate", spy_differentiate)
    tw.clip_loss(unit(rows).requires_grad_(), unit(rows, 1)).backward()
    assert len(made) == len(met) == (1 if rows == 10 else 9)
    assert all(torch.equal(*pair) for pair in zip(made, met, strict=True))


def columns_away(rank):
    """Columns with positives in host memory, and a group."""
    from tilewise.agreement import with_group
    from tilewise.options import make_plan
    from tilewise.pairs import make_pairs

    how = {"group": torch.distributed.group.WORLD}
    for positives, columns in (("aligned", False), (None, True)):
        pairs = make_pairs(
            unit(4), unit(4, 1), (1.0, None), positives=positives, ids=None, labels=None,
            skip_self=False,
        )  # fmt: skip
        pairs = pairs._replace(cols=pairs.cols.to("meta"))
        with pytest.raises(tw.OptionError, match="must be negatives only"):
            with_group(make_plan(how, "logsumexp", columns, False), how, pairs)
        with pytest.raises(tw.OptionError, match="rows of a rank must be on its device"):
            with_group(
                make_plan(how, "logsumexp", columns, False), how,
                pairs._replace(rows=pairs.rows.to("meta")),
            )  # fmt: skip
    return True


def test_columns_with_positives_stay_on_the_device_in_a_group():
    assert ranks.run(columns_away, 1) == [True]


def pooled(rank, world, sizes, small):
    """A pool of negatives, in parts on every rank, that goes round in blocks."""
    if small:
        make_small()
    group = torch.distributed.group.WORLD
    start = sum(sizes[:rank])
    pool, mine = unit(sum(sizes), 5)[start : start + sizes[rank]], slice(6 * rank, 6 * rank + 6)
    a, b = (unit(6 * world, seed)[mine].requires_grad_() for seed in (0, 1))
    s = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    ids = torch.arange(6 * world)
    tw.info_nce(
        a, b, s, negatives=pool, group=group, ids=ids[mine],
        negative_ids=torch.arange(sum(sizes))[start : start + sizes[rank]],
    ).backward()  # fmt: skip
    return a.grad, b.grad, s.grad


@pytest.mark.parametrize("small", [False, True])
def test_a_pool_in_parts(small):
    """Each rank has one; ranks average over two, so gradients are those of the mean, twice."""
    sizes = [37, 0, 20]
    found = ranks.run(pooled, 3, 3, sizes, small)
    a, b = (unit(18, seed).requires_grad_() for seed in (0, 1))
    s = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    tw.info_nce(
        a, b, s, negatives=unit(57, 5), ids=torch.arange(18), negative_ids=torch.arange(57)
    ).backward()
    for k, x in enumerate((a, b)):
        got = torch.cat([grads[k] for grads in found]) / 3
        assert (got - x.grad).norm() <= 1e-12
    assert abs(sum(grads[2] for grads in found) / 3 - s.grad) <= 1e-12


class Event:
    """One that is there at once, and the stream that records it."""

    def record_event(self):
        return self

    def synchronize(self):
        pass


@pytest.mark.parametrize("away", [False, True])
def test_only_what_must_be_copied_needs_a_thread(away, monkeypatch):
    """The first one is fetched at once: a device would wait for the thread to start."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Event())
    monkeypatch.setattr(ahead.Ahead, "arrived", lambda self, arriving: arriving.tree)
    threads = []

    def fetch(self, make):
        threads.append(threading.current_thread())
        return ahead.Arriving(make(), Event() if away else None)

    monkeypatch.setattr(ahead.Ahead, "fetch", fetch)
    reader = ahead.Ahead(torch.device("cpu"))
    reader.stream = Event()
    assert list(reader.over([lambda k=k: k for k in range(4)])) == [0, 1, 2, 3]
    own = [thread is threading.main_thread() for thread in threads]
    assert own == ([True, False, False, False] if away else [True] * 4)
