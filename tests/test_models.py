"""Models of other libraries as encoders of pairs: what goes in, comes out, is loaded again."""

import json
import logging
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from tilewise.config import DataConfig
from tilewise.data.emoji import Emoji
from tilewise.data.loader import load
from tilewise.data.views import CHANCES, View
from tilewise.errors import CheckpointError, DataError, OptionError
from tilewise.evaluate.embed import Embedder
from tilewise.models.base import evaluating
from tilewise.models.image_text import ImageText
from tilewise.models.libraries import need
from tilewise.models.patches import Patches, multiply_patches
from tilewise.models.places import place_features
from tilewise.models.text_pairs import TextPairs
from tilewise.models.two_views import TwoViews
from tilewise.models.weights import read_weights
from tilewise.train.build import train_view
from tilewise.train.checkpoint import write_tensors

TINY = str(Path(__file__).parent / "tiny.json")
VIT = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    return make_text_folder(tmp_path_factory.mktemp("bert"))


def make_text_folder(folder, kind="Bert"):
    """A text encoder of Hugging Face, small and random, with a tokenizer of a few words."""
    from tilewise.models.libraries import need

    transformers = need("transformers")
    folder.mkdir(exist_ok=True)
    marks = [f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")]
    words = [*marks, "a", "red", "green", "blue", "thing", "big", "small"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)
    return str(folder)


def batch_of(model, source, count=6):
    form = model.form(View(model.image_size or 1, crop_scale=0.8))
    chances = np.random.default_rng(0).random((count, form.chances))
    return load(source, form, range(count), chances)


def test_images_and_texts_become_unit_features():
    torch.manual_seed(0)
    model = ImageText(TINY)
    inputs = batch_of(model, Emoji("style")).inputs
    assert inputs["image"].dtype == torch.uint8
    with evaluating(model):
        out = model(**inputs)
        for side in ("rows", "cols"):
            assert out[side].shape == (6, 16)
            torch.testing.assert_close(out[side].norm(dim=1), torch.ones(6))
        torch.testing.assert_close(out["rows"], model.images(inputs["image"]))
        texts = ["a dog", "a very long text that goes on and on beyond what the model takes"]
        assert model.texts(texts).shape == (2, 16)
    assert "bias" not in out
    assert model.training


@pytest.mark.parametrize("kind", ["timm", "vit", "bert"])
def test_open_clip_loads_what_is_exported(tmp_path, kind):
    """Without what it was made of; and so do we, after the folder was moved, too."""
    open_clip = need("open_clip")

    config = VIT if kind == "vit" else json.loads(Path(TINY).read_text())
    source = tmp_path / "text"
    if kind == "bert":
        names = dict.fromkeys(("hf_model_name", "hf_tokenizer_name"), make_text_folder(source))
        config["text_cfg"] = {**names, "hf_proj_type": "linear", "hf_pooler_type": "mean_pooler",
                              "context_length": 8}  # fmt: skip
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    torch.manual_seed(1)
    model = ImageText(str(path))
    # A tower of Hugging Face has no name that open_clip takes from the folder.
    told = pytest.warns(UserWarning, match=r"after a move, write the new one to hf_model_name")
    with told if kind == "bert" else nullcontext():
        model.export(tmp_path / "out")
    shutil.rmtree(source, ignore_errors=True)
    theirs = open_clip.create_model(f"local-dir:{tmp_path / 'out'}").eval()
    inputs = batch_of(model, Emoji("style")).inputs
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")(["smile", "a cat"])
    (tmp_path / "out").rename(tmp_path / "moved")
    again = ImageText(str(tmp_path / "moved"))
    with evaluating(model), evaluating(again), torch.no_grad():
        ours = model.images(inputs["image"])
        pixels = model.normalised(inputs["image"])
        torch.testing.assert_close(theirs.encode_image(pixels, normalize=True), ours)
        torch.testing.assert_close(again.images(inputs["image"]), ours)
        found = functional.normalize(theirs.encode_text(tokens), dim=1)
        torch.testing.assert_close(model.texts(["smile", "a cat"]), found)


@pytest.mark.parametrize("mode", ["squash", "longest", "shortest"])
@pytest.mark.parametrize("kernel", ["bilinear", "bicubic"])
def test_images_are_seen_as_open_clip_sees_them(tmp_path, mode, kernel):
    """By evaluation, by training without crops, and by whoever loads what is exported."""
    open_clip = need("open_clip")
    told = {"resize_mode": mode, "interpolation": kernel, "fill_color": 7}
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"model_cfg": VIT, "preprocess_cfg": told}))
    torch.manual_seed(0)
    model = ImageText(str(path))
    model.export(tmp_path / "out")
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    noise = np.random.default_rng(0).integers(0, 256, (41, 90, 3), np.uint8)
    image = Image.fromarray(noise)
    with evaluating(model), evaluating(theirs):
        found = Embedder(model, 2).embed([{"image": image, "text": ("noise",), "id": 0}])
        wanted = theirs.encode_image(transform(image)[None], normalize=True)
        torch.testing.assert_close(found.images.features, wanted, rtol=0, atol=1e-5)
    whole = DataConfig(crop_scale=1.0)
    for view in (model.view(), train_view(whole, model), ImageText(str(tmp_path / "out")).view()):
        pixels = torch.from_numpy(view(image, np.zeros(CHANCES)).copy())[None]
        wanted = transform(image)[None]
        torch.testing.assert_close(model.normalised(pixels), wanted, rtol=0, atol=1e-5)


