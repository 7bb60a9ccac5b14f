"""Tables and folders: what they say, line by line, and what they may not reach."""

import gzip
import io
import json
import lzma
import os
import pickle

import numpy as np
import pytest
from PIL import Image

import tilewise as tw
from tilewise.data import tables
from tilewise.data.folders import ImageFolder
from tilewise.data.samples import text_id
from tilewise.data.sources import open_source
from tilewise.data.tables import Table
from tilewise.errors import DataError


def pixels(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)


def put_image(path, seed=0, kind="png"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed)).save(file := io.BytesIO(), kind)
    path.write_bytes(file.getvalue())


def jsonl(path, rows, pack=bytes):
    path.write_bytes(pack("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def kind_of(make):
    with pytest.raises(DataError) as caught:
        make()
    return caught.value.kind


def is_damaged(source, place):
    try:
        source.row(place)
    except DataError:
        return True
    return False


PACKED = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("end", PACKED)
def test_jsonl(end, tmp_path):
    rows = [
        {"captions": ["a", "b "], "label": 3, "other": {}},
        {"query": "q", "positive": "p", "negatives": ["m", "n"], "text": None},
        {"caption": "Ä", "id": 12},
        {"text": "c", "id": "name"},
        {"label": -1},
    ]
    table = Table(jsonl(tmp_path / f"a.jsonl{end}", rows, PACKED[end]))
    assert list(table)[:3] == [
        {"text": ("a", "b"), "label": 3, "id": text_id("a")},
        {"query": "q", "positive": "p", "negatives": ("m", "n"), "id": text_id("p")},
        {"text": ("Ä",), "id": 12},
    ]
    assert table[4] == table[-1] == {"label": -1, "id": 4}
    assert list(pickle.loads(pickle.dumps(table))) == list(table)
    with pytest.raises(IndexError):
        table[5]


def test_arrays_by_position(tmp_path):
    """As in wordnet_synset_gloss.jsonl.xz."""
    rows = [["dog, domestic dog", "a member of the genus Canis", "noun", ["the dog barked"]]] * 2
    path = jsonl(tmp_path / "gloss.jsonl.xz", rows, lzma.compress)
    wanted = {"query": rows[0][1], "positive": rows[0][0], "id": text_id(rows[0][0])}
    assert Table(path, columns=("positive", "query"))[1] == wanted
    assert Table(path, columns={"1": "query", "0": "positive"})[1] == wanted
    found = Table(path, columns=(None, "text", None, "negatives"))
    assert found[0] == {
        "text": (rows[0][1],), "negatives": ("the dog barked",), "id": text_id(rows[0][1])
    }  # fmt: skip
    with pytest.raises(DataError, match=r"line 1 of .*want a column of image"):
        Table(path)
    with pytest.raises(tw.OptionError, match="no row of"):
        Table(path, columns=("positive", "query", None, None, "label"))


@pytest.mark.parametrize("end", PACKED)
def test_cells(end, tmp_path):
    lines = [
        "title,captions,label,id,other",
        '"one, ""two""\nthree","[""a"", ""b""]",3,12,x',
        "é,[no list,,name,",
        "",
        " ,plain, -4 ,,",
    ]
    text = "\r\n".join(lines).replace("[no list", "no list")
    path = tmp_path / f"a.csv{end}"
    path.write_bytes(PACKED[end](b"\xef\xbb\xbf" + text.encode()))
    found = list(Table(path, columns={"title": "query"}))
    named = found[1].pop("id")
    assert found == [
        {"query": 'one, "two"\nthree', "text": ("a", "b"), "label": 3, "id": 12},
        {"query": "é", "text": ("no list",)},
        {"text": ("plain",), "label": -4, "id": text_id("plain")},
    ]
    assert named > 2**32


@pytest.mark.parametrize("end", PACKED)
def test_cells_of_tsv_are_never_quoted(end, tmp_path):
    """As captions are written there: a quote at their beginning is one of theirs."""
    lines = [
        "title\tcaptions\tlabel",
        '"hello" he said\t["a", "b"]\t3',
        '"open\t5" nails\t',
        "",
        "x, y\tplain\t -4 ",
    ]
    path = tmp_path / f"a.tsv{end}"
    path.write_bytes(PACKED[end](b"\xef\xbb\xbf" + "\r\n".join(lines).encode()))
    assert list(Table(path, columns={"title": "query"})) == [
        {"query": '"hello" he said', "text": ("a", "b"), "label": 3, "id": text_id("a")},
        {"query": '"open', "text": ('5" nails',), "id": text_id('5" nails')},
        {"query": "x, y", "text": ("plain",), "label": -4, "id": text_id("plain")},
    ]


def test_cells_of_tsv_that_were_quoted_as_in_csv(tmp_path):
    """As pandas writes them: those with quotes or several lines."""
    lines = [
        "label\tnote\ttext",
        '1\tx\t"say ""hi"""',
        '2\tx\t"two',
        'lines"',
        '3\tx\t"three ""of""',
        "",
        'them"',
        '4\tx\t""""',
        '5\t"a ""note"""\t"hi" and "ho"',
        '6\tx\t"hi"',
        '7\tx\t"open',
        '8\tx\t"" a ""',
    ]
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    table = Table(tmp_path / "a.tsv")
    damaged = [place for place in range(len(table)) if is_damaged(table, place)]
    assert damaged == [0, 1, 2, 3, 4, 5]
    said = r"line 3 .*must not be quoted.*got '\"two'; save the table without quotes, or as \.csv"
    with pytest.raises(DataError, match=said):
        table[1]
    assert [table[place]["text"] for place in range(6, len(table))] == [
        ('"hi" and "ho"',), ('"hi"',), ('"open',), ('"" a ""',)
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "comma"), [("csv", ","), ("tsv", "\t")])
def test_long_cells(kind, comma, tmp_path, monkeypatch):
    """Up to so many characters; beyond them something is wrong with a quote, and where is told."""
    long = "x" * 200_000
    (path := tmp_path / f"a.{kind}").write_text(f"text{comma}label\n{long}{comma}1\nb{comma}2\n")
    assert [sample["text"] for sample in Table(path)] == [(long,), ("b",)]
    monkeypatch.setattr(tables, "LONGEST_CELL", 100_000)
    with pytest.raises(DataError, match=r"line 2 on .*limit.*quotes are doubled") as caught:
        Table(path)
    assert caught.value.kind == "table"


def test_columns_that_we_name_stand_before_those_of_that_name(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"title": "t", "caption": "c", "text": "x", "label": "no"}])
    assert Table(path, columns={"title": "text", "label": None})[0]["text"] == ("t",)
    assert Table(path, columns={"label": None})[0]["text"] == ("c",)
    assert Table(path, columns={"text": "query", "label": "id"})[0]["query"] == "x"
    for columns in ({"title": "words"}, {"title": "text", "text": "text"}, "text"):
        with pytest.raises(tw.OptionError, match="columns must"):
            Table(path, columns=columns)
    with pytest.raises(tw.OptionError, match="'titel', and no row"):
        Table(path, columns={"titel": "query", "label": None})


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": ', "json", "line 3"),
        ("a.jsonl", b'{"text": "a"}\n{"text": " "}\n', "empty text", "line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "text", "line 2"),
        ("a.jsonl", b'{"text": "a"}\n"text"\n', "field", "line 2.*object or an array"),
        ("a.jsonl", b'{"label": "three"}\n', "field", "line 1"),
        (
            "a.jsonl",
            b'{"text": "\\ud800", "captions": ["a"]}\n{"text": "\\ud800"}',
            "text",
            "line 2",
        ),
        ("a.jsonl", b"", "table", "got none"),
        ("a.csv", b"text\n", "table", "got none"),
        ("a.csv", b"text,text\na,b\n", "table", "a name each"),
        ("a.csv", b"text,label\na,1\nb\n", "field", "line 3.*want 2 cells, got 1"),
        ("a.csv", b"text,label\na,x\n", "field", "line 2.*label"),
        ("a.csv", b'text\na\n"b" c\n', "table", "line 3 on .*quotes are doubled"),
        ("a.csv", b'text\na\n"b\nc\nd', "table", "line 3 on .*closes it"),
        ("a.csv", b'"te\nxt', "table", "line 1 on"),
        ("a.csv", b"text\ra\rb\r", "table", r"line 1 on .*must end in \\n"),
        ("a.csv", b"text\na\n\xff\n", "text", "line 3 must be UTF-8"),
        ("a.csv", b'negatives\n"[1]"\n', "field", "line 2"),
        ("a.csv", b"negatives\n[1\n", "json", "line 2"),
        ("a.jsonl.xz", lzma.compress(b'{"text": "a"}\n' * 999)[:-20], "table", "cut off"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-9], "table", "cut off"),
        ("a.jsonl.gz", b'{"text": "a"}\n', "table", "damaged"),
        ("a.jsonl.xz", b'{"text": "a"}\n', "table", "damaged"),
    ],
)
def test_damage_is_told_by_line_and_kind(name, content, kind, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(Table(tmp_path / name))
    assert caught.value.kind == kind
    assert name in str(caught.value)


def test_rows_are_damaged_in_kinds(tmp_path):
    rows = [{"text": "a"}, {"text": 3}, {"text": ""}, {"image": "../x"}, {"text": "b"}]
    table = Table(jsonl(tmp_path / "a.jsonl", rows))
    assert [table[place]["text"] for place in (0, 4)] == [("a",), ("b",)]
    kinds = [kind_of(lambda place=place: table[place]) for place in (1, 2, 3)]
    assert kinds == ["field", "empty text", "path"]
    with pytest.raises(tw.OptionError, match=r"\.jsonl, \.csv or \.tsv"):
        Table(tmp_path / "a.parquet")
    assert kind_of(lambda: Table(tmp_path / "none.csv")) == "missing"


def test_a_row_that_is_wrong_stays_as_a_damaged_sample(tmp_path):
    """It keeps its place, is counted by its kind when it is asked for, and costs no other row."""
    path = tmp_path / "a.csv"
    path.write_text("image,text,label\na.png,a,1\nb.png,b\nc.png,c,3,4\nd.png,d,x\ne.png,e,5\n")
    table = open_source(str(path))
    assert len(table) == 5
    assert [table.row(place)["text"] for place in (0, 4)] == [("a",), ("e",)]
    for place, says in enumerate(("line 3 .*want 3 cells, got 2", "line 4 .*got 4", "label"), 1):
        with pytest.raises(DataError, match=says) as caught:
            table[place]
        assert caught.value.kind == "field"
    assert len(open_source(f"{path}@0-100")) == 5
    low, high = (open_source(f"{path}@{part}") for part in ("0-50", "50-100"))
    assert len(low) + len(high) == 5
    assert sum(is_damaged(part, place) for part in (low, high) for place in range(len(part))) == 3
    path.write_text("image,text\nb\nc\n")
    with pytest.raises(DataError, match=r"line 2 .*want 2 cells"):
        open_source(str(path))


def test_unknown_columns_are_told_as_both_ask_for_them(tmp_path):
    (tmp_path / "a.csv").write_text("file,title\na.png,a\n")
    with pytest.raises(DataError, match=r"TABLE\?columns=file:image,title:text.*columns=\{"):
        open_source(str(tmp_path / "a.csv"))
    jsonl(tmp_path / "b.jsonl", [{"\ud800": 1}, {"text": "b"}])
    assert kind_of(lambda: open_source(str(tmp_path / "b.jsonl"))[0]) == "field"


# Images


def test_images_of_a_table(tmp_path):
    put_image(tmp_path / "deep" / "1.png", 1)
    put_image(tmp_path / "2.png", 2)
    (tmp_path / "3.png").write_bytes(b"no image")
    rows = [{"image": name, "text": "t"} for name in ("deep/1.png", "deep/../2.png", "3.png", "4")]
    table = Table(jsonl(tmp_path / "a.jsonl", rows))
    assert np.array_equal(table[0]["image"], pixels(1))
    assert np.array_equal(table[1]["image"], pixels(2))
    assert table[1]["text"] == ("t",)
    assert kind_of(lambda: table[2]) == "image"
    assert kind_of(lambda: table[3]) == "missing"
    elsewhere = jsonl(tmp_path / "deep" / "b.jsonl", [{"image": "2.png"}])
    assert kind_of(lambda: Table(elsewhere)[0]) == "missing"
    assert np.array_equal(Table(elsewhere, images=tmp_path)[0]["image"], pixels(2))
    with pytest.raises(DataError, match=r"row 2 of .*a\.jsonl, image '3\.png'"):
        table[2]


def test_rows_of_one_image_are_one_thing(tmp_path):
    """Whatever their captions, and whatever ids they tell."""
    rows = [
        {"image": "a.png", "text": "first"},
        {"image": "b.png", "text": "second"},
        {"image": "./a.png", "text": "third"},
        {"image": "a.png", "text": "fourth", "id": 7},
        {"image": "c.png", "id": 70},
        {"image": "c.png", "text": "fifth"},
        {"text": "sixth"},
        {"image": "A.png", "text": "sixth"},
        {"image": "d.png"},
        {"image": "d.png"},
    ]
    table = Table(jsonl(tmp_path / "a.jsonl", rows))
    ids = [table.row(place)["id"] for place in range(len(table))]
    first, second, sixth = map(text_id, ("first", "second", "sixth"))
    assert ids == [first, second, first, first, 70, 70, sixth, sixth, 8, 8]
    assert type(ids[0]) is int
    assert pickle.loads(pickle.dumps(table)).row(2) == table.row(2)


def ids_of(name):
    table = open_source(str(name))
    return [table.row(place)["id"] for place in range(len(table))]


def test_ids_of_annotations_are_not_those_of_images(tmp_path):
    """As COCO's annotations are: an id for each row, a path for several."""
    rows = [f"{9 - k // 2},{100 + k},caption {k},{k // 2}.jpg\n" for k in range(6)]
    (path := tmp_path / "a.csv").write_text("image_id,id,caption,file_name\n" + "".join(rows))
    assert ids_of(f"{path}?columns=file_name:image") == [100, 100, 102, 102, 104, 104]
    wanted = [text_id(f"caption {k}") for k in (0, 0, 2, 2, 4, 4)]
    assert ids_of(f"{path}?columns=file_name:image,id:") == wanted
    assert ids_of(f"{path}?columns=file_name:image,image_id:id") == [9, 9, 8, 8, 7, 7]


def test_a_column_can_be_left_out(tmp_path):
    """One of our names that says something else; what is wrong with it tells how."""
    (path := tmp_path / "a.csv").write_text("text,label\na,cat\nb,dog\n")
    with pytest.raises(DataError, match=r"got str 'cat'; .*left out as TABLE\?columns=label:"):
        open_source(str(path))
    assert open_source(f"{path}?columns=label:")[1] == {"text": ("b",), "id": text_id("b")}
    with pytest.raises(tw.OptionError, match="'id', and no row"):
        open_source(f"{path}?columns=label:,id:")


def test_rows_of_one_query_are_one_thing(tmp_path):
    """Unless they tell who they are; a positive that two queries have stays one, too."""
    rows = [
        {"query": "q", "positive": "a"},
        {"query": " Q", "positive": "b"},
        {"query": "q", "positive": "c", "id": 7},
        {"query": "r", "positive": "d"},
        {"query": "q", "positive": "d"},
        {"query": "q"},
        {"positive": "q"},
        {"query": "s", "positive": "e"},
        {"query": "t", "positive": "e"},
        {"query": "t", "positive": "f"},
    ]
    a, d, q, e, f = map(text_id, "adqef")
    assert ids_of(jsonl(tmp_path / "a.jsonl", rows)) == [a, a, 7, d, d, a, q, e, e, f]


def test_ids_of_queries_do_not_depend_on_the_order_of_rows(tmp_path):
    rows = [{"query": "q", "positive": "a"}, {"query": "q", "positive": "b"},
            {"query": "r", "positive": "b"}, {"query": "q", "positive": "c"}]  # fmt: skip
    a, b, c = map(text_id, "abc")
    for order, first in (([0, 1, 2, 3], a), ([1, 0, 2, 3], a), ([1, 2, 3, 0], c)):
        found = ids_of(jsonl(tmp_path / "a.jsonl", [rows[k] for k in order]))
        assert [found[order.index(k)] for k in range(4)] == [first, b, b, first]


def test_an_empty_caption_among_others_is_left_out(tmp_path):
    rows = [{"captions": ["", "a", " "]}, {"captions": [" ", ""]}, {"captions": ["a", 3]},
            {"negatives": ["", "b"], "text": "c"}]  # fmt: skip
    table = Table(jsonl(tmp_path / "a.jsonl", rows))
    assert table[0] == {"text": ("a",), "id": text_id("a")}
    kinds = [kind_of(lambda place=place: table[place]) for place in (1, 2, 3)]
    assert kinds == ["empty text", "field", "empty text"]


def test_a_text_with_nul_is_damaged(tmp_path):
    (path := tmp_path / "a.csv").write_text("text,query\na,b\na\0b,c\nd,e\0\n")
    table = Table(path)
    assert [kind_of(lambda place=place: table[place]) for place in (1, 2)] == ["text"] * 2
    with pytest.raises(DataError, match="no NUL character, got str"):
        table[1]


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../secret.png", "a/../../secret.png", "..", "C:\\x.png", "a\0b", "\ud800", 3],
)
def test_no_path_leads_out(path, tmp_path):
    put_image(tmp_path / "secret.png")
    (tmp_path / "in").mkdir()
    assert kind_of(lambda: Table(jsonl(tmp_path / "in" / "a.jsonl", [{"image": path}]))) == "path"


