"""An inference benchmark as tables and a page (P3, Fig. 6 and 7)."""

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median
from typing import Any

from rich.table import Table as TerminalTable

from ..cache_bits import PLAIN, CacheBits
from ..compare.statistics import Band
from .figures import Series, measured_lines, stacked_bars
from .page import Figure, Kind, Page, Section, footer
from .text import Table, compact

SIZES, TIMES = ("cache", "cache_formula", "activations"), ("prefill", "decode")
HEADERS = (
    *("model", "batch", "context", "KV cache, MB", "by formula, MB", "activations, MB", "prefill, ms / 100 tokens"),
    *("decoding, tokens/s", "prefill, of the first's speed", "decoding, of the first's speed"),
)
SHORT_HEADERS = ("model", "batch", "context", "KV MB", "by plan", "peak MB", "prefill", "decode", "of first")
CAPTION = (
    "KV MB: of the cache, and what the plan says; peak MB: activations beside it; prefill: ms per 100 tokens; "
    "decode: tokens/s, and its share of the first model's"
)
MEASURED = (
    "The cache is measured on the storages that it really holds; beside it stands what the plan says. Activations are "
    "the most bytes that a prefill holds at one time beside weights and cache, counted by storages. The last columns "
    "compare speeds with the first row's in the same round."
)
MB = 1e6


def _entry(row: dict[str, Any]) -> str:
    """Return the model of a row, and the precision of its cache if that is not the model's own."""
    bits = row.get("cache_bits", str(PLAIN))
    return row["model"] if bits == str(PLAIN) else f"{row['model']}, {CacheBits.of(bits).name}"


def _of_first(record: dict[str, Any], quantity: str) -> Iterator[dict[str, float]]:
    """Yield for every row its speed over that of its batch and context's first row: median and range of rounds."""
    first: dict[tuple[int, int], list[float]] = {}
    for row in record["rows"]:
        rounds = row[quantity]["rounds"]
        before = first.setdefault((row["batch"], row["context"]), rounds)
        pairs = zip(rounds, before, strict=True)
        shares = [one / other if quantity == "decode" else other / one for one, other in pairs]  # the other is a time
        yield {"median": median(shares), "min": min(shares), "max": max(shares)}


def _rows(
    record: dict[str, Any], size: str, number: str, write_time: Any, compared: Sequence[str] = TIMES
) -> list[list[str]]:
    """Return the cells of every row, the speeds that are `compared` with the first row's in the last ones."""
    shares = zip(*(_of_first(record, name) for name in compared), strict=True)
    return [
        [
            *(_entry(row), str(row["batch"]), f"{row['context']:,}"),
            *(format(row[name] / MB, size) for name in SIZES),
            *(write_time(row[name], number) for name in TIMES),
            *(write_time(share, ".2f") for share in of_row),
        ]
        for row, of_row in zip(record["rows"], shares, strict=True)
    ]


def terminal(record: dict[str, Any]) -> TerminalTable:
    """Return every row of the record for a terminal, which has room for the median times alone."""
    rows = _rows(record, ".4g", ".4g", lambda time, form: format(time["median"], form), ("decode",))
    return Table(SHORT_HEADERS, rows, note=CAPTION).terminal(whole=SHORT_HEADERS[1:])


def measurements(record: dict[str, Any]) -> Table:
    """Return every row of the record, times with their range over the rounds."""

    def spread(time: dict[str, float], form: str) -> str:
        middle, *ends = (format(time[name], form) for name in ("median", "min", "max"))
        return f"{middle} ({'–'.join(ends)})"

    return Table(HEADERS, _rows(record, ",.2f", ",.1f", spread), note=MEASURED)


def markdown(record: dict[str, Any]) -> str:
    """Return every row of the record as a Markdown table."""
    return measurements(record).markdown()


def _entries(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is compared, models with the precisions of their caches, in order; and a row of each."""
    return {_entry(row): row for row in record["rows"]}


def page(record: dict[str, Any]) -> Page:
    """Return the page of a record."""
    models = []
    for entry, row in _entries(record).items():
        model = record["models"][row["model"]]
        of_bits = model.get("quantized_bytes_per_token", {})
        size = of_bits.get(row.get("cache_bits"), model["kv_bytes_per_token"])
        models.append([entry, compact(model["parameters"]), f"{size:,.0f}", f"{model['weights'] / MB:,.1f} MB"])
    threads = f"{record['threads']} thread{'' if record['threads'] == 1 else 's'}"
    return Page(
        "leanqkv bench",
        "Inference: memory, prefill and decoding",
        f"{record['dtype']} on {record['hardware']['device']}, {threads}; {record['new_tokens']} new tokens after "
        f"every context, {record['rounds']} rounds in which the models take turns.",
        [
            Section("Models", [Table(("model", "parameters", "KV bytes per token", "weights"), models)]),
            Section("Figures", [*_figures(record)]),
            Section("All measurements", [measurements(record)]),
        ],
        made=footer(record),
        title=f"Inference: {', '.join(_entries(record))}",
    )


def _figures(record: dict[str, Any]) -> Iterator[Figure]:
    """Yield the figures: cache, cache per token, memory, then times at every batch size."""
    batches = sorted({row["batch"] for row in record["rows"]})
    least, most = batches[0], batches[-1]
    longest = max(row["context"] for row in record["rows"])
    at_longest = {(_entry(row), row["batch"]): row for row in record["rows"] if row["context"] == longest}
    per_token, memory = [], {}
    for style, (name, row) in enumerate(_entries(record).items()):
        model = record["models"][row["model"]]
        size = at_longest[name, least]["cache"] / longest / least
        per_token.append(Series(name, style, [Band(model["parameters"], size, size, size)]))
        memory[name] = {part: at_longest[name, most][part] / MB for part in ("weights", "cache", "activations")}
    context, lines = "context, tokens", measured_lines
    yield Figure(
        lines("kv", _series(record, most, "cache"), context, "KV cache, MB", "KV cache against context."),
        f"KV cache against context, batch {most}; measured on the tensors.",
    )
    yield Figure(
        lines("size", per_token, "parameters", "KV bytes per token", "KV bytes per token against size."),
        "KV cache per token against size; measured at the longest context.",
    )
    yield Figure(
        stacked_bars("memory", memory, "MB", "Weights, cache and activations."),
        f"Memory while a prompt of the longest context is taken in, batch {most}.",
    )
    times = {"prefill": ("Prefill", "prefill, ms per 100 tokens"), "decode": ("Decoding", "new tokens per second")}
    for batch, (name, (title, unit)) in product(batches, times.items()):
        text = f"{title} at batch {batch}; median and range of the rounds."
        yield Figure(lines(f"{name}{batch}", _series(record, batch, name), context, unit, text), text)


def _series(record: dict[str, Any], batch: int, quantity: str) -> list[Series]:
    """Return one line per model over the contexts: a size in MB, or a time with its range."""

    def band(row: dict[str, Any]) -> Band:
        if quantity in TIMES:
            return Band(row["context"], *(row[quantity][edge] for edge in ("median", "min", "max")))
        return Band(row["context"], *[row[quantity] / MB] * 3)

    return [
        Series(name, style, [band(row) for row in record["rows"] if (row["batch"], _entry(row)) == (batch, name)])
        for style, name in enumerate(_entries(record))
    ]


KIND = Kind("bench.json", "measure again into another directory", page, terminal, markdown)
