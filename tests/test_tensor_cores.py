"""The error of float32 by products of float16, on tensor cores that cut off what they add up."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import oracle
import tilewise as tw
from tilewise.backends import fused

pytest.importorskip("triton")

import triton
import triton.language as tl

import h200_on_cpu
from h200_on_cpu import cut_off_product
from tilewise.backends import dz, kernels, operands

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU suite has tensor cores"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _tensor_cores(monkeypatch):
    h200_on_cpu.install_tensor_cores(monkeypatch)
    monkeypatch.setattr(fused, "INTERPRETED", True)


def unit(n, d, seed):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, d, generator=generator), dim=1)


def features(kind, n, m, d, draw):
    rows, cols, middle = unit(n, d, draw), unit(m, d, draw + 10), unit(1, d, 99)
    if kind == "aligned":
        cols = rows + 0.05 * cols
    elif kind == "opposed":
        rows, cols = 0.05 * rows + middle, 0.05 * cols - middle
    elif kind == "cone":  # as those of encoders: all on one side
        rows, cols = rows + middle, cols + middle
    return F.normalize(rows, dim=1), F.normalize(cols, dim=1)


OUTPUTS = ("loss", "d_rows", "d_cols", "d_scale")


def ours(loss, rows, cols, scale):
    """Loss and gradients of the fused backend."""
    rows, cols = rows.clone().requires_grad_(), cols.clone().requires_grad_()
    s = torch.tensor(scale, requires_grad=True)
    value = loss(rows, cols, s, backend="fused")
    value.backward()
    return value.detach(), rows.grad, cols.grad, s.grad


def errors(loss, loss_of_z, kind, shape, scales, bias=0.0):
    """By output: our error, that of plain float32, and the size of the truth, over the scales."""
    totals = {output: np.zeros(3) for output in OUTPUTS}
    for draw, scale in enumerate(scales):
        rows, cols = features(kind, *shape, draw)
        options = {"scale": scale, "bias": bias, "upstream": 1.0}
        truth = oracle.evaluate(
            loss_of_z, rows.double(), cols.double(), compute=torch.float64, **options
        )
        plain = oracle.evaluate(loss_of_z, rows, cols, compute=torch.float32, **options)
        for output, got in zip(OUTPUTS, ours(loss, rows, cols, scale), strict=True):
            true = getattr(truth, output)
            terms = (got.double() - true, getattr(plain, output).double() - true, true)
            totals[output] += [x.norm().item() ** 2 for x in terms]
    return {output: np.sqrt(total) for output, total in totals.items()}


def check(found):
    """The bar of docs/math.md: twice plain float32's error and half a rounding of the output."""
    half = torch.finfo(torch.float32).eps / 2
    for output, (error, plain, size) in found.items():
        allowed = 2 * plain + half * size
        assert error <= allowed, f"{output}: {error:.2e} > {allowed:.2e}"


@pytest.mark.parametrize("scale", [14.3, 100.0])
@pytest.mark.parametrize("kind", ["random", "aligned", "opposed", "cone"])
def test_clip(kind, scale):
    scales = [0.99 * scale, scale, 1.01 * scale]
    check(errors(tw.clip_loss, oracle.clip, kind, (96, 96, 256), scales))


@pytest.mark.parametrize(
    ("kind", "scale", "bias"),
    [("random", 14.3, -10.0), ("opposed", 0.5, -5.0), ("cone", 100.0, -60.0)],
)
def test_siglip(kind, scale, bias):
    """A sigmoid's error is its logit's: nothing is taken away from all logits of a row alike."""
    loss = lambda a, b, s, **k: tw.siglip_loss(a, b, s, bias, **k)  # noqa: E731
    scales = [0.99 * scale, scale, 1.01 * scale]
    check(errors(loss, oracle.siglip, kind, (96, 96, 256), scales, bias))


