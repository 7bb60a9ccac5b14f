"""Pictures: what is drawn, and that nothing of it stays behind."""

import io
import math
import sys
from itertools import pairwise

import matplotlib.font_manager
import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from tilewise.errors import DataError, OptionError
from tilewise.evaluate import plots
from tilewise.evaluate.report import metrics_table, shortened


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is saved."""
    kept, save = [], Figure.savefig

    def keep(self, *args, **kwargs):
        kept.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def pixels(path):
    """(H, W, 3), in [0, 1]."""
    return matplotlib.image.imread(path)[:, :, :3]


def has(picture, colour, at_least=100):
    return (np.abs(picture - to_rgb(colour)).max(2) < 0.02).sum() >= at_least


def flat(colour, size=20):
    return np.full((size, size, 3), colour, dtype=np.uint8)


def test_curves(tmp_path, figures):
    """A long noisy series has its median beside it, a short one is drawn as it is."""
    dice = torch.Generator().manual_seed(0)
    noise = torch.randn(400, generator=dice).tolist()
    series = {
        "noisy": [(10 * i, 1 + x) for i, x in enumerate(noise)],
        "short": [(1000, 2.0), (0, 5.0), (2000, 1.0)],
        "none": [],
    }
    plots.plot_curves(tmp_path / "a.png", series, title="Loss", ylabel="loss of a step")
    (axes,) = figures[0].axes
    raw, median, short = axes.lines
    assert list(raw.get_ydata()) == [y for _, y in series["noisy"]]
    assert np.std(median.get_ydata()) < 0.4 * np.std(raw.get_ydata())
    assert abs(np.mean(median.get_ydata()) - 1) < 0.2
    assert list(short.get_xdata()) == [0, 1000, 2000]
    assert list(short.get_ydata()) == [5.0, 2.0, 1.0]
    assert {text.get_text() for text in axes.texts} == {"noisy", "short"}
    assert axes.get_ylabel() == "loss of a step"
    picture = pixels(tmp_path / "a.png")
    assert picture.shape[:2] == (675, 1200)
    assert has(picture, plots.COLOURS[0])
    assert has(picture, plots.COLOURS[1])


def test_curves_with_what_is_not_finite(tmp_path):
    points = [(i, math.nan if i > 150 else 1.0) for i in range(300)]
    plots.plot_curves(
        tmp_path / "a.png", {"a": points, "b": points[200:]}, title="Loss", ylabel="loss"
    )
    assert has(pixels(tmp_path / "a.png"), plots.COLOURS[0])


LONG = "/mnt/$fast/data^$sets/\\frac/" + "x" * 60 + "/test-{000..099}.tar@0-100"


def clipped(path):
    """Whether something is drawn up to the edge of a picture."""
    picture = pixels(path)
    edges = (picture[0], picture[-1], picture[:, 0], picture[:, -1])
    return any((edge < 1).any() for edge in edges)


def test_names_of_any_length_and_kind_have_room(tmp_path, figures):
    """They are plain text, shortened in the middle; many of them make a picture higher."""
    plots.plot_similarities(tmp_path / "a.png", torch.ones(3), torch.zeros(2), LONG)
    names = [f"{LONG}/{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in range(12)]
    points = {name: [(0, 0.1), (10, 0.2 + i / 99)] for i, name in enumerate(names)}
    plots.plot_curves(tmp_path / "b.png", points, title=LONG, ylabel="recall")
    title, curves = figures[0].axes[0].get_title(loc="left"), figures[1].axes[0]
    assert title.startswith("/mnt/$fast")
    assert title.endswith("…" + LONG[-len(title.split("…")[1]) :])
    told = {text.get_text() for text in curves.texts}
    assert {name.split("/")[-1] for name in told} == {name.split("/")[-1] for name in names}
    boxes = sorted((text.get_window_extent() for text in curves.texts), key=lambda box: box.y0)
    assert all(above.y0 > under.y1 for under, above in pairwise(boxes))
    assert len({(line.get_color(), line.get_linestyle()) for line in curves.lines}) == 24
    width, height = figures[1].get_size_inches() * figures[1].dpi
    assert curves.get_window_extent().width > 0.5 * width
    assert height > 900
    assert not clipped(tmp_path / "a.png")
    assert not clipped(tmp_path / "b.png")


@pytest.mark.parametrize(
    ("name", "short"), [("abc", "abc"), ("abcdef", "abcdef"), ("abcdefg", "a…defg")]
)
def test_names_are_shortened_in_the_middle(name, short):
    assert shortened(name, 6) == short


def test_a_table_of_many_data(tmp_path):
    """Metrics and numbers stay whole in 80 columns."""
    metrics = ("image_to_text_median_rank", "zeroshot_mean_per_class")
    values = {f"data[{i}]/{'x' * 90}/{name}": 1234567.0 for i in range(6) for name in metrics}
    console = Console(width=80, soft_wrap=True, markup=False, file=io.StringIO())
    console.print(metrics_table(values))
    told = console.file.getvalue()
    assert all(told.count(f" {name} ") == 2 for name in metrics)
    assert told.count(" 1,234,567 ") == 12
    assert all(f"data[{i}]" in told for i in range(6))
    assert max(map(len, told.splitlines())) <= 80


def test_running_median():
    values = [0.0] * 100 + [50.0] + [1.0, math.nan] * 50
    found = plots._running_median(values)
    assert found[:95] == [0.0] * 95
    assert found[106:] == [1.0] * 95
    assert all(a <= b for a, b in pairwise(found))


@pytest.mark.parametrize(
    "heights",
    [[], [0.5], [0.5, 0.5], [0.1, 0.12, 0.5, 0.9], [0.99, 1.0, 1.0], [-3.0, 0.0, 0.0], [0.4, 9.0]],
)
def test_names_do_not_touch(heights):
    found = plots._spread(heights, 0.1)
    assert len(found) == len(heights)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(found))
    assert all(-1e-9 <= height <= 1 + 1e-9 for height in found)
    if heights == [0.1, 0.12, 0.5, 0.9]:
        assert found == pytest.approx([0.06, 0.16, 0.5, 0.9])


def test_similarities(tmp_path, figures):
    dice = torch.Generator().manual_seed(0)
    matching = (0.5 + 0.1 * torch.randn(500, generator=dice)).bfloat16().requires_grad_()
    other = 0.1 * torch.randn(3000, generator=dice)
    plots.plot_similarities(tmp_path / "a.png", matching, other, "Similarities")
    (axes,) = figures[0].axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["matching pairs, mean 0.51", "other pairs, mean 0.00"]
    for container in axes.containers[:2]:
        area = sum(bar.get_height() * bar.get_width() for bar in container)
        assert area == pytest.approx(1, abs=1e-3)
    assert (tmp_path / "a.png").stat().st_size > 10_000
    plots.plot_similarities(tmp_path / "b.png", torch.ones(3), torch.ones(2), "All the same")


def test_retrieval_grid(tmp_path, figures):
    """Frames round the right ones only; rows may differ in length, captions in kind."""
    images = [[flat(10 * i + j) for j in range(4 - i)] for i in range(2)]
    hits = [[False, True, False, True], [False] * 3]
    queries = ["from $5_{ to $7", "a very long caption " * 20]
    plots.plot_retrieval_grid(tmp_path / "a.png", queries, images, hits)
    grid = np.array(figures[0].axes).reshape(2, 5)
    for row, right in zip(grid, hits, strict=True):
        framed = [axes.spines["top"].get_visible() for axes in row[1:]]
        assert framed[: len(right)] == right
        assert not any(framed[len(right) :])
    shown = [[int(axes.images[0].get_array()[0, 0, 0]) for axes in row[1:] if axes.images]
             for row in grid]  # fmt: skip
    assert shown == [[0, 1, 2, 3], [10, 11, 12]]
    assert grid[0, 0].texts[0].get_text().replace("\n", " ") == queries[0]
    assert grid[1, 0].texts[0].get_text().endswith("…")
    assert has(pixels(tmp_path / "a.png"), plots.RIGHT, 1000)
    plots.plot_retrieval_grid(tmp_path / "b.png", ["a"], [[torch.zeros(9, 9, 3).byte()]], [[False]])
    assert not has(pixels(tmp_path / "b.png"), plots.RIGHT)


def test_scenes(tmp_path, figures):
    """The heat lies where it should, boxes at the edges of pixels; either may be missing."""
    heat = torch.zeros(4, 4)
    heat[0, 0] = 3.0
    scenes = [
        plots.Scene(flat(200, 40), heat, None, None, "from $5_{ to $7"),
        (torch.full((40, 80, 3), 200).byte(), heat, (0, 0, 20, 10), (4, 2, 24, 12), "a dog " * 60),
        *[(flat(200), heat.numpy() * 0, None, (1, 1, 5, 5), "cold")] * 3,
    ]
    plots.plot_scenes(tmp_path / "a.png", scenes)
    axes = figures[0].axes
    assert len(axes) == 8
    assert not axes[0].patches
    boxes = {box.get_label(): box for box in axes[1].patches if not box.get_label().startswith("_")}
    assert boxes["truth"].get_bbox().bounds == (-0.5, -0.5, 20, 10)
    assert boxes["found"].get_bbox().bounds == (3.5, 1.5, 20, 10)
    assert axes[1].get_xlim() == (-0.5, 79.5)
    assert axes[1].get_ylim() == (39.5, -0.5)
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["truth", "found"]
    window = axes[0].get_window_extent()
    picture = pixels(tmp_path / "a.png")
    top, left = picture.shape[0] - int(window.y1), int(window.x0)
    hot, cold = picture[top + 10, left + 10], picture[top + 10, int(window.x1) - 10]
    assert np.abs(cold - 200 / 255).max() < 0.01
    assert np.abs(hot - 200 / 255).max() > 0.1
    plots.plot_scenes(tmp_path / "b.png", scenes[:1])
    assert not figures[1].legends


SCRIPTS = "中文 日本 한국 😀 ไทย हिन्दी"


def test_captions_of_any_script_raise_no_warning(tmp_path, figures, recwarn, monkeypatch):
    """Fonts that are there are tried for them."""
    there = set(matplotlib.font_manager.get_font_names())
    monkeypatch.setattr(plots, "FONTS", ("No Such Font", "DejaVu Serif"))
    plots.plot_retrieval_grid(tmp_path / "a.png", [SCRIPTS], [[flat(1)]], [[True]])
    plots.plot_scenes(tmp_path / "b.png", [(flat(0), np.ones((2, 2)), None, None, SCRIPTS)])
    plots.plot_similarities(tmp_path / "c.png", torch.ones(3), torch.zeros(2), SCRIPTS)
    plots.plot_curves(tmp_path / "d.png", {SCRIPTS: [(0, 1.0)]}, title=SCRIPTS, ylabel="loss")
    assert [str(warning.message) for warning in recwarn] == []
    tried = {name for figure in figures for text in figure.findobj(Text)
             for name in text.get_fontfamily()}  # fmt: skip
    assert tried == {"sans-serif", *({"DejaVu Serif"} & there)}


def test_figures_are_let_go(tmp_path, monkeypatch):
    """No pyplot, which would keep them."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    plots.plot_curves(tmp_path / "a.png", {"a": [(0, 1.0)]}, title="", ylabel="")
    plots.plot_scenes(tmp_path / "b.png", [(flat(0), np.ones((2, 2)), None, (1, 1, 2, 2), "")])


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match=r"tilewise\[train\]"):
        plots.plot_curves(tmp_path / "a.png", {}, title="", ylabel="")


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda p: plots.plot_retrieval_grid(p, ["a"], [], []), OptionError, "got 1, 0 and 0"),
        (lambda p: plots.plot_retrieval_grid(p, [], [], []), OptionError, "one or more"),
        (lambda p: plots.plot_scenes(p, []), OptionError, "at least one"),
        (lambda p: plots.plot_similarities(p, torch.ones(0), torch.ones(2), ""),
         DataError, "matching pairs.*got 0"),
        (lambda p: plots.plot_similarities(p, torch.ones(2), torch.tensor([1, math.nan]), ""),
         DataError, "other pairs.*got 2, 1 of them finite"),
    ],
)  # fmt: skip
def test_what_is_refused(call, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        call(tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
