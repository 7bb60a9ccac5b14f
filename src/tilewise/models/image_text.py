"""Images with texts: any model of open_clip."""

import difflib
import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tilewise.data.loader import Form, Inputs
from tilewise.data.samples import Sample
from tilewise.data.views import CHANCES, View
from tilewise.errors import DataError, OptionError
from tilewise.models.base import PairModel
from tilewise.models.libraries import need, quiet
from tilewise.models.patches import multiply_patches
from tilewise.models.places import place_features
from tilewise.models.weights import load_weights, write_tensors

CONFIGS = Path(__file__).parent / "configs"
WEIGHTS, CONFIG = "open_clip_model.safetensors", "open_clip_config.json"  # as open_clip finds them
OTHER_WEIGHTS = "open_clip_pytorch_model.bin"  # as open_clip finds them too
# What a config may tell its tokenizer: anything else goes to transformers, which can be told to run
# code that lies beside the tokenizer.
TOKENIZER = ("additional_special_tokens", "clean", "language", "reduction_mask", "strip_sep_token")


class ImageText(PairModel):
    """A model of open_clip: (images or their features, tokens) -> rows, cols, scale and, with one,
    bias.

    Args:
        name: of a config: open_clip's or ours, or a JSON file of one, or a folder that was
            exported.
        pretrained: file of weights.
        told: what `facts` was of a model whose weights will be loaded into this one; in place of
            what is found under the name now.
        options: for open_clip's `create_model`.
    """

    def __init__(
        self,
        name: str,
        *,
        pretrained: str = "",
        told: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        open_clip = need("open_clip")
        self.name, self.options = name, options
        self.config, self.preprocess = _parts(told) if told else find_config(name)
        known = _registered(self.config)
        pretrained = pretrained or ("" if told else _own_weights(name))
        if told or Path(pretrained).parent == Path(name):
            options = {"pretrained_text": False, **options}  # all of it is there
        length = options.get("force_context_length")
        with quiet(), _explained(name):
            self.net = open_clip.create_model(
                known, force_preprocess_cfg=self.preprocess, **options
            )
            self.tokenizer = open_clip.get_tokenizer(known, context_length=length)
        multiply_patches(self.net)
        loaded = load_weights(self.net, Path(pretrained)) if pretrained else set()
        self.brings_scale = "logit_scale" in loaded
        size = self.net.visual.image_size
        self.image_size = int(size[0] if isinstance(size, (tuple, list)) else size)
        self.locked = False
        self.set_pixels(*(self.net.visual.preprocess_cfg[key] for key in ("mean", "std")))

    @property
    def log_scale(self) -> nn.Parameter:
        parameter: nn.Parameter = self.net.logit_scale
        return parameter

    def lock_image(self) -> None:
        """Leave the image tower as it is; a trained projection behind timm's trunk stays to
        train.
        """
        if not hasattr(self.net, "lock_image_tower"):
            raise OptionError(
                f"{self.name} is a {type(self.net).__name__}, whose image tower open_clip does not "
                "lock; leave --lock-image out, or take a CLIP"
            )
        self.net.lock_image_tower(unlocked_groups=0, freeze_bn_stats=False)
        self.locked = True
        self.train(self.training)

    def lock_text(self) -> None:
        """Leave the text tower as it is."""
        for name, parameter in self.net.named_parameters():
            if not name.startswith(("visual.", "logit_")):
                parameter.requires_grad_(False)
        self.text_locked = True
        self.train(self.training)

    def train(self, mode: bool = True) -> "ImageText":
        """As always, but what is locked keeps its statistics and drops nothing."""
        super().train(mode)
        if getattr(self, "locked", False):
            self._frozen.eval()
        if getattr(self, "text_locked", False):
            for name, part in self.net.named_children():
                if name != "visual":
                    part.eval()
        return self

    def frozen_state(self) -> list[Tensor]:
        pixels = [self.get_buffer("pixel_mean"), self.get_buffer("pixel_std")]
        return [*self._frozen.state_dict().values(), *pixels]

    @property
    def _frozen(self) -> nn.Module:
        visual: nn.Module = self.net.visual
        return visual.trunk if hasattr(visual, "trunk") else visual  # type: ignore[return-value]

    def _head(self, features: Tensor) -> Tensor:
        visual = self.net.visual
        out: Tensor = visual.head(features) if hasattr(visual, "trunk") else features
        return out

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        """image: (n, 3, size, size) bytes, or features of a locked tower;
        text: (n, length) tokens.
        """
        rows = self._head(image) if image.ndim == 2 else self._image_features(image)
        out = {
            "rows": functional.normalize(rows, dim=-1),
            "cols": functional.normalize(self.net.encode_text(text), dim=-1),
            "scale": self.net.logit_scale.exp(),
        }
        bias = getattr(self.net, "logit_bias", None)
        return out if bias is None else {**out, "bias": bias}

    def _image_features(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.net.encode_image(self.normalised(pixels))
        return features

    def precompute(self, inputs: Inputs) -> Inputs:
        """Features of the locked tower in place of images."""
        if inputs["image"].ndim == 2 and not self.locked:
            raise DataError(
                "features take the place of a locked image tower; set lock_image = true, or give "
                "data with images"
            )
        if not self.locked or inputs["image"].ndim == 2:
            return inputs
        with torch.no_grad():
            return {**inputs, "image": self._frozen(self.normalised(inputs["image"])).float()}

    def images(self, pixels: Tensor) -> Tensor:
        return functional.normalize(self._image_features(pixels).float(), dim=-1)

    def texts(self, texts: Sequence[str], *, queries: bool = False) -> Tensor:
        tokens = self.tokenizer(list(texts)).to(self.device)
        return functional.normalize(self.net.encode_text(tokens).float(), dim=-1)

    def patches(self, pixels: Tensor) -> Tensor:
        places = place_features(self.net.visual, self.normalised(pixels)).float()
        return functional.normalize(places, dim=-1).permute(0, 3, 1, 2)

    def view(self) -> View:
        """As open_clip's transform for evaluation has it."""
        told = self.net.visual.preprocess_cfg
        names = {"resize": "resize_mode", "interpolation": "interpolation", "fill": "fill_color"}
        return View(self.image_size, **{ours: told[theirs] for ours, theirs in names.items()})

    def form(self, view: View) -> Form:
        return Form(_Prepare(view), self._collate, CHANCES + 1)

    def _collate(self, prepared: list[dict[str, Any]]) -> Inputs:
        shapes = {each["image"].shape for each in prepared}
        if len(shapes) > 1:
            raise DataError(f"all samples must have images or features of one size, got {shapes}")
        image = torch.from_numpy(np.stack([each["image"] for each in prepared]))
        return {"image": image, "text": self.tokenizer([each["text"] for each in prepared])}

    def facts(self) -> dict[str, Any]:
        return {"model_cfg": self.config, "preprocess_cfg": self.preprocess}

    def _export_config(self) -> dict[str, Any]:
        """What open_clip reads beside the weights."""
        preprocess = self.net.visual.preprocess_cfg
        return {
            "model_cfg": self._built_config(),
            "preprocess_cfg": {
                key: preprocess[key]
                for key in ("mean", "std", "interpolation", "resize_mode", "fill_color")
            },
        }

    def _built_config(self) -> dict[str, Any]:
        """The config with what was asked for beside it."""
        config: dict[str, Any] = json.loads(json.dumps(self.config))
        config["vision_cfg"]["image_size"] = self.image_size
        if "force_context_length" in self.options:
            config["text_cfg"]["context_length"] = self.options["force_context_length"]
        if getattr(self.net, "logit_bias", None) is not None:
            config["init_logit_bias"] = float(self.net.logit_bias.detach())
        return config

    def export(self, folder: Path) -> None:
        """A folder for `open_clip.create_model("local-dir:" + folder)`."""
        folder.mkdir(parents=True, exist_ok=True)
        # FSDP2 takes no scalar parameters; open_clip's are.
        shapes = {"logit_scale": (), "logit_bias": ()}
        weights = {
            name: each.reshape(shapes[name]) if name in shapes else each
            for name, each in self.net.state_dict().items()
        }
        write_tensors(folder / WEIGHTS, weights)
        config = self._export_config()
        if "hf_model_name" in config["model_cfg"]["text_cfg"]:
            # open_clip asks transformers for the shape of the tower: here, from now on.
            self.net.text.config.save_pretrained(folder)
            _name_text_tower(config["model_cfg"], folder.resolve())
            warnings.warn(
                f"open_clip finds the text tower's shape by its path, {folder.resolve()}: after a "
                f"move, write the new one to hf_model_name in {CONFIG}; tilewise needs no change",
                stacklevel=2,
            )
        (folder / CONFIG).write_text(json.dumps(config, indent=2))
        if hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(str(folder))


class _Prepare:
    """A sample -> its view, or its features, and one of its captions."""

    def __init__(self, view: View) -> None:
        self.view = view

    def __call__(self, sample: Sample, chances: NDArray[np.float64]) -> dict[str, Any]:
        if "text" not in sample or not ("image" in sample or "features" in sample):
            raise DataError(
                "a sample must have an image, or its features, and a text, "
                f"got {', '.join(sample)}",
                "fields",
            )
        texts = sample["text"]
        text = texts[int(chances[CHANCES] * len(texts))]
        if "features" in sample:
            return {"image": np.asarray(sample["features"], np.float32), "text": text}
        return {"image": self.view(sample["image"], chances), "text": text}


def find_config(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model's config and how it takes pixels: by name, ours or open_clip's; or from a JSON file,
    of a config or as beside exported weights; or from such a folder.
    """
    open_clip = need("open_clip")
    path = Path(name)
    for file in (path / CONFIG, path, CONFIGS / f"{name}.json"):
        if file.is_file() and file.suffix == ".json":
            read = _read_config(file)
            config, preprocess = _parts(read)
            if file.name == CONFIG and (path / "config.json").is_file():
                _name_text_tower(config, path)  # it may have been moved
            return config, preprocess
    names = open_clip.list_models()
    if name not in names:  # of those it would read elsewhere, such as hf-hub:NAME, none is here
        names += [each.stem for each in CONFIGS.glob("*.json")]
        near = ", ".join(difflib.get_close_matches(name, names, 3)) or "see open_clip.list_models()"
        raise OptionError(
            "model must be a config of open_clip, a JSON file of one or a folder with one, got "
            f"{name!r}; near it: {near}"
        )
    return _parts(open_clip.get_model_config(name))


def check_unchanged(name: str, told: dict[str, Any], origin: Path) -> None:
    """Raise where a file or folder of a config, if it is still there, is not as a checkpoint tells:
    whoever changed it would not get what it says.
    """
    if "model_cfg" not in told or not Path(name).exists():
        return
    config, preprocess = find_config(name)
    then = dict(_flat(told))
    now = dict(_flat({"model_cfg": config, "preprocess_cfg": preprocess}))
    changed = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        raise OptionError(
            f"{origin} is of a model with {key} = {then.get(key)!r}, and {name} has "
            f"{now.get(key)!r} now; put it back to resume, or begin a run of its own (--name)"
        )


def _flat(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Values of all tables inside, by their keys joined with dots."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def _parts(read: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config, which may stand alone, and how pixels are taken."""
    config = dict(read.get("model_cfg", read))
    told = (config.get("text_cfg") or {}).get("tokenizer_kwargs") or {}
    unknown = sorted(set(told) - set(TOKENIZER))
    if unknown:
        raise OptionError(
            f"tokenizer_kwargs of a config may hold {', '.join(TOKENIZER)}, got {unknown[0]!r}, by "
            "which the config could run code; take it out, if you trust the rest"
        )
    return config, dict(read.get("preprocess_cfg", {}))


def _own_weights(name: str) -> str:
    """The file of weights in a folder of a config; empty if the name is of no such folder."""
    folder = Path(name)
    if not (folder / CONFIG).is_file():
        return ""
    found = [folder / each for each in (WEIGHTS, OTHER_WEIGHTS) if (folder / each).is_file()]
    if not found:
        there = ", ".join(sorted(each.name for each in folder.iterdir()))
        raise OptionError(
            f"{folder} must hold weights beside its config, as {WEIGHTS} or {OTHER_WEIGHTS}, got "
            f"{there}; rename them, give their file as --pretrained, or name {folder / CONFIG} to "
            "begin with random ones"
        )
    return str(found[0])


def _read_config(file: Path) -> dict[str, Any]:
    """A JSON file that has the parts of a model."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(
            f"model must be a JSON file of a config, {file} is not: {error}"
        ) from error
    config = read.get("model_cfg", read) if isinstance(read, dict) else None
    kinds = {"embed_dim": int, "vision_cfg": dict, "text_cfg": dict}
    given = config if isinstance(config, dict) else {}
    wrong = [part for part, kind in kinds.items() if not isinstance(given.get(part), kind)]
    if wrong:
        raise OptionError(
            "model must be a config of open_clip with embed_dim, a number, and vision_cfg and "
            f"text_cfg, tables; {file} has no such {', no such '.join(wrong)}"
        )
    return dict(read)


def _name_text_tower(config: dict[str, Any], folder: Path) -> None:
    """Let the text tower of Hugging Face be the one that a folder tells of."""
    config["text_cfg"].update(hf_model_name=str(folder), hf_tokenizer_name=str(folder))


def _registered(config: dict[str, Any]) -> str:
    """The name under which open_clip knows a config from now on."""
    factory = need("open_clip.factory")
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8)
    name = f"tilewise-{digest.hexdigest()}"
    factory._MODEL_CONFIGS[name] = config
    return name


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """open_clip checks no config: what it trips over, whatever it is, is told as the config's."""
    try:
        yield
    except Exception as error:
        raise OptionError(
            f"open_clip makes no model of {name!r}: {type(error).__name__}: {error}; look at the "
            "config's keys, numbers and paths"
        ) from error
