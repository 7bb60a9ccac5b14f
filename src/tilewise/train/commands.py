"""`tilewise train`, `tilewise eval`, `tilewise export`: from the command line to a configuration
and back.
"""

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tilewise.config import Config, EvalConfig, ModelConfig
from tilewise.errors import CheckpointError, OptionError
from tilewise.evaluate.report import metrics_table, save_metrics
from tilewise.evaluate.suite import Suite, pictures
from tilewise.models import two_views
from tilewise.models.base import PairModel
from tilewise.models.image_text import CONFIG
from tilewise.models.libraries import need
from tilewise.train import checkpoint, configfile, runfolder
from tilewise.train.build import make_model, model_of
from tilewise.train.checks import warn_of_old_torch
from tilewise.train.loop import RESULTS, train
from tilewise.train.screen import Screen
from tilewise.train.setup import start
from tilewise.train.stepping import autocast

DEFAULT = "emoji"
SENTENCES = "modules.json"  # in a folder of sentence-transformers


def train_command(args: Sequence[str]) -> int:
    """tilewise train [RECIPE or TOML file] [--field value ...] [--print-config]."""
    recipe, flags = _first(args, DEFAULT)
    if any(flag in ("-h", "--help") for flag in flags):
        print(
            f"recipes: {', '.join(configfile.recipes())}\n"
            "--print-config prints the configuration that would run, and leaves.\n"
        )
    printed = "--print-config" in flags
    flags = [flag for flag in flags if flag != "--print-config"]
    config = configfile.read(recipe)
    if any(flag.split("=")[0] == "--resume" for flag in flags):
        config = _where_it_lies(config, Path(recipe).absolute())
    config = configfile.with_flags(config, flags, prog="tilewise train [RECIPE]")
    if printed:
        print(configfile.to_toml(config))
        return 0
    _need_all()
    stopped_by = train(config).signal
    return 128 + stopped_by if stopped_by else 0


def _where_it_lies(config: Config, file: Path) -> Config:
    """The configuration of a run's folder is of the run in that folder, from wherever it is read,
    and wherever it was moved.
    """
    folder, run = file.parent, config.run
    of_a_run = file.name == runfolder.CONFIG and (folder / "checkpoints").is_dir()
    if not of_a_run or (Path(run.runs) / run.name).resolve() == folder.resolve():
        return config
    return replace(config, run=replace(run, runs=str(folder.parent), name=folder.name))


def _need_all() -> None:
    """What every run shows, draws, saves and reads with; before it takes its time."""
    warn_of_old_torch()
    for name in ("rich", "matplotlib", "safetensors", "PIL"):
        need(name)


def eval_command(args: Sequence[str]) -> int:
    """tilewise eval RUN, CHECKPOINT or recipe [--field value ...]."""
    place, flags = _first(args, "")
    found, base = _found(place)
    config = configfile.with_flags(base, flags, prog="tilewise eval [RUN]")
    _check_asked(config.eval)
    _need_all()
    ranks = start(config.run.device, config.run.timeout_s)
    screen = Screen(shown=ranks.is_first)
    loading = (config.data.workers, config.data.index_folder)
    suite = Suite(config.eval, *loading, ranks, screen.part, screen.say)
    model = _loaded(config, found)
    suite.check(model)
    if found is None and not _has_weights(config.model):
        screen.say("no run is named: this measures weights that were drawn at random")
    folder = (
        Path(config.run.runs) / "eval"
        if found is None
        else found.parent.parent / f"eval-{found.name}"
    )
    if ranks.is_first:
        _clear(folder)
    try:
        with autocast(config, ranks.device), screen:
            suite.run(model.to(ranks.device), folder if ranks.is_first else None)
    except BaseException:  # takes nothing with it that was measured before
        if ranks.is_first and suite.metrics:
            screen.say("the evaluation did not get to its end; what it had measured:")
            _tell(suite.metrics, folder, screen)
        raise
    ranks.stop()
    if ranks.is_first:
        _tell(suite.metrics, folder, screen)
    return 0


