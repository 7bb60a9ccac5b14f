"""Tables of samples: JSONL, CSV and TSV, plain, .gz or .xz; every row is checked on opening."""

import csv
import functools
import gzip
import itertools
import json
import lzma
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from tilewise.data.decode import decode_image, decode_json, read_image
from tilewise.data.samples import (
    CAPTIONS,
    FIELDS,
    Sample,
    default_id,
    hashed,
    place_of,
    sample_of,
    text_id,
    whole_of,
)
from tilewise.errors import DataError, OptionError

COLUMNS = ("image", *FIELDS)
DAMAGED = "damaged"  # the field of a row that is wrong: what, and of which kind
LONGEST_CELL = 2**24  # characters: more is a quote that was never closed
OPENERS: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}

Row = dict[str, Any]
# {its name: our name}, or our names by position; None for a column to leave alone.
Columns = Mapping[str, str | None] | Sequence[str | None]


class Table:
    """The rows of a table as samples.

        Table("captions.csv", columns={"file": "image", "title": "text"})
        Table("wordnet_synset_gloss.jsonl.xz", columns=("positive", "query"))

    Columns: image (a path), text or caption or captions, query, positive, negatives, label, id; all
    others are left alone. A line of JSONL is an object, or an array, whose columns are "0", "1" and
    so on. CSV and TSV have a header; there captions and negatives may be JSON arrays, and an empty
    cell says nothing. A cell of CSV may be quoted; in TSV a quote is a character like any other,
    and a row whose cells were quoted all the same is wrong.
    Rows are held as text; images are read when they are asked for.

    A row that is wrong stays, as a sample that raises when it is asked for, unless all are wrong.
    Rows of one image, as tables with a row for each caption have them, are one thing: all have the
    id of the first of them, whatever ids they tell. So have rows of one query that tell no id,
    but for those whose positive another query has, too: they share one id with that.

    Args:
        path: .jsonl, .csv or .tsv, as it is or with .gz or .xz behind.
        columns: {its name: our name} where they differ, or our names of an array's columns in
            order; None for a column to leave alone.
        images: the folder that image paths start from and must not leave; by default the table's.
    """

    def __init__(
        self, path: str | Path, *, columns: Columns = (), images: str | Path | None = None
    ) -> None:
        self.path = Path(path).expanduser()
        self.images = os.path.realpath(self.path.parent if images is None else images)
        # Rows in JSON, one after the other: few Python objects, which forked processes would copy.
        self._text, self._ends = bytearray(), array("q", [0])
        names, known, damaged = _Names(columns), _Ids(), 0
        nothing = DataError(f"want rows in {self.path}, got none", "table")
        for line, read in _rows(self.path):
            try:
                self._append(_sample(read(names)), known)
            except DataError as error:
                found = DataError(f"line {line} of {self.path}: {error}", error.kind)
                self._append({DAMAGED: [str(found), found.kind]}, known)
                nothing, damaged = nothing if damaged else found, damaged + 1
        if damaged == len(self):
            raise nothing
        names.check_all_found(self.path)
        self._ids = known.shared()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: SupportsIndex) -> Sample:
        sample = self.row(place := place_of(index, len(self)))
        if "image" in sample:
            try:
                sample["image"] = decode_image(self.image_bytes(place))
            except DataError as error:
                where = f"row {place} of {self.path}, image {sample['image']!r}"
                raise DataError(f"{where}: {error}", error.kind) from error
        return sample

    def row(self, place: int) -> Sample:
        """A sample with the path of its image instead of the image."""
        row: Row = json.loads(self._text[self._ends[place] : self._ends[place + 1]])
        if DAMAGED in row:
            raise DataError(*row[DAMAGED])
        row["id"] = int(self._ids[place])
        return {name: tuple(x) if isinstance(x, list) else x for name, x in row.items()}

    def image_bytes(self, place: int) -> bytes:
        """The file of a row's image, which lies in the folder of images wherever links lead."""
        path = os.path.realpath(os.path.join(self.images, self.row(place)["image"]))
        if os.path.commonpath([path, self.images]) != self.images:
            raise DataError(
                f"the image must lie in {self.images}, got {path}; name its folder as "
                "TABLE?images=FOLDER",
                "path",
            )
        return read_image(path)

    def _append(self, sample: Sample, known: "_Ids") -> None:
        known.add(sample)
        sample.pop("id", None)
        self._text += json.dumps(sample, ensure_ascii=False).encode(errors="backslashreplace")
        self._ends.append(len(self._text))


