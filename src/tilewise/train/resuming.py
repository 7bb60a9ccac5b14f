"""How a run goes on from a checkpoint."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewise.config import Config
from tilewise.errors import OptionError
from tilewise.models.image_text import check_unchanged
from tilewise.ranks import Ranks
from tilewise.train import checkpoint, logs, runfolder
from tilewise.train.checkpoint import Snapshot
from tilewise.train.stepping import Stepper

Say = Callable[[str], object]

# What a run cannot go on with another of: weights, moments or the place in the data would not fit.
DECIDING = (
    "model.kind", "model.model", "model.image_size", "model.max_length", "loss.loss", "optim.opt",
    "step.batch_size", "run.seed", "data.train_data", "data.shuffle_window",
)  # fmt: skip
# Of these, what weights have their shapes by.
SHAPING = ("model.kind", "model.model", "model.image_size", "model.max_length")
# What may change without a word.
HARMLESS = (
    "run.resume", "run.name", "run.runs", "run.device", "run.timeout_s", "run.log_every",
    "run.report_to", "data.workers", "data.index_folder",
)  # fmt: skip


def find(config: Config, ranks: Ranks, say: Say, *, num_samples: int) -> Snapshot | None:
    """The checkpoint to go on from, alike on all ranks, if it is of such a run.

    num_samples: of the data that it goes on with.
    """
    run = config.run
    if not run.resume:
        return None
    # "latest" needs a name; a run's folder stands for its latest, too.
    folder = Path(run.runs) / run.name if run.resume == "latest" else Path(run.resume)

    def named() -> Path | None:
        of_a_run = run.resume == "latest" or runfolder.is_run(folder)
        return checkpoint.latest(folder / "checkpoints", say) if of_a_run else folder

    found: Path | None = ranks.ask_first(named)
    if found is None:
        say(f"{folder} has no checkpoint: from the first step on")
        return None
    shot = checkpoint.load(found)
    changed = _changes(config, shot.about.get("config", {}))
    if shot.about.get("num_samples", num_samples) != num_samples:
        changed["data.num_samples"] = (shot.about["num_samples"], num_samples)
    _check_same(config, changed, found)
    check_unchanged(config.model.model, shot.about.get("model", {}), found)
    _tell(changed, found, say)
    return shot


def resume(stepper: Stepper, folder: Path, shot: Snapshot | None, say: Say) -> int:
    """Go on from a checkpoint, or from the beginning; the step that this is."""
    step = 0 if shot is None else _load(stepper, shot, say)
    if stepper.ranks.is_first:  # what is beyond is of another branch
        checkpoint.forget_after(folder / "checkpoints", step)
        logs.forget_after(folder, step)
    return step


def _load(stepper: Stepper, shot: Snapshot, say: Say) -> int:
    checkpoint.restore(stepper.model, stepper.optimizer, shot)
    if stepper.ema is not None:
        checkpoint.restore_average(stepper.ema.average, shot.ema)
    stepper.load_state(shot.about.get("stepper", {}))
    if stepper.config.step.pool:
        _load_pools(stepper, shot.folder, say)
    return shot.step


def _load_pools(stepper: Stepper, found: Path, say: Say) -> None:
    """Each rank its own; says which negatives are lost."""
    then, now = checkpoint.num_pools(found), stepper.ranks.world
    if then not in (0, now):
        others = list(range(min(then, now), max(then, now)))
        what = "are empty" if then < now else "are left out"
        say(
            f"{found.name} has pools of {then} rank(s), and this run has {now}: "
            f"those of ranks {others} {what}"
        )

    def own() -> bool:
        state = checkpoint.load_pool(found, stepper.ranks.rank)
        return state is None or stepper.objective.load_pool(state)

    kept = stepper.ranks.ask_all(own)
    lost = [rank for rank, each in enumerate(kept) if not each]
    if lost:
        say(
            f"the pool's file {stepper.config.step.pool_where} is not as it was at {found.name}, "
            f"which does not hold its features: ranks {lost} begin with an empty pool"
        )


def _changes(config: Config, known: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What is configured now other than when a checkpoint was saved: then and now, by name."""
    now = json.loads(json.dumps(asdict(config)))  # as a checkpoint tells it
    return {
        f"{section}.{key}": (known[section][key], value)
        for section, values in now.items()
        for key, value in values.items()
        if known.get(section, {}).get(key, value) != value
    }


def _check_same(config: Config, changed: dict[str, tuple[Any, Any]], found: Path) -> None:
    """A checkpoint goes on as the run that it is of."""
    for name in DECIDING:
        if name in changed:
            then, now = changed[name]
            raise OptionError(
                f"{found} is of a run with {name} = {then!r}, got {now!r}; resume with the same, "
                f"or begin a run of its own with another --name{_with_weights(config, name, found)}"
            )


def _with_weights(config: Config, changed: str, found: Path) -> str:
    """How another run begins with those of a checkpoint, if they fit what has changed."""
    if changed in SHAPING:
        return ""
    if config.model.kind == "text":
        return f" and --model FOLDER, after tilewise export {found} FOLDER"
    return f" and --pretrained {found / checkpoint.MODEL}"


def _tell(changed: dict[str, tuple[Any, Any]], found: Path, say: Say) -> None:
    """What goes on in another way, so that nobody does so unawares."""
    told = [
        f"{name.split('.')[1]} = {now!r}, was {then!r}"
        for name, (then, now) in changed.items()
        if name not in HARMLESS
    ]
    if told:
        say(f"going on from {found.name} with other settings: {'; '.join(told)}")
