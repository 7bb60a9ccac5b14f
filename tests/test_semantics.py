"""Which rows count, what the options mean, and the modules people replace."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilewise as tw
from tilewise.losses import modules
from tilewise.reductions import LogSums

BACKENDS = ["dense", "chunked"]


def unit(n, d=8):
    return F.normalize(torch.randn(n, d, dtype=torch.float64), dim=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_row_counted_is_zero(backend):
    a, b = unit(4).requires_grad_(), unit(4).requires_grad_()
    none = torch.full((4,), tw.NO_POSITIVE)
    loss = tw.info_nce(a, b, 10.0, positives=none, backend=backend)
    loss.backward()
    assert loss == 0
    assert a.grad.abs().max() == 0
    alone = tw.sup_con(a, torch.arange(4), backend=backend)
    alone.backward()
    assert alone == 0
    assert a.grad.abs().max() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_positive_without_negative_is_zero_and_counted(backend, decoupled):
    a, b = unit(3).requires_grad_(), unit(3)
    ids = torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0])  # rows 0 and 1 have no negative
    options = {"ids": ids, "decoupled": decoupled, "backend": backend}
    rows = tw.info_nce(a, b, 10.0, reduction="none", **options)
    assert (rows[:2] == 0).all()
    assert rows[2] > 0 or decoupled
    mean = tw.info_nce(a, b, 10.0, **options)
    assert torch.allclose(mean, rows.sum() / 3)
    mean.backward()
    assert a.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_pair(backend):
    a, b = unit(1).requires_grad_(), unit(1).requires_grad_()
    loss = tw.clip_loss(a, b, 10.0, backend=backend)
    loss.backward()
    assert loss == 0
    assert a.grad.abs().max() == 0


def test_weight_mean_divides_by_counted_weights():
    a, b = unit(5), unit(5)
    weight = torch.tensor([1.0, 2.0, 0.0, 4.0, 5.0], dtype=torch.float64)
    index = torch.tensor([0, 1, 2, tw.NO_POSITIVE, 4])
    rows = tw.info_nce(a, b, 10.0, positives=index, reduction="none")
    mean = tw.info_nce(a, b, 10.0, positives=index, weight=weight)
    assert torch.allclose(mean, (rows * weight).sum() / 8)


def test_temperature_is_the_inverse_of_scale():
    a, b = unit(5), unit(5)
    for value in (
        0.05,
        torch.tensor(0.05, dtype=torch.float64),
        torch.tensor([0.05], dtype=torch.float64),
    ):
        assert torch.allclose(tw.clip_loss(a, b, temperature=value), tw.clip_loss(a, b, 20.0))


def test_scale_of_shape_one_keeps_its_shape_in_the_gradient():
    a, b = unit(5), unit(5)
    for shape in ((), (1,)):
        scale = torch.full(shape, 10.0, requires_grad=True)
        tw.clip_loss(a, b, scale).backward()
        assert scale.grad.shape == shape
        assert scale.grad.dtype == torch.float32


def test_reductions_agree():
    a, b = unit(7), unit(7)
    for loss in (tw.clip_loss, tw.info_nce, tw.siglip_loss, tw.nt_xent):
        rows = loss(a, b, 10.0, reduction="none")
        assert torch.allclose(loss(a, b, 10.0, reduction="sum"), rows.sum())
        assert torch.allclose(loss(a, b, 10.0), rows.mean())


class PlainClip(torch.nn.Module):
    """open_clip's formula, to stand beside the module that replaces it."""

    def forward(
        self, image_features, text_features, logit_scale, logit_bias=None, output_dict=False
    ):
        logits = logit_scale * image_features @ text_features.T
        if logit_bias is not None:
            logits = logits + logit_bias
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        return {"contrastive_loss": loss} if output_dict else loss


