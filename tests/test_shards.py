"""Shards: what webdataset reads from whole ones; from damaged ones everything or an error."""

import io
import json
import os
import pickle
import random
import shutil
import tarfile
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import PIL
import pytest
from PIL import Image
from torch.utils.data import DataLoader

import tilewise as tw
from tilewise.data import decode, shards
from tilewise.data.manifest import ShardFacts, sha256_of, write_manifest
from tilewise.data.samples import sample_of, text_id
from tilewise.data.shards import Shards
from tilewise.data.tarindex import index_tar
from tilewise.errors import DataError

os.environ["WDS_SECURE"] = "1"  # before webdataset is imported
import webdataset as wds


def pixels(seed=0, shape=(6, 5, 3)):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(x, kind="png", **how):
    image = x if isinstance(x, Image.Image) else Image.fromarray(x)
    image.save(file := io.BytesIO(), kind, **how)
    return file.getvalue()


def npy(x, **how):
    np.save(file := io.BytesIO(), x, **how)
    return file.getvalue()


def write_tar(path, members, form=tarfile.USTAR_FORMAT, **facts):
    """members: (name, bytes) in order."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for fact, value in facts.items():
                setattr(info, fact, value)
            tar.addfile(info, io.BytesIO(data))
    return path


def simple(n, first=0):
    return [
        member
        for i in range(first, first + n)
        for member in ((f"{i:04d}.png", encoded(pixels(i))), (f"{i:04d}.txt", b"number %d" % i))
    ]


def same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert np.array_equal(np.asarray(a[key]), np.asarray(b[key])), key


def one(tmp_path, *members):
    """The only sample of a shard with these (extension, bytes)."""
    (shard,) = Shards(write_tar(tmp_path / "one.tar", [(f"a.{e}", data) for e, data in members]))
    return shard


def kind_of(make):
    with pytest.raises(DataError) as caught:
        make()
    return caught.value.kind


# What webdataset reads


def as_webdataset_reads(path):
    """Our samples from webdataset's own reading, grouping and decoding."""
    for index, raw in enumerate(wds.WebDataset(str(path), shardshuffle=False).decode("pil")):
        told = raw.get("json", {})
        sample = {}
        for extension in ("jpg", "jpeg", "png", "webp"):
            if extension in raw:
                sample["image"] = raw[extension].convert("RGB")
        if "txt" in raw:
            sample["text"] = tuple(raw["txt"].split("\n"))
        elif "caption" in told:
            sample["text"] = (told["caption"],)
        sample |= {name: told[name] for name in ("query", "label") if name in told}
        if "cls" in raw:
            sample["label"] = raw["cls"]
        if "npy" in raw:
            sample["features"] = raw["npy"]
        named = text_id(sample["text"][0]) if "text" in sample else index
        yield {**sample, "id": told.get("id", named)}


