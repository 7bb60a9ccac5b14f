"""How long the phases of a step take and how much memory; a bar for whoever watches."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from tilewise.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What a step did and what it cost; peaks only where a device counts them, else 0."""

    samples: int  # rows of the largest encoder's features
    kept: int  # micro-batches whose graph was kept
    replayed: int  # that were run twice
    replay_difference: float  # how far their features were off then, over the largest of a row
    embed_s: float = 0.0
    loss_s: float = 0.0
    replay_s: float = 0.0
    embed_peak_mib: float = 0.0  # most memory in use at a time, with what there was before
    loss_peak_mib: float = 0.0
    replay_peak_mib: float = 0.0

    def __str__(self) -> str:
        times = ", ".join(
            f"{name} {getattr(self, f'{name}_s'):.3g} s"
            + (f" ({peak:,.0f} MiB)" if (peak := getattr(self, f"{name}_peak_mib")) else "")
            for name in PHASES
        )
        return f"{self.samples:,} samples: {times}; {self.kept} kept, {self.replayed} replayed"


PHASES = ("embed", "loss", "replay")


class Phases:
    """Measures phases one after the other. The device's peak counter starts anew with each."""

    def __init__(self, device: torch.device, progress: bool | None) -> None:
        self.device = device
        self.found: dict[str, Any] = {}
        self.bar = _bar(progress)
        self.task: Any = None

    def __enter__(self) -> "Phases":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[None]:
        """Measure what is done inside, in so many micro-batches."""
        if self.bar is not None:
            self.task = self.bar.add_task(name, total=total)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        start_s = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize(self.device)
            self.found[f"{name}_peak_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
        self.found[f"{name}_s"] = time.perf_counter() - start_s

    def advance(self, count: int = 1) -> None:
        """So many micro-batches more are done."""
        if self.bar is not None:
            self.bar.advance(self.task, count)

    def metrics(self, **counts: Any) -> StepMetrics:
        """All of it."""
        return StepMetrics(**counts, **self.found)


def _bar(progress: bool | None) -> Any:
    """A bar on standard error, unless it is unwanted or nobody watches."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        return None
    try:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415
    except ImportError as error:
        if progress is None:
            return None
        raise OptionError(
            "progress=True needs rich, which is not installed; pip install rich"
        ) from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, force_terminal=progress)
    return Progress(*columns, console=console, transient=True)
