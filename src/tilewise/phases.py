"""How long the phases of a step take and how much memory; a bar for whoever watches."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What a step did and what it cost; peaks only where a device counts them, else 0."""

    samples: int  # rows of the largest encoder's features
    kept: int  # micro-batches whose graph was kept
    replayed: int  # that were run twice
    replay_difference: float  # how far their features were off then, over the length of a row
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
        self.spans: dict[str, tuple[_Moment, _Moment]] = {}
        self.bar = _bar(progress)
        self.task: Any = None

    def __enter__(self) -> "Phases":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
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
        start = _Moment(self.device)
        yield
        if cuda:
            # Memory is given out when work is asked for, not when it is done.
            self.found[f"{name}_peak_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
        self.spans[name] = start, _Moment(self.device)

    def advance(self) -> None:
        """One micro-batch more is done."""
        if self.bar is not None:
            self.bar.advance(self.task)

    def metrics(self, **counts: Any) -> StepMetrics:
        """All of it, once the device is done."""
        times: dict[str, Any] = {
            f"{name}_s": end.since(start) for name, (start, end) in self.spans.items()
        }
        return StepMetrics(**counts, **self.found, **times)


class _Moment:
    """A moment of the host's time, or of a device's, for which the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self.time_s = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def since(self, start: "_Moment") -> float:
        """Seconds."""
        if self.event is None or start.event is None:
            return self.time_s - start.time_s
        self.event.synchronize()
        return float(start.event.elapsed_time(self.event)) / 1000.0


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