def test_what_webdataset_writes_and_reads(tmp_path):
    dice = np.random.default_rng(0)
    path = tmp_path / "a.tar"
    with path.open("wb") as file, wds.TarWriter(file) as writer:
        for i in range(7):
            sample = {"__key__": f"some.folder/{i:04d}", "png": pixels(i), "txt": f"a {i}\nb {i}"}
            if i % 2:
                sample |= {"json": {"id": 70 + i, "label": 3, "query": "q", "other": [1]}, "cls": i}
            if i % 3:
                sample["npy"] = dice.normal(size=4).astype(np.float32)
            if i == 5:
                del sample["txt"]
            writer.write(sample)
        writer.write({"__key__": "jpeg", "jpg": pixels(9, (16, 24, 3)), "json": {"caption": "c"}})
        writer.write(
            {"__key__": "x" * 130, "seg.png": pixels(1), "webp": encoded(pixels(2), "webp")}
        )
    ours, theirs = Shards(path), list(as_webdataset_reads(path))
    assert len(ours) == len(theirs) == 9
    for a, b in zip(ours, theirs, strict=True):
        same(a, b)
    assert {i % 2 for i in range(7) if ours[i]["id"] == 70 + i} == {1}
    same(ours[-1], ours[8])
    with pytest.raises(IndexError):
        ours[9]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_grouping(form, tmp_path):
    """Folders, dots, repeated keys, long and foreign names, meta data; as webdataset does."""
    names = [
        "__meta__/x.txt",
        "__meta__",
        "a/1.jpg",
        "a/1.seg.jpg",
        "a/1.TXT",
        "b.c/1.jpg",
        "b.c/1.cls",
        "none",
    ]
    names += ["./2.txt", "ü/é.txt", "a/1.jpg", "d" * 90 + "/" + "e" * 80 + ".txt", "3.pyd", "4.txt"]
    names += [] if form == tarfile.USTAR_FORMAT else ["f" * 300 + ".txt", "f" * 300 + ".cls"]
    path = write_tar(tmp_path / "a.tar", [(name, name.encode()) for name in names], form)
    with tarfile.open(path, "a", format=form) as tar:
        folder = tarfile.TarInfo("folder.txt")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    theirs = list(wds.WebDataset(str(path), shardshuffle=False))
    index = index_tar(path)
    assert len(index) == len(theirs)
    data = path.read_bytes()
    known = {"jpg": "image", "txt": "text", "cls": "label"}
    for i, sample in enumerate(theirs):
        got = {part: data[at : at + size] for part, at, size in index.members(i)}
        assert got == {known[e]: sample[e] for e in known if e in sample}


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_the_label_of_a_volume(form, tmp_path):
    """As `tar -V` writes it; webdataset reads on, too."""
    label = tarfile.TarInfo("some volume.txt")
    label.type = b"V"
    how = {"pax": {"format": tarfile.PAX_FORMAT, "pax_headers": {"GNU.volume.label": "v"}},
           "gnu": {"format": tarfile.GNU_FORMAT}}  # fmt: skip
    with tarfile.open(tmp_path / "a.tar", "w", **how[form]) as tar:
        if form == "gnu":
            tar.addfile(label)
        for name, data in simple(2):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    found = Shards(tmp_path / "a.tar")
    assert [sample["text"][0] for sample in found] == ["number 0", "number 1"]
    assert len(list(wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False))) == 2


def test_members_of_their_own_go_before_json(tmp_path):
    told = {"caption": "a", "captions": ["b", "c"], "text": None, "label": 1, "negatives": ["n"]}
    told |= {"positive": " p ", "id": "Name"}
    sample = one(tmp_path, ("json", json.dumps(told).encode()), ("cls", b" 7\n"))
    id_ = sample.pop("id")
    assert sample == {"text": ("b", "c"), "label": 7, "negatives": ("n",), "positive": "p"}
    assert 0 <= id_ < 2**63
    assert id_ not in (text_id("b"), text_id("Name"))
    assert one(tmp_path, ("json", b'{"positive": "P"}'))["id"] == text_id("p")
    assert one(tmp_path, ("png", encoded(pixels())), ("cls", b"7"))["id"] == 0
    first = one(tmp_path, ("webp", encoded(pixels(1), "webp", lossless=True)), ("png", b"never"))
    assert np.array_equal(first["image"], pixels(1))


@pytest.mark.parametrize(
    ("told", "member"),
    [
        ({"label": "cat", "url": "u"}, ("cls", b"3")),
        ({"caption": ""}, ("txt", b"hello")),
        ({"text": {"words": 1}, "caption": 3}, ("txt", b"hello")),
    ],
)
def test_json_gives_way_whatever_it_says(told, member, tmp_path):
    sample = one(tmp_path, ("json", json.dumps(told).encode()), member)
    sample.pop("id")
    assert sample == ({"label": 3} if member[0] == "cls" else {"text": ("hello",)})
    if member[0] == "txt":
        with pytest.raises(DataError):  # of what no member says it is all there is
            one(tmp_path, ("json", json.dumps(told).encode()), ("cls", b"3"))