class PlainSigLip(torch.nn.Module):
    def forward(self, image_features, text_features, logit_scale, logit_bias, output_dict=False):
        logits = logit_scale * image_features @ text_features.T + logit_bias
        signs = 2 * torch.eye(len(logits)) - 1
        loss = -F.logsigmoid(signs * logits).sum() / len(logits)
        return {"contrastive_loss": loss} if output_dict else loss


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (tw.ClipLoss(True, True, cache_labels=True, rank=0, world_size=1), PlainClip()),
        (tw.SigLipLoss(True, 0, 1, dist_impl="gather", chunk_size=8), PlainSigLip()),
    ],
    ids=["clip", "siglip"],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_modules_take_what_open_clip_gives(ours, theirs, shape):
    """A loop calls loss(**model_out, output_dict=True) and sums the keys that end in _loss."""
    gradients = []
    torch.manual_seed(1)
    image, text = unit(9).float(), unit(9).float()
    for module in (ours, theirs):
        out = {
            "image_features": image.clone().requires_grad_(),
            "text_features": text.clone().requires_grad_(),
            "logit_scale": torch.full(shape, 14.0, requires_grad=True),
            "logit_bias": torch.full(shape, -3.0, requires_grad=True),
        }
        losses = module(**out, output_dict=True)
        total = sum(value for key, value in losses.items() if key.endswith("_loss"))
        total.sum().backward()
        gradients.append([total.detach().reshape(()), *(x.grad for x in out.values())])
        assert torch.equal(module(**out).detach().reshape(()), total.detach().reshape(()))
    for mine, plain in zip(*gradients, strict=True):
        assert mine.shape == plain.shape
        assert torch.allclose(mine, plain, rtol=1e-4, atol=1e-6)


def test_other_modules():
    a, b, labels = unit(6), unit(6), torch.arange(6) // 2
    long = 7 * a, 3 * b  # other libraries' modules normalise, so a swap must too
    near = lambda x, y: torch.allclose(x, y, rtol=1e-12)  # noqa: E731
    assert near(tw.InfoNCELoss(0.1)(*long), tw.info_nce(a, b, temperature=0.1))
    assert near(tw.NTXentLoss(0.2)(*long), tw.nt_xent(a, b, temperature=0.2))
    assert near(tw.SupConLoss(0.3)(7 * a, labels), tw.sup_con(a, labels, temperature=0.3))
    assert near(
        tw.InfoNCELoss(0.1, decoupled=True)(*long, ids=labels, negatives=5 * b),
        tw.info_nce(a, b, temperature=0.1, decoupled=True, ids=labels, negatives=b),
    )
    plain = tw.NTXentLoss(0.2, normalize=False)
    assert torch.equal(plain(*long), tw.nt_xent(*long, temperature=0.2))


def test_modules_have_one_factor():
    """scale and temperature are two names of it; that of a batch counts."""
    a, b, labels = unit(6), unit(6), torch.arange(6) // 2
    calls = (
        (tw.InfoNCELoss, tw.info_nce, (a, b), 1 / 0.07),
        (tw.NTXentLoss, tw.nt_xent, (a, b), 2.0),
        (tw.SupConLoss, tw.sup_con, (a, labels), 10.0),
    )
    for module, loss, args, default in calls:
        right = loss(*args, 20.0)
        assert torch.allclose(module(scale=20.0)(*args), right)
        assert torch.allclose(module(0.3)(*args, scale=torch.tensor(20.0).double()), right)
        assert torch.allclose(module(scale=3.0)(*args, temperature=0.05), right)
        assert torch.allclose(module(0.05)(*args, scale=None), right)
        assert torch.allclose(module()(*args), loss(*args, default))


def test_a_pool_is_not_normalised_again(monkeypatch):
    """It holds unit vectors, and is too large to be copied every step."""
    a, b, bank = unit(6), unit(6), tw.Pool(20, 8, dtype=torch.float64)
    bank.put(unit(15))
    seen = []

    def spy(query, key, negatives, **options):
        seen.append(negatives)
        return tw.info_nce(query, key, negatives=negatives, **options)

    monkeypatch.setattr(modules, "info_nce", spy)
    module = tw.InfoNCELoss()
    loss = module(7 * a, 3 * b, **bank.negatives())
    assert torch.allclose(loss, tw.info_nce(a, b, negatives=bank.features))
    module(a, b, negatives=bank.features)
    assert [x.data_ptr() == bank.features.data_ptr() for x in seen] == [True, False]


