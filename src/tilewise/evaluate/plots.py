"""Pictures of an evaluation: curves, similarities, what was found for a text, and where."""

import math
import statistics
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import DataError, OptionError
from tilewise.evaluate.report import shortened

COLOURS = ("#0b6e99", "#c8553d", "#5a8f3d", "#c98a1b", "#7a5195", "#6b6b6b")
INK, PALE = "#333333", "#e3e3e3"
RIGHT, FOUND = "#2e9e4f", "#ff7f0e"  # frames that must show on any picture

SMOOTHED = 200  # points above which a curve is noise with a median through it
WINDOW = 101  # widest median, in points
LINES = ("-", "--", ":", "-.")  # for more curves than colours
WIDTH, HEIGHT = 8.0, 4.5  # inches of a plot
LABEL_GAP = 0.29  # inches between names at the ends of curves
SHORT_NAME = 20  # characters for which a plot has room; each more takes CHARACTER
CHARACTER = 0.075  # inches
LONGEST_NAME, LONGEST_TITLE = 60, 64  # characters
# Tried in this order for what the usual font lacks, those that are installed; none of coloured
# bitmaps, which matplotlib cannot draw.
FONTS = (
    "Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "Hiragino Sans",
    "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Microsoft YaHei",
    "Malgun Gothic", "PingFang SC", "Arial Unicode MS", "Noto Emoji", "Symbola", "Segoe UI Emoji",
)  # fmt: skip
UNDRAWN = r"Glyph \d+|Matplotlib currently does not support"  # how warnings of these begin

Image = Any  # (H, W, 3) uint8, a NumPy array or a CPU tensor
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the image


class Scene(NamedTuple):
    """A picture, and where in it something is and was found."""

    image: Image  # (H, W, 3)
    heat: Any  # (h, w), of any size and range
    truth: Box | None
    found: Box | None
    caption: str


def plot_curves(
    path: Path | str, series: dict[str, list[tuple[int, float]]], *, title: str, ylabel: str
) -> None:
    """Losses or recalls against the step: one line for each name, of points (step, value).

    A line of more than 200 points is drawn pale, with its running median over it.
    """
    names = [shortened(name, LONGEST_NAME) for name in series]
    longest = max(map(len, names), default=0)
    height = max(HEIGHT, len(names) * LABEL_GAP)
    figure = _figure(WIDTH + CHARACTER * max(0, longest - SHORT_NAME), height)
    axes = figure.subplots()
    ends = []
    for i, (name, points) in enumerate(zip(names, series.values(), strict=True)):
        if not points:
            continue
        colour, line = COLOURS[i % len(COLOURS)], LINES[i // len(COLOURS) % len(LINES)]
        steps, values = map(list, zip(*sorted(points), strict=True))
        if len(values) > SMOOTHED:
            axes.plot(steps, values, color=colour, lw=0.6, alpha=0.25)
            values = _running_median(values)
        marker = "o" if len(values) <= 30 else ""
        axes.plot(steps, values, color=colour, ls=line, marker=marker, lw=2, ms=4)
        finite = [value for value in values if math.isfinite(value)]
        ends.append((finite[-1] if finite else 0.0, name, colour))
    _dress(axes, title, "step", ylabel)
    axes.xaxis.set_major_formatter("{x:,.6g}")
    axes.margins(x=0.01)
    _name_ends(axes, ends, LABEL_GAP / height)
    _save(figure, path)


def plot_similarities(path: Path | str, matching: Tensor, other: Tensor, title: str) -> None:
    """Histograms of the similarities of matching pairs (N,) and of other pairs (K,), as densities.

    The less they overlap, the better the encoders.
    """
    figure = _figure(WIDTH, HEIGHT)
    axes = figure.subplots()
    kinds = {"matching pairs": matching, "other pairs": other}
    for name, pairs in kinds.items():
        if not pairs.numel() or not bool(pairs.isfinite().all()):
            raise DataError(
                f"similarities of {name} must be finite numbers, at least one, got {len(pairs)}, "
                f"{int(pairs.isfinite().sum())} of them finite; look for NaN in the features"
            )
    values = {name: pairs.detach().float().cpu().numpy() for name, pairs in kinds.items()}
    low = min(float(x.min()) for x in values.values())
    high = max(float(x.max()) for x in values.values())
    edges = [low + (high - low or 1.0) * i / 60 for i in range(61)]
    for (name, x), colour in zip(values.items(), COLOURS, strict=False):
        label = f"{name}, mean {round(float(x.mean()), 2) + 0.0:.2f}"  # + 0.0: never "-0.00"
        axes.hist(x, edges, density=True, color=colour, alpha=0.45, label=label)
        axes.hist(x, edges, density=True, color=colour, histtype="step", lw=1.5)
        axes.axvline(x.mean(), color=colour, lw=1.2, ls="--")
    _dress(axes, title, "similarity", "density")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="best")
    _save(figure, path)


