"""Which rows count, what the options mean, and the modules people replace."""

import pytest
import torch
import torch.nn.functional as F

import tilewise as tw

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
    assert torch.equal(tw.InfoNCELoss(0.1)(a, b), tw.info_nce(a, b, temperature=0.1))
    assert torch.equal(tw.NTXentLoss(0.2)(a, b), tw.nt_xent(a, b, temperature=0.2))
    assert torch.equal(tw.SupConLoss(0.3)(a, labels), tw.sup_con(a, labels, temperature=0.3))
    assert torch.equal(
        tw.InfoNCELoss(0.1, decoupled=True)(a, b, ids=labels),
        tw.info_nce(a, b, temperature=0.1, decoupled=True, ids=labels),
    )


def test_stats_are_the_log_sum_exp():
    a, b = unit(7), unit(9)
    z = 30 * a @ b.T
    off = ~torch.eye(7, 9, dtype=torch.bool)
    for backend in BACKENDS:
        for scale, shift in ((30.0, 0.0), (30.0, 5.0)):
            swept = tw.reduce_pairs(a, b, scale, shift, backend=backend, sums=True)
            rows, cols = swept.rows, swept.cols
            kept = torch.where(off, z, -torch.inf)
            assert torch.allclose(rows.values + rows.offset, kept.logsumexp(1))
            assert torch.allclose(cols.values + cols.offset, kept.logsumexp(0))
            assert torch.allclose(rows.positives + rows.offset, z.diagonal())
            assert torch.allclose(
                rows.negative_sum + rows.negative_count * rows.offset, (z * off).sum(1)
            )
            assert rows.positive_count.tolist() == [1.0] * 7
            assert cols.positive_count.tolist() == [1.0] * 7 + [0.0] * 2
