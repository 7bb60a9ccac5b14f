"""Files that belong to one process at a time, for as long as it has them open."""

import importlib
import os
import weakref
from typing import IO, Any

_LOCKED = weakref.WeakSet[IO[Any]]()


def is_locked(file: IO[Any]) -> bool:
    """Whether it is this one's now; where there are no locks nobody is kept out."""
    try:
        fcntl = importlib.import_module("fcntl")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ModuleNotFoundError, OSError):  # Windows; some network file systems
        return True
    _LOCKED.add(file)
    return True


def _unlock_in_child() -> None:
    """A process that is forked off, to load data, must not hold the lock when this one is gone.

    Its numbers of open files stay taken: whoever closes them later must not close another's.
    """
    for file in list(_LOCKED):
        if not file.closed:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, file.fileno(), inheritable=False)
            os.close(null)
    _LOCKED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)
