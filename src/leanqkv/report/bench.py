"""An inference benchmark as a terminal table and a page (P3, Fig. 6 and 7)."""

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ..compare.statistics import Band
from ..files import read_json, write_text
from . import figures
from .html import render
from .text import compact, markdown_table

RECORD = "bench.json"
HEADERS = (
    *("model", "batch", "context", "KV cache, MB", "by formula, MB", "activations, MB", "prefill, ms / 100 tokens"),
    "decoding, tokens/s",
)
SHORT_HEADERS = ("model", "batch", "context", "KV MB", "by plan", "peak MB", "prefill", "decode")
MB = 1e6


def table(record: dict[str, Any]) -> Table:
    """Every row of the record, times as medians; a terminal has no room for their ranges."""
    caption = (
        "KV MB: of the cache, and what the plan says; peak MB: activations beside it; prefill: ms per 100 tokens; "
        "decode: tokens/s"
    )
    found = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    found.add_column(SHORT_HEADERS[0], overflow="fold")
    for header in SHORT_HEADERS[1:]:
        found.add_column(header, justify="right", no_wrap=True, min_width=len(header))
    for row in record["rows"]:
        sizes = (f"{row[what] / MB:.4g}" for what in _SIZES)
        times = (f"{row[what]['median']:.4g}" for what in _TIMES)
        found.add_row(row["model"], str(row["batch"]), f"{row['context']:,}", *sizes, *times)
    return found


def markdown(record: dict[str, Any]) -> str:
    return markdown_table(HEADERS, map(_cells, record["rows"]))


def write_page(directory: Path) -> Path:
    """Writes `report.html` and `table.md` beside bench.json, from it alone; returns the page's path.

    Raises:
        LeanError: no such record there, or a damaged one.
    """
    record = read_json(directory / RECORD)
    page = directory / "report.html"
    write_text(directory / "table.md", markdown(record))
    text = render(
        Path(__file__).with_name("bench.html.j2"),
        record=record,
        headers=HEADERS,
        rows=[_cells(row) for row in record["rows"]],
        models=[
            (name, compact(model["parameters"]), f"{model['kv_bytes_per_token']:,}", f"{model['weights'] / MB:,.1f} MB")
            for name, model in record["models"].items()
        ],
        figures=_figures(record),
    )
    write_text(page, text)
    return page


def _cells(row: dict[str, Any]) -> list[str]:
    times = [f"{row[what]['median']:,.1f} ({row[what]['min']:,.1f}–{row[what]['max']:,.1f})" for what in _TIMES]
    sizes = [f"{row[what] / MB:,.2f}" for what in _SIZES]
    return [row["model"], str(row["batch"]), f"{row['context']:,}", *sizes, *times]


_SIZES, _TIMES = ("cache", "cache_formula", "activations"), ("prefill", "decode")


def _figures(record: dict[str, Any]) -> list[tuple[str, figures.Drawing]]:
    rows, names = record["rows"], list(record["models"])
    most = max(row["batch"] for row in rows)

    def series(batch: int, what: str, scale: float = 1.0) -> list[figures.Series]:
        found = []
        for style, name in enumerate(names):
            mine = [row for row in rows if (row["model"], row["batch"]) == (name, batch)]
            spread = [row[what] if isinstance(row[what], dict) else dict.fromkeys(_EDGES, row[what]) for row in mine]
            points = [
                Band(row["context"], *(scale * at[edge] for edge in _EDGES))
                for row, at in zip(mine, spread, strict=True)
            ]
            found.append(figures.Series(name, style, points))
        return found

    context = "context, tokens"
    lines = figures.measured_lines
    drawn = [
        (
            f"KV cache against context, batch {most}; measured on the tensors.",
            lines("kv", series(most, "cache", 1 / MB), context, "KV cache, MB", "KV cache against context."),
        ),
        (
            "KV cache per token against size; measured at the longest context.",
            lines("size", _per_token(record), "parameters", "KV bytes per token", "KV bytes per token against size."),
        ),
        (
            f"Memory while a prompt of the longest context is taken in, batch {most}.",
            figures.stacked_bars("memory", _memory(record, most), "MB", "Weights, cache and activations."),
        ),
    ]
    for batch in sorted({row["batch"] for row in rows}):
        for what, up in (("prefill", "prefill, ms per 100 tokens"), ("decode", "new tokens per second")):
            text = f"{'Prefill' if what == 'prefill' else 'Decoding'} at batch {batch}; median and range of the rounds."
            drawn.append((text, lines(f"{what}{batch}", series(batch, what), context, up, text)))
    return drawn


_EDGES = ("median", "min", "max")


def _longest(record: dict[str, Any], batch: int) -> dict[str, dict[str, Any]]:
    rows = [row for row in record["rows"] if row["batch"] == batch]
    context = max(row["context"] for row in rows)
    return {row["model"]: row for row in rows if row["context"] == context}


def _per_token(record: dict[str, Any]) -> list[figures.Series]:
    least = min(row["batch"] for row in record["rows"])
    found = []
    for style, (name, row) in enumerate(_longest(record, least).items()):
        size = row["cache"] / row["context"] / least
        found.append(figures.Series(name, style, [Band(record["models"][name]["parameters"], size, size, size)]))
    return found


def _memory(record: dict[str, Any], batch: int) -> dict[str, dict[str, float]]:
    return {
        name: {what: row[what] / MB for what in ("weights", "cache", "activations")}
        for name, row in _longest(record, batch).items()
    }
