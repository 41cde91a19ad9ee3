"""A comparison as one self-contained HTML page, with the Markdown table beside it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from ..compare.measure import LOSS
from ..compare.records import ComparisonRecord, Result, Run, load_comparison
from ..compare.statistics import Band, average, difference_curve, paired_difference
from . import figures, html
from .comparison import (
    DIFFERENCE,
    interval_note,
    length_table,
    markdown,
    reading,
    remarks,
    result_table,
    sections,
    suite_claims,
    warnings,
)
from .text import ABSENT, Table, listed, signed

Captioned = tuple[str, str, figures.Drawing]  # heading, caption and drawing


def write_report(directory: str | Path) -> Path:
    """Write `report.html` and `table.md` into the comparison's directory; return the page's path.

    The page needs no other file. The same records give the same bytes.

    Raises:
        LeanError: as `load_comparison`.
    """
    comparison = load_comparison(directory)
    drawn = (_training_curves(comparison), _differences(comparison), _search(comparison), _loss_and_cache(comparison))
    return html.write_report(
        Path(directory),
        "comparison.html.j2",
        markdown(comparison),
        comparison=comparison,
        reading=reading(comparison),
        warnings=warnings(comparison),
        interval_note=interval_note(comparison),
        finished=sum(run.state != "missing" for run in comparison.finals),
        planned=len(comparison.architectures) * len(comparison.seeds),
        result=result_table(comparison),
        difference=DIFFERENCE,
        marks=_marks(comparison),
        figures=[figure for figure in drawn if figure is not None],
        facts=_facts(comparison),
        recipes=_recipes(comparison),
        runs=_runs(comparison),
        lengths=length_table(comparison),
        sections=sections(comparison),
        claims=suite_claims(comparison),
        remarks=remarks(comparison),
    )


def _marks(comparison: ComparisonRecord) -> dict[str, tuple[str, str]]:
    """By architecture, the style and the words that stand below its difference."""
    words = {"lower": "clearly lower", "higher": "clearly higher", "unclear": "not clear"}
    styles = {"lower": "bad", "higher": "bad", "unclear": "unclear"} | {comparison.measure.better: "good"}
    verdicts = {result.name: result.verdict for result in comparison.results}
    return {name: (styles[verdict], words[verdict]) for name, verdict in verdicts.items() if verdict in words}


# Each of these returns None for a comparison without anything to draw.


def _training_curves(comparison: ComparisonRecord) -> Captioned | None:
    series = []
    for result in comparison.results:
        ends = [
            (run.diverged[0], max(run.scores.items(), default=(0, math.inf))[1])
            for run in result.finals.values()
            if run.diverged
        ]
        if (points := average(result.curves())) or ends:
            series.append(figures.Series(result.name, result.style, points, ends))
    name = comparison.measure.name
    per_step = {run.recipe["batch_size"] * run.context_length for run in comparison.finals}
    if not series:
        return None
    return (
        f"{name[0].upper()}{name[1:]} during training",
        f"Lines are means over seeds.{figures.edge_note(series)}",
        figures.curves(series, comparison.measure, per_step.pop() if len(per_step) == 1 else None),
    )


def _differences(comparison: ComparisonRecord) -> Captioned | None:
    """Of losses alone: an accuracy begins near zero for every model."""
    series = [
        figures.Series(result.name, result.style, points)
        for result in comparison.results
        if comparison.measure == LOSS
        and result.baseline
        and (points := difference_curve(result.curves(), result.baseline.curves()))
    ]
    if not series:
        return None
    pairs = {r.name: len(r.curves().keys() & r.baseline.curves().keys()) for r in comparison.results if r.baseline}
    return (
        f"Difference to {_baseline(comparison)}",
        "Validation loss minus the baseline's at the same step and seed, mean over seeds, in nats per token; below "
        f"zero is better. {_intervals(comparison, pairs, 'bands')}"
        + (" Wide bands of early evaluations may be cut off." if max(pairs.values()) > 1 else ""),
        figures.difference_curves(series, comparison.measure),
    )


def _baseline(comparison: ComparisonRecord) -> str:
    return comparison.baselines[0] if len(comparison.groups) == 1 else "its own baseline"


def _intervals(comparison: ComparisonRecord, pairs: Mapping[str, int], marks: str) -> str:
    """What a figure's bands or bars mean, and which models have none. pairs: the seeds of every difference."""
    if max(pairs.values(), default=0) < 2:
        return f"There are no {marks}, because one seed gives no interval."
    alone = [name for name, count in pairs.items() if count == 1]
    absent = f" One seed gives none: {listed(alone)}." if alone else ""
    return f"The {marks} are 95% intervals of the difference to {_baseline(comparison)}, over seeds.{absent}"


def _search(comparison: ComparisonRecord) -> Captioned | None:
    series = []
    for result in comparison.results:
        tried = [run for (name, _), run in comparison.grid_runs.items() if name == result.name]
        losses = [Band(run.learning_rate, *[run.loss] * 3) for run in tried if run.loss is not None]
        diverged = [(run.learning_rate, math.inf) for run in tried if run.diverged]
        if losses or diverged:
            series.append(figures.Series(result.name, result.style, losses, diverged))
    if not series:
        return None
    return (
        "The learning rate search",
        "Validation loss at the end of one run per architecture and peak learning rate; a ring marks the best "
        "of each architecture, a cross a run that diverged.",
        figures.learning_rate_grid(series),
    )


