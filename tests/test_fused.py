"""The fused backend's algebra, in Triton's interpreter on CPU; on a GPU `test_gpu.py` goes further.

bf16 is not tested here: the interpreter multiplies bit patterns of it. fp16 takes the same path.
"""

import collections
import math

import pytest
import torch
import torch.nn.functional as F

import oracle
import tilewise as tw
from tilewise import autograd
from tilewise.backends import fused
from tilewise.backends.plan import IN_WORKSPACE, Needs, Plan
from tilewise.pairs import make_pairs
from tilewise.reductions import merged
from tilewise.tiles import Tile, padded

pytest.importorskip("triton")

from tilewise.backends import convert, fused_forward, operands, products, ready
from tilewise.backends.fused_backward import Backward
from tilewise.backends.fused_forward import Forward

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU suite does this"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, where infinities are meant
]
BOUND = {torch.float32: 3e-6, torch.float16: 6e-4}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """Let the kernels run on CPU tensors, and fresh memory hold NaN."""
    monkeypatch.setattr(fused, "INTERPRETED", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def halves(n):
    return torch.arange(n) // 2


LOSSES = {
    "clip": lambda a, b, s, c, **k: tw.clip_loss(a, b, s, bias=c, **k),
    "clip-ids": lambda a, b, s, c, **k: tw.clip_loss(a, b, s, bias=c, ids=halves(len(a)), **k),
    "clip-labels": lambda a, b, s, c, **k: tw.clip_loss(a, b, s, labels=halves(len(a)), **k),
    "clip-smooth": lambda a, b, s, c, **k: tw.clip_loss(a, b, s, label_smoothing=0.1, **k),
    "info_nce": lambda a, b, s, c, **k: tw.info_nce(a, b, s, **k),
    "info_nce-index": lambda a, b, s, c, **k: tw.info_nce(
        a, b, s, positives=torch.arange(len(a)).flip(0), **k
    ),
    "info_nce-frozen": lambda a, b, s, c, **k: tw.info_nce(a, b.detach(), s, **k) + 0 * b.sum(),
    "siglip": lambda a, b, s, c, **k: tw.siglip_loss(a, b, s, c, **k),
    "siglip-rows": lambda a, b, s, c, **k: (
        tw.siglip_loss(a, b, s, c, reduction="none", **k).square().mean()
    ),
    "siglip-labels": lambda a, b, s, c, **k: tw.siglip_loss(
        a, b, s, c, labels=halves(len(a)), ids=halves(len(a)) // 2, **k
    ),
    "nt_xent": lambda a, b, s, c, **k: tw.nt_xent(a, b, s, **k),
    "sup_con": lambda a, b, s, c, **k: tw.sup_con(a, halves(len(a)), s, **k) + 0 * b.sum(),
}


def unit(n, d):
    return F.normalize(torch.randn(n, d, dtype=torch.float64), dim=1)


def outcome(name, a, b, scale, backend, bias=-3.0, **how):
    """Loss and gradients of rows, columns, scale and bias, in float64."""
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    compute = torch.promote_types(a.dtype, torch.float32)
    s, c = (torch.tensor(x, dtype=compute, requires_grad=True) for x in (scale, bias))
    loss = LOSSES[name](a, b, s, c, backend=backend, **how)
    (-2.5 * loss).backward()
    grads = (x.grad for x in (a, b, s, c) if x.grad is not None)
    return [x.double() for x in (loss.detach(), *grads)]


def check(name, a, b, scale, bound=None, **how):
    """The fused backend against dense in float64, relative to each output's size."""
    truth = outcome(name, a.double(), b.double(), scale, "dense")
    for got, true in zip(outcome(name, a, b, scale, "fused", **how), truth, strict=True):
        assert got.isfinite().all()
        # A zero gradient (the bias of a softmax) is zero up to rounding of what cancels.
        most = (bound or BOUND[a.dtype]) * max(true.norm().item(), 1e-2)
        assert (got - true).norm() <= most, f"{(got - true).norm():.2e} > {most:.2e}"


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name, dtype):
    """Several tiles either way, ragged at both ends."""
    check(name, unit(70, 33).to(dtype), unit(70, 33).to(dtype), 14.0)


@pytest.mark.parametrize("name", ["clip", "siglip", "nt_xent", "sup_con"])
@pytest.mark.parametrize("shape", [(1, 4), (2, 1), (32, 32), (64, 64), (129, 8)])
def test_shapes(name, shape):
    check(name, unit(*shape).float(), unit(*shape).float(), 5.0)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", ["clip", "siglip", "nt_xent", "sup_con", "info_nce-frozen"])
def test_devices_that_copy_tiles_give_the_same(name, dtype, monkeypatch):
    """A descriptor from the host, as on Hopper, or one that the kernel makes, as before it."""
    a, b = (unit(70, 40).to(dtype) for _ in range(2))
    plain = outcome(name, a, b, 14.0, "fused")
    opened = []
    make = ready.TensorDescriptor.from_tensor
    monkeypatch.setattr(
        ready.TensorDescriptor, "from_tensor", lambda *args: opened.append(args) or make(*args)
    )
    monkeypatch.setattr(ready, "copies_tiles", lambda _: True)
    for x, y in zip(plain, outcome(name, a, b, 14.0, "fused"), strict=True):
        assert torch.equal(x, y)
    assert opened


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["clip", "info_nce-frozen", "siglip-rows", "nt_xent", "sup_con"])
def test_numbers_do_not_depend_on_the_default_dtype(name, default):
    a, b = (unit(40, 16).float() for _ in range(2))
    plain = outcome(name, a, b, 5.0, "fused")
    torch.set_default_dtype(default)
    try:
        other = outcome(name, a, b, 5.0, "fused")
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(plain, other, strict=True))


