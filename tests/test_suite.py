"""Evaluation of models on data, and the commands that do it."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ranks
from tilewise.cli import main
from tilewise.config import EvalConfig
from tilewise.data.pack import pack_source
from tilewise.data.sources import open_source
from tilewise.errors import CheckpointError, DataError, OptionError
from tilewise.evaluate import plots
from tilewise.evaluate import suite as evaluation
from tilewise.evaluate.embed import Embedder, class_names
from tilewise.evaluate.localise import make_scene, overlap, read_heat
from tilewise.evaluate.suite import Suite, templates
from tilewise.models.base import PairModel
from tilewise.models.libraries import need
from tilewise.ranks import Ranks
from tilewise.train.setup import _device, _told

TINY = str(Path(__file__).parent / "tiny.json")
COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


class Colours(PairModel):
    """Knows the colours: an image is its mean, a text the colours that it names."""

    image_size = 8

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def images(self, pixels):
        return torch.nn.functional.normalize(pixels.float().mean((2, 3)), dim=1)

    def texts(self, texts, *, queries=False):
        rows = [sum((np.array(c) for n, c in COLOURS.items() if n in text), np.ones(3))
                for text in texts]  # fmt: skip
        return torch.nn.functional.normalize(torch.tensor(np.stack(rows)).float(), dim=1)

    def patches(self, pixels):
        return torch.nn.functional.normalize(pixels.float() + 1, dim=1)


@pytest.fixture
def folder(tmp_path):
    """An ImageNet-like folder: three classes of four images, and one that is damaged."""
    for name, colour in COLOURS.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            shade = tuple(int(c * (0.5 + i / 8)) for c in colour)
            Image.new("RGB", (20 + i, 16), shade).save(tmp_path / "images" / name / f"{i}.jpg")
    return tmp_path / "images"


def test_zero_shot_of_a_folder_and_of_shards_of_it(folder, tmp_path):
    assert (
        main(["data", "pack", str(folder), str(tmp_path / "shards"), "--samples-per-shard", "5"])
        == 0
    )
    names = (str(folder), str(tmp_path / "shards"))
    found = Suite(EvalConfig(retrieval=(), zero_shot=names, templates=("a {} thing", "{}"))).run(
        Colours()
    )
    for name in names:
        assert found[f"{name}/zeroshot_top1"] == 1.0
        assert found[f"{name}/zeroshot_mean_per_class"] == 1.0
    classes = tmp_path / "names.txt"
    classes.write_text("green\nblue\nred\n")
    wrong = Suite(EvalConfig(retrieval=(), zero_shot=names[:1], classes=str(classes))).run(
        Colours()
    )
    assert wrong[f"{folder}/zeroshot_top1"] == pytest.approx(1 / 3)


def test_templates_and_classes_may_be_in_files(folder, tmp_path):
    """As any editor may have saved them, in UTF-8."""
    file, names = tmp_path / "templates.txt", tmp_path / "names.txt"
    how = {"templates": (str(file),), "classes": str(names)}
    config = EvalConfig(retrieval=(), zero_shot=(str(folder),), **how)
    for start, end in (("", "\n"), ("\ufeff", "\r\n")):
        file.write_bytes(f"{start}a {{}}{end}{end}the {{}}{end}".encode())
        names.write_bytes(f"{start}blue{end}green {end}red{end}{end}".encode())
        assert templates(config) == ["a {}", "the {}"]
        suite = Suite(config)
        assert class_names(suite.sources[str(folder)], str(names)) == ["blue", "green", "red"]
        assert suite.run(Colours())[f"{folder}/zeroshot_top1"] == 1.0
    for wrong in (file, names):
        sound = wrong.read_bytes()
        wrong.write_bytes("é {}\nb\nc\n".encode("latin-1"))
        with pytest.raises(DataError, match=rf"{wrong.name}.*UTF-8"):
            Suite(config)
        wrong.write_bytes(sound)
    with pytest.raises(OptionError, match="not there"):
        Suite(EvalConfig(retrieval=(), zero_shot=(str(folder),), templates=("no.txt",)))
    with pytest.raises(OptionError, match=r"must hold \{\}"):
        Suite(EvalConfig(retrieval=(), zero_shot=(str(folder),), templates=("a thing",)))


def test_damaged_images_are_left_out_and_told(folder):
    (folder / "red" / "4.jpg").write_bytes(b"no image")
    found = Suite(EvalConfig(retrieval=(), zero_shot=(str(folder),))).run(Colours())
    assert found[f"{folder}/zeroshot_top1"] == 1.0
    assert found[f"{folder}/damaged"] == 1.0


def test_damage_is_said_by_kind(folder, tmp_path):
    """How many of how many, of which data, and what is wrong with the first."""
    rows = [{"image": f"images/{name}/0.jpg", "caption": name} for name in COLOURS]
    rows[1:1] = [{"image": "images/red/9.jpg", "caption": "gone"}, {"caption": ""}, {"caption": ""}]
    name, said = str(tmp_path / "some.jsonl"), list[str]()
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    for batch in (1, 4):
        config = EvalConfig(retrieval=(name,), zero_shot=(), eval_batch=batch)
        found = Suite(config, say=said.append).run(Colours())
        kinds = {kind: found[f"{name}/damaged{kind}"] for kind in ("", "_empty_text", "_missing")}
        assert kinds == {"": 3.0, "_empty_text": 2.0, "_missing": 1.0}
    assert said[0] == said[1]
    assert len(said) == 2
    assert f"3 of 6 samples of {name} are damaged and left out (2 empty text, 1 missing)" in said[0]
    assert "the first: row 1 of " in said[0]
    Suite(EvalConfig(retrieval=("synthetic:4",), zero_shot=()), say=said.append).run(Colours())
    assert len(said) == 2


def painted(place, names):
    """Class folders of one image each, of the colours with which the names begin."""
    for name in names:
        (place / name).mkdir(parents=True)
        colour = COLOURS[name.split()[0]]
        for i in range(2):
            Image.new("RGB", (16, 16), tuple(c // (i + 1) for c in colour)).save(
                place / name / f"{i}.png"
            )
    return str(place)


def test_a_probe_compares_classes_by_their_names(tmp_path):
    train = painted(tmp_path / "train", ["blue", "green", "red"])
    test = painted(tmp_path / "test", ["green", "red"])
    suite = Suite(EvalConfig(retrieval=(), zero_shot=(), probe=(train, test)))
    suite.check(Colours())
    found = suite.run(Colours())
    assert found[f"{test}/knn_top1"] == found[f"{test}/linear_probe_top1"] == 1.0
    lost = Suite(EvalConfig(retrieval=(), zero_shot=(), probe=(test, train)))
    with pytest.raises(DataError, match=r"lacks 1, the first 'blue'; give both the same names"):
        lost.check(Colours())


def test_classes_of_one_name_are_one(tmp_path):
    """As open_clip's names of ImageNet have two."""
    folder, names = painted(tmp_path / "all", ["blue", "red", "red 2"]), tmp_path / "names.txt"
    names.write_text("blue\nred\nred\n")
    config = EvalConfig(retrieval=(), zero_shot=(folder,), classes=str(names))
    found = Suite(config).run(Colours())
    assert found[f"{folder}/zeroshot_top1"] == found[f"{folder}/zeroshot_mean_per_class"] == 1.0


