"""The same contracts on a CUDA device: `pytest -m gpu`."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import oracle
import tilewise as tw
from tilewise import ring
from tilewise.sweep import weigh_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 2**20
DEVICE = "cuda"  # `test_hopper` asks some of this of another


def unit(n, d, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, d, generator=generator), dim=1).to(DEVICE, dtype)


def halves(x):
    return torch.arange(x.shape[0], device=DEVICE) // 2


LOSSES = {
    "clip": lambda a, b, s, **k: tw.clip_loss(a, b, s, **k),
    "clip-anew": lambda a, b, s, **k: tw.clip_loss(a, b, s, keep_mib=0, **k),
    "clip-ids": lambda a, b, s, **k: tw.clip_loss(a, b, s, ids=halves(a), **k),
    "clip-labels": lambda a, b, s, **k: tw.clip_loss(a, b, s, labels=halves(a), **k),
    "siglip": lambda a, b, s, **k: tw.siglip_loss(a, b, s, -5.0, **k),
    "siglip-far": lambda a, b, s, **k: tw.siglip_loss(a, b, s, -12.0, **k),
    "siglip-rows": lambda a, b, s, **k: (
        tw.siglip_loss(a, b, s, -5.0, reduction="none", **k).square().mean()
    ),
    "info_nce-frozen": lambda a, b, s, **k: tw.info_nce(a, b.detach(), s, **k) + 0 * b.sum(),
    "info_nce-smooth": lambda a, b, s, **k: tw.info_nce(a, b, s, label_smoothing=0.1, **k),
    "info_nce-index": lambda a, b, s, **k: tw.info_nce(
        a, b, s, positives=torch.arange(len(a), device=DEVICE).flip(0), **k
    ),
    "nt_xent": lambda a, b, s, **k: tw.nt_xent(a, b, s, **k),
    "sup_con": lambda a, b, s, **k: tw.sup_con(a, halves(a), s, **k) + 0 * b.sum(),
}


@pytest.fixture
def fresh_memory_is_nan():
    """Memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def step(loss, a, b, scale=14.3, **how):
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    s = torch.tensor(scale, device=DEVICE, requires_grad=True)
    value = loss(a, b, s, **how)
    value.backward()
    return value.detach(), a.grad, b.grad, s.grad


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def multiply(rows, cols):
    """Products of features in fp32, on the host."""
    if rows.dtype == torch.float32:
        return (rows @ cols.T).cpu()
    return torch.mm(rows, cols.T, out_dtype=torch.float32).cpu()


# "auto" leaves float32 to chunked (`fused.reservation`).
HELD = [*(("fused", dtype) for dtype in DTYPES), ("chunked", torch.float32)]


@pytest.mark.parametrize(("backend", "dtype"), HELD, ids=str)
@pytest.mark.parametrize("kind", ["random", "aligned", "opposed"])
@pytest.mark.parametrize("name", ["clip", "clip-anew", "siglip", "siglip-far"])
def test_exactness(name, kind, backend, dtype):
    """Error over draws of features and scales at most twice that of plain PyTorch.

    Its products on CPU or by the device, whose tensor cores cut off what they add up.
    """
    d, bias = 96, {"siglip": -5.0, "siglip-far": -12.0}.get(name, 0.0)
    loss_of_z = oracle.siglip if name.startswith("siglip") else oracle.clip
    for nominal in (0.5, 14.3, 100.0):
        totals = {}
        for draw, scale in enumerate(torch.linspace(0.99 * nominal, 1.01 * nominal, 6).tolist()):
            n = 300 + 7 * draw  # equal features have weights of 1 / n: one number, rounded once
            rows, cols = unit(n, d, seed=draw), unit(n, d, seed=draw + 10)
            if kind == "aligned":
                cols = F.normalize(rows + 0.05 * cols, dim=1)
            elif kind == "opposed":
                cols = F.normalize(0.05 * cols - rows[:1], dim=1)
                rows = F.normalize(0.05 * rows + rows[:1], dim=1)
            rows, cols = rows.to(dtype), cols.to(dtype)
            host = rows.cpu(), cols.cpu()
            args = (scale, bias)
            truth = oracle.evaluate(
                loss_of_z, *(x.double() for x in host), *args, upstream=1.0, compute=torch.float64
            )
            options = {"upstream": 1.0, "compute": torch.float32}
            plain = oracle.evaluate(loss_of_z, *host, *args, **options)
            device = oracle.evaluate(
                loss_of_z, *host, *args, products=multiply(rows, cols), **options
            )
            ours = step(LOSSES[name], rows, cols, scale, backend=backend)
            for output, got in zip(("loss", "d_rows", "d_cols", "d_scale"), ours, strict=True):
                true = getattr(truth, output)
                all_of_it = (got.cpu(), getattr(plain, output), getattr(device, output))
                terms = (*(x.double() - true for x in all_of_it), true)
                add = torch.stack([x.norm() ** 2 for x in terms])
                totals[output] = totals.get(output, 0) + add
        for output, sums in totals.items():
            error, *bases, size = sums.sqrt().tolist()
            narrow = dtype if output in ("d_rows", "d_cols") else torch.float32
            allowed = 2 * max(bases) + torch.finfo(narrow).eps / 2 * size
            assert error <= allowed, f"{output}, scale {nominal}: {error:.2e} > {allowed:.2e}"


