"""Where the samples of a tar shard are, from its headers alone; whatever is missing is an error.

A reader that stops where it understands nothing more loses samples in silence: here every header
has its checksum, every member lies inside the file, and the end mark stands with nothing behind it.
"""

import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.data.samples import whole_of
from tilewise.errors import DataError

BLOCK = 512
END = bytes(2 * BLOCK)
LONGEST_EXTRA = 2**20  # bytes of a header's own data (a long name); more is no name
LARGEST_MEMBER = 2**32 - 1  # bytes: sizes are held in 32 bits, and no part of a sample needs more
REMEDY = "copy or write the shard again"

# What a member is to us, by its extension; others, pickles among them, are never opened.
EXTENSIONS = {
    "jpg": "image", "jpeg": "image", "png": "image", "webp": "image",
    "npy": "features", "txt": "text", "json": "json", "cls": "label",
}  # fmt: skip
PARTS = ("image", "features", "text", "json", "label")

# An index in a file: a head (bytes of the shard, samples, members, checksum), starts, members.
MAGIC = b"tilewise index 2"
HEAD = struct.Struct("<16s3QI")
START = np.dtype([("first", "<u4"), ("sum", "<u4")])  # a sample's first member, and their checksum
MEMBER = np.dtype([("offset", "<u8"), ("size", "<u4"), ("part", "u1")])  # part: place in PARTS

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A regular file in a tar."""

    name: str
    offset: int  # of its data in the shard
    size: int


@dataclass(frozen=True, eq=False)
class TarIndex:
    """Where S samples are: s has the members in [starts[s], starts[s + 1])."""

    size: int  # of the shard in bytes
    starts: NDArray[np.uint32]  # (S + 1,)
    found: NDArray[np.void]  # (M,) of MEMBER

    def __len__(self) -> int:
        return len(self.starts) - 1

    def members(self, sample: int) -> list[tuple[str, int, int]]:
        """(part, offset, size) of each member of a sample; of equal parts the last one first.

        So that a dictionary of them holds the first one.
        """
        return _told(self.found[self.starts[sample] : self.starts[sample + 1]])

    def lookup(self) -> "TarIndex":
        """What has `members`."""
        return self

    def save(self, path: Path) -> "KeptIndex":
        """Write it to a file: whole, or not at all."""
        head = _Head(MAGIC, self.size, len(self), len(self.found))
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # ranks may do so together
        try:
            with new.open("wb") as file:
                file.write(HEAD.pack(*head, _head_sum(head)))
                file.write(self._starts_with_sums().tobytes())
                file.write(self.found.tobytes())
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        return KeptIndex(path, self.size, len(self))

    def _starts_with_sums(self) -> NDArray[np.void]:
        starts = np.zeros(len(self.starts), START)
        starts["first"] = self.starts
        for sample in range(len(self)):
            own = self.found[self.starts[sample] : self.starts[sample + 1]]
            starts["sum"][sample] = _sum_of(sample, own)
        return starts


class _Head(NamedTuple):
    """What an index's file begins with."""

    magic: bytes
    size: int  # of the shard in bytes
    samples: int
    members: int


@dataclass(frozen=True)
class KeptIndex:
    """A `TarIndex` that stays in its file, where each sample is looked up: no memory, however many.

    All processes of a machine share what its cache of files has of it.
    """

    path: Path
    size: int
    samples: int

    def __len__(self) -> int:
        return self.samples

    @classmethod
    def open(cls, path: Path) -> "KeptIndex":
        """What `save` wrote, or a ValueError."""
        with path.open("rb") as file:
            data, there = file.read(HEAD.size), os.fstat(file.fileno()).st_size
        if len(data) < HEAD.size:
            raise ValueError(f"{path} is cut off")
        *facts, told = HEAD.unpack(data)
        head = _Head(*facts)
        wanted = _place_of_members(head.samples) + head.members * MEMBER.itemsize
        if head.magic != MAGIC or told != _head_sum(head) or there != wanted:
            raise ValueError(f"{path} is no index, or damaged")
        return cls(path, head.size, head.samples)

    def lookup(self) -> "_Lookup":
        """What has `members`, with the file open."""
        return _Lookup(self)