def test_how_images_are_resized_is_told():
    with pytest.raises(OptionError, match="resize of images must be one of shortest, squash"):
        View(8, resize="crop")
    with pytest.raises(OptionError, match="interpolation of images must be one of bicubic"):
        View(8, interpolation="nearest")


@pytest.mark.parametrize("config", [json.loads(Path(TINY).read_text()), VIT], ids=["timm", "vit"])
def test_places_of_an_image_have_features(tmp_path, config):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    model = ImageText(str(path))
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with evaluating(model):
        places = model.patches(pixels)
    assert places.shape[:2] == (2, config["embed_dim"])
    torch.testing.assert_close(places.norm(dim=1), torch.ones(2, *places.shape[2:]))


TIMM = {"timm_model_pretrained": False, "timm_proj": "linear"}


@pytest.mark.parametrize(
    "tower",
    [
        json.loads(Path(TINY).read_text())["vision_cfg"],
        {**TIMM, "timm_model_name": "tf_efficientnet_lite0", "image_size": 32},
        {**TIMM, "timm_model_name": "test_vit", "image_size": 16, "timm_pool": "avg"},
        {"image_size": 16, "patch_size": 16, "layers": 1, "width": 64, "pool_type": "avg"},
    ],
    ids=["convnext", "efficientnet", "timm's vit", "vit"],
)
def test_an_image_of_one_place_is_that_place(tmp_path, tower):
    """All that follows the layers of a tower is done to places too: norms, convolutions."""
    (tmp_path / "model.json").write_text(json.dumps({**VIT, "vision_cfg": tower}))
    torch.manual_seed(0)
    model = ImageText(str(tmp_path / "model.json"))
    for parameter in model.net.visual.parameters():
        if parameter.ndim == 1:  # of norms: as training leaves them
            nn.init.normal_(parameter, 1.0, 0.5)
    pixels = torch.randint(0, 256, (3, 3, model.image_size, model.image_size), dtype=torch.uint8)
    with evaluating(model):
        places, images = model.patches(pixels), model.images(pixels)
    assert places.shape[2:] == (1, 1)
    torch.testing.assert_close(places[:, :, 0, 0], images)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("swin_tiny_patch4_window7_224", {"img_size": 32}),  # channels last
        ("test_vit", {"img_size": 16, "global_pool": "map", "class_token": False}),
    ],
)
def test_places_of_other_layouts_and_poolings(name, how):
    trunk = need("timm").create_model(name, num_classes=0, **how).eval()
    pixels = torch.randn(2, 3, how["img_size"], how["img_size"])
    with torch.no_grad():
        places = place_features(SimpleNamespace(trunk=trunk, head=nn.Identity()), pixels)
        torch.testing.assert_close(places, trunk(pixels)[:, None, None])


def test_places_of_a_vit_lie_as_in_the_image(tmp_path):
    """Without positions, patches differ by their pixels only."""
    (tmp_path / "model.json").write_text(
        json.dumps({**VIT, "vision_cfg": {**TIMM, "timm_model_name": "test_vit", "image_size": 32}})
    )
    model = ImageText(str(tmp_path / "model.json"))
    nn.init.zeros_(model.net.visual.trunk.pos_embed)
    pixels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    pixels[..., :16, 16:] = 200
    with evaluating(model):
        places = model.patches(pixels)[0]
    bright = (places - places[:, :1, :1]).abs().amax(0) > 1e-3
    assert bright.tolist() == [[False, True], [False, False]]