def test_no_link_leads_out(tmp_path):
    put_image(tmp_path / "secret.png")
    put_image(tmp_path / "in" / "1.png", 1)
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "in" / "up").symlink_to("..")
    (tmp_path / "in" / "loop").symlink_to("loop")
    (tmp_path / "in" / "fine.png").symlink_to("1.png")
    os.mkfifo(tmp_path / "in" / "pipe")
    names = ("link.png", "up/secret.png", "pipe", ".", "up/in/1.png", "fine.png", "x" * 300, "loop")
    table = Table(jsonl(tmp_path / "in" / "a.jsonl", [{"image": name} for name in names]))
    for place in range(4):
        assert kind_of(lambda place=place: table[place]) == "path"
    for place in (4, 5):
        assert np.array_equal(table[place]["image"], pixels(1))
    for place in (6, 7):
        assert kind_of(lambda place=place: table[place]) == "missing"
    # Through a link to its own folder a table reads what is there.
    (tmp_path / "also").symlink_to("in")
    assert np.array_equal(Table(tmp_path / "also" / "a.jsonl")[5]["image"], pixels(1))


def test_a_pipe_and_links_in_a_folder_of_images(tmp_path):
    """A pipe is damaged, not waited for; linked folders are looked into, once, also in a circle."""
    put_image(tmp_path / "all" / "cat" / "1.png", 1)
    put_image(tmp_path / "elsewhere" / "2.png", 2)
    put_image(tmp_path / "more" / "3.png", 3)
    (tmp_path / "all" / "cat" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "all" / "cat")
    (tmp_path / "all" / "dog").symlink_to(tmp_path / "more")
    os.mkfifo(tmp_path / "all" / "cat" / "pipe.jpg")
    folder = ImageFolder(tmp_path / "all")
    assert [folder.row(place)["label"] for place in range(len(folder))] == [0, 0, 0, 1]
    for place, seed in ((0, 1), (1, 2), (3, 3)):
        assert np.array_equal(folder[place]["image"], pixels(seed))
    assert kind_of(lambda: folder[2]) == "path"