@triton.jit
def scores(rows, cols, out, D: tl.constexpr, WHOLE_AT: tl.constexpr, SIZE: tl.constexpr):
    """Products of features of one tile, as the softplus kernel finds them."""
    rows, cols = kernels.opened(rows, D, SIZE, 64), kernels.opened(cols, D, SIZE, 64)
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + at, kernels.product(rows, cols, 0, 0, D, SIZE, SIZE, 64, WHOLE_AT))


def test_scores_are_rounded_and_not_cut_off():
    """Added to the rest in a tensor core, the exact sum of whole numbers would lose by it."""
    rows, cols = (
        operands.Operand(unit(64, 256, k), "exact", torch.full((1,), 2.0**12), cols=bool(k))
        for k in (0, 1)
    )
    sides = [x.scores(slice(0, 64)) for x in (rows, cols)]
    true = sides[0].double() @ sides[1].double().T
    for whole_at, least, most in ((0, -2.0, -0.2), (rows.whole_at, -0.05, 0.05)):
        out = torch.empty(64, 64)
        scores[(1,)](
            *((x, 64, x.stride(0) // 8) for x in sides),
            out,
            D=rows.width,
            WHOLE_AT=whole_at,
            SIZE=64,
        )
        ulp = torch.tensor(np.spacing(out.abs().numpy()), dtype=torch.float64)
        assert least <= ((out.double() - true) * out.sign() / ulp).mean() <= most


@triton.jit
def values(z, value, sigmoid, SIZE: tl.constexpr):
    """What the softplus kernel makes of logits."""
    at = tl.arange(0, SIZE)
    x, y = dz.softplus_and_sigmoid(tl.load(z + at))
    tl.store(value + at, x)
    tl.store(sigmoid + at, y)


@pytest.mark.parametrize("middle", [-30.0, -12.0, -8.0, -5.5, -2.0, 0.0, 3.0, 20.0])
def test_logits_that_are_alike(middle):
    """Their errors are to either side, since what is alike adds up."""
    z = middle + 0.003 * torch.randn(2**16)
    value, sigmoid = torch.empty_like(z), torch.empty_like(z)
    values[(1,)](z, value, sigmoid, SIZE=len(z))
    for got, true, most in (
        (value.double() * np.log(2), F.softplus(z.double(), threshold=1e9), 1e-7),
        (sigmoid.double(), torch.sigmoid(z.double()), 4e-8),
    ):
        error = got / true - 1
        assert error.mean().abs() <= most
        assert error.abs().max() <= 1e-6 + 1e-7 * abs(middle)


@pytest.mark.parametrize("kind", ["random", "opposed", "cone"])
def test_sums_over_many_pairs(kind):
    """Gradients of rows are sums over all columns: in one go they would be off by 5 to 20 times."""
    positives = torch.arange(16)
    loss = lambda a, b, s, **k: tw.info_nce(a, b, s, positives=positives, **k)  # noqa: E731
    of_z = lambda z: oracle.info_nce(z, positives=positives)  # noqa: E731
    found = errors(loss, of_z, kind, (16, 2048, 32), [14.3])
    check({name: found[name] for name in ("loss", "d_rows", "d_cols")})


def test_what_is_emulated():
    """Sums that are known: what a tensor core keeps of 1 + 2^-24 16 times, and of terms alone."""
    ones, small = np.ones((1, 16), np.float16), np.full((16, 1), 2.0**-24, np.float16)
    start = np.ones((1, 1), np.float32)
    # Of each term two bits below the last of 1 are left: 2^-24 is above them, their sum is kept.
    assert cut_off_product(ones, small, start) == 1 + 2.0**-20
    # Cut off towards 0, never rounded up.
    assert cut_off_product(1.5 * ones[:, :1], small[:1], start) == 1.0
    assert cut_off_product(ones[:, :1], -small[:1], start) == 1 - 2.0**-24
    assert cut_off_product(ones, small, 0 * start) == 2.0**-20
