"""Features of a whole data set, micro-batch by micro-batch."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.data.loader import in_order
from tilewise.data.samples import Sample, Source
from tilewise.data.views import CHANCES, View
from tilewise.errors import DataError, OptionError
from tilewise.models.base import PairModel

MIDDLE = np.full(CHANCES, 0.5)  # what an evaluation draws: nothing
TRIED = 100  # samples, to find one that is not damaged
THUMB = 64  # pixels a side of what a picture of results shows


@dataclass
class Side:
    """One side of pairs: features (n, D), and who they are."""

    features: Tensor
    ids: Tensor
    texts: list[str] = field(default_factory=list)


@dataclass
class Embedded:
    """What a model makes of a data set, on the model's device: what is measured, is there."""

    images: Side | None = None
    texts: Side | None = None  # captions, or documents
    queries: Side | None = None
    labels: Tensor | None = None  # (n,), those of the images
    bad: Counter[str] = field(default_factory=Counter)


def embed(
    model: PairModel, source: Source, *, batch: int, captions: str = "first", workers: int = 0
) -> Embedded:
    """All that the model can embed of each sample; the model is in eval mode."""
    view = View(model.image_size) if model.image_size else None
    found = _Found(model, captions)
    bad: Counter[str] = Counter()
    for samples, damaged in in_order(source, batch, partial(_looked_at, view), workers):
        bad += damaged
        found.add(samples)
    return found.finished(batch, bad)


def _looked_at(view: View | None, sample: Sample) -> Sample:
    """With pixels (3, size, size) for an image, if the model takes images."""
    rest = {name: value for name, value in sample.items() if name != "image"}
    if view is None or "image" not in sample:
        return rest
    return {**rest, "pixels": view(sample["image"], MIDDLE)}


class _Found:
    """Images as they come; texts, each once, at the end."""

    def __init__(self, model: PairModel, captions: str) -> None:
        self.model, self.captions = model, captions
        self.image_features: list[Tensor] = []
        self.image_ids: list[int] = []
        self.labels: list[int] = []
        self.texts: dict[tuple[int, str], None] = {}
        self.queries: list[tuple[int, str]] = []

    def add(self, samples: Sequence[Sample]) -> None:
        """A micro-batch."""
        if samples and "pixels" in samples[0]:
            pixels = torch.from_numpy(np.stack([each["pixels"] for each in samples]))
            self.image_features.append(self.model.images(pixels.to(self.model.device)).float())
            self.image_ids += [each["id"] for each in samples]
            self.labels += [each.get("label", -1) for each in samples]
        for each in samples:
            texts = each.get("text", (each["positive"],) if "positive" in each else ())
            for text in texts if self.captions == "all" else texts[:1]:
                self.texts.setdefault((each["id"], text))
            if "query" in each:
                self.queries.append((each["id"], each["query"]))

    def finished(self, batch: int, bad: Counter[str]) -> Embedded:
        """All of it."""
        images, labels = None, None
        if self.image_features:
            features = torch.cat(self.image_features)
            images = Side(features, torch.tensor(self.image_ids, device=features.device))
            if min(self.labels) >= 0:
                labels = torch.tensor(self.labels, device=features.device)
        has_texts = bool(self.texts) and self.model.can("texts")
        return Embedded(
            images=images,
            texts=_text_side(list(self.texts), self.model.texts, batch) if has_texts else None,
            queries=_text_side(self.queries, self.model.texts, batch) if self.queries else None,
            labels=labels,
            bad=bad,
        )


def first_sound(source: Source) -> Sample:
    """The first sample that is not damaged."""
    for index in range(min(len(source), TRIED)):
        try:
            return source[index]
        except DataError as error:
            last = error
    raise DataError(f"the first {TRIED} samples are damaged; the last: {last}") from last


def _text_side(
    pairs: Sequence[tuple[int, str]], encode: Callable[[list[str]], Tensor], batch: int
) -> Side:
    texts = [text for _, text in pairs]
    parts = [encode(texts[i : i + batch]).float() for i in range(0, len(texts), batch)]
    features = torch.cat(parts)
    ids = torch.tensor([number for number, _ in pairs], device=features.device)
    return Side(features, ids, texts)


def pixels_of(samples: Sequence[Sample], size: int = THUMB) -> list[Any]:
    """(size, size, 3) bytes of each, to show."""
    return [View(size)(each["image"], MIDDLE).transpose(1, 2, 0) for each in samples]


def class_names(source: Source, path: str) -> list[str]:
    """A name a line of a file, or those that the data bring."""
    if path:
        if not Path(path).is_file():
            raise OptionError(f"classes must be a file with a name a line, {path!r} is not there")
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip()]
    names = getattr(source, "classes", None)
    if not names:
        raise DataError(
            "the data do not name their classes; give a file with a name a line (--classes)"
        )
    return list(names)