def test_scenes_of_a_vit(tmp_path):
    from tilewise.evaluate.localise import heat_maps, make_scene

    (tmp_path / "model.json").write_text(json.dumps(VIT))
    model = ImageText(str(tmp_path / "model.json"))
    scenes = [make_scene(Emoji("style"), number, 32) for number in range(2)]
    with evaluating(model):
        assert heat_maps(model, scenes).shape == (2, 96, 96)


@pytest.mark.parametrize(
    "options",
    [{"init_logit_bias": -5.0}, {"force_image_size": 64}, {"force_context_length": 5}],
    ids=str,
)
def test_what_was_asked_for_is_exported_too(tmp_path, options):
    (tmp_path / "model.json").write_text(json.dumps(VIT))
    model = ImageText(str(tmp_path / "model.json"), **options)
    model.export(tmp_path / "out")
    again = ImageText(str(tmp_path / "out"))
    assert again.image_size == model.image_size
    own = model.net.state_dict()
    assert all(torch.equal(x, own[name]) for name, x in again.net.state_dict().items())


def test_a_locked_text_tower_drops_nothing():
    model = ImageText(TINY)
    model.lock_text()
    model.train()
    assert not model.net.transformer.training
    assert model.net.visual.training
    assert not any(p.requires_grad for p in model.net.transformer.parameters())
    model.lock_image()
    model.train()
    assert not model.net.visual.trunk.training
    assert model.net.visual.head.training


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_patches_as_a_product_are_the_convolution(bias, layout):
    """Pixels that fill no patch are left out by both."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, (4, 2), (4, 2), bias=bias).double()
    x = torch.randn(2, 3, 11, 7, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    expected = conv(x)
    weights = torch.randn_like(expected)
    expected_grads = torch.autograd.grad((expected * weights).sum(), [x, *conv.parameters()])
    multiply_patches(nn.Sequential(conv))
    assert type(conv) is Patches
    found = conv(x)
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad((found * weights).sum(), [x, *conv.parameters()])
    torch.testing.assert_close(grads, expected_grads)
    torch.testing.assert_close(conv(x[0]), expected[0])
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        conv(x[:, :, :3])


def test_only_convolutions_that_cut_pixels_are_products(tmp_path):
    others = nn.Sequential(
        nn.Conv2d(3, 4, 4, 2), nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 4, 4, padding=1),
        nn.Conv2d(8, 4, 2, 2), nn.Conv2d(4, 4, 2, 2, groups=2), nn.Conv2d(3, 4, 2, 2, dilation=2),
    )  # fmt: skip
    multiply_patches(others)
    assert all(type(each) is nn.Conv2d for each in others)
    config = tmp_path / "vit.json"
    config.write_text(json.dumps(VIT))
    assert isinstance(ImageText(str(config)).net.visual.conv1, Patches)
    assert isinstance(TwoViews("test_vit", [8]).backbone.patch_embed.proj, Patches)


def test_places_of_a_wider_image():
    model = ImageText(TINY)
    with evaluating(model):
        pixels = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
        row = model.patches(torch.cat([pixels, pixels], dim=3))
    assert row.shape[2:] == (1, 2)


def test_weights_of_a_file_tower_or_model(tmp_path):
    torch.manual_seed(0)
    model = ImageText(TINY)
    torch.save(model.net.state_dict(), tmp_path / "all.pt")
    torch.save({"state_dict": model.net.visual.state_dict()}, tmp_path / "tower.pt")
    torch.manual_seed(1)
    prefixed = {f"visual.{name}": x for name, x in model.net.visual.state_dict().items()}
    torch.save(prefixed, tmp_path / "prefixed.pt")
    assert not ImageText(TINY, pretrained=str(tmp_path / "prefixed.pt")).brings_scale
    whole = ImageText(TINY, pretrained=str(tmp_path / "all.pt"))
    assert whole.brings_scale
    tower = ImageText(TINY, pretrained=str(tmp_path / "tower.pt"))
    own = model.net.state_dict()
    assert all(torch.equal(x, own[name]) for name, x in whole.net.state_dict().items())
    for name, x in tower.net.state_dict().items():
        if name.startswith("visual.") and x.ndim > 1:
            assert torch.equal(x, own[name])
    assert not torch.equal(tower.net.text_projection, model.net.text_projection)
    torch.save(model.net.visual.trunk.state_dict(), tmp_path / "trunk.pt")
    trunk = ImageText(TINY, pretrained=str(tmp_path / "trunk.pt")).net.visual
    ours = model.net.visual.trunk.state_dict()
    assert all(torch.equal(x, ours[name]) for name, x in trunk.trunk.state_dict().items())
    assert not torch.equal(trunk.head.proj.weight, model.net.visual.head.proj.weight)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "model.json is not: Expecting property name"),
        ("[]", "has no such embed_dim, no such vision_cfg, no such text_cfg"),
        ('{"model_cfg": 3}', "has no such embed_dim"),
        (json.dumps({**VIT, "text_cfg": 3}), r"model.json has no such text_cfg$"),
        (json.dumps({k: x for k, x in VIT.items() if k != "text_cfg"}), r"no such text_cfg$"),
        (json.dumps({**VIT, "widht": 3}), "model.json': TypeError: .*'widht'; look at"),
        (json.dumps({**VIT, "vision_cfg": {"widht": 3}}), "model.json': TypeError: .*'widht'"),
        (json.dumps({**VIT, "vision_cfg": {"timm_model_name": "nope"}}), "nope"),
    ],
    ids=["broken", "list", "number", "no table", "no text", "key", "inner key", "timm"],
)
def test_a_config_that_is_none_is_told(tmp_path, text, says):
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(OptionError, match=says):
        ImageText(str(tmp_path / "model.json"))


@pytest.mark.parametrize("route", ["file", "folder", "checkpoint"])
def test_a_config_that_could_run_code_is_refused(tmp_path, route):
    """Whatever of it goes to the tokenizer goes to transformers, which trusts who calls it."""
    names = dict.fromkeys(("hf_model_name", "hf_tokenizer_name"), make_text_folder(tmp_path / "t"))
    config = json.loads(Path(TINY).read_text())
    config["text_cfg"] = {**names, "tokenizer_kwargs": {"trust_remote_code": True}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    (tmp_path / "open_clip_model.safetensors").write_bytes(b"")
    folder = tmp_path if route == "folder" else tmp_path / "open_clip_config.json"
    told = {"told": {"model_cfg": config}} if route == "checkpoint" else {}
    with pytest.raises(OptionError, match=r"may hold .*clean.* got 'trust_remote_code'.*take it"):
        ImageText(TINY if told else str(folder), **told)


@pytest.mark.parametrize("schema", ["local-dir:", "hf-hub:"])
def test_a_config_is_read_nowhere_else(tmp_path, schema):
    """open_clip would, unseen by us, and leave the weights as they were drawn."""
    ImageText(TINY).export(tmp_path)
    with pytest.raises(OptionError, match="or a folder with one, got"):
        ImageText(f"{schema}{tmp_path}")


def test_a_folder_of_weights_begins_with_them(tmp_path):
    """Under each name that open_clip knows; under another, not in silence with random ones."""
    torch.manual_seed(1)
    model = ImageText(TINY)
    model.export(tmp_path / "out")
    weights = tmp_path / "out" / "open_clip_model.safetensors"
    weights.unlink()
    torch.save(model.net.state_dict(), tmp_path / "out" / "open_clip_pytorch_model.bin")
    assert equal(ImageText(str(tmp_path / "out")), model)
    (tmp_path / "out" / "open_clip_pytorch_model.bin").rename(tmp_path / "out" / "epoch_3.pt")
    with pytest.raises(OptionError, match=r"got epoch_3.pt, open_clip_config.json; rename them"):
        ImageText(str(tmp_path / "out"))
    assert equal(
        ImageText(str(tmp_path / "out"), pretrained=str(tmp_path / "out/epoch_3.pt")), model
    )
    assert not equal(ImageText(str(tmp_path / "out" / "open_clip_config.json")), model)


EVIL = {
    "modules.json": [{"idx": 2, "name": "2", "path": "2_Own", "type": "own_code.Own"}],
    "2_Dense/config.json": {"activation_function": "own_code.Own"},
    "2_Router/router_config.json": {"types": {"query_0": "own_code.Own"}},
    "2_Words/config.json": {"tokenizer_class": "own_code.Own"},
}


@pytest.mark.parametrize("file", EVIL)
def test_a_text_folder_with_code_of_its_own_is_refused(tmp_path, file):
    """Before anything of it is read: version 5 of the library would run it."""
    folder = Path(make_text_folder(tmp_path / "bert"))
    TextPairs(str(folder)).export(folder / "out")
    (folder / "out" / file).parent.mkdir(exist_ok=True)
    known = json.loads((folder / "out" / file).read_text()) if file == "modules.json" else None
    (folder / "out" / file).write_text(json.dumps([*known, *EVIL[file]] if known else EVIL[file]))
    with pytest.raises(OptionError, match=r"names 'own_code.Own', code that would run.*load the"):
        TextPairs(str(folder / "out"))


@pytest.mark.parametrize(("kind", "most"), [("Bert", 16), ("Roberta", 14)])
def test_a_text_is_no_longer_than_the_places_that_are_known(tmp_path, kind, most):
    """RoBERTa counts them from behind its padding."""
    folder = make_text_folder(tmp_path / "bert", kind)
    assert TextPairs(folder, max_length=most).max_length == most
    assert TextPairs(folder).max_length <= most
    with pytest.raises(OptionError, match=rf"at most {most}, .*got {most + 1}; set --max-length"):
        TextPairs(folder, max_length=most + 1)


def test_a_folder_without_a_text_encoder_is_told(tmp_path):
    with pytest.raises(OptionError, match=r"neither modules.json .* nor config.json"):
        TextPairs(str(tmp_path))
    folder = make_text_folder(tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").unlink()
    with pytest.raises(OptionError, match=r"bert' cannot be read as one: .*model.safetensors"):
        TextPairs(folder)
    (tmp_path / "bert" / "config.json").write_text("{")
    with pytest.raises(OptionError, match=r"bert' cannot be read as one: .*config.json"):
        TextPairs(folder)


def test_weights_of_our_own_checkpoints(tmp_path):
    """Of CLIP into CLIP; of SimCLR into SimCLR, whose projector is new, and into CLIP's trunk."""
    file = str(tmp_path / "model.safetensors")
    torch.manual_seed(0)
    clip, simclr = ImageText(TINY), TwoViews("test_convnext2", (12, 8))
    torch.manual_seed(1)
    write_tensors(Path(file), clip.state_dict())
    again = ImageText(TINY, pretrained=file)
    assert again.brings_scale
    assert equal(again, clip)
    write_tensors(Path(file), simclr.state_dict())
    assert equal(TwoViews("test_convnext2", (6,), pretrained=file).backbone, simclr.backbone)
    assert equal(ImageText(TINY, pretrained=file).net.visual.trunk, simclr.backbone)