def _clear(folder: Path) -> None:
    """Make a folder for results, or remove those that an earlier evaluation left there."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*pictures(folder), folder / RESULTS):
        path.unlink(missing_ok=True)


def _check_asked(config: EvalConfig) -> None:
    """Raise unless something is to be measured."""
    if not (config.retrieval or config.zero_shot or config.probe or config.localise):
        raise OptionError(
            "there is nothing to measure on; name data with --retrieval, --zero-shot, --probe or "
            "--localise"
        )


def _has_weights(model: ModelConfig) -> bool:
    """Whether it begins with some: of a file, or of a folder, as text encoders always do."""
    return bool(model.pretrained) or Path(model.model).is_dir()


def _tell(metrics: dict[str, float], folder: Path, screen: Screen) -> None:
    """Write and print what was measured."""
    save_metrics(folder / RESULTS, metrics)
    screen.say(metrics_table(metrics))
    written = [RESULTS, *(path.name for path in pictures(folder))]
    screen.say(f"saved to {folder}: {', '.join(written)}")


def export_command(args: Sequence[str]) -> int:
    """tilewise export RUN-or-CHECKPOINT FOLDER."""
    if any(flag in ("-h", "--help") for flag in args):
        print(
            "tilewise export RUN-or-CHECKPOINT FOLDER: for open_clip, sentence-transformers, timm"
        )
        return 0
    if len(args) != 2 or args[0].startswith("-"):
        raise OptionError(
            "tilewise export takes a run or a checkpoint, and the folder to write: "
            "tilewise export runs/NAME model"
        )
    found = _checkpoint(args[0])
    target = Path(args[1])
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OptionError(f"the folder to export to must be new or empty, got {target}")
    _loaded(_config_of(found), found).export(target)
    print(f"exported {found} to {target}")
    return 0


def _found(place: str) -> tuple[Path | None, Config]:
    """A checkpoint and its configuration; or a model that was exported; or a recipe.

    A TOML file in a run's folder is one for the weights of that run.
    """
    path = Path(place)
    if path.suffix == ".toml" and path.is_file() and (path.parent / "checkpoints").is_dir():
        config = configfile.read(place)
        return _checkpoint(str(path.parent)), replace(config, run=replace(config.run, resume=""))
    if place and not path.exists() and not place.endswith(".toml"):
        _check_recipe(place)
    if not place or not path.is_dir():
        return None, configfile.read(place or DEFAULT)
    base = configfile.read(DEFAULT)
    if (path / CONFIG).is_file():
        return None, replace(base, model=replace(base.model, model=place))
    nothing = EvalConfig(retrieval=(), zero_shot=())
    if (path / SENTENCES).is_file():
        texts = replace(base.model, kind="text", model=place, pretrained="")
        return None, replace(base, model=texts, eval=nothing)
    if (path / two_views.CONFIG).is_file():
        views = ModelConfig(kind="simclr", **two_views.read_export(path))
        loss = replace(base.loss, loss="nt_xent")
        return None, replace(base, model=views, loss=loss, eval=nothing)
    found = _checkpoint(place)
    return found, _config_of(found)


def _check_recipe(place: str) -> None:
    """Raise unless a name that is no file or folder is a recipe's: most people name a run."""
    names = configfile.recipes()
    if place in names:
        return
    parent = Path(place).parent
    runs = [str(each) for each in parent.iterdir() if each.is_dir()] if parent.is_dir() else []
    near = ", ".join(difflib.get_close_matches(place, [*runs, *names], 3))
    hint = f"near it: {near}" if near else "give a folder such as runs/NAME"
    raise CheckpointError(
        f"there is no run folder {place!r}, nor a checkpoint, an exported model or a recipe of "
        f"that name; {hint}"
    )


def _first(args: Sequence[str], default: str) -> tuple[str, list[str]]:
    """The name that stands before all flags, if one does."""
    if args and not args[0].startswith("-"):
        return args[0], list(args[1:])
    return default, list(args)


def _checkpoint(place: str) -> Path:
    """Of a run, its newest that is whole; or the one named."""
    path = Path(place)
    if (path / checkpoint.MANIFEST).is_file():
        return path
    found = checkpoint.latest(path / "checkpoints", print)
    if found is None:
        raise CheckpointError(
            f"{place} is no checkpoint and no run with one; give a folder such as runs/NAME"
        )
    return found


def _config_of(found: Path) -> Config:
    """That of the run that a checkpoint belongs to."""
    checkpoint.check(found)
    tables = checkpoint.load_state(found)["config"]
    config = configfile.from_tables(tables, str(found))
    return replace(config, run=replace(config.run, resume=""))


def _loaded(config: Config, found: Path | None) -> PairModel:
    """With the weights of a checkpoint: their average, if it has one."""
    if found is None:
        return make_model(config)
    return model_of(config, checkpoint.load(found), average=True)