def labelled(tmp_path, labels):
    """Shards of red images with these labels, None for none."""
    rows = [{"image": f"images/red/{k % 4}.jpg", **({} if label is None else {"label": label})}
            for k, label in enumerate(labels)]  # fmt: skip
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    name = str(tmp_path / f"shards{len(labels)}")
    assert main(["data", "pack", str(tmp_path / "labels.jsonl"), name]) == 0
    return name


def test_labels_without_a_class_are_found_before_training(folder, tmp_path):
    name, classes = labelled(tmp_path, [0, 1, 2, 3]), tmp_path / "names.txt"
    how = {"retrieval": (), "zero_shot": (name,), "classes": str(classes)}
    classes.write_text("green\nblue\nred\n")
    with pytest.raises(DataError, match=r"from 0 to 2.*got 3 of sample 3.*\(--classes, or"):
        Suite(EvalConfig(**how))
    classes.write_text("green\nblue\nred\npink\n")
    assert Suite(EvalConfig(**how)).run(Colours())[f"{name}/zeroshot_top1"] == 0.25


def test_samples_without_a_label_are_left_out_and_told(folder, tmp_path):
    """The first one too; without any label there is nothing to measure."""
    name, classes = labelled(tmp_path, [None, 1, None, 2, 1]), tmp_path / "names.txt"
    classes.write_text("green\nred\nblue\n")
    how = {"zero_shot": (name,), "classes": str(classes), "probe": (name, name)}
    suite = Suite(EvalConfig(retrieval=(), **how))
    suite.check(Colours())
    found = suite.run(Colours())
    assert found[f"{name}/unlabelled"] == 2.0
    assert found[f"{name}/zeroshot_top1"] == pytest.approx(2 / 3)
    assert f"{name}/knn_top1" in found
    nothing = labelled(tmp_path, [None])
    suite = Suite(EvalConfig(retrieval=(), zero_shot=(nothing,), classes=str(classes)))
    for ask in (suite.check, suite.run):
        with pytest.raises(DataError, match="label"):
            ask(Colours())


