"""Images in a folder for each class, as ImageNet's validation set is laid out."""

import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import SupportsIndex

from tilewise.data.decode import decode_image, read_image
from tilewise.data.samples import Sample, place_of
from tilewise.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")


class ImageFolder:
    """Samples {"image", "label", "id"}: a folder of `path` is a class, in the order of their names;
    names that are all numbers are in the order of these.

    Images are looked for in folders within a class, too, also in linked ones, in each once; hidden
    files and other files are left alone. `classes` are the folders' names, the id of a sample is
    its index.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise DataError(f"want a folder of images, got {path}, which is none", "missing")
        self.classes = _in_order(
            one.name for one in self.path.iterdir() if one.is_dir() and not one.name.startswith(".")
        )
        if not self.classes:
            raise DataError(
                f"want a folder for each class in {path}, got no folder; images with captions are "
                "read with a table of them",
                "missing",
            )
        self._names: list[str] = []
        self._labels = array("q")
        for label, name in enumerate(self.classes):
            found = _images(self.path / name)
            if not found:
                raise DataError(
                    f"want images ({', '.join(EXTENSIONS)}) in every class, got none in "
                    f"{self.path / name}; fill or delete it",
                    "missing",
                )
            self._names += found
            self._labels.extend([label] * len(found))

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        sample = self.row(place := place_of(index, len(self)))
        try:
            sample["image"] = decode_image(self.image_bytes(place))
        except DataError as error:
            raise DataError(f"{self._names[place]}: {error}", error.kind) from error
        return sample

    def row(self, place: int) -> Sample:
        """A sample with the path of its image instead of the image."""
        return {"image": self._names[place], "label": self._labels[place], "id": place}

    def image_bytes(self, place: int) -> bytes:
        """The file of an image."""
        return read_image(self._names[place])


def _in_order(names: Iterable[str]) -> list[str]:
    """Sorted, as numbers if all are: 10 after 9, as who wrote them counted classes."""
    found = sorted(names)
    numbered = all(name.isascii() and name.isdigit() for name in found)
    return sorted(found, key=int) if numbered else found


def _images(folder: Path) -> list[str]:
    """Paths of the images under a folder, sorted."""
    found, seen = list[str](), set[str]()
    for where, folders, names in os.walk(folder, followlinks=True):
        # Each folder once: links may lead in a circle. Sorted: which one is first is no chance.
        if (real := os.path.realpath(where)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        found += [
            os.path.join(where, name)
            for name in names
            if name.lower().endswith(EXTENSIONS) and not name.startswith(".")
        ]
    return sorted(found)
