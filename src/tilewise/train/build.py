"""A configuration's model, views and order."""

from dataclasses import replace
from typing import Any

import torch

from tilewise.config import Config, DataConfig
from tilewise.data.views import View
from tilewise.errors import OptionError
from tilewise.models.base import PairModel
from tilewise.models.image_text import ImageText
from tilewise.models.text_pairs import TextPairs
from tilewise.models.two_views import TwoViews
from tilewise.models.weights import load_strictly
from tilewise.train.checkpoint import Snapshot


def model_of(config: Config, shot: Snapshot, *, average: bool) -> PairModel:
    """The model of a checkpoint, with its weights; or with their average, if it has one."""
    # The checkpoint has all of them, and the model's config: neither the file of weights that the
    # run began with nor that of the config need be there any more.
    then = shot.about.get("config", {}).get("model", {}).get("model")
    told = shot.about.get("model") if config.model.model == then else None
    if told is None and config.model.kind == "text":
        told = {}  # by which it has the prefixes of the configuration, as all had before
    model = make_model(replace(config, model=replace(config.model, pretrained="")), told)
    own = model.state_dict()
    weights = {
        name: x.reshape(own[name].shape) if x.numel() == 1 and name in own else x
        for name, x in {**shot.model, **(shot.ema if average else {})}.items()
    }
    load_strictly(model, weights, shot.folder)
    return model


def make_model(config: Config, told: dict[str, Any] | None = None) -> PairModel:
    """The model, with its weights, as the configuration begins; the same on all ranks.

    told: what a checkpoint tells of it (`PairModel.facts`), if one is to be loaded.
    """
    torch.manual_seed(config.run.seed)
    model, loss = config.model, config.loss
    if model.kind == "text":
        made: PairModel = TextPairs(
            model.model,
            max_length=model.max_length,
            query_prefix=model.query_prefix,
            document_prefix=model.document_prefix,
            init_bias=loss.init_bias if loss.loss == "siglip" else None,
            told=told,
        )
    elif model.kind == "simclr":
        made = TwoViews(
            model.model, model.projector, image_size=model.image_size, pretrained=model.pretrained
        )
    else:
        made = _image_text(config, told)
    if not (isinstance(made, ImageText) and made.brings_scale):
        made.set_scale(1 / loss.temperature, learn=loss.learn_temperature)
    made.log_scale.requires_grad_(loss.learn_temperature)
    if model.grad_checkpointing:
        _checkpoint(made, model.model)
    return made


def _image_text(config: Config, told: dict[str, Any] | None) -> ImageText:
    model = config.model
    options = {
        "force_context_length": model.max_length or None,
        "force_image_size": model.image_size or None,
        "force_patch_dropout": model.patch_dropout or None,
        "init_logit_bias": config.loss.init_bias if config.loss.loss == "siglip" else None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    made = ImageText(model.model, pretrained=model.pretrained, told=told, **given)
    if model.lock_image:
        made.lock_image()
    if model.lock_text:
        made.lock_text()
    return made


def _checkpoint(model: PairModel, name: str) -> None:
    """Let every part that knows how recompute its activations; one that refuses is told."""
    ways = ("set_grad_checkpointing", "gradient_checkpointing_enable")
    known = [getattr(part, way) for part in model.modules() for way in ways if hasattr(part, way)]
    try:
        for enable in known:
            enable()
    except (AssertionError, ValueError) as error:  # of timm, of transformers
        known, why = [], f": {error}"
    else:
        why = ""
    if not known:
        raise OptionError(
            f"{name} cannot recompute its activations{why}; leave --grad-checkpointing out"
        )


def train_view(data: DataConfig, model: PairModel) -> View:
    """How training sees an image."""
    return replace(
        model.view(), crop_scale=data.crop_scale, flip=data.flip, jitter=data.jitter,
        grayscale=data.grayscale, blur=data.blur,
    )  # fmt: skip