def equal(first, second):
    weights = second.state_dict()
    return all(torch.equal(x, weights[name]) for name, x in first.state_dict().items())


def test_a_config_says_how_pixels_are_taken(tmp_path):
    wants = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.5, 0.5]}
    both = {"model_cfg": json.loads(Path(TINY).read_text()), "preprocess_cfg": wants}
    (tmp_path / "model.json").write_text(json.dumps(both))
    model = ImageText(str(tmp_path / "model.json"))
    found = model.normalised(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
    torch.testing.assert_close(found, torch.tensor([2.0, 1.0, 1.0]))
    model.export(tmp_path / "out")
    assert json.loads((tmp_path / "out/open_clip_config.json").read_text())["preprocess_cfg"][
        "std"
    ] == [0.25, 0.5, 0.5]


def test_weights_that_do_not_fit_or_could_run_code(tmp_path):
    with pytest.raises(CheckpointError, match="which is not there"):
        read_weights(tmp_path / "none.pt")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="another model"):
        ImageText(TINY, pretrained=str(tmp_path / "other.pt"))
    marked = tmp_path / "ran"
    torch.save(Trap(marked), tmp_path / "trap.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_weights(tmp_path / "trap.pt")
    assert not marked.exists()


class Trap:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_a_sample_without_a_text():
    model = ImageText(TINY)
    sample = {"image": Emoji("style")[0]["image"], "id": 0}
    form = model.form(View(32))
    with pytest.raises(DataError, match="an image, or its features, and a text, got image, id"):
        form.prepare(sample, np.zeros(form.chances))


def test_one_of_several_captions_is_drawn():
    model = ImageText(TINY)
    form, sample = model.form(View(32)), Emoji("train")[0]
    chances = np.random.default_rng(0).random((100, form.chances))
    seen = {form.prepare(sample, each)["text"] for each in chances}
    assert seen == set(sample["text"])


def test_queries_and_documents(text_folder):
    model = TextPairs(text_folder, max_length=8, query_prefix="a ")
    data = [
        {"id": i, "query": "red thing", "positive": "small", "negatives": ("big", "blue a a")}
        for i in range(4)
    ]
    inputs = batch_of(model, data, 4).inputs
    assert inputs["negatives_ids"].shape[:2] == (4, 2)
    with evaluating(model):
        out = model(**inputs)
        assert out["rows"].shape == out["cols"].shape == (4, 16)
        assert out["negatives"].shape == (4, 2, 16)
        torch.testing.assert_close(out["rows"][0], model.texts(["a red thing"])[0])
        torch.testing.assert_close(out["cols"][0], model.texts(["small"])[0])
        # Padding to the longest of a batch changes nothing.
        torch.testing.assert_close(out["negatives"][0, 0], model.texts(["big"])[0])
    uneven = [*data[:3], {**data[3], "negatives": ("big",)}]
    with pytest.raises(DataError, match="same number of hard negatives"):
        batch_of(model, uneven, 4)


def test_two_texts_of_a_sample_are_a_pair(text_folder):
    model = TextPairs(text_folder)
    form = model.form(View(1))
    found = form.prepare({"id": 0, "text": ("red", "blue", "green")}, np.array([0.99]))
    assert (found["query"], found["positive"]) == ("green", "red")
    with pytest.raises(DataError, match="two texts"):
        form.prepare({"id": 0, "text": ("red",)}, np.array([0.5]))


def test_sentence_transformers_loads_what_is_exported(text_folder, tmp_path):
    SentenceTransformer = need("sentence_transformers").SentenceTransformer

    model = TextPairs(text_folder)
    model.export(tmp_path / "out")
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
    with evaluating(model):
        ours = model.texts(["red thing", "big"])
    found = theirs.encode(["red thing", "big"], normalize_embeddings=True, convert_to_tensor=True)
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-5)


