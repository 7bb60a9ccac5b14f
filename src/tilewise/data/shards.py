"""WebDataset's tar shards with random access: any sample at any time, none lost in silence."""

import bisect
import glob
import hashlib
import itertools
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

from tilewise.data import decode
from tilewise.data.manifest import Manifest, read_manifest, sha256_of
from tilewise.data.samples import CAPTIONS, Sample, default_id, is_whole, place_of, sample_of
from tilewise.data.tarindex import PARTS, KeptIndex, TarIndex, index_tar
from tilewise.errors import DataError, OptionError

OPEN_FILES = 16  # kept open at a time, by each thread
THREADS = 8  # that index shards: more than cores, since they wait for the disk
CLASSES = "classes.txt"
MANY = 32  # shards, from which on a bar is shown

Index = TarIndex | KeptIndex

_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "image": decode.decode_image,
    "features": decode.decode_array,
    "text": decode.decode_captions,
    "label": decode.decode_label,
}
# Fields of json that say what a member of its own does.
_IN_JSON = {"text": CAPTIONS, "label": ("label",)}

T = TypeVar("T")


class Shards:
    """The samples of tar shards in their order: `Shards("data/{000000..000099}.tar")[12345]`.

    A sample is made of consecutive members of one name: jpg, jpeg, png, webp become "image", npy
    "features", txt "text" (a caption a line), cls "label"; json may hold caption, captions or text,
    label (a whole number; what else it says is no label), id, query, positive and negatives, and
    gives way to members of their own. All others are left alone. Members are read when they are
    asked for, in any thread or forked process.

    Opening reads all headers and compares them with a `manifest.json` beside the shards, if there
    is one; a shard that is cut off, damaged, missing or not as told raises a DataError.

    Args:
        pattern: a file, a folder of .tar files, a glob, or braces; several joined by "::".
        verify: also compare the SHA-256 of every shard that has one in a manifest: reads all.
        index_folder: where indexes are kept, for the next opening and instead of in memory (it is
            made if need be); nothing is written without it.
        progress: whether to show a bar; None shows one for many shards to whoever watches.
    """

    def __init__(
        self,
        pattern: str | Path,
        *,
        verify: bool = False,
        index_folder: str | Path | None = None,
        progress: bool | None = None,
    ) -> None:
        self.paths = find_shards(str(pattern))
        opener = _Opener(self.paths, verify, index_folder)
        found = dict(_watched(opener, len(self.paths), progress))
        self._indexes = [found[path] for path in self.paths]
        # First sample of each shard, and their number.
        self._firsts = list(itertools.accumulate(map(len, self._indexes), initial=0))
        if not len(self):
            message = f"want samples in {pattern}, got {len(self.paths)} shards without any"
            raise DataError(message, "missing")
        self._files = _Files()

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: SupportsIndex) -> Sample:
        return self._read(place := place_of(index, len(self)), partial(_decoded, place))

    def row(self, place: int) -> Sample:
        """A sample without its image, which is not read."""
        return self._read(place, partial(_decoded, place, partly=True), set(PARTS) - {"image"})

    def image_bytes(self, place: int) -> bytes:
        """The member that is a sample's image, as it is."""
        return self._read(place, lambda data: data["image"], {"image"})

    def _read(
        self, place: int, make: Callable[[dict[str, bytes]], T], wanted: Collection[str] = PARTS
    ) -> T:
        """What is made of a sample's members, by part."""
        shard = bisect.bisect_right(self._firsts, place) - 1
        within = place - self._firsts[shard]
        try:
            file = self._open(shard)
            members = [each for each in file.lookup.members(within) if each[0] in wanted]
            return make({part: file.read(offset, size) for part, offset, size in members})
        except DataError as error:
            where = f"sample {place} ({within} of {self.paths[shard]})"
            raise DataError(f"{where}: {error}", error.kind) from error

    @property
    def classes(self) -> list[str]:
        """Names of labels, from `classes.txt` beside the first shard, a line each; or none."""
        path = self.paths[0].parent / CLASSES
        return decode.read_lines(path) if path.is_file() else []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None}  # another process opens its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _files=_Files())

    def _open(self, shard: int) -> "_File":
        """A shard to read from: forks share files, but no position in them."""
        files = self._files.open
        file = files.pop(shard, None) or _File(self.paths[shard], self._indexes[shard])
        files[shard] = file  # the last one used
        while len(files) > OPEN_FILES:
            files.popitem(last=False)
        return file


class _Files(threading.local):
    """Open shards of each thread by itself: without a lock, which a fork could leave locked."""

    def __init__(self) -> None:
        self.open: OrderedDict[int, _File] = OrderedDict()


