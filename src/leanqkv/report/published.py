"""A paper's numbers beside ours. The two were measured at different sizes, so what stands side by side is the
difference of each to its own baseline, never the losses themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import numpy as np

from ..compare.records import Comparison, Result, Run
from ..compare.statistics import PairedDifference, paired_difference
from ..compare.suite import PAPER, Published, Suite
from .text import ABSENT, compact, listed, signed

HEADERS = ("model", "published", "published difference\nto its baseline", "difference here")
NOT_RUN = "not run"


@dataclass(frozen=True)
class Metric:
    """How a metric is read off a run, and how many digits ours is written with."""

    of: Callable[[Run], float | None]
    digits: int
    trained: bool = True  # whether training decides it, so that it has an interval over seeds


METRICS: dict[str, Metric] = {
    "validation loss": Metric(lambda run: run.loss, 4),
    "perplexity": Metric(lambda run: run.perplexity, 2),
    "test accuracy": Metric(lambda run: run.accuracy, 4),
    "parameters, millions": Metric(lambda run: run.parameters["total"] / 1e6, 3, trained=False),
    "non-embedding parameters, millions": Metric(lambda run: run.parameters["non_embedding"] / 1e6, 3, trained=False),
    "KV bytes per token": Metric(lambda run: run.kv_bytes, 0, trained=False),
}


@dataclass(frozen=True)
class PublishedTable:
    """One table or figure of a paper beside ours, as text."""

    heading: str
    rows: Sequence[Sequence[str]]
    note: str


def published_tables(comparison: Comparison, suite: Suite) -> list[PublishedTable]:
    return [_table(comparison, published) for published in suite.published]


def here(comparison: Comparison) -> str:
    """At which scale ours ran, and on what."""
    runs = comparison.finals
    told = f"scale {comparison.scale}"
    if not runs:
        return told
    sizes = _range([run.parameters["total"] for run in runs])
    tokens = _range([run.recipe["steps"] * run.recipe["batch_size"] * run.context_length for run in runs])
    data = listed([*dict.fromkeys(run.data["description"] for run in runs)])
    return f"{told}, {sizes} parameters, {tokens} training tokens, {data}"


def caveat(comparison: Comparison) -> str:
    """What the columns beside each other can tell."""
    changed = listed([f"{name.replace('_', ' ')} {value}" for name, value in comparison.recipe.items()])
    if comparison.scale != PAPER:
        return (
            "Published and here are of different size, data and length of training: compare signs and proportions, "
            "not losses."
        )
    return "Here with the published sizes and recipe" + (f", but for {changed}." if changed else ".")


def _table(comparison: Comparison, published: Published) -> PublishedTable:
    printed = {row: text for group in published.groups for row, text in group.items()}
    baselines = {row: next(iter(group)) for group in published.groups for row in group}
    found = [result for result in comparison.results if comparison.rows.get(result.name) in printed]
    rows = []
    for result in found:
        row = comparison.rows[result.name]
        rows.append([result.name, *_printed(row, baselines[row], printed), _ours(result, METRICS[published.metric])])
    reached = {comparison.rows[result.name] for result in found}
    rows += [[row, *_printed(row, baselines[row], printed), NOT_RUN] for row in printed if row not in reached]
    return PublishedTable(
        f"{published.source}, {published.metric}. Published: {published.setting}. Here: {here(comparison)}.",
        rows,
        _agreement(comparison, printed, baselines, found) if published.metric == "validation loss" else "",
    )


def number(text: str) -> Decimal | None:
    """What is printed, if it is a number; with as many digits."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def published_difference(row: str, baseline: str, printed: Mapping[str, str]) -> Decimal | None:
    """To the baseline of its group, exactly as the printed digits give it."""
    value, reference = number(printed[row]), number(printed[baseline])
    return None if row == baseline or value is None or reference is None else value - reference


def _printed(row: str, baseline: str, printed: Mapping[str, str]) -> list[str]:
    """What is printed, and its difference to the baseline."""
    value, difference = number(printed[row]), published_difference(row, baseline, printed)
    shown = printed[row] if value is None else f"{value:,}"
    if difference is None:
        return [shown, "baseline" if row == baseline and value is not None else ABSENT]
    digits = -int(difference.as_tuple().exponent)
    reference = number(printed[baseline])
    assert reference is not None
    return [shown, f"{signed(float(difference), digits)} ({signed(float(100 * difference / reference), 2)}%)"]


def _ours(result: Result, metric: Metric) -> str:
    if result.baseline is None:
        return "baseline"
    values, reference = _values(result, metric), _values(result.baseline, metric)
    difference = paired_difference(values, reference)
    if difference is None:
        return "diverged" if any(run.diverged for run in result.finals.values()) else ABSENT
    relative = 100 * difference.mean / float(np.mean([reference[seed] for seed in difference.by_seed]))
    width = difference.half_width if metric.trained else None
    spread = "" if width is None else f" ± {width:.{metric.digits}f}"
    return f"{signed(difference.mean, metric.digits)}{spread} ({signed(relative, 2)}%)"


def _values(result: Result, metric: Metric) -> dict[int, float]:
    return {seed: value for seed, run in result.finals.items() if (value := metric.of(run)) is not None}


def _agreement(
    comparison: Comparison, printed: Mapping[str, str], baselines: Mapping[str, str], results: Sequence[Result]
) -> str:
    """Which of our differences, where they are clear of zero, have the published sign."""
    same: list[str] = []
    other: list[str] = []
    unclear: list[str] = []
    for result in results:
        row = comparison.rows[result.name]
        theirs, ours = published_difference(row, baselines[row], printed), result.difference
        if theirs is None or ours is None or not theirs:
            continue
        (unclear if not ours.clear else same if _same_sign(theirs, ours) else other).append(result.name)
    said = [
        f"{words} {listed(names)}"
        for words, names in (
            ("clear of zero and of the published sign:", same),
            ("clear of zero and of the other sign:", other),
            ("not clear of zero:", unclear),
        )
        if names
    ]
    return f"Our differences {'; '.join(said)}." if said else ""


def _same_sign(theirs: Decimal, ours: PairedDifference) -> bool:
    return (theirs < 0) == (ours.mean < 0)


def _range(values: Sequence[int]) -> str:
    low, high = compact(min(values)), compact(max(values))
    return low if low == high else f"{low} to {high}"