def test_length_and_prefixes_are_exported_and_loaded_again(text_folder, tmp_path):
    SentenceTransformer = need("sentence_transformers").SentenceTransformer

    prefixes = {"query_prefix": "red big ", "document_prefix": "a small "}
    model = TextPairs(text_folder, max_length=6, **prefixes)
    model.export(tmp_path / "out")
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
    assert theirs.max_seq_length == 6
    again = TextPairs(str(tmp_path / "out"))
    texts = ["green thing", "a blue thing small big red"]
    with evaluating(model), evaluating(again):
        sides = [model.texts(texts, queries=queries) for queries in (True, False)]
        assert not torch.allclose(*sides, atol=1e-2)
        for name, side in zip(("query", "document"), sides, strict=True):
            how = {"prompt_name": name, "normalize_embeddings": True, "convert_to_tensor": True}
            torch.testing.assert_close(theirs.encode(texts, **how), side, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(again.texts(texts, queries=name == "query"), side)
    other = TextPairs(str(tmp_path / "out"), query_prefix="green ")
    assert other.prefixes == {"query": "green ", "positive": "a small "}


def test_a_prefix_is_pooled_as_text_in_what_is_exported(text_folder, tmp_path):
    """Whatever the model was that training began with."""
    SentenceTransformer = need("sentence_transformers").SentenceTransformer

    model = TextPairs(text_folder, query_prefix="red ")
    model.net.set_pooling_include_prompt(False)
    model.export(tmp_path / "out")
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
    with evaluating(model):
        ours = model.texts(["thing"], queries=True)
    how = {"prompt_name": "query", "normalize_embeddings": True, "convert_to_tensor": True}
    torch.testing.assert_close(theirs.encode(["thing"], **how), ours, rtol=1e-4, atol=1e-5)


def test_two_views_are_projected_and_features_are_not(tmp_path):
    timm = need("timm")

    model = TwoViews("test_convnext2", (12, 8), image_size=32)
    inputs = batch_of(model, Emoji("style")).inputs
    assert not torch.equal(inputs["first"], inputs["second"])
    with evaluating(model):
        out = model(**inputs)
        assert out["rows"].shape == (6, 8)
        features = model.images(inputs["first"])
        assert features.shape == (6, model.backbone.num_features)
        model.export(tmp_path / "out")
        file = tmp_path / "out" / "model.safetensors"
        theirs = timm.create_model(
            "test_convnext2", num_classes=0, checkpoint_path=str(file)
        ).eval()
        found = functional.normalize(theirs(model.normalised(inputs["first"])), dim=1)
        torch.testing.assert_close(found, features)
    with pytest.raises(OptionError, match="near it"):
        TwoViews("test_convnext99", (8,))


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "test_mambaout"])
def test_the_projector_takes_what_is_pooled(name):
    """Which some models widen first."""
    model = TwoViews(name, (8,), image_size=32)
    with evaluating(model):
        features = model.images(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
        assert features.shape[1] != model.backbone.num_features
        first = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
        assert model(first, first)["rows"].shape == (2, 8)


def test_the_projector_takes_what_is_pooled_by_a_model_that_tells_otherwise(monkeypatch):
    """As timm's SAM did up to 1.0.30."""
    timm = need("timm")
    make = timm.create_model

    def lying(*args, **options):
        made = make(*args, **options)
        made.num_features = made.head_hidden_size = 77
        return made

    monkeypatch.setattr(timm, "create_model", lying)
    model = TwoViews("resnet18", (8,), image_size=64)
    pixels = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    assert model(pixels, pixels)["rows"].shape == (2, 8)
    assert model.projector[0].in_features == 512


def test_measuring_what_is_pooled_leaves_no_trace():
    """Weights are those that the seed gave before, statistics those of none."""
    timm = need("timm")
    torch.manual_seed(3)
    plain = timm.create_model("resnet18", num_classes=0)
    after = nn.Linear(512, 8)
    torch.manual_seed(3)
    model = TwoViews("resnet18", (8,), image_size=32)
    wanted = plain.state_dict()
    assert all(torch.equal(x, wanted[name]) for name, x in model.backbone.state_dict().items())
    assert torch.equal(model.projector[0].weight, after.weight)
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"init_logit_bias": -5.0}, {}),
        ({}, {"init_logit_bias": -5.0}),
        ({}, {"force_image_size": 64}),
        ({}, {"force_context_length": 5}),
    ],
    ids=str,
)
def test_weights_of_another_loss_image_size_or_length(tmp_path, then, now):
    (tmp_path / "model.json").write_text(json.dumps(VIT))
    name, file = str(tmp_path / "model.json"), tmp_path / "model.safetensors"
    model = ImageText(name, **then)
    write_tensors(file, model.state_dict())
    again = ImageText(name, pretrained=str(file), **now)
    assert again.brings_scale
    changed = ("logit_bias", "positional_embedding")
    own = model.net.state_dict()
    for key, x in again.net.state_dict().items():
        assert key.endswith(changed) or torch.equal(x, own[key])
    if "init_logit_bias" in now:
        assert again.net.logit_bias == -5.0
    for part, tower in ((again.net, model.net), (again.net.visual, model.net.visual)):
        means = [each.positional_embedding.mean() for each in (part, tower)]
        torch.testing.assert_close(*means, rtol=0.3, atol=0.01)


