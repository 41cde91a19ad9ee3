"""Additions to the result of a suite: which runs diverged, and a paper's numbers beside ours.

The two were measured at different sizes, so what stands side by side is the difference of each to its own baseline,
never the losses themselves.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import numpy as np
from scipy.stats import spearmanr

from ..compare.records import ComparisonRecord, Result, Run
from ..compare.statistics import PairedDifference, over_seeds, paired_difference
from ..compare.suite import PAPER, Published, Suite
from ..compare.suites import SUITES
from ..errors import listed
from ..evaluate.harness import TASK_SETS
from .text import ABSENT, Table, compact, plus_minus, signed, span

HEADERS = ("model", "published", "published difference\nto its baseline", "difference here")
NOT_RUN = "not run"
# Nats. Evaluations of a run that learns lie within hundredths of the lowest before them.
RISE = 0.5
STABILITY_HEADERS = ("model", "learning rate", "minimum", "weight\ndecay", "outcome", "lowest\nloss", "final\nloss")
STABILITY_NOTE = (
    f"A run counts as diverged where its loss is not finite, and where its validation loss ends {RISE} or more above "
    "its own lowest, or above the logarithm of the vocabulary, which is the loss of one that knows nothing; the step "
    "is that of the first evaluation so far up. A spike is such a rise that the run came back from. A run that "
    "learned little counts as finished: see its loss."
)


@dataclass(frozen=True)
class Metric:
    """How a metric is read off a run, and how many digits ours is written with."""

    of: Callable[[Run], float | None]
    digits: int
    trained: bool = True  # whether training decides it, so that it has an interval over seeds


METRICS: dict[str, Metric] = {
    "validation loss": Metric(lambda run: run.loss, 4),
    "perplexity": Metric(lambda run: run.final.get("perplexity"), 2),
    "test accuracy": Metric(lambda run: run.final.get("accuracy"), 4),
    "parameters, millions": Metric(lambda run: run.parameters["total"] / 1e6, 3, trained=False),
    "non-embedding parameters, millions": Metric(lambda run: run.parameters["non_embedding"] / 1e6, 3, trained=False),
    "KV bytes per token": Metric(lambda run: run.kv_bytes, 0, trained=False),
}


def _accuracy(tasks: Sequence[str]) -> Metric:
    """The mean accuracy on these tasks in percent; of a run that was not scored on all of them None."""

    def of(run: Run) -> float | None:
        scores = [run.tasks[task] for task in tasks if task in run.tasks]
        return 100 * sum(scores) / len(tasks) if len(scores) == len(tasks) else None

    return Metric(of, 1)


NINE_TASKS = TASK_SETS["p3"]
SEVEN_TASKS = tuple(task for task in NINE_TASKS if task not in ("boolq", "rte"))
METRICS |= {f"{task} accuracy, %": _accuracy([task]) for task in NINE_TASKS}
METRICS |= {f"mean accuracy of {len(tasks)} tasks, %": _accuracy(tasks) for tasks in (SEVEN_TASKS, NINE_TASKS)}


def suite_of(comparison: ComparisonRecord) -> Suite:
    """Return the suite of a comparison; of another one a suite that no paper says anything of."""
    return SUITES.get(comparison.suite or "", Suite("", "", {}))


def suite_tables(comparison: ComparisonRecord) -> list[Table]:
    """Return a suite's further tables: outcomes of its runs, the papers' numbers beside ours."""
    suite = suite_of(comparison)
    outcomes = [stability_table(comparison)] if suite.stability else []
    return outcomes + [_table(comparison, published) for published in suite.published]


def _table(comparison: ComparisonRecord, published: Published) -> Table:
    printed, metric = published.printed, METRICS[published.metric]
    results = [(result, row) for result in comparison.results if (row := comparison.rows.get(result.name)) in printed]
    rows = [[f"`{result.name}`", *_printed(published, row), _ours(result, metric)] for result, row in results]
    run = {row for _, row in results}
    rows += [[f"`{row}`", *_printed(published, row), NOT_RUN] for row in printed if row not in run]
    agreement = _agreement(published, results) if published.metric == "validation loss" else ""
    order = rank_correlation(both_differences(comparison, published))
    title = f"{published.source}, {published.metric}. Published: {published.setting}. Here: {here(comparison)}."
    return Table(HEADERS, rows, title, " ".join(filter(None, [_caveat(comparison), agreement, order])))


def both_differences(
    comparison: ComparisonRecord, published: Published
) -> list[tuple[Result, float, PairedDifference]]:
    """Return the models of which both differences to the baseline are known, the paper's and ours, in percent of it."""
    metric, pairs = METRICS[published.metric], []
    for result in comparison.results if metric.trained else ():
        row = comparison.rows.get(result.name)
        theirs = _difference(published, row) if row in published.printed else None
        if theirs is None or result.baseline is None:
            continue
        values, reference = _values(result, metric), _values(result.baseline, metric)
        ours = {seed: 100 * (values[seed] / reference[seed] - 1) for seed in sorted(values.keys() & reference.keys())}
        if ours:
            pairs.append((result, float(100 * theirs[0] / theirs[1]), over_seeds(ours)))
    return pairs


