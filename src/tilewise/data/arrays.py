"""Small images of one size in one compressed array, with a record for each."""

import functools
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

from tilewise.data.decode import decode_json, require_pillow
from tilewise.data.samples import Sample, checked_text, place_of, sample_of, text_id
from tilewise.errors import DataError

COLOUR, COLOUR_META = "images.u8.xz", "meta.json.xz"
GREY, GREY_META, GREY_INFO = "gray4.u8.xz", "meta.jsonl.xz", "info.json"

Record = dict[str, Any]
T = TypeVar("T", list[Any], dict[str, Any])


class ArrayPack:
    """Samples {"image", "text", "id"} of a folder in one of two layouts, told apart by its files.

    Colour, as emoji32; these have labels, too, and `classes` are the groups in order:

        images.u8.xz    n x side x side x 3 bytes: rows of pixels in RGB
        meta.json.xz    a list of n [style, label, tags, group, subgroup], tags a list of texts

    Grey, as iconify32:

        gray4.u8.xz     n x side * side / 2 bytes: two 4-bit pixels a byte, the high one first
        meta.jsonl.xz   n lines {"name": "arrow-left", "set": "ooui", "concept": "arrow left"}
        info.json       may be there: {"sets": {"ooui": {"name": "OOUI"}}}, full names of sets

    Captions are the label with its tags and the label alone, or the words of the name with the set;
    the id is that of the label or the concept, so that two drawings of one are not negatives.

    Args:
        folder: where these files are.
        side: pixels of an image's side.
    """

    def __init__(self, folder: str | Path, *, side: int = 32) -> None:
        self.folder = Path(folder).expanduser()
        colour, grey = ((self.folder / name).is_file() for name in (COLOUR, GREY))
        if colour == grey:
            raise DataError(
                f"want {COLOUR} or {GREY} in {folder}, got {'both' if colour else 'neither'}",
                "missing",
            )
        self.records = (_emoji if colour else _icons)(self.folder)
        if not self.records:
            name = COLOUR_META if colour else GREY_META
            raise DataError(f"want records in {self.folder / name}, got none", "field")
        shape = (side, side, 3) if colour else (side, side // 2)
        path = self.folder / (COLOUR if colour else GREY)
        self._pixels = _pixels(path, (len(self.records), *shape))
        self.classes = sorted({record["group"] for record in self.records}) if colour else []

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        require_pillow()
        from PIL import Image  # noqa: PLC0415

        place = place_of(index, len(self))
        record, pixels = self.records[place], self._pixels[place]
        if pixels.ndim == 2:
            grey = np.stack([pixels >> 4, pixels & 15], -1).reshape(len(pixels), -1) * 17
            pixels = np.repeat(grey[..., None], 3, -1)
        sample = sample_of({"captions": record["captions"]})
        sample["id"] = text_id(record["concept"])
        if self.classes:
            sample["label"] = self.classes.index(record["group"])
        return {**sample, "image": Image.fromarray(pixels)}


def _pixels(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    wanted = int(np.prod(shape))
    data = _unpacked(path, wanted + 1)
    if len(data) != wanted:
        raise DataError(
            f"want {wanted} bytes of {shape} in {path}, an image of {shape[1]} pixels a side for "
            f"each of {shape[0]} records, got {'more' if len(data) > wanted else len(data)}; write "
            "as many images as records, all of that size",
            "array",
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _unpacked(path: Path, most: int = -1) -> bytes:
    try:
        with lzma.open(path) as file:
            return file.read(most)
    except FileNotFoundError as error:
        raise DataError(f"want {path.name} in {path.parent}, got none", "missing") from error
    except (EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} is damaged or cut off: {error}; copy it again", "array") from error


def _emoji(folder: Path) -> list[Record]:
    path = folder / COLOUR_META
    rows = _json(path, _unpacked(path), list)
    return [_checked(path, at, _emoji_record, row) for at, row in enumerate(rows)]


def _emoji_record(row: Any) -> Record:
    style, label, tags, group, subgroup = row
    captions = list(dict.fromkeys([", ".join([label, *tags]), label]))
    names = {"style": style, "label": label, "tags": tags, "group": group, "subgroup": subgroup}
    return {**names, "concept": label, "captions": captions}


def _icons(folder: Path) -> list[Record]:
    path = folder / GREY_META
    rows = enumerate(_unpacked(path).splitlines())
    record = functools.partial(_icon_record, _set_names(folder / GREY_INFO))
    return [_checked(path, at, record, row) for at, row in rows]


def _set_names(path: Path) -> dict[str, str]:
    """Full names of sets, those that are told."""
    info = _json(path, path.read_bytes(), dict) if path.is_file() else {}
    try:
        named = {short: each.get("name") for short, each in info.get("sets", {}).items()}
        return {short: checked_text("name", full) for short, full in named.items() if full}
    except (AttributeError, DataError) as error:
        raise DataError(
            f'want {{"sets": {{"ooui": {{"name": "OOUI"}}}}}} in {path}, got {str(info)[:100]}: '
            f"{error}; mend or delete it",
            "field",
        ) from error


def _icon_record(sets: dict[str, str], line: bytes) -> Record:
    record: Record = decode_json(line)
    full = sets.get(record["set"], record["set"])
    return {**record, "captions": [f"{record['name'].replace('-', ' ')}, {full}"]}


def _json(path: Path, data: bytes, kind: type[T]) -> T:
    """What a file says, which must be of this kind."""
    try:
        found = decode_json(data)
    except DataError as error:
        raise DataError(f"{path}: {error}", error.kind) from error
    if not isinstance(found, kind):
        wanted = {list: "a list", dict: "an object"}[kind]
        raise DataError(f"want {wanted} in {path}, got {type(found).__name__}", "field")
    return found


def _checked(path: Path, at: int, make: Callable[[Any], Record], row: Any) -> Record:
    """A record of which a sample can be made."""
    try:
        record = make(row)
        sample_of({"captions": record["captions"]})
        checked_text("concept", record["concept"])
        checked_text("group", record.get("group", "none"))
    except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"record {at} of {path}, {str(row)[:100]!r}: {error}", "field") from error
    return record
