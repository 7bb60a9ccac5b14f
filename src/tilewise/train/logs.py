"""What a run tells of itself: numbers by step, and versions."""

import contextlib
import json
import math
import platform
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise import measure
from tilewise.errors import OptionError
from tilewise.models.libraries import EXTRA, need

METRICS, WANDB_ID = "metrics.jsonl", ".wandb-id"


def versions() -> dict[str, str]:
    """Of what a run depends on, and the commit of a checkout (empty if it is installed)."""
    from importlib import metadata  # noqa: PLC0415

    names = (
        "numpy",
        "open_clip_torch",
        "timm",
        "sentence-transformers",
        "triton",
        "safetensors",
        "pillow",
    )
    found = {"tilewise": tilewise.__version__, "python": platform.python_version()}
    found["torch"] = torch.__version__  # with the build, which metadata may leave out
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "commit": measure.commit()}


def check_reporters(report_to: tuple[str, ...]) -> None:
    """Raise unless what else is asked for is installed."""
    for name in report_to:
        need(name, EXTRA if name == "tensorboard" else f"pip install {name}")


class Log:
    """Numbers by step: metrics.jsonl, and what else is asked for.

    Only the first rank has one that writes. `since` is the step that the run goes on from, `about`
    its configuration.
    """

    def __init__(
        self,
        folder: Path | None,
        report_to: tuple[str, ...] = (),
        *,
        since: int = 0,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.writers: list[Any] = []
        if folder is not None and "tensorboard" in report_to:
            self.writers.append(_TensorBoard(folder, since))
        if folder is not None and "wandb" in report_to:
            self.writers.append(_Wandb(folder, about or {}))

    def add(self, step: int, **numbers: float) -> None:
        """A line of them, if there are any."""
        if self.folder is None or not numbers:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        path = self.folder / METRICS
        try:
            with path.open("a") as file:
                file.write(_line({"step": step, "time": now, **numbers}))
        except OSError as error:
            raise OptionError(
                f"{path} could not be written at step {step}: {error.strerror}; make room, then go "
                "on from the last checkpoint with --resume latest"
            ) from error
        for writer in self.writers:
            writer.add(step, numbers)

    def rows(self) -> list[dict[str, Any]]:
        """All lines so far; of steps that were done twice the later."""
        if self.folder is None or not (self.folder / METRICS).exists():
            return []
        lines = list(_whole_lines(self.folder / METRICS))
        last = {(row["step"], "loss" in row): row for row in lines}
        return sorted(last.values(), key=lambda row: (row["step"], "loss" not in row))

    def close(self) -> None:
        """Write what is left."""
        for writer in self.writers:
            writer.close()


def _line(row: dict[str, Any]) -> str:
    """As JSON, which has no number for what is not finite."""
    known = {
        name: None if isinstance(x, float) and not math.isfinite(x) else x
        for name, x in row.items()
    }
    return json.dumps(known) + "\n"


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """But for one that was cut off when a run was killed."""
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def forget_after(folder: Path, step: int) -> None:
    """Put aside what the log has of steps beyond one that a run goes on from: another branch."""
    path = folder / METRICS
    kept, left = list[str](), list[str]()
    for row in _whole_lines(path):
        (left if row["step"] > step else kept).append(_line(row))
    if left:
        with path.with_name(f".{METRICS}.left").open("a") as aside:
            aside.writelines(left)
    new = path.with_name(f".{METRICS}.new")
    new.write_text("".join(kept))
    new.replace(path)


class _TensorBoard:
    def __init__(self, folder: Path, since: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        # What it has of later steps is of another branch.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=since + 1)

    def add(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    """A run there for a run here: its id is kept in the folder, for those that go on."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        known = folder / WANDB_ID
        own = known.read_text() if known.exists() else None
        try:
            self.run = need("wandb").init(
                project="tilewise", name=folder.name, dir=folder, config=about, id=own,
                resume="allow",
            )  # fmt: skip
        except Exception as error:  # of the network, of who is logged in: its own, and others'
            raise OptionError(
                f"wandb begins no run: {error}; log in with `wandb login`, set WANDB_MODE=offline, "
                "or leave wandb out of --report-to"
            ) from error
        known.write_text(self.run.id)

    def add(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


def memory_mib(device: torch.device) -> float:
    """Most memory that was in use: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource  # noqa: PLC0415

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