def _sample(row: Row) -> Sample:
    """With the path of its image."""
    sample = sample_of(row)
    if row.get("image") is not None:
        sample["image"] = _checked_path(row["image"])
    if not sample:
        raise DataError(
            f"want a column of {', '.join(COLUMNS)}, got {', '.join(row)[:200] or 'none'}; say "
            "which is which as TABLE?columns=file:image,title:text, in Python "
            "columns={its name: our name}",
            "field",
        )
    return sample


class _Ids:
    """Ids of rows and what they are of, 17 bytes each until all are known: a dictionary would take
    ten times as much.
    """

    def __init__(self) -> None:
        self.ids, self.things, self.asked = array("q"), array("q"), bytearray()

    def add(self, sample: Sample) -> None:
        """The next row, with the path of its image."""
        place = len(self.ids)
        self.ids.append(sample.get("id", default_id(sample, place)))
        asked = not {"image", "id"} & sample.keys() and "query" in sample
        self.asked.append(asked)
        if asked:
            thing = text_id(f"query {sample['query']}")
        elif "image" in sample:
            thing = hashed(f"image {os.path.normpath(sample['image'])}")
        else:
            thing = -1 - place  # below 0: that no other row has
        self.things.append(thing)

    def shared(self) -> NDArray[np.int64]:
        """(n,): a row has the id of the first row with its image or query."""
        ids, things = (np.frombuffer(each, np.int64) for each in (self.ids, self.things))
        _, thing = np.unique(things, return_inverse=True)
        # A positive of several queries must not become a negative of some of them.
        _, group = np.unique(ids, return_inverse=True)
        low, high = np.full(len(ids), len(ids)), np.zeros(len(ids), np.int64)
        np.minimum.at(low, group, thing)
        np.maximum.at(high, group, thing)
        torn = (low < high)[group] & np.frombuffer(self.asked, np.bool_)
        # Nor must its id become that of all that one of them asks for: it says nothing of these.
        own = np.flatnonzero(~torn)
        first = np.zeros(len(ids), np.int64)
        first[thing[own][::-1]] = own[::-1]
        return np.where(torn, ids, ids[first[thing]])


class _Names:
    """Which column is called what; knows in the end which ones were never there."""

    def __init__(self, columns: Columns) -> None:
        if isinstance(columns, str):
            raise OptionError(f"columns must be a mapping or a list of names, got {columns!r}")
        if not isinstance(columns, Mapping):
            columns = {str(at): name for at, name in enumerate(columns)}
        self.names, self.missing = dict(columns), set(columns)
        ours = [name for name in columns.values() if name is not None]
        if not set(ours) <= set(COLUMNS) or len(set(ours)) < len(ours):
            raise OptionError(
                f"columns must become {', '.join(COLUMNS)}, each once, got {', '.join(ours)}"
            )
        # A column that we named stands before one that has the name already.
        self.dropped = set(ours) | set(CAPTIONS if set(CAPTIONS) & set(ours) else ())

    def renamed(self, row: Row) -> Row:
        """A row under our names."""
        if not self.names:
            return row
        self.missing -= row.keys()
        kept = {name: x for name, x in row.items() if name not in self.names.keys() | self.dropped}
        told = {ours: row[name] for name, ours in self.names.items() if ours and name in row}
        return kept | told

    def check_all_found(self, path: Path) -> None:
        """Raise if a column that we named is in no row."""
        if self.missing:
            names = ", ".join(map(repr, sorted(self.missing)))
            raise OptionError(f"columns names {names}, and no row of {path} has it")


Reader = Callable[[_Names], Row]  # of one row, under our names


def _rows(path: Path) -> Iterator[tuple[int, Reader]]:
    """(line, what reads the row) of a table; damage that ends reading is raised here."""
    packed = path.suffix if path.suffix in OPENERS else ""
    kind = path.with_suffix("").suffix if packed else path.suffix
    readers = {".jsonl": _json_rows, ".csv": _cell_rows, ".tsv": _cell_rows}
    if kind not in readers:
        raise OptionError(
            f"a table must be .jsonl, .csv or .tsv, or one of these with .gz or .xz, got {path}"
        )
    line = 0
    try:
        with OPENERS[packed](path, "rb") as file:
            for line, read in readers[kind](file, "\t" if kind == ".tsv" else ","):
                yield line, read
    except DataError as error:
        raise DataError(f"{path}: {error}", error.kind) from error
    except FileNotFoundError as error:
        raise DataError(f"want a table at {path}, got no file", "missing") from error
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        where = f"{path} is damaged or cut off after line {line}"
        raise DataError(f"{where}: {error}; copy it again", "table") from error