@pytest.mark.parametrize("kind", ["random", "cone"])
def test_float32_gradients_are_sums_over_many_pairs(kind):
    """Tensor cores cut off what they add up: in one go over 8,192 columns 40 times the error."""
    rows, cols = unit(8192, 64), unit(8192, 64, seed=3)
    if kind == "cone":
        middle = unit(1, 64, seed=7)
        rows, cols = (F.normalize(x + middle, dim=1) for x in (rows, cols))
    truth = step(LOSSES["clip"], rows.double(), cols.double(), backend="dense")
    plain = step(LOSSES["clip"], rows, cols, backend="dense")
    ours = step(LOSSES["clip"], rows, cols, backend="fused")
    for true, base, got in list(zip(truth, plain, ours, strict=True))[1:3]:
        allowed = 2 * (base.double() - true).norm() + 2**-24 * true.norm()
        assert (got.double() - true).norm() <= allowed


TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 5e-6}


# Every number of features is compiled anew: few of them.
SHAPES = [
    *((517, 96, dtype) for dtype in DTYPES),
    *((n, 33, torch.bfloat16) for n in (1, 256, 1100)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_every_loss_equals_dense(name, shape):
    dtype = shape[2]
    a, b = unit(*shape), unit(*shape, seed=3)
    truth = step(LOSSES[name], a.double(), b.double(), 20.0, backend="dense")
    ours = step(LOSSES[name], a, b, 20.0, backend="fused")
    for got, true in zip(ours, truth, strict=True):
        bound = TOLERANCE[dtype] * max(true.norm().item(), 1e-2)
        assert (got.double() - true).norm() <= bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["clip", "clip-ids", "info_nce-frozen", "nt_xent"])
def test_where_no_fixed_offset_holds(name, dtype):
    """All cosines -1 but those of two rows: sums 400 nats apart."""
    a, b = torch.zeros(400, 8, device=DEVICE), torch.zeros(400, 8, device=DEVICE)
    a[:, 0], a[7:9, 0] = 1.0, -1.0
    b[:, 0] = -1.0
    a, b = (F.normalize(x + 0.1 * unit(400, 8, seed=k), dim=1) for k, x in enumerate((a, b)))
    a, b = a.to(dtype), b.to(dtype)
    truth = step(LOSSES[name], a.double(), b.double(), 200.0, backend="dense")
    for got, true in zip(step(LOSSES[name], a, b, 200.0, backend="fused"), truth, strict=True):
        bound = 2e-5 if got.ndim == 0 else TOLERANCE[torch.float16]
        assert (got.double() - true).norm() <= bound * true.norm()


def test_both_passes_see_the_same_logits():
    """Kernels of either pass multiply tiles of other shapes, and must get the same bits.

    Here no fixed offset holds, logits are near -200, and what cancels in the scale's gradient is
    2,000 times what is left: with other products, summed up in another order, it is off by 5e-5.
    """
    a, b = unit(300, 96), unit(300, 96, seed=3)
    a, b = (F.normalize(0.1 * x + s * unit(1, 96, seed=5), dim=1) for x, s in ((a, 1), (b, -1)))
    a, b = a.half(), b.half()
    truth = step(LOSSES["clip"], a.double(), b.double(), 200.0, backend="dense")
    ours = step(LOSSES["clip"], a, b, 200.0, backend="fused")
    assert (ours[3].double() - truth[3]).abs() <= 2e-7


def test_converted_features_in_several_panels():
    """fp32 in panels of 6,016 rows, an odd number of tiles: what lies past one does not count."""
    a, b = unit(12000, 768), unit(12000, 768, seed=3)
    truth = step(LOSSES["clip"], a, b, backend="chunked")
    for got, true in zip(step(LOSSES["clip"], a, b, backend="fused"), truth, strict=True):
        assert (got - true).norm() <= 1e-5 * true.norm()


def test_some_chunks_kept():
    """Of 10,000 rows the first 8,192: as if none were kept, up to its rounding; same bits again."""
    a, b = unit(10000, 96, torch.bfloat16), unit(10000, 96, torch.bfloat16, seed=3)
    budget = 8192 * 10000 * 2 / 2**20
    assert tw.explain_keep(a, b, budget)[:2] == (1, 2)
    assert tw.explain_keep(a, b, "auto")[:2] == (2, 2)
    plain = step(LOSSES["clip-anew"], a, b)
    kept = step(LOSSES["clip"], a, b, keep_mib=budget)
    again = step(LOSSES["clip"], a, b, keep_mib=1.5 * budget / 1.4)
    for x, y, z in zip(plain, kept, again, strict=True):
        assert (x.double() - y.double()).norm() <= (1e-6 if x.ndim == 0 else 6e-3) * x.norm()
        assert torch.equal(y, z)


def test_autocast():
    """fp32 features under bf16 autocast: as bf16 features, gradients in fp32."""
    a, b = unit(300, 96), unit(300, 96, seed=3)
    with torch.autocast("cuda", torch.bfloat16):
        ours = step(LOSSES["clip"], a, b)
    plain = step(LOSSES["clip"], a.bfloat16(), b.bfloat16())
    assert ours[1].dtype == torch.float32
    assert all(torch.equal(x, y.to(x)) for x, y in zip(ours, plain, strict=True))


EVERY = pytest.mark.parametrize(
    ("backend", "dtype"),
    [("auto", torch.bfloat16), ("fused", torch.float32), ("chunked", torch.float32)],
    ids=str,
)


@EVERY
@pytest.mark.parametrize("name", LOSSES)
def test_no_host_sync(name, backend, dtype):
    a, b = unit(300, 96, dtype), unit(300, 96, dtype, seed=3)
    step(LOSSES[name], a, b, backend=backend)
    leaves = (
        a.requires_grad_(),
        b.requires_grad_(),
        torch.full((), 14.3, device=DEVICE, requires_grad=True),
    )
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        LOSSES[name](*leaves, backend=backend).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@EVERY
@pytest.mark.parametrize("name", LOSSES)
def test_same_bits_on_every_run(name, backend, dtype):
    a, b = unit(5000, 96, dtype), unit(5000, 96, dtype, seed=3)
    results = [step(LOSSES[name], a, b, backend=backend) for _ in range(5)]
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert x is y is None or torch.equal(x, y)


@EVERY
@pytest.mark.parametrize("name", ["clip", "clip-anew", "siglip", "info_nce-frozen", "nt_xent"])
def test_cuda_graph(name, backend, dtype):
    a, b = (unit(300, 96, dtype, seed=k).requires_grad_() for k in (0, 3))
    s = torch.full((), 14.3, device=DEVICE, requires_grad=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            a.grad = b.grad = s.grad = None
            LOSSES[name](a, b, s, backend=backend).backward()
    torch.cuda.current_stream().wait_stream(side)
    a.grad = b.grad = s.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = LOSSES[name](a, b, s, backend=backend)
        loss.backward()
    with torch.no_grad():
        a.copy_(unit(300, 96, dtype, seed=9))
    graph.replay()
    truth = step(LOSSES[name], a.detach(), b.detach(), backend=backend)
    assert torch.equal(loss.detach(), truth[0])
    assert torch.equal(a.grad, truth[1])


@EVERY
def test_compile(backend, dtype):
    """Compiled, nothing is kept for the backward unless that is asked for."""
    plain = LOSSES["clip-anew"]

    def loss(a, b, s):
        return plain(a, b, s, backend=backend)

    compiled = torch.compile(loss, fullgraph=True)
    for n in (64, 200, 333):
        a, b = unit(n, 96, dtype), unit(n, 96, dtype, seed=3)
        for x, y in zip(step(compiled, a, b), step(loss, a, b), strict=True):
            assert torch.allclose(x, y, rtol=1e-5, atol=1e-7)


# At 9,000 all exponentials are kept in the workspace's memory.
@pytest.mark.parametrize("batch", [9000, 65536])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["clip", "siglip", "info_nce-frozen"])
def test_memory_contract(name, dtype, batch):
    """But for the workspace that cuBLAS takes for itself, once a process (32 MiB)."""
    a, b = unit(batch, 768, dtype), unit(batch, 768, dtype, seed=3)
    step(LOSSES[name], a[:512], b[:512])
    side = a.numel() * a.element_size()
    a, b = a.requires_grad_(), b.requires_grad_()
    s = torch.full((), 14.3, device=DEVICE, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    LOSSES[name](a, b, s).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak + 2 * side <= 1.25 * 4 * side + 256 * MIB, f"{(peak + 2 * side) / MIB:.0f} MiB"


def test_memory_of_what_is_kept_in_part():
    """Nothing above the contract but the exponentials, with a learnable scale too."""
    a, b = unit(65536, 768, torch.bfloat16), unit(65536, 768, torch.bfloat16, seed=3)
    step(LOSSES["clip"], a[:512], b[:512])
    kept = 8192 * 65536 * 2
    assert tw.explain_keep(a, b, kept / MIB)[:2] == (1, 8)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(LOSSES["clip"], a, b, keep_mib=kept / MIB)
    # `step` clones both sides.
    peak = torch.cuda.max_memory_allocated() - before - kept
    assert peak <= 1.25 * 4 * a.numel() * 2 + 256 * MIB, f"{peak / MIB:.0f} MiB"


def test_values_are_not_read_back():
    a, b = unit(6, 4), unit(6, 4, seed=3)
    index = torch.arange(6, device=DEVICE)
    index[2] = 6
    rows = tw.info_nce(a, b, 1.0, positives=index, reduction="none")
    assert rows[2].isnan()
    assert rows[[0, 1, 3, 4, 5]].isfinite().all()
    assert tw.clip_loss(a, b, torch.full((), torch.inf, device=DEVICE)).isnan()
    with pytest.raises(tw.OptionError, match="got 6 at row 2"):
        tw.info_nce(a, b, 1.0, positives=index, check_values=True)
    with pytest.raises(tw.OptionError, match="scale must be finite"):
        tw.clip_loss(a, b, torch.full((), torch.inf, device=DEVICE), check_values=True)


def test_more_pairs_than_2_to_the_31():
    """65,536 x 65,536 pairs: their number overflows 32 bits, sums of equal rows do not."""
    a = unit(1, 16, torch.bfloat16).expand(65536, 16)
    rows = tw.info_nce(a, a.contiguous(), 5.0, reduction="none", backend="fused")
    assert torch.allclose(rows, torch.full_like(rows, 65536).log(), rtol=1e-6)


def test_more_than_2_to_the_31_elements():
    """Rows of a tensor of 2^32 elements: offsets beyond 32 bits."""
    wide = torch.empty(2**22, 1024, dtype=torch.bfloat16, device=DEVICE)
    rows = wide[-100:]
    rows.copy_(unit(100, 1024, torch.bfloat16))
    cols = unit(100, 1024, torch.bfloat16, seed=3)
    assert torch.equal(tw.clip_loss(rows, cols, 10.0), tw.clip_loss(rows.clone(), cols, 10.0))


def test_mixed_devices_raise():
    with pytest.raises(tw.DeviceError, match="text must be on the device of image"):
        tw.clip_loss(unit(4, 4), unit(4, 4).cpu(), 1.0)
    with pytest.raises(tw.DeviceError, match="scale must be on the device"):
        tw.clip_loss(unit(4, 4), unit(4, 4), torch.tensor(1.0))


# Several ranks


@pytest.fixture
def group_of():
    """A group of so many ranks, of which this process is the first, on this one GPU."""
    sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
    importlib.import_module("mirror")

    def make(backend, world):
        dist.init_process_group(backend, rank=0, world_size=world, store=dist.HashStore())
        return dist.group.WORLD

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize("bias", [-30.0, -15.0, -10.0, -7.7, -7.0, 0.0, 6.0, 12.0, 80.0])
def test_softplus_of_negatives_alone(bias):
    """Far below 0, near it and beyond: by other formulas, which positives would drown out."""
    rows, cols = unit(700, 96, torch.bfloat16), unit(900, 96, torch.bfloat16, seed=1)
    weight = torch.linspace(0.5, 1.0, 700)
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        numbers = torch.tensor([1.7, bias], dtype=dtype, device=device, requires_grad=True)
        sides = [x.to(device, dtype if device == "cpu" else None) for x in (rows, cols)]
        if device == "cpu":
            z = sides[0] @ sides[1].T * numbers[0] + numbers[1]
            value = (weight.double() * F.softplus(z, threshold=1e9).sum(1)).sum()
        else:
            value = weigh_pairs(
                *sides, *numbers, weight=weight.cuda(), positives=None, backend="fused"
            )
        value.backward()
        found.append([float(value), *numbers.grad.tolist()])
    # The scale's gradient is a small difference: products of random features have either sign.
    for true, got, allowed in zip(*found, (5e-7, 1e-4, 5e-7), strict=True):
        assert got == pytest.approx(true, rel=allowed)


RINGS = ("clip", "clip-labels", "siglip", "info_nce-smooth", "nt_xent")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("schedule", ["ring", "gather"])
@pytest.mark.parametrize("name", RINGS)
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_one_rank_of_four(name, schedule, dtype, group_of, monkeypatch):
    """Four of the same ranks, messages on a stream of their own, against the features four times.

    Slices are so small that slots are used again many times.
    """
    monkeypatch.setattr(ring, "SLICE_BYTES", 2**16)
    a, b = unit(1500, 96, dtype), unit(1500, 96, dtype, seed=1)
    how = {"group": group_of("mirror", 4), "schedule": schedule, "backend": "fused"}
    loss, *grads = step(LOSSES[name], a, b, **how)
    again = step(LOSSES[name], a, b, **how)
    repeated = labels_repeated if name == "clip-labels" else LOSSES[name]
    many = [x.repeat(4, 1) for x in (a, b)]
    alone = step(repeated, *many, backend="fused")
    truth = step(repeated, *(x.double() for x in many))
    for x, y in zip((loss, *grads), again, strict=True):
        assert torch.equal(x, y)
    assert abs(loss.double() - truth[0]) <= 2e-6 * abs(truth[0])
    eps = torch.finfo(dtype).eps
    for x, y, z in zip(grads[:2], truth[1:3], alone[1:3], strict=True):
        wanted = 4 * y[:1500]
        bar = 2 * (4.0 * z[:1500].double() - wanted).norm() + eps * wanted.norm()
        assert (x.double() - wanted).norm() <= bar
    assert abs(grads[2].double() - truth[3]) <= 2e-4 * abs(truth[3])


def labels_repeated(a, b, s, **how):
    labels = halves(a[: len(a) // 4]).repeat(4)
    return tw.clip_loss(a, b, s, labels=labels, **how)


ALONE = {name: LOSSES[name] for name in RINGS} | {
    "clip-weight": lambda a, b, s, **k: tw.clip_loss(a, b, s, weight=weights(a), **k),
    "info_nce-sum": lambda a, b, s, **k: tw.info_nce(
        a, b, s, weight=weights(a), reduction="sum", **k
    ),
}


def weights(x):
    return torch.arange(len(x), device=DEVICE) / 7


@pytest.mark.parametrize("schedule", ["ring", "two-level", "gather"])
@pytest.mark.parametrize("name", ALONE)
def test_nccl_alone(name, schedule, group_of):
    """The only world there is on one GPU: the same bits as without a group."""
    a, b = unit(700, 64, torch.bfloat16), unit(700, 64, torch.bfloat16, seed=1)
    group = group_of("nccl", 1)
    alone = step(ALONE[name], a, b)
    shared = step(ALONE[name], a, b, group=group, schedule=schedule)
    for x, y in zip(alone, shared, strict=True):
        assert torch.equal(x, y)
