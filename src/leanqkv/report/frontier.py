"""A frontier as a table, a figure, a recommendation for every budget, and a page, from frontier.json alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Any

from rich.table import Table as TerminalTable

from ..cache_bits import CacheBits
from ..compare.statistics import Band, half_width
from .figures import Series, frontier_lines
from .page import Figure, Kind, Page, Section, described, footer
from .text import ABSENT, Table, plus_minus, signed

# Shares of the source's cache for which the best point is named.
BUDGETS = (0.84, 0.75, 0.5, 0.375, 0.25)
# Nats above the source's loss from which a point is of no use, and is not recommended.
USELESS = 1.0
ABOVE = "Loss above the source's, mean of the texts, against"
LEFT_OUT = "What loses a nat or more is in the table alone."


@dataclass(frozen=True)
class Point:
    """One kind of reduction in one precision, over the calibration samples.

    Attributes:
        label: with its precision; line: of a figure, its kind and precision.
        share: of the source's cache in bfloat16.
        losses: by text, the difference to the source in nats per token: mean and half of its 95% interval, over
            samples, or over windows of the text where there is one sample.
        divergence, agreement, greedy: means over texts and samples; greedy of the source's continuation.
        speeds: tokens per second by context; ratios: to the source's, which took turns with it.
        tasks: of each, the share of right answers, and how many of the source's were lost and won, in words.
    """

    label: str
    line: str
    quantized: bool
    bytes_per_token: float
    share: float
    losses: list[tuple[float, float | None]]
    divergence: float
    agreement: float
    greedy: float
    speeds: dict[str, float]
    ratios: dict[str, float]
    tasks: dict[str, str]

    @property
    def loss(self) -> float:
        """The mean over the texts."""
        return fmean(mean for mean, _ in self.losses)

    @property
    def cells(self) -> tuple[str, str, str]:
        return self.label, f"{self.bytes_per_token:,.0f}", f"{self.share:.1%}"


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
    bits = CacheBits(first["key_bits"], first["value_bits"])
    return Point(
        label=f"{first['label']}, {bits.name}",
        line=f"{first['kind']}, {bits.name}",
        quantized=bits.quantized,
        bytes_per_token=first["bytes_per_token"],
        share=first["bytes_per_token"] / record["source"]["bytes_per_token"],
        losses=losses,
        divergence=fmean(score["divergence"]["mean"] for score in scores),
        agreement=fmean(score["agreement"]["mean"] for score in scores),
        greedy=fmean(sample["greedy_agreement"] for sample in samples),
        speeds=first.get("tokens_per_second", {}),
        ratios=first.get("of_source", {}),
        tasks={task: _answers(first, task) for task in first.get("tasks", {})},
    )


def _answers(point: dict[str, Any], task: str) -> str:
    figures, change = point["tasks"][task], point["paired"].get(task, {}).get("acc", {})
    if "acc" not in figures:
        return ABSENT
    moved = f" (−{change['lost']}, +{change['won']})" if "won" in change else ""
    return f"{figures['acc']:.1%}{moved}"


def _speed(point: Point, context: str) -> str:
    if context not in point.speeds:
        return ABSENT
    ratio = f" (× {point.ratios[context]:.2f})" if context in point.ratios else ""
    return f"{point.speeds[context]:.1f}{ratio}"


def best_within(points: Sequence[Point], share: float) -> Point | None:
    """Return the point of at most that share of the source's cache that loses least; None of none."""
    within = [point for point in points if point.share <= share]
    return min(within, key=lambda point: point.loss, default=None)


