"""Memory linear in the batch, and the same bits twice."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import tilewise as tw
from tilewise.measure import peak_bytes

MIB = 2**20


def inputs(batch, dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(batch)
    make = lambda: F.normalize(torch.randn(batch, dim, generator=generator), dim=1).to(dtype)  # noqa: E731
    return make().requires_grad_(), make().requires_grad_()


LOSSES = {
    "clip": lambda a, b: tw.clip_loss(a, b, 14.3),
    "clip-ids": lambda a, b: tw.clip_loss(a, b, 14.3, ids=torch.arange(a.shape[0]) // 2),
    "siglip": lambda a, b: tw.siglip_loss(a, b, 10.0),
    "info_nce-frozen": lambda a, b: tw.info_nce(a, b.detach(), 14.3),
    "nt_xent": lambda a, b: tw.nt_xent(a, b),
    "sup_con": lambda a, b: tw.sup_con(a, torch.arange(a.shape[0]) // 2),
}


def peak(name, batch, dim, dtype=torch.float32):
    """Peak of forward + backward above the inputs, gradients included."""
    a, b = inputs(batch, dim, dtype)

    def step():
        a.grad = b.grad = None
        LOSSES[name](a, b).backward()

    return peak_bytes(step, torch.device("cpu"))


def check_contract(name, batch, dim=64):
    torch.set_num_threads(2)
    side = batch * dim * 4
    limit = 1.25 * 4 * side + 256 * MIB
    found = peak(name, batch, dim) + 2 * side
    assert found <= limit, f"{found / MIB:.0f} MiB, limit {limit / MIB:.0f}"
    return limit


@pytest.mark.parametrize("name", LOSSES)
def test_peak_is_within_the_contract(name):
    """1.25 x (inputs + both gradients) + 256 MiB; the matrix alone would take 576 MiB here."""
    limit = check_contract(name, 12288)
    assert limit < 4 * 12288**2, "the test would not notice a stored matrix"


@pytest.mark.parametrize("batch", [4096, pytest.param(65536, marks=pytest.mark.slow)])
def test_peak_of_clip_at_both_ends(batch):
    """From 4,096 to 65,536, where the matrix would take 16 GiB."""
    check_contract("clip", batch)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_peak_grows_linearly(name):
    """R17: the exponent of growth, which is 2 where the matrix is stored, is at most 1.05."""
    torch.set_num_threads(2)
    peaks = [peak(name, batch, 64) for batch in (4096, 8192, 16384)]
    for small, large in itertools.pairwise(peaks):
        assert math.log2(large / small) <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_peak_of_every_loss_at_32768(name):
    """About four minutes."""
    check_contract(name, 32768)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_need_one_accumulator(dtype):
    """Above inputs and gradients: workspace and 2 * M * D bytes, rounded in place at the end."""
    batch, dim = 4096, 1024
    torch.set_num_threads(2)
    side = batch * dim * 2
    extra = peak("clip", batch, dim, dtype) - 2 * side
    tiles = peak("clip", batch, dim // 64, dtype)
    assert extra <= side + tiles + 40 * MIB


def test_a_lone_rank_has_no_slots():
    """One more number on each side: 2 bytes for the accumulator above inputs and gradients."""
    torch.set_num_threads(2)
    found, dim = [], 8192
    for batch in (512, 2048):
        a, b = inputs(batch, dim, torch.bfloat16)

        def step(a=a, b=b):
            a.grad = b.grad = None
            tw.clip_loss(a, b, 0.01, workspace_mib=32).backward()

        found.append(peak_bytes(step, torch.device("cpu")) - 4 * batch * dim)
    assert (found[1] - found[0]) / (dim * (2048 - 512)) <= 2.3


def test_half_precision_gradients_lie_in_the_accumulator():
    """Rounded where they were added up: no copy of them is made at the end."""
    a, b = inputs(512, 64, torch.bfloat16)
    tw.clip_loss(a, b, 14.3).backward()
    assert b.grad.untyped_storage().nbytes() == 2 * b.grad.nbytes
    assert a.grad.untyped_storage().nbytes() == a.grad.nbytes


def test_softplus_gradients_are_handed_over_without_a_copy():
    """SigLIP keeps gradients from the forward; the backward scales them in place, 64 MiB each."""
    torch.set_num_threads(2)
    a, b = inputs(2048, 8192)
    loss = LOSSES["siglip"](a, b)
    assert peak_bytes(loss.backward, torch.device("cpu")) <= a.nbytes / 2


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_same_bits_on_every_run(name, threads):
    torch.set_num_threads(threads)
    results = []
    for _ in range(5):
        a, b = inputs(700, 33)
        loss = LOSSES[name](a, b)
        loss.backward()
        results.append([loss.detach(), a.grad, b.grad])
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert x is y or torch.equal(x, y)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
