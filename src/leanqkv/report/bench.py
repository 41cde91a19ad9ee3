"""An inference benchmark as a terminal table, a Markdown table and a page (P3, Fig. 6 and 7)."""

from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table as TerminalTable

from ..compare.statistics import Band
from ..records import reading
from . import figures
from .html import write_report
from .text import Table, compact

RECORD = "bench.json"
SIZES, TIMES = ("cache", "cache_formula", "activations"), ("prefill", "decode")
HEADERS = (
    *("model", "batch", "context", "KV cache, MB", "by formula, MB", "activations, MB", "prefill, ms / 100 tokens"),
    "decoding, tokens/s",
)
SHORT_HEADERS = ("model", "batch", "context", "KV MB", "by plan", "peak MB", "prefill", "decode")
CAPTION = (
    "KV MB: of the cache, and what the plan says; peak MB: activations beside it; prefill: ms per 100 tokens; "
    "decode: tokens/s"
)
MB = 1e6


def table(record: dict[str, Any]) -> TerminalTable:
    """Return every row of the record for a terminal, which has room for the median times alone."""
    rows = []
    for row in record["rows"]:
        numbers = [row[name] / MB for name in SIZES] + [row[name]["median"] for name in TIMES]
        rows.append([row["model"], str(row["batch"]), f"{row['context']:,}", *(f"{n:.4g}" for n in numbers)])
    return Table(SHORT_HEADERS, rows, note=CAPTION).terminal(whole=SHORT_HEADERS[1:])


def measurements(record: dict[str, Any]) -> Table:
    """Return every row of the record, times with their range over the rounds."""
    rows = []
    for row in record["rows"]:
        sizes = [f"{row[name] / MB:,.2f}" for name in SIZES]
        times = [row[name] for name in TIMES]
        ranges = [f"{time['median']:,.1f} ({time['min']:,.1f}–{time['max']:,.1f})" for time in times]
        rows.append([row["model"], str(row["batch"]), f"{row['context']:,}", *sizes, *ranges])
    return Table(HEADERS, rows)


def markdown(record: dict[str, Any]) -> str:
    """Return every row of the record as a Markdown table."""
    return measurements(record).markdown()


def write_page(directory: Path) -> Path:
    """Write `report.html` and `table.md` beside bench.json, from it alone; return the page's path.

    Raises:
        LeanError: no such record there, or a damaged one.
    """
    with reading(directory / RECORD, "measure again into another --out") as record:
        models = [
            [name, compact(model["parameters"]), f"{model['kv_bytes_per_token']:,}", f"{model['weights'] / MB:,.1f} MB"]
            for name, model in record["models"].items()
        ]
        return write_report(
            directory,
            "bench.html.j2",
            markdown(record),
            record=record,
            models=Table(("model", "parameters", "KV bytes per token", "weights"), models),
            measurements=measurements(record),
            figures=_figures(record),
        )


def _figures(record: dict[str, Any]) -> list[tuple[str, figures.Drawing]]:
    """Return captions and drawings: cache, cache per token, memory, then times at every batch size."""
    batches = sorted({row["batch"] for row in record["rows"]})
    least, most = batches[0], batches[-1]
    longest = max(row["context"] for row in record["rows"])
    at_longest = {(row["model"], row["batch"]): row for row in record["rows"] if row["context"] == longest}
    per_token, memory = [], {}
    for style, (name, model) in enumerate(record["models"].items()):
        size = at_longest[name, least]["cache"] / longest / least
        per_token.append(figures.Series(name, style, [Band(model["parameters"], size, size, size)]))
        memory[name] = {part: at_longest[name, most][part] / MB for part in ("weights", "cache", "activations")}
    context, lines = "context, tokens", figures.measured_lines
    drawings = [
        (
            f"KV cache against context, batch {most}; measured on the tensors.",
            lines("kv", _series(record, most, "cache"), context, "KV cache, MB", "KV cache against context."),
        ),
        (
            "KV cache per token against size; measured at the longest context.",
            lines("size", per_token, "parameters", "KV bytes per token", "KV bytes per token against size."),
        ),
        (
            f"Memory while a prompt of the longest context is taken in, batch {most}.",
            figures.stacked_bars("memory", memory, "MB", "Weights, cache and activations."),
        ),
    ]
    times = {"prefill": ("Prefill", "prefill, ms per 100 tokens"), "decode": ("Decoding", "new tokens per second")}
    for batch, (name, (title, unit)) in product(batches, times.items()):
        text = f"{title} at batch {batch}; median and range of the rounds."
        drawings.append((text, lines(f"{name}{batch}", _series(record, batch, name), context, unit, text)))
    return drawings


def _series(record: dict[str, Any], batch: int, quantity: str) -> list[figures.Series]:
    """Return one line per model over the contexts: a size in MB, or a time with its range."""

    def band(row: dict[str, Any]) -> Band:
        if quantity in TIMES:
            return Band(row["context"], *(row[quantity][edge] for edge in ("median", "min", "max")))
        return Band(row["context"], *[row[quantity] / MB] * 3)

    rows = [row for row in record["rows"] if row["batch"] == batch]
    return [
        figures.Series(name, style, [band(row) for row in rows if row["model"] == name])
        for style, name in enumerate(record["models"])
    ]