def plot_retrieval_grid(
    path: Path | str, queries: list[str], images: list[list[Image]], hits: list[list[bool]]
) -> None:
    """A row for each text: the text, and the images found for it, best first.

    Those that are right, as `hits` says, have a frame.
    """
    if not queries or not len(queries) == len(images) == len(hits):
        raise OptionError(
            "queries, images and hits must be as many, one or more, got "
            f"{len(queries)}, {len(images)} and {len(hits)}"
        )
    k = max(1, *(len(row) for row in images))
    figure = _figure(2.4 + 1.35 * k, 0.3 + 1.37 * len(queries))
    grid = figure.subplots(
        len(queries), k + 1, squeeze=False, gridspec_kw={"width_ratios": [1.75] + [1] * k}
    )
    for row, query, found, right in zip(grid, queries, images, hits, strict=True):
        _bare(row[0])
        text = textwrap.fill(query, 26, max_lines=6, placeholder=" …")
        row[0].text(
            0, 0.5, text, color=INK, fontsize=10, va="center", transform=row[0].transAxes,
            parse_math=False,
        )  # fmt: skip
        for axes in row[1:]:
            _bare(axes)
        for axes, image, hit in zip(row[1:], found, right, strict=False):
            axes.imshow(_pixels(image))
            if hit:
                axes.spines[:].set(visible=True, color=RIGHT, linewidth=4)
    for i, axes in enumerate(grid[0, 1:]):
        axes.set_title(str(i + 1), color=INK, fontsize=9)
    _save(figure, path)


