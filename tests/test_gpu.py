"""The same contracts on a CUDA device: `pytest -m gpu`."""

import pytest
import torch
import torch.nn.functional as F

import oracle
import tilewise as tw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 2**20


def unit(n, d, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, d, generator=generator), dim=1).to("cuda", dtype)


def halves(x):
    return torch.arange(x.shape[0], device="cuda") // 2


LOSSES = {
    "clip": lambda a, b, s: tw.clip_loss(a, b, s),
    "clip-labels": lambda a, b, s: tw.clip_loss(a, b, s, labels=halves(a)),
    "siglip": lambda a, b, s: tw.siglip_loss(a, b, s, -5.0),
    "info_nce-frozen": lambda a, b, s: tw.info_nce(a, b.detach(), s),
    "info_nce-smooth": lambda a, b, s: tw.info_nce(a, b, s, label_smoothing=0.1),
    "nt_xent": lambda a, b, s: tw.nt_xent(a, b, s),
    "sup_con": lambda a, b, s: tw.sup_con(a, halves(a), s) + 0 * b.sum(),
}


def step(loss, a, b, scale=14.3):
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    s = torch.tensor(scale, device="cuda", requires_grad=True)
    value = loss(a, b, s)
    value.backward()
    return value.detach(), a.grad, b.grad, s.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.5, 14.3, 100.0])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_exactness(name, aligned, scale, dtype):
    n, d = 517, 96
    scale = float(torch.tensor(scale))
    rows, cols = unit(n, d, seed=1), unit(n, d, seed=2)
    if aligned:
        cols = F.normalize(rows + 0.05 * cols, dim=1)
    rows, cols = rows.to(dtype), cols.to(dtype)
    loss_of_z = oracle.clip if name == "clip" else oracle.siglip
    bias = 0.0 if name == "clip" else -5.0
    host = rows.cpu(), cols.cpu()
    truth = oracle.evaluate(
        loss_of_z, *(x.double() for x in host), scale, bias, upstream=1.0, compute=torch.float64
    )
    plain = oracle.evaluate(loss_of_z, *host, scale, bias, upstream=1.0, compute=torch.float32)
    _, d_rows, d_cols, d_scale = step(LOSSES[name], rows, cols, scale)
    for got, output in ((d_rows, "d_rows"), (d_cols, "d_cols"), (d_scale, "d_scale")):
        true, size = getattr(truth, output), truth.sizes[output]
        error = (got.cpu().double() - true).norm().item()
        base = (getattr(plain, output).double() - true).norm().item()
        rounding = torch.finfo(dtype).eps / 2 * true.norm().item()
        assert error <= max(2 * base + rounding, 9 * torch.finfo(torch.float32).eps * size), output


@pytest.mark.parametrize("name", LOSSES)
def test_no_host_sync(name):
    a, b = unit(300, 32), unit(300, 32, seed=3)
    step(LOSSES[name], a, b)
    leaves = (
        a.requires_grad_(),
        b.requires_grad_(),
        torch.full((), 14.3, device="cuda", requires_grad=True),
    )
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        LOSSES[name](*leaves).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", LOSSES)
def test_same_bits_on_every_run(name):
    a, b = unit(5000, 40), unit(5000, 40, seed=3)
    results = [step(LOSSES[name], a, b) for _ in range(5)]
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert x is y is None or torch.equal(x, y)


@pytest.mark.parametrize("name", ["clip", "siglip", "info_nce-frozen", "nt_xent"])
def test_cuda_graph(name):
    a, b = unit(300, 32).requires_grad_(), unit(300, 32, seed=3).requires_grad_()
    s = torch.full((), 14.3, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            a.grad = b.grad = s.grad = None
            LOSSES[name](a, b, s).backward()
    torch.cuda.current_stream().wait_stream(side)
    a.grad = b.grad = s.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = LOSSES[name](a, b, s)
        loss.backward()
    with torch.no_grad():
        a.copy_(unit(300, 32, seed=9))
    graph.replay()
    truth = step(LOSSES[name], a.detach(), b.detach())
    assert torch.equal(loss.detach(), truth[0])
    assert torch.equal(a.grad, truth[1])


def test_compile():
    compiled = torch.compile(LOSSES["clip"], fullgraph=True)
    for n in (64, 200, 333):
        a, b = unit(n, 32), unit(n, 32, seed=3)
        for x, y in zip(step(compiled, a, b), step(LOSSES["clip"], a, b), strict=True):
            assert torch.allclose(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["clip", "siglip", "info_nce-frozen"])
def test_memory_contract(name, dtype):
    a, b = unit(65536, 768, dtype), unit(65536, 768, dtype, seed=3)
    side = a.numel() * a.element_size()
    a, b = a.requires_grad_(), b.requires_grad_()
    s = torch.full((), 14.3, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    LOSSES[name](a, b, s).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak + 2 * side <= 1.25 * 4 * side + 256 * MIB, f"{(peak + 2 * side) / MIB:.0f} MiB"


def test_values_are_not_read_back():
    a, b = unit(6, 4), unit(6, 4, seed=3)
    index = torch.arange(6, device="cuda")
    index[2] = 6
    rows = tw.info_nce(a, b, 1.0, positives=index, reduction="none")
    assert rows[2].isnan()
    assert rows[[0, 1, 3, 4, 5]].isfinite().all()
    assert tw.clip_loss(a, b, torch.full((), torch.inf, device="cuda")).isnan()
    with pytest.raises(tw.OptionError, match="got 6 at row 2"):
        tw.info_nce(a, b, 1.0, positives=index, check_values=True)
    with pytest.raises(tw.OptionError, match="scale must be finite"):
        tw.clip_loss(a, b, torch.full((), torch.inf, device="cuda"), check_values=True)


def test_more_than_2_to_the_31_elements():
    """Rows of a tensor of 2^32 elements: offsets beyond 32 bits."""
    wide = torch.empty(2**22, 1024, dtype=torch.bfloat16, device="cuda")
    rows = wide[-100:]
    rows.copy_(unit(100, 1024, torch.bfloat16))
    cols = unit(100, 1024, torch.bfloat16, seed=3)
    assert torch.equal(tw.clip_loss(rows, cols, 10.0), tw.clip_loss(rows.clone(), cols, 10.0))


def test_mixed_devices_raise():
    with pytest.raises(tw.DeviceError, match="text must be on the device of image"):
        tw.clip_loss(unit(4, 4), unit(4, 4).cpu(), 1.0)
    with pytest.raises(tw.DeviceError, match="scale must be on the device"):
        tw.clip_loss(unit(4, 4), unit(4, 4), torch.tensor(1.0))