def test_stats_are_the_log_sum_exp():
    a, b = unit(7), unit(9)
    z = 30 * a @ b.T
    off = ~torch.eye(7, 9, dtype=torch.bool)
    for backend in BACKENDS:
        for scale, shift in ((30.0, 0.0), (30.0, 5.0)):
            swept = tw.reduce_pairs(a, b, scale, shift, backend=backend, sums=True)
            rows, cols = swept.rows, swept.cols
            moved = z + shift
            kept = torch.where(off, moved, -torch.inf)
            assert torch.allclose(rows.values + rows.offset, kept.logsumexp(1))
            assert torch.allclose(cols.values + cols.offset, kept.logsumexp(0))
            assert torch.allclose(rows.positives + rows.offset, moved.diagonal())
            assert torch.allclose(
                rows.negative_sum + rows.negative_count * rows.offset, (moved * off).sum(1)
            )
            assert rows.positive_count.tolist() == [1.0] * 7
            assert cols.positive_count.tolist() == [1.0] * 7 + [0.0] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", [False, True])
def test_no_negative_left_after_joining_hard_ones(own, backend):
    """log(exp -inf + exp -inf) has no derivative; the row's gradient is 0, not NaN."""
    query = unit(2).requires_grad_()
    hard = unit(2)[:, None] if own else unit(1)
    hard = hard.clone().requires_grad_()
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss = tw.info_nce(
        query, unit(2), 5.0, bias=bias, ids=torch.tensor([7, 7]), negatives=hard,
        negative_ids=torch.full(hard.shape[:-1], 7), backend=backend,
    )  # fmt: skip
    loss.backward()
    assert loss == 0
    for x in (query, hard, bias):
        assert (x.grad == 0).all()


def test_infinite_own_negatives_show_in_the_loss():
    query, hard = unit(3).abs(), unit(6).unflatten(0, (3, 2)).clone()
    hard[0, 0, 0] = -torch.inf
    assert not tw.info_nce(query, unit(3), 5.0, negatives=hard).isfinite()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"decoupled": True}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", [False, True])
def test_negatives_of_rows_without_a_positive_show_in_the_loss(own, backend, options, value):
    """Such a row is not counted; but one that is not finite must not vanish with it."""
    query, hard = unit(4), (unit(8).unflatten(0, (4, 2)) if own else unit(5)).clone()
    how = {"negatives": hard, "backend": backend, **options}
    few, none = unit(3), torch.full((4,), tw.NO_POSITIVE)
    right = tw.info_nce(query[:3], few, 5.0, **{**how, "negatives": hard[:3] if own else hard})
    assert torch.allclose(tw.info_nce(query, few, 5.0, **how), right)
    assert tw.info_nce(query, unit(4), 5.0, positives=none, **how) == 0
    hard[3, 0] = value
    assert not tw.info_nce(query, few, 5.0, **how).isfinite()
    assert not tw.info_nce(query, unit(4), 5.0, positives=none, **how).isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_positive_that_overflows_is_not_taken_for_none(backend):
    a = torch.tensor([[1e25, 1.0], [1.0, 1.0]])
    b = torch.tensor([[-1e12, 1.0], [1.0, 1.0]])
    rows = tw.info_nce(a, b, 100.0, reduction="none", backend=backend)
    assert rows[0] == torch.inf


def test_features_whose_bound_overflows():
    """|q| |k| is beyond float32, every logit is far below."""
    a, b = torch.tensor([[1e19, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1e19], [1.0, 0.0]])
    truth = F.cross_entropy(100 * a @ b.T, torch.arange(2))
    assert torch.allclose(tw.info_nce(a, b, 100.0), truth)


def test_small_integer_marks():
    a, b = unit(6), unit(6)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        index = torch.arange(6, dtype=dtype)
        assert torch.equal(tw.info_nce(a, b, 5.0, positives=index), tw.info_nce(a, b, 5.0))
        ids = torch.arange(6) // 2
        assert torch.equal(
            tw.clip_loss(a, b, 5.0, ids=ids.to(dtype)), tw.clip_loss(a, b, 5.0, ids=ids)
        )