@pytest.mark.parametrize("label", ["cat", True, 1.5, ["a"], 2**63, None])
def test_a_label_in_json_that_is_no_whole_number_is_none(label, tmp_path):
    """Anybody writes a "label" there: the sample stays, without one."""
    told = json.dumps({"label": label, "caption": "c"}).encode()
    assert one(tmp_path, ("json", told)) == {"text": ("c",), "id": text_id("c")}
    assert one(tmp_path, ("json", b'{"label": 3}'))["label"] == 3


def test_ids_that_are_no_numbers_of_64_bits_are_known_by_how_they_are_written(tmp_path):
    told = (2**63, "9223372036854775808", 1.5, ["a", 1], "1.5", True)
    ids = [one(tmp_path, ("json", json.dumps({"id": each}).encode()))["id"] for each in told]
    assert ids[0] == ids[1]
    assert ids[2] == ids[4]
    assert len(set(ids)) == 4
    assert all(2**32 < each < 2**63 for each in ids)
    assert one(tmp_path, ("json", b'{"id": -9}'))["id"] == -9


def test_names_of_classes(tmp_path):
    """From a file that any editor may have saved."""
    found, path = Shards(write_tar(tmp_path / "a.tar", simple(1))), tmp_path / "classes.txt"
    assert found.classes == []
    for text in ("cat\ndog bed\n", "\ufeffcat\r\ndog bed \r\n\r\n", "cat\ndog bed\n\n\n"):
        path.write_bytes(text.encode())
        assert found.classes == ["cat", "dog bed"]
    path.write_bytes("café\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"classes\.txt.*UTF-8"):
        _ = found.classes


def test_text_ids():
    assert text_id("A  Café\n") == text_id("a cafe\u0301") != text_id("a cafe")
    assert text_id("a dog") == 9151722581430185315  # on every machine, in every version


# Damage


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_shard_cut_off_anywhere(form, tmp_path):
    """All samples or an error, never fewer; with a manifest always an error."""
    members = [(f"{'long' * 30}/{name}", data) for name, data in simple(4)]
    whole = write_tar(tmp_path / "whole.tar", members, form)
    data = whole.read_bytes()
    expected = list(Shards(whole))
    cut = tmp_path / "cut.tar"
    told = tmp_path / "told" / "cut.tar"
    told.parent.mkdir()
    write_manifest(told.parent, {"cut.tar": ShardFacts(bytes=len(data), samples=4)})
    points = set(range(0, len(data), 512)) | set(random.Random(0).choices(range(len(data)), k=100))
    results = Counter()
    for point in sorted(points):
        cut.write_bytes(data[:point])
        try:
            found = list(Shards(cut))
        except DataError as error:
            results[error.kind] += "cut.tar" in str(error)
        else:
            assert len(found) == 4, point
            same(found[-1], expected[-1])
            results["whole"] += 1
        told.write_bytes(data[:point])
        with pytest.raises(DataError, match=r"cut\.tar"):
            Shards(told)
    assert results["whole"] + results["shard"] == len(points)
    assert min(results["whole"], results["shard"]) > 5  # zeros behind the end mark may go
    told.write_bytes(data)
    assert len(Shards(told)) == 4


def test_headers_with_flipped_bits(tmp_path):
    """A header is right or an error, and so is what holds the end of the archive."""
    path = write_tar(tmp_path / "a.tar", simple(3), tarfile.PAX_FORMAT, mtime=1.5)
    data, index = path.read_bytes(), index_tar(path)
    inside = [range(at, at + size) for i in range(3) for _, at, size in index.members(i)]
    dice, caught = random.Random(0), 0
    for _ in range(400):
        at = dice.randrange(len(data))
        if any(at in span for span in inside):
            continue
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :])
        try:
            found = index_tar(path)
        except DataError:
            caught += 1
        else:  # a pad byte, or the checksum's own spaces
            assert [*map(list, map(found.members, range(3)))] == [
                *map(list, map(index.members, range(3)))
            ]
    assert caught > 100