def _json_rows(file: Iterable[bytes], _: str) -> Iterator[tuple[int, Reader]]:
    for line, data in enumerate(file, 1):
        if data.strip():
            yield line, functools.partial(_json_row, data)


def _json_row(data: bytes, names: _Names) -> Row:
    row = decode_json(data)
    if isinstance(row, list):
        row = {str(at): value for at, value in enumerate(row)}
    if not isinstance(row, dict):
        raise DataError(f"want an object or an array, got {type(row).__name__}", "field")
    return names.renamed(row)


def _cell_rows(file: Iterable[bytes], delimiter: str) -> Iterator[tuple[int, Reader]]:
    rows = _all_cells(file, delimiter)
    header = [name.strip() for name in next(rows, (1, []))[1]]
    if len(set(header)) < len(header):
        raise DataError(f"columns must have a name each, got {', '.join(header)}", "table")
    filled = ((line, cells) for line, cells in rows if cells)
    for (line, cells), (_, after) in itertools.pairwise(itertools.chain(filled, [(0, header)])):
        if delimiter == "\t":
            broken = len(after) != len(header) and _is_open(cells[-1])
            yield line, functools.partial(_tsv_row, header, cells, broken)
        else:
            yield line, functools.partial(_cell_row, header, cells)


def _all_cells(file: Iterable[bytes], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(last line, cells) of each row; those of TSV are never quoted."""
    csv.field_size_limit(LONGEST_CELL)  # of all readers of the process: it cannot be given to one
    how: dict[str, Any] = {"quoting": csv.QUOTE_NONE} if delimiter == "\t" else {}
    reader = csv.reader(_decoded(file), delimiter=delimiter, strict=True, **how)
    begin = 1
    try:
        for cells in reader:
            yield reader.line_num, cells
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"rows from line {begin} on cannot be told apart: {error}; lines must end in \\n or "
            "\\r\\n, and in a cell of CSV that begins with a quote, quotes are doubled and the "
            "last one closes it",
            "table",
        ) from error


def _tsv_row(header: list[str], cells: list[str], broken: bool, names: _Names) -> Row:
    """Cells are as they stand, unless they were written as those of CSV: their quotes doubled, or
    `broken`, the last one going on in the next line.
    """
    row = _cell_row(header, cells, names)
    quoted = [row[name] for name in COLUMNS if name in row and _is_quoted(row[name])]
    quoted += cells[-1:] if broken else []
    if quoted:
        raise DataError(
            "a cell of TSV must not be quoted, since a quote is a character like any other there, "
            f"got {quoted[0][:80]!r}; save the table without quotes, or as .csv",
            "field",
        )
    return row


def _is_quoted(cell: Any) -> bool:
    """Between quotes, with others inside that are all doubled."""
    if not isinstance(cell, str) or len(cell) < 2 or not cell[0] == cell[-1] == '"':
        return False
    return '""' in cell[1:-1] and '"' not in cell[1:-1].replace('""', "")


def _is_open(cell: str) -> bool:
    """Begun with a quote, without one that ends it."""
    return cell.startswith('"') and '"' not in cell[1:].replace('""', "")


def _cell_row(header: list[str], cells: list[str], names: _Names) -> Row:
    if len(cells) != len(header):
        raise DataError(f"want {len(header)} cells, got {len(cells)}", "field")
    row = names.renamed(dict(zip(header, cells, strict=True)))
    row = {name: cell for name, cell in row.items() if cell.strip()}
    for name in ("label", "id"):
        number = whole_of(row.get(name, ""))
        if number is not None:
            row[name] = number
    for name in ("captions", "negatives"):
        if row.get(name, "").lstrip().startswith("["):
            row[name] = decode_json(row[name].encode())
    return row


def _decoded(file: Iterable[bytes]) -> Iterator[str]:
    """Lines of text with their ends, without a byte order mark."""
    for line, data in enumerate(file, 1):
        try:
            yield data.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"line {line} must be UTF-8, got {error}", "text") from error


def _checked_path(path: object) -> str:
    """A path that starts from a folder and does not lead out of it, if no link does."""
    sound = (
        isinstance(path, str)
        and "\0" not in path
        and not any("\ud800" <= mark <= "\udfff" for mark in path)  # half a pair, as JSON may have
        and not os.path.isabs(path)
        and not PureWindowsPath(path).drive
        and os.path.normpath(path).split(os.sep)[0] != os.pardir
    )
    if not sound:
        raise DataError(
            f"image must be a path inside the folder of images, got {str(path)[:200]!r}; write it "
            "relative to that folder, which TABLE?images=FOLDER names",
            "path",
        )
    return str(path)
