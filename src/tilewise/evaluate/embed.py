"""Features of a whole data set, micro-batch by micro-batch, by all ranks together."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tilewise.data.decode import read_lines
from tilewise.data.loader import in_order
from tilewise.data.samples import Sample, Source, light
from tilewise.data.views import CHANCES, View
from tilewise.errors import DataError, OptionError
from tilewise.models.base import PairModel
from tilewise.ranks import ALONE, Ranks

T = TypeVar("T")
Tell = Callable[[str, int, int], None]  # of what, how many are done, and of how many

MIDDLE = np.full(CHANCES, 0.5)  # what an evaluation draws: nothing
TRIED = 100  # samples, to find one that is not damaged and has what is wanted
LOOKED_AT = 4000  # samples, to find a label that has no class
THUMB = 64  # pixels a side of what a picture of results shows


def untold(what: str, done: int, total: int) -> None:
    """Tell nobody."""


@dataclass
class Side:
    """One side of pairs: features (n, D), and who they are."""

    features: Tensor
    ids: Tensor
    texts: list[str] = field(default_factory=list)


@dataclass
class Embedded:
    """What a model makes of a data set, on the model's device, where it is measured."""

    images: Side | None = None  # of copies of an image one
    places: list[int] = field(default_factory=list)  # of the images, in the data set
    texts: Side | None = None  # captions, or documents
    queries: Side | None = None
    labels: Tensor | None = None  # (n,), those of the images, below 0 for none; if any has one
    bad: Counter[str] = field(default_factory=Counter)
    first_bad: str = ""  # what is wrong with the first damaged sample

    def labelled(self) -> tuple[Tensor, Tensor] | None:
        """Features (m, D) and labels (m,) of the images that have one, if any has."""
        if self.images is None or self.labels is None:
            return None
        known = self.labels >= 0
        return self.images.features[known], self.labels[known]


class _Image(NamedTuple):
    """Who an image is."""

    place: int  # in the data set
    id: int
    label: int  # below 0 for none
    pixels: bytes  # a digest of them


@dataclass
class _Found:
    """What a micro-batch of samples came to, in host memory."""

    bad: Counter[str]
    first_bad: str
    features: Tensor | None = None  # of images, (n, D)
    images: list[_Image] = field(default_factory=list)
    texts: list[tuple[int, str]] = field(default_factory=list)
    queries: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class _Placed:
    """Samples that tell their places."""

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return {**self.source[index], "place": index}