class _File:
    """An open shard and its index, closed when nobody holds it any more."""

    def __init__(self, path: Path, index: Index) -> None:
        self.descriptor = -1
        self.lookup = index.lookup()
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise DataError("the shard was there and is not any more", "missing") from error
        if (got := os.fstat(self.descriptor).st_size) != index.size:
            raise DataError(
                f"the shard had {index.size} bytes when it was opened and has {got} now; open it "
                "again",
                "shard",
            )

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes, in as many calls as the system needs."""
        data = os.pread(self.descriptor, size, offset)
        while len(data) < size:
            more = os.pread(self.descriptor, size - len(data), offset + len(data))
            if not more:
                raise DataError(f"want {size} bytes at {offset}, got {len(data)}", "shard")
            data += more
        return data


def find_shards(pattern: str) -> list[Path]:
    """Shards that a pattern names, in its order, those of a folder or glob by name.

    A folder or glob must find all that a manifest there knows.
    """
    patterns = [one for each in pattern.split("::") for one in _braces(each)]
    return [path for one in patterns for path in _files(one)]


def _braces(pattern: str) -> Iterable[str]:
    if "{" not in pattern:
        return [pattern]
    try:
        from braceexpand import braceexpand  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise OptionError(
            f"braces in {pattern!r} need braceexpand, which is not installed; pip install "
            "braceexpand, or use a glob"
        ) from error
    try:
        return list(braceexpand(pattern))
    except ValueError as error:
        raise OptionError(f"braces must come in pairs, got {pattern!r}") from error


def _files(pattern: str) -> list[Path]:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", pattern):
        raise OptionError(
            f"shards must be files here, got {pattern!r}; copy them to a local disk and give that "
            "path (a name with a colon as ./name), nothing is fetched or run"
        )
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    # The name of a folder that is there is no pattern.
    path = Path(glob.escape(str(path)), "*.tar") if path.is_dir() else path
    found = sorted(map(Path, glob.glob(str(path))))
    if not found:
        raise DataError(f"want shards at {pattern}, got none; name files or a folder", "missing")
    for folder in sorted({one.parent for one in found}):
        known = {name for name in read_manifest(folder) or () if fnmatchcase(name, path.name)}
        lost = sorted(known - {one.name for one in found if one.parent == folder})
        if lost:
            raise DataError(
                f"the manifest of {folder} names {len(known)} shards {path.name}, got "
                f"{len(known) - len(lost)}: {', '.join(lost[:9])} missing; copy the shards again",
                "missing",
            )
    return found


class _Opener:
    """Shards with their indexes, each checked against the manifest of its folder."""

    def __init__(self, paths: list[Path], verify: bool, folder: str | Path | None) -> None:
        self.paths = list(dict.fromkeys(paths))  # one that is named twice is read once
        self.verify = verify
        # What is looked up there later must not depend on where the process is then.
        self.folder = None if folder is None else Path(folder).expanduser().absolute()
        self.manifests = {one: read_manifest(one) for one in {path.parent for path in paths}}

    def __iter__(self) -> Iterator[tuple[Path, Index]]:
        with ThreadPoolExecutor(min(THREADS, len(self.paths))) as pool:
            try:
                yield from zip(self.paths, pool.map(self.open, self.paths), strict=True)
            finally:
                pool.shutdown(cancel_futures=True)

    def open(self, path: Path) -> Index:
        """A shard's index."""
        index: Index = index_tar(path) if self.folder is None else _kept(path, self.folder)
        self._check(path, index, self.manifests[path.parent])
        return index

    def _check(self, path: Path, index: Index, manifest: Manifest | None) -> None:
        if manifest is None:
            return
        facts = manifest.get(path.name)
        if facts is None:
            raise DataError(
                f"the manifest beside shard {path} names {len(manifest)} others and not this one; "
                "was it packed with them? Else move it elsewhere",
                "manifest",
            )
        got: dict[str, object] = {"bytes": index.size, "samples": len(index)}
        if self.verify and facts.sha256 is not None:
            got["sha256"] = sha256_of(path)
        for name, value in got.items():
            if value != (wanted := getattr(facts, name)):
                raise DataError(
                    f"the manifest wants {name} = {wanted} of shard {path}, got {value}; copy it "
                    "again, or pack anew",
                    "shard",
                )


def _kept(path: Path, folder: Path) -> KeptIndex:
    """A shard's index from a folder, if it was put there when the shard was as it is now."""
    status = path.stat()
    facts = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    file = folder / f"{hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()}.index"
    try:
        return KeptIndex.open(file)
    except (OSError, ValueError):  # not there yet, or damaged: made again
        index = index_tar(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return index.save(file)
    except OSError as error:
        raise OptionError(
            f"index_folder must be a folder that can be written to, got {folder}: {error}"
        ) from error


def _decoded(place: int, data: dict[str, bytes], *, partly: bool = False) -> Sample:
    if not data and not partly:
        raise DataError("want an image, features, text, json or label, got no such member", "empty")
    sample: Sample = {}
    if "json" in data:
        fields = decode.decode_json(data.pop("json"))
        if not isinstance(fields, dict):
            raise DataError(f"want an object in json, got {type(fields).__name__}", "field")
        given_way = {name for part in data for name in _IN_JSON.get(part, ())}
        if not is_whole(fields.get("label")):  # a name, a list of tags: anybody's "label"
            given_way.add("label")
        sample = sample_of({name: x for name, x in fields.items() if name not in given_way})
    for part, member in data.items():
        sample[part] = _DECODERS[part](member)
    sample.setdefault("id", default_id(sample, place))
    return sample


def _watched(opener: _Opener, total: int, progress: bool | None) -> Iterable[tuple[Path, Index]]:
    """The same, with a bar on standard error, unless it is unwanted or nobody watches."""
    if progress is False or (progress is None and (total < MANY or not sys.stderr.isatty())):
        return opener
    try:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.progress import track  # noqa: PLC0415
    except ImportError:
        return opener
    console = Console(stderr=True)
    return track(opener, "opening shards", total=total, console=console, transient=True)