def test_weights_of_an_image_tower_are_resized_too(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(VIT))
    config = str(tmp_path / "model.json")
    tower = ImageText(config).net.visual.state_dict()
    torch.save(tower, tmp_path / "tower.pt")
    torch.save({f"visual.{name}": x for name, x in tower.items()}, tmp_path / "prefixed.pt")
    for name in ("tower", "prefixed"):
        model = ImageText(config, pretrained=str(tmp_path / f"{name}.pt"), force_image_size=64)
        found = model.net.visual.state_dict()
        assert len(found["positional_embedding"]) == 8 * 8 + 1
        table = "positional_embedding"
        assert torch.equal(found[table][0], tower[table][0])
        assert found[table][1:].mean() == pytest.approx(float(tower[table][1:].mean()), abs=1e-2)
        assert all(torch.equal(x, tower[name]) for name, x in found.items() if name != table)


@pytest.mark.parametrize("kind", ["clip", "text", "simclr"])
def test_exports_may_be_read_as_the_umask_says(tmp_path, kind):
    """Libraries would let the owner of their weights alone read them."""
    made = {
        "clip": lambda: ImageText(TINY),
        "text": lambda: TextPairs(make_text_folder(tmp_path / "bert")),
        "simclr": lambda: TwoViews("test_vit", (8,)),
    }[kind]()
    before = os.umask(0o027)
    try:
        made.export(tmp_path / "out")
    finally:
        os.umask(before)
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o640}


