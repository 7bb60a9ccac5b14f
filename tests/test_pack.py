"""Packing: what goes in comes out, in the same bytes every time, whole or not at all."""

import json
import lzma
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tilewise as tw
from tilewise.cli import main
from tilewise.data.arrays import ArrayPack
from tilewise.data.folders import ImageFolder
from tilewise.data.manifest import read_manifest
from tilewise.data.pack import pack_source
from tilewise.data.samples import text_id
from tilewise.data.shards import Shards
from tilewise.data.sources import open_source
from tilewise.errors import DataError

os.environ["WDS_SECURE"] = "1"  # before webdataset is imported
import webdataset as wds


def pixels(seed=0, shape=(9, 7, 3)):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def same(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert np.array_equal(np.asarray(one[key]), np.asarray(other[key])), key


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Mixed:
    """Samples with everything that a sample may have."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError
        image = Image.fromarray(pixels(index))
        sample = {"image": image, "text": (f"é {index}", "two\nlines"), "label": index % 2}
        sample |= {"id": 70 + index, "features": np.float32([index, 1]), "query": "q"}
        sample |= {"positive": "p", "negatives": ("m", "n") if index else ()}
        return sample


class Pairs:
    """Samples whose ids follow from what they are."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError
        return [
            {"text": ("a",), "id": text_id("a")},
            {"query": "q", "positive": "p", "id": text_id("p")},
            {"label": 3, "id": 2},
            {"query": "q", "id": 3},
            {"text": ("a",), "id": 5},
        ][index]


@pytest.mark.parametrize("image_format", ["png", "webp"])
@pytest.mark.parametrize("samples_per_shard", [1, 3, 7, 100])
def test_what_goes_in_comes_out(samples_per_shard, image_format, tmp_path):
    how = {"samples_per_shard": samples_per_shard, "image_format": image_format}
    seen = []
    told = pack_source(Mixed(), tmp_path / "a", **how, on_progress=lambda *at: seen.append(at))
    assert seen == [(i, 7) for i in range(1, 8)]
    found = Shards(tmp_path / "a", verify=True)
    same(list(found), list(Mixed()))
    assert read_manifest(tmp_path / "a") == told
    assert [facts.samples for facts in told.values()] == [
        min(samples_per_shard, 7 - first) for first in range(0, 7, samples_per_shard)
    ]
    pack_source(Mixed(), tmp_path / "b", **how)
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b")
    pack_source(found, tmp_path / "c", **how)
    assert files_in(tmp_path / "a") == files_in(tmp_path / "c")


def test_webdataset_reads_it(tmp_path):
    pack_source(Mixed(), tmp_path / "a", samples_per_shard=4)
    paths = sorted(map(str, (tmp_path / "a").glob("*.tar")))
    found = list(wds.WebDataset(paths, shardshuffle=False).decode("pil"))
    assert [sample["__key__"] for sample in found] == [f"{i:09d}" for i in range(7)]
    for i, sample in enumerate(found):
        assert np.array_equal(sample["png"].convert("RGB"), pixels(i))
        assert sample["cls"] == i % 2
        assert sample["json"]["captions"] == [f"é {i}", "two\nlines"]


def test_ids_are_written_where_they_do_not_follow(tmp_path):
    pack_source(Pairs(), tmp_path / "a")
    same(list(Shards(tmp_path / "a")), list(Pairs()))
    found = list(wds.WebDataset([str(tmp_path / "a" / "000000.tar")], shardshuffle=False))
    assert ["id" in json.loads(sample.get("json", "{}")) for sample in found] == [0, 0, 0, 0, 1]


def test_a_table_with_images(tmp_path):
    (tmp_path / "images").mkdir()
    names = ["1.png", "2.bmp", "3.jpg", "4.webp", "5.gif"]
    for seed, name in enumerate(names):
        Image.fromarray(pixels(seed, (40, 30, 3))).save(tmp_path / "images" / name)
    table = tmp_path / "table.csv"
    table.write_text("file,text\n" + "".join(f"images/{name},of {name}\n" for name in names))
    source = open_source(f"{table}?columns=file:image")
    pack_source(source, tmp_path / "a")
    found = Shards(tmp_path / "a")
    same(list(found), list(source))
    held = [*wds.WebDataset([str(tmp_path / "a" / "000000.tar")], shardshuffle=False)]
    for name, sample in zip(names, held, strict=True):
        kind = name.split(".")[1]
        if kind in ("png", "jpg", "webp"):  # the file as it was
            assert sample[kind] == (tmp_path / "images" / name).read_bytes()
        else:
            assert "png" in sample
    pack_source(source, tmp_path / "b", size=12)
    assert {sample["image"].size for sample in Shards(tmp_path / "b")} == {(12, 16)}
    pack_source(source, tmp_path / "c", size=30)
    assert files_in(tmp_path / "c") == files_in(tmp_path / "a")  # none is enlarged or written anew
    pack_source(found, tmp_path / "d")
    assert files_in(tmp_path / "d") == files_in(tmp_path / "a")  # nor those of shards


def test_a_folder_of_classes(tmp_path):
    for seed, name in enumerate(("cat/1.png", "cat/2.png", "dog bed/1.png")):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(seed)).save(tmp_path / "in" / name)
    pack_source(open_source(str(tmp_path / "in")), tmp_path / "out", samples_per_shard=2)
    found = Shards(tmp_path / "out")
    same(list(found), list(ImageFolder(tmp_path / "in")))
    assert found.classes == ["cat", "dog bed"]
    assert (tmp_path / "out" / "classes.txt").read_text() == "cat\ndog bed\n"
    name = "dog bed"
    for wrong in ("dog\nbed", " "):
        (tmp_path / "in" / name).rename(tmp_path / "in" / (name := wrong))
        with pytest.raises(DataError, match="a line of text"):
            pack_source(open_source(str(tmp_path / "in")), tmp_path / "c")