def _loss_and_cache(comparison: ComparisonRecord) -> Captioned | None:
    series = [
        figures.Series(result.name, result.style, [_paired_loss(result, size)])
        for result in comparison.results
        if result.losses and (size := result.kv_bytes) is not None
    ]
    if len({one.points[0].step for one in series}) < 2:
        return None
    pairs = {r.name: len(r.losses.keys() & r.baseline.losses.keys()) for r in comparison.results if r.baseline}
    return (
        "Validation loss and KV cache",
        "Down and to the left is better. Marks are means over seeds; equal caches stand side by side; the dashed line "
        f"is the loss of {comparison.baselines[0]}. {_intervals(comparison, pairs, 'bars')}",
        figures.cache_scatter(series),
    )


def _paired_loss(result: Result, size: float) -> Band:
    """The loss at this size of cache, with the interval of its difference to the baseline."""
    difference = paired_difference(result.losses, result.baseline.losses) if result.baseline else None
    width = (difference and difference.half_width) or 0
    return Band(size, result.mean_loss, result.mean_loss - width, result.mean_loss + width)


def _facts(comparison: ComparisonRecord) -> list[tuple[str, list[str]]]:
    """How it was measured: term and values, more than one value only where runs differ."""
    runs = comparison.finals or list(comparison.runs)
    inputs, (size_term, size_text) = comparison.measure.inputs, comparison.measure.data_size
    plans = {seed: [r.batch_plan["sha256"] for r in runs if r.seed == seed] for seed in comparison.seeds}
    facts = [
        ("Data", _distinct(run.data["description"] for run in runs)),
        (size_term, _distinct(size_text(run.data) for run in runs)),
        ("Data, SHA-256", _distinct(run.data["sha256"] for run in runs)),
        (
            "Batch plan, SHA-256",
            [f"seed {seed}: {digest}" for seed, digests in plans.items() for digest in _distinct(digests)],
        ),
        ("Training", _distinct(_length(run) for run in runs)),
        ("Validation", _distinct(f"{run.batch_plan['evaluation_sequences']:,} {inputs}" for run in runs)),
        ("Seeds", [", ".join(map(str, comparison.seeds))]),
        ("Learning rates", [_learning_rates(comparison)]),
        ("Tokens per second", ["median over the steps of a run, mean over seeds"]),
        ("Precision", _distinct(run.precision["choice"] for run in runs)),
        ("Hardware", _distinct(_described(run.hardware) for run in runs)),
        ("Versions", _distinct(_described(run.versions) for run in runs)),
        ("Git commit", _distinct(run.git_commit or "not recorded" for run in runs)),
    ]
    return [(term, values) for term, values in facts if values]


def _length(run: Run) -> str:
    """How long a run trains."""
    steps, batch_size = run.recipe["steps"], run.recipe["batch_size"]
    return (
        f"{steps:,} steps of {batch_size:,} {run.measure.inputs} of {run.context_length:,} tokens: "
        f"{steps * batch_size * run.context_length:,} tokens"
    )


def _learning_rates(comparison: ComparisonRecord) -> str:
    grid = comparison.grid
    if grid is None:
        return "each architecture's own recipe; none was searched for"
    return (
        f"for each architecture the one of {listed([f'{rate:g}' for rate in grid['learning_rates']])} with the "
        f"lowest validation loss on seed {grid['seed']}"
        + (f" after {grid['steps']:,} steps" if "steps" in grid else "")
        + ("" if grid["seed"] in comparison.seeds else ", which no run in the table uses")
    )


def _recipes(comparison: ComparisonRecord) -> Table:
    """Each architecture's recipe: columns for fields that may differ, a note for those that all share."""
    recipes = {result.name: next(iter(result.finals.values())).recipe for result in comparison.results if result.finals}
    names = list(dict.fromkeys(name for recipe in recipes.values() for name in recipe))
    shown = ["learning_rate", "min_learning_rate", "weight_decay"]
    shared = []
    for name in names:
        values = {_value(recipe.get(name)) for recipe in recipes.values()}
        if name in ("steps", "batch_size", *shown):
            continue
        if len(values) == 1:
            shared.append(f"{name.replace('_', ' ')} {values.pop()}")
        else:
            shown.append(name)
    headers = ["architecture", *(name.replace("_", " ") for name in shown)]
    rows = [[name, *(_value(recipe.get(column)) for column in shown)] for name, recipe in recipes.items()]
    return Table(headers, rows, note=f"The same for all: {', '.join(shared)}." if shared else "")


def _runs(comparison: ComparisonRecord) -> Table:
    """Every final run, one a row."""
    beside, title, digits = comparison.measure.beside
    rows = []
    for result, seed in product(comparison.results, comparison.seeds):
        run = result.finals.get(seed)
        outcome = run.final.get(beside) if run else None
        difference = result.difference.by_seed.get(seed) if result.difference else None
        rows.append(
            [
                result.name,
                str(seed),
                f"{run.loss:.4f}" if run and run.loss is not None else result.state(seed),
                ABSENT if outcome is None else format(outcome, digits),
                ABSENT if difference is None else signed(difference),
                f"{run.tokens_per_second:,.0f}" if run and run.tokens_per_second else ABSENT,
                f"{run.seconds / 60:,.1f}" if run else ABSENT,
            ]
        )
    headers = ("architecture", "seed", "validation loss", title, "difference to baseline", "tokens/s", "minutes")
    return Table(headers, rows)


def _distinct(values: Iterable[str]) -> list[str]:
    """Each value once; with the number of runs it holds for where there are several."""
    counts = Counter(values)
    return list(counts) if len(counts) == 1 else [f"{value} ({count} runs)" for value, count in counts.items()]


def _described(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in facts.items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else f"{value:,}" if type(value) is int else str(value)
