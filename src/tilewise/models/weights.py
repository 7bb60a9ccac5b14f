"""Weights from a local file: tensors only, nothing that could run."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.errors import CheckpointError
from tilewise.models.libraries import need


def read_weights(path: Path) -> dict[str, Tensor]:
    """Of a safetensors file, or a PyTorch file that holds nothing but tensors."""
    if not path.is_file():
        raise CheckpointError(
            f"weights must be a local file, got {path}, which is not there; copy them here first"
        )
    try:
        if path.suffix == ".safetensors":
            found: Any = need("safetensors.torch").load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as weights: {type(error).__name__}: {error}"
        ) from error
    found = found.get("state_dict", found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
        raise CheckpointError(
            f"{path} must hold tensors by name, got something else; save a state_dict"
        )
    return {name.removeprefix("module."): each for name, each in found.items()}


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """As safetensors, each with memory of its own, for those who may read new files here."""
    apart = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # as the umask has it; the library's file is its owner's alone
    need("safetensors.torch").save_file(apart, path)
    path.chmod(mode)


# What our checkpoints call the library's model, and what they hold beside it.
_OWN = {"net.": ("logit_scale",), "backbone.": ("logit_scale", "projector.")}


def read_pretrained(path: Path) -> dict[str, Tensor]:
    """Weights to begin with, named as the library does; of a checkpoint of ours, those of the
    library's model, without a projector.
    """
    weights = read_weights(path)
    for part, beside in _OWN.items():
        found = {name.removeprefix(part): x for name, x in weights.items() if name.startswith(part)}
        if found and all(name.startswith((part, *beside)) for name in weights):
            return found
    return weights


def load_weights(net: nn.Module, path: Path) -> set[str]:
    """Into a model of open_clip, whose older layouts are converted, or into the part that they are
    of: its image tower, or the trunk of that. The names that were loaded.
    """
    weights = read_pretrained(path)
    if all(name.startswith("visual.") for name in weights):
        weights = {name.removeprefix("visual."): each for name, each in weights.items()}
    if "positional_embedding" in weights and "positional_embedding" not in net.state_dict():
        weights = need("open_clip.model").convert_to_custom_text_state_dict(weights)
    parts = [net, net.get_submodule("visual")]
    parts += [trunk for name, trunk in parts[1].named_children() if name == "trunk"]
    target = max(parts, key=lambda part: len(set(weights) & set(part.state_dict())))
    loaded = set(weights)
    if target is net:
        weights = _resized(net, _fitted(net, weights))
    elif target is parts[1]:
        whole = _resized(net, {f"visual.{name}": each for name, each in weights.items()})
        weights = {name.removeprefix("visual."): each for name, each in whole.items()}
    load_strictly(target, weights, path)
    return loaded


def _fitted(net: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """For another loss, which has a bias or has none."""
    known, weights = net.state_dict(), dict(weights)
    if "logit_bias" in known:
        weights.setdefault("logit_bias", known["logit_bias"])
    else:
        weights.pop("logit_bias", None)
    for name in {"logit_scale", "logit_bias"} & set(weights) & set(known):
        weights[name] = weights[name].reshape(known[name].shape)
    return weights


def _resized(net: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """For another image size or another length."""
    known, weights = net.state_dict(), dict(weights)
    library = need("open_clip.model")
    for name, resize in {
        "visual.positional_embedding": library.resize_pos_embed,
        "positional_embedding": library.resize_text_pos_embed,
        "text.positional_embedding": library.resize_text_pos_embed,
    }.items():
        both = [table[name].shape for table in (known, weights) if name in table]
        if len(both) == 2 and both[0][1:] == both[1][1:]:
            resize(weights, net)
    return weights


def load_strictly(module: nn.Module, weights: dict[str, Tensor], origin: Path) -> None:
    """All of them, and all that the module has; else an error that says which do not fit."""
    own = module.state_dict()
    missing = sorted(set(own) - set(weights))
    unknown = sorted(set(weights) - set(own))
    other = [name for name in set(own) & set(weights) if own[name].shape != weights[name].shape]
    if missing or unknown or other:
        kinds = (missing, "missing"), (unknown, "unknown"), (sorted(other), "of another shape")
        said = [f"{len(names)} {what} ({names[0]}, ...)" for names, what in kinds if names]
        raise CheckpointError(f"{origin} holds weights of another model: {', '.join(said)}")
    module.load_state_dict(weights)