def forged(data, size):
    """A tar whose first member tells another size, with the right checksum."""
    header = data[:124] + size + data[136:148] + b" " * 8 + data[156:512]
    return header[:148] + b"%06o\0 " % sum(header) + header[156:] + data[512:]


def test_shards_that_are_refused(tmp_path):
    good = write_tar(tmp_path / "good.tar", simple(2))
    data = good.read_bytes()
    bad = tmp_path / "bad.tar"

    def message(content):
        bad.write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.tar") as caught:
            Shards(bad)
        assert caught.value.kind == "shard"
        return str(caught.value)

    import bz2
    import gzip
    import lzma

    for name, packed in (("gzip", gzip), ("bzip2", bz2), ("xz", lzma)):
        assert f"packed by {name}" in message(packed.compress(data))
    assert "behind it" in message(data + data)  # webdataset reads the first archive only
    assert "end mark" in message(b"")
    assert "end mark" in message(data[: data.rindex(b"number 1") + 512])
    assert "other data" in message(b"no tar at all" * 99)
    one_block = -(-(data.rindex(b"number 1") + 1) // 512) * 512 + 512
    assert "end mark is cut off" in message(data[:one_block])
    for size in (b"\x80" + b"\xff" * 11, b"\xff" * 12, b"00000000009\0", b"-0000000001\0"):
        assert "cut off or damaged" in message(forged(data, size))
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE):
        write_tar(bad, [("1.txt", b"")], type=kind, linkname="/etc/passwd")
        assert "of type" in message(bad.read_bytes())
    write_tar(bad, [("1.txt", b"a"), ("1.TXT", b"b")])
    assert "two members" in message(bad.read_bytes())
    sizes = [b"11 size=-1\n", b"30 size=%d\n" % 10**20, b"99 size=7\n", b"8 size=7\n", b"9 size=77"]
    for record in (*sizes, b"0 a=b\n", b"-5 a=b\n", b"x", b"22 GNU.sparse.major=1\n"):
        write_tar(bad, [("h", record)], type=tarfile.XHDTYPE)
        assert "pax" in message(bad.read_bytes())
    write_tar(bad, [("h", bytes(2**21))], type=tarfile.GNUTYPE_LONGNAME)
    assert "a header of 2097152 bytes" in message(bad.read_bytes())
    bad.write_bytes(forged(data[:512], b"\x80" + (2**32).to_bytes(11, "big")))
    os.truncate(bad, 2**32 + 2048)  # without data: no disk is used
    with pytest.raises(DataError, match="has 4294967296 bytes"):
        Shards(bad)
    write_tar(bad, [("h", b"12 path=abc\n")], type=tarfile.XHDTYPE)
    assert "missing" in message(bad.read_bytes())
    assert kind_of(lambda: Shards(write_tar(tmp_path / "empty.tar", []))) == "missing"


def test_one_damaged_shard_of_many_is_an_error(tmp_path):
    for i in range(4):
        write_tar(tmp_path / f"{i}.tar", simple(3, 3 * i))
    data = (tmp_path / "1.tar").read_bytes()
    (tmp_path / "1.tar").write_bytes(data[:3000])
    with pytest.raises(DataError, match=r"1\.tar") as caught:
        Shards(tmp_path)
    assert caught.value.kind == "shard"


def test_a_shard_that_changes_after_opening(tmp_path):
    path = write_tar(tmp_path / "a.tar", simple(3))
    found = Shards(path)
    data = path.read_bytes()
    path.write_bytes(data[:2000])
    assert kind_of(lambda: found[0]) == "shard"
    path.write_bytes(data)
    assert found[2]["text"] == ("number 2",)
    path.write_bytes(data[:2000])  # while it is open
    assert kind_of(lambda: found[2]) == "shard"
    path.unlink()
    assert kind_of(lambda: Shards(path)) == "missing"
    again = pickle.loads(pickle.dumps(found))
    assert kind_of(lambda: again[0]) == "missing"


# Manifests


