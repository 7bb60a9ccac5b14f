"""The fused backend as an H200 runs it, on a CPU: see `h200_on_cpu` and `gluon_on_cpu`."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F

import tilewise as tw
from tilewise import hosted
from tilewise.backends import fused

pytest.importorskip("triton")

import gluon_program
import h200_on_cpu
import test_gpu
from gluon_numbers import RaceError
from gluon_on_cpu import Kernel
from gluon_program import DeadlockError
from test_fused import check, outcome
from tilewise.backends import fused_backward, fused_forward, ready, tuning

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU suite does this"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, where infinities are meant
]
LOSSES = ["clip", "info_nce", "info_nce-frozen", "siglip", "siglip-rows"]
BOUND = {torch.float16: 6e-4, torch.bfloat16: 4e-3, torch.float32: 2e-6}


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Kernels of `hopper` that are launched; fresh memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield h200_on_cpu.install(monkeypatch)
    torch.use_deterministic_algorithms(False)


def unit(n, d, toward=0.0, dtype=torch.float16):
    """Features (n, d), all `toward` their first number."""
    x = torch.randn(n, d, dtype=torch.float64)
    x[:, 0] += toward
    return F.normalize(x, dim=1).to(dtype)


def kind_of(case):
    """A loss and its dtype: features of float32 come in parts."""
    return case.split()[0], torch.float32 if "in parts" in case else torch.float16


def opposed(n, d):
    """Two sides whose cosines are all nearly -1, but for those of two rows."""
    a, b = unit(n, d, 40.0), unit(n, d, -40.0)
    a[5:7] = -a[5:7]
    return a, b


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (128, 64), (300, 96), (256, 456)])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name, shape, dtype, launched):
    """Ragged tiles or whole ones; fewer slices of features than stages, and more."""
    a, b = unit(*shape, dtype=dtype), unit(*shape, dtype=dtype)
    check(name, a, b, 14.0, bound=BOUND[dtype], keep_mib=0)
    assert launched


@pytest.mark.parametrize("shape", [(1, 2), (256, 114)])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_in_parts(name, shape, launched):
    """Of float32, where scores are products of four times as many features."""
    a, b = unit(*shape, dtype=torch.float32), unit(*shape, dtype=torch.float32)
    check(name, a, b, 14.0, bound=BOUND[torch.float32])
    assert "split_product" in launched


@pytest.mark.parametrize("name", ["info_nce", "info_nce-frozen", "siglip", "siglip-rows"])
@pytest.mark.parametrize("shape", [(140, 520), (520, 140)])
def test_rectangles(name, shape):
    check(name, unit(shape[0], 40), unit(shape[1], 40), 14.0)


@pytest.mark.parametrize("case", ["clip", "info_nce-frozen", "siglip", "clip in parts"])
def test_panels(case):
    """A workspace that holds a part of the pairs only."""
    name, dtype = kind_of(case)
    a, b = unit(520, 64, dtype=dtype), unit(520, 64, dtype=dtype)
    check(name, a, b, 14.0, bound=BOUND[dtype], workspace_mib=0.5)


@pytest.mark.parametrize(
    ("case", "processors"),
    [*itertools.product(["clip", "siglip"], [1, 7, 40]), ("clip in parts", 7)],
)
def test_strips(case, processors, monkeypatch):
    """Programs with many tiles, or parts of column blocks, or none."""

    def make(*args):
        return ready.make_ready(*args)._replace(processors=processors)

    for module in (fused_forward, fused_backward):
        monkeypatch.setattr(module, "make_ready", make)
    name, dtype = kind_of(case)
    check(name, unit(700, 32, dtype=dtype), unit(700, 32, dtype=dtype), 14.0, bound=BOUND[dtype])


def check_opposed(loss, n, learnable, ours=torch.float16):
    a, b = opposed(n, 32)
    found = []
    for backend, dtype in (("fused", ours), ("dense", torch.float64)):
        x, y = (side.detach().to(dtype, copy=True).requires_grad_() for side in (a, b))
        scale = torch.tensor(200.0, dtype=torch.promote_types(dtype, torch.float32))
        value = loss(x, y, scale.requires_grad_(learnable), backend=backend)
        value.backward()
        grads = [x.grad, y.grad, *([scale.grad] if learnable else [])]
        found.append([value.detach().double(), *(grad.double() for grad in grads)])
    for got, true in zip(*found, strict=True):
        # The scale's gradient is what is left of 2.5 of the positives and as much of negatives;
        # those of features are nearly parallel, and fp16 takes 1.4e-3 of what is left of them.
        most = 2e-3 * true.norm() if got.ndim else 2e-5 * true.abs() + 2.5 * 2**-22
        assert (got - true).norm() <= most


@pytest.mark.parametrize("learnable", [True, False])
@pytest.mark.parametrize("n", [80, 300])
@pytest.mark.parametrize("loss", [tw.clip_loss, tw.info_nce])
def test_where_no_fixed_offset_holds(loss, n, learnable, launched):
    """One kernel makes dz, whether the offset held or not."""
    check_opposed(loss, n, learnable)
    assert launched == ["sums", "dz_of_sums"]


def test_where_no_fixed_offset_holds_in_parts(launched):
    check_opposed(tw.clip_loss, 300, True, torch.float32)
    assert launched == ["sums", "dz_of_sums", "split_product", "split_product"]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("name", ["clip", "info_nce"])
def test_kept_exponentials(name, chunks, monkeypatch, launched):
    """Some chunks of rows kept, or all; whatever is not kept is computed again."""
    monkeypatch.setattr(fused, "CHUNK", 128)
    a, b = unit(300, 40, dtype=torch.bfloat16), unit(300, 40, dtype=torch.bfloat16)
    budget = chunks * 128 * 304 * 2 / 2**20
    assert tw.explain_keep(a, b, budget)[0] == chunks
    check(name, a, b, 14.0, BOUND[torch.bfloat16], keep_mib=budget, workspace_mib=0.25)
    assert ("dz_of_sums" in launched) == (chunks < 3)


def test_exponentials_that_are_multiplied(launched):
    """Over frozen columns they are stored in bf16, and multiplied at once."""
    a, b = unit(300, 40, dtype=torch.bfloat16), unit(520, 40, dtype=torch.bfloat16)
    check("info_nce-frozen", a, b, 14.0, BOUND[torch.bfloat16])
    assert set(launched) == {"sums"}


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_same_bits_in_any_order(name, monkeypatch):
    """However groups of warps and copies fall in with each other."""
    a, b = unit(300, 456), unit(300, 456)
    outcomes = []
    for seed in range(3):
        monkeypatch.setattr(Kernel, "seed", seed)
        outcomes.append(outcome(name, a, b, 14.0, "fused"))
    for other in outcomes[1:]:
        assert all(torch.equal(x, y) for x, y in zip(outcomes[0], other, strict=True))


WAIT = "mbarrier.wait({})\n"
STORED = "fence_async_shared()\n        tma.async"
FAULTS = {
    "full slots are loaded": (WAIT.format("empty.index(slot), k // STAGES & 1 ^ 1"), "pass\n"),
    "empty slots are read": (WAIT.format("full.index(slot), k // STAGES & 1"), "pass\n"),
    "nobody waits for a turn": (WAIT.format("turn.index(ME), count & 1 ^ (1 - ME)"), "pass\n"),
    "both wait for a turn": ("count & 1 ^ (1 - ME)", "count & 1"),
    "slots are handed back early": ("warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,"),
    "too few bytes are expected": ("(TN + TM) * TD", "TN * TD"),
    "copies do not see what is stored": (STORED, "tma.async"),
    "halves are stored too early": ("    tma.store_wait(0)\n    place", "    pass\n    place"),
    "nobody waits for the last stores": ("    tma.store_wait(0)\n\n", "    pass\n\n"),
    "a row too far": ("sums, local < n)", "sums)"),
    "nobody sees barriers that are made": ("fence_async_shared()\n    return", "return"),
    "groups share a place": ("staging.index(ME)", "staging.index(0)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, monkeypatch):
    h200_on_cpu.install(monkeypatch, [FAULTS[fault]])
    with pytest.raises((RaceError, DeadlockError, AssertionError)):
        check("clip", unit(300, 456), unit(300, 456), 14.0)


OF_PARTS = {
    "parts are loaded into full slots": (WAIT.format("empty.index(slot), step // STAGES & 1 ^ 1"),
                                         "pass\n"),
    "empty slots of parts are read": (WAIT.format("full.index(slot), step // STAGES & 1"),
                                      "pass\n"),
    "one group is enough to empty a slot": ("empty.index(k), 2)", "empty.index(k), 1)"),
    "too few bytes of parts": ("2 * (2 * TN + TD)", "2 * (TN + TD)"),
    "large products are added unfinished": ("warpgroup_mma_wait(2,", "warpgroup_mma_wait(3,"),
    "small products are left behind": ("warpgroup_mma_wait(0, deps=(small,))\n            mb",
                                       "warpgroup_mma_wait(2, deps=(small,))\n            mb"),
    "both groups have the same rows": ("(2 * (t // blocks) + ME)", "(2 * (t // blocks))"),
    "a half of dz for both": ("highs.index(2 * slot + ME)", "highs.index(2 * slot)"),
    "a row of a gradient too far": ("(rows < n) & (cols < D)", "cols < D"),
}  # fmt: skip


@pytest.mark.parametrize("fault", OF_PARTS)
def test_faults_are_seen_in_products_of_parts(fault, monkeypatch):
    h200_on_cpu.install(monkeypatch, [OF_PARTS[fault]])
    # Two slots: of six, the warp that loads would never be all ahead.
    few = tuning.GLUON_SPLIT.product._replace(stages=2)
    monkeypatch.setattr(tuning, "GLUON_SPLIT", tuning.GLUON_SPLIT._replace(product=few))
    a, b = unit(200, 40, dtype=torch.float32), unit(200, 40, dtype=torch.float32)
    with pytest.raises((RaceError, DeadlockError, AssertionError)):
        check("clip", a, b, 14.0, bound=BOUND[torch.float32])


def check_blocks(monkeypatch):
    """NT-Xent in four blocks of features in host memory, hard negatives in the last one.

    What a row sums up over several blocks counts from the offset of one of them.
    """
    a, b = unit(256, 64), unit(256, 64)
    b[-128:] = F.normalize(0.6 * a[:128].double() + 0.8 * b[-128:].double(), dim=1).half()
    found = []
    for backend, dtype in (("dense", torch.float64), ("fused", torch.float16)):
        x, y = (side.detach().to(dtype, copy=True).requires_grad_() for side in (a, b))
        loss = tw.nt_xent(x, y, 30.0, backend=backend)
        loss.backward()
        found.append((loss.detach().double(), x.grad.double(), y.grad.double()))
        monkeypatch.setattr(hosted.Blocks, "is_away", staticmethod(lambda *_: True))
        monkeypatch.setattr(hosted, "BLOCK_BYTES", 128 * 64 * 2)
    for true, got in zip(*found, strict=True):
        assert (got - true).norm() <= 1e-3 * true.norm()


def test_sums_of_several_visits(monkeypatch, launched):
    check_blocks(monkeypatch)
    assert launched.count("dz_of_sums") == 16


def test_negatives_far_above_an_offset_are_seen(monkeypatch):
    h200_on_cpu.install(monkeypatch, [("ABOVE = gl.constexpr(64.0)", "ABOVE = gl.constexpr(1.0)")])
    with pytest.raises(AssertionError):
        check_blocks(monkeypatch)


def test_a_positive_beyond_all_bounds_is_seen(monkeypatch):
    """What `mend` overwrites must be finite, or its share of the scale's gradient is not."""
    h200_on_cpu.install(
        monkeypatch, [("gl.minimum(s * scale2 - shift, ABOVE)", "s * scale2 - shift")]
    )
    with pytest.raises(AssertionError):
        check_opposed(tw.clip_loss, 80, learnable=True)


