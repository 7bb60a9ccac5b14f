"""The folder of a run: made for one, held by it while it runs, given back if nothing came of it."""

import gc
import itertools
import json
import os
import socket
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import IO

import torch

from tilewise import measure
from tilewise.config import Config, RunConfig
from tilewise.errors import OptionError
from tilewise.locks import is_locked
from tilewise.train import logs
from tilewise.train.configfile import to_toml

CONFIG, LOCK = "config.toml", ".lock"


def make(config: Config) -> Path:
    """Of its name, of the run that a checkpoint is of, or a new one."""
    run = config.run
    if not run.name and not run.resume:
        return _make_new(Path(run.runs), config.model.model)
    folder = _named(run)
    # One that is there is taken up again only if asked for.
    if not _claim(folder) and not run.resume:
        raise OptionError(
            f"the run folder {folder} is there already; take another --name, or go on with "
            "--resume latest"
        )
    return folder


def former(run: RunConfig) -> Path | None:
    """Of a run that goes on, if it is there."""
    return _named(run) if run.resume and _named(run).is_dir() else None


def _named(run: RunConfig) -> Path:
    return Path(run.runs) / (run.name or _run_of(run))


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a run that has begun."""
    return (folder / "checkpoints").is_dir()


def _run_of(run: RunConfig) -> str:
    """The name of the run that a checkpoint is of, or that was named, if that is one of these."""
    given = Path(os.path.abspath(run.resume))
    place = given / "checkpoints" if is_run(given) else given.parent
    name = place.parent.name
    if not name or (Path(run.runs) / name / "checkpoints").resolve() != place.resolve():
        raise OptionError(
            f"the checkpoint {run.resume} is of no run in {run.runs}; give --name for the folder "
            "to go on in"
        )
    return name


def _make_new(runs: Path, model: str) -> Path:
    """Named for model and time; with a number behind where another run is."""
    first = runs / default_name(model)
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], others) if _claim(folder))


def default_name(model: str) -> str:
    """Model and time."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(model).name)
    return f"{plain}-{datetime.now():%Y%m%d-%H%M%S}"


def _claim(folder: Path) -> bool:
    """Whether it is new. Of runs that begin at once, one makes the log, and so has the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / logs.METRICS).open("x").close()
    except FileExistsError:
        return False
    except OSError as error:
        raise OptionError(
            f"runs must be a folder that can be made, got {folder}: {error.strerror}"
        ) from error
    return True


def hold(folder: Path) -> IO[str]:
    """A file that keeps other runs out of the folder for as long as it is open."""
    try:
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise OptionError(
            f"the run folder must be one to write to, got {folder}: {error.strerror}"
        ) from error
    free = is_locked(file)
    if not free:
        gc.collect()  # a run that nobody has any more may not have been taken away yet
        free = is_locked(file)
    if not free:
        file.seek(0)
        holder = file.read() or "another process"
        file.close()
        raise OptionError(
            f"the run in {folder} is still running, as {holder}; stop it first, or take another "
            "--name"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def give_back(folder: Path) -> None:
    """Let another run have the folder of one that failed before it left anything."""
    log = folder / logs.METRICS
    if log.exists() and not log.stat().st_size and not (folder / "checkpoints").exists():
        log.unlink()


def describe(folder: Path, config: Config, *, step: int) -> None:
    """Write what goes on from a step: its whole configuration; that of the part before is kept.

    Of several that went on from one step, it is the first that says what was before.
    """
    path, before = folder / CONFIG, folder / f".config-until-{step:08d}.toml"
    text = to_toml(replace(config, run=replace(config.run, name=folder.name, resume="")))
    if path.exists() and path.read_text("utf-8") != text and not before.exists():
        path.replace(before)
    path.write_text(text, "utf-8")


def describe_machine(folder: Path, device: torch.device, world: int) -> None:
    """Write with what, and on what, it runs."""
    machine = str(measure.machine(device))
    about = {"versions": logs.versions(), "machine": machine, "ranks": world}
    (folder / "versions.json").write_text(json.dumps(about, indent=1))
