"""The op that closes a loss, against the plain arithmetic on the same stats."""

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tilewise.backends import fused
from tilewise.entropy import entropy
from tilewise.losses.common import aggregate, cross_entropy
from tilewise.reductions import Stats

# numpy's in the interpreter, where infinities are meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
KINDS = ["float64", "float32", "kernels"]


@pytest.fixture(params=KINDS)
def kind(request):
    """In plain PyTorch, or in Triton's interpreter."""
    if request.param == "kernels":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the GPU suite does this")
    return request.param


@pytest.fixture
def backend(kind, monkeypatch):
    """Whose op it is."""
    monkeypatch.setattr(fused, "INTERPRETED", kind == "kernels")
    return "fused" if kind == "kernels" else "chunked"


@pytest.fixture
def dtype(kind):
    """Of the stats."""
    return torch.float64 if kind == "float64" else torch.float32


@pytest.fixture
def close(kind, backend):
    """The op that closes a loss, in this way."""
    return lambda *args: entropy(*args, backend, "")[0]


def stats_of(size, dtype, seed=0, every=5):
    """Packed stats, of which every fifth slot has no positive and every seventh no negatives."""
    dice = torch.Generator().manual_seed(seed)
    packed = torch.randn(5, size, generator=dice, dtype=torch.float64).mul(8).to(dtype)
    packed[3] = (torch.arange(size) % every > 0).to(dtype)
    packed[1] *= packed[3]
    packed[0, ::7] = -torch.inf
    return packed.requires_grad_()


def expected(sides, weight, mean):
    """In float64, by what other losses take."""
    wide = [side.detach().double().requires_grad_() for side in sides]
    found = [
        aggregate(
            cross_entropy(Stats.unpack(side), several=False),
            side[3] > 0,
            None if weight is None else weight.double(),
            "mean" if mean else "sum",
        )
        for side in wide
    ]
    value = sum(found) / len(found)
    return value.detach(), torch.autograd.grad(3.0 * value, wide)


WEIGHTS = {
    "none": lambda n: None,
    "some": lambda n: torch.arange(n).remainder(4).float() / 3,
    "expanded": lambda n: torch.tensor(0.5).expand(n),
    "zero": lambda n: torch.zeros(n),
}


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("columns", [True, False])
def test_value_and_gradients(close, dtype, mean, weights, columns):
    """Slots beyond one block, and fewer columns than blocks of rows."""
    n = 300
    sides = [stats_of(n, dtype)]
    if columns:
        sides.append(stats_of(n if weights != "none" else 7, dtype, seed=1))
    weight = WEIGHTS[weights](n)
    value, grads = expected(sides, weight, mean)
    cols = sides[1] if columns else torch.empty(0, dtype=dtype)
    found = close(sides[0], cols, weight, mean)
    tiny = 1e-12 if dtype == torch.float64 else 3e-7
    torch.testing.assert_close(found.double(), value, rtol=tiny, atol=0)
    for got, wanted in zip(torch.autograd.grad(3.0 * found, sides), grads, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=tiny, atol=1e-40)


def test_stats_with_gaps_between_slots(close, dtype):
    rows = stats_of(9, dtype).detach()
    spread = rows.t().contiguous().t()
    found = [x.requires_grad_() for x in (rows, spread)]
    values = [close(x, torch.empty(0, dtype=dtype), None, True) for x in found]
    assert values[0] == values[1]
    grads = [torch.autograd.grad(v, x)[0] for v, x in zip(values, found, strict=True)]
    assert torch.equal(*grads)


def test_nobody_counts(close, dtype):
    """A mean over nothing is 0, with gradients of 0."""
    rows = stats_of(9, dtype, every=1)
    found = close(rows, torch.empty(0, dtype=dtype), None, True)
    assert found == 0
    assert not torch.autograd.grad(found, rows)[0].any()


def test_confident_and_hopeless_slots_keep_their_digits(close, dtype):
    """exp(-30) would be lost beside 1, exp(1e4) would overflow."""
    odds = torch.tensor([-30.0, -1e4, 1e4, 0.0, -torch.inf])
    rows = torch.zeros(5, 5, dtype=dtype)
    rows[0], rows[3] = odds, 1
    for i, x in enumerate(odds.double()):
        own = rows[:, i : i + 1].clone().requires_grad_()
        found = close(own, torch.empty(0, dtype=dtype), None, True)
        wanted = torch.logaddexp(x, torch.zeros((), dtype=torch.float64))
        torch.testing.assert_close(found.double(), wanted, rtol=3e-7, atol=1e-300)
        d = torch.autograd.grad(found, own)[0][:2, 0].double()
        wanted = torch.stack([x.sigmoid(), -x.sigmoid()])
        torch.testing.assert_close(d, wanted, rtol=3e-7, atol=1e-300)


def test_the_weight_of_a_slot_that_does_not_count_is_not_looked_at(close, dtype):
    rows, weight = stats_of(10, dtype), torch.ones(10)
    plain = close(rows, torch.empty(0, dtype=dtype), weight, True)
    weight[::5] = torch.nan
    assert close(rows, torch.empty(0, dtype=dtype), weight, True) == plain


def test_one_slot_that_is_not_a_number_spoils_the_loss(close, dtype):
    rows = stats_of(300, dtype).detach()
    rows[0, 299] = torch.nan
    assert close(rows, torch.empty(0, dtype=dtype), None, True).isnan()


def test_the_ops_are_ops(backend, dtype):
    gaps = stats_of(6, dtype).detach().t().contiguous().t()
    for cols in (stats_of(6, dtype), gaps, torch.empty(0, dtype=dtype)):
        args = (stats_of(6, dtype), cols, torch.ones(6), True, backend, "")
        torch.library.opcheck(entropy, args)
        value, divisors = entropy(*args)
        pulled = (*(x.detach() for x in args[:3]), divisors, value.detach(), backend)
        torch.library.opcheck(torch.ops.tilewise.pull_stats.default, pulled)


def test_no_second_derivative(close, dtype):
    rows = stats_of(6, dtype)
    found = close(rows, torch.empty(0, dtype=dtype), None, True)
    (d,) = torch.autograd.grad(found, rows, create_graph=True)
    with pytest.raises(tw.GradError, match="first derivatives"):
        d.sum().backward()


class Counted(TorchDispatchMode):
    """Names of the operations that are run."""

    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


FEATURES = [torch.randn(6, 4, generator=torch.Generator().manual_seed(k)) for k in (0, 1)]


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: tw.clip_loss(a, b),
        lambda a, b: tw.clip_loss(a, b, weight=torch.ones(6), reduction="sum"),
        lambda a, b: tw.info_nce(a, b),
        lambda a, b: tw.nt_xent(a, b),
    ],
)
def test_a_plain_loss_is_few_operations(loss):
    """Each is a launch on a GPU, where a small batch waits for every one."""
    sides = [x.clone().requires_grad_() for x in FEATURES]
    with Counted() as counted:
        loss(*sides).backward()
    ours = {name for name in counted.names if name.startswith("tilewise::")}
    assert ours == {f"tilewise::{x}" for x in ("reduce", "entropy", "pull_stats", "differentiate")}
    others = {"aten::ones_like", "aten::full", "aten::cat", "aten::arange", "aten::roll",
              "aten::slice_backward", "aten::add", "aten::ones", "aten::zeros_like"}  # fmt: skip
    views = {"aten::detach", "aten::slice", "aten::empty", "aten::new_empty", "aten::narrow"}
    assert set(counted.names) <= ours | others | views, counted.names
