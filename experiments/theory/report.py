"""Markdown tables and figures of the checks, from their records."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leanqkv.files import partial_name

Record = Mapping[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "---:") -> str:
    """A Markdown table; `align` is every column's."""
    lines = [head, [align] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(value: float, digits: int = 3) -> str:
    text = f"{value:.{digits}f}"
    return (text if float(text) else f"{0:.{digits}f}").replace("-", "−")


def interval(mean: float, half_width: float, digits: int = 3) -> str:
    return f"{number(mean, digits)} ± {number(half_width, digits)}"


def power(value: float) -> str:
    """Of what spans orders of magnitude: 2.3e-15."""
    return f"{value:.1e}" if value else "0"


def percent(share: float, digits: int = 1) -> str:
    return f"{number(100 * share, digits)} %"


def yes(value: bool) -> str:
    return "yes" if value else "no"


def plain_axes(figure: Any, rows: int, columns: int) -> Any:
    """A grid [rows, columns] of axes without frames."""
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    return grid


def save_figure(draw: Callable[[Record, Any], None], record: Record, file: Path) -> None:
    """Writes what `draw(record, figure)` draws as PNG; the file is whole or absent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    draw(record, figure)
    partial = partial_name(file)
    try:
        figure.savefig(partial, format="png", metadata={"Software": None})
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