def manifest_of(folder, **changed):
    facts = {
        path.name: {"bytes": path.stat().st_size, "samples": 2, "sha256": sha256_of(path)} | changed
        for path in folder.glob("*.tar")
    }
    write_manifest(folder, {name: ShardFacts(**fact) for name, fact in facts.items()})


def test_the_manifest_is_kept_to(tmp_path):
    for i in range(3):
        write_tar(tmp_path / f"{i}.tar", simple(2, 2 * i))
    manifest_of(tmp_path)
    assert len(Shards(tmp_path, verify=True)) == 6
    manifest_of(tmp_path, samples=3)
    with pytest.raises(DataError, match=r"wants samples = 3 of shard .*0\.tar, got 2"):
        Shards(tmp_path)
    manifest_of(tmp_path, bytes=7)
    with pytest.raises(DataError, match=r"wants bytes = 7 of shard .*0\.tar, got 10240"):
        Shards(tmp_path)
    manifest_of(tmp_path, sha256="0")
    assert len(Shards(tmp_path)) == 6
    with pytest.raises(DataError, match=r"wants sha256 = 0 of shard"):
        Shards(tmp_path, verify=True)
    manifest_of(tmp_path)
    write_tar(tmp_path / "new.tar", simple(2))
    with pytest.raises(DataError, match="not this one"):
        Shards(tmp_path)
    (tmp_path / "new.tar").unlink()
    (tmp_path / "1.tar").rename(tmp_path / "elsewhere")
    for pattern in (tmp_path, tmp_path / "*.tar", tmp_path / "[01].tar"):
        with pytest.raises(DataError, match=r"1\.tar missing"):
            Shards(pattern)
    assert kind_of(lambda: Shards(tmp_path)) == "missing"
    assert len(Shards(tmp_path / "{0,2}.tar")) == 4  # only these were asked for


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"format": "tilewise shards", "version": 2, "shards": {}}', "\xff",
     '{"format": "tilewise shards", "version": 1}',
     '{"format": "tilewise shards", "version": 1, "shards": {"0.tar": 3}}',
     '{"format": "tilewise shards", "version": 1, "shards": {"0.tar": {"bytes": "1"}}}'],
)  # fmt: skip
def test_what_is_no_manifest(content, tmp_path):
    write_tar(tmp_path / "0.tar", simple(2))
    (tmp_path / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="no manifest of ours") as caught:
        Shards(tmp_path)
    assert caught.value.kind == "manifest"


# Patterns


def test_patterns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for i in range(11):
            write_tar(tmp_path / folder / f"{i:02d}.tar", [("1.txt", f"{folder}{i}".encode())])
    (tmp_path / "a" / "notes.txt").write_text("no shard")

    def texts(pattern):
        return [sample["text"][0] for sample in Shards(pattern)]

    assert texts("a/{08..10}.tar") == ["a8", "a9", "a10"]
    assert texts("a/{10,02}.tar") == ["a10", "a2"]
    assert texts("{a,b}/0[01].tar") == ["a0", "a1", "b0", "b1"]
    assert texts("a") == [f"a{i}" for i in range(11)]
    assert texts("b/03.tar::a/0[12].tar::b/03.tar") == ["b3", "a1", "a2", "b3"]
    (tmp_path / "a" / "00.tar").rename(tmp_path / "x:y[1].tar")
    assert texts("./x:y[1].tar") == ["a0"]
    (tmp_path / "b").rename(tmp_path / "b[1]")
    assert texts("b[1]/") == [f"b{i}" for i in range(11)]
    for missing in ("a/{00..02}.tar", "c", "c/*.tar", "a/00.tar"):
        assert kind_of(lambda missing=missing: Shards(missing)) == "missing"
    for url in ("pipe:touch ran", "http://x/1.tar", "{http,s3}://x/1.tar", "a::file:/1.tar"):
        with pytest.raises(tw.OptionError, match="copy them"):
            Shards(url)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(tw.OptionError, match="braces"):
        Shards("a/{1..")


