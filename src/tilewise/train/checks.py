"""What cannot be trained as configured, told before anything is written."""

import warnings

import torch
from torch import nn

from tilewise.config import Config, LossConfig, ModelConfig
from tilewise.errors import OptionError
from tilewise.ranks import Ranks

# Fields of [model] that mean nothing to other kinds of model.
KINDS = {
    "patch_dropout": ("clip",),
    "query_prefix": ("text",),
    "document_prefix": ("text",),
    "projector": ("simclr",),
    "max_length": ("clip", "text"),
    "image_size": ("clip", "simclr"),
}
TORCH_FLOOR = (2, 10)  # earlier ones can be made to run code by a file of weights


def warn_of_old_torch() -> None:
    """The losses take older ones; whoever trains reads files of others."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < TORCH_FLOOR:
        wanted = ".".join(map(str, TORCH_FLOOR))
        warnings.warn(
            f"torch {torch.__version__} can be made to run code by a file of weights "
            f"(CVE-2026-24747), and training is not tested with it; pip install 'torch>={wanted}'",
            stacklevel=2,
        )


def check_alike(rows: int, cols: int) -> None:
    """Features of both sides are compared with each other."""
    if rows != cols:
        raise ValueError(f"rows come out with {rows} features, columns with {cols}")


def check_fields(config: Config) -> None:
    """Nothing is asked for that the model or the loss has not; runs from before that was checked
    can still be evaluated.
    """
    model, loss = config.model, config.loss
    for name, kinds in KINDS.items():
        value, default = getattr(model, name), getattr(ModelConfig, name)
        if model.kind not in kinds and value != default:
            raise OptionError(
                f"{name} belongs to kind = {' and '.join(map(repr, kinds))}, got {value!r} with "
                f"kind = {model.kind!r}; leave --{name.replace('_', '-')} out"
            )
    if loss.loss != "siglip" and loss.init_bias != LossConfig.init_bias:
        raise OptionError(
            f"init_bias belongs to loss = 'siglip', got {loss.init_bias} with loss = "
            f"{loss.loss!r}, which has no bias; leave --init-bias out"
        )


def check_temperature(loss: LossConfig) -> None:
    """One that is learned stays where it is clamped to; runs from before that was checked can
    still be evaluated.
    """
    if loss.max_scale < 1:
        raise OptionError(f"max_scale must be at least 1, got {loss.max_scale}")
    if loss.learn_temperature and not 1 <= 1 / loss.temperature <= loss.max_scale:
        raise OptionError(
            f"a temperature that is learned must be from 1 / max_scale = {1 / loss.max_scale:g} to "
            f"1, got {loss.temperature:g}; or fix it with --no-learn-temperature"
        )


def check_ranks(config: Config, ranks: Ranks) -> None:
    """Every rank has something to do, and under FSDP2 as often as the others."""
    batch, micro, world = config.step.batch_size, config.step.micro_batch, ranks.world
    if batch < world:
        raise OptionError(
            f"batch_size must be at least a pair a rank, got {batch} for {world} ranks"
        )
    most, least = -(-batch // world), batch // world
    if config.run.dist == "fsdp" and world > 1 and -(-most // micro) != -(-least // micro):
        raise OptionError(
            f"under FSDP2 all ranks must have as many micro-batches, got {least} and {most} pairs "
            f"in micro-batches of {micro}; make batch_size a multiple of {world}"
        )
    if config.step.features == "host" and world > 1 and ranks.device.type == "cuda":
        raise OptionError(
            f"features = 'host' is for one process, got {world} ranks; set --features device"
        )


def check_norms(config: Config, model: nn.Module) -> None:
    """BatchNorm is trained only if that is asked for."""
    model.train()  # but for what is locked
    norms = nn.modules.batchnorm._BatchNorm
    found = [name for name, x in model.named_modules() if x.training and isinstance(x, norms)]
    if found and not config.step.batch_norm:
        raise OptionError(
            f"{config.model.model} has BatchNorm ({found[0]}), whose statistics would be those of "
            "micro-batches, not of the batch; accept that with --batch-norm, or take a model with "
            "LayerNorm"
        )