def plot_scenes(path: Path | str, scenes: Sequence[Scene | tuple[Any, ...]]) -> None:
    """Pictures with a heat map over each, the true box and the one found, under its caption.

    A plain tuple does for a `Scene`.
    """
    if not scenes:
        raise OptionError("scenes must be at least one, got none")
    columns = min(4, len(scenes))
    rows = -(-len(scenes) // columns)
    figure = _figure(3.1 * columns, 0.3 + 3.4 * rows)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid:
        _bare(axes)
    for axes, scene in zip(grid, scenes, strict=False):
        _plot_scene(axes, Scene(*scene))
    boxes = {box.get_label(): box for axes in grid for box in axes.get_legend_handles_labels()[0]}
    if boxes:
        figure.legend(
            handles=boxes.values(), loc="outside lower center", ncols=2, frameon=False,
            labelcolor=INK, fontsize=9,
        )  # fmt: skip
    _save(figure, path)


def _plot_scene(axes: Any, scene: Scene) -> None:
    height, width = scene.image.shape[:2]
    heat = torch.as_tensor(scene.heat).float()
    heat = (heat - heat.min()) / (heat.max() - heat.min()).clamp(min=1e-12)  # (h, w), in [0, 1]
    axes.imshow(_pixels(scene.image))
    axes.imshow(
        heat.numpy(),
        cmap="inferno",
        # What is cold lets the picture through.
        alpha=(0.65 * heat).numpy(),
        interpolation="bilinear",
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )
    _plot_box(axes, scene.truth, "truth", color=RIGHT)
    _plot_box(axes, scene.found, "found", color=FOUND, linestyle=(0, (4, 2)))
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    caption = textwrap.fill(scene.caption, 36, max_lines=3, placeholder=" …")
    axes.set_title(caption, color=INK, fontsize=9, parse_math=False)  # a price is no formula


def _plot_box(axes: Any, box: Box | None, name: str, **look: Any) -> None:
    if box is None:
        return
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    left, top, right, bottom = (float(edge) - 0.5 for edge in box)  # a pixel's centre is a whole
    corner, size = (left, top), (right - left, bottom - top)
    axes.add_patch(Rectangle(corner, *size, fill=False, color="white", linewidth=4, alpha=0.8))
    axes.add_patch(Rectangle(corner, *size, fill=False, linewidth=2.2, label=name, **look))


def _running_median(values: Sequence[float]) -> list[float]:
    """The median around each value; what is not finite, or beyond an end, is left out."""
    reach = min(WINDOW, len(values) // 20) // 2
    found = []
    for i in range(len(values)):
        window = [x for x in values[max(0, i - reach) : i + reach + 1] if math.isfinite(x)]
        found.append(statistics.median(window) if window else math.nan)
    return found


def _name_ends(axes: Any, ends: list[tuple[float, str, str]], gap: float) -> None:
    """Names of curves beside where they end, from (last value, name, colour)."""
    low, high = axes.get_ylim()
    ends = sorted(ends)
    heights = _spread([(value - low) / (high - low) for value, _, _ in ends], gap)
    for height, (_, name, colour) in zip(heights, ends, strict=True):
        axes.text(
            1.015, height, name, color=colour, fontsize=9, va="center", transform=axes.transAxes,
            parse_math=False,
        )  # fmt: skip


def _spread(heights: list[float], gap: float) -> list[float]:
    """Rising heights moved apart until neighbours differ by `gap`, about where they were.

    Each lump of names that touch is centred on the mean of where they would be, within 0 and 1.
    """
    lumps: list[tuple[float, int]] = []  # (centre, names)
    for height in heights:
        centre, size = min(max(height, 0.0), 1.0), 1
        while lumps and centre - gap * (size + lumps[-1][1]) / 2 < lumps[-1][0]:
            under, names = lumps.pop()
            centre = (centre * size + under * names) / (size + names)
            size += names
            half = gap * (size - 1) / 2
            centre = max(min(centre, 1 - half), half)
        lumps.append((centre, size))
    return [centre + gap * (i - (size - 1) / 2) for centre, size in lumps for i in range(size)]


def _dress(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
    """Names, grid and colours."""
    axes.set_title(
        shortened(title, LONGEST_TITLE), color=INK, fontsize=11, weight="bold", loc="left",
        parse_math=False,
    )  # fmt: skip
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.grid(color=PALE, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(color=PALE, labelcolor=INK)


def _pixels(image: Image) -> Any:
    return image.numpy() if isinstance(image, Tensor) else image


def _bare(axes: Any) -> None:
    """Nothing but what is drawn."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _figure(width: float, height: float) -> Any:
    """A figure of that many inches."""
    # No pyplot: it would keep the figure and choose a backend for the whole process.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415
    except ImportError as error:
        raise OptionError(
            "pictures are drawn with matplotlib, which is not installed; run "
            "pip install 'tilewise[train]'"
        ) from error
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    figure = Figure(figsize=(width, height), dpi=150, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path | str) -> None:
    """With fonts for many scripts; a character that none of them has is a box, and nothing is said
    of it: whoever evaluates cannot help it.
    """
    from matplotlib.font_manager import get_font_names  # noqa: PLC0415
    from matplotlib.text import Text  # noqa: PLC0415

    there = set(get_font_names())
    more = [name for name in FONTS if name in there]
    for text in figure.findobj(Text):
        text.set_fontfamily([*text.get_fontfamily(), *more])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", UNDRAWN)
        figure.savefig(path)
