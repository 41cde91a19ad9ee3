"""A comparison as one self-contained HTML page, with the Markdown table beside it."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, product

from ..compare.records import AGAIN, ComparisonRecord, Result, load_comparison
from ..compare.statistics import Band, average, difference_curve, paired_difference
from ..errors import listed
from . import comparison as text
from . import figures
from .after_training import mean_accuracies, uptraining_series
from .page import Code, Figure, Kind, Note, Page, Section, described, in_words
from .papers import both_differences, suite_of, suite_tables
from .text import ABSENT, Table, signed

UPTRAINING = "Level lines are the losses of whole runs from random weights; the points are models uptrained so long."


def page(comparison: ComparisonRecord) -> Page:
    """Return the page of a comparison."""
    finished = sum(run.state != "missing" for run in comparison.finals)
    planned = len(comparison.architectures) * len(comparison.seeds)
    scale = f" at scale {comparison.scale}" if comparison.scale else ""
    result = replace(text.result_table(comparison), note="", remarks=_marks(comparison))
    warnings = [Note(warning, "warning") for warning in text.warnings(comparison)]
    unit = f"{text.interval_note(comparison)} {comparison.measure.unit}; s.d. is the standard deviation over seeds."
    recipes = _recipes(comparison)
    papers = [*(Section(table.title, [table]) for table in suite_tables(comparison)), suite_of(comparison).claims]
    measured = [
        _facts(comparison),
        Section("To reproduce", [Code(comparison.command)]),
        Section("Recipes", [recipes] if recipes.rows else []),
        Section("Every final run", [_runs(comparison)], folded=True),
    ]
    return Page(
        "leanqkv comparison" + (f" · suite {comparison.suite}{scale}" if comparison.suite else ""),
        comparison.title,
        text.reading(comparison),
        [
            Section("Result", [result, *warnings, Note(unit)]),
            *(Section(table.title, [table]) for table in text.own_tables(comparison)),
            Section("Beside the papers", papers),
            Section("Figures", [*_figures(comparison)]),
            Section("How it was measured", measured),
            Section("Notes", [text.remarks(comparison)]),
        ],
        made=None,
        status=f"Still under way: {finished} of {planned} final runs are there." if finished < planned else "",
    )


def _marks(comparison: ComparisonRecord) -> dict[str, tuple[str, str]]:
    """By architecture, the style and the words that stand below its difference."""
    words = {"lower": "clearly lower", "higher": "clearly higher", "unclear": "not clear"}
    styles = {"lower": "bad", "higher": "bad", "unclear": "unclear"} | {comparison.measure.better: "good"}
    judged = {result.name: result.verdict for result in comparison.results if result.verdict in words}
    return {name: (styles[verdict], words[verdict]) for name, verdict in judged.items()}


def _figures(comparison: ComparisonRecord) -> Iterator[Figure]:
    """Yield the figures that there is something to draw in."""
    measure, results = comparison.measure, comparison.results
    capital = measure.name[0].upper() + measure.name[1:]
    if series := [*_training_curves(comparison)]:
        per_step = {run.recipe["batch_size"] * run.context_length for run in comparison.finals}
        drawing = figures.curves("loss", series, measure, per_step.pop() if len(per_step) == 1 else None)
        title = f"{capital} during training"
        yield Figure(drawing, f"Lines are means over seeds.{figures.edge_note(series)}", title)
    # Of losses alone: an accuracy begins near zero for every model.
    compared = comparison.compared_losses
    differences = [(one, points) for one, *pair in compared if (points := difference_curve(*pair))]
    if series := [figures.Series(one.name, one.style, points) for one, points in differences]:
        pairs = {one.name: len(own.keys() & others.keys()) for one, own, others in compared}
        yield Figure(
            figures.difference_curves("difference", series, measure),
            f"{capital} minus the baseline's at the same step and seed, mean over seeds, in nats per token; below "
            f"zero is better. {_intervals(comparison, pairs, 'bands')}"
            + (" Wide bands of early evaluations may be cut off." if max(pairs.values()) > 1 else ""),
            f"Difference to {_baseline(comparison)}",
        )
    yield from _beside_published(comparison)
    for number, series in enumerate(uptraining_series(comparison)):
        names = ("uptraining, share of the steps of a whole run in percent", "validation loss")
        drawing = figures.measured_lines(f"uptraining-{number}", series, *names, UPTRAINING, from_zero=False)
        yield Figure(
            drawing,
            f"{UPTRAINING} Bands reach from the lowest to the highest seed.",
            f"Uptraining of {series[0].label}",
        )
    if accuracies := mean_accuracies(comparison):
        bars = {name: {"mean accuracy": value} for name, value in accuracies.items()}
        drawing = figures.stacked_bars("tasks", bars, "mean accuracy, %", "Bars: mean accuracy, one per architecture.")
        yield Figure(drawing, "The mean over tasks, each with the same weight, and over seeds.", "Downstream tasks")
    if series := [*_search(comparison)]:
        yield Figure(
            figures.learning_rate_grid("grid", series),
            "Validation loss at the end of one run per architecture and peak learning rate; a ring marks the best of "
            "each architecture, a cross a run that diverged.",
            "The learning rate search",
        )
    sized = [result for result in results if result.losses and result.kv_bytes is not None]
    if len({result.kv_bytes for result in sized}) > 1:
        pairs = {r.name: len(r.losses.keys() & r.baseline.losses.keys()) for r in results if r.baseline}
        yield Figure(
            figures.cache_scatter("cache", [figures.Series(one.name, one.style, [_paired_loss(one)]) for one in sized]),
            "Down and to the left is better. Marks are means over seeds; equal caches stand side by side; the dashed "
            f"line is the loss of {comparison.baselines[0]}. {_intervals(comparison, pairs, 'bars')}",
            "Validation loss and KV cache",
        )


def _beside_published(comparison: ComparisonRecord) -> Iterator[Figure]:
    """Yield, for every table of a paper with two differences or more, theirs and ours in one figure."""
    for number, published in enumerate(suite_of(comparison).published):
        pairs = both_differences(comparison, published)
        series = [figures.Series(result.name, result.style, [ours.at(theirs)]) for result, theirs, ours in pairs]
        if len(series) > 1:
            yield Figure(
                figures.published_scatter(f"published-{number}", series, published.metric),
                "Marks in the lower left and the upper right have the published sign. "
                + _intervals(comparison, {result.name: len(ours.by_seed) for result, _, ours in pairs}, "bars"),
                f"Beside {published.source}",
            )


def _training_curves(comparison: ComparisonRecord) -> Iterator[figures.Series]:
    for result in chain.from_iterable(comparison.from_scratch):
        diverged = [(run.diverged[0], run.scores) for run in result.finals.values() if run.diverged]
        ends = [(step, max(scores.items(), default=(0, math.inf))[1]) for step, scores in diverged]
        if (points := average(result.curves())) or ends:
            yield figures.Series(result.name, result.style, points, ends)


def _search(comparison: ComparisonRecord) -> Iterator[figures.Series]:
    for result in comparison.results:
        tried = [run for (name, _), run in comparison.grid_runs.items() if name == result.name]
        losses = [Band(run.learning_rate, *[run.loss] * 3) for run in tried if run.loss is not None]
        losses.sort(key=lambda band: band.step)
        diverged = [(run.learning_rate, math.inf) for run in tried if run.diverged]
        if losses or diverged:
            yield figures.Series(result.name, result.style, losses, diverged)


def _paired_loss(result: Result) -> Band:
    """The loss at the size of the cache, with the interval of its difference to the baseline."""
    difference = paired_difference(result.losses, result.baseline.losses) if result.baseline else None
    width = (difference and difference.half_width) or 0
    assert result.kv_bytes is not None
    return Band(result.kv_bytes, result.mean_loss, result.mean_loss - width, result.mean_loss + width)


def _baseline(comparison: ComparisonRecord) -> str:
    return comparison.baselines[0] if len(comparison.groups) == 1 else "its own baseline"


def _intervals(comparison: ComparisonRecord, pairs: Mapping[str, int], marks: str) -> str:
    """Return the meaning of a figure's bands or bars, and the models without. pairs: the seeds of every difference."""
    if max(pairs.values(), default=0) < 2:
        return f"There are no {marks}, because one seed gives no interval."
    alone = [name for name, count in pairs.items() if count == 1]
    absent = f" One seed gives none: {listed(alone)}." if alone else ""
    return f"The {marks} are 95% intervals of the difference to {_baseline(comparison)}, over seeds.{absent}"


