"""Results for people and for programs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def save_metrics(path: Path, metrics: dict[str, float]) -> None:
    """As JSON, by "data/metric"."""
    path.write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")


def metrics_table(metrics: dict[str, float]) -> "Table":
    """A row a metric, a column a data set."""
    from rich.table import Table  # noqa: PLC0415

    table = Table(title="evaluation")
    table.add_column("metric")
    cells: dict[tuple[str, str], float] = {}
    for name, value in metrics.items():
        where, metric = name.rsplit("/", 1)
        cells[where, metric] = value
    data = list(dict.fromkeys(where for where, _ in cells))
    for where in data:
        table.add_column(where, justify="right")
    for metric in dict.fromkeys(metric for _, metric in cells):
        row = (cells.get((where, metric)) for where in data)
        table.add_row(metric, *("" if each is None else _shown(each) for each in row))
    return table


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 and value == int(value) else f"{value:,.4g}"
