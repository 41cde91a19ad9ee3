"""A frontier as a table, a figure, a recommendation for every budget, and a page, from frontier.json alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table as TerminalTable

from ..compare.statistics import Band, half_width
from ..files import write_text
from ..frontier.measure import RECORD
from ..records import reading
from . import figures
from .html import TEMPLATES, render
from .text import ABSENT, Table, signed

PAGE, TABLE = "frontier.html", "table.md"
# Shares of the source's cache for which the best point is named.
BUDGETS = (0.84, 0.75, 0.5, 0.375, 0.25)
# Nats above the source's loss from which a point is of no use, and is not recommended.
USELESS = 1.0


@dataclass(frozen=True)
class Point:
    """One kind of reduction in one precision, over the calibration samples.

    Attributes:
        label: with its precision; reduction: without.
        share: of the source's cache in bfloat16.
        losses: by text, the difference to the source in nats per token: mean and half of its 95% interval, over
            samples, or over windows of the text where there is one sample.
        divergence, agreement, greedy: means over texts and samples; greedy of the source's continuation.
        speeds: tokens per second by context.
    """

    label: str
    reduction: str
    quantized: bool
    bytes_per_token: float
    share: float
    losses: list[tuple[float, float | None]]
    divergence: float
    agreement: float
    greedy: float
    speeds: dict[str, float]

    @property
    def loss(self) -> float:
        """The mean over the texts."""
        return fmean(mean for mean, _ in self.losses)


def read_points(record: dict[str, Any]) -> list[Point]:
    """Return the points of a record, in its order."""
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for point in record["points"]:
        groups.setdefault((point["label"], point["key_bits"], point["value_bits"]), []).append(point)
    return [_point(samples, record) for samples in groups.values()]


def _point(samples: list[dict[str, Any]], record: dict[str, Any]) -> Point:
    first = samples[0]
    losses = []
    for text in range(len(record["texts"])):
        found = [sample["scores"][text]["loss_difference"] for sample in samples]
        means = [one["mean"] for one in found]
        losses.append((fmean(means), found[0]["half_width"] if len(samples) == 1 else half_width(means)))
    scores = [score for sample in samples for score in sample["scores"]]
    bits = first["key_bits"], first["value_bits"]
    words = f"{bits[0]} bits" if bits[0] == bits[1] else f"{bits[0]}/{bits[1]} bits"
    return Point(
        label=f"{first['label']}, {words}",
        reduction=first["label"],
        quantized=bits[0] < 16,
        bytes_per_token=first["bytes_per_token"],
        share=first["bytes_per_token"] / record["source"]["bytes_per_token"],
        losses=losses,
        divergence=fmean(score["divergence"]["mean"] for score in scores),
        agreement=fmean(score["agreement"]["mean"] for score in scores),
        greedy=fmean(sample["greedy_agreement"] for sample in samples),
        speeds=first.get("tokens_per_second", {}),
    )


def best_within(points: Sequence[Point], share: float) -> Point | None:
    """Return the point of at most that share of the source's cache that loses least; None of none."""
    within = [point for point in points if point.share <= share]
    return min(within, key=lambda point: point.loss, default=None)