def test_images_without_a_text_are_left_out_of_retrieval_and_told(folder, tmp_path):
    rows = [{"image": f"images/{name}/0.jpg", "text": name, "id": k}
            for k, name in enumerate(("red", "green", "blue"))]  # fmt: skip
    rows.insert(1, {"image": "images/red/1.jpg", "id": 7})
    table = tmp_path / "some.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    found = Suite(EvalConfig(retrieval=(str(table),))).run(Colours())
    assert found[f"{table}/without_text"] == 1.0
    assert found[f"{table}/image_to_text_R@1"] == found[f"{table}/text_to_image_R@1"] == 1.0
    assert found[f"{table}/image_to_text_queries"] == 3.0


def test_pictures_of_data_with_long_names(folder, tmp_path):
    (tmp_path / "out").mkdir()
    for folders in (["é" * 90, "b" * 90], ["é" * 90, "c" * 90]):
        long = "/".join([str(tmp_path), *folders])
        Path(long).mkdir(parents=True)
        name = f"{table(Path(long), folder)}?images={tmp_path}"
        Suite(EvalConfig(retrieval=(name,), zero_shot=())).run(Colours(), tmp_path / "out")
    assert len({path.name for path in (tmp_path / "out").iterdir()}) == 4


def table(tmp_path, folder):
    rows = [
        {"image": f"images/{name}/0.jpg", "captions": [f"{name} thing", f"nothing {name}"]}
        for name in COLOURS
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "pairs.jsonl")


def test_retrieval_with_several_captions(folder, tmp_path):
    name = table(tmp_path, folder)
    (tmp_path / "out").mkdir()
    for captions, gallery in (("first", 3.0), ("all", 6.0)):
        config = EvalConfig(retrieval=(name,), zero_shot=(), captions=captions)
        found = Suite(config).run(Colours(), tmp_path / "out")
        assert found[f"{name}/image_to_text_R@1"] == 1.0
        assert found[f"{name}/text_to_image_R@1"] == 1.0
        assert found[f"{name}/image_to_text_gallery"] == gallery
    assert len(list((tmp_path / "out").glob("*.png"))) == 2


def test_a_row_for_each_caption(folder, tmp_path):
    """As COCO's tables are: an image is there once, and found by all that is said of it."""
    (tmp_path / "out").mkdir()
    rows = [f"images/{name}/0.jpg,{name} {k}\n" for k in range(5) for name in COLOURS]
    (tmp_path / "rows.csv").write_text("image,caption\n" + "".join(rows))
    table, packed = str(tmp_path / "rows.csv"), str(tmp_path / "shards")
    assert main(["data", "pack", table, packed]) == 0
    assert main(["data", "pack", packed, f"{packed}-again", "--size", "12"]) == 0
    names = (table, f"{table}@0-100", packed, f"{packed}-again", f"{packed}@0-100")
    for name, captions in product(names, ("first", "all")):
        config = EvalConfig(retrieval=(name,), zero_shot=(), captions=captions)
        drawn = tmp_path / "out" if name in names[:2] and captions == "first" else None
        found = Suite(config).run(Colours(), drawn)
        for way, (queries, gallery) in {"image_to_text": (3, 15), "text_to_image": (15, 3)}.items():
            assert found[f"{name}/{way}_R@1"] == 1.0
            assert found[f"{name}/{way}_queries"] == queries
            assert found[f"{name}/{way}_gallery"] == gallery
    assert len(list((tmp_path / "out").glob("retrieval-*.png"))) == 2


