"""Autograd, compile, export and the custom ops themselves."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import tilewise as tw
from tilewise import agreement, autograd, dot_rows
from tilewise.backends.plan import Plan
from tilewise.pairs import make_pairs

BACKENDS = ["dense", "chunked"]
traced = pytest.mark.skipif(not agreement.TRACED, reason="this torch steps around the losses")


def unit(n, d=5, dtype=torch.float64, grad=True):
    x = F.normalize(torch.randn(n, d, dtype=torch.float64), dim=1).to(dtype)
    return x.requires_grad_(grad)


def scalar(value, dtype=torch.float64, grad=True):
    return torch.tensor(value, dtype=dtype, requires_grad=grad)


LABELS = torch.tensor([0, 1, 0, 2, 1, 3])
LOSSES = {
    "info_nce": lambda a, b, s, c, **k: tw.info_nce(a, b, s, bias=c, **k),
    "info_nce-smooth": lambda a, b, s, c, **k: tw.info_nce(
        a, b, s, bias=c, label_smoothing=0.1, **k
    ),
    "info_nce-none": lambda a, b, s, c, **k: tw.info_nce(a, b, s, bias=c, reduction="none", **k),
    "info_nce-shared": lambda a, b, s, c, **k: tw.info_nce(
        a, b[:6], s, bias=c, negatives=b[6:], **k
    ),
    "info_nce-own": lambda a, b, s, c, **k: tw.info_nce(
        a, b[:6], s, bias=c, negatives=b[:6].unflatten(0, (6, 1)) * 0.5, label_smoothing=0.1, **k
    ),
    "info_nce-index": lambda a, b, s, c, **k: tw.info_nce(
        a, b, s, bias=c, positives=torch.tensor([3, 3, -1, 0, 5, 1]), **k
    ),
    "clip": lambda a, b, s, c, **k: tw.clip_loss(a, b[:6], s, bias=c, ids=LABELS, **k),
    "clip-labels": lambda a, b, s, c, **k: tw.clip_loss(
        a, b[:6], s, bias=c, labels=LABELS, label_smoothing=0.1, reduction="sum", **k
    ),
    "clip-decoupled": lambda a, b, s, c, **k: tw.clip_loss(
        a, b[:6], s, bias=c, decoupled=True, **k
    ),
    "siglip": lambda a, b, s, c, **k: tw.siglip_loss(a, b, s, c, **k),
    "siglip-none": lambda a, b, s, c, **k: tw.siglip_loss(a, b, s, c, reduction="none", **k),
    "nt_xent": lambda a, b, s, c, **k: tw.nt_xent(a, b[:6], s, label_smoothing=0.1, **k) + 0 * c,
    "sup_con": lambda a, b, s, c, **k: (
        tw.sup_con(torch.cat([a, b[:6]]), LABELS.repeat(2), s, **k) + 0 * c
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck_over_all_subsets(name, backend):
    """Every combination of what requires a gradient, so that frozen sides take their own paths."""
    loss = LOSSES[name]
    for wanted in itertools.product([True, False], repeat=4):
        if any(wanted):
            inputs = (unit(6), unit(9), scalar(3.0), scalar(-0.5))
            for x, grad in zip(inputs, wanted, strict=True):
                x.requires_grad_(grad)
            assert torch.autograd.gradcheck(
                lambda a, b, s, c: loss(a, b, s, c, backend=backend, workspace_mib=0.002), inputs
            )


def detached(args):
    return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)


def transposed(x):
    """The same numbers with the strides of a transposed tensor."""
    return x.detach().t().contiguous().t().requires_grad_()


def op_calls():
    """(op, arguments) of every custom op, small."""
    plan = Plan("logsumexp", True, False, "chunked", 2**20, False)
    rows, cols, s = (
        unit(6, dtype=torch.float32),
        unit(9, dtype=torch.float32),
        scalar(3.0, torch.float32),
    )
    none = {"ids": None, "labels": None, "skip_self": False}
    pairs = make_pairs(rows, cols, (s, None), positives="aligned", **none)
    soft = make_pairs(rows, cols, (s, scalar(-1.0, torch.float32)), positives="aligned", **none)
    frozen = pairs._replace(cols=cols.detach())
    shared = make_pairs(
        rows, None, (s, None), positives=None, ids=None, labels=LABELS, skip_self=True
    )
    sums = plan._replace(sums=True)
    softplus = plan._replace(reduction="softplus")
    weight = torch.rand(6)
    known = [x.detach() for x in autograd.reduce(*pairs, plan.text())[:3]]
    grads, gain = torch.randn(6, 5), torch.rand(6)
    mean, product = (x.detach() for x in autograd.attend(*frozen, plan.text())[1:])
    needs = (True, True, True, False)
    own = torch.randn(6, 2, 5)
    turned = pairs._replace(rows=transposed(rows), cols=transposed(cols))
    return {
        "reduce": (autograd.reduce, (*pairs, plan.text())),
        "reduce-sums": (autograd.reduce, (*pairs, sums.text())),
        "reduce-shared": (autograd.reduce, (*shared, plan._replace(columns=False).text())),
        "reduce-softplus": (autograd.reduce, (*soft, softplus.text())),
        "differentiate": (
            autograd._differentiate,
            (*pairs, plan.text(), *known, *known[:2], *needs),
        ),
        "attend": (autograd.attend, (*frozen, plan.text())),
        "pull_rows": (
            autograd._pull_rows,
            (*detached(frozen), plan.text(), mean, product, known[0]),
        ),
        "reduce-transposed": (autograd.reduce, (*turned, plan.text())),
        "weigh-transposed": (
            autograd.weigh,
            (*turned, softplus.text(), weight, True, True, True, False),
        ),
        "weigh": (autograd.weigh, (*soft, softplus.text(), weight, True, True, True, True)),
        "gain": (autograd._gain, (grads, gain)),
        "dot_rows": (dot_rows.dot_rows, (rows, own.clone().requires_grad_())),
        "dot_rows_backward": (
            dot_rows._dot_rows_backward,
            (rows.detach(), own, torch.randn(6, 2), True, True),
        ),
    }


def test_a_plan_is_its_text():
    plan = Plan(
        "softplus", True, False, "auto", 2**31, True, "fp8", -1, True, True, "a;b,c", [3, 0], ()
    )
    again = Plan.parse(plan.text())
    assert again == plan._replace(sizes=(3, 0))
    assert [type(x) for x in again] == [*map(type, plan[:-2]), tuple, tuple]
    assert Plan.parse(plan._replace(sizes=()).text()).sizes == ()


@pytest.mark.parametrize("name", op_calls())
def test_opcheck(name):
    op, args = op_calls()[name]
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name not in ("differentiate", "dot_rows_backward"):  # their second derivative raises ours
        tests.append("test_autograd_registration")
    if name == "differentiate":
        args = detached(args)
    if not agreement.TRACED:
        tests.remove("test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=tests)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("frozen", [False, True])
def test_double_backward_is_our_error(name, frozen):
    a, b, s, c = unit(6), unit(9, grad=not frozen), scalar(3.0), scalar(-0.5)
    loss = LOSSES[name](a, b, s, c).sum()
    (grad,) = torch.autograd.grad(loss, a, create_graph=True)
    with pytest.raises(tw.GradError, match="first derivatives only"):
        grad.sum().backward()


def dual(loss, x):
    with forward_ad.dual_level():
        loss(forward_ad.make_dual(x, torch.ones_like(x)))


FORWARD = {
    "jvp": lambda loss, x: torch.func.jvp(loss, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda loss, x: torch.func.jacfwd(loss)(x),
    "dual": dual,
}


@pytest.mark.parametrize("mode", FORWARD)
@pytest.mark.parametrize("name", LOSSES)
def test_forward_mode_is_refused(name, mode):
    """Of every argument; it would be 0 in silence."""
    args = [unit(6, grad=False), unit(9, grad=False), scalar(3.0, grad=False), scalar(1.0)]
    for i in range(3):
        with pytest.raises(tw.GradError, match="forward-mode"):
            FORWARD[mode](lambda x, i=i: LOSSES[name](*args[:i], x, *args[i + 1 :]), args[i])
    with forward_ad.dual_level():  # of something else
        LOSSES[name](*args)


def test_forward_mode_of_a_weight_or_temperature_is_refused():
    a, one = unit(6, grad=False), torch.ones((), dtype=torch.float64)
    for call in (
        lambda x: tw.clip_loss(a, a, weight=x.expand(6)),
        lambda x: tw.siglip_loss(a, a, temperature=x),
        lambda x: tw.clip_loss(a, a, 1.0, bias=x),
        lambda x: tw.reduce_pairs(a, a, x).rows.values.sum(),
    ):
        with pytest.raises(tw.GradError, match="forward-mode"):
            torch.func.jvp(call, (one,), (one,))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("frozen", [False, True])
def test_backward_twice(name, frozen):
    a, b, s, c = unit(6), unit(9, grad=not frozen), scalar(3.0), scalar(-0.5)
    loss = LOSSES[name](a, b, s, c).sum()
    loss.backward(retain_graph=True)
    first = a.grad.clone()
    kept = a.grad
    loss.backward()
    assert torch.equal(kept, 2 * first), "the second backward adds the same bits"
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


RESIZABLE = {
    "clip": lambda a, b, s, c: tw.clip_loss(a, b, s, bias=c),
    "siglip": lambda a, b, s, c: tw.siglip_loss(a, b, s, c),
    "info_nce-none": lambda a, b, s, c: tw.info_nce(a, b, s, bias=c, reduction="none").sum(),
    "info_nce-frozen": lambda a, b, s, c: tw.info_nce(a, b.detach(), s, bias=c),
    "nt_xent": lambda a, b, s, c: tw.nt_xent(a, b, s),
    "sup_con": lambda a, b, s, c: tw.sup_con(a, torch.arange(a.shape[0]) // 2, s),
}


def same_as_eager(compiled, loss, n, m, layout=lambda x: x):
    args = layout(unit(n)), layout(unit(m)), scalar(3.0), scalar(-0.5)
    again = [x.detach().requires_grad_() for x in args]
    compiled(*args).sum().backward()
    loss(*again).sum().backward()
    for x, y in zip(args, again, strict=True):
        assert (x.grad is None) == (y.grad is None)
        assert x.grad is None or torch.allclose(x.grad, y.grad, rtol=1e-12, atol=1e-15)


@traced
@pytest.mark.parametrize("name", LOSSES)
def test_compile_fullgraph(name):
    torch._dynamo.reset()
    compiled = torch.compile(LOSSES[name], fullgraph=True, backend="aot_eager")
    same_as_eager(compiled, LOSSES[name], 6, 9)
    same_as_eager(compiled, LOSSES[name], 6, 9, transposed)


@pytest.mark.parametrize("name", RESIZABLE)
def test_an_old_compiler_steps_around(name, monkeypatch):
    monkeypatch.setattr(agreement, "TRACED", False)
    torch._dynamo.reset()
    compiled = torch.compile(RESIZABLE[name], backend="aot_eager")
    same_as_eager(compiled, RESIZABLE[name], 6, 6)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(RESIZABLE[name], fullgraph=True, backend="aot_eager")(
            unit(6), unit(6), scalar(3.0), scalar(-0.5)
        )


@traced
@pytest.mark.parametrize("name", RESIZABLE)
def test_compile_once_for_all_batch_sizes(name):
    """The first size compiles for itself, the second for any; nothing compiles again."""
    torch._dynamo.reset()
    loss = RESIZABLE[name]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for n in (6, 11):
        same_as_eager(compiled, loss, n, n)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (7, 23, 40, 41, 50, 64, 65, 99):
            same_as_eager(compiled, loss, n, n)


@traced
def test_export():
    class Model(torch.nn.Module):
        def forward(self, a, b):
            return tw.clip_loss(a, b, 10.0)

    a, b = unit(8, grad=False), unit(8, grad=False)
    n = torch.export.Dim("n", min=2, max=1024)
    program = torch.export.export(Model(), (a, b), dynamic_shapes=({0: n}, {0: n}))
    a, b = unit(13, grad=False), unit(13, grad=False)
    assert torch.equal(program.module()(a, b), tw.clip_loss(a, b, 10.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["clip", "siglip", "info_nce-own", "info_nce-shared", "nt_xent", "sup_con"]
)
def test_autocast(name, dtype):
    """fp32 features under autocast are computed as half ones, gradients return in fp32."""
    a, b = unit(6, dtype=torch.float32), unit(9, dtype=torch.float32)
    s, c = scalar(3.0, torch.float32), scalar(-0.5, torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        loss = LOSSES[name](a, b, s, c)
    loss.backward()
    low = [x.detach().to(dtype).requires_grad_() for x in (a, b)]
    plain = LOSSES[name](*low, s, c)
    plain.backward()
    assert a.grad.dtype == torch.float32
    assert torch.equal(loss, plain)
    assert torch.equal(a.grad, low[0].grad.float())


def test_autocast_takes_mixed_dtypes():
    a, b = unit(6, dtype=torch.float32), unit(6, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tw.clip_loss(a, b, 10.0).backward()
    assert a.grad.dtype == torch.float32
    assert b.grad.dtype == torch.bfloat16
    with pytest.raises(tw.DtypeError, match="image and text must share a dtype"):
        tw.clip_loss(a, b, 10.0)


@pytest.mark.parametrize("name", LOSSES)
def test_no_grad_gives_the_same_value(name):
    a, b, s, c = unit(6), unit(9), scalar(3.0), scalar(-0.5)
    with torch.no_grad():
        quiet = LOSSES[name](a, b, s, c)
    assert not quiet.requires_grad
    assert torch.allclose(quiet, LOSSES[name](a, b, s, c), rtol=1e-14)


def test_upstream_gradient_survives_fp16():
    """SigLIP keeps gradients from the forward: tiny ones must not drown before a loss scale."""
    a, b = unit(64, 16, torch.float16), unit(64, 16, torch.float16)
    weight = torch.full((64,), 1e-6)
    (tw.siglip_loss(a, b, 10.0, weight=weight, reduction="sum") * 65536).backward()
    got = a.grad.double()
    a, b = (x.detach().double().requires_grad_() for x in (a, b))
    (tw.siglip_loss(a, b, 10.0, weight=weight.double(), reduction="sum") * 65536).backward()
    assert ((got - a.grad).norm() / a.grad.norm()) < 1e-3


def test_weight_may_learn():
    a, b = unit(6), unit(6)
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda w: tw.siglip_loss(a.detach(), b.detach(), 5.0, weight=w), weight
    )
    assert torch.autograd.gradcheck(
        lambda w: tw.clip_loss(a.detach(), b.detach(), 5.0, weight=w), weight
    )


@pytest.mark.parametrize("dynamic", [None, True])
def test_python_numbers_may_change_in_a_compiled_loss(dynamic):
    """A compiler stands in for a number that changes, and for every one with dynamic=True."""
    torch._dynamo.reset()

    def loss(a, b, scale, smoothing):
        return tw.clip_loss(a, b, scale, label_smoothing=smoothing) + tw.info_nce(
            a, b, temperature=1 / scale
        )

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    a, b = (torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for scale, smoothing in ((5.0, 0.0), (6.0, 0.1), (2, 0.2)):
        torch.testing.assert_close(compiled(a, b, scale, smoothing), loss(a, b, scale, smoothing))
    with pytest.raises(tw.OptionError, match="scale must be finite"):
        tw.clip_loss(a, b, float("nan"))
