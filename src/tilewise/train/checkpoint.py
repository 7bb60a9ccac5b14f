"""Checkpoints: a folder a step, written whole or not at all, checked when it is read.

    step-00000120/
      model.safetensors        weights by name
      ema.safetensors          their moving average, if there is one
      optimizer.safetensors    tensors of the optimizer's state, by name of the weight
      pool-00000.safetensors   the pool of negatives of each rank, with a .json, if there is one
      state.json               format, step, samples seen, configuration, the model's own config,
                               versions, and what else the optimizer knows
      manifest.json            bytes and SHA-256 of every other file

The order of data, crops, dropout and the learning rate are functions of seed and step, so nothing
of them needs to be saved.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as full_state
from torch.distributed.tensor import DTensor, distribute_tensor

from tilewise.data.manifest import sha256_of
from tilewise.errors import CheckpointError
from tilewise.models.libraries import need
from tilewise.models.weights import read_weights, write_tensors
from tilewise.train.setup import whole

FORMAT = 1
MODEL, EMA, OPTIMIZER = "model.safetensors", "ema.safetensors", "optimizer.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
_FULL = full_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
# A weight that nothing uses, such as a pooler of a text tower, has no state.
_SOME = full_state.StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


@dataclass
class Snapshot:
    """What a checkpoint holds, in host memory."""

    step: int = 0
    samples: int = 0
    model: dict[str, Tensor] = field(default_factory=dict)
    ema: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)  # "state" by weight, "param_groups"
    about: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()  # that it was read from


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """Whole weights and the optimizer's state; all ranks call it, the first one gets them."""
    weights: Any = full_state.get_model_state_dict(model, options=_FULL)
    before, groups = set(optimizer.state), [set(group) for group in optimizer.param_groups]
    moments: Any = full_state.get_optimizer_state_dict(model, optimizer, options=_FULL)
    _forget(optimizer, before, groups)
    if not before:
        told = zip(moments.get("param_groups", []), groups, strict=False)  # the first rank's
        kept = [{name: group[name] for name in names if name in group} for group, names in told]
        moments = {"state": {}, "param_groups": kept}
    return Snapshot(model=dict(weights), optimizer=dict(moments))


def _forget(optimizer: torch.optim.Optimizer, known: set[Any], groups: list[set[str]]) -> None:
    """Drop what is not known of weights and groups: PyTorch gives an optimizer that has taken no
    step the state of one that has, to see what it looks like.
    """
    for weight in set(optimizer.state) - known:
        del optimizer.state[weight]
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        for name in set(group) - names:
            del group[name]


def ema_state(average: dict[str, Tensor]) -> dict[str, Tensor]:
    """The averaged weights, unsharded, in host memory."""
    return {name: whole(each).cpu() for name, each in average.items()}


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, found: Snapshot) -> None:
    """Load a snapshot into both, on all ranks; each has read it."""
    _check_fits(model, found)
    for own, loaded in zip(optimizer.param_groups, found.optimizer["param_groups"], strict=False):
        if "foreach" not in own:  # how a step is computed, which AdaFactor has only to timm 1.0.30
            loaded.pop("foreach", None)
    _check_groups(optimizer, found)
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    weights: Any = {name: _as_here(x, shapes[name]) for name, x in found.model.items()}
    full_state.set_model_state_dict(model, weights, options=_FULL)
    for name, own in found.optimizer["state"].items():
        for key, x in own.items():
            # One number of a large weight's state is something else: a variance of AdaFactor's.
            if key != "step" and isinstance(x, Tensor) and found.model[name].numel() == 1:
                own[key] = _as_here(x, shapes[name])
    known = {p for name, p in model.named_parameters() if name in found.optimizer["state"]}
    both = zip(optimizer.param_groups, found.optimizer["param_groups"], strict=True)
    groups = [{*own, *loaded} for own, loaded in both]
    full_state.set_optimizer_state_dict(model, optimizer, found.optimizer, options=_SOME)
    _forget(optimizer, known, groups)