def rank_correlation(pairs: Sequence[tuple[Result, float, PairedDifference]]) -> str:
    """Return how far the models' order is the published one: Spearman's coefficient, of the means and of each seed.

    A baseline takes part where all models have the same. Fewer than four numbers have no order to speak of.
    """
    baselines = {result.baseline.name for result, *_ in pairs if result.baseline}
    shared = sorted(set.intersection(*(set(ours.by_seed) for *_, ours in pairs))) if pairs else []
    zero = [0.0] if len(baselines) == 1 else []
    theirs = [*zero, *(number for _, number, _ in pairs)]
    if len(theirs) < 4 or len(set(theirs)) == 1:
        return ""
    of_means = _spearman(theirs, [*zero, *(ours.mean for *_, ours in pairs)])
    by_seed = [_spearman(theirs, [*zero, *(ours.by_seed[seed] for *_, ours in pairs)]) for seed in shared]
    spread = f"; of single seeds {_text(min(by_seed))} to {_text(max(by_seed))}" if len(by_seed) > 1 else ""
    order = f"Rank correlation of the {len(theirs)} models' order with the published one (Spearman)"
    return f"{order}: {_text(of_means)}{spread}."


def _spearman(first: Sequence[float], second: Sequence[float]) -> float:
    return float(spearmanr(first, second).statistic)


def _text(coefficient: float) -> str:
    return f"{coefficient:.2f}".replace("-", "−")


def here(comparison: ComparisonRecord) -> str:
    """Return at which scale ours ran, and on what."""
    runs = comparison.finals
    if not runs:
        return f"scale {comparison.scale}"
    sizes = span([run.parameters["total"] for run in runs], compact)
    tokens = span([run.recipe["steps"] * run.recipe["batch_size"] * run.context_length for run in runs], compact)
    data = listed([*dict.fromkeys(run.data["description"] for run in runs)])
    return f"scale {comparison.scale}, {sizes} parameters, {tokens} training tokens, {data}"


def _caveat(comparison: ComparisonRecord) -> str:
    """How far the columns can be compared with each other."""
    other = ""
    if comparison.base is not None:
        other = f"Published is the loss of the next token, here {comparison.measure.name} on {comparison.base}. "
    if comparison.scale != PAPER:
        return (
            f"{other}Published and here are of different size, data and length of training: compare signs and "
            "proportions, not losses."
        )
    changed = listed([f"{name.replace('_', ' ')} {value}" for name, value in comparison.recipe.items()])
    return f"{other}Here with the published sizes and recipe" + (f", but for {changed}." if changed else ".")


