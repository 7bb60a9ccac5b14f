"""Tables and plots of what `run.py` measured.

    python benchmarks/report.py benchmarks/results/*.csv [--output FOLDER]

Of rows about the same case and contender on the same machine the newest counts. The plots,
efficiency, time and memory as PNG, go beside the first CSV unless told otherwise.
"""

import argparse
import csv
import math
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from cases import CONTENDERS, MIB, Case, find_case

from tilewise.bench import OURS

INK, PALE, GREY = "#333333", "#e3e3e3", "#8a8a8a"
COLOURS = (
    "#0b6e99", "#56b4e9", "#17becf", "#004c6d", "#7fcdbb", "#1d91c0", "#c8553d",
    "#e69f00", "#8c564b", "#6a51a3", "#2ca02c", "#98c379", "#d36ba6", "#bcbd22",
)  # fmt: skip
STYLES = {
    contender.name: (colour, marker)
    for contender, colour, marker in zip(CONTENDERS, COLOURS, "os<>12D^vPXph*", strict=True)
}
HEADINGS = (
    "contender", "ms", "+-%", "efficiency", "x dense", "MiB", "error", "first s", "remark",
)  # fmt: skip
SPREAD = 2.0  # powers of two between batches below which the tick labels would touch


class Row(NamedTuple):
    """A line of the results; numbers are None where nothing was measured."""

    case: Case
    contender: str
    status: str
    numbers: dict[str, float | None]
    text: dict[str, str]  # the line as it stands

    @property
    def device(self) -> str:
        """The GPU, or the machine that has none."""
        return self.text["gpu"] or self.text["machine"]

    def get(self, name: str) -> float | None:
        """The number of a column."""
        return self.numbers[name]


NUMBERS = (
    "time_ms", "time_min_ms", "time_max_ms", "efficiency", "bar", "peak_mib", "limit_mib",
    "gradient_error", "first_call_s",
)  # fmt: skip


def load(paths: Iterable[Path]) -> list[Row]:
    """The newest row of each device, case and contender, in the order they were first met."""
    newest: dict[tuple[str, str, str], Row] = {}
    for path in paths:
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                numbers = {name: float(line[name]) if line[name] else None for name in NUMBERS}
                row = Row(find_case(line["case"]), line["contender"], line["status"], numbers, line)
                key = row.device, line["case"], row.contender
                if key not in newest or newest[key].text["date"] <= line["date"]:
                    newest[key] = row
    return list(newest.values())