class _Lookup:
    """The file of an index, closed when nobody holds it any more."""

    def __init__(self, index: KeptIndex) -> None:
        self.index, self.descriptor = index, -1
        try:
            self.descriptor = os.open(index.path, os.O_RDONLY)
        except OSError as error:
            raise DataError(
                f"the index {index.path} was there and cannot be opened any more: {error}",
                "missing",
            ) from error

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def members(self, sample: int) -> list[tuple[str, int, int]]:
        """As of a `TarIndex`."""
        (first, wanted), (last, _) = self._read(2, HEAD.size + sample * START.itemsize, START)
        at = _place_of_members(self.index.samples) + int(first) * MEMBER.itemsize
        found = self._read(max(0, int(last) - int(first)), at, MEMBER)
        if _sum_of(sample, found) != wanted:
            raise self._damaged()
        return _told(found)

    def _read(self, count: int, at: int, kind: np.dtype[Any]) -> NDArray[np.void]:
        # Not more than a sample can have: damage must not read gigabytes.
        size = min(count, len(EXTENSIONS)) * kind.itemsize
        data = os.pread(self.descriptor, size, at)
        if len(data) != size:
            raise self._damaged()
        return np.frombuffer(data, kind)

    def _damaged(self) -> DataError:
        return DataError(
            f"the index {self.index.path} is damaged; delete it, it will be made again", "index"
        )


def _place_of_members(samples: int) -> int:
    """In an index's file, behind the starts."""
    return HEAD.size + (samples + 1) * START.itemsize


def _head_sum(head: _Head) -> int:
    return zlib.crc32(repr(head).encode())


def _sum_of(sample: int, found: NDArray[np.void]) -> int:
    """Of a sample's members and its place: one that is looked up elsewhere is found out."""
    return zlib.crc32(found.tobytes(), sample & 0xFFFFFFFF)


def _told(found: NDArray[np.void]) -> list[tuple[str, int, int]]:
    return [(PARTS[part], offset, size) for offset, size, part in found.tolist()[::-1]]


def index_tar(path: Path) -> TarIndex:
    """Find the samples of a shard: consecutive members of one name up to the first dot.

    A sample without a part that we know counts, too, so that counts agree with webdataset's.
    """
    starts, found = [0], list[tuple[int, int, int]]()
    key, seen = None, set[str]()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        for member in walk(descriptor, size):
            name, extension = split_name(member.name)
            if name is None:
                continue
            if name != key:
                key, seen = name, set()
                starts.append(len(found))
            if extension in seen:
                raise DataError(f"two members {member.name!r} of one sample; {REMEDY}", "shard")
            seen.add(extension)
            if extension in EXTENSIONS:
                part = PARTS.index(EXTENSIONS[extension])
                found.append((member.offset, member.size, part))
            starts[-1] = len(found)
    except DataError as error:
        raise DataError(f"shard {path}: {error}", error.kind) from error
    finally:
        os.close(descriptor)
    return TarIndex(size, np.array(starts, np.uint32), np.array(found, MEMBER))


def split_name(name: str) -> tuple[str | None, str]:
    """(key, extension) of a member: its path up to the first dot of its last part, and the rest.

    The key is None of hidden files, of files without extension and of `__meta__`.
    """
    dot = name.find(".", last := name.rfind("/") + 1)
    if dot <= last or re.match(r"__[^/]*__($|/)", name):
        return None, ""
    return name[:dot], name[dot + 1 :].lower()