def number(text: str) -> Decimal | None:
    """Return a printed number, with as many digits; None for words."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def _difference(published: Published, row: str) -> tuple[Decimal, Decimal] | None:
    """The difference to the row's baseline, exactly as the printed digits give it, and that baseline."""
    baseline = published.baselines[row]
    value, reference = number(published.printed[row]), number(published.printed[baseline])
    return None if row == baseline or value is None or reference is None else (value - reference, reference)


def _printed(published: Published, row: str) -> list[str]:
    """The printed text, and its difference to the baseline."""
    text = published.printed[row]
    value, compared = number(text), _difference(published, row)
    shown = text if value is None else f"{value:,}"
    if compared is None:
        return [shown, "baseline" if row == published.baselines[row] and value is not None else ABSENT]
    difference, reference = compared
    digits = -int(difference.as_tuple().exponent)
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
    ours = plus_minus(signed(difference.mean, metric.digits), width, f".{metric.digits}f")
    return f"{ours} ({signed(relative, 2)}%)"


def _values(result: Result, metric: Metric) -> dict[int, float]:
    return {seed: value for seed, run in result.finals.items() if (value := metric.of(run)) is not None}


def _agreement(published: Published, results: Sequence[tuple[Result, str]]) -> str:
    """Which of our differences, where they are clear of zero, have the published sign."""
    names: dict[str, list[str]] = {
        "clear of zero and of the published sign:": [],
        "clear of zero and of the other sign:": [],
        "not clear of zero:": [],
    }
    same, other, unclear = names.values()
    for result, row in results:
        theirs, ours = _difference(published, row), result.difference
        if theirs is None or ours is None or not theirs[0]:
            continue
        agrees = (theirs[0] < 0) == (ours.mean < 0)
        (unclear if not ours.clear else same if agrees else other).append(result.name)
    clauses = [f"{words} {listed(those)}" for words, those in names.items() if those]
    return f"Our differences {'; '.join(clauses)}." if clauses else ""


def outcome(run: Run) -> str:
    """Return `diverged at step 340`, `spike at step 200` or `finished`."""
    if run.diverged:
        return f"diverged at step {run.diverged[0]:,}"
    vocab_size = run.data.get("vocab_size")
    start = math.log(vocab_size) if vocab_size else math.inf
    lowest, losses = start, run.curves["loss"]
    for step, loss in sorted(losses.items()):
        if loss >= lowest + RISE:
            stayed = run.loss is not None and run.loss >= min(start, *losses.values()) + RISE
            return f"{'diverged' if stayed else 'spike'} at step {step:,}"
        lowest = min(lowest, loss)
    return "finished"


def stability_table(comparison: ComparisonRecord) -> Table:
    """Return a table of every architecture's rates, the outcome of every seed, its lowest and its final loss."""
    rows = [_row(comparison, result) for result in comparison.results]
    return Table(STABILITY_HEADERS, rows, f"Which runs diverged. Here: {here(comparison)}.", STABILITY_NOTE)


def _row(comparison: ComparisonRecord, result: Result) -> list[str]:
    runs = [run for seed, run in sorted(result.finals.items()) if result.state(seed) != "missing"]
    if not runs:
        return [f"`{result.name}`", *[ABSENT] * 3, "missing", ABSENT, ABSENT]
    recipe = runs[0].recipe
    outcomes = [f"{text} ({n} seeds)" if n > 1 else text for text, n in Counter(outcome(run) for run in runs).items()]
    missing = len(comparison.seeds) - len(runs)
    lowest = [min(losses.values()) for run in runs if (losses := run.curves["loss"])]
    return [
        f"`{result.name}`",
        *(f"{recipe[name]:g}" for name in ("learning_rate", "min_learning_rate", "weight_decay")),
        "\n".join([*outcomes, *([f"{missing} missing"] if missing else [])]),
        f"{min(lowest):.3f}" if lowest else ABSENT,
        f"{result.mean_loss:.3f}" if result.losses else ABSENT,
    ]
