"""An inference benchmark as tables and a page (P3, Fig. 6 and 7)."""

from itertools import product
from typing import Any

from rich.table import Table as TerminalTable

from ..compare.statistics import Band
from .figures import Drawing, Series, measured_lines, stacked_bars
from .page import Figure, Kind, Page, Section, footer
from .text import Table, compact

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
MEASURED = (
    "The cache is measured on the storages that it really holds; beside it stands what the plan says. Activations are "
    "the most bytes that a prefill holds at one time beside weights and cache, counted by storages."
)
MB = 1e6


def _rows(record: dict[str, Any], size: str, write_time: Any) -> list[list[str]]:
    return [
        [
            *(row["model"], str(row["batch"]), f"{row['context']:,}"),
            *(format(row[name] / MB, size) for name in SIZES),
            *(write_time(row[name]) for name in TIMES),
        ]
        for row in record["rows"]
    ]


def terminal(record: dict[str, Any]) -> TerminalTable:
    """Return every row of the record for a terminal, which has room for the median times alone."""
    rows = _rows(record, ".4g", lambda time: f"{time['median']:.4g}")
    return Table(SHORT_HEADERS, rows, note=CAPTION).terminal(whole=SHORT_HEADERS[1:])


def measurements(record: dict[str, Any]) -> Table:
    """Return every row of the record, times with their range over the rounds."""
    rows = _rows(record, ",.2f", lambda time: f"{time['median']:,.1f} ({time['min']:,.1f}–{time['max']:,.1f})")
    return Table(HEADERS, rows, note=MEASURED)


def markdown(record: dict[str, Any]) -> str:
    """Return every row of the record as a Markdown table."""
    return measurements(record).markdown()


def page(record: dict[str, Any]) -> Page:
    """Return the page of a record."""
    models = [
        [name, compact(model["parameters"]), f"{model['kv_bytes_per_token']:,}", f"{model['weights'] / MB:,.1f} MB"]
        for name, model in record["models"].items()
    ]
    threads = f"{record['threads']} thread{'' if record['threads'] == 1 else 's'}"
    return Page(
        "leanqkv bench",
        "Inference: memory, prefill and decoding",
        f"{record['dtype']} on {record['hardware']['device']}, {threads}; {record['new_tokens']} new tokens after "
        f"every context, {record['rounds']} rounds in which the models take turns.",
        [
            Section("Models", [Table(("model", "parameters", "KV bytes per token", "weights"), models)]),
            Section("Figures", [Figure(drawing, caption) for caption, drawing in _figures(record)]),
            Section("All measurements", [measurements(record)]),
        ],
        made=footer(record),
        title=f"Inference: {', '.join(record['models'])}",
    )


def _figures(record: dict[str, Any]) -> list[tuple[str, Drawing]]:
    """Return captions and drawings: cache, cache per token, memory, then times at every batch size."""
    batches = sorted({row["batch"] for row in record["rows"]})
    least, most = batches[0], batches[-1]
    longest = max(row["context"] for row in record["rows"])
    at_longest = {(row["model"], row["batch"]): row for row in record["rows"] if row["context"] == longest}
    per_token, memory = [], {}
    for style, (name, model) in enumerate(record["models"].items()):
        size = at_longest[name, least]["cache"] / longest / least
        per_token.append(Series(name, style, [Band(model["parameters"], size, size, size)]))
        memory[name] = {part: at_longest[name, most][part] / MB for part in ("weights", "cache", "activations")}
    context, lines = "context, tokens", measured_lines
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
            stacked_bars("memory", memory, "MB", "Weights, cache and activations."),
        ),
    ]
    times = {"prefill": ("Prefill", "prefill, ms per 100 tokens"), "decode": ("Decoding", "new tokens per second")}
    for batch, (name, (title, unit)) in product(batches, times.items()):
        text = f"{title} at batch {batch}; median and range of the rounds."
        drawings.append((text, lines(f"{name}{batch}", _series(record, batch, name), context, unit, text)))
    return drawings


def _series(record: dict[str, Any], batch: int, quantity: str) -> list[Series]:
    """Return one line per model over the contexts: a size in MB, or a time with its range."""

    def band(row: dict[str, Any]) -> Band:
        if quantity in TIMES:
            return Band(row["context"], *(row[quantity][edge] for edge in ("median", "min", "max")))
        return Band(row["context"], *[row[quantity] / MB] * 3)

    return [
        Series(name, style, [band(row) for row in record["rows"] if (row["batch"], row["model"]) == (batch, name)])
        for style, name in enumerate(record["models"])
    ]


KIND = Kind("bench.json", "measure again into another directory", page, terminal, markdown)