def _as_here(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A learnable scale has no dimension, and one of length 1 where it is sharded."""
    return tensor.reshape(shape) if tensor.numel() == 1 else tensor


def _check_fits(model: nn.Module, found: Snapshot) -> None:
    """Of the same model: names and sizes."""
    own = {name: each.numel() for name, each in model.state_dict().items()}
    got = {name: each.numel() for name, each in found.model.items()}
    wrong = [name for name in {**own, **got} if own.get(name) != got.get(name)]
    if wrong:
        raise CheckpointError(
            f"the checkpoint is of another model: {len(wrong)} weights differ, such as {wrong[0]} "
            f"({got.get(wrong[0], 'no')} numbers, want {own.get(wrong[0], 'none')}); resume with "
            "the configuration of its run"
        )


def _check_groups(optimizer: torch.optim.Optimizer, found: Snapshot) -> None:
    """Weights with decay, weights without, or both: locking a tower may leave out one of them.

    And of the same optimizer, by its options: `opt` may have meant another one.
    """
    loaded = found.optimizer["param_groups"]
    then, now = len(loaded), len(optimizer.param_groups)
    unknown = {name for group in loaded for name in group}.difference(*optimizer.param_groups)
    unknown.discard("step")  # which timm's count there once they have taken one
    if unknown and then == now:
        raise CheckpointError(
            f"the checkpoint is of another optimizer, which has {sorted(unknown)[0]!r} among its "
            "options; begin a run of its own with its weights as --pretrained"
        )
    if then != now:
        raise CheckpointError(
            f"other weights are trained than in the checkpoint, {now} groups of them (with decay, "
            f"without), where it has {then}; resume with its lock_image, lock_text and "
            "learn_temperature, or begin a run of its own with its weights as --pretrained"
        )


def restore_average(average: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Into the average, sharded or not."""
    for name, each in average.items():
        if name not in found:
            raise CheckpointError(f"the checkpoint has no average of {name}; resume with ema = 0")
        source = _as_here(found[name], tuple(each.shape)).to(each.device)
        if isinstance(each, DTensor):
            source = distribute_tensor(source, each.device_mesh, each.placements)
        each.copy_(source)


def begin(folder: Path, step: int) -> Path:
    """The folder that a checkpoint is written to before it gets its name."""
    draft = folder / f".step-{step:08d}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    with _writing(draft):
        draft.mkdir(parents=True)
    return draft


@contextlib.contextmanager
def _writing(draft: Path, *, shared: bool = False) -> Iterator[None]:
    """What cannot be written is told, and the draft is gone, unless others may be writing to it."""
    try:
        yield
    except (OSError, need("safetensors").SafetensorError) as error:
        if not shared:
            shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"{_target(draft)} could not be written: {error}; the checkpoints before it are as "
            "they were"
        ) from error


def _target(draft: Path) -> Path:
    """What a draft is called once it is whole."""
    return draft.with_name(draft.name.removeprefix(".").removesuffix(".draft"))


def write_pool(draft: Path, rank: int, state: dict[str, Any]) -> None:
    """The pool of one rank, which writes it itself: it may be large."""
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    facts = {name: x for name, x in state.items() if not isinstance(x, Tensor)}
    with _writing(draft, shared=True):
        write_tensors(draft / f"pool-{rank:05d}.safetensors", tensors)
        (draft / f"pool-{rank:05d}.json").write_text(json.dumps(facts))


def load_pool(folder: Path, rank: int) -> dict[str, Any] | None:
    """The pool of a rank, if there is one for it."""
    path = folder / f"pool-{rank:05d}.safetensors"
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is gone since it was chosen, and its pools with it; resume again"
        )
    if not path.exists():
        return None
    facts: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return {**read_weights(path), **facts}


def num_pools(folder: Path) -> int:
    """How many ranks have left a pool."""
    return len(list(folder.glob("pool-*.safetensors")))


def save(draft: Path, shot: Snapshot) -> Path:
    """Write the rest and rename it: whoever reads finds all of it or nothing."""
    target = _target(draft)
    with _writing(draft):
        _write_all(draft, shot)
        _remove(target)  # of a run that went on from before it
        os.replace(draft, target)
        _sync(target.parent)
    return target


def _write_all(draft: Path, shot: Snapshot) -> None:
    moments, scalars = _apart(shot.optimizer)
    for name, tensors in ((MODEL, shot.model), (EMA, shot.ema), (OPTIMIZER, moments)):
        if tensors:
            write_tensors(draft / name, tensors)
    known = {"format": FORMAT, "step": shot.step, "samples": shot.samples, "optimizer": scalars}
    (draft / STATE).write_text(json.dumps({**known, **shot.about}, indent=1))
    manifest = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in sorted(draft.iterdir())
    }
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for file in draft.iterdir():
        _sync(file)
    _sync(draft)