def recommendations(record: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence for every budget: the best of all, and the best without quantizing."""

    def named(point: Point) -> str:
        return f"{point.label} ({point.share:.1%}, {signed(point.loss)} nats)"

    points = [point for point in read_points(record) if point.loss < USELESS]
    for share in BUDGETS:
        best, plain = (best_within(some, share) for some in (points, [one for one in points if not one.quantized]))
        if best is None:
            yield f"At most {100 * share:g}% of the cache: no point is that small and of use."
            continue
        other = f"; without quantizing {named(plain)}" if plain else "; none without quantizing"
        yield f"At most {100 * share:g}% of the cache: {named(best)}{'' if plain == best else other}."


def _by_size(record: dict[str, Any]) -> list[Point]:
    """The points, the largest cache first."""
    return sorted(read_points(record), key=lambda one: (-one.bytes_per_token, one.loss))


def _contexts(record: dict[str, Any]) -> list[str]:
    """The tokens after which decoding was timed."""
    return list(dict.fromkeys(c for point in record["points"] for c in point.get("tokens_per_second", {})))


def _tasks(record: dict[str, Any]) -> list[str]:
    """The tasks that were asked."""
    return record.get("questions", {}).get("tasks", [])


def points_table(record: dict[str, Any]) -> Table:
    """Return all that is known of the points, the largest cache first."""
    texts = [text["description"].split(",")[0] for text in record["texts"]]
    contexts, tasks = _contexts(record), _tasks(record)
    headers = (
        *("cache", "bytes per token", "share"),
        *(f"loss on {text}" for text in texts),
        *("KL, nats", "same likeliest token", "same on a greedy text"),
        *tasks,
        *(f"tokens/s after {int(context):,}" for context in contexts),
    )
    rows = [
        (
            *point.cells,
            *(plus_minus(signed(mean), width) for mean, width in point.losses),
            *(f"{point.divergence:.4f}", f"{point.agreement:.1%}", f"{point.greedy:.1%}"),
            *(point.tasks.get(task, ABSENT) for task in tasks),
            *(_speed(point, context) for context in contexts),
        )
        for point in _by_size(record)
    ]
    samples = record["calibration"]["samples"]
    counted = "long texts"
    if (tokens := record.get("at_context")) is not None:
        counted = f"a text of {tokens:,} tokens, of which layers with a window keep the last ones"
    over = "windows of the text" if samples == 1 else f"{samples} calibrations, of the source over windows of the text"
    note = (
        f"Losses are nats per token above the source's, on {record['evaluated_tokens']:,} tokens of each text in "
        f"windows of {record['context_length']:,}. ± is half of a 95% interval over {over}. 8/4 bits: keys in 8, "
        f"values in 4. Bytes are those of {counted}; the newest tokens, fewer than 64, are not quantized, nor "
        "is what the first 64 tokens of a window read. Speeds are of the first calibration, in float32."
    )
    if any(point.ratios for point in read_points(record)):
        note += " ×: of the source's speed, whose steps were timed in turns with them."
    if tasks:
        note += (
            " Of tasks it is the share of right answers of the first calibration, with how many of the source's were "
            "lost and won; questions of needle and recall are as long as the windows."
        )
    return Table(headers, rows, note=note)


def terminal(record: dict[str, Any]) -> TerminalTable:
    """Return the points for a terminal: their size, and means over the texts."""
    tasks = _tasks(record)
    headers = ("cache", "bytes per\ntoken", "share", "loss", "KL, nats", "same\nlikeliest\ntoken", *tasks)
    rows = [
        (
            *(*one.cells, signed(one.loss), f"{one.divergence:.4f}", f"{one.agreement:.1%}"),
            *(one.tasks.get(task, ABSENT) for task in tasks),
        )
        for one in _by_size(record)
    ]
    return Table(headers, rows, note="Loss above the source's, nats per token.").terminal(whole=headers[:6])


def markdown(record: dict[str, Any]) -> str:
    """Return the points and the recommendations in Markdown."""
    table = points_table(record)
    sentences = "".join(f"- {sentence}\n" for sentence in recommendations(record))
    return f"{table.markdown()}\n\n{table.note}\n\n{sentences}"


def page(record: dict[str, Any]) -> Page:
    """Return the page of a record."""
    first = [point for point in record["points"] if point.get("layers") and not point["sample"]]
    plans = {point["label"]: _plan(point["layers"]) for point in first if "rank" in point["layers"][0]}
    return Page(
        "leanqkv frontier",
        f"{record['name']}: KV cache against loss",
        "How small the KV cache of this checkpoint can get, and what that costs.",
        [
            Section("For every budget", [[*recommendations(record)], *_figures(record)]),
            Section("All points", [points_table(record)]),
            Section("What every layer caches", [Section(label, [plan], folded=True) for label, plan in plans.items()]),
            Section("Not measured", [record.get("refused", {})]),
            Section("How it was made", [_facts(record)]),
        ],
        made=footer(record),
    )


def _plan(layers: list[dict[str, Any]]) -> Table:
    """The columns that every layer's keys and values take."""
    rows = [
        (str(layer["layer"]), str(layer.get("key_rank", "all")), str(layer["rank"]), f"{layer['missed']:.2%}")
        for layer in layers
    ]
    note = "Missed: of attention's output, on calibration sequences held out from the fit. Layers count from 0."
    return Table(("layer", "columns of keys", "columns of values", "missed"), rows, note=note)


def _figures(record: dict[str, Any]) -> Iterator[Figure]:
    """Draw loss against the share of the cache, and against the speed after every context that was timed."""
    share = _series(record, lambda point: 100 * point.share)
    drawing = frontier_lines("frontier", share, "KV cache, share of the source's in bfloat16", "%")
    caption = f"{ABOVE} the share of its KV cache in bfloat16. Down and to the left is better. {LEFT_OUT}"
    yield Figure(drawing, caption)
    for context in _contexts(record):
        after = f"speed of one sequence after {int(context):,} tokens, of the source's"
        speed = _series(record, lambda point: point.ratios.get(context))  # noqa: B023
        caption = f"{ABOVE} the {after}, in float32. Down and to the right is better. {LEFT_OUT}"
        if speed:
            yield Figure(frontier_lines(f"speed{context}", speed, after), caption)


def _series(record: dict[str, Any], across: Callable[[Point], float | None]) -> list[Series]:
    """Return the losses of what is of use: one line for every kind and precision."""
    lines: dict[str, list[Band]] = {}
    for point in (one for one in read_points(record) if one.loss < USELESS):
        width = max((width or 0.0) for _, width in point.losses)
        bands = lines.setdefault(point.line, [])
        if (place := across(point)) is not None:
            bands.append(Band(place, point.loss, point.loss - width, point.loss + width))
    return [
        Series(label, style, sorted(bands, key=attrgetter("step")))
        for style, (label, bands) in enumerate(lines.items(), 1)
        if bands
    ]


def _facts(record: dict[str, Any]) -> dict[str, str | list[str]]:
    calibration = record["calibration"]
    tokens = f"{calibration['tokens']:,} tokens"
    if calibration["samples"] > 1:
        tokens = f"{calibration['samples']} samples of {tokens}, none in two of them"
    seconds = calibration["seconds"]
    fits = f"{fmean(seconds) / 60:.1f} min a sample, all conversions together" if seconds else ""
    same = all(point.get("same_tokens_without_cache", True) for point in record["points"])
    decoded = "every model decodes the same tokens with a cache and without"
    facts: dict[str, str | list[str]] = {
        "Calibration": tokens,
        "Time of the fits": fits,
        "Time of scoring and decoding": f"{record['seconds'] / 60:.1f} min in all",
        "Evaluation text": [f"{text['description']}, {text['split']}" for text in record["texts"]],
        "Command": f"`{record['command']}`" if "command" in record else "",
        "Hardware": described(record["hardware"]),
        "Versions": described(record["versions"]),
        "Checked": decoded if same else "some models decode other tokens",
    }
    return {term: text for term, text in facts.items() if text}


KIND = Kind("frontier.json", "measure again into another directory", page, terminal, markdown, html="frontier.html")