# What a GPU is asked


@pytest.mark.parametrize("equal", [True, False])
def test_both_passes_see_the_same_logits(equal, monkeypatch):
    monkeypatch.setattr(test_gpu, "DEVICE", "cpu")
    if not equal:
        monkeypatch.setattr(gluon_program, "multiply", h200_on_cpu.multiply)
    with contextlib.nullcontext() if equal else pytest.raises(AssertionError):
        test_gpu.test_both_passes_see_the_same_logits()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", test_gpu.DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "aligned", "opposed"])
@pytest.mark.parametrize("name", ["clip", "clip-anew", "siglip", "siglip-far"])
def test_exactness(name, kind, dtype, monkeypatch):
    h200_on_cpu.install(monkeypatch, tensor_cores=True)
    monkeypatch.setattr(test_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(test_gpu, "multiply", h200_on_cpu.products_of)
    test_gpu.test_exactness(name, kind, "fused", dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "most"), [(14.3, 2.0), (100.0, 6.0)])
def test_narrow_cones(scale, most):
    """Of float32 with cosines above 0.99, gradients miss the bar of two at scale 100: how far."""
    torch.manual_seed(0)
    found = {"dense": 0.0, "fused": 0.0}
    for draw in range(3):
        a, b = (unit(200 + draw, 32, 40.0, torch.float32) for _ in range(2))
        truth = outcome("clip", a.double(), b.double(), scale + 0.037 * draw, "dense")[1]
        for backend in found:
            got = outcome("clip", a, b, scale + 0.037 * draw, backend)[1]
            found[backend] += (got - truth).square().sum().item()
    ratio = (found["fused"] / found["dense"]) ** 0.5
    print(f"scale {scale}: gradients of rows are off by {ratio:.1f} of what plain float32 is")  # noqa: T201
    assert ratio <= most


@pytest.mark.slow
@pytest.mark.parametrize("shape", test_gpu.SHAPES, ids=str)
@pytest.mark.parametrize("name", test_gpu.LOSSES)
def test_every_loss_equals_dense(name, shape, monkeypatch):
    monkeypatch.setattr(test_gpu, "DEVICE", "cpu")
    test_gpu.test_every_loss_equals_dense(name, shape)