def test_several_images_of_one_id_stay(folder, tmp_path):
    """Only the same pixels are there once; one with two labels is there for each."""
    rows = [{"image": f"images/{name}/{k}.jpg", "caption": name, "label": label}
            for label, name in enumerate(COLOURS) for k in (0, 1, 1)]  # fmt: skip
    rows.append({**rows[0], "label": 2})
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = Embedder(Colours(), 4).embed(open_source(str(tmp_path / "some.jsonl")))
    assert found.places == [0, 1, 3, 4, 6, 7, 9]
    assert len(found.images.features) == len(found.images.ids) == 7
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert len(found.images.ids.unique()) == len(found.texts.ids) == 3


def test_best_images_are_shown_beside_a_damaged_one(folder, tmp_path, monkeypatch):
    """Those that the features are of."""
    name, shown = table(tmp_path, folder), []
    (folder / "blue" / "0.jpg").write_bytes(b"no image")
    monkeypatch.setattr(plots, "plot_retrieval_grid", lambda path, *of: shown.append(of))
    Suite(EvalConfig(retrieval=(name,), zero_shot=())).run(Colours(), tmp_path)
    ((texts, rows, hits),) = shown
    for text, row, hit in zip(texts, rows, hits, strict=True):
        assert hit == [True, False]
        assert row[0].mean((0, 1)).argmax() == {"red": 0, "green": 1}[text.split()[0]]


class Counted(Colours):
    """Counts the images that it is shown, and has a running mean that training gave it."""

    def __init__(self, mean=0.0):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.seen = []

    def images(self, pixels):
        self.seen.append(len(pixels))
        return super().images(pixels + self.mean)


def on_ranks(rank, config):
    model = Counted(mean=float(rank))
    found = Suite(config, ranks=Ranks(rank, 3, torch.device("cpu"))).run(model)
    return found, model.seen, float(model.mean)


def test_ranks_share_an_evaluation(folder, tmp_path):
    """13 images and 3 more, two at a time or one; the last part is filled up."""
    (folder / "red" / "4.jpg").write_bytes(b"no image")
    own, pairs = str(folder), table(tmp_path, folder)
    for batch, seen in ((2, [2] * 4), (1, [1] * 6)):
        config = EvalConfig(retrieval=(pairs,), zero_shot=(own,), probe=(own, own),
                            captions="all", eval_batch=batch)  # fmt: skip
        alone = Suite(config).run(Counted())
        for rank, (found, shown, mean) in enumerate(ranks.run(on_ranks, 3, config)):
            assert found == alone
            assert mean == 0.0
            assert shown == seen, rank


def test_samples_without_an_image_count_as_damaged(folder, tmp_path):
    """Whatever the micro-batch: their neighbours stay."""
    rows = [{"image": f"images/{name}/0.jpg", "caption": name} for name in COLOURS]
    rows[1:1] = [{"caption": "none"}, {"caption": "no picture"}]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for batch in (1, 2, 3, 8):
        source = open_source(str(tmp_path / "some.jsonl"))
        found = Embedder(Colours(), batch).embed(source)
        assert found.bad == {"image": 2}
        assert len(found.images.features) == len(found.texts.features) == 3


class Rounding(Counted):
    """Rounds in another way in another shape, as matrix products do."""

    def images(self, pixels):
        return super().images(pixels) + 1e-6 * len(pixels)

    def texts(self, texts, *, queries=False):
        longest = max(map(len, texts))
        return super().texts(texts) + 1e-6 * (len(texts) + longest)


def test_twins_tie_whatever_the_micro_batch(folder, tmp_path):
    """Those in a last micro-batch that is shorter, or where others are damaged, too."""
    rows = [{"image": f"images/red/{k % 2}.jpg", "text": "a red" + "d" * k, "label": k}
            for k in range(5)]  # fmt: skip
    rows[2]["image"] = "images/red/9.jpg"
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = open_source(str(tmp_path / "some.jsonl"))
    for batch in (1, 2, 3, 4, 5, 8):
        model = Rounding()
        embedder = Embedder(model, batch)
        images = embedder.embed(source).images.features
        assert torch.equal(images[0], images[3])
        assert torch.equal(images[1], images[2])
        assert len(set(model.seen)) == 1
        assert max(model.seen) <= len(source)
        texts = embedder.encode(["red", "green", "a long red", "blue", "red"])
        assert torch.equal(texts[0], texts[4])
        alike = embedder.encode([f"{letter} red" for letter in "abcde"])
        assert torch.equal(alike, alike[:1].expand_as(alike))