def test_indexes_are_kept_if_asked(tmp_path, monkeypatch):
    path, kept = tmp_path / "a" / "1.tar", tmp_path / "kept"
    path.parent.mkdir()
    write_tar(path, simple(3))
    Shards(path)
    assert [*tmp_path.iterdir()] == [path.parent]
    first = Shards(path, index_folder=kept)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "index_tar", lambda _: 1 / 0)
        again = Shards(path, index_folder=kept)
        for a, b in zip(first, again, strict=True):
            same(a, b)
    write_tar(path, simple(5))
    assert len(Shards(path, index_folder=kept)) == 5
    size = path.stat().st_size
    write_tar(path, simple(4))
    os.truncate(path, size)
    os.utime(path, (1, 1))
    assert len(Shards(path, index_folder=kept)) == 4
    write_tar(path, simple(5))
    for file in kept.iterdir():
        file.write_bytes(file.read_bytes()[:-30])
    again = Shards(path, index_folder=kept)
    assert len(again) == 5
    assert [*path.parent.iterdir()] == [path]
    shutil.rmtree(kept)
    with pytest.raises(DataError, match="was there and cannot be opened") as told:
        again[0]
    assert told.value.kind == "missing"


def test_a_kept_index_tells_of_every_damage(tmp_path):
    """A bit is turned over, wherever: the index is made again, or the sample counts as damaged."""
    write_tar(path := tmp_path / "1.tar", simple(3))
    truth, kept = list(Shards(path)), tmp_path / "kept"
    Shards(path, index_folder=kept)
    (file,) = kept.iterdir()
    whole, told = file.read_bytes(), Counter()
    for place in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        damaged = Shards(path, index_folder=kept)
        told["made again"] += file.read_bytes() == whole
        for at, wanted in enumerate(truth):
            try:
                same(damaged[at], wanted)
            except DataError as error:
                told[error.kind] += 1
    assert set(told) == {"made again", "index"}
    assert told["made again"] == 8 * 44  # the head
    assert told["index"] > 8 * (len(whole) - 44 - 8)  # all but the checksum past the end


def test_where_indexes_are_kept(tmp_path, monkeypatch):
    write_tar(path := tmp_path / "1.tar", simple(3))
    monkeypatch.chdir(tmp_path)
    kept = Shards(path, index_folder="kept")
    monkeypatch.chdir("/")
    same(kept[1], Shards(path)[1])
    with pytest.raises(tw.OptionError, match="index_folder must be a folder that can be written"):
        Shards(path, index_folder=path)


def test_kept_indexes_take_no_memory(tmp_path):
    """Whatever is held goes to another process: so much of it there is."""
    sizes = {}
    for count in (10, 1000):
        write_tar(path := tmp_path / f"{count}.tar".rjust(9, "0"), simple(count))
        held, kept = Shards(path), Shards(path, index_folder=tmp_path / "kept")
        sizes[count] = len(pickle.dumps(held)), len(pickle.dumps(kept))
        for at in range(0, count, 9):
            same(held[at], kept[at])
    assert sizes[1000][0] > sizes[10][0] + 10_000
    assert sizes[1000][1] < sizes[10][1] + 10


# Bad samples

OBJECTS = np.array([{"a": 1}], dtype=object)


def header(shape):
    """An .npy that claims a shape and has nothing of it."""
    told = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file := io.BytesIO(), told)
    return file.getvalue()


def bomb():
    """A PNG that claims 2**30 pixels."""
    data = bytearray(encoded(pixels()))
    data[16:24] = (2**15).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


