"""Every loss, backend, dtype, shape and kind of features against the float64 oracle.

The bar: error at most twice that of plain PyTorch in the same dtype plus one rounding of the
output, where an error is norm(got - truth) / norm(sum_j |dz_ij| |k_j|), relative for the loss. One
draw of features may be right by luck, on either side, so norms are taken over a few draws.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import oracle
import tilewise as tw

UPSTREAM = -2.5
# bfloat16 stands for half precision in CI: it is the coarser one.
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    pytest.param(torch.float16, marks=pytest.mark.slow),
]
BACKENDS = ["dense", "chunked"]
SCALES = [0.5, float(torch.tensor(14.3)), 100.0]  # as float32 has them
SHAPES = [(1, 1, 4), (7, 7, 1), (13, 13, 33), (31, 31, 8), (5, 5, 1024), (61, 61, 16)]
RECTANGLES = [(1, 6, 5), (11, 29, 33), (29, 11, 7)]


def features(kind, n, m, d, generator):
    unit = lambda k: F.normalize(torch.randn(k, d, generator=generator, dtype=torch.float64), dim=1)  # noqa: E731
    rows, cols = unit(n), unit(m)
    if kind == "aligned":
        cols = F.normalize(rows[torch.arange(m) % n] + 0.05 * cols, dim=1)
    elif kind == "opposed":  # all cosines -1
        rows, cols = rows[:1].expand(n, d), -rows[:1].expand(m, d)
    elif kind == "one":  # one column at +1, the rest at -1
        rows, cols = rows[:1].expand(n, d), -rows[:1].repeat(m, 1)
        cols[m // 2] *= -1
    elif kind == "duplicated":
        rows, cols = rows[torch.arange(n) // 2], cols[torch.arange(m) // 2]
    elif kind == "long":
        rows, cols = 1e3 * rows, 1e3 * cols
    return rows, cols


OUTPUTS = ["loss", "d_rows", "d_cols", "d_scale", "d_bias"]
DRAWS = 8
KINDS = ["random", "aligned", "opposed", "one", "duplicated", "long"]


def layout(x, how):
    """The same numbers behind other strides."""
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "sliced":
        return torch.stack([x, torch.full_like(x, torch.nan)], 2).flatten(1)[:, ::2]
    return x


def marks(n, m, modulus):
    return torch.arange(n) % modulus, torch.arange(m) % modulus


def case(name, n, m):
    """(the loss, its oracle as a function of z)."""
    ids, labels = marks(n, m, 3), marks(n, m, 4)
    weight = torch.linspace(0.5, 1.5, n)
    if name == "info_nce":
        return lambda a, b, s, c, **k: tw.info_nce(a, b, s, bias=c, **k), oracle.info_nce
    if name == "info_nce-labels":
        return (
            lambda a, b, s, c, **k: tw.info_nce(a, b, s, bias=c, labels=labels, ids=ids, **k),
            lambda z: oracle.info_nce(z, labels=labels, ids=ids),
        )
    if name == "info_nce-index":
        index = (torch.arange(n) * 3 + 1) % m
        index[0] = tw.NO_POSITIVE if n > 1 else 0
        return (
            lambda a, b, s, c, **k: tw.info_nce(a, b, s, bias=c, positives=index, ids=ids, **k),
            lambda z: oracle.info_nce(z, positives=index, ids=ids),
        )
    if name == "info_nce-options":
        return (
            lambda a, b, s, c, **k: tw.info_nce(
                a, b, s, bias=c, weight=weight, decoupled=True, label_smoothing=0.1, **k
            ),
            lambda z: oracle.info_nce(z, weight=weight, decoupled=True, smoothing=0.1),
        )
    if name == "clip":
        return lambda a, b, s, c, **k: tw.clip_loss(a, b, s, bias=c, **k), oracle.clip
    if name == "clip-options":
        return (
            lambda a, b, s, c, **k: tw.clip_loss(
                a, b, s, bias=c, ids=ids, weight=weight, label_smoothing=0.2, **k
            ),
            lambda z: oracle.clip(z, ids=ids, weight=weight, smoothing=0.2),
        )
    if name == "clip-labels":
        return (
            lambda a, b, s, c, **k: tw.clip_loss(a, b, s, bias=c, labels=labels, **k),
            lambda z: oracle.clip(z, labels=labels),
        )
    if name == "siglip":
        return tw.siglip_loss, oracle.siglip
    if name == "siglip-labels":
        return (
            lambda a, b, s, c, **k: tw.siglip_loss(
                a, b, s, c, labels=labels, ids=ids, weight=weight, **k
            ),
            lambda z: oracle.siglip(z, labels=labels, ids=ids, weight=weight),
        )
    raise KeyError(name)


SQUARE = ["clip", "clip-options", "clip-labels"]
ANY = [
    "info_nce",
    "info_nce-labels",
    "info_nce-index",
    "info_nce-options",
    "siglip",
    "siglip-labels",
]


def baselines(loss_of_z, rows, cols, scale, bias):
    """Plain PyTorch, and again with the features in reverse, the pairs in blocks and the scale
    taken before the product: its rounding depends on none of what the loss is about.

    With many features our tiles are single pairs, whose products some BLAS make in another way, so
    the baseline makes them one by one, too.
    """
    compute = torch.promote_types(rows.dtype, torch.float32)
    options = {"upstream": UPSTREAM, "compute": compute}
    plain = oracle.evaluate(loss_of_z, rows, cols, scale, bias, **options)
    turned = oracle.evaluate(
        loss_of_z, rows.flip(1), cols.flip(1), scale, bias, block=16, scale_first=True, **options
    )
    turned.d_rows, turned.d_cols = turned.d_rows.flip(1), turned.d_cols.flip(1)
    outcomes = {"plain": plain, "turned": turned}
    if rows.shape[1] >= 1024:
        outcomes["one by one"] = oracle.evaluate(
            loss_of_z, rows, cols, scale, bias, block=1, **options
        )
    return outcomes


def draws(scale, count):
    """Scales about `scale`, exact in fp32: equal features would round alike in every draw."""
    return torch.linspace(0.99 * scale, 1.01 * scale, count).tolist()


def beyond_luck(failures_of, *case):
    """What exceeds the bar in a few draws, and in many again: two equal errors may differ by luck.

    Of ten thousand comparisons of equally large errors over eight draws some differ by a factor.
    """
    return failures_of(*case, DRAWS) and failures_of(*case, 12 * DRAWS)


def evaluate_all(loss_of_z, calls, rows, cols, scale, bias, how):
    """The truth, and what the baseline and each call make of one draw of features."""
    compute = torch.promote_types(rows.dtype, torch.float32)
    truth = oracle.evaluate(
        loss_of_z,
        rows.double(),
        cols.double(),
        scale,
        bias,
        upstream=UPSTREAM,
        compute=torch.float64,
    )
    outcomes = baselines(loss_of_z, layout(rows, how), layout(cols, how), scale, bias)
    for backend, call in calls.items():
        a, b = rows.detach().requires_grad_(), cols.detach().requires_grad_()
        s, c = (torch.tensor(x, dtype=compute, requires_grad=True) for x in (scale, bias))
        loss = call(layout(a, how), layout(b, how), s, c)
        (loss * UPSTREAM).backward()
        outcomes[backend] = oracle.Outcome(loss.detach(), a.grad, b.grad, s.grad, c.grad)
    return truth, outcomes


def failures_of(name, n, m, d, kind, nominal, how, dtype, generator, count):
    """What exceeds the bar, as text, over a few draws of such features."""
    call, loss_of_z = case(name, n, m)
    calls = {
        backend: lambda a, b, s, c, backend=backend: call(
            a, b, s, c, backend=backend, workspace_mib=0.02
        )
        for backend in BACKENDS
    }
    bias = -3.0 if name.startswith("siglip") else 0.5
    sums, largest = {}, 0.0
    for scale in draws(nominal, count):
        rows, cols = (x.to(dtype) for x in features(kind, n, m, d, generator))
        largest = max(largest, (scale * rows.double() @ cols.double().T).abs().max().item())
        truth, outcomes = evaluate_all(loss_of_z, calls, rows, cols, scale, bias, how)
        if not all(getattr(outcomes["plain"], x).isfinite().all() for x in OUTPUTS):
            continue
        for output in OUTPUTS:
            true = getattr(truth, output)
            size = truth.sizes[output] if output != "loss" else true.abs().item()
            terms = [(getattr(x, output).double() - true).norm().item() for x in outcomes.values()]
            old = sums.get(output, (0.0,) * (len(terms) + 2))
            sums[output] = [
                math.hypot(x, y)
                for x, y in zip(old, [*terms, size, true.norm().item()], strict=True)
            ]
    found = []
    for output, (*errors, size, norm) in sums.items():
        plain, ours = max(errors[: -len(BACKENDS)]), errors[-len(BACKENDS) :]
        rounded = (
            dtype if output in ("d_rows", "d_cols") else torch.promote_types(dtype, torch.float32)
        )
        summed = torch.finfo(torch.promote_types(dtype, torch.float32))
        info = torch.finfo(rounded)
        allowed = 2 * plain + info.eps / 2 * norm + count * info.smallest_normal * info.eps
        if norm <= 1e-9 * size:  # the true gradient is zero: absolute, one rounding of z
            allowed = max(allowed, (2 + largest) * summed.eps * size)
        if dtype == torch.float64:  # the truth is float64 too, and knows z only to its rounding
            allowed = max(allowed, (1e-12 + 4 * summed.eps * largest) * size)
        found += [
            f"{backend} {output}: error {error:.2e}, allowed {allowed:.2e}, of terms {size:.2e}"
            for backend, error in zip(BACKENDS, ours, strict=True)
            if not error <= allowed
        ]
    return [f"{(n, m, d)} {kind} scale {nominal:.4g}: {text}" for text in found]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SQUARE + ANY)
def test_loss_and_gradients(name, dtype):
    generator = torch.Generator().manual_seed(7)
    shapes = SHAPES + (RECTANGLES if name in ANY else [])
    failures = [
        text
        for n, m, d in shapes
        for kind in KINDS
        for scale, how in zip(SCALES, ("plain", "transposed", "sliced"), strict=True)
        for text in beyond_luck(failures_of, name, n, m, d, kind, scale, how, dtype, generator)
    ]
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


# Losses of one tensor (z symmetric), of three tensors, and over frozen columns: d_rows against the
# oracle under the same bar, with the whole gradient of the tensor that stands on both sides of z.


def one_tensor(name, n):
    labels = torch.arange(2 * n) // 3
    if name == "nt_xent":
        return (lambda x, s, **k: tw.nt_xent(x[:n], x[n:], s, **k), oracle.nt_xent)
    if name == "nt_xent-decoupled":
        ids = (torch.arange(n) // 2).repeat(2)
        return (
            lambda x, s, **k: tw.nt_xent(x[:n], x[n:], s, ids=ids[:n], decoupled=True, **k),
            lambda z: oracle.nt_xent(z, ids=(ids, ids), decoupled=True),
        )
    if name == "sup_con":
        return (
            lambda x, s, **k: tw.sup_con(x, labels, s, **k),
            lambda z: oracle.sup_con(z, labels),
        )
    weight = torch.linspace(0.5, 1.5, 2 * n)
    return (
        lambda x, s, **k: tw.sup_con(x, labels, s, weight=weight, label_smoothing=0.1, **k),
        lambda z: oracle.sup_con(z, labels, weight=weight, smoothing=0.1),
    )


def whole(outcome):
    """Loss, gradient of the tensor on both sides of z, and of the scale, in float64."""
    both = outcome.d_rows if outcome.d_cols is None else outcome.d_rows + outcome.d_cols
    return [x.double() for x in (outcome.loss, both, outcome.d_scale)]


def one_tensor_failures(name, n, d, kind, nominal, how, dtype, generator, count):
    call, loss_of_z = one_tensor(name, n)
    compute = torch.promote_types(dtype, torch.float32)
    eps, largest, totals = torch.finfo(compute).eps, 0.0, {}
    for scale in draws(nominal, count):
        x = torch.cat(features(kind, n, n, d, generator)).to(dtype)
        largest = max(largest, (scale * x.double() @ x.double().T).abs().max().item())
        turned = layout(x, how)  # a product's rounding depends on strides too
        truth = oracle.evaluate(
            loss_of_z, x.double(), x.double(), scale, 0.0, upstream=UPSTREAM, compute=torch.float64
        )
        outcomes = baselines(loss_of_z, turned, turned, scale, 0.0)
        for backend in BACKENDS:
            leaf = x.clone().requires_grad_()
            s = torch.tensor(scale, dtype=compute, requires_grad=True)
            loss = call(layout(leaf, how), s, backend=backend, workspace_mib=0.02)
            (loss * UPSTREAM).backward()
            outcomes[backend] = oracle.Outcome(loss.detach(), leaf.grad, None, s.grad, None)
        if not all(x.isfinite().all() for x in whole(outcomes["plain"])):
            continue
        true = whole(truth)
        pair = math.hypot(truth.sizes["d_rows"], truth.sizes["d_cols"])
        terms = {"size": [true[0].abs().item(), pair, truth.sizes["d_scale"]]}
        terms["norm"] = [x.norm().item() for x in true]
        for key, outcome in outcomes.items():
            terms[key] = [(x - y).norm().item() for x, y in zip(whole(outcome), true, strict=True)]
        for key, values in terms.items():
            old = totals.get(key, [0.0] * 3)
            totals[key] = [math.hypot(a, b) for a, b in zip(old, values, strict=True)]
    found = []
    for k, output in enumerate(("loss", "gradient", "d_scale") if totals else ()):
        info = torch.finfo(dtype if output == "gradient" else compute)
        size, norm = totals["size"][k], totals["norm"][k]
        base = max(totals[key][k] for key in totals if key in outcomes and key not in BACKENDS)
        allowed = 2 * base + info.eps / 2 * norm
        roundings = max(2.0, math.log2(4 * n * n) / 2)
        if norm <= 1e-9 * size:
            roundings += largest
        allowed = max(allowed + count * info.smallest_normal * info.eps, roundings * eps * size)
        if dtype == torch.float64:
            allowed = max(allowed, (1e-12 + 4 * eps * largest) * size)
        found += [
            f"{(n, d)} {kind} scale {nominal:.4g} {b} {output}: {totals[b][k]:.2e} > {allowed:.2e}"
            for b in BACKENDS
            if not totals[b][k] <= allowed
        ]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["nt_xent", "nt_xent-decoupled", "sup_con", "sup_con-options"])
def test_losses_of_one_tensor(name, dtype):
    generator = torch.Generator().manual_seed(3)
    failures = [
        text
        for n, d in ((1, 4), (7, 1), (13, 33), (31, 8), (5, 1024))
        for kind in KINDS
        for scale, how in zip(SCALES, ("plain", "transposed", "sliced"), strict=True)
        for text in beyond_luck(one_tensor_failures, name, n, d, kind, scale, how, dtype, generator)
    ]
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{}, {"decoupled": True, "smoothing": 0.1}], ids=["plain", "options"]
)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_hard_negatives(own, options, backend):
    n, m, h, d = 11, 17, 5, 8
    query, key = (F.normalize(torch.randn(k, d, dtype=torch.float64), dim=1) for k in (n, m))
    shape = (n, h, d) if own else (h, d)
    hard = F.normalize(torch.randn(shape, dtype=torch.float64), dim=-1)
    ids, hard_ids = (
        (torch.arange(n) % 4, torch.arange(m) % 7),
        torch.arange(n * h if own else h) % 4,
    )
    hard_ids = hard_ids.view(n, h) if own else hard_ids
    leaves = [x.clone().requires_grad_() for x in (query, key, hard)]
    ours = tw.info_nce(
        leaves[0], leaves[1], 20.0, negatives=leaves[2], ids=ids, negative_ids=hard_ids,
        decoupled=options.get("decoupled", False), label_smoothing=options.get("smoothing", 0.0),
        backend=backend, workspace_mib=0.01,
    )  # fmt: skip
    ours.backward()
    plain = [x.clone().requires_grad_() for x in (query, key, hard)]
    extra = 20 * (torch.einsum("nd,nhd->nh", plain[0], plain[2]) if own else plain[0] @ plain[2].T)
    same = ids[0][:, None] == (hard_ids if own else hard_ids[None])
    extra = extra.masked_fill(same, -oracle.INF)
    truth = oracle.info_nce(20 * plain[0] @ plain[1].T, ids=ids, extra=extra, **options)
    truth.backward()
    assert torch.allclose(ours, truth, rtol=1e-12)
    for x, y in zip(leaves, plain, strict=True):
        assert torch.allclose(x.grad, y.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("nominal", SCALES)
def test_frozen_columns(nominal, backend, dtype):
    """Over frozen columns the gradient comes with the forward: same bar, scale included."""
    n, m, d = 37, 91, 24
    totals = torch.zeros(2, 4)
    generator = torch.Generator().manual_seed(5)
    for scale in draws(nominal, 12 * DRAWS):
        rows, cols = (x.to(dtype) for x in features("random", n, m, d, generator))
        compute = torch.promote_types(dtype, torch.float32)
        truth = oracle.evaluate(
            oracle.info_nce,
            rows.double(),
            cols.double(),
            scale,
            0.0,
            upstream=UPSTREAM,
            compute=torch.float64,
        )
        plain = oracle.evaluate(
            oracle.info_nce, rows, cols, scale, 0.0, upstream=UPSTREAM, compute=compute
        )
        leaf, s = (
            rows.clone().requires_grad_(),
            torch.tensor(scale, dtype=compute, requires_grad=True),
        )
        loss = tw.info_nce(leaf, cols, s, backend=backend, workspace_mib=0.02)
        assert loss.grad_fn is not None
        (loss * UPSTREAM).backward()
        for i, (got, name) in enumerate(((leaf.grad, "d_rows"), (s.grad, "d_scale"))):
            true, base = getattr(truth, name), getattr(plain, name)
            size = truth.sizes[name]
            totals[i] += torch.tensor(
                [(got.double() - true).norm(), (base.double() - true).norm(), size, true.norm()]
            ).square()
    error, base, size, norm = totals.sqrt().unbind(1)
    rounding = torch.tensor([torch.finfo(x).eps / 2 for x in (dtype, compute)])
    least = 1e-12 if dtype == torch.float64 else 0.0
    allowed = torch.clamp(2 * base + rounding * norm, min=least * size)
    assert (error <= allowed).all(), (error, allowed, size)