@pytest.mark.parametrize(
    ("pair", "beside", "way"),
    [
        ({"query": "{}", "positive": "{} thing"}, {"text": "of the shop"}, ""),
        ({"image": "images/{}/0.jpg", "text": "{}"}, {"query": "any"}, "image_to_text_"),
    ],
    ids=["texts", "images"],
)
def test_what_stands_beside_a_pair_is_not_measured(folder, tmp_path, pair, beside, way):
    """A query finds its positive, an image its captions, as in training."""
    rows = [{key: x.format(name) for key, x in pair.items()} | beside for name in COLOURS]
    name = str(tmp_path / "some.jsonl")
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    source = open_source(name)
    assert len({source[i]["id"] for i in range(len(source))}) == len(COLOURS)
    found = Suite(EvalConfig(retrieval=(name,), zero_shot=())).run(Colours())
    assert found[f"{name}/{way}gallery"] == len(COLOURS)
    assert found[f"{name}/{way}R@1"] == 1.0


def test_queries_with_several_documents(tmp_path):
    """A query is there once, and finds each of its documents; one that has none is left out."""
    rows = [("red", "red one"), ("red", "red two"), ("blue", "blue"), ("green", None)]
    rows = [{"query": query, **({"positive": text} if text else {})} for query, text in rows]
    name = str(tmp_path / "texts.jsonl")
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    found = Suite(EvalConfig(retrieval=(name,), zero_shot=())).run(Colours())
    assert found[f"{name}/R@1"] == found[f"{name}/nDCG@10"] == 1.0
    assert found[f"{name}/queries"] == 2.0
    assert found[f"{name}/gallery"] == 3.0
    assert found[f"{name}/without_text"] == 1.0


def test_one_odd_row_refuses_no_evaluation(folder, tmp_path):
    """Wherever it is; where all are odd, what they have is told in order."""
    odd = ["images/red/1.jpg,\n"] * 150
    rows = [f"images/{name}/0.jpg,{name}\n" for name in COLOURS]
    for some in (odd[:1] + rows, odd + rows * 50, rows + odd):
        (tmp_path / "rows.csv").write_text("image,caption\n" + "".join(some))
        suite = Suite(EvalConfig(retrieval=(str(tmp_path / "rows.csv"),), zero_shot=()))
        suite.check(Colours())
        assert suite.run(Colours())[f"{tmp_path / 'rows.csv'}/text_to_image_R@1"] == 1.0
    (tmp_path / "rows.csv").write_text("image,caption\n" + "".join(odd))
    with pytest.raises(DataError, match=r"needs image and text or .* have id, image$"):
        Suite(EvalConfig(retrieval=(str(tmp_path / "rows.csv"),), zero_shot=())).check(Colours())


def test_data_of_damaged_samples_are_told_so(folder, tmp_path):
    for image in folder.rglob("*.jpg"):
        image.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"got none in 12 of 12; the last: .*repair the data"):
        Suite(EvalConfig(retrieval=(), zero_shot=(str(folder),))).check(Colours())


def test_features_that_were_computed_before_are_not_evaluated(tmp_path):
    rows = [{"features": np.ones(3, np.float32), "text": ("a",), "id": 0}] * 2
    pack_source(rows, tmp_path / "shards")
    name = str(tmp_path / "shards")
    for how in ({"retrieval": (name,)}, {"retrieval": (), "localise": (name,)}):
        with pytest.raises(DataError, match=r"needs image and text.* name data with their images"):
            Suite(EvalConfig(zero_shot=(), **how)).check(Colours())


def test_texts_alone_ask_for_no_images(tmp_path):
    rows = [{"query": name, "positive": f"{name} thing"} for name in COLOURS]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = Counted()
    found = Embedder(model, 2).embed(open_source(str(tmp_path / "texts.jsonl")))
    assert found.images is None
    assert len(found.queries.features) == 3
    assert model.seen == []