def walk(descriptor: int, size: int) -> Iterator[Member]:
    """The regular files of a tar of `size` bytes (ustar, pax or GNU), in order."""
    at, extra = 0, dict[str, str]()  # extra: what a header before a member's own says of it
    while (header := os.pread(descriptor, BLOCK, at)) != END[:BLOCK]:
        _check_header(header, at)
        kind, data = header[156:157], at + BLOCK
        ours = kind not in (b"x", b"g", b"L", b"K")
        length = int(extra["size"]) if ours and "size" in extra else _number(header[124:136])
        if length < 0 or data + length > size:
            raise DataError(
                f"a member's {length} bytes at {data} must end by {size}, where the file ends: it "
                f"is cut off or damaged; {REMEDY}",
                "shard",
            )
        at = data + -(-length // BLOCK) * BLOCK
        if not ours:
            extra |= _extra(kind, descriptor, data, length)
            continue
        name, extra = extra.get("path") or _name(header), {}
        if kind == b"V":  # a volume's label
            continue
        if kind not in (b"0", b"\0", b"7", b"5"):
            raise DataError(
                f"want files and folders only, got {name!r} of type {kind!r} (a link?); write the "
                "shard again with tar --dereference --hard-dereference",
                "shard",
            )
        if length > LARGEST_MEMBER:
            raise DataError(f"{name!r} has {length} bytes, at most {LARGEST_MEMBER}", "shard")
        if kind != b"5" and not name.endswith("/"):
            yield Member(name, data, length)
    _check_end(descriptor, at, size)
    if extra:
        raise DataError(f"a member is missing at {at}, only its name is there; {REMEDY}", "shard")


def _check_header(header: bytes, at: int) -> None:
    """A header carries the sum of its bytes, its own eight counted as spaces."""
    told = header[148:156]
    # adler32's low half is one more than the sum modulo 65521, in a tenth of the time of sum().
    got = (zlib.adler32(header) & 0xFFFF) - 1 - sum(told) + len(told) * ord(" ")
    cut = len(header) < BLOCK
    if not cut and (wanted := _number(told)) >= 0 and (got - wanted) % 65521 == 0:
        return
    for magic, name in _COMPRESSED.items():
        if at == 0 and header.startswith(magic):
            raise DataError(
                f"want a plain tar, got one packed by {name}, in which no sample can be reached "
                "alone; decompress it",
                "shard",
            )
    if cut:
        raise DataError(f"the end mark is missing, the file is cut off at {at}; {REMEDY}", "shard")
    raise DataError(f"want a member's header at byte {at}, got other data; {REMEDY}", "shard")


def _check_end(descriptor: int, at: int, size: int) -> None:
    """Two blocks of zeros, and nothing but zeros behind: a second archive would not be read."""
    if size - at < len(END):
        raise DataError(f"the end mark is cut off at byte {size}; {REMEDY}", "shard")
    while block := os.pread(descriptor, 2**16, at):
        if block.count(0) != len(block):
            raise DataError(
                f"want the end of the archive at byte {at}, got more data behind it; unpack the "
                "archives that were joined here, and write one",
                "shard",
            )
        at += len(block)


def _extra(kind: bytes, descriptor: int, at: int, length: int) -> dict[str, str]:
    """What a header of kind x (pax) or L (GNU) says of the member that comes next."""
    if kind in (b"g", b"K"):
        return {}
    if length > LONGEST_EXTRA:
        raise DataError(f"a header of {length} bytes at {at}; {REMEDY}", "shard")
    data = os.pread(descriptor, length, at)
    if kind == b"L":
        return {"path": _text(data)}
    found = dict[str, str]()
    while data:
        digits, _, rest = data.partition(b" ")
        length = whole_of(_text(digits)) or 0  # of the record with these digits
        record, end = rest[: max(0, length - len(digits) - 2)], data[length - 1 : length]
        name, equals, value = record.partition(b"=")
        sound = name != b"size" or (value.isdigit() and len(value) < 19)
        if not equals or end != b"\n" or not sound or name.startswith(b"GNU.sparse"):
            raise DataError(f"want a plain pax header at {at}, got {data[:60]!r}", "shard")
        found[_text(name)] = _text(value)
        data = data[length:]
    return {name: found[name] for name in ("path", "size") if name in found}


def _name(header: bytes) -> str:
    """A member's name, in two pieces if it is long and the archive is a POSIX one."""
    piece = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{piece}/{_text(header[:100])}" if piece else _text(header[:100])


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    """A number in octal digits, or in binary if the first bit is set; -1 if it is neither."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big") - (0x80 << 8 * (len(field) - 1))
    digits = field.strip(b" \0")
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else -1
