"""How a run is told to stop: by a signal, which it follows where nothing is lost."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from tilewise.ranks import Ranks

# Windows has no SIGHUP: that of a terminal that is closed.
SIGNALS = tuple(each for each in signal.Signals if each.name in ("SIGINT", "SIGTERM", "SIGHUP"))


class Stopped(KeyboardInterrupt):
    """A signal has ended what was being done; `code` is for the process to end with."""

    def __init__(self, number: int, when: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {when}")
        self.code = 128 + number


def _leave_terminal() -> None:
    """Let what is written go nowhere where a terminal was closed: it would be an error."""
    for output in (1, 2):
        try:
            os.write(output, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output)
            os.close(nowhere)


class Stop:
    """Listens for signals inside of a `with`, in the main thread; elsewhere it hears none.

    Before a run `begins` they end it at once; then they are noted, and the ranks `agree` on them
    after each step. A second one acts as if nobody listened, but for a second SIGHUP.
    """

    def __init__(self) -> None:
        self.begun = False
        self.own = 0  # the signal that this rank has had
        self.heard = 0  # one that some rank has had, once all know of it
        self.former: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                    self.former[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _restore(self, but: int = 0) -> None:
        for number in set(self.former) - {but}:
            signal.signal(number, self.former.pop(number) or signal.SIG_DFL)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        # A terminal that is closed tells it twice: its shell does, and the kernel as that ends.
        hung_up = signal.Signals(number).name == "SIGHUP"
        if hung_up:
            signal.signal(number, signal.SIG_IGN)
        self._restore(but=number if hung_up else 0)
        _leave_terminal()
        if not self.begun:
            raise Stopped(number, "before its first step: nothing was trained or saved")
        self.own = number

    def agree(self, ranks: Ranks, *numbers: float) -> list[float]:
        """Sums of the numbers over ranks; the same message tells all what each has heard."""
        sums = ranks.sums(*numbers, *(float(self.own == number) for number in SIGNALS))
        told = zip(SIGNALS, sums[len(numbers) :], strict=True)
        self.heard = next((int(number) for number, votes in told if votes), 0)
        return sums[: len(numbers)]