@dataclass(frozen=True)
class Embedder:
    """A model in eval mode, and the ranks that share the work: micro-batch k is that of rank k
    modulo their number, and all of them get all features.

    A micro-batch that is shorter than the others is filled up: a product of another shape may round
    in another way, and then twins would not tie.
    """

    model: PairModel
    batch: int
    captions: str = "first"
    workers: int = 0
    ranks: Ranks = ALONE
    tell: Tell = untold

    def embed(self, source: Source, name: str = "samples") -> Embedded:
        """All that the model can embed of each sample."""
        # Decided once: sharded weights want as many forwards on every rank.
        has_images = bool(self.model.image_size) and "image" in first_sound(source, {"image"})
        view = self.model.view() if has_images else None
        spans = self._spans(len(source))
        own = [spans[k] for k in self._own(len(spans))]
        loaded = in_order(_Placed(source), own, partial(_looked_at, view), self.workers)
        found = []
        for span, each in zip(own, loaded, strict=True):
            self.tell(f"embedding {name}", span.start, len(source))
            found.append(self._found(view, len(spans[0]), *each))
        self.tell(f"embedding {name}", len(source), len(source))
        parts = self._of_all(found, len(spans))
        texts = list(dict.fromkeys(text for part in parts for text in part.texts))
        queries = list(dict.fromkeys(query for part in parts for query in part.queries))
        images = [image for part in parts for image in part.images]
        rows = _without_copies(images)
        images = [images[row] for row in rows]
        return Embedded(
            images=self._images(parts, rows, [image.id for image in images]),
            places=[image.place for image in images],
            texts=self._text_side(texts, name) if texts and self.model.can("texts") else None,
            queries=self._text_side(queries, name, queries=True) if queries else None,
            labels=self._labels([image.label for image in images]),
            bad=sum((part.bad for part in parts), Counter[str]()),
            first_bad=next((part.first_bad for part in parts if part.bad), ""),
        )

    def encode(self, texts: Sequence[str], name: str = "", *, queries: bool = False) -> Tensor:
        """Features (n, D) of texts, or of queries; of equal texts the same ones, however their
        neighbours are filled up. How far it is is told only of those that have a name.
        """
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        distinct, found = list(rows), []
        spans = self._spans(len(distinct))
        for span in (spans[k] for k in self._own(len(spans))):
            if name:
                self.tell(f"embedding {name}", span.start, len(distinct))
            part = _filled(distinct[span.start : span.stop], len(spans[0]))
            features = self.model.texts(part, queries=queries)[: len(span)]
            found.append(features.float().cpu())
        if name:
            self.tell(f"embedding {name}", len(distinct), len(distinct))
        features = torch.cat(self._of_all(found, len(spans)))
        return features[[rows[text] for text in texts]].to(self.model.device)

    def _spans(self, count: int) -> list[range]:
        """Places of each micro-batch."""
        return [range(i, min(i + self.batch, count)) for i in range(0, count, self.batch)]

    def _own(self, count: int) -> list[int]:
        """Which micro-batches are this rank's; past the end the last one again, because sharded
        weights are put together by all ranks, as often as any needs them.
        """
        world = self.ranks.world
        rounds = range(-(-count // world))
        return [min(each * world + self.ranks.rank, count - 1) for each in rounds]

    def _of_all(self, own: list[T], count: int) -> list[T]:
        """What all ranks have, in the order of micro-batches."""
        found, world = self.ranks.gather(own), self.ranks.world
        return [found[k % world][k // world] for k in range(count)]

    def _found(
        self, view: View | None, size: int, samples: Sequence[Sample], bad: Sequence[DataError]
    ) -> _Found:
        """Of a micro-batch of `size` places."""
        part = _Found(Counter(each.kind for each in bad), str(bad[0]) if bad else "")
        if view is not None:
            # Where all are damaged, a black image keeps this rank in step with the others.
            black = np.zeros((3, view.size, view.size), np.uint8)
            filled = _filled([each["pixels"] for each in samples] or [black], size)
            pixels = torch.from_numpy(np.stack(filled))
            features = self.model.images(pixels.to(self.model.device)).float().cpu()
            part.features = features[: len(samples)]
            part.images = [
                _Image(each["place"], each["id"], each.get("label", -1), each["digest"])
                for each in samples
            ]
        for each in samples:
            # As in training: an image's captions, or a query's positive, whatever stands beside.
            paired = view is None or "text" not in each
            found = (each["positive"],) if paired and "positive" in each else each.get("text", ())
            texts = found if self.captions == "all" else found[:1]
            part.texts += [(each["id"], text) for text in texts]
            if paired and "query" in each:
                part.queries.append((each["id"], each["query"]))
        return part

    def _images(self, parts: Sequence[_Found], rows: list[int], ids: list[int]) -> Side | None:
        features = [part.features for part in parts if part.features is not None]
        return self._side(torch.cat(features)[rows], ids) if features else None

    def _labels(self, labels: list[int]) -> Tensor | None:
        known = bool(labels) and max(labels) >= 0
        return torch.tensor(labels, device=self.model.device) if known else None

    def _text_side(
        self, pairs: Sequence[tuple[int, str]], name: str, *, queries: bool = False
    ) -> Side:
        texts = [text for _, text in pairs]
        encoded = self.encode(texts, f"texts of {name}", queries=queries)
        return self._side(encoded, [number for number, _ in pairs], texts)

    def _side(self, features: Tensor, ids: list[int], texts: Sequence[str] = ()) -> Side:
        place = self.model.device
        return Side(features.to(place), torch.tensor(ids, device=place), list(texts))


def _filled(items: list[T], size: int) -> list[T]:
    """With the last one again until there are so many."""
    return items + items[-1:] * (size - len(items))


def _without_copies(images: Sequence[_Image]) -> list[int]:
    """Which to keep: of copies the first, since data may have a sample for each caption.

    Those of one id that are not the same image stay, and so does a copy with another label.
    """
    first: dict[tuple[Any, ...], int] = {}
    for row, image in enumerate(images):
        first.setdefault((image.id, image.label, image.pixels), row)
    return list(first.values())


def _looked_at(view: View | None, sample: Sample) -> Sample:
    """With pixels (3, size, size) and their digest in place of its image, which it must have if
    there is a view.
    """
    rest = {name: value for name, value in sample.items() if name != "image"}
    if view is None:
        return rest
    if "image" not in sample:
        raise DataError("want an image, as other samples have one, got none", "image")
    pixels = view(sample["image"], MIDDLE)
    return {
        **rest,
        "pixels": pixels,
        "digest": hashlib.blake2b(pixels.tobytes(), digest_size=16).digest(),
    }


def first_sound(source: Source, fields: set[str]) -> Sample:
    """Of some from all over the data, the first sample that is not damaged and has these fields, or
    the first without them.
    """
    last, without = None, None
    places = _spread(len(source), TRIED)
    for index in places:
        try:
            sample = source[index]
        except DataError as error:
            last = error
            continue
        if fields <= sample.keys():
            return sample
        without = without or sample
    if without is not None:
        return without
    raise DataError(
        f"want a sound sample, got none in {len(places)} of {len(source)}; the last: {last}; "
        "repair the data, or name others"
    ) from last


def _spread(count: int, most: int) -> list[int]:
    """Places all over the data, the first and the last among them."""
    places: list[int] = np.unique(np.linspace(0, count - 1, most).astype(int)).tolist()
    return places


def damage(kinds: Counter[str]) -> dict[str, float]:
    """How many samples are damaged, in all and by kind, as metrics; none if none is."""
    told = {f"damaged_{kind.replace(' ', '_')}": float(count) for kind, count in kinds.items()}
    return {"damaged": sum(told.values()), **told} if told else {}


def pixels_of(samples: Sequence[Sample], size: int = THUMB) -> list[Any]:
    """(size, size, 3) bytes of each, to show."""
    return [View(size)(each["image"], MIDDLE).transpose(1, 2, 0) for each in samples]


def check_labels(source: Source, name: str, classes: int) -> None:
    """Raise where a label has no class; of many samples some are looked at, without images."""
    for index in _spread(len(source), LOOKED_AT):
        try:
            label = light(source, index).get("label", -1)
        except DataError:
            continue
        if label >= classes:
            raise DataError(
                f"labels of {name!r} must be from 0 to {classes - 1}, one for each class name, got "
                f"{label} of sample {index}; give a name for each class (--classes, or classes.txt "
                "beside shards), in the order of the labels"
            )


def class_names(source: Source, path: str) -> list[str]:
    """A name a line of a file, or those that the data bring."""
    names = getattr(source, "classes", None)
    if path:
        if not Path(path).is_file():
            raise OptionError(f"classes must be a file with a name a line, {path!r} is not there")
        given = read_lines(Path(path))
        if names and len(names) != len(given):
            raise OptionError(
                f"classes must be a file with a name for each of the data's {len(names)} classes, "
                f"got {len(given)} in {path}"
            )
        return given
    if not names:
        raise DataError(
            "the data do not name their classes; give a file with a name a line (--classes)"
        )
    return list(names)
