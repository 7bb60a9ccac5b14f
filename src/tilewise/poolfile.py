"""The file of a pool: locked, its room taken, and a note beside it of what is in it."""

import errno
import gc
import json
import os
from pathlib import Path
from typing import IO, Any

import torch

from tilewise.errors import DeviceError, ShapeError
from tilewise.locks import is_locked
from tilewise.mapped import Mapped

# Of file systems that cannot take room beforehand.
CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class PoolFile:
    """Features (size, dim) in a file that is one pool's for as long as this is there.

    A note beside it says what it holds, and by a token of which state. The token is "" while a
    change is being made, and where the file is not the one that was noted: no state has that one.
    """

    def __init__(self, where: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.path = _checked_path(where)
        self._lock = _locked(self.path)
        self._facts = {"shape": list(shape), "dtype": str(dtype)}
        # Of a file that was deleted, or could not be made, nothing is left to be noted.
        noted = self._noted() if self.path.stat().st_size else {}
        known = {name: x for name, x in noted.items() if name != "token"}
        # Before it is mapped, which may make it longer.
        if known not in ({}, self._facts):
            raise ShapeError(
                f"the file {self.path} must hold a pool of {self._facts}, got {known}; name "
                f"another file, or delete it and {_beside(self.path).name}"
            )
        self.token: str = noted.get("token", "")
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        if self.path.stat().st_size != num_bytes:
            # First, so that no zeros are taken for what was noted; nothing is of what does not fit.
            self.note("") if known else _beside(self.path).unlink(missing_ok=True)
            _allocate(self.path, num_bytes)
            self.note("")
        self._mapped = Mapped(self.path, self._lock, shape[0] * shape[1], dtype)
        self.features = self._mapped.tensor.view(shape)

    def note(self, token: str) -> None:
        """Write down what is in it, by a token that every change makes anew."""
        self.token = token
        new = _beside(self.path).with_suffix(".new")
        new.write_text(json.dumps({"token": token, **self._facts}))
        new.replace(_beside(self.path))

    def _noted(self) -> dict[str, Any]:
        """What was written down beside it; nothing beside a new one."""
        path = _beside(self.path)
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text())
        except ValueError:  # no JSON, or no text
            found = None
        if not isinstance(found, dict) or found.keys() != {"token", *self._facts}:
            raise DeviceError(
                f"the file {path} must say what the pool beside it holds, and is damaged; delete "
                "both, or name another file"
            )
        return found


def is_path(where: Any) -> bool:
    """Whether it is meant as a path: a bare word may be a misspelt place."""
    word = isinstance(where, str) and Path(where).name == where and not Path(where).suffix
    return isinstance(where, (str, Path)) and not word


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _checked_path(where: Any) -> Path:
    """A path that a pool can have."""
    if not is_path(where) or not Path(where).parent.is_dir() or Path(where).is_dir():
        raise DeviceError(
            "where must be 'device', 'host' or a path in a folder that is there (./NAME for one "
            f"here), got {where!r}"
        )
    path = Path(where).absolute()  # wherever the process goes from here
    if path.exists() and path.stat().st_size and not _beside(path).exists():
        raise DeviceError(
            f"the file {path} is there and is no pool: nothing beside it says so; name another"
        )
    return path


def _allocate(path: Path, num_bytes: int) -> None:
    """Take the room now: to write where a disk has none left would kill the process."""
    if not hasattr(os, "posix_fallocate"):  # macOS, Windows
        return
    with path.open("r+b") as file:
        before = os.fstat(file.fileno()).st_size
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            if error.errno in CANNOT:
                return
            os.ftruncate(file.fileno(), before)
            raise DeviceError(
                f"the pool wants {num_bytes:,} bytes in the file {path}, and the disk has not got "
                f"them: {error.strerror}; make room, name another disk, or take a smaller pool"
            ) from error


def _locked(path: Path) -> IO[bytes]:
    """The file, made if need be, open for reading, and locked for as long as it stays open."""
    file = path.open("a+b")
    if not is_locked(file):
        gc.collect()  # a pool that nobody has any more may not have been taken away yet
        if not is_locked(file):
            raise DeviceError(
                f"the file {path} is another pool's, here or in another process; name one file "
                "for each pool and rank, or delete that pool first"
            )
    return file
