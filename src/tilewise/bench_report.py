"""What a benchmark leaves behind: a table of numbers (CSV) and a picture (PNG)."""

import csv
import importlib.util
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tilewise
from tilewise import measure
from tilewise.bench import DENSE, OURS, TASKS, BenchConfig, Case, Row, contract_bytes, inputs_bytes
from tilewise.errors import OptionError

COLOURS = {OURS: "#0b6e99", DENSE: "#c8553d"}
INK, PALE = "#333333", "#e3e3e3"


def check_extras() -> None:
    """Raise, before anything is measured, unless what shows the results is installed."""
    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"the benchmark shows its results with {' and '.join(missing)}, which is not "
            "installed; run pip install 'tilewise[bench]'"
        )


def make_folder(config: BenchConfig) -> Path:
    """The folder for the results, made if it is not there yet."""
    folder = Path(config.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"out must be a folder that can be made, got {config.out!r}: {error.strerror}"
        ) from error
    return folder


def save_csv(config: BenchConfig, rows: list[Row], path: Path) -> None:
    """One line for each row, with where, when and with what it was measured."""
    provenance = {
        **measure.machine(config.where)._asdict(),
        "tilewise": tilewise.__version__,
        "commit": measure.commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    lines = []
    for row in rows:
        fields = row._asdict()
        case: Case = fields.pop("case")
        what = {**case._asdict(), "loss": config.loss, "dtype": config.dtype}
        lines.append({**what, **fields, **provenance})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0].keys())
        writer.writeheader()
        writer.writerows(lines)


def save_plot(config: BenchConfig, rows: list[Row], path: Path) -> None:
    """Time and peak memory against the batch size, both axes logarithmic."""
    # No pyplot: it would keep the figure and choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.04)
    figure = Figure(figsize=(11, 4.8), dpi=150, layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{TASKS[config.loss].title}, forward and backward, {config.dtype}, on "
        f"{measure.machine(config.where).device}",
        color=INK, weight="bold", x=0.012, ha="left",
    )  # fmt: skip
    left, right = figure.subplots(1, 2)
    _plot_time(left, config, rows)
    _plot_memory(right, config, rows)
    figure.savefig(path)


def _plot_time(axes: Any, config: BenchConfig, rows: list[Row]) -> None:
    for name in COLOURS:
        points = [(r.case.batch, r.time_ms) for r in rows if r.case.contender == name and r.time_ms]
        _plot_line(axes, name, points)
    _dress(axes, f"Time of one step, D = {config.dim}", "milliseconds", config.batches)


def _plot_memory(axes: Any, config: BenchConfig, rows: list[Row]) -> None:
    curve = [row for row in rows if not row.case.timed and row.peak_mib is not None]
    for name in COLOURS:
        _plot_line(axes, name, [
            (r.case.batch, (r.peak_mib or 0) + inputs_bytes(config, r.case) / 2**20)
            for r in curve if r.case.contender == name
        ])  # fmt: skip
    limit = sorted({(r.case.batch, contract_bytes(config, r.case) / 2**20) for r in curve})
    label = "limit tilewise keeps: 1.25 x (inputs\n+ gradients) + 256 MiB"
    axes.plot(*zip(*limit, strict=True), "--", color=INK, lw=1, label=label)
    batches = config.memory_batches
    _dress(axes, f"Peak memory, inputs included, D = {curve[0].case.dim}", "MiB", batches)


def _plot_line(axes: Any, name: str, points: list[tuple[int, float]]) -> None:
    x, y = zip(*sorted(points), strict=True) if points else ((), ())
    axes.plot(x, y, "o-", color=COLOURS[name], lw=2, ms=5, label=name)


def _dress(axes: Any, title: str, unit: str, batches: tuple[int, ...]) -> None:
    """Scales, ticks, grid and legend."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter  # noqa: PLC0415

    axes.set_title(title, color=INK, fontsize=11, loc="left")
    axes.set_xlabel("batch size B", color=INK)
    axes.set_ylabel(unit, color=INK)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(set(batches)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        axis.set_minor_locator(NullLocator())
    axes.grid(color=PALE, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(color=PALE, labelcolor=INK)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="best")
