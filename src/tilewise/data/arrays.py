"""Small images of one size in one compressed array, with a record for each."""

import functools
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from tilewise.data.decode import decode_json, require_pillow
from tilewise.data.samples import Sample, checked_text, place_of, sample_of, text_id
from tilewise.errors import DataError, OptionError

COLOUR, COLOUR_META = "images.u8.xz", "meta.json.xz"
GREY, GREY_META, GREY_INFO = "gray4.u8.xz", "meta.jsonl.xz", "info.json"

Record = dict[str, Any]


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
        keep: says of a record, a dictionary with the names above, whether to keep its sample.
    """

    def __init__(
        self, folder: str | Path, *, side: int = 32, keep: Callable[[Record], bool] | None = None
    ) -> None:
        self.folder = Path(folder).expanduser()
        colour, grey = ((self.folder / name).is_file() for name in (COLOUR, GREY))
        if colour == grey:
            raise DataError(
                f"want {COLOUR} or {GREY} in {folder}, got {'both' if colour else 'neither'}",
                "missing",
            )
        records = (_emoji if colour else _icons)(self.folder)
        shape = (side, side, 3) if colour else (side, side // 2)
        pixels = _pixels(self.folder / (COLOUR if colour else GREY), (len(records), *shape))
        self.classes = sorted({record["group"] for record in records}) if colour else []
        kept = [at for at, record in enumerate(records) if keep is None or keep(record)]
        if not kept:
            raise OptionError(f"keep must keep a sample of {folder}, got none of {len(records)}")
        self.records = [records[at] for at in kept]
        self._pixels = pixels if len(kept) == len(pixels) else pixels[kept]

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
            f"want {wanted} bytes of {shape} in {path}, one image for each record, got "
            f"{'more' if len(data) > wanted else len(data)}; is side right?",
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
    rows = decode_json(_unpacked(path))
    if not isinstance(rows, list):
        raise DataError(f"want a list in {path}, got {type(rows).__name__}", "field")
    return [_checked(path, at, _emoji_record, row) for at, row in enumerate(rows)]


def _emoji_record(row: Any) -> Record:
    style, label, tags, group, subgroup = row
    captions = list(dict.fromkeys([", ".join([label, *tags]), label]))
    names = {"style": style, "label": label, "tags": tags, "group": group, "subgroup": subgroup}
    return {**names, "concept": label, "captions": captions}


def _icons(folder: Path) -> list[Record]:
    info, path = folder / GREY_INFO, folder / GREY_META
    sets = decode_json(info.read_bytes())["sets"] if info.is_file() else {}
    rows = enumerate(_unpacked(path).splitlines())
    record = functools.partial(_icon_record, sets)
    return [_checked(path, at, record, row) for at, row in rows]


def _icon_record(sets: dict[str, Any], line: bytes) -> Record:
    record: Record = decode_json(line)
    full = sets.get(record["set"], {}).get("name", record["set"])
    return {**record, "captions": [f"{record['name'].replace('-', ' ')}, {full}"]}


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