def _apart(optimizer: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by "weight/name", and the rest."""
    tensors: dict[str, Tensor] = {}
    groups = [
        {name: x.tolist() if isinstance(x, Tensor) else x for name, x in group.items()}
        for group in optimizer.get("param_groups", [])
    ]
    rest: dict[str, Any] = {"state": {}, "param_groups": groups}
    for weight, own in optimizer.get("state", {}).items():
        tensors |= {f"{weight}/{name}": x for name, x in own.items() if isinstance(x, Tensor)}
        rest["state"][weight] = {n: x for n, x in own.items() if not isinstance(x, Tensor)}
    return tensors, rest


def _joined(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """What was taken apart."""
    state: dict[str, Any] = {weight: dict(own) for weight, own in rest["state"].items()}
    for key, tensor in tensors.items():
        weight, name = key.rsplit("/", 1)
        state[weight][name] = tensor
    return {"state": state, "param_groups": rest["param_groups"]}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(folder: Path) -> Snapshot:
    """Read a checkpoint whose files are as they were written."""
    check(folder)
    state = load_state(folder)
    names = (MODEL, EMA, OPTIMIZER)
    there = {name: (folder / name).exists() for name in names}
    model, ema, moments = (read_weights(folder / name) if there[name] else {} for name in names)
    optimizer = _joined(moments, state["optimizer"])
    return Snapshot(state["step"], state["samples"], model, ema, optimizer, state, folder)


def load_state(folder: Path) -> dict[str, Any]:
    """All but the tensors."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE} is damaged or missing: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} is of format {state.get('format')}, and this tilewise reads {FORMAT}; use "
            f"the version that wrote it: {state.get('versions')}"
        )
    return state


def check(folder: Path) -> None:
    """Raise unless every file is as it was written."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint, it has no {MANIFEST}; give a folder such as "
            "runs/NAME/checkpoints/step-00000100"
        )
    why = _damage(folder)
    if why:
        raise CheckpointError(f"{folder} is damaged: {why}; resume from an older one")


def _damage(folder: Path) -> str:
    """What of it is not as it was written; empty if all is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        wrong = [name for name, known in manifest.items() if not _is_whole(folder / name, known)]
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{MANIFEST} cannot be read, {error}"
    if wrong or STATE not in manifest or MODEL not in manifest:
        return f"{', '.join(wrong) or MANIFEST} is not as it was written"
    return ""


def _is_whole(file: Path, known: dict[str, Any]) -> bool:
    right_size = file.is_file() and file.stat().st_size == known["bytes"]
    return bool(right_size and sha256_of(file) == known["sha256"])


def steps_in(folder: Path) -> list[Path]:
    """Its checkpoints, oldest first."""
    return sorted(folder.glob("step-*[0-9]"))


def latest(folder: Path, say: Callable[[str], object] | None = None) -> Path | None:
    """The newest one that is whole; None if there is none at all, damaged ones being an error.

    `say` is told which are passed over, and why.
    """
    damaged: list[str] = []
    for found in reversed(steps_in(folder)):
        why = _damage(found)
        if not why:
            if damaged and say is not None:
                say(f"{'; '.join(damaged)}, going on from {found.name}")
            return found
        damaged.append(f"{found.name} is damaged ({why})")
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole: {'; '.join(damaged)}; bring one back from a "
            "copy, or begin again with another --name"
        )
    return None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest that are whole."""
    whole_ones = [found for found in steps_in(folder) if _is_sound(found)]
    for old in whole_ones[:-keep]:
        _remove(old)


def _remove(found: Path) -> None:
    """Under another name first: what is half gone is not taken for a damaged checkpoint."""
    aside = found.with_name(f".{found.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is not there, or not to be moved
        os.replace(found, aside)
    shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what a run left that was killed while it wrote or removed a checkpoint."""
    for left in (*folder.glob(".step-*.draft"), *folder.glob(".step-*.old")):
        shutil.rmtree(left, ignore_errors=True)


def forget_after(folder: Path, step: int) -> None:
    """Put aside checkpoints beyond a step that a run goes on from: they are of another branch."""
    for found in steps_in(folder):
        if int(found.name.removeprefix("step-")) > step:
            aside = found.with_name(f".{found.name}.left")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(found, aside)


def _is_sound(folder: Path) -> bool:
    """Cheaply: every file is there and of its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes = (
            (folder / name).stat().st_size == known["bytes"] for name, known in manifest.items()
        )
        return all(sizes)
    except (OSError, ValueError, TypeError, KeyError):
        return False
