"""Results for people and for programs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

BESIDE = 4  # data sets in a table, so that metrics and numbers fit into 80 columns
LONGEST = 48  # characters of a data set's name


def save_metrics(path: Path, metrics: dict[str, float]) -> None:
    """As JSON, by "data/metric"."""
    path.write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")


def metrics_table(metrics: dict[str, float]) -> "Group":
    """A row a metric, a column a data set; of many data sets some to a table."""
    from rich.console import Group  # noqa: PLC0415

    cells: dict[tuple[str, str], float] = {}
    for name, value in metrics.items():
        where, metric = name.rsplit("/", 1)
        cells[where, metric] = value
    data = list(dict.fromkeys(where for where, _ in cells))
    parts = [data[first : first + BESIDE] for first in range(0, len(data), BESIDE)]
    return Group(*(_table(cells, part) for part in parts))


def _table(cells: dict[tuple[str, str], float], data: Sequence[str]) -> "Table":
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(title="evaluation")
    table.add_column("metric", no_wrap=True)
    for where in data:
        table.add_column(Text(shortened(where, LONGEST), overflow="fold"), justify="right")
    for metric in dict.fromkeys(metric for where, metric in cells if where in data):
        row = (cells.get((where, metric)) for where in data)
        table.add_row(metric, *("" if each is None else _shown(each) for each in row))
    return table


def shortened(name: str, most: int) -> str:
    """With "…" for some of its middle, if it has more characters; its end says more."""
    if len(name) <= most:
        return name
    head = (most - 1) // 3
    return f"{name[:head]}…{name[head + 1 - most :]}"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 and value == int(value) else f"{value:,.4g}"
