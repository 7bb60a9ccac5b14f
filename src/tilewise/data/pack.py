"""Samples into tar shards, for `Shards` and for webdataset: the same input gives the same bytes."""

import contextlib
import io
import itertools
import json
import os
import secrets
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tilewise.data import manifest
from tilewise.data.manifest import Manifest, ShardFacts, sha256_of, write_manifest
from tilewise.data.samples import Sample, Source, default_id
from tilewise.data.shards import CLASSES
from tilewise.errors import DataError, OptionError

if TYPE_CHECKING:
    from PIL.Image import Image

SAMPLES_PER_SHARD = 10_000
# How images are written that do not stay as they are: lossless in both formats.
FORMATS: dict[str, dict[str, Any]] = {"png": {}, "webp": {"lossless": True}}
# How files begin that do stay as they are.
KEPT = {"jpg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n", "webp": b"RIFF"}

Members = dict[str, bytes]  # of one sample, by extension
Told = Callable[[int, int], None]  # how many samples are done, and of how many
OnDamage = Callable[[DataError], None]  # what is wrong with a sample


def pack_source(
    source: Source,
    out: str | Path,
    *,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    size: int | None = None,
    image_format: Literal["png", "webp"] = "png",
    on_progress: Told | None = None,
    on_damage: OnDamage | None = None,
) -> Manifest:
    """Write samples to `out`/000000.tar and so on, with a manifest.json that tells what is there.

    A sample's members are its image (a jpg, png or webp file stays as it is unless it is reduced),
    json (captions, query, positive, negatives, and the id if it does not follow from these), cls
    (label) and npy (features). Names of labels go to classes.txt. All is written beside, and moved
    into place when it is complete.

    Args:
        out: the folder of shards, made if need be; it must not hold any.
        size: pixels of the shorter side, to which larger images are reduced.
        image_format: of images that do not stay as they are.
        on_damage: told of each damaged sample, which is then left out, instead of raising.
    """
    if samples_per_shard < 1 or (size is not None and size < 1):
        raise OptionError(
            f"samples_per_shard and size must be above 0, got {samples_per_shard} and {size}"
        )
    if image_format not in FORMATS:
        raise OptionError(f"image_format must be {' or '.join(FORMATS)}, got {image_format!r}")
    packer = _Packer(source, size, image_format)
    with _whole(Path(out).expanduser()) as folder:
        members = packer.all_members(on_progress, on_damage)
        shards = dict(_write_shards(members, folder, samples_per_shard))
        if not shards:
            raise DataError(f"want samples to pack, got none that is sound of {len(source)}")
        if classes := getattr(source, "classes", None):
            _write_classes(folder / CLASSES, classes)
        write_manifest(folder, shards)
    return shards


class _Packer:
    """Samples as the members of a tar."""

    def __init__(self, source: Source, size: int | None, image_format: str) -> None:
        self.source, self.size, self.image_format = source, size, image_format

    def all_members(
        self, on_progress: Told | None, on_damage: OnDamage | None
    ) -> Iterator[Members]:
        """The members of each sample that is sound."""
        packed = 0
        for index in range(len(self.source)):
            try:
                members = self.members(index, packed)
            except DataError as error:
                if on_damage is None:
                    raise
                on_damage(error)
            else:
                packed += 1
                yield members
            if on_progress is not None:
                on_progress(index + 1, len(self.source))

    def members(self, index: int, place: int) -> Members:
        """The members of the sample at `index`, which will be the one at `place`."""
        sample = self.source[index]  # decoded, even where its file stays as it is: it is sound
        found: Members = {}
        if "image" in sample:
            found |= self._image(index, sample["image"])
        if fields := _fields(sample, place):
            found["json"] = json.dumps(fields, ensure_ascii=False, sort_keys=True).encode()
        if "label" in sample:
            found["cls"] = str(sample["label"]).encode()
        if "features" in sample:
            np.save(file := io.BytesIO(), sample["features"], allow_pickle=False)
            found["npy"] = file.getvalue()
        return found

    def _image(self, index: int, image: "Image") -> Members:
        if self.size is None or min(image.size) <= self.size:
            read = getattr(self.source, "image_bytes", None)
            data = b"" if read is None else read(index)
            for extension, magic in KEPT.items():
                if data.startswith(magic):
                    return {extension: data}
        else:
            image = _reduced(image, self.size)
        channels = image.split()
        if channels[0] == channels[1] == channels[2]:
            image = channels[0]  # a third of the pixels, the same image
        image.save(file := io.BytesIO(), self.image_format, **FORMATS[self.image_format])
        return {self.image_format: file.getvalue()}


def _fields(sample: Sample, place: int) -> dict[str, Any]:
    """What json holds of a sample."""
    names = {"text": "captions", "query": "query", "positive": "positive", "negatives": "negatives"}
    fields = {told: sample[name] for name, told in names.items() if name in sample}
    if sample["id"] != default_id(sample, place):
        fields["id"] = sample["id"]
    return fields


def _reduced(image: "Image", size: int) -> "Image":
    from PIL.Image import Resampling  # noqa: PLC0415

    factor = size / min(image.size)
    width, height = (max(size, round(side * factor)) for side in image.size)
    return image.resize((width, height), Resampling.BICUBIC)


def _write_shards(
    samples: Iterator[Members], folder: Path, samples_per_shard: int
) -> Iterator[tuple[str, ShardFacts]]:
    """Write the shards of a folder, and say what each is."""
    written = 0
    for number, first in enumerate(samples):  # which takes the first sample of each shard
        path = folder / f"{number:06d}.tar"
        rest = itertools.islice(samples, samples_per_shard - 1)
        count = _write_shard(path, itertools.chain([first], rest), written)
        written += count
        yield (
            path.name,
            ShardFacts(bytes=path.stat().st_size, samples=count, sha256=sha256_of(path)),
        )


def _write_shard(path: Path, samples: Iterable[Members], first: int) -> int:
    """Write samples, numbered from `first`, to a tar that is the same whenever it is made."""
    key = first
    with path.open("xb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for key, members in enumerate(samples, first):
                for extension, data in members.items():
                    member = tarfile.TarInfo(f"{key:09d}.{extension}")  # of time 0 and nobody's
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        file.flush()
        os.fsync(file.fileno())
    return key + 1 - first


def _write_classes(path: Path, classes: Iterable[str]) -> None:
    for name in classes:
        if not name.strip() or not name.isprintable():  # nor is a line's end
            raise DataError(f"the name of a class must be a line of text, got {name!r}; rename it")
    path.write_text("".join(f"{name}\n" for name in classes), "utf-8", newline="\n")


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder to write to, whose files go to `out` in the end; after an error nothing is left."""
    held = [path.name for path in (*out.glob("*.tar"), *out.glob(manifest.NAME))]
    if held:
        raise OptionError(
            f"out must not hold shards, got {out} with {held[0]} and {len(held) - 1} more; name "
            "another folder, or delete them"
        )
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    folder = out / f".packing-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
        # The manifest first: if we are stopped here, it tells which shards are missing.
        for path in sorted(folder.iterdir(), key=lambda path: (path.name != manifest.NAME, path)):
            path.replace(out / path.name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise
    folder.rmdir()
