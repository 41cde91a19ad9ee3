"""A comparison as one self-contained HTML page, with the Markdown table beside it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..compare.records import ACCURACY, LOSS, Comparison, Run, load_comparison
from ..compare.statistics import average, relative_improvement
from ..files import write_text
from . import figures
from .comparison import (
    DIFFERENCE,
    INTERVAL_NOTE,
    headers,
    markdown_table,
    reading,
    remarks,
    result_cells,
    sections,
    suite_claims,
)
from .html import render
from .text import ABSENT, listed, signed

UNITS = {
    LOSS: "Validation loss is in nats per token",
    ACCURACY: "Test accuracy is the share of test images whose class is found",
}
_RUN = ("difference to baseline", "tokens/s", "minutes")
RUN_HEADERS = {
    LOSS: ("architecture", "seed", "validation loss", "perplexity", *_RUN),
    ACCURACY: ("architecture", "seed", "validation loss", "test accuracy", *_RUN),
}


def write_report(directory: str | Path) -> Path:
    """Writes `report.html` and `table.md` into the comparison's directory; returns the page's path.

    Raises:
        LeanError: as `load_comparison`.
    """
    directory = Path(directory)
    comparison = load_comparison(directory)
    page = directory / "report.html"
    write_text(directory / "table.md", markdown_table(comparison))
    write_text(page, html_page(comparison))
    return page


def html_page(comparison: Comparison) -> str:
    """The report: one file that needs nothing else; the same records give the same bytes."""
    return render(
        Path(__file__).with_name("comparison.html.j2"),
        comparison=comparison,
        reading=reading(comparison),
        interval_note=INTERVAL_NOTE,
        finished=sum(run.loss is not None or run.diverged is not None for run in comparison.finals),
        planned=len(comparison.architectures) * len(comparison.seeds),
        headers=headers(comparison),
        rows=[(result_cells(comparison, result), result.verdict) for result in comparison.results],
        difference=DIFFERENCE,
        words={"lower": "clearly lower", "higher": "clearly higher", "unclear": "not clear"},
        better=comparison.measure.better,
        unit=UNITS[comparison.measure],
        figures=_figures(comparison),
        facts=_facts(comparison),
        recipes=_recipes(comparison),
        run_headers=RUN_HEADERS[comparison.measure],
        run_rows=_run_rows(comparison),
        sections=sections(comparison),
        claims=suite_claims(comparison),
        remarks=remarks(comparison),
    )


def _figures(comparison: Comparison) -> list[tuple[str, str, figures.Drawing]]:
    """Heading, caption and drawing of every figure that has something to show."""
    results, found = comparison.results, []
    curves = [
        figures.Series(
            result.name,
            result.style,
            average(result.curves()),
            [
                (run.diverged[0], max(run.scores.items(), default=(0, math.inf))[1])
                for run in result.finals.values()
                if run.diverged
            ],
        )
        for result in results
    ]
    curves = [series for series in curves if series.points or series.diverged]
    if curves:
        per_step = {run.recipe["batch_size"] * run.context_length for run in comparison.finals}
        found.append(
            (
                f"{_title(comparison.measure.name)} during training",
                "Lines are means over seeds, bands reach from the lowest to the highest seed. The first evaluations, "
                "where every model is still bad, lie beyond the edge.",
                figures.curves(curves, comparison.measure, per_step.pop() if len(per_step) == 1 else None),
            )
        )
    gains = [
        figures.Series(result.name, result.style, relative_improvement(result.curves(), result.baseline.curves()))
        for result in results
        if result.baseline and comparison.measure == LOSS
    ]
    gains = [series for series in gains if series.points]
    if gains:
        over = comparison.baselines[0] if len(comparison.groups) == 1 else "its own baseline"
        found.append(
            (
                f"Improvement over {over}",
                f"How much lower the validation loss is than that of {over} at the same step and seed, "
                "in percent; above zero is better. Bands reach from the lowest to the highest seed.",
                figures.improvement_curves(gains),
            )
        )
    grid = []
    for result in results:
        tried = [run for (name, _), run in comparison.grid_runs.items() if name == result.name]
        losses = {run.learning_rate: run.loss for run in tried if run.loss is not None}
        diverged = [run.learning_rate for run in tried if run.diverged]
        if losses or diverged:
            grid.append(figures.GridSeries(result.name, result.style, losses, diverged))
    if grid:
        found.append(
            (
                "The learning rate search",
                "Validation loss at the end of one run per architecture and peak learning rate; a ring marks the best "
                "of each architecture, a cross a run that diverged.",
                figures.learning_rate_grid(grid),
            )
        )
    points = [
        figures.CachePoint(
            result.name,
            result.style,
            result.kv_bytes,
            result.mean_loss,
            min(result.losses.values()),
            max(result.losses.values()),
        )
        for result in results
        if result.losses and result.kv_bytes is not None
    ]
    if len({point.kv_bytes for point in points}) > 1:
        found.append(
            (
                "Validation loss and KV cache",
                "Down and to the left is better. Marks are means over seeds, bars reach from the lowest to the highest "
                "seed; equal caches stand side by side; the dashed line is the loss of the baseline.",
                figures.cache_scatter(points),
            )
        )
    return found


def _facts(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """How it was measured: term and values, more than one value only where runs differ."""
    runs = comparison.finals or list(comparison.runs)
    grid = comparison.grid
    plans = {seed: [r.batch_plan["sha256"] for r in runs if r.seed == seed] for seed in comparison.seeds}
    facts = [
        ("Data", _distinct(run.data["description"] for run in runs)),
        (
            "Tokens in the data",
            _distinct(
                f"{run.data['train_tokens']:,} to train on, {run.data['validation_tokens']:,} to validate on"
                + (f", {size:.3g} bytes of text per token" if (size := run.data["bytes_per_token"]) else "")
                for run in runs
                if not run.images
            ),
        ),
        (
            "Images in the data",
            _distinct(
                f"{run.data['train_images']:,} to train on, {run.data['test_images']:,} to test on"
                for run in runs
                if run.images
            ),
        ),
        ("Data, SHA-256", _distinct(run.data["sha256"] for run in runs)),
        (
            "Batch plan, SHA-256",
            [f"seed {seed}: {digest}" for seed, digests in plans.items() for digest in _distinct(digests)],
        ),
        (
            "Training",
            _distinct(
                f"{run.recipe['steps']:,} steps of {run.recipe['batch_size']:,} {_inputs(run)} "
                f"of {run.context_length:,} tokens: "
                f"{run.recipe['steps'] * run.recipe['batch_size'] * run.context_length:,} tokens"
                for run in runs
            ),
        ),
        ("Validation", _distinct(f"{run.batch_plan['evaluation_sequences']:,} {_inputs(run)}" for run in runs)),
        ("Seeds", [", ".join(map(str, comparison.seeds))]),
        (
            "Learning rates",
            [
                f"for each architecture the one of {listed([f'{rate:g}' for rate in grid.learning_rates])} with the "
                f"lowest validation loss on seed {grid.seed}"
                + ("" if grid.seed in comparison.seeds else ", which no run in the table uses")
                if grid
                else "each architecture's own recipe; none was searched for"
            ],
        ),
        ("Tokens per second", ["median over the steps of a run, mean over seeds"]),
        ("Precision", _distinct(run.precision for run in runs)),
        ("Hardware", _distinct(_described(run.hardware) for run in runs)),
        ("Versions", _distinct(_described(run.versions) for run in runs)),
        ("Git commit", _distinct(run.git_commit or "not recorded" for run in runs)),
    ]
    return [(term, values) for term, values in facts if values]


def _recipes(comparison: Comparison) -> dict[str, Any]:
    """What each architecture was trained with: columns for what may differ, one line for what all share."""
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
    return {
        "headers": [name.replace("_", " ") for name in shown],
        "rows": [(name, [_value(recipe.get(column)) for column in shown]) for name, recipe in recipes.items()],
        "shared": ", ".join(shared),
    }


def _run_rows(comparison: Comparison) -> list[list[str]]:
    """Every final run, as RUN_HEADERS has it."""
    rows = []
    for result in comparison.results:
        for seed in comparison.seeds:
            run = result.finals.get(seed)
            difference = result.difference.by_seed.get(seed) if result.difference else None
            rows.append(
                [
                    result.name,
                    str(seed),
                    f"{run.loss:.4f}" if run and run.loss is not None else result.state(seed),
                    _beside_loss(run),
                    ABSENT if difference is None else signed(difference),
                    f"{run.tokens_per_second:,.0f}" if run and run.tokens_per_second else ABSENT,
                    f"{run.seconds / 60:,.1f}" if run else ABSENT,
                ]
            )
    return rows


def _beside_loss(run: Run | None) -> str:
    if run is not None and run.accuracy is not None:
        return f"{run.accuracy:.4f}"
    return ABSENT if run is None or run.perplexity is None else f"{run.perplexity:,.2f}"


def _inputs(run: Run) -> str:
    return "images" if run.images else "sequences"


def _title(words: str) -> str:
    return words[0].upper() + words[1:]


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
