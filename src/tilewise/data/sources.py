"""Data by name: what a configuration or a command line says, opened."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.data import synthetic
from tilewise.data.arrays import COLOUR, GREY, ArrayPack
from tilewise.data.emoji import Emoji
from tilewise.data.folders import ImageFolder
from tilewise.data.samples import Sample, Source, light
from tilewise.data.shards import Shards
from tilewise.data.tables import Table
from tilewise.errors import DataError, OptionError

TABLE = re.compile(r"^(?P<path>.*?\.(jsonl|csv|tsv)(\.gz|\.xz)?)(\?(?P<options>.*))?$")
OPTIONS = re.compile(r"\?(columns|images)=")
PART = re.compile(r"^(?P<rest>.+)@(?P<low>\d+)-(?P<high>\d+)$")


@dataclass(frozen=True)
class Part:
    """Some samples of a source."""

    source: Source
    rows: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.source[int(self.rows[index])]

    def row(self, index: int) -> Sample:
        """A sample without its image."""
        return light(self.source, int(self.rows[index]))

    @property
    def classes(self) -> list[str]:
        """Those of the whole."""
        return list(getattr(self.source, "classes", []))


class FilePart(Part):
    """Some samples of a source whose images are files."""

    def image_bytes(self, index: int) -> bytes:
        """The file, as it is."""
        source: Any = self.source
        data: bytes = source.image_bytes(int(self.rows[index]))
        return data


def open_source(name: str, *, index_folder: str | None = None) -> Source:
    """Open data by name; `index_folder` is where indexes of shards are kept for the next time.

    emoji:train, emoji:style, emoji:concepts   the embedded set
    synthetic:4096,size=32,noise=0.5           mosaics and the names of their colours
    data/{000..099}.tar, data/, a-00?.tar      WebDataset shards
    pairs.jsonl, pairs.csv, pairs.jsonl.xz     tables; ?columns=title:text or
                                               ?columns=positive,query rename, ?columns=id: leaves
                                               a column out, ?images=folder says where images are,
                                               &images=folder does after columns
    folder/                                    class folders of images, as ImageNet's, or arrays
                                               (see `ArrayPack`)

    Each may end in @LOW-HIGH: the samples whose id falls into these hundredths (0-95 to train,
    95-100 to test: samples of one id are never on both sides).
    """
    if found := PART.match(name):
        source = _open_whole(found["rest"], index_folder)
        return _part(source, name, int(found["low"]), int(found["high"]))
    return _open_whole(name, index_folder)


def _open_whole(name: str, index_folder: str | None) -> Source:
    if name.startswith("emoji:"):
        return Emoji(name.removeprefix("emoji:"))
    if name.startswith("synthetic:"):
        return synthetic.parse(name.removeprefix("synthetic:"))
    if table := TABLE.match(name):
        return Table(_existing(table["path"]), **_table_options(table["options"] or "", name))
    if OPTIONS.search(name):
        raise OptionError(
            f"?columns= and ?images= are options of a table (.jsonl, .csv, .tsv), got {name!r}; "
            "leave them out"
        )
    if name.endswith(".tar") or any(mark in name for mark in "{*") or "::" in name:
        return Shards(name, index_folder=index_folder)
    folder = _existing(name)
    if not folder.is_dir():
        raise DataError(
            f"data must be shards (.tar), a table (.jsonl, .csv, .tsv) or a folder, got {name!r}"
        )
    if any(folder.glob("*.tar")):
        return Shards(folder, index_folder=index_folder)
    packed = any((folder / name).is_file() for name in (COLOUR, GREY))
    return ArrayPack(folder) if packed else ImageFolder(folder)


def _existing(path: str) -> Path:
    found = Path(path).expanduser()
    if not path or not found.exists():  # no name is not the current folder
        raise DataError(
            f"there are no data at {path!r}; give a path that is there, emoji:train for the "
            "embedded set, or make shards with tilewise data pack"
        )
    return found


def _table_options(options: str, name: str) -> dict[str, Any]:
    given = dict(part.partition("=")[::2] for part in options.split("&")) if options else {}
    if not given.keys() <= {"columns", "images"} or not all(given.values()):
        raise OptionError(
            "a table takes ?columns=old:new,... (old: leaves one out) or ?columns=name,name,..., "
            f"and ?images=FOLDER, both as ?columns=...&images=..., got {name!r}"
        )
    found: dict[str, Any] = {"images": _existing(given["images"])} if "images" in given else {}
    parts = given["columns"].split(",") if "columns" in given else []
    if parts and all(":" in part for part in parts):
        pairs = (part.split(":", 1) for part in parts)
        return {**found, "columns": {theirs: ours or None for theirs, ours in pairs}}
    return {**found, "columns": tuple(part or None for part in parts)} if parts else found


def _part(source: Source, name: str, low: int, high: int) -> Part:
    if not 0 <= low < high <= 100:
        raise OptionError(
            f"a part goes from a lower to a higher hundredth, as in @0-95, got {name!r}"
        )
    # Ids need not be spread evenly: mix them (an odd multiplier, and the high bits).
    ids = np.array([_id(source, index) for index in range(len(source))], np.int64).view(np.uint64)
    mixed = (ids * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    hundredths = mixed * np.uint64(100) >> np.uint64(32)
    chosen = np.flatnonzero((hundredths >= low) & (hundredths < high))
    if not len(chosen):
        raise DataError(f"no sample of {name!r} falls into its part; take a larger one")
    return (FilePart if hasattr(source, "image_bytes") else Part)(source, chosen)


def _id(source: Source, index: int) -> int:
    """A sample's id; its index if it is damaged: it is in some part, and counted there."""
    try:
        number: int = light(source, index)["id"]
    except DataError:
        return index
    return number
