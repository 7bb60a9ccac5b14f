"""All that a configuration wants measured of a model: numbers and pictures."""

import hashlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.data.decode import read_lines
from tilewise.data.samples import Source
from tilewise.data.sources import open_source
from tilewise.errors import DataError, OptionError
from tilewise.evaluate import plots
from tilewise.evaluate.classify import (
    check_templates,
    class_vectors,
    knn,
    linear_probe,
    zero_shot,
)
from tilewise.evaluate.embed import (
    Embedded,
    Embedder,
    Side,
    Tell,
    check_labels,
    class_names,
    first_sound,
    pixels_of,
    untold,
)
from tilewise.evaluate.localise import localise
from tilewise.evaluate.ranking import image_text_metrics, retrieval_metrics, top
from tilewise.models.base import PairModel, evaluating
from tilewise.train.config import EvalConfig
from tilewise.train.setup import ALONE, Ranks

SHOWN, BEST = 6, 5  # texts in the picture of results, and images of each
LONGEST = 100  # bytes of a data set's name in that of a file


@dataclass
class Suite:
    """Opens its data once, so that what is missing is missed before training starts."""

    config: EvalConfig
    workers: int = 0
    index_folder: str = ""
    ranks: Ranks = ALONE
    tell: Tell = untold
    sources: dict[str, Source] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last run; if that raised, what was measured before."""

    def __post_init__(self) -> None:
        config = self.config
        for name in (*config.retrieval, *config.zero_shot, *config.probe, *config.localise):
            if name not in self.sources:
                self.sources[name] = open_source(name, index_folder=self.index_folder or None)
        for name in config.zero_shot:
            names = class_names(self.sources[name], config.classes)
            check_labels(self.sources[name], name, len(names))
        if config.zero_shot:
            check_templates(templates(config))

    def check(self, model: PairModel) -> None:
        """Raise unless the data have what is to be measured, and the model can."""
        able = {name for name in ("images", "texts", "patches") if model.can(name)}
        wants = {
            "retrieval": (self.config.retrieval, {"texts"}),
            "zero_shot": (self.config.zero_shot, {"images", "texts"}),
            "probe": (self.config.probe, {"images"}),
            "localise": (self.config.localise, {"patches", "texts"}),
        }
        for what, (names, needed) in wants.items():
            if names and not needed <= able:
                raise OptionError(
                    f"{what} needs {' and '.join(sorted(needed))} of a model, and "
                    f"{type(model).__name__} has {', '.join(sorted(able)) or 'none'}; leave it out"
                )
            for name in names:
                self._check_fields(what, name, able)

    def _check_fields(self, what: str, name: str, able: set[str]) -> None:
        labelled = what in ("zero_shot", "probe")
        has = set(first_sound(self.sources[name], "label" if labelled else "id"))
        if what == "retrieval":
            pair = {"image", "text"} if "images" in able else {"query", "positive"}
            fine = pair <= has or {"query", "positive"} <= has
            wanted = " and ".join(sorted(pair))
        else:
            wanted = "image and label" if labelled else "image and text"
            fine = set(wanted.split(" and ")) <= has
        if not fine:
            raise DataError(f"{what} needs {wanted}, and samples of {name!r} have {', '.join(has)}")

    def run(
        self, model: PairModel, folder: Path | None = None, *, whole: bool = True
    ) -> dict[str, float]:
        """Metrics by "data/metric"; with a folder, pictures in it; not whole: what is quick.

        All ranks call it, and get the same.
        """
        config = self.config
        how = (config.eval_batch, config.captions, self.workers, self.ranks, self.tell)
        embedder = Embedder(model, *how)
        self.metrics = metrics = dict[str, float]()
        with evaluating(model):
            self.ranks.align(model)
            names = dict.fromkeys((*config.retrieval, *config.zero_shot, *config.probe))
            found = {name: embedder.embed(self.sources[name], name) for name in names}
            metrics |= _left_out(found, {*config.zero_shot, *config.probe})
            for name in self.config.retrieval:
                metrics |= _named(name, self._retrieval(found[name], name, folder))
            for name in self.config.zero_shot:
                metrics |= _named(name, self._zero_shot(embedder, found[name], name))
            if self.config.probe:
                metrics |= _named(
                    self.config.probe[1], _probe(*(found[name] for name in self.config.probe))
                )
            # Scenes are many images each: at the end, with the pictures.
            for name in self.config.localise if whole else ():
                told = partial(self.tell, f"scenes of {name}")
                picture = None if folder is None else folder / self._scenes_file(name)
                scenes = localise(model, self.sources[name], picture=picture, on_progress=told)
                # Damage met in scenes is part of what was counted over all samples.
                metrics |= {**_named(name, scenes), **metrics}
        return metrics

    def _scenes_file(self, name: str) -> str:
        """localise.png, unless scenes of other data are to lie beside it."""
        return f"localise-{_plain(name)}.png" if len(self.config.localise) > 1 else "localise.png"

    def _retrieval(self, found: Embedded, name: str, folder: Path | None) -> dict[str, float]:
        if found.queries is not None and found.texts is not None:
            queries, texts = found.queries, found.texts
            _plot_similarities(
                folder, name, (queries.features, texts.features), (queries.ids, texts.ids)
            )
            return retrieval_metrics(queries.features, texts.features, queries.ids, texts.ids)
        if found.images is None or found.texts is None:
            raise DataError(
                "retrieval needs images with texts, or queries with documents; "
                f"{name!r} has not both"
            )
        texts = found.texts
        images = _with_texts(found.images, texts)
        lost = len(found.images.ids) - len(images.ids)
        _plot_similarities(folder, name, (images.features, texts.features), (images.ids, texts.ids))
        if folder is not None:
            self._plot_grid(found, name, folder)
        metrics = image_text_metrics(images.features, texts.features, images.ids, texts.ids)
        return {**metrics, **({"without_text": float(lost)} if lost else {})}

    def _plot_grid(self, found: Embedded, name: str, folder: Path) -> None:
        assert found.images is not None
        assert found.texts is not None
        picks = torch.linspace(0, len(found.texts.texts) - 1, SHOWN + 2).long()[1:-1].unique()
        best = top(
            found.texts.features[picks],
            found.images.features,
            min(BEST, len(found.images.features)),
        )[1].cpu()
        source = self.sources[name]
        rows = [pixels_of([source[found.places[i]] for i in row]) for row in best]
        hits = [
            [bool(found.images.ids[i] == found.texts.ids[pick]) for i in row]
            for pick, row in zip(picks, best, strict=True)
        ]
        plots.plot_retrieval_grid(
            folder / f"retrieval-{_plain(name)}.png",
            [found.texts.texts[i] for i in picks],
            rows,
            hits,
        )

    def _zero_shot(self, embedder: Embedder, found: Embedded, name: str) -> dict[str, float]:
        labelled = found.labelled()
        if labelled is None:
            raise DataError(
                f"zero-shot classification needs images with labels; {name!r} has not both"
            )
        names = class_names(self.sources[name], self.config.classes)
        prompts, seen = templates(self.config), 0

        def encode(texts: list[str]) -> Tensor:
            nonlocal seen
            seen += len(texts)
            self.tell(f"embedding prompts of {name}", seen, len(names) * len(prompts))
            return embedder.encode(texts)

        together = embedder.batch * self.ranks.world
        vectors = class_vectors(encode, names, prompts, chunk=together)
        return {
            f"zeroshot_{key}": value
            for key, value in zero_shot(labelled[0], vectors, labelled[1]).items()
        }


def templates(config: EvalConfig) -> list[str]:
    """Those given, or those of a file."""
    given = list(config.templates)
    if len(given) == 1 and given[0].endswith(".txt"):
        path = Path(given[0])
        if not path.is_file():
            raise OptionError(
                f"templates must be sentences or a file of them, got {given[0]!r}, "
                "which is not there"
            )
        given = read_lines(path)
    return given


def _with_texts(images: Side, texts: Side) -> Side:
    """Images of whose id there is a text; the others can neither be found nor find anything."""
    there = torch.isin(images.ids, texts.ids)
    return Side(images.features[there], images.ids[there])


def _named(name: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{name}/{key}": value for key, value in metrics.items()}


def _left_out(found: dict[str, Embedded], labelled: set[str]) -> dict[str, float]:
    """How many samples were damaged, and had no label where one is wanted; what is not 0."""
    counts = {f"{name}/damaged": sum(each.bad.values()) for name, each in found.items()}
    for name, each in found.items():
        if name in labelled and each.labels is not None:
            counts[f"{name}/unlabelled"] = int((each.labels < 0).sum())
    return {name: float(count) for name, count in counts.items() if count}


def _probe(train: Embedded, test: Embedded) -> dict[str, float]:
    sides: list[Any] = []
    for each in (train, test):
        labelled = each.labelled()
        if labelled is None:
            raise DataError("a probe needs images with labels on both sides")
        sides += labelled
    return {**knn(*sides), **linear_probe(*sides)}


def _plot_similarities(
    folder: Path | None, name: str, sides: tuple[Tensor, Tensor], ids: tuple[Tensor, Tensor]
) -> None:
    """Of every row with one match, and with one text that is not."""
    if folder is None:
        return
    (rows, cols), (row_ids, col_ids) = sides, ids
    first = {int(number): place for place, number in reversed(list(enumerate(col_ids.tolist())))}
    places = [first.get(number, 0) for number in row_ids.tolist()]
    own = torch.tensor(places, device=col_ids.device)
    other = (own + len(cols) // 2) % len(cols)
    matching, rest = ((rows * cols[at]).sum(1) for at in (own, other))
    rest = rest[col_ids[other] != row_ids]
    if len(rest):
        plots.plot_similarities(
            folder / f"similarities-{_plain(name)}.png", matching.cpu(), rest.cpu(), name
        )


def _plain(name: str) -> str:
    """As part of a file's name: no file system takes one of more than 255 bytes."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
    if len(plain.encode()) <= LONGEST:
        return plain
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{plain.encode()[:LONGEST].decode(errors='ignore')}-{digest}"