def _facts(comparison: ComparisonRecord) -> dict[str, list[str]]:
    """How it was measured: term and values, more than one value only where runs differ."""
    runs = comparison.finals or list(comparison.runs)
    inputs, (size_term, size_text) = comparison.measure.inputs, comparison.measure.data_size
    plans = {seed: _distinct(r.batch_plan["sha256"] for r in runs if r.seed == seed) for seed in comparison.seeds}
    facts = {
        "Data": _distinct(run.data["description"] for run in runs),
        size_term: _distinct(size_text(run.data) for run in runs),
        "Data, SHA-256": _distinct(run.data["sha256"] for run in runs),
        "Batch plan, SHA-256": [f"seed {seed}: {digest}" for seed, digests in plans.items() for digest in digests],
        "Training": _distinct(
            f"{run.recipe['steps']:,} steps of {run.recipe['batch_size']:,} {inputs} of {run.context_length:,} tokens: "
            f"{run.recipe['steps'] * run.recipe['batch_size'] * run.context_length:,} tokens"
            for run in runs
        ),
        "Predicted": _distinct(plan["targets"]["words"] for run in runs if "targets" in (plan := run.batch_plan)),
        "Validation": _distinct(f"{run.batch_plan['evaluation_sequences']:,} {inputs}" for run in runs),
        "Seeds": [", ".join(map(str, comparison.seeds))],
        "Learning rates": [_learning_rates(comparison)],
        "Tokens per second": ["median over the steps of a run, mean over seeds"],
        "Precision": _distinct(run.precision["choice"] for run in runs),
        "Hardware": _distinct(described(run.hardware) for run in runs),
        "Versions": _distinct(described(run.versions) for run in runs),
        "Git commit": _distinct(run.git_commit or "not recorded" for run in runs),
    }
    return {term: values for term, values in facts.items() if values}


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
    shown = ["learning_rate", "min_learning_rate", "weight_decay"]
    told = ("steps", "batch_size", *shown)
    names = dict.fromkeys(name for recipe in recipes.values() for name in recipe if name not in told)
    values = {name: {in_words(recipe.get(name)) for recipe in recipes.values()} for name in names}
    shared = [f"{name.replace('_', ' ')} {value}" for name, (value, *others) in values.items() if not others]
    shown += [name for name, found in values.items() if len(found) > 1]
    headers = ["architecture", *(name.replace("_", " ") for name in shown)]
    rows = [[name, *(in_words(recipe.get(column)) for column in shown)] for name, recipe in recipes.items()]
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


KIND = Kind("compare.json", AGAIN, page, text.terminal_report, text.markdown, load=lambda at, plan: load_comparison(at))
