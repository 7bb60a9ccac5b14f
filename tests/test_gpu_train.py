"""Training on a GPU: as on a CPU, again the same, in any precision."""

import math

import pytest
import torch

from test_train import config, losses, same, weights
from test_train import train as train_on
from tilewise.config import Config, EvalConfig
from tilewise.data.emoji import Emoji
from tilewise.evaluate.embed import Embedder
from tilewise.evaluate.ranking import ranks
from tilewise.evaluate.suite import Suite
from tilewise.models.base import evaluating
from tilewise.train.build import make_model
from tilewise.train.setup import start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def train(made):
    return train_on(made, start("cuda", 60.0))


@pytest.fixture(autouse=True)
def _exact():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def test_a_gpu_trains_as_a_cpu_does(tmp_path):
    on_cpu = losses(train_on(config(tmp_path, name="cpu")))
    on_gpu = losses(train(config(tmp_path, name="gpu", retrieval=["synthetic:20"])))
    torch.testing.assert_close(torch.tensor(on_gpu), torch.tensor(on_cpu), rtol=1e-3, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_two_runs_on_a_gpu_are_equal_bit_for_bit(tmp_path, precision):
    first, second = (train(config(tmp_path, name=name, precision=precision)) for name in "ab")
    assert losses(first) == losses(second)
    assert same(weights(first), weights(second))


@pytest.mark.parametrize(
    "how",
    [
        {"precision": "amp_bf16"},
        {"precision": "amp_fp16"},
        {"precision": "amp_bf16", "micro_batch": 7, "keep": 0},
        {"precision": "amp_bf16", "workers": 2},
        {"precision": "amp_bf16", "features": "host"},
        {"precision": "amp_bf16", "loss": "siglip"},
        {"precision": "amp_bf16", "loss": "info_nce", "pool": 64},
        {"precision": "amp_bf16", "lock_image": True},
    ],
    ids=str,
)
def test_every_way_trains(tmp_path, how):
    found = losses(train(config(tmp_path, steps=12, lr=2e-3, train_data="synthetic:48", **how)))
    assert all(map(math.isfinite, found))
    assert min(found[-3:]) < found[0] or "pool" in how


def test_a_compiled_model_trains_as_it_does_without(tmp_path):
    plain = losses(train(config(tmp_path, name="plain")))
    compiled = losses(train(config(tmp_path, name="compiled", torchcompile=True)))
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=1e-3, atol=0)


def test_a_vit_of_open_clip_trains(tmp_path):
    made = config(tmp_path, model="ViT-B-32", train_data="synthetic:24,size=224", steps=3, lr=1e-4)
    assert all(map(math.isfinite, losses(train(made))))


def test_a_gpu_measures_what_a_cpu_does():
    """On the device itself."""
    made = EvalConfig(retrieval=("emoji:style",), zero_shot=("emoji:style",), localise=(),
                      probe=("emoji:style", "emoji:concepts"))  # fmt: skip
    torch.manual_seed(0)
    model = make_model(Config())
    on_cpu = Suite(made).run(model)
    model = model.cuda()
    with evaluating(model):
        found = Embedder(model, 256).embed(Emoji("style"))
    assert all(x.is_cuda for x in (found.images.features, found.texts.ids, found.labels))
    on_gpu = Suite(made).run(model)
    shares = {name for name in on_cpu if not name.endswith("penalty")}  # which is picked, not said
    for name in shares:
        assert on_gpu[name] == pytest.approx(on_cpu[name], rel=2e-2, abs=1e-2), name


def test_autocast_does_not_round_what_ranks():
    angles = torch.linspace(0, 1, 500).cuda()  # of which thirty have one cosine in bf16
    gallery, ids = torch.stack([angles.cos(), angles.sin()], 1), torch.arange(500).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        rounded = gallery[:1] @ gallery.T
        assert (rounded == rounded[0, 0]).sum() > 20
        assert ranks(gallery[:1], gallery, ids[:1], ids).tolist() == [0]


def test_a_constant_encoder_is_last_on_a_gpu_too():
    queries, gallery = torch.ones(300, 24).cuda(), torch.ones(1000, 24).cuda()
    ids = torch.arange(1000).cuda()
    assert (ranks(queries, gallery, ids[:300], ids, tile=128) == 999).all()
