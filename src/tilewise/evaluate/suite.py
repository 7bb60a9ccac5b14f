"""All that a configuration wants measured of a model: numbers and pictures."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.config import EvalConfig
from tilewise.data.decode import read_lines
from tilewise.data.samples import Source
from tilewise.data.sources import open_source
from tilewise.errors import DataError, OptionError
from tilewise.evaluate import plots
from tilewise.evaluate.classify import (
    check_templates,
    class_vectors,
    knn,
    labels_by_name,
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
    damage,
    first_sound,
    pixels_of,
    untold,
)
from tilewise.evaluate.localise import check_scenes, localise
from tilewise.evaluate.ranking import image_text_metrics, retrieval_metrics, top
from tilewise.models.base import PairModel, evaluating
from tilewise.ranks import ALONE, Ranks

SHOWN, BEST = 6, 5  # texts in the picture of results, and images of each
LONGEST = 100  # bytes of a data set's name in that of a file
PICTURES = ("similarities-*.png", "retrieval-*.png", "localise.png", "localise-*.png")


def unsaid(text: str) -> None:
    """Say it to nobody."""


def pictures(folder: Path) -> list[Path]:
    """Those that a `Suite` has drawn there."""
    return sorted(path for pattern in PICTURES for path in folder.glob(pattern))


@dataclass
class Suite:
    """Opens its data once, so that what is missing is missed before training starts."""

    config: EvalConfig
    workers: int = 0
    index_folder: str = ""
    ranks: Ranks = ALONE
    tell: Tell = untold
    say: Callable[[str], None] = unsaid
    """Shows a line."""
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
        if self.config.probe:
            self._check_probe()
        for name in self.config.localise:
            try:
                check_scenes(model, self.sources[name])
            except DataError as error:
                raise DataError(f"localise {name!r}: {error}", error.kind) from error

    def _check_fields(self, what: str, name: str, able: set[str]) -> None:
        known = [{"image", "label" if what in ("zero_shot", "probe") else "text"}]
        if what == "retrieval":
            known = [*(known if "images" in able else []), {"query", "positive"}]
        for fields in known:
            has = sorted(first_sound(self.sources[name], fields))
            if fields <= set(has):
                return
        wanted = " or ".join(" and ".join(sorted(fields)) for fields in known)
        computed = "; features that were computed before do not do, name data with their images"
        raise DataError(
            f"{what} needs {wanted}, and samples of {name!r} have {', '.join(has)}"
            f"{computed if 'features' in has else ''}"
        )

    def _check_probe(self) -> None:
        """Raise where both data name their classes, and those to test have others, or too few."""
        (train, known), (test, wanted) = named = self._probe_classes()
        if not (known and wanted):
            return
        for name, classes in named:
            check_labels(self.sources[name], name, len(classes))
        if lost := [name for name in wanted if name not in set(known)]:
            raise DataError(
                f"a probe needs all classes of {test!r} among those of {train!r}, which lacks "
                f"{len(lost)}, the first {lost[0]!r}; give both the same names, or take other data"
            )

    def _probe_classes(self) -> list[tuple[str, list[str]]]:
        """Of the data to train and to test, with the names of classes that they bring."""
        names = self.config.probe
        return [(name, list(getattr(self.sources[name], "classes", []))) for name in names]

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
            metrics |= self._left_out(found)
            for name in self.config.retrieval:
                metrics |= _named(name, self._retrieval(found[name], name, folder))
            for name in self.config.zero_shot:
                metrics |= _named(name, self._zero_shot(embedder, found[name], name))
            if self.config.probe:
                metrics |= _named(self.config.probe[1], self._probe(found))
            # Scenes are many images each: at the end, with the pictures.
            for name in self.config.localise if whole else ():
                told = partial(self.tell, f"scenes of {name}")
                picture = None if folder is None else folder / self._scenes_file(name)
                scenes = localise(model, self.sources[name], picture=picture, on_progress=told)
                if name in found:  # its damage is counted over all samples
                    scenes = {k: x for k, x in scenes.items() if not k.startswith("damaged")}
                metrics |= _named(name, scenes)
        return metrics

    def _scenes_file(self, name: str) -> str:
        """localise.png, unless scenes of other data are to lie beside it."""
        return f"localise-{_plain(name)}.png" if len(self.config.localise) > 1 else "localise.png"

    def _retrieval(self, found: Embedded, name: str, folder: Path | None) -> dict[str, float]:
        rows, texts = found.images if found.queries is None else found.queries, found.texts
        if rows is None or texts is None:
            raise DataError(
                "retrieval needs images with texts, or queries with documents; "
                f"{name!r} has not both"
            )
        known = _with_texts(rows, texts)
        lost = len(rows.ids) - len(known.ids)
        features, ids = (known.features, texts.features), (known.ids, texts.ids)
        _plot_similarities(folder, name, features, ids)
        if found.queries is None and folder is not None:
            self._plot_grid(found, name, folder)
        measure = image_text_metrics if found.queries is None else retrieval_metrics
        return {**measure(*features, *ids), **({"without_text": float(lost)} if lost else {})}

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
        known = class_names(self.sources[name], self.config.classes)
        names = list(dict.fromkeys(known))  # of one name there is one class
        prompts, seen = templates(self.config), 0

        def encode(texts: list[str]) -> Tensor:
            nonlocal seen
            seen += len(texts)
            self.tell(f"embedding prompts of {name}", seen, len(names) * len(prompts))
            return embedder.encode(texts)

        together = embedder.batch * self.ranks.world
        vectors = class_vectors(encode, names, prompts, chunk=together)
        labels = labels_by_name(labelled[1], known, names)
        shares = zero_shot(labelled[0], vectors, labels)
        return {f"zeroshot_{key}": value for key, value in shares.items()}

    def _left_out(self, found: dict[str, Embedded]) -> dict[str, float]:
        """How many samples were damaged, which is said, too, and had no label where one is wanted;
        what is not 0.
        """
        counts = dict[str, float]()
        for name, each in found.items():
            counts |= _named(name, damage(each.bad))
            if each.bad:
                kinds = ", ".join(f"{count} {kind}" for kind, count in each.bad.most_common())
                self.say(
                    f"{sum(each.bad.values()):,} of {len(self.sources[name]):,} samples of {name} "
                    f"are damaged and left out ({kinds}); the first: {each.first_bad}"
                )
            labelled = name in (*self.config.zero_shot, *self.config.probe)
            if labelled and each.labels is not None and (each.labels < 0).any():
                counts[f"{name}/unlabelled"] = float((each.labels < 0).sum())
        return counts

    def _probe(self, found: dict[str, Embedded]) -> dict[str, float]:
        sides: list[Any] = []
        named = self._probe_classes()
        for name, classes in named:
            labelled = found[name].labelled()
            if labelled is None:
                raise DataError("a probe needs images with labels on both sides")
            features, labels = labelled
            if all(names for _, names in named):  # folders may have been counted differently
                labels = labels_by_name(labels, classes, named[0][1])
            sides += [features, labels]
        return {**knn(*sides), **linear_probe(*sides)}


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


def _with_texts(rows: Side, texts: Side) -> Side:
    """Those of whose id there is a text; the others can neither be found nor find anything."""
    there = torch.isin(rows.ids, texts.ids)
    return Side(rows.features[there], rows.ids[there])


def _named(name: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{name}/{key}": value for key, value in metrics.items()}


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
