"""Batches: the same samples whatever the ranks and workers, damaged ones replaced and counted."""

import math
import os
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from tilewise.data.emoji import Emoji
from tilewise.data.featurecache import cached_features
from tilewise.data.loader import Batches, Form, in_order, join
from tilewise.data.order import Order
from tilewise.data.pack import pack_source
from tilewise.data.sources import open_source
from tilewise.data.synthetic import Synthetic
from tilewise.data.views import CHANCES, View
from tilewise.errors import DataError, OptionError
from tilewise.models.libraries import need


class Numbers:
    """Samples that are their own index; multiples of seven are damaged."""

    def __init__(self, count, bad=0):
        self.count, self.bad = count, bad

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.bad and index % self.bad == 0:
            raise DataError("damaged", "image")
        return {"id": index}


def prepare(sample, chances):
    return {"number": sample["id"], "chance": float(chances[0])}


def collate(prepared):
    return {name: torch.tensor([each[name] for each in prepared]) for name in ("number", "chance")}


FORM = Form(prepare, collate, 2)


def batches(source=None, **options):
    source = source or Numbers(1000)
    order = Order(len(source), seed=5, window=options.pop("window", 0))
    return Batches(source=source, form=FORM, order=order, **{"size": 300, **options})


def take(these, count, step=0):
    found = these.since(step)
    taken = [next(found) for _ in range(count)]
    found.close()
    return taken


@pytest.mark.parametrize(("workers", "window"), [(0, 0), (2, 0), (0, 300)])
def test_ranks_and_workers_share_one_order(workers, window):
    whole = take(batches(window=window), 4)
    assert len(set(torch.cat([batch.ids for batch in whole])[:1000].tolist())) == 1000
    for world in (2, 3, 7):
        how = {"world": world, "workers": workers if world == 2 else 0, "window": window}
        parts = [take(batches(rank=rank, **how), 4) for rank in range(world)]
        for step, batch in enumerate(whole):
            for name in ("number", "chance"):
                joined = torch.cat([own[step].inputs[name] for own in parts])
                assert torch.equal(joined, batch.inputs[name])
            assert torch.equal(torch.cat([own[step].ids for own in parts]), batch.ids)


def test_a_run_goes_on_where_it_stopped():
    whole, rest = take(batches(), 5), take(batches(), 2, step=3)
    for early, late in zip(whole[3:], rest, strict=True):
        assert torch.equal(early.inputs["chance"], late.inputs["chance"])
        assert torch.equal(early.ids, late.ids)


def test_epochs_follow_each_other_without_a_gap():
    seen = torch.cat([batch.ids for batch in take(batches(), 10)])
    for epoch in seen.split(1000):
        assert sorted(epoch.tolist()) == list(range(1000))


def test_damaged_samples_are_counted_and_replaced():
    these = batches(Numbers(1000, bad=7))
    ids = torch.cat([batch.ids for batch in take(these, 3)])
    assert (ids % 7 != 0).all()
    assert len(ids) == 900
    wanted = sum(int(n) % 7 == 0 for n in Order(1000, seed=5).at(np.arange(900))[1])
    assert these.bad == {"image": wanted}


class Torn(Numbers):
    """Half of the samples are damaged, one beside the other."""

    def __getitem__(self, index):
        if index < self.count // 2:
            raise DataError("damaged", "image")
        return {"id": index}


def test_what_stands_in_for_damaged_neighbours_is_drawn_from_all():
    """The same whoever loads it, another one in another epoch."""
    ids = torch.cat([batch.ids for batch in take(batches(Torn(1000), size=1000), 2)])
    assert ids.min() >= 500
    assert ids[:1000].unique().numel() > 400
    ranks = [take(batches(Torn(1000), size=1000, rank=rank, world=3), 1)[0] for rank in range(3)]
    assert torch.equal(torch.cat([part.ids for part in ranks]), ids[:1000])
    places = Order(1000, seed=5).at(np.arange(2000))[1]
    first, second = (ids[1000 * epoch :][places[1000 * epoch :][:1000].argsort()][:500]
                     for epoch in range(2))  # fmt: skip
    assert (first != second).float().mean() > 0.9


@pytest.mark.parametrize("workers", [0, 1])
def test_all_damaged_is_an_error_that_says_so(workers):
    """And no more than that: what a worker raises comes with its traceback for a message."""
    with pytest.raises(DataError, match=r"32 others.*the last: damaged.*repair the data") as found:
        take(batches(Numbers(50, bad=1), workers=workers), 1)
    assert "\n" not in str(found.value)


def test_evaluation_leaves_damaged_samples_out():
    found = list(in_order(Numbers(20, bad=7), [range(8), range(8, 20)], dict))
    assert [sample["id"] for samples, _ in found for sample in samples] == [
        n for n in range(20) if n % 7
    ]
    assert Counter(error.kind for _, bad in found for error in bad) == {"image": 3}


