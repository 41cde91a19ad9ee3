"""Further results of a comparison's models: uptrained ones beside whole runs, and accuracy on downstream tasks."""

from collections.abc import Iterator

import numpy as np

from ..compare.records import ComparisonRecord, Result
from ..compare.statistics import Band, paired_difference
from .figures import Series
from .text import Table, mean_with_deviation, with_interval


def _groups(comparison: ComparisonRecord) -> Iterator[tuple[list[Result], list[Result]]]:
    """Yield the results of each group with uptrained models that have a loss: whole runs, and uptrained ones."""
    for group in comparison.result_groups:
        uptrained = [result for result in group if result.losses and result.name in comparison.uptrained]
        whole = [result for result in group if result.losses and result.name not in comparison.uptrained]
        if whole and uptrained:
            yield whole, uptrained


def uptraining_tables(comparison: ComparisonRecord) -> list[Table]:
    """Return for each group its uptrained models: loss, and differences to the baseline and to a run of their own."""
    tables = []
    for whole, uptrained in _groups(comparison):
        headers = ["model", "share of\nthe steps", "validation loss\nmean (s.d.)"]
        headers += [f"difference to\n{result.name}, 95%" for result in whole]
        rows = [
            [
                f"`{result.name}`",
                f"{100 * comparison.uptrained[result.name]:g}%",
                mean_with_deviation(list(result.losses.values())),
                *(with_interval(paired_difference(result.losses, other.losses)) for other in whole),
            ]
            for result in uptrained
        ]
        note = "Uptrained models begin with the weights of the group's baseline of the same seed, converted by mean-v."
        title = f"{whole[0].name} converted and uptrained, against training from random weights"
        tables.append(Table(headers, rows, title, note))
    return tables


def uptraining_series(comparison: ComparisonRecord) -> Iterator[list[Series]]:
    """Yield for each group lines of loss over the share of the steps in percent: level ones of whole runs."""
    for whole, uptrained in _groups(comparison):
        shares = [100 * comparison.uptrained[result.name] for result in uptrained]
        ends = sorted({0.0, max(shares)})
        lines = [Series(one.name, one.style, [_band(share, one) for share in ends]) for one in whole]
        points = sorted(map(_band, shares, uptrained), key=lambda band: band.step)
        yield [*lines, Series("uptrained", uptrained[0].style, points)]


def _band(share: float, result: Result) -> Band:
    losses = list(result.losses.values())
    return Band(share, float(np.mean(losses)), min(losses), max(losses))


def _tasks(comparison: ComparisonRecord) -> list[str]:
    """The tasks that all scored runs have: means over different tasks are not comparable."""
    scored = [run.tasks for result in comparison.results for run in result.finals.values() if run.tasks]
    return [task for task in (scored[0] if scored else ()) if all(task in tasks for tasks in scored)]


def _means(result: Result, tasks: list[str]) -> dict[int, float]:
    """By seed, the mean accuracy over tasks in percent."""
    finals = {seed: run.tasks for seed, run in result.finals.items() if run.tasks and tasks}
    return {seed: 100 * float(np.mean([found[task] for task in tasks])) for seed, found in finals.items()}


def mean_accuracies(comparison: ComparisonRecord) -> dict[str, float]:
    """Return the mean accuracy over tasks and seeds in percent, by architecture."""
    tasks = _tasks(comparison)
    means = {result.name: _means(result, tasks) for result in comparison.results}
    return {name: float(np.mean([*of_seeds.values()])) for name, of_seeds in means.items() if of_seeds}


def task_tables(comparison: ComparisonRecord) -> list[Table]:
    """Return a table of the accuracy on every task and of their mean; none where nothing was scored on one task."""
    tasks = _tasks(comparison)
    headers = ["model", *tasks, "mean", "difference to\nbaseline, 95%"]
    rows = []
    for result in comparison.results:
        if not (means := _means(result, tasks)):
            continue
        runs = [run.tasks for run in result.finals.values() if run.tasks]
        cells = [f"{100 * np.mean([run[task] for run in runs]):.1f}" for task in tasks]
        base = _means(result.baseline, tasks) if result.baseline else {}
        against = with_interval(paired_difference(means, base), 1) if result.baseline else "baseline"
        rows.append([f"`{result.name}`", *cells, f"{np.mean([*means.values()]):.1f}", against])
    note = (
        "Accuracy in percent, zero-shot where the task says no other, mean over seeds. Intervals are over seeds: those "
        "of the examples, which every model shares, are wider."
    )
    return [Table(headers, rows, "Downstream tasks", note)] if rows else []