def by_case(rows: Iterable[Row]) -> dict[Case, list[Row]]:
    """The rows of each case, in order."""
    cases: dict[Case, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return cases


def cells(row: Row, dense_ms: float | None) -> list[str]:
    """A line of the table, under `HEADINGS`."""
    time_ms, low_ms, high_ms = (row.get(f"time_{x}ms") for x in ("", "min_", "max_"))
    if time_ms is None or low_ms is None or high_ms is None:
        return [row.contender, *[""] * (len(HEADINGS) - 2), row.status]
    return [
        row.contender,
        f"{time_ms:,.4g}" if time_ms < 1e4 else f"{time_ms:,.0f}",
        f"{50 * (high_ms - low_ms) / time_ms:.1f}",
        f"{row.get('efficiency') or 0:.3f}",
        f"{dense_ms / time_ms:.2f}" if dense_ms else "",
        f"{row.get('peak_mib') or 0:,.0f}",
        f"{row.get('gradient_error') or 0:.1e}",
        f"{row.get('first_call_s') or 0:.2f}",
        remark(row),
    ]


def remark(row: Row) -> str:
    """Whether ours met its bar and kept its memory; the bars are those of one H200."""
    if not row.contender.startswith(OURS):
        return ""
    bar, limit_mib = row.get("bar"), row.get("limit_mib") or math.inf
    words = [] if bar is None else [f"bar {_met((row.get('efficiency') or 0) >= bar)}"]
    return ", ".join([*words, f"memory {_met((row.get('peak_mib') or 0) <= limit_mib)}"])


def _met(met: bool) -> str:
    return "met" if met else "missed"


def tables(rows: Sequence[Row]) -> dict[str, list[list[str]]]:
    """The lines of each case, under its title."""
    found = {}
    for case, group in by_case(rows).items():
        dense_ms = next((row.get("time_ms") for row in group if row.contender == "dense"), None)
        bar = f"bar {case.bar:.2f}" if case.bar is not None else case.note
        limit = f"memory at most {case.limit_bytes / MIB:,.0f} MiB"
        title = "; ".join(filter(None, (words_of(case), bar, limit)))
        found[title] = [cells(row, dense_ms) for row in group]
    return found


def title_of(rows: Sequence[Row]) -> str:
    """The machine and what ran on it."""
    about = rows[-1].text
    skipped = ", tests skipped" if any(row.text["tests"] != "green" for row in rows) else ""
    triton = f", Triton {about['triton']}" if about["triton"] else ""
    commits = sorted({row.text["commit"][:9] + row.text["commit"][40:] for row in rows} - {""})
    commit = f", commit {' '.join(commits)}" if commits else ""
    return f"{rows[0].device}, PyTorch {about['torch']}{triton}{commit}{skipped}"


def show(title: str, lines: Sequence[Sequence[str]]) -> None:
    """Print a table, with rich where it is installed."""
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
    except ImportError:
        print(f"\n{title}", plain(lines), sep="\n")
        return
    shown = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        words = heading in ("contender", "remark")
        shown.add_column(heading, justify="left" if words else "right", no_wrap=not words)
    for line in lines:
        shown.add_row(*line)
    # A file or a pipe has no width of its own.
    Console(width=None if sys.stdout.isatty() else 120).print(shown, markup=False)


def plain(lines: Sequence[Sequence[str]]) -> str:
    """The table in columns of text."""
    widths = [max(map(len, column)) for column in zip(HEADINGS, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [HEADINGS, *lines]
    )


def _figure(title: str, size: tuple[float, float]) -> Any:
    # No pyplot: it would keep the figure and choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, hspace=0.03, wspace=0.03)
    figure = Figure(figsize=size, dpi=130, layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(title, color=INK, fontsize=10, x=0.012, ha="left")
    return figure


def _measured_names(rows: Iterable[Row]) -> list[str]:
    """Contenders with at least one number, in their usual order."""
    names = {row.contender for row in rows if row.status == "ok"}
    return [name for name in STYLES if name in names]


def plot_efficiency(rows: Sequence[Row], path: Path) -> None:
    """A panel of bars for each case; a dashed line where ours must get to."""
    cases = by_case(row for row in rows if row.contender in _measured_names(rows))
    columns = min(3, len(cases))
    num_rows = -(-len(cases) // columns)
    tallest = max(len(group) for group in cases.values())
    title = f"Efficiency: share of the speed of large matrix products, sustained\n{title_of(rows)}"
    height = 1.1 + num_rows * (0.75 + 0.27 * tallest)
    figure = _figure(title, (max(5.0 * columns, 8.0), height))
    panels = figure.subplots(num_rows, columns, squeeze=False).ravel()
    top = max([1.0, *(row.get("efficiency") or 0 for row in rows)])
    for axes, (case, group) in zip(panels, cases.items(), strict=False):
        _bars(axes, case, group, top)
    for axes in panels[len(cases) :]:
        axes.set_visible(False)
    figure.savefig(path)


def _bars(axes: Any, case: Case, group: Sequence[Row], top: float) -> None:
    for place, row in enumerate(group):
        value = row.get("efficiency")
        if value is None:
            reason = row.status.split(":")[0]
            axes.text(
                0.01 * top, place, reason, va="center", fontsize=8, color=GREY, style="italic"
            )
            continue
        axes.barh(place, value, color=STYLES[row.contender][0], height=0.7)
        # Inside a long bar, so that the dashed line does not run through the number.
        inside = value > 0.6 * top
        shift, colour, side = (-0.01, "white", "right") if inside else (0.01, INK, "left")
        style = {"va": "center", "ha": side, "fontsize": 8, "color": colour}
        axes.text(value + shift * top, place, f"{value:.3f}", **style)
    if case.bar is not None:
        axes.axvline(case.bar, color=INK, ls="--", lw=1, zorder=0)
        axes.annotate(
            f"bar {case.bar:.2f}", (case.bar, 1), xycoords=("data", "axes fraction"),
            xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8, color=INK,
        )  # fmt: skip
    axes.set_title(words_of(case), color=INK, fontsize=9, loc="left", pad=14)
    axes.set_yticks(range(len(group)), [row.contender for row in group], fontsize=8)
    axes.set_ylim(len(group) - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * top)
    _frame(axes)
    axes.grid(visible=False, axis="y")


def words_of(case: Case) -> str:
    """The case, for people."""
    kind = f"{case.dtype} under autocast" if case.autocast else case.dtype
    loss = {"clip": "CLIP", "siglip": "SigLIP"}[case.loss]
    return f"{loss}, {kind}, B = {case.batch:,}, D = {case.dim:,}"


def _frame(axes: Any) -> None:
    axes.grid(color=PALE, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(color=PALE, labelcolor=INK, labelsize=8)


def _kind(row: Row) -> str:
    """What is the same along a line of a plot over the batch size."""
    return words_of(row.case).replace(f" B = {row.case.batch:,},", "")


def _curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Measured rows by kind; kinds with one batch only when there are no others."""
    ordered = sorted((row for row in rows if row.status == "ok"), key=_kind)
    kinds = {kind: list(group) for kind, group in groupby(ordered, key=_kind)}
    several = {k: group for k, group in kinds.items() if len({x.case.batch for x in group}) > 1}
    return several or kinds


def plot_over_batch(rows: Sequence[Row], column: str, words: str, path: Path) -> None:
    """A panel for each kind of case: `column` against the batch size, both logarithmic."""
    curves = _curves(rows)
    figure = _figure(f"{words}\n{title_of(rows)}", (max(6.2 * len(curves), 9.0), 5.6))
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    handles: dict[str, Any] = {}
    for axes, (kind, group) in zip(panels, curves.items(), strict=True):
        for name in _measured_names(group):
            points = sorted((x.case.batch, x.get(column)) for x in group if x.contender == name)
            colour, marker = STYLES[name]
            style = {"color": colour, "marker": marker, "lw": 1.8, "ms": 6}
            style["zorder"] = 4 if name.startswith(OURS) else 3
            (handles[name],) = axes.plot(*zip(*points, strict=True), **style)
        if column == "peak_mib":
            limits = sorted({(x.case.batch, x.get("limit_mib")) for x in group})
            (handles["limit of ours"],) = axes.plot(
                *zip(*limits, strict=True), "--", color=INK, lw=1
            )
        _dress(axes, kind, words, sorted({x.case.batch for x in group}))
    figure.legend(
        handles.values(), handles, loc="outside right upper", frameon=False, fontsize=8,
        labelcolor=INK,
    )  # fmt: skip
    figure.savefig(path)


def _dress(axes: Any, title: str, words: str, batches: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: PLC0415

    axes.set_title(title, color=INK, fontsize=9, loc="left")
    axes.set_xlabel("batch size B (pairs)", color=INK, fontsize=9)
    axes.set_ylabel(words.partition(" (")[0], color=INK, fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    # The first of neighbours that would touch keeps its label; the points show the others.
    ticks: list[int] = []
    reach = math.log2(batches[-1] / batches[0])
    for batch in batches:
        if not ticks or math.log2(batch / ticks[-1]) >= min(SPREAD, reach) / 2:
            ticks.append(batch)
    axes.set_xticks(ticks)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.7g}"))
        axis.set_minor_locator(NullLocator())
    _frame(axes)


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """The three pictures of one device; none when nothing was measured."""
    if not any(row.status == "ok" for row in rows):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"\W+", "-", rows[0].device.lower()).strip("-")
    paths = [folder / f"{slug}-{name}.png" for name in ("efficiency", "time", "memory")]
    plot_efficiency(rows, paths[0])
    plot_over_batch(rows, "time_ms", "Milliseconds of one step (forward and backward)", paths[1])
    plot_over_batch(
        rows, "peak_mib", "MiB above the inputs (at the peak, gradients included)", paths[2]
    )
    return paths


def main(arguments: Sequence[str]) -> int:
    """Show and plot; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    rows = load(options.results)
    if not rows:
        print("the results have no rows", file=sys.stderr)
        return 1
    for device in dict.fromkeys(row.device for row in rows):
        own = [row for row in rows if row.device == device]
        print(title_of(own))
        for title, lines in tables(own).items():
            show(title, lines)
        for path in plot(own, options.output or options.results[0].parent):
            print(f"saved {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