# Arrays


def colour_pack(folder, n=12):
    folder.mkdir(exist_ok=True)
    images = pixels(0, (n, 8, 8, 3))
    styles, groups = ("noto", "twemoji"), ("symbols", "animals")
    meta = [
        [styles[i % 2], f"thing {i // 2}", ["x", f"y{i}"] if i else [], groups[i % 3 == 0], "sub"]
        for i in range(n)
    ]
    (folder / "images.u8.xz").write_bytes(lzma.compress(images.tobytes()))
    (folder / "meta.json.xz").write_bytes(lzma.compress(json.dumps(meta).encode()))
    return images, meta


def grey_pack(folder, n=12):
    folder.mkdir(exist_ok=True)
    grey = pixels(1, (n, 8, 8)) // 16
    rows = grey.reshape(n, 32, 2)
    packed = rows[..., 0] * 16 + rows[..., 1]
    lines = [
        {"set": "ooui", "name": f"arrow-{i}-bold", "concept": f"arrow {i // 2}", "cat": ""}
        for i in range(n)
    ]
    (folder / "gray4.u8.xz").write_bytes(lzma.compress(packed.astype(np.uint8).tobytes()))
    text = "\n".join(map(json.dumps, lines)) + "\n"
    (folder / "meta.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    (folder / "info.json").write_text('{"sets": {"ooui": {"name": "OOUI"}}}')
    return np.repeat(grey[..., None] * 17, 3, -1)


def test_a_pack_in_colour(tmp_path):
    images, meta = colour_pack(tmp_path / "in")
    source = ArrayPack(tmp_path / "in", side=8)
    pack_source(source, tmp_path / "out", samples_per_shard=5)
    found = Shards(tmp_path / "out")
    same(list(found), list(source))
    assert np.array_equal([np.asarray(sample["image"]) for sample in found], images)
    assert [found[i]["text"] for i in (0, 3)] == [("thing 0",), ("thing 1, x, y3", "thing 1")]
    assert [sample["id"] for sample in found] == [text_id(row[1]) for row in meta]
    assert [found.classes[sample["label"]] for sample in found] == [row[3] for row in meta]


def test_a_pack_in_grey(tmp_path):
    images = grey_pack(tmp_path / "in")
    pack_source(ArrayPack(tmp_path / "in", side=8), tmp_path / "out")
    found = Shards(tmp_path / "out")
    assert np.array_equal([np.asarray(sample["image"]) for sample in found], images)
    assert found[3]["text"] == ("arrow 3 bold, OOUI",)
    assert found[2]["id"] == found[3]["id"] == text_id("arrow 1")
    assert found.classes == []
    info = tmp_path / "in" / "info.json"
    for told in ("{}", '{"sets": {}}', '{"sets": {"ooui": {"name": null}}}', None):
        if told is None:
            info.unlink()
        else:
            info.write_text(told)
        assert ArrayPack(tmp_path / "in", side=8)[3]["text"] == ("arrow 3 bold, ooui",)
    for told in (
        "[]",
        "{",
        '{"sets": []}',
        '{"sets": {"ooui": "x"}}',
        '{"sets": {"o": {"name": 3}}}',
    ):
        info.write_text(told)
        with pytest.raises(DataError, match=r"info\.json"):
            ArrayPack(tmp_path / "in", side=8)


def test_packs_that_are_refused(tmp_path):
    colour_pack(tmp_path)
    for side in (7, 9, 16):
        with pytest.raises(DataError, match=f"image of {side} pixels a side for each of 12"):
            ArrayPack(tmp_path, side=side)
    data = (tmp_path / "images.u8.xz").read_bytes()
    (tmp_path / "images.u8.xz").write_bytes(data[:-30])
    with pytest.raises(DataError, match="cut off"):
        ArrayPack(tmp_path, side=8)
    (tmp_path / "images.u8.xz").write_bytes(data)
    for rows in ({}, [["noto", "x", [], "g"]], [["noto", "x", [3], "g", "s"]], [[1, 2, 3, 4, 5]]):
        (tmp_path / "meta.json.xz").write_bytes(lzma.compress(json.dumps(rows).encode()))
        with pytest.raises(DataError, match=r"meta\.json\.xz") as caught:
            ArrayPack(tmp_path, side=8)
        assert caught.value.kind == "field"
    for nothing in (b"", b"[]", b"{"):
        (tmp_path / "meta.json.xz").write_bytes(lzma.compress(nothing))
        with pytest.raises(DataError, match=r"meta\.json\.xz"):
            ArrayPack(tmp_path, side=8)
    (tmp_path / "meta.json.xz").unlink()
    with pytest.raises(DataError, match=r"want meta\.json\.xz"):
        ArrayPack(tmp_path, side=8)
    grey_pack(tmp_path / "grey")
    (tmp_path / "grey" / "meta.jsonl.xz").write_bytes(lzma.compress(b""))
    with pytest.raises(DataError, match=r"want records in .*meta\.jsonl\.xz, got none"):
        ArrayPack(tmp_path / "grey", side=8)
    grey_pack(tmp_path)
    with pytest.raises(DataError, match="got both"):
        ArrayPack(tmp_path)
    with pytest.raises(DataError, match="got neither"):
        ArrayPack(tmp_path / "none")


# Whole, or not at all


class Damaged(Mixed):
    def __getitem__(self, index):
        if index in (2, 5):
            raise DataError("an image is damaged", "image")
        return super().__getitem__(index)


class OneDamaged(Damaged):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return super().__getitem__(2)


def test_damaged_samples_stop_it_or_are_told(tmp_path):
    with pytest.raises(DataError, match="is damaged"):
        pack_source(Damaged(), tmp_path / "a", samples_per_shard=1)
    assert not (tmp_path / "a").exists()
    told = []
    pack_source(Damaged(), tmp_path / "a", samples_per_shard=2, on_damage=told.append)
    assert [error.kind for error in told] == ["image"] * 2
    same(list(Shards(tmp_path / "a")), [Mixed()[i] for i in (0, 1, 3, 4, 6)])
    with pytest.raises(DataError, match="none that is sound of 1"):
        pack_source(OneDamaged(), tmp_path / "b", on_damage=told.append)
    assert not (tmp_path / "b").exists()


def test_a_folder_with_shards_is_left_alone(tmp_path):
    (tmp_path / "README").write_text("mine")
    pack_source(Pairs(), tmp_path)
    before = files_in(tmp_path)
    with pytest.raises(tw.OptionError, match=r"must not hold shards"):
        pack_source(Mixed(), tmp_path)
    (tmp_path / "000000.tar").unlink()
    with pytest.raises(tw.OptionError, match=r"manifest\.json"):
        pack_source(Mixed(), tmp_path)
    assert files_in(tmp_path).items() <= before.items()


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_stopped_while_moving_into_place(moves, tmp_path, monkeypatch):
    """What is there then is nothing, or less than its manifest tells: never fewer samples."""
    done = []
    replace = Path.replace

    def stopping(path, target):
        if target.parent.name == "out":
            done.append(path.name)
            if len(done) > moves:
                raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        pack_source(Mixed(), tmp_path / "out", samples_per_shard=3)
    monkeypatch.undo()
    with pytest.raises(DataError):
        Shards(tmp_path / "out")
    assert done[0] == "manifest.json"
    assert sorted(path.name for path in tmp_path.glob("out/*")) == sorted(done[:moves])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"samples_per_shard": 0}, "above 0"),
        ({"size": 0}, "above 0"),
        ({"image_format": "jpg"}, "png or webp"),
    ],
)
def test_options_that_are_refused(how, message, tmp_path):
    with pytest.raises(tw.OptionError, match=message):
        pack_source(Pairs(), tmp_path / "a", **how)
    assert not (tmp_path / "a").exists()


def test_packing_says_one_line_where_nobody_watches(tmp_path, capfd):
    assert main(["data", "pack", "synthetic:3", str(tmp_path / "out")]) == 0
    assert capfd.readouterr() == (f"packed 3 samples into {tmp_path / 'out'}\n", "")