def test_what_an_evaluation_needs(folder, tmp_path):
    with pytest.raises(DataError, match="retrieval needs image and text"):
        Suite(EvalConfig(retrieval=(str(folder),), zero_shot=())).check(Colours())
    blind = type("Blind", (Colours,), {"patches": PairModel.patches})()
    with pytest.raises(OptionError, match="localise needs patches and texts"):
        Suite(EvalConfig(retrieval=(), zero_shot=(), localise=("emoji:style",))).check(blind)
    own = table(tmp_path, folder)
    with pytest.raises(DataError, match="probe needs image and label"):
        Suite(EvalConfig(retrieval=(), zero_shot=(), probe=(own, own))).check(Colours())
    with pytest.raises(DataError, match="do not name their classes"):
        Suite(EvalConfig(retrieval=(), zero_shot=(table(tmp_path, folder),)))


def test_an_evaluation_tells_how_far_it_is(folder, tmp_path):
    """Of each part of it, in steps, up to the end; prompts are one for each class and template."""
    pairs, told = table(tmp_path, folder), dict[str, list[tuple[int, int]]]()
    how = {"retrieval": (pairs,), "zero_shot": (str(folder),), "localise": (pairs,)}
    config = EvalConfig(**how, eval_batch=2, templates=("a {}", "the {}"))
    suite = Suite(config, tell=lambda what, *at: told.setdefault(what, []).append(at))
    suite.run(Colours())
    count, classes = len(suite.sources[pairs]), len(COLOURS)
    assert told[f"embedding {pairs}"] == [*((i, count) for i in range(0, count, 2)), (count, count)]
    assert told[f"embedding texts of {pairs}"][-1] == (count, count)
    assert told[f"embedding prompts of {folder}"][-1] == (2 * classes, 2 * classes)
    assert told[f"scenes of {pairs}"] == [(i, 100) for i in range(10, 101, 10)]


def test_a_probe_learns_what_features_tell(folder):
    config = EvalConfig(retrieval=(), zero_shot=(), probe=(str(folder), str(folder)))
    found = Suite(config).run(Colours())
    assert found[f"{folder}/linear_probe_top1"] == 1.0


def test_scenes_are_found_by_one_who_knows(folder, tmp_path):
    """Its places are pixels: it points at the right thing, where a blind one points anywhere."""
    name = table(tmp_path, folder)
    suite = Suite(EvalConfig(retrieval=(), zero_shot=(), localise=(name,)))
    found = suite.run(Colours())
    assert found[f"{name}/pointing_accuracy"] > 0.9
    assert found[f"{name}/mean_iou"] > 0.5
    assert found[f"{name}/pointing_chance"] == pytest.approx(1 / 9)
    assert found[f"{name}/pointing_any_thing"] == pytest.approx(1 / 3)
    blind = Colours()
    blind.patches = lambda pixels: torch.ones_like(pixels.float())
    assert suite.run(blind)[f"{name}/pointing_accuracy"] < 0.4


def test_places_that_compare_with_no_text_are_told_before_training(folder, tmp_path):
    other = Colours()
    other.patches = lambda pixels: torch.ones(len(pixels), 99, 1, 1)
    suite = Suite(EvalConfig(retrieval=(), zero_shot=(), localise=(table(tmp_path, folder),)))
    with pytest.raises(OptionError, match="localise needs features of places"):
        suite.check(other)


def test_what_every_text_finds_does_not_count(folder, tmp_path):
    """A model whose texts are all most like the empty canvas still finds what they name."""

    class Drawn(Colours):
        def texts(self, texts, *, queries=False):
            return torch.cat([super().texts(texts), torch.full((len(texts), 1), 5.0)], 1)

        def patches(self, pixels):
            empty = (pixels > 250).all(1, keepdim=True).float()
            return torch.cat([super().patches(pixels) * (1 - empty), empty], 1)

    name = table(tmp_path, folder)
    found = Suite(EvalConfig(retrieval=(), zero_shot=(), localise=(name,))).run(Drawn())
    assert found[f"{name}/pointing_accuracy"] > 0.9


def test_scenes_do_without_damaged_samples(folder, tmp_path):
    """Counted as retrieval does; a sample without a text is none for a scene."""
    name = table(tmp_path, folder)
    rows = [{"image": "images/red/9.jpg", "text": "gone"}, {"text": "no image"},
            {"image": "images/red/1.jpg", "id": 3}]  # fmt: skip
    for row, retrieval, damaged in zip(rows, ((name,), (name,), ()), (1.0, 2.0, 3.0), strict=True):
        with Path(name).open("a") as file:
            file.write(f"\n{json.dumps(row)}")
        how = {"retrieval": retrieval, "zero_shot": (), "localise": (name,)}
        found = Suite(EvalConfig(**how)).run(Colours())
        assert found[f"{name}/pointing_accuracy"] > 0.9
        assert found[f"{name}/damaged"] == damaged
    assert found[f"{name}/damaged_fields"] == 2.0
    for colour in ("red", "green"):
        (folder / colour / "0.jpg").unlink()
    for ask in (Suite(EvalConfig(**how)).check, Suite(EvalConfig(**how)).run):
        with pytest.raises(DataError, match=r"needs 2 sound samples of different ids .*got 1 of 6"):
            ask(Colours())