def recommendations(record: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence for every budget: the best of all, and the best without quantizing."""
    points = [point for point in read_points(record) if point.loss < USELESS]
    for share in BUDGETS:
        best, plain = (best_within(some, share) for some in (points, [one for one in points if not one.quantized]))
        if best is None:
            yield f"At most {100 * share:g}% of the cache: no point is that small and of use."
            continue
        sentence = f"At most {100 * share:g}% of the cache: {_named(best)}"
        if plain is None:
            sentence += "; none without quantizing"
        elif plain != best:
            sentence += f"; without quantizing {_named(plain)}"
        yield f"{sentence}."


def _named(point: Point) -> str:
    return f"{point.label} ({point.share:.1%}, {signed(point.loss)} nats)"


def _by_size(record: dict[str, Any]) -> list[Point]:
    """The points, the largest cache first."""
    return sorted(read_points(record), key=lambda one: (-one.bytes_per_token, one.loss))


def points_table(record: dict[str, Any]) -> Table:
    """Return all that is known of the points, the largest cache first."""
    texts = [text["description"].split(",")[0] for text in record["texts"]]
    contexts = list(dict.fromkeys(c for point in record["points"] for c in point.get("tokens_per_second", {})))
    headers = (
        *("cache", "bytes per token", "share"),
        *(f"loss on {text}" for text in texts),
        *("KL, nats", "same likeliest token", "same on a greedy text"),
        *(f"tokens/s after {int(context):,}" for context in contexts),
    )
    rows = []
    for point in _by_size(record):
        losses = [signed(mean) + (f" ± {width:.4f}" if width is not None else "") for mean, width in point.losses]
        speeds = [f"{point.speeds[c]:.1f}" if c in point.speeds else ABSENT for c in contexts]
        numbers = (f"{point.divergence:.4f}", f"{point.agreement:.1%}", f"{point.greedy:.1%}")
        rows.append((point.label, f"{point.bytes_per_token:,.0f}", f"{point.share:.1%}", *losses, *numbers, *speeds))
    samples = record["calibration"]["samples"]
    over = "windows of the text" if samples == 1 else f"{samples} calibrations, of the source over windows of the text"
    note = (
        f"Losses are nats per token above the source's, on {record['evaluated_tokens']:,} tokens of each text in "
        f"windows of {record['context_length']:,}. ± is half of a 95% interval over {over}. 8/4 bits: keys in 8, "
        "values in 4. Bytes are those of long texts; the newest tokens, fewer than 64, are not quantized, nor is what "
        "the first 64 tokens of a window read. Speeds are of the first calibration, in float32."
    )
    return Table(headers, rows, note=note)


def terminal_table(record: dict[str, Any]) -> TerminalTable:
    """Return the points for a terminal: their size, and means over the texts."""
    headers = ("cache", "bytes per token", "share", "loss", "KL, nats", "same likeliest token")
    rows = [
        (
            *(point.label, f"{point.bytes_per_token:,.0f}", f"{point.share:.1%}", signed(point.loss)),
            *(f"{point.divergence:.4f}", f"{point.agreement:.1%}"),
        )
        for point in _by_size(record)
    ]
    return Table(headers, rows, note="Loss above the source's, nats per token.").terminal(whole=headers[:-1])


def write_pages(directory: Path) -> Path:
    """Write the page and table.md beside frontier.json; return the page's path.

    Raises:
        LeanError: no frontier.json there, or a damaged one.
    """
    with reading(directory / RECORD, "measure again into another --out") as record:
        page, table = _page(record), markdown(record)
    write_text(directory / TABLE, table)
    write_text(directory / PAGE, page)
    return directory / PAGE


def markdown(record: dict[str, Any]) -> str:
    """Return the points and the recommendations in Markdown."""
    table = points_table(record)
    sentences = "".join(f"- {sentence}\n" for sentence in recommendations(record))
    return f"{table.markdown()}\n\n{table.note}\n\n{sentences}"


def _page(record: dict[str, Any]) -> str:
    plans = {
        point["label"]: point["layers"] for point in record["points"] if point.get("layers") and not point["sample"]
    }
    return render(
        TEMPLATES / "frontier.html.j2",
        record={"git_commit": None, **record},
        heading=f"{record['name']}: KV cache against loss",
        recommendations=list(recommendations(record)),
        figure=_figure(record),
        points=points_table(record),
        plans={label: plan_table(layers) for label, layers in plans.items() if plan_table(layers) is not None},
        refused=record.get("refused", {}),
        facts=list(_facts(record)),
    )


def plan_table(layers: list[dict[str, Any]]) -> Table | None:
    """Return the columns that every layer's keys and values take; None of other kinds."""
    if "rank" not in layers[0]:
        return None
    rows = [
        (str(layer["layer"]), str(layer.get("key_rank", "all")), str(layer["rank"]), f"{layer['missed']:.2%}")
        for layer in layers
    ]
    note = "Missed: of attention's output, on calibration sequences held out from the fit. Layers count from 0."
    return Table(("layer", "columns of keys", "columns of values", "missed"), rows, note=note)


def _figure(record: dict[str, Any]) -> figures.Drawing:
    """Draw loss against the share of the cache: one line for every kind and precision, without what is of no use."""
    kinds: dict[str, list[Point]] = {}
    of_label = {point["label"]: point["kind"] for point in record["points"]}
    for point in (one for one in read_points(record) if one.loss < USELESS):
        kinds.setdefault(f"{of_label[point.reduction]}, {point.label.rsplit(', ', 1)[1]}", []).append(point)
    series = []
    for style, (label, points) in enumerate(kinds.items(), 1):
        bands = []
        for point in sorted(points, key=lambda one: one.share):
            width = max((width or 0.0) for _, width in point.losses)
            bands.append(Band(100 * point.share, point.loss, point.loss - width, point.loss + width))
        series.append(figures.Series(label, style, bands))
    words = "Loss above the source's against the share of its KV cache, one line per kind of reduction and precision."
    return figures.frontier_lines("frontier", series, words)


def _facts(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    calibration = record["calibration"]
    tokens = f"{calibration['tokens']:,} tokens"
    many = f"{calibration['samples']} samples of {tokens}, none in two of them"
    yield "Calibration", tokens if calibration["samples"] == 1 else many
    if calibration["seconds"]:
        yield "Time of the fits", f"{fmean(calibration['seconds']) / 60:.1f} min a sample, all conversions together"
    yield "Time of scoring and decoding", f"{record['seconds'] / 60:.1f} min in all"
    for text in record["texts"]:
        yield "Evaluation text", f"{text['description']}, {text['split']}"
    if "command" in record:
        yield "Command", f"`{record['command']}`"
    yield "Hardware", ", ".join(f"{name} {value}" for name, value in record["hardware"].items())
    yield "Versions", ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    same = all(point.get("same_tokens_without_cache", True) for point in record["points"])
    words = (
        "every model decodes the same tokens with a cache and without" if same else "some models decode other tokens"
    )
    yield "Checked", words