def test_image_folders(tmp_path):
    for seed, name in enumerate(("n2/b.JPEG", "n2/a.png", "n10/deep/c.webp", "n10/.hidden.png")):
        kind = {"JPEG": "jpeg"}.get(name.split(".")[-1], name.split(".")[-1])
        put_image(tmp_path / name, seed, kind)
    (tmp_path / "n2" / "notes.txt").write_text("no image")
    (tmp_path / "labels.txt").write_text("no class")
    (tmp_path / ".git").mkdir()
    folder = ImageFolder(tmp_path)
    assert folder.classes == ["n10", "n2"]
    assert [(s["label"], s["id"]) for s in folder] == [(0, 0), (1, 1), (1, 2)]
    assert np.array_equal(folder[1]["image"], pixels(1))
    assert folder[0]["image"].mode == "RGB"
    (tmp_path / "n2" / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"n2/a\.png") as caught:
        folder[1]
    assert caught.value.kind == "image"
    (tmp_path / "n2" / "b.JPEG").unlink()
    assert kind_of(lambda: folder[-1]) == "missing"
    (tmp_path / "n3").mkdir()
    for path in (tmp_path, tmp_path / "n3", tmp_path / "none"):
        assert kind_of(lambda path=path: ImageFolder(path)) == "missing"


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    for name in ("10", "9", "0", "002"):
        put_image(tmp_path / name / "a.png")
    assert ImageFolder(tmp_path).classes == ["0", "002", "9", "10"]
    put_image(tmp_path / "x" / "a.png")
    assert ImageFolder(tmp_path).classes == ["0", "002", "10", "9", "x"]