@pytest.mark.parametrize("shape", [(40, 100), (100, 40), (1, 70)])
@pytest.mark.parametrize("name", ["info_nce", "info_nce-frozen", "siglip", "siglip-rows"])
def test_rectangles(name, shape):
    n, m = shape
    check(name, unit(n, 20).float(), unit(m, 20).float(), 5.0)


@pytest.mark.parametrize("name", LOSSES)
def test_small_workspace(name):
    """Many panels, and rows whose sums take several calls."""
    check(name, unit(150, 16).float(), unit(150, 16).float(), 8.0, workspace_mib=0.01)


def opposed(far=slice(7, 9)):
    """Two sides (40, 8) whose cosines are all nearly -1, but for those of the rows `far`."""
    a, b = torch.zeros(40, 8), torch.zeros(40, 8)
    a[:, 0], a[far, 0] = 1.0, -1.0
    b[:, 0] = -1.0
    return [F.normalize(x + 0.1 * unit(40, 8).float(), dim=1) for x in (a, b)]


@pytest.mark.parametrize("name", ["clip", "clip-ids", "info_nce", "nt_xent"])
def test_where_no_fixed_offset_holds(name):
    """All cosines -1 but those of two rows: sums 400 nats apart. A flag calls the second pass.

    One feature is nearly all of a row here. Split, it may be off by its last bit (2^-23), which
    is the same in all of the row's logits: at scale 200 up to 2e-5 of a weight.
    """
    a, b = opposed()
    check(name, a, b, 200.0, bound=2e-5)
    # fp16 is not split: what is not rounded to it, the loss and d_scale, keeps the plain bound, or
    # half a rounding of what cancels in d_scale, positives and negatives of 2.5 each.
    a, b = a.half(), b.half()
    truth = outcome(name, a.double(), b.double(), 200.0, "dense")
    for got, true in zip(outcome(name, a, b, 200.0, "fused"), truth, strict=True):
        if got.ndim == 0:
            most = max(BOUND[torch.float32] * true.abs().item(), 2.5 * 2**-24)
            assert (got - true).abs() <= most


@pytest.mark.parametrize("scale", [150.0, 200.0])
def test_both_passes_see_the_same_logits(scale):
    """A learnable scale with positives by index goes back by the kernel of marked pairs.

    That took the offset away after the logit was rounded, the forward before: at scale 200 the
    weights of a row added up to 1 - 5e-6.
    """
    check("nt_xent", *(x.half().float() for x in opposed()), scale, bound=1.2e-6)


def test_the_flag_is_needed(monkeypatch):
    """Without the second pass the same input gives an infinite loss."""
    monkeypatch.setattr(fused_forward.Forward, "_marked", lambda *args, **options: None)
    with pytest.raises(AssertionError):
        test_where_no_fixed_offset_holds("info_nce")


@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset", "expanded"])
def test_strides(layout):
    a, b = unit(40, 24).float(), unit(40, 24).float()
    turned = {
        "transposed": lambda x: x.t().contiguous().t(),
        "sliced": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], 2).flatten(1)[:, ::2],
        "offset": lambda x: torch.cat([x.new_zeros(40, 1), x], 1)[:, 1:],
        "expanded": lambda x: x[:1].expand(40, 24),
    }[layout]
    check("clip", turned(a), b if layout == "expanded" else turned(b), 5.0)


# Panels of converted features


@pytest.fixture
def held(monkeypatch):
    """Spans that were converted, by side: (whether columns, first, last)."""
    spans, plain = [], operands.Operand._hold

    def hold(self, form, span, flag=None):
        spans.append((self.cols, span.start, span.stop))
        return plain(self, form, span, flag)

    monkeypatch.setattr(operands.Operand, "_hold", hold)
    return spans


def check_many(held, n, m):
    """Several panels of rows and of columns, and none of them whole."""
    for cols, size in ((False, n), (True, m)):
        own = {(first, last) for side, first, last in held if side == cols}
        assert len(own) > 1
        assert max(last - first for first, last in own) < size