def test_scenes_of_several_data_have_a_picture_each(folder, tmp_path):
    names, out = (table(tmp_path, folder), "synthetic:20"), tmp_path / "out"
    out.mkdir()
    for given, pictures in (
        (names[:1], ["localise.png"]),
        (names, ["localise-", "localise-synthetic-20.png", "localise.png"]),
    ):
        Suite(EvalConfig(retrieval=(), zero_shot=(), localise=given)).run(Colours(), out)
        found = sorted(path.name for path in out.iterdir())
        assert len(found) == len(pictures)
        assert all(map(str.startswith, found, pictures))


def test_a_scene_is_the_same_again_and_shows_its_thing():
    source = open_source("emoji:style")
    first, second = (make_scene(source, 3, 32) for _ in range(2))
    assert (first.pixels == second.pixels).all()
    assert first.box == second.box
    left, top, right, bottom = first.box
    assert right - left == bottom - top == 32
    assert first.pixels[top:bottom, left:right].min() < 255
    assert make_scene(source, 4, 32).text != first.text


def test_the_box_around_what_is_warm():
    heat = torch.zeros(20, 30)
    heat[5:9, 10:16] = 1.0
    heat[6, 12] = 1.5
    heat[15, 25] = 1.2
    point, box = read_heat(heat)
    assert point == (12, 6)
    assert box == (10, 5, 16, 9)
    assert overlap(box, (10, 5, 16, 9)) == 1.0
    assert overlap((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert overlap((0, 0, 2, 2), (2, 2, 3, 3)) == 0.0


def walked(heat):
    """`read_heat` pixel by pixel."""
    warm = heat >= heat.mean() + (heat.max() - heat.mean()) / 2
    y, x = divmod(int(heat.argmax()), heat.shape[1])
    seen, ahead = {(y, x)}, [(y, x)]
    while ahead:
        at = ahead.pop()
        around = [(at[0] + dy, at[1] + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
        inside = [(b, a) for b, a in around if 0 <= b < len(heat) and 0 <= a < heat.shape[1]]
        new = [place for place in inside if warm[place] and place not in seen]
        seen.update(new)
        ahead += new
    rows, columns = zip(*seen, strict=True)
    return (x, y), (min(columns), min(rows), max(columns) + 1, max(rows) + 1)


@pytest.mark.parametrize("block", [1, 4, 7])
def test_what_is_warm_is_walked_in_blocks_as_in_pixels(block):
    for seed in range(20):
        coarse = torch.rand(9, 8, generator=torch.Generator().manual_seed(seed))
        heat = coarse.repeat_interleave(block, 0).repeat_interleave(block + 1, 1)[3 % block :]
        assert read_heat(heat) == walked(heat)


def quick(tmp_path, *flags):
    fields = {"model": TINY, "train-data": "synthetic:60", "batch-size": "12",
              "micro-batch": "12", "steps": "2", "retrieval": "synthetic:9",
              "runs": str(tmp_path), "name": "run"}  # fmt: skip
    given = [part for name, value in fields.items() for part in (f"--{name}", value)]
    return ["train", *given, "--zero-shot", "--localise", "--report-to", *flags]


def test_train_eval_and_export_as_commands(tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(quick(tmp_path)) == 0
    trained = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert main(["eval", run]) == 0
    assert "image_to_text_R@1" in capsys.readouterr().out
    again = json.loads((tmp_path / "run" / "eval-step-00000002" / "metrics.json").read_text())
    assert again == trained
    assert main(["eval", run, "--retrieval", "synthetic:7,seed=3"]) == 0
    assert main(["export", run, str(tmp_path / "model")]) == 0
    library = need("open_clip")
    assert library.create_model(f"local-dir:{tmp_path / 'model'}") is not None
    assert main(["export", run, str(tmp_path / "model")]) == 2
    assert "new or empty" in capsys.readouterr().err
    assert main(["export", run]) == 2
    assert main(["eval", str(tmp_path)]) == 2
    assert "no checkpoint" in capsys.readouterr().err
    assert main(["eval", f"{run}s"]) == 2
    told = capsys.readouterr().err
    assert f"there is no run folder '{run}s'" in told
    assert f"near it: {run}" in told
    assert main(["eval", "no/where"]) == 2
    assert "give a folder such as runs/NAME" in capsys.readouterr().err
    assert main(["eval", "run.toml"]) == 2
    assert "no recipe or TOML file" in capsys.readouterr().err


def test_an_evaluation_leaves_only_its_own_pictures(tmp_path, capsys):
    """And those of others, whatever they are called."""
    assert main(quick(tmp_path)) == 0
    out = tmp_path / "run" / "eval-step-00000002"
    (tmp_path / "run" / "mine.png").write_bytes(b"")
    for data in ("synthetic:9", "synthetic:7,seed=3"):
        assert main(["eval", str(tmp_path / "run"), "--retrieval", data]) == 0
        (out / "mine.png").write_bytes(b"")
    plain = "synthetic-7-seed-3.png"
    wanted = ["metrics.json", f"retrieval-{plain}", f"similarities-{plain}"]
    assert sorted(path.name for path in out.iterdir()) == ["metrics.json", "mine.png", *wanted[1:]]
    assert f"saved to {out}: {', '.join(wanted)}" in capsys.readouterr().out


def test_the_configuration_of_a_run_names_the_run(tmp_path, capsys):
    assert main(quick(tmp_path)) == 0
    run = tmp_path / "run"
    assert main(["eval", str(run / "config.toml")]) == 0
    assert "at random" not in capsys.readouterr().out
    measured = (run / "eval-step-00000002" / "metrics.json").read_text()
    assert measured == (run / "metrics.json").read_text()
    assert not (tmp_path / "eval").exists()


def test_what_was_measured_before_an_error_is_kept(tmp_path, capsys, monkeypatch):
    assert main(quick(tmp_path)) == 0
    out = tmp_path / "run" / "eval-step-00000002"

    def broken(*args, **kwargs):
        raise DataError("no scenes today")

    monkeypatch.setattr(evaluation, "localise", broken)
    assert main(["eval", str(tmp_path / "run"), "--localise", "synthetic:9"]) == 2
    told = capsys.readouterr()
    assert "no scenes today" in told.err
    assert "did not get to its end" in told.out
    assert "image_to_text_R@1" in told.out
    kept = json.loads((out / "metrics.json").read_text())
    assert kept == json.loads((tmp_path / "run" / "metrics.json").read_text())
    monkeypatch.setattr(Embedder, "embed", broken)
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert list(out.iterdir()) == []


def torchrun(*command):
    """What two ranks print."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "tilewise", *command, "--device", "cpu"],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("saved to") == 1, "one rank prints"
    return done.stdout


def test_torchrun_trains_and_evaluates(tmp_path):
    assert "on 2 x cpu" in torchrun(*quick(tmp_path), "--eval-batch", "2")
    run = tmp_path / "run"
    trained = (run / "metrics.json").read_text()
    torchrun("eval", str(run))
    assert (run / "eval-step-00000002" / "metrics.json").read_text() == trained
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    assert (run / "eval-step-00000002" / "metrics.json").read_text() == trained


def test_slurm_tells_who_is_who(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    told = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
            "SLURM_JOB_ID": "12345", "SLURM_NODELIST": "node3,node4"}  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert _told() == {"rank": 5, "world": 8, "local_rank": 1}
    assert os.environ["MASTER_ADDR"] == "node3"
    assert 1024 < int(os.environ["MASTER_PORT"]) < 65536
    monkeypatch.delenv("SLURM_STEP_ID")  # the batch script itself
    assert _told()["world"] == 1


def test_devices(monkeypatch):
    assert _device("cpu", 0) == torch.device("cpu")
    with pytest.raises(OptionError, match="auto, cpu or cuda"):
        _device("tpu", 0)


def test_a_checkpoint_that_is_damaged_is_not_evaluated(tmp_path):
    from tilewise.train.commands import eval_command

    assert main(quick(tmp_path)) == 0
    weights = tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError):
        eval_command([str(tmp_path / "run")])