def test_what_cannot_be_locked_is_told(tmp_path):
    tower = {**VIT["vision_cfg"], "attentional_pool": True, "attn_pooler_heads": 2}
    texts = {**VIT["text_cfg"], "embed_cls": True, "output_tokens": True}
    more = {"vision_cfg": {**tower, "output_tokens": True}, "text_cfg": texts, "custom_text": True}
    heads = {**VIT["text_cfg"], "attn_pooler_heads": 2}
    (tmp_path / "coca.json").write_text(json.dumps({**VIT, **more, "multimodal_cfg": heads}))
    with pytest.raises(OptionError, match=r"coca.json is a CoCa, whose image .*leave --lock-image"):
        ImageText(str(tmp_path / "coca.json")).lock_image()


def test_what_is_said_while_weights_are_loaded(tmp_path, capfd, caplog, monkeypatch):
    """Neither a bar of transformers nor a warning of open_clip, but what weights did not fit."""
    folder = make_text_folder(tmp_path / "bert")
    for handler in logging.getLogger("transformers").handlers:
        # It holds what was stderr when it was made, in an earlier test perhaps. (pytest's own
        # handlers, which may be there too, write to memory.)
        if type(handler) is logging.StreamHandler:
            monkeypatch.setattr(handler, "stream", sys.stderr)
    capfd.readouterr()
    TextPairs(folder)
    assert capfd.readouterr() == ("", "")
    config = json.loads(Path(TINY).read_text())
    names = dict.fromkeys(("hf_model_name", "hf_tokenizer_name"), folder)
    config["text_cfg"] = {**names, "hf_proj_type": "linear", "context_length": 8}
    (tmp_path / "model.json").write_text(json.dumps(config))
    ImageText(str(tmp_path / "model.json"))
    out, err = capfd.readouterr()
    assert not out
    assert "%|" not in err
    assert "initialized" not in caplog.text
    assert "pooler.dense.weight | UNEXPECTED" in err
    assert need("transformers.utils.logging").is_progress_bar_enabled()


