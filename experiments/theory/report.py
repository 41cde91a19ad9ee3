"""How the checks write numbers, tables and figures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leanqkv.files import partial_name
from leanqkv.report.text import markdown_table

Record = Mapping[str, Any]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, every column aligned right."""
    return markdown_table(headers, rows, "r" * len(headers))


def number(value: float, digits: int = 3) -> str:
    text = f"{value:.{digits}f}"
    return (text if float(text) else f"{0:.{digits}f}").replace("-", "−")


def interval(mean: float, half_width: float, digits: int = 3) -> str:
    return f"{number(mean, digits)} ± {number(half_width, digits)}"


def power(value: float) -> str:
    """Return 2.3e-15: for what spans orders of magnitude."""
    return f"{value:.1e}" if value else "0"


def percent(share: float, digits: int = 1) -> str:
    return f"{number(100 * share, digits)} %"


def yes(value: bool) -> str:
    return "yes" if value else "no"


def plain_axes(figure: Any, rows: int, columns: int) -> Any:
    """Add a grid [rows, columns] of axes without frames to the figure, and return it."""
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    return grid


def save_figure(draw: Callable[[Record, Any], None], record: Record, file: Path) -> None:
    """Write what `draw(record, figure)` draws as PNG; the file is whole or absent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained", dpi=100)
    draw(record, figure)
    partial = partial_name(file)
    try:
        figure.savefig(partial, format="png", metadata={"Software": None})
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
