"""How a run goes on from a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewise.errors import OptionError
from tilewise.models.image_text import check_unchanged
from tilewise.train import checkpoint, logs
from tilewise.train.checkpoint import Snapshot
from tilewise.train.config import Config
from tilewise.train.setup import Ranks
from tilewise.train.stepping import Stepper

Say = Callable[[str], object]

# What a run cannot go on with another of: weights, moments or the place in the data would not fit.
DECIDING = (
    "model.kind", "model.model", "model.image_size", "model.max_length", "loss.loss", "optim.opt",
    "step.batch_size", "run.seed", "data.train_data", "data.shuffle_window",
)  # fmt: skip


def find(config: Config, ranks: Ranks, say: Say) -> Snapshot | None:
    """The checkpoint to go on from, alike on all ranks, if it is of such a run."""
    run = config.run
    if not run.resume:
        return None
    folder, latest = Path(run.runs) / run.name, run.resume == "latest"  # which needs a name

    def named() -> Path | None:
        return checkpoint.latest(folder / "checkpoints", say) if latest else Path(run.resume)

    found: Path | None = ranks.ask_first(named)
    if found is None:
        say(f"{folder} has no checkpoint: from the first step on")
        return None
    shot = checkpoint.load(found)
    _check_same(config, shot.about.get("config", {}), found)
    check_unchanged(config.model.model, shot.about.get("model", {}), found)
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
    state = checkpoint.load_pool(found, stepper.ranks.rank)
    kept = state is None or stepper.objective.load_pool(state)
    lost = [rank for rank, each in enumerate(stepper.ranks.gather(kept)) if not each]
    if lost:
        say(
            f"the pool's file {stepper.config.step.pool_where} is not as it was at {found.name}, "
            f"which does not hold its features: ranks {lost} begin with an empty pool"
        )


def _check_same(config: Config, known: dict[str, Any], found: Path) -> None:
    """A checkpoint goes on as the run that it is of."""
    for name in DECIDING:
        section, key = name.split(".")
        then, now = known.get(section, {}).get(key), getattr(getattr(config, section), key)
        if then is not None and then != now:
            raise OptionError(
                f"{found} is of a run with {name} = {then!r}, got {now!r}; resume with the same, "
                f"or begin a run of its own with {_weights_of(config, found)}"
            )


def _weights_of(config: Config, found: Path) -> str:
    """How another run begins with those of a checkpoint."""
    if config.model.kind == "text":
        return f"--model FOLDER, after tilewise export {found} FOLDER"
    return f"--pretrained {found / checkpoint.MODEL}"