@pytest.mark.parametrize("name", ["test_vit", "test_convnext2"])
def test_timm_loads_a_backbone_of_another_image_size(tmp_path, name):
    """A ViT has a weight for each place of the image; timm is told by config.json."""
    timm = need("timm")

    model = TwoViews(name, (8,), image_size=64)
    model.export(tmp_path / "out")
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    file = str(tmp_path / "out" / "model.safetensors")
    ways = [
        timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True),
        timm.create_model(about["architecture"], num_classes=about["num_classes"],
                          checkpoint_path=file, **about["model_args"]),
    ]  # fmt: skip
    pixels = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with evaluating(model), torch.no_grad():
        for theirs in ways:
            found = functional.normalize(theirs.eval()(model.normalised(pixels)), dim=1)
            torch.testing.assert_close(found, model.images(pixels))
    assert list(timm.data.resolve_model_data_config(ways[0])["input_size"]) == [3, 64, 64]


def test_torchvision_is_mended_only_where_it_is_broken():
    code = (
        "import torch; from tilewise.models.libraries import mend_torchvision, _kept; "
        "mend_torchvision(); import torchvision; from torchvision import transforms; "
        "before = len(_kept); mend_torchvision(); assert len(_kept) == before; print(before)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() in ("0", "1")


def test_an_error_of_another_kind_is_not_swallowed(monkeypatch):
    from tilewise.models import libraries

    def broken(name):
        raise RuntimeError("something else")

    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(libraries.importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match="something else"):
        libraries.mend_torchvision()


def test_a_library_that_is_missing_is_named_with_the_remedy():
    from tilewise.models.libraries import need

    with pytest.raises(
        OptionError, match=r"no_such_library is needed.*pip install 'tilewise\[train\]'"
    ):
        need("no_such_library")


def test_prefixes_by_flag_by_checkpoint_by_folder(text_folder, tmp_path):
    """In this order; a run that does not tell had none but those of its flags."""
    TextPairs(text_folder, query_prefix="find ", document_prefix="text ").export(tmp_path / "out")
    folder = str(tmp_path / "out")
    assert TextPairs(folder).prefixes == {"query": "find ", "positive": "text "}
    assert TextPairs(folder).facts() == {"prefixes": {"query": "find ", "positive": "text "}}
    assert TextPairs(folder, query_prefix="none").prefixes == {"query": "", "positive": "text "}
    assert TextPairs(folder, told={}).prefixes == {"query": "", "positive": ""}
    told = {"prefixes": {"query": "ask ", "positive": ""}}
    found = TextPairs(folder, told=told, document_prefix="a ")
    assert found.prefixes == {"query": "ask ", "positive": "a "}