BAD = [
    ("image", "jpg", encoded(pixels(0, (32, 32, 3)), "jpeg")[:-200]),
    ("image", "png", encoded(pixels(0, (32, 32, 3)))[:-200]),
    ("image", "png", b"\x89PNG\r\n\x1a\nnothing"),
    ("image", "jpg", b""),
    ("image", "webp", encoded(pixels(), "tiff")),
    ("image", "jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n"),
    ("too large", "png", bomb()),
    ("text", "txt", b"caf\xe9"),
    ("empty text", "txt", b" \n\n"),
    ("json", "json", b'{"caption": '),
    ("json", "json", b"[" * 100_000),
    ("json", "json", b'{"label": ' + b"9" * 5000 + b"}"),
    ("field", "json", b'{"caption": 3}'),
    ("field", "json", b'{"captions": []}'),
    ("empty text", "json", b'{"captions": ["", " "]}'),
    ("text", "json", b'{"caption": "a\\u0000b"}'),
    ("text", "txt", b"a\0b"),
    ("text", "txt", "caption".encode("utf-16-le")),
    ("field", "json", b'["caption"]'),
    ("empty text", "json", b'{"negatives": ["a", ""]}'),
    ("text", "json", b'{"query": "\\ud800"}'),
    ("label", "cls", b"dog"),
    ("label", "cls", b"1_0"),
    ("array", "npy", npy(OBJECTS, allow_pickle=True)),
    ("array", "npy", npy(np.array([1.0, np.nan]))),
    ("array", "npy", npy(np.ones((2, 2)))),
    ("array", "npy", npy(np.arange(3))),
    ("array", "npy", npy(np.ones(9))[:-1]),
    ("array", "npy", header((2**60,))),
    ("array", "npy", header("__import__('os').abort()")),
    ("array", "npy", b"PK\x03\x04"),
    ("array", "npy", b""),
    ("empty", "pyd", pickle.dumps(1)),
]


@pytest.mark.parametrize("at", range(len(BAD)))
def test_bad_samples_by_kind(at, tmp_path):
    """Each is told by its kind, and its neighbours are read."""
    kind, extension, data = BAD[at]
    path = write_tar(tmp_path / "a.tar", [*simple(1), (f"bad.{extension}", data), *simple(1, 1)])
    found = Shards(path)
    assert len(found) == 3
    assert kind_of(lambda: found[1]) == kind
    assert [found[i]["text"] for i in (0, 2)] == [("number 0",), ("number 1",)]
    with pytest.raises(DataError, match=r"sample 1 \(1 of .*a\.tar\)"):
        found[1]


def test_at_least_ten_kinds_of_damage():
    assert len({kind for kind, _, _ in BAD}) + len({"shard", "missing"}) >= 10