def signed(sample):
    return {"id": sample["id"], "by": os.getpid()}


def test_evaluation_prepares_samples_where_they_are_loaded():
    loaded = in_order(Numbers(6), [range(4), range(3, 6)], signed, workers=1)
    found = [each for samples, _ in loaded for each in samples]
    assert [each["id"] for each in found] == [0, 1, 2, 3, 3, 4, 5]
    assert os.getpid() not in {each["by"] for each in found}


def test_texts_of_other_lengths_are_filled_up():
    ones = torch.ones(2, 5, dtype=torch.int64)
    joined = join([{"ids": ones[:, :3]}, {"ids": ones[:1]}])
    assert joined["ids"].tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1] * 5]


def test_a_view_is_a_function_of_its_chances():
    image = Emoji("style")[0]["image"]
    view = View(32, crop_scale=0.5, flip=True, jitter=0.5, grayscale=0.5, blur=0.5)
    chances = np.random.default_rng(0).random((2, CHANCES))
    assert (view(image, chances[0]) == view(image, chances[0])).all()
    assert (view(image, chances[0]) != view(image, chances[1])).any()
    assert (View(32)(image, chances[0]) == np.asarray(image).transpose(2, 0, 1)).all()


def test_a_crop_stays_inside_and_keeps_its_area():
    view = View(16, crop_scale=0.3)
    for chances in np.random.default_rng(1).random((200, CHANCES)):
        left, top, right, bottom = view._box((100, 60), chances)
        assert 0 <= left < right <= 100.001
        assert 0 <= top < bottom <= 60.001
        area = (right - left) * (bottom - top)
        assert area == pytest.approx(6000 * (0.3 + 0.7 * chances[0]))
        ratio = (right - left) / (bottom - top)
        assert ratio >= 3 / 4 - 1e-9
        # Wider than 4:3 only if it is as high as the image.
        assert ratio <= 4 / 3 + 1e-9 or bottom - top == pytest.approx(60)


@pytest.mark.parametrize("size", [(640, 480), (641, 480), (480, 641), (225, 224), (224, 224)])
@pytest.mark.parametrize("kernel", ["bicubic", "bilinear"])
def test_an_evaluation_sees_images_as_open_clip_does(size, kernel):
    """Bit by bit, before they are normalised."""
    transform = need("open_clip").transform.image_transform(
        224, is_train=False, mean=(0, 0, 0), std=(1, 1, 1), interpolation=kernel
    )
    noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    image = Image.fromarray(noise)
    ours = View(224, interpolation=kernel)(image, np.zeros(CHANCES))
    assert (ours == (transform(image) * 255).round().byte().numpy()).all()


def test_a_long_strip_is_not_enlarged_as_a_whole():
    """A pixel high and 400,000 wide, it would be 60 GB."""
    strip = Image.new("RGB", (400_000, 1), "white")
    strip.paste("black", (199_999, 0, 200_001, 1))
    assert View(224)(strip, np.zeros(CHANCES)).min() == 0


def test_an_image_that_is_not_square_is_cut_in_the_middle():
    image = Image.new("RGB", (60, 20), "white")
    image.paste("black", (20, 0, 40, 20))
    assert View(8)(image, np.zeros(CHANCES)).max() < 128


def test_emoji_parts_share_no_concept_across_a_split():
    train, style, concepts = (Emoji(part) for part in ("train", "style", "concepts"))
    ids = [{source[i]["id"] for i in range(len(source))} for source in (train, style, concepts)]
    assert not (ids[0] | ids[1]) & ids[2]
    assert ids[1] <= ids[0]
    styles = {row[0] for row in train.rows} & {row[0] for row in style.rows}
    assert not styles
    assert len(train) + len(style) + len(concepts) > 4300
    sample = train[0]
    assert sample["image"].size == (32, 32)
    assert 0 <= sample["label"] < len(train.classes)


def test_synthetic_pairs_are_as_hard_as_told():
    """The nearest colour of each cell is the best guess; its share of errors is the one told."""
    data = Synthetic(2000, cells=2, noise=0.4)
    wrong = total = 0
    for index in range(len(data)):
        pixels = np.asarray(data[index]["image"], float)[8::16, 8::16].reshape(-1, 3)
        # Channels are read one by one; clipping keeps each on its side of the middle.
        guess = (pixels > 128).astype(int)
        truth = (data.palette[data.code(index)] > 128).astype(int)
        wrong += int((guess != truth).any(1).sum())
        total += 4
    # Three channels, each across half the gap between two colours.
    right = 0.5 * (1 + math.erf(0.5 / data.noise / math.sqrt(2)))
    assert abs(wrong / total - (1 - right**3)) < 0.02
    assert data[3]["text"][0].split() == [data.names[c] for c in data.code(3)]


