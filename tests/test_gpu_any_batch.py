"""On a GPU: features in host memory, data copied ahead, pools, cached steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilewise as tw
from tilewise import hosted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
D = 96


def unit(n, dtype=torch.bfloat16, seed=0):
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(seed))
    return F.normalize(x, dim=1).to(dtype)


def halves(n):
    return torch.arange(n) // 2


LOSSES = {
    "clip": lambda a, b, s, **k: tw.clip_loss(a, b, s, **k),
    "clip-ids": lambda a, b, s, **k: tw.clip_loss(a, b, s, ids=halves(len(a)).to(s.device), **k),
    "clip-labels": lambda a, b, s, **k: tw.clip_loss(
        a, b, s, labels=halves(len(a)).to(s.device), **k
    ),
    "siglip": lambda a, b, s, **k: tw.siglip_loss(a, b, s, -5.0, **k),
    "siglip-rows": lambda a, b, s, **k: (
        tw.siglip_loss(a, b, s, -5.0, reduction="none", **k).square().mean()
    ),
    "info_nce-smooth": lambda a, b, s, **k: tw.info_nce(a, b, s, label_smoothing=0.1, **k),
    "info_nce-index": lambda a, b, s, **k: tw.info_nce(
        a, b, s, positives=torch.arange(len(a)).flip(0).to(s.device), **k
    ),
    "nt_xent": lambda a, b, s, **k: tw.nt_xent(a, b, s, **k),
    "sup_con": lambda a, b, s, **k: (
        tw.sup_con(a, halves(len(a)).to(s.device), s, **k) + 0 * b.sum().to(s.device)
    ),
}


def step(loss, a, b, place="cuda", **how):
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    s = torch.tensor(20.0, device=place, requires_grad=True)
    value = loss(a, b, s, **how)
    value.backward()
    return [x.detach().cpu().double() for x in (value, a.grad, b.grad, s.grad)]


@pytest.mark.parametrize("where", ["pinned", "pageable", "columns", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_out_of_core(name, dtype, where, monkeypatch):
    """Blocks of 256 rows: as near to float64 as on the device, twice, and one rounding."""
    a, b = unit(1100, dtype), unit(1100, dtype, 1)
    truth = step(LOSSES[name], a.double(), b.double(), "cpu", backend="chunked")
    alone = step(LOSSES[name], a.cuda(), b.cuda())
    monkeypatch.setattr(hosted, "BLOCK_BYTES", 300 * D * dtype.itemsize)
    if where == "pinned":
        a, b = a.pin_memory(), b.pin_memory()
    if name not in ("nt_xent", "sup_con"):  # whose sides are one
        a, b = a.cuda() if where == "columns" else a, b.cuda() if where == "rows" else b
    ours = step(LOSSES[name], a, b, device="cuda")
    again = step(LOSSES[name], a, b, device="cuda")
    assert all(torch.equal(*pair) for pair in zip(ours, again, strict=True))
    narrow = (torch.float32, dtype, dtype, torch.float32)
    for x, y, z, kind in zip(ours, truth, alone, narrow, strict=True):
        assert (x - y).norm() <= 2 * (z - y).norm() + torch.finfo(kind).eps * y.norm()


def test_memory_of_an_out_of_core_loss(monkeypatch):
    """On the device it does not grow with the batch, but for vectors."""
    monkeypatch.setattr(hosted, "BLOCK_BYTES", 4096 * D * 2)
    peaks = []
    for n in (32768, 131072):
        a, b = unit(n).pin_memory(), unit(n, seed=1).pin_memory()
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(LOSSES["clip"], a, b, device="cuda", workspace_mib=16)
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
    assert peaks[1] - peaks[0] <= 98304 * 200


FROZEN = {
    "none": lambda n, m: {"positives": None},
    "aligned": lambda n, m: {},
    "index": lambda n, m: {"positives": torch.arange(n, device="cuda").flip(0)},
    "ids": lambda n, m: {"positives": None, "ids": (halves(n).cuda(), (halves(m) * 3 // 2).cuda())},
}


def frozen_step(name, a, b, scale=20.0, **how):
    a, s = a.detach().requires_grad_(), torch.tensor(scale, device="cuda", requires_grad=True)
    rows = tw.reduce_pairs(a, b, s, columns=False, **FROZEN[name](len(a), len(b)), **how).rows
    pull = torch.linspace(0.1, 1.0, len(a), device="cuda")
    ((rows.values + rows.offset) * pull + rows.positives * pull.flip(0)).sum().backward()
    return [x.detach().double() for x in (rows.values + rows.offset, a.grad, s.grad)]


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_columns(name, place, monkeypatch):
    """Two products, the columns seen once; as near to float64 as with three."""
    a, b = unit(9000).cuda(), unit(20011, seed=1).cuda()
    truth = frozen_step(name, a.double(), b.double(), backend="dense")
    wide = frozen_step(name, a, b.clone().requires_grad_())
    how = {"workspace_mib": 64}
    if place == "host":
        monkeypatch.setattr(hosted, "BLOCK_BYTES", 4096 * D * 2)
        b, how = b.cpu().pin_memory(), {"device": "cuda"}
    ours = frozen_step(name, a, b, **how)
    again = frozen_step(name, a, b, **how)
    assert all(torch.equal(*pair) for pair in zip(ours, again, strict=True))
    bounds = (torch.float32, torch.bfloat16, torch.float32)
    for x, y, z, kind in zip(ours, truth, wide, bounds, strict=True):
        assert (x - y).norm() <= 2 * (z - y).norm() + torch.finfo(kind).eps * y.norm()


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_columns_where_no_fixed_offset_holds(name):
    a, b = torch.zeros(400, D), torch.zeros(700, D)
    a[:, 0], a[7:9, 0], b[:, 0] = 1.0, -1.0, -1.0
    a, b = (
        F.normalize(x + 0.1 * unit(len(x), torch.float32, k), dim=1).bfloat16().cuda()
        for k, x in enumerate((a, b))
    )
    truth = frozen_step(name, a.double(), b.double(), 200.0, backend="dense")
    for got, true, bound in zip(
        frozen_step(name, a, b, 200.0), truth, (2e-6, 8e-3, 2e-5), strict=True
    ):
        assert (got - true).norm() <= bound * true.norm()


@pytest.mark.parametrize("where", ["device", "host", "disk"])
@pytest.mark.parametrize("blocks", [1, 6])
@pytest.mark.parametrize("step", [1, 4])
def test_pool(step, blocks, where, tmp_path, monkeypatch):
    """Queries whose older copies lie side by side, and spread over blocks of columns."""
    monkeypatch.setattr(hosted, "BLOCK_BYTES", 2 * D * 4096 // blocks)
    pool = tw.Pool(3000, D, device="cuda", where=tmp_path / "pool" if where == "disk" else where)
    for turn in range(5):
        pool.put(unit(800, seed=turn).cuda(), torch.arange(800 * turn, 800 * turn + 800).cuda())
    assert len(pool) == 3000
    query, key = unit(500, seed=8).cuda().requires_grad_(), unit(500, seed=9).cuda()
    ids = torch.arange(1500, 1500 + 500 * step, step, device="cuda")
    held = pool.features.clone()
    loss = tw.info_nce(query, key, 10.0, ids=ids, **pool.negatives())
    loss.backward()
    assert torch.equal(pool.features, held)
    twin = query.detach().double().requires_grad_()
    dense = tw.info_nce(
        twin, key.double(), 10.0, ids=ids, negatives=pool.features.cuda().double(),
        negative_ids=pool.ids, backend="dense",
    )  # fmt: skip
    dense.backward()
    assert abs(loss - dense) <= 1e-5 * dense
    assert (query.grad - twin.grad).norm() <= 8e-3 * twin.grad.norm()


# Cached steps


def towers(dtype=torch.float32):
    torch.manual_seed(0)
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, D), nn.LayerNorm(D)
    )
    return [make().to("cuda", dtype) for _ in range(2)]


def inputs(n=1000, dtype=torch.float32):
    return [
        torch.randn(n, 64, generator=torch.Generator().manual_seed(k)).to(dtype) for k in (1, 2)
    ]


def loss_of(scale, **how):
    def loss(a, b):
        a, b = (F.normalize(x.float(), dim=1).to(x.dtype) for x in (a, b))
        return tw.clip_loss(a, b, scale.exp(), **how)

    return loss


def grads_of(encoders, scale):
    parameters = [scale, *(p for e in encoders for p in e.parameters())]
    found = [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    return found


SOURCES = {
    "device": lambda xs: [x.cuda() for x in xs],
    "pinned": lambda xs: [x.pin_memory() for x in xs],
    "pageable": lambda xs: xs,
    "arrays": lambda xs: [x.numpy() for x in xs],
    "iterable": lambda xs: [torch.utils.data.DataLoader(
        list(zip(*(x.split(128) for x in xs), strict=True)), batch_size=None)],
}  # fmt: skip


@pytest.mark.parametrize("keep", [0, 1.0, float("inf")])
@pytest.mark.parametrize("source", SOURCES)
def test_cached_step(source, keep):
    """In float64, with dropout drawn on the device, against all graphs kept in a plain program."""
    encoders, scale = towers(torch.float64), nn.Parameter(torch.tensor(2.0, device="cuda"))
    xs, loss = inputs(dtype=torch.float64), loss_of(scale)
    order = [(0, x) for x in xs[0].split(128)] + [(1, x) for x in xs[1].split(128)]
    if source == "iterable":
        order = [pair for i in range(8) for pair in (order[i], order[8 + i])]
    torch.manual_seed(3)
    outputs = [(k, encoders[k](x.cuda())) for k, x in order]
    loss(*(torch.cat([x for j, x in outputs if j == k]) for k in range(2))).backward()
    wanted = grads_of(encoders, scale)
    torch.manual_seed(3)
    result = tw.CachedStep(encoders, loss, micro_batch=128, keep=keep)(*SOURCES[source](xs))
    for got, want in zip(grads_of(encoders, scale), wanted, strict=True):
        assert (got - want).norm() <= (1e-6 if got.ndim == 0 else 1e-11) * (1 + want.norm())
    assert result.metrics.replay_peak_mib > 0
    assert (result.metrics.kept > 0) == (keep > 0)


@pytest.mark.parametrize("features", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cached_step_under_autocast(dtype, features):
    encoders, scale = towers(), nn.Parameter(torch.tensor(2.0, device="cuda"))
    xs, how = inputs(), {"device": "cuda"} if features == "host" else {}
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12) if dtype == torch.float16 else None
    found = []
    for run in ("plain", "cached"):
        torch.manual_seed(3)
        with torch.autocast("cuda", dtype):
            if run == "plain":
                parts = [torch.cat([e(x.cuda()) for x in y.split(128)])
                         for e, y in zip(encoders, xs, strict=True)]  # fmt: skip
                value = loss_of(scale)(*parts)
                (value if scaler is None else scaler.scale(value)).backward()
            else:
                tw.CachedStep(
                    encoders, loss_of(scale, **how), micro_batch=128, keep=0, scaler=scaler,
                    features=features,
                )(*xs)  # fmt: skip
        found.append(grads_of(encoders, scale))
    for got, want in zip(found[1], found[0], strict=True):
        assert (got - want).norm() <= 2e-2 * (want.norm() + 1e-3)


def test_features_in_host_memory_from_an_iterable():
    """Room for them grows while copies are on their way."""
    encoders, scale = towers(torch.float64), nn.Parameter(torch.tensor(2.0, device="cuda"))
    for e in encoders:
        e.eval()
    xs, found = inputs(20000, torch.float64), []
    for features, how in (("device", {}), ("host", {"device": "cuda"})):
        loader = SOURCES["iterable"](xs)[0]
        tw.CachedStep(encoders, loss_of(scale, **how), micro_batch=128, keep=0, features=features)(
            loader
        )
        found.append(grads_of(encoders, scale))
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 1e-6 * (1 + want.norm())


def test_memory_of_a_cached_step():
    """Data in host memory, eight times the batch: the device holds more features, nothing else."""
    encoders, scale = towers(torch.bfloat16), nn.Parameter(torch.tensor(2.0, device="cuda"))
    step = tw.CachedStep(encoders, loss_of(scale), micro_batch=512, keep=0)
    peaks = []
    for n in (4096, 32768):
        xs = [x.pin_memory() for x in inputs(n, torch.bfloat16)]
        for _ in range(2):
            metrics = step(*xs).metrics
        peaks.append(max(metrics.embed_peak_mib, metrics.replay_peak_mib))
    features_mib = 2 * (32768 - 4096) * D * 2 / 2**20
    assert peaks[1] - peaks[0] <= 3 * features_mib