class Trap:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_nothing_in_a_shard_is_run_or_written(tmp_path):
    mark = tmp_path / "ran"
    trap = pickle.dumps(Trap(mark))
    names = ("a.pyd", "a.pickle", "a.pkl", "a.pth", "a.pt", "a.ten", "a.mp", "a.py")
    members = [(name, trap) for name in names] + [("a.txt", b"fine")]
    members += [("b.npy", npy(np.array([Trap(mark)], dtype=object), allow_pickle=True))]
    members += [("../../c.txt", b"out"), ("/etc/passwd.txt", b"root"), ("..//d/../e.txt", b"x")]
    found = Shards(write_tar(tmp_path / "a.tar", members))
    assert found[0].keys() == {"text", "id"}
    assert kind_of(lambda: found[1]) == "array"
    assert [found[i]["text"][0] for i in (2, 3, 4)] == ["out", "root", "x"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
    pickle.loads(trap)
    assert mark.exists()  # the trap is a trap


# Processes and threads


@pytest.mark.parametrize("workers", [1, 2])
def test_in_workers_of_a_loader(workers, tmp_path):
    for i in range(3):
        write_tar(tmp_path / f"{i}.tar", simple(8, 8 * i))
    found = Shards(tmp_path)
    expected = list(found)  # files are open before the fork
    order = random.Random(0).sample(range(24), 24)
    how = {"num_workers": workers, "batch_size": 3, "multiprocessing_context": "fork"}
    loader = DataLoader(found, sampler=order, collate_fn=list, **how)
    for place, sample in zip(order, (s for batch in loader for s in batch), strict=True):
        same(sample, expected[place])
    same(pickle.loads(pickle.dumps(found))[5], expected[5])


def open_in(folder):
    """How many files of a folder this process has open."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.islink(link))


def test_many_threads_and_few_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "OPEN_FILES", 2)
    for i in range(6):
        write_tar(tmp_path / f"{i}.tar", simple(4, 4 * i))
    found = Shards(tmp_path)
    for place in range(24):
        assert found[place]["text"] == (f"number {place}",)
    assert open_in(tmp_path) == 2
    places = random.Random(0).choices(range(24), k=2000)
    with ThreadPoolExecutor(8) as pool:
        for place, sample in zip(places, pool.map(found.__getitem__, places), strict=True):
            assert sample["text"] == (f"number {place}",)
        assert open_in(tmp_path) <= 2 * 9
    assert open_in(tmp_path) == 2  # threads that ended keep none
    del found
    assert open_in(tmp_path) == 0


# Decoders


def test_images_of_every_kind_become_rgb():
    x = pixels(0, (9, 7, 3))
    for kind, how in (("png", {}), ("bmp", {}), ("webp", {"lossless": True})):
        image = decode.decode_image(encoded(x, kind, **how))
        assert (image.mode, image.size) == ("RGB", (7, 9))
        assert np.array_equal(image, x)
    alpha = np.concatenate([x, np.resize(np.uint8([0, 255, 51]), (9, 7, 1))], -1)
    got = np.asarray(decode.decode_image(encoded(alpha))).astype(int)
    share = alpha[..., 3:] / 255
    assert abs(got - (x * share + 255 * (1 - share))).max() <= 1
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16)
    for deep, wanted in ((grey * 257, grey), (grey.astype(np.uint8), grey)):
        got = np.asarray(decode.decode_image(encoded(deep)))
        assert np.array_equal(got, np.repeat(wanted[..., None], 3, -1))
    palette = Image.fromarray(x[..., 0] // 64, "P")
    palette.putpalette([0, 0, 0, 9, 9, 9, 90, 90, 90, 200, 200, 200])
    for kind in ("gif", "png"):
        got = decode.decode_image(encoded(palette, kind, transparency=0))
        assert np.array_equal(
            np.asarray(got)[x[..., 0] < 64], np.full(((x[..., 0] < 64).sum(), 3), 255)
        )
    cmyk = encoded(Image.fromarray(x).convert("CMYK"), "jpeg", quality=100)
    assert decode.decode_image(cmyk).mode == "RGB"


def test_only_five_formats_and_only_so_many_pixels(monkeypatch):
    for kind in ("tiff", "ppm", "ico", "tga", "pcx", "eps", "pdf", "jpeg2000"):
        assert kind_of(lambda kind=kind: decode.decode_image(encoded(pixels(), kind))) == "image"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 29)  # of 30: less than twice as many only warns
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert kind_of(lambda: decode.decode_image(encoded(pixels()))) == "too large"
        warnings.simplefilter("error")
        assert kind_of(lambda: decode.decode_image(encoded(pixels()))) == "too large"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
    assert decode.decode_image(encoded(pixels())).size == (5, 6)


def test_an_old_pillow_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(PIL, "__version__", "12.9.1")
    decode.require_pillow.cache_clear()
    with pytest.warns(UserWarning, match=r"Pillow 12\.9\.1 .*pillow>=13"):
        decode.decode_image(encoded(pixels()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode.decode_image(encoded(pixels()))
    decode.require_pillow.cache_clear()


def test_arrays_texts_and_fields():
    for dtype in ("<f2", ">f4", "<f8"):
        got = decode.decode_array(npy(np.arange(1, 4).astype(dtype)))
        assert got.dtype == np.dtype(dtype).newbyteorder("=")
        assert got.tolist() == [1, 2, 3]
    assert decode.decode_text("\ufeffa\u2028b ".encode()) == "a\u2028b"
    assert decode.decode_captions(b"a\r\n\n b \n") == ("a", "b")
    assert sample_of({"text": None, "caption": "c", "label": -1, "negatives": []}) == {
        "text": ("c",), "label": -1, "negatives": (),
    }  # fmt: skip