def test_a_cache_of_features(tmp_path):
    """In half precision: what that cannot hold is refused, and so is a file that was cut off."""
    source, path = Synthetic(5, size=8), tmp_path / "a.npy"
    form = Form(
        lambda sample, _: {"image": View(8)(sample["image"], np.full(CHANCES, 0.5))}, None, 1
    )

    def cached(value):
        return cached_features(source, path, lambda x: torch.full((len(x), 3), value), form=form)

    for value in (1e5, math.nan):
        with pytest.raises(DataError, match=r"below 65,504.*without feature_cache"):
            cached(value)
        assert not list(tmp_path.iterdir())
    assert cached(2.5)[4]["features"].tolist() == [2.5] * 3
    assert [file.name for file in tmp_path.iterdir()] == ["a.npy"]
    whole = path.read_bytes()
    for cut in (0, 3, 60, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.npy is cut off.*delete it"):
            cached(2.5)


def test_data_by_name():
    assert len(open_source("synthetic:12,size=16")) == 12
    assert open_source("synthetic:12,size=16")[0]["image"].size == (16, 16)
    whole = open_source("emoji:train")
    low, high = open_source("emoji:train@0-80"), open_source("emoji:train@80-100")
    assert len(low) + len(high) == len(whole)
    assert 0.1 < len(high) / len(whole) < 0.3
    assert not {low[i]["id"] for i in range(len(low))} & {high[i]["id"] for i in range(len(high))}


def test_a_part_of_data_with_files(tmp_path):
    """Its images stay as they are, one that is damaged is left out, classes are those of all."""
    from tilewise.data.shards import Shards

    for name in ("cat", "dog"):
        (tmp_path / "all" / name).mkdir(parents=True)
        for i in range(10):
            noise = np.random.default_rng(i).integers(0, 255, (16, 16, 3), np.uint8)
            Image.fromarray(noise).save(tmp_path / "all" / name / f"{i}.jpg")
    (tmp_path / "all" / "cat" / "3.jpg").write_bytes(b"damaged")
    part = open_source(f"{tmp_path / 'all'}@0-60")
    assert part.classes == ["cat", "dog"]
    assert 0 < len(part) < 20
    bad = []
    pack_source(part, tmp_path / "out", on_damage=bad.append)
    packed = Shards(tmp_path / "out")
    assert len(packed) == len(part) - len(bad)
    assert "image" not in packed.row(0)
    assert packed.row(0)["label"] == packed[0]["label"]
    tar = (tmp_path / "out" / "000000.tar").read_bytes()
    assert b".jpg" in tar
    assert b".png" not in tar


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("emoji:nothing", OptionError, "train, style, concepts"),
        ("synthetic:many", OptionError, "synthetic:4096"),
        ("synthetic:10,seed=-1", OptionError, "seed from 0"),
        ("synthetic:10,noise=nan", OptionError, "noise from 0"),
        ("synthetic:10,noise=inf", OptionError, "noise from 0"),
        ("synthetic:10,cells=40", OptionError, "cells from 1 to size"),
        ("", DataError, "there are no data at ''"),
        ("no/such/place", DataError, "there are no data"),
        ("emoji:train@90-10", OptionError, "0-95"),
        ("emoji:train@3-200", OptionError, "0-95"),
        ("a.tar?columns=a:b", OptionError, "options of a table.*leave them out"),
        ("data/{000..099}.tar?images=x@0-50", OptionError, "options of a table"),
        ("folder/?images=x", OptionError, "options of a table"),
        ("a.csv?imags=x", DataError, "there are no data at 'a.csv'"),
        ("a-00?.tar", DataError, r"want shards at a-00\?\.tar, got none"),
    ],
)
def test_data_that_are_not_there(name, error, says):
    with pytest.raises(error, match=says):
        open_source(name)


def test_a_question_mark_is_any_character_of_a_shard(tmp_path):
    (tmp_path / "what?").mkdir()
    for name in ("a-001", "a-002", "a-01", "b"):
        source = Synthetic(2, size=8)
        pack_source(source, tmp_path / name)
        (tmp_path / name / "000000.tar").rename(tmp_path / "what?" / f"{name}.tar")
    assert len(open_source(f"{tmp_path}/what?/a-00?.tar")) == 4
    assert len(open_source(f"{tmp_path}/what?/*.tar")) == 8
    (tmp_path / "what?" / "a.csv").write_text("title,id\na,3\n")
    assert open_source(f"{tmp_path}/what?/a.csv?columns=title:text,id:")[0]["text"] == ("a",)