RECTANGLES = {
    "ids": {"ids": (torch.arange(80) // 3, torch.arange(110) // 2)},
    "labels": {
        "labels": (torch.arange(80) // 2, torch.arange(110) // 2),
        "ids": (torch.arange(80) // 4, torch.arange(110) // 4),
        "sums": True,
    },
    "rows": {"columns": False, "positives": torch.arange(80).flip(0)},
    "softplus": {"reduction": "softplus", "bias": -1.0},
}


@pytest.mark.parametrize("dtype", ["split", "odd"])
@pytest.mark.parametrize("name", RECTANGLES)
def test_panels_of_rectangles(name, dtype, held):
    options = {"workspace_mib": 0.01, **RECTANGLES[name]}

    def loss(swept):
        sides = (swept.rows, swept.cols) if options.get("columns", True) else (swept.rows,)
        if options.get("reduction"):
            return sum(side.values.square().mean() for side in sides)
        total = sum((lse(side) ** 2).mean() for side in sides)
        if options.get("sums"):
            total = total + sum(
                (side.negative_count * side.offset + side.negative_sum).mean() for side in sides
            )
        return total

    a, b = unit(80, 33).float(), unit(110, 33).float()
    if dtype == "odd":
        a, b = a.half(), b.half()
    same(a, b, loss, bound=None if dtype == "split" else 6e-4, **options)
    check_many(held, 80, 110)


@pytest.mark.parametrize("name", ["clip", "clip-ids", "clip-labels", "siglip", "nt_xent"])
def test_panels_of_squares(name, held):
    """Also where a flag calls the second pass, which takes its own panels."""
    a, b = unit(100, 33).float(), unit(100, 33).float()
    check(name, a, b, 14.0, workspace_mib=0.01)
    check(name, a, b, 300.0, bound=5e-5, workspace_mib=0.01)
    check_many(held, 100, 100)


def test_odd_strides_are_copied_by_panels(held):
    a, b = (unit(100, 24).half().t().contiguous().t() for _ in range(2))
    check("clip", a, b, 5.0, workspace_mib=0.005)
    check_many(held, 100, 100)


def test_even_strides_are_not_copied(held):
    check("clip", unit(70, 24).half(), unit(70, 32).half()[:, :24], 5.0)
    assert not held


def test_a_span_is_converted_once(held, monkeypatch):
    """The panel of the rows is not made anew for each panel of the columns."""
    launched = []
    plain = operands.convert

    class Counted:
        def __getitem__(self, grid):
            launched.append(grid)
            return plain[grid]

    monkeypatch.setattr(operands, "convert", Counted())
    side = operands.Operand(unit(40, 8).float(), "exact", torch.ones(1), cols=False)
    for span in (slice(0, 20), slice(0, 20), slice(20, 40), slice(20, 40)):
        side.scores(span)
        side.parts(span)
    assert len(launched) == 4  # two spans in two forms


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e7])
def test_split_features(size):
    """Their scores are as exact as float32, and no tensor core can cut off their largest part."""
    a, b = size * unit(50, 33).float(), unit(60, 33).float()
    pairs = make_pairs(a, b, (1.0, None), positives=None, ids=None, labels=None, skip_self=False)
    units = operands.units_of(pairs, "exact")
    assert 2**11.5 <= (a.double().norm(dim=1).max() * units[0]).item() <= 2**12.5
    left = operands.Operand(a, "exact", units[:1], cols=False)
    right = operands.Operand(b, "exact", units[1:], cols=True)
    scores = [x.scores(slice(0, len(x))).double() for x in (left, right)]
    got = scores[0] @ scores[1].t() / units.double().prod()
    sizes = a.double().norm(dim=1)[:, None] * b.double().norm(dim=1)
    assert ((got - a.double() @ b.double().t()).abs() / sizes).max() < 2**-22
    for x, side in zip(scores, (left, right), strict=True):
        whole = x[:, side.whole_at :]
        assert torch.equal(whole, whole.round())
        assert whole.norm(dim=1).max() <= 2**12.5 + 6  # 33 entries, each rounded
        assert (x[:, :40].abs() <= 1.5).all()
        assert not x[:, 3 * 40 : side.whole_at].any()
        high, low = side.parts(slice(0, len(side)))
        parts = (high.double() + low.double() / convert.REST.value) / side.unit.double()
        assert ((parts - side.features).abs() <= 2**-22 * side.features.abs()).all()


def test_scores_of_transposed_pairs_are_the_same_bits():
    """Pairs (i, j) and (j, i) of one matrix: the small terms change places within a step."""
    x = unit(40, 33).float()
    pairs = make_pairs(x, x, (1.0, None), positives=None, ids=None, labels=None, skip_self=False)
    units = operands.units_of(pairs, "exact")
    rows, cols = (
        operands.Operand(x, "exact", units[:1], cols=side).scores(slice(0, 40)).double()
        for side in (False, True)
    )
    step = (rows[:, None] * cols[None]).unflatten(2, (-1, 2)).sum(3)
    assert torch.equal(step, step.transpose(0, 1))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_product_of_parts(first, turned):
    """Ragged either way. What lies past the panel does not count, up to a multiple of 8 columns if
    it is finite, and beyond whatever it is."""
    features, dz = unit(70, 33).float(), torch.randn(45, 70)
    pairs = make_pairs(
        features, None, (1.0, None), positives=None, ids=None, labels=None, skip_self=True
    )
    made = ready.make_ready(pairs, "exact")
    work = torch.full((2, 128 * 72), torch.nan, dtype=torch.float16)
    n, m = (70, 45) if turned else (45, 70)
    parts = [products.cut(x, Tile(0, n, 0, m)) for x in work]
    for part in parts:
        part.as_strided((n, padded(m, 8)), part.stride()).fill_(7.0)
    x = dz.t() if turned else dz
    parts[0][:] = x
    parts[1][:] = (x - parts[0]) * convert.REST.value
    out = torch.ones(45, 33)
    products.add_products(
        made, out, parts, made.cols.parts(slice(0, 70)), turned=turned, first=first
    )
    truth = dz.double() @ features.double() * made.units[1].double()
    sizes = dz.double().abs() @ features.double().abs() * made.units[1].double()
    assert ((out - truth - int(not first)).abs() / sizes).max() < 2**-21


def test_fp32_keeps_small_weights():
    """A row of weight 1e-6 has all of its digits: what rounding dz leaves is stored enlarged."""
    a, b = unit(60, 16).float(), unit(60, 16).float()
    weight = torch.ones(60)
    weight[7] = 1e-6
    grads = []
    for rows, cols, backend in ((a, b, "fused"), (a.double(), b.double(), "dense")):
        x, y = rows.clone().requires_grad_(), cols.clone().requires_grad_()
        tw.info_nce(x, y, 20.0, weight=weight.to(x), reduction="sum", backend=backend).backward()
        grads.append(x.grad.double())
    error = (grads[0] - grads[1]).norm(dim=1) / grads[1].norm(dim=1)
    assert error.max() < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("shape", [(5000, 9000, 768), (9000, 5000, 64), (4000, 4000, 4096)])
def test_panels_fit_the_workspace(shape, odd, dtype, monkeypatch):
    """dz, converted features and the gradients of a panel's rows, in the backward; sums before."""
    n, m, d = shape
    ones = torch.ones(2) if dtype == torch.float32 else None
    monkeypatch.setattr(ready, "units_of", lambda *args: ones)
    make = lambda n: torch.empty(n + 1, d + odd, dtype=dtype)[1:, odd:]  # noqa: E731
    room = 64 * 2**20
    for cols in (make(m), None):
        pairs = make_pairs(
            make(n), cols, (1.0, None), positives=None, ids=None, labels=None, skip_self=True
        )
        plan = Plan("logsumexp", True, False, "fused", room, False)
        backward = Backward(pairs, plan, Needs(True, True, True, False))
        height, width = backward._panel_shape()
        rows, per_col = (side.bytes_per_row for side in (backward.ready.rows, backward.ready.cols))
        per_row = rows + 4 * d * (not pairs.symmetric)
        pair = 4 if dtype == torch.float32 else 2
        assert height * width * pair + height * per_row + width * per_col <= room
        forward = Forward(pairs, plan)
        for size in backward.ready.tiles[:2]:
            height, width = forward._call_shape(forward.ready, size, 4)
            parts = 4 * height * width // size.cols
            assert min(height, n) * rows + min(width, m) * per_col + parts <= room
        assert (rows > 0) == (dtype == torch.float32 or odd)


# Scores in fp8


def coarse(n, d):
    """Features that e4m3 holds exactly."""
    return (torch.randint(-7, 8, (n, d)) / 16).half()


@pytest.mark.parametrize("name", LOSSES)
def test_fp8_of_features_that_it_holds(name):
    """Then nothing is rounded: units, panels and gradients must come out right."""
    a, b = coarse(70, 33), coarse(70, 33)
    check(name, a, b, 2.0, precision="fp8", workspace_mib=0.02)


def test_fp8_rounds_the_negatives_only():
    """The log-sum-exp is off by what e4m3 takes away, the positive's logit is not."""
    a, b = unit(70, 64).half(), unit(70, 64).half()
    exact, rounded = (
        tw.reduce_pairs(a, b, 5.0, backend="fused", precision=precision).rows
        for precision in ("exact", "fp8")
    )
    positives = [stats.positives + stats.offset for stats in (exact, rounded)]
    assert torch.allclose(*positives, rtol=1e-6, atol=1e-6)
    error = (lse(exact) - lse(rounded)).abs()
    assert 0 < error.max() < 0.1


@pytest.mark.parametrize(
    ("dtype", "how", "reason"),
    [
        (torch.float32, {"backend": "fused"}, "bfloat16 or float16 features, got torch.float32"),
        (torch.float16, {"backend": "chunked"}, "needs the fused backend, got chunked"),
    ],
)  # fmt: skip
def test_fp8_is_refused(dtype, how, reason):
    a, b = unit(8, 8).to(dtype), unit(8, 8).to(dtype)
    with pytest.raises(tw.OptionError, match=reason):
        tw.clip_loss(a, b, 5.0, precision="fp8", **how)


def test_fp8_needs_a_device_that_has_it(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "8.9, got 8.0" in fused.fp8_refusal(cuda, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fused.fp8_refusal(cuda, torch.bfloat16) is None


def test_fp16_keeps_small_weights():
    """Weights of 1e-9 would be 0 in fp16; divided by their largest they are not."""
    a, b = unit(60, 16).half(), unit(60, 16).half()
    a, b = a.requires_grad_(), b.requires_grad_()
    (1e-4 * tw.clip_loss(a, b, 20.0, backend="fused")).backward()
    x, y = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    tw.clip_loss(x, y, 20.0, backend="dense").backward()
    # fp16's smallest number is 6e-8, so gradients of 1e-6 come out with one or two digits.
    assert (a.grad.double() - 1e-4 * x.grad).abs().max() < 6e-8


def test_non_finite_values_show():
    a, b = unit(40, 8).float(), unit(40, 8).float()
    a[3, 2] = torch.inf
    assert tw.clip_loss(a, b, 5.0, backend="fused").isnan()
    rows = tw.info_nce(a, b, 5.0, backend="fused", reduction="none")
    assert rows[3].isnan()
    assert rows[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("how", ["split", "fp8"])
def test_non_finite_values_show_when_converted(how, bad):
    """e4m3 has no infinity, and the unit is that of the finite entries."""
    a, b = 1e3 * unit(40, 8).float(), unit(40, 8).float()
    options = {"backend": "fused"}
    if how == "fp8":
        a, b, options = a.half(), b.half(), {"backend": "fused", "precision": "fp8"}
    a[3, 2] = bad
    assert tw.clip_loss(a, b, 0.01, **options).isnan()
    assert tw.siglip_loss(a, b, 0.01, **options).isnan()
    rows = tw.info_nce(a, b, 0.01, reduction="none", **options)
    assert rows.isnan().nonzero().tolist() == [[3]]


def test_a_row_longer_than_a_float():
    """Its square overflows, its logits do not: no offset can be told beforehand."""
    a, b = 1e25 * unit(40, 8).float(), 1e-5 * unit(40, 8).float()
    truth = tw.info_nce(a.double(), b.double(), 1e-19, backend="dense")
    assert torch.allclose(tw.info_nce(a, b, 1e-19, backend="fused").double(), truth, rtol=1e-5)


@pytest.mark.parametrize("name", ["clip", "siglip", "nt_xent", "sup_con"])
def test_same_bits(name):
    a, b = unit(70, 16).float(), unit(70, 16).float()
    first, second = (outcome(name, a, b, 9.0, "fused") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_ids_beyond_int32():
    ids = torch.arange(40) // 2 * 2**33
    a, b = unit(40, 8), unit(40, 8)
    truth = tw.clip_loss(a, b, 5.0, ids=ids, backend="dense")
    got = tw.clip_loss(a.float(), b.float(), 5.0, ids=ids, backend="fused")
    assert torch.allclose(got.double(), truth, rtol=1e-6)


def test_refuses_float64_with_a_reason():
    with pytest.raises(tw.BackendError, match="computes in float32 at most"):
        tw.clip_loss(unit(4, 4), unit(4, 4), 1.0, backend="fused")


# What a review found: each of these once gave a wrong number.


def sums_of(a, b, backend, loss, **options):
    """Value and gradients of a function of the stats, in float64."""
    a = a.clone().requires_grad_()
    b = None if b is None else b.clone().requires_grad_()
    scale = torch.tensor(options.pop("scale", 5.0), dtype=a.dtype, requires_grad=True)
    value = loss(tw.reduce_pairs(a, b, scale, backend=backend, **options))
    value.backward()
    grads = (x.grad for x in (a, b, scale) if x is not None)
    return [x.double() for x in (value.detach(), *grads)]


def lse(stats):
    """The log-sum-exp itself: what is counted from an offset depends on the backend's choice."""
    return stats.values + stats.offset


def same(a, b, loss, bound=None, **options):
    truth = sums_of(a.double(), None if b is None else b.double(), "dense", loss, **options)
    for got, true in zip(sums_of(a, b, "fused", loss, **options), truth, strict=True):
        error, size = (got - true).norm().item(), max(true.norm().item(), 1.0)
        assert error <= (bound or 2e-5) * size, f"{error:.2e} of {size:.2e}"


def test_tiles_wider_than_those_of_the_panels(monkeypatch):
    """A tile must not reach into the next panel: its pairs would count twice."""
    from tilewise.backends import tuning

    wide = tuning.INTERPRETER._replace(softplus=tuning.TileSize(32, 128, 32, 4, 1, 2))
    monkeypatch.setattr(tuning, "INTERPRETER", wide)
    check("siglip", unit(300, 8).float(), unit(300, 8).float(), 5.0, workspace_mib=1e-5)


def test_softplus_of_columns_past_the_last_row():
    loss = lambda swept: swept.rows.values.sum() + swept.cols.values.square().sum()  # noqa: E731
    a, b = unit(70, 16).float(), unit(90, 16).float()
    same(a, b, loss, bias=-1.0, reduction="softplus")


@pytest.mark.parametrize("positives", [None, torch.arange(70).flip(0)])
def test_symmetric_with_self_pairs(positives):
    loss = lambda swept: lse(swept.rows).sum()  # noqa: E731
    same(unit(70, 16).float(), None, loss, positives=positives)


def test_sums_far_below_one():
    """All logits near -200: the offset of the backward must not let its gains overflow."""
    a = F.normalize(torch.ones(40, 8) + 0.3 * unit(40, 8).float(), dim=1)
    loss = lambda swept: lse(swept.rows).sum() + lse(swept.cols).sum()  # noqa: E731
    same(a, -a, loss, positives=None, scale=200.0)


def test_scale_of_an_antipodal_pair():
    a = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    same(a, a.clone(), lambda swept: lse(swept.rows).sum(), scale=100.0)


def test_rows_beyond_the_last_positive():
    # `positives` of a row without one is 0 and not counted from the offset.
    loss = lambda swept: swept.rows.positives.sum() + lse(swept.rows).sum()  # noqa: E731
    a, b = unit(70, 16).float(), unit(50, 16).float()
    truth = sums_of(a.double(), b.double(), "dense", loss, columns=False)
    for got, true in zip(sums_of(a, b, "fused", loss, columns=False)[1:], truth[1:], strict=True):
        assert (got - true).norm() <= 3e-6 * true.norm()


def test_a_row_that_cannot_be_right_has_no_quiet_gradient():
    """A positive out of range, which on a device is not read back: NaN in loss and gradient."""
    a, b = unit(40, 8).float(), unit(50, 8).float()
    index = torch.arange(40)
    index[3] = 99
    pairs = make_pairs(a, b, (5.0, None), positives=index, ids=None, labels=None, skip_self=False)
    plan = Plan("logsumexp", False, False, "fused", 2**20, False)
    stats = fused.reduce(pairs, plan)
    assert stats[0][0].isnan().nonzero().tolist() == [[3]]
    upstream = torch.ones_like(stats[0]), stats[1]
    grads = fused.differentiate(pairs, plan, stats, upstream, Needs(True, True, True, False))
    assert grads.rows[3].isnan().all()
    assert grads.rows[[2, 4]].isfinite().all()
    assert grads.scale.isnan()


@pytest.fixture
def keeping(monkeypatch):
    """Small chunks, and fp16 features, which the interpreter can multiply."""
    monkeypatch.setattr(fused, "CHUNK", 64)
    monkeypatch.setattr(fused, "KEEPS", (torch.float16,))


KEPT = ["clip", "clip-ids", "info_nce", "info_nce-index"]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.usefixtures("keeping")
def test_kept_exponentials(name, chunks):
    """Some chunks of rows kept, or all; whatever is not kept is computed again."""
    a, b = unit(150, 24).half(), unit(150, 24).half()
    budget = chunks * 64 * 152 * 2 / 2**20
    assert tw.explain_keep(a, b, budget) == (chunks, 3, 2 * min(64 * chunks, 150) * 152 / 2**20)
    truth = outcome(name, a.double(), b.double(), 20.0, "dense")
    ours = outcome(name, a, b, 20.0, "fused", keep_mib=budget, workspace_mib=0.1)
    for output, got, true in zip(("loss", "rows", "cols", "scale", "bias"), ours, truth):  # noqa: B905
        # A fraction of 8 bits is off by 2^-9 at most, half of that on average. The rest does not
        # see what is kept.
        bound = 1e-3 if output in ("rows", "cols") else 3e-6
        assert (got - true).norm() <= bound * max(true.norm().item(), 1e-2), output


@pytest.mark.usefixtures("keeping")
def test_what_is_kept_has_a_fraction_of_8_bits():
    """Rounded to nearest, over the whole range that a fixed offset leaves: no bias, no flush."""
    torch.manual_seed(1)
    a, b = unit(100, 8).half(), unit(90, 8).half()
    pairs = make_pairs(a, b, (60.0, None), positives=None, ids=None, labels=None, skip_self=False)
    swept = fused.reduce(
        pairs, Plan("logsumexp", True, False, "fused", 2**20, False, keep_bytes=IN_WORKSPACE)
    )
    kept = ((swept.kept[:, :90].int() & 0xFFFF) << 15).view(torch.float32).double()
    true = torch.exp2(
        60.0 * (a.double() @ b.double().T) * math.log2(math.e) - swept.memo[0].double()
    )
    error = (kept - true) / true
    assert 2**-9.2 < error.abs().max() <= 2**-9 * 1.001
    assert error.mean().abs() <= 2**-14
    assert true.max() / true.min() > 1e40


@pytest.mark.usefixtures("keeping")
def test_all_is_kept_where_it_fits_the_workspace():
    """By default, and in memory that the backward then does not take."""
    a, b = unit(100, 24).half(), unit(90, 24).half()
    pairs = make_pairs(a, b, (9.0, None), positives=None, ids=None, labels=None, skip_self=False)
    # Exponentials, the rows' gradients in float32, and both sides' features if they must be copied.
    needed = 100 * 96 * 2 + 100 * 24 * 4 + 190 * 24 * 2
    for workspace, rows in ((2 * needed, 100), (2 * needed - 2, 0)):
        plan = Plan("logsumexp", True, False, "fused", workspace, False, keep_bytes=IN_WORKSPACE)
        assert fused.kept_rows(pairs, plan) == rows
    assert tw.explain_keep(a, b).chunks == 2
    assert tw.explain_keep(a, b, 0).chunks == 0
    assert tw.explain_keep(a, b, workspace_mib=needed / 2**20).chunks == 0
    big = torch.empty(9000, 768, dtype=torch.float16), torch.empty(11000, 768, dtype=torch.float16)
    assert tw.explain_keep(big[0], big[0]).chunks > 0
    assert tw.explain_keep(big[1], big[1]).chunks == 0


@pytest.mark.usefixtures("keeping")
def test_what_lies_in_the_workspace_is_not_copied(monkeypatch):
    """Where the graph stays it is computed again: as much again would break the memory contract."""
    a, b = (unit(100, 24).half().requires_grad_() for _ in range(2))
    truth = torch.autograd.grad(tw.clip_loss(a, b, 20.0, backend="dense"), (a, b))
    taken = []
    for name in ("_differentiate", "_differentiate_kept"):
        body = getattr(autograd, name)
        monkeypatch.setattr(
            autograd, name, lambda *args, n=name, body=body: taken.append(n) or body(*args)
        )
    monkeypatch.setattr(torch.Tensor, "clone", None)
    loss = tw.clip_loss(a, b, 20.0, backend="fused")
    for keep_graph in (True, False):
        grads = torch.autograd.grad(loss, (a, b), retain_graph=keep_graph)
        for got, true in zip(grads, truth, strict=True):
            assert (got - true).norm() <= 1e-3 * true.norm()
    # What cannot be used is let go: the backward has the workspace for itself.
    assert taken == ["_differentiate", "_differentiate"]


@pytest.mark.usefixtures("keeping")
def test_a_compiled_loss_keeps_nothing_unless_asked(monkeypatch):
    """Its backward would work on a copy."""
    a, b = (unit(40, 16).half().requires_grad_() for _ in range(2))
    kept, rows = [], fused.kept_rows
    monkeypatch.setattr(fused, "kept_rows", lambda *args: kept.append(rows(*args)) or kept[-1])
    torch.compile(LOSSES["clip"], fullgraph=True, backend="aot_eager")(a, b, 5.0, 0.0)
    assert set(kept) == {0}
    kept.clear()
    tw.clip_loss(a, b, 5.0)
    assert set(kept) == {40}


FROZEN = {
    "none": {"positives": torch.full((150,), tw.NO_POSITIVE)},
    "aligned": {},
    "index": {"positives": torch.arange(150).flip(0)},
    "ids": {"ids": (torch.arange(150) // 2, torch.arange(170) // 3)},
}


def frozen_step(name, a, b, scale, backend, **how):
    """Gradients of what a row-only log-sum-exp over frozen columns tells of its rows."""
    a, s = a.detach().requires_grad_(), torch.tensor(scale, requires_grad=True)
    rows = tw.reduce_pairs(a, b, s, columns=False, backend=backend, **FROZEN[name], **how).rows
    pull = torch.linspace(0.1, 1.0, len(a))
    ((rows.values + rows.offset) * pull + rows.positives * pull.flip(0)).sum().backward()
    return rows.values + rows.offset, a.grad, s.grad


@pytest.mark.parametrize("workspace_mib", [0.1, 256])
@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.usefixtures("keeping")
def test_exponentials_are_multiplied_at_once(name, workspace_mib, monkeypatch):
    """Two products instead of three, in several panels or one."""
    a, b = unit(150, 24).half(), unit(170, 24).half()
    truth = frozen_step(name, a.double(), b.double(), 20.0, "dense")
    # The other way must not be taken.
    monkeypatch.setattr("tilewise.backends.fused_backward.Means.__init__", None)
    ours = frozen_step(name, a, b, 20.0, "fused", workspace_mib=workspace_mib)
    # The interpreter cuts bf16 off instead of rounding it. The rest does not see bf16.
    for got, true, bound in zip(ours, truth, (1e-6, 8e-3, 2e-6), strict=True):
        assert (got - true).norm() <= bound * true.norm()


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.usefixtures("keeping")
def test_means_where_no_fixed_offset_holds(name):
    a, b = torch.zeros(150, 8), torch.zeros(170, 8)
    a[:, 0], a[7:9, 0], b[:, 0] = 1.0, -1.0, -1.0
    a, b = (F.normalize(x + 0.1 * unit(len(x), 8), dim=1).half() for x in (a, b))
    truth = frozen_step(name, a.double(), b.double(), 200.0, "dense")
    ours = frozen_step(name, a, b, 200.0, "fused", workspace_mib=0.1)
    for got, true, bound in zip(ours, truth, (2e-6, 1e-3, 2e-5), strict=True):
        assert (got - true).norm() <= bound * true.norm()


@pytest.mark.usefixtures("keeping")
def test_what_is_kept_is_used():
    """dz of kept rows comes from their exponentials: spoil them, and only those rows are spoilt."""
    a, b = unit(150, 24).half(), unit(150, 24).half()
    pairs = make_pairs(
        a, b, (20.0, None), positives="aligned", ids=None, labels=None, skip_self=False
    )
    plan = Plan("logsumexp", True, False, "fused", 2**20, False, keep_bytes=64 * 152 * 2)
    swept = fused.reduce(pairs, plan)
    assert swept.kept.shape == (64, 152)
    swept.kept[5] = -128  # NaN
    upstream = tuple(torch.ones_like(x) for x in swept[:2])
    grads = fused.differentiate(pairs, plan, swept, upstream, Needs(True, False, False, False))
    assert grads.rows.isnan().any(1).nonzero().tolist() == [[5]]


@pytest.mark.usefixtures("keeping")
def test_kept_where_no_fixed_offset_holds():
    """What was kept is no good then: all of it is computed again, with running maxima."""
    a, b = torch.zeros(80, 8), torch.zeros(80, 8)
    a[:, 0], a[7:9, 0], b[:, 0] = 1.0, -1.0, -1.0
    a, b = (F.normalize(x + 0.1 * unit(80, 8), dim=1).half() for x in (a, b))
    check("clip", a, b, 200.0, keep_mib=64 * 80 * 2 / 2**20)


@pytest.mark.usefixtures("keeping")
def test_kept_exponentials_outlive_a_retained_graph():
    a, b = (unit(100, 24).half().requires_grad_() for _ in range(2))
    loss = tw.clip_loss(a, b, 20.0, backend="fused", keep_mib=1)
    first = torch.autograd.grad(loss, (a, b), retain_graph=True)
    second = torch.autograd.grad(loss, (a, b))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("keep_mib", [-1, "all"])
@pytest.mark.parametrize("loss", [tw.clip_loss, tw.siglip_loss, tw.explain_keep])
def test_a_budget_that_is_none(loss, keep_mib):
    with pytest.raises(tw.OptionError, match="keep_mib must"):
        loss(unit(4, 8).half(), unit(4, 8).half(), keep_mib=keep_mib)


@pytest.mark.parametrize("positives", ["aligned", torch.arange(40) % 20])
def test_the_scale_where_there_are_more_rows_than_columns(positives):
    """Aligned, the rows past the last column have no positive; by index all of them have."""
    a, b = unit(40, 32).half(), unit(20, 32).half()
    found = []
    for backend in ("dense", "fused"):
        scale = torch.tensor(5.0, requires_grad=True)
        a, b = (x.detach().requires_grad_() for x in (a, b))
        tw.info_nce(a, b, scale, positives=positives, backend=backend).backward()
        found.append(scale.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)


@pytest.mark.usefixtures("keeping")
def test_an_odd_number_of_columns_is_kept():
    """What pads the rows is written too: an op gives the same outputs every time."""
    pairs = make_pairs(
        unit(70, 8).half(), unit(61, 8).half(), (5.0, None), positives="aligned", ids=None,
        labels=None, skip_self=False,
    )  # fmt: skip
    plan = Plan("logsumexp", True, False, "fused", 2**20, False, keep_bytes=2**20)
    assert (fused.reduce(pairs, plan).kept[:, 61:] == 0).all()


@pytest.mark.parametrize(
    ("n", "m", "d"), [(12000, 12000, 768), (8300, 9000, 1024), (300, 10**6, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_of_the_forward(n, m, d, dtype, monkeypatch):
    """As on a Hopper: partial sums of a panel, and what is converted for it, fit the workspace.

    Kernels are told where a panel ends: what lies past it is loaded as 0 and must not count.
    """
    from tilewise.backends import hopper, tuning

    told = []
    launch = lambda *args, **options: told.append(args)  # noqa: E731
    monkeypatch.setattr(hopper, "sums", collections.defaultdict(lambda: launch))
    monkeypatch.setattr(ready.Ready, "gluon_loads", lambda *_: [None, None, None])

    monkeypatch.setattr(ready, "gluon_tiles", lambda *_: tuning.GLUON)
    features = [torch.empty(k, d, dtype=dtype, device="meta") for k in (n, m)]
    plan = Plan("logsumexp", True, False, "fused", 2**28, False)
    pairs = make_pairs(
        *features, (torch.empty((), device="meta"), None), positives="aligned", ids=None,
        labels=None, skip_self=False,
    )  # fmt: skip
    monkeypatch.setattr(ready, "units_of", lambda *_: torch.empty(2, device="meta"))
    monkeypatch.setattr(ready, "target_of", lambda _: tuning.Target("cuda", 90))
    monkeypatch.setattr(ready, "tiles_for", lambda *_: tuning.HOPPER)
    forward = fused_forward.Forward(pairs, plan)
    forward.ready = forward.ready._replace(processors=132)
    seen = 0
    for panel in forward._panels():
        parts = forward._parts(panel)
        rows, cols, _, _ = panel.counts()
        converted = (
            rows * forward.ready.rows.bytes_per_row + cols * forward.ready.cols.bytes_per_row
        )
        assert 4 * (parts.rows.numel() + parts.cols.numel()) + converted <= plan.workspace_bytes
        forward._sweep(panel, parts)
        tile = panel.tile
        assert told[-1][8:14] == (
            tile.row_start, tile.col_start, rows, cols, tile.row_stop, tile.col_stop,
        )  # fmt: skip
        seen += rows * cols
    assert seen == n * m


@pytest.mark.parametrize("k", [1, 5, 7])
def test_stats_of_two_visits_are_merged(k):
    """As `reductions.merged` does it: no negatives, no positives, neither, far apart, spoilt."""
    a, b = torch.randn(2, k, 300, generator=torch.Generator().manual_seed(k))
    if k > 1:
        a[3], b[3] = (torch.arange(300) % 2).float(), (torch.arange(300) % 3 == 0).float()
        a[0, ::5], b[0, ::7] = -torch.inf, -torch.inf
        a[0, 2::70], b[4, 1::3], b[0, 3::50] = torch.nan, 300.0, torch.inf
    truth = merged(a, b)
    for total, more in ((a.clone(), b.clone()), (a.t().clone().t(), b.t().clone().t())):
        assert fused.merge(total, more) is total
        torch.testing.assert_close(total, truth, equal_nan=True, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("name", ["clip", "info_nce", "siglip", "nt_xent"])
def test_compile_fullgraph(name):
    """Nothing outside of the ops may look at what is installed."""
    a, b = (unit(40, 16).half().requires_grad_() for _ in range(2))
    s, c = torch.tensor(5.0, requires_grad=True), torch.tensor(-1.0, requires_grad=True)
    compiled = torch.compile(LOSSES[name], fullgraph=True, backend="aot_eager")
    plain = LOSSES[name](a, b, s, c)
    loss = compiled(a, b, s, c)
    assert torch.equal(loss, plain)
    for x, y in zip(*(torch.autograd.grad(v, [a, b, s]) for v in (loss, plain)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("columns", [True, False])
def test_ordinary_features_need_no_second_pass(columns, monkeypatch):
    """Sums over several panels: one that read what nobody wrote would raise the flag in silence."""
    monkeypatch.setattr(fused, "CHUNK", 64)
    pairs = make_pairs(
        unit(200, 16).half(), unit(150, 16).half(), (5.0, None), positives="aligned", ids=None,
        labels=None, skip_self=False,
    )  # fmt: skip
    forward = Forward(pairs, Plan("logsumexp", columns, False, "fused", 2**20, False))
    assert len({panel.tile.rows.start for panel in forward._panels()}) == 4
    assert forward.run().memo[1] == 0


def rounded_twice(rows, cols, scale, fraction_bits):
    """d_rows of CLIP in float64, but for exponentials kept so, and dz and d_rows in bf16."""
    r, c = rows.double(), cols.double()
    z, own = scale * r @ c.T, torch.eye(len(rows), dtype=torch.bool)
    p = torch.exp(z).masked_fill(own, 0.0)  # the offset is 0 at such a scale
    kept, half = p.float().view(torch.int32), 1 << 22 - fraction_bits
    kept = ((kept + half) // (2 * half) * (2 * half)).view(torch.float32).double()
    gains = []
    for dim in (1, 0):
        total = p.sum(dim)
        share = torch.sigmoid(total.log() - z.diagonal()) / (2 * len(rows))
        gains.append((share, share / total))
    dz = kept * (gains[0][1][:, None] + gains[1][1])
    dz[own] = -(gains[0][0] + gains[1][0])
    return (scale * dz.bfloat16().double() @ c).bfloat16()


@pytest.mark.parametrize(("fraction_bits", "held"), [(7, False), (8, True)])
def test_how_fine_kept_exponentials_must_be(fraction_bits, held):
    """Opposed features, whose weights are all one number: bf16's 7 bits are too few for the bar."""
    errors = torch.zeros(3, dtype=torch.float64)
    for draw, scale in enumerate(torch.linspace(0.495, 0.505, 6).tolist()):
        torch.manual_seed(draw)
        rows, cols = (unit(300 + 7 * draw, 96) for _ in range(2))
        cols = F.normalize(0.05 * cols - rows[:1], dim=1).bfloat16()
        rows = F.normalize(0.05 * rows + rows[:1], dim=1).bfloat16()
        wide = rows.double(), cols.double()
        how = {"upstream": 1.0}
        truth = oracle.evaluate(oracle.clip, *wide, scale, 0.0, compute=torch.float64, **how)
        plain = oracle.evaluate(oracle.clip, rows, cols, scale, 0.0, compute=torch.float32, **how)
        ours = rounded_twice(rows, cols, scale, fraction_bits)
        terms = (ours.double() - truth.d_rows, plain.d_rows.double() - truth.d_rows, truth.d_rows)
        errors += torch.stack([x.norm() ** 2 for x in terms])
    error, base, size = errors.sqrt().tolist()
    assert (error <= 2 * base + torch.finfo(torch.bfloat16).eps / 2 * size) == held