def test_self_as_positive_is_left_out():
    x = unit(6)
    swept = tw.reduce_pairs(x, None, 5.0, positives=torch.arange(6), skip_self=True)
    assert (swept.rows.positive_count == 0).all()


def test_numbers_of_any_kind_as_scale():
    a, b = unit(6), unit(6)
    assert torch.equal(tw.clip_loss(a, b, np.float64(5.0)), tw.clip_loss(a, b, 5))


def test_autocast_does_not_reach_into_the_sweep():
    """Neither forward nor backward under autocast may round what the sweep keeps in fp32."""
    for name in ("clip", "own"):
        for backend in BACKENDS:
            grads = []
            for inside in (False, True):
                torch.manual_seed(0)
                a, b = (unit(8).bfloat16().requires_grad_() for _ in range(2))
                hard = unit(16).unflatten(0, (8, 2)).bfloat16() if name == "own" else None
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                    loss = tw.info_nce(a, b, 100.0, negatives=hard, backend=backend)
                    loss.backward()
                grads.append([loss.detach(), a.grad, b.grad])
            for x, y in zip(*grads, strict=True):
                assert torch.equal(x, y)


def test_the_log_sum_exp_carries_the_gradient_of_the_bias_once():
    a, b = unit(6), unit(6)
    bias = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    rows = tw.reduce_pairs(a, b, 5.0, bias).rows
    total = (rows.values + rows.offset).sum()
    z = (5.0 * a @ b.T + 0.7).fill_diagonal_(-torch.inf)
    assert torch.allclose(total, z.logsumexp(1).sum())
    total.backward()
    assert torch.allclose(bias.grad, torch.tensor(6.0, dtype=torch.float64))


def test_whole_and_rest_lose_nothing():
    """Their exact sum is the log of the sum, also where the sum is 2^90 times the offset's."""
    sums = LogSums(1000, torch.zeros(1), torch.float32, fixed=None)
    sums.offset = torch.linspace(30, 60, 1000)
    sums.total = torch.logspace(26, 32, 1000)
    whole, rest = (x.double() for x in sums.value())
    truth = sums.offset.double() + torch.log(sums.total.double())
    assert ((whole + rest) - truth).abs().max() < 1.5e-7


def test_a_learnable_temperature_is_a_modules_own():
    """Else no optimizer over its parameters would train it, and .to() would leave it behind."""
    a, b = (torch.randn(6, 4, dtype=torch.float64) for _ in range(2))
    for module, args in (
        (tw.InfoNCELoss, (a, b)),
        (tw.NTXentLoss, (a, b)),
        (tw.SupConLoss, (a, torch.arange(6) // 2)),
    ):
        for name in ("temperature", "scale"):
            number = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
            loss = module(**{name: number})
            assert list(loss.parameters()) == [number]
            assert list(loss.state_dict()) == [f"learnt.{name}"]
            value = loss(*args)
            assert torch.equal(value, module(**{name: 0.5})(*args))
            value.backward()
            assert number.grad != 0
            assert torch.equal(loss(*args, scale=2.0), module(scale=2.0)(*args))


def test_negatives_of_a_module_are_normalised_wherever_they_are_given():
    a, b, c = (torch.randn(6, 4, dtype=torch.float64) for _ in range(3))
    fixed = tw.InfoNCELoss(negatives=10 * c)(a, b)
    assert torch.equal(fixed, tw.InfoNCELoss()(a, b, negatives=10 * c))


def test_open_clip_makes_its_losses_with_all_options_named():
    made = {"local_loss": False, "gather_with_grad": True, "cache_labels": True, "rank": 0,
            "world_size": 1}  # fmt: skip
    assert tw.ClipLoss(**made, use_horovod=False).gather_with_grad
    with pytest.raises(tw.OptionError, match="use_horovod"):
        tw.ClipLoss(**made, use_horovod=True)
