"""What a run shows while it runs: bars where someone watches, a line now and then elsewhere."""

import sys
import time
from typing import Any


class Screen:
    """The state of a run, and of what takes a while within it.

    Bars are shown inside of a `with`; the screen of a rank that is not the first shows nothing.
    """

    QUIET_S = 10.0  # between lines where nobody watches

    def __init__(self, *, shown: bool) -> None:
        from rich.console import Console, Group  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text  # noqa: PLC0415

        self.console = Console(quiet=not shown, soft_wrap=True, markup=False)
        self.shown, self.watched = shown, shown and self.console.is_terminal
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        # The names of data are no markup. A step may take minutes: its speed is that of hours.
        name = TextColumn("{task.description}", markup=False)
        self.bars = Progress(name, *columns, speed_estimate_period=7200.0)
        # Below the bars: beside them they would not fit into 80 columns.
        self.numbers = Text()
        self.live = Live(Group(self.bars, self.numbers), console=self.console, transient=True)
        self.tasks: dict[str, Any] = {}
        self.said = 0.0

    def __enter__(self) -> "Screen":
        if self.watched:
            self.live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def step(self, step: int, steps: int, numbers: dict[str, float]) -> None:
        """After a step of training, or before the first, which has no numbers."""
        self._update("training", step, steps)
        if numbers:
            self.numbers.plain = shown(numbers)
            left = f"{numbers.get('eta_s', 0.0):.0f} s left"
            self._line(f"step {step}/{steps}  {self.numbers}  {left}", last=step == steps)

    def part(self, what: str, done: int, total: int) -> None:
        """So many of what is done on the side, such as the images of an evaluation."""
        self._update(what, done, total)
        if done >= total:
            self.bars.remove_task(self.tasks.pop(what))
        elif done:
            self._line(f"{what}: {done:,}/{total:,}")

    def say(self, text: Any) -> None:
        """A line, or a table."""
        self.console.print(text, highlight=False)

    def _update(self, what: str, done: int, total: int) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.bars.add_task(what, total=total)
        self.bars.update(self.tasks[what], completed=done)

    def _line(self, text: str, *, last: bool = False) -> None:
        now = time.monotonic()
        if self.shown and not self.watched and (last or now - self.said > self.QUIET_S):
            self.said = now
            self.say(text)
            sys.stdout.flush()


def counted(count: int, name: str) -> str:
    """So many of them."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def short(count: int) -> str:
    """In millions, where it is that many."""
    return f"{count / 1e6:.1f} M" if count >= 100_000 else f"{count:,}"


def shown(numbers: dict[str, float]) -> str:
    """The numbers of a step on a line."""
    forms = {
        "loss": "loss {:.4f}",
        "scale": "scale {:.1f}",
        "lr": "lr {:.1e}",
        "pairs_per_s": "{:,.0f} pairs/s",
        "memory_mib": "{:,.0f} MiB",
        "skipped": "{:.0f} skipped",
    }
    return "  ".join(form.format(numbers[name]) for name, form in forms.items() if name in numbers)
