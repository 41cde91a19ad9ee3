"""The tables of a comparison, for a terminal and as Markdown, and its result in words; made from its records."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table as TerminalTable
from rich.text import Text

from ..compare.records import ComparisonRecord, Result
from ..compare.trend import FRACTIONS, FURTHER, trend
from ..errors import listed
from ..presets.recipes import recipe_differences
from .after_training import task_tables, uptraining_tables
from .papers import suite_of, suite_tables
from .text import ABSENT, Table, compact, mean_with_deviation, percent, seeds, signed, with_interval

# Fewer are warned of: at two seeds Student's t is 12.7, at three 4.3.
ENOUGH_SEEDS, ENOUGH_INPUTS = 3, 64
INTERVAL_NOTE = (
    "Differences are paired by seed. ± is half of the 95% interval: Student's t over seeds. “Clearly” means that this "
    "interval leaves out zero; it is not corrected for comparing several models."
)
VERDICTS = {
    "lower": "clearly lower for",
    "higher": "clearly higher for",
    "unclear": "not clearly different for",
    "one seed": "known from one seed only, too few to judge, for",
}


def result_table(comparison: ComparisonRecord) -> Table:
    """Return a row per architecture, a difference clear of zero in bold, and the result in words below."""
    headers = (
        "model",
        "difference to\nbaseline, 95%",
        f"{comparison.measure.name}\nmean (s.d.)",
        "KV bytes per\ntoken (bf16)",
        "parameters\n(non-emb.)",
        "learning\nrate",
        "tokens/s",
    )
    note = [reading(comparison), " ".join(warnings(comparison)), interval_note(comparison)]
    rows = [_result_cells(comparison, result) for result in comparison.results]
    return Table(headers, rows, comparison.title, "\n\n".join(filter(None, note)))


def interval_note(comparison: ComparisonRecord) -> str:
    """Return what ± and “clearly” mean; empty where no difference has an interval."""
    known = any(result.verdict in ("lower", "higher", "unclear") for result in comparison.results)
    return INTERVAL_NOTE if known else ""


def warnings(comparison: ComparisonRecord) -> list[str]:
    """Return what makes the differences weak evidence: unlike runs, learning rates, few seeds, few sequences."""
    lines, searched = _unlike_runs(comparison), comparison.grid
    groups = [{result.learning_rate for result in group if result.learning_rate} for group in comparison.from_scratch]
    rates = listed([f"{rate:g}" for rate in sorted(set().union(*groups))])
    if any(len(group) > 1 for group in groups):
        each = "each is the best of its search" if searched else "none was searched"
        lines.append(f"Learning rates differ ({rates}); {each}. Part of a difference may come from them.")
    elif rates and not searched:
        lines.append(f"The learning rate ({rates}) was not searched. Another may favor another model.")
    recipes = [[result.any_run.recipe for result in group if result.any_run] for group in comparison.from_scratch]
    if differing := recipe_differences(recipes):
        lines.append(f"Recipes differ in {listed(differing)}. Part of a difference may come from them.")
    if searched and (steps := searched.get("steps")):
        lines.append(f"Rates were searched in runs of {steps:,} steps. Longer runs often want lower ones.")
    tried = searched["learning_rates"] if searched else []
    chosen = comparison.chosen_learning_rate if searched else {}
    if edge := [name for name, rate in chosen.items() if rate in (min(tried), max(tried))]:
        lines.append(f"The best learning rate is the least or the largest that was tried for {listed(edge)}.")
    pairs = [len(result.difference.by_seed) for result in comparison.results if result.difference]
    if pairs and min(pairs) == 1:
        lines.append("A difference known from one seed has no interval. It may be seed noise.")
    elif pairs and min(pairs) < ENOUGH_SEEDS:
        lines.append(f"Fewer than {ENOUGH_SEEDS} seeds: intervals are wide, and their width is itself uncertain.")
    fewest = min((run.batch_plan["evaluation_sequences"] for run in comparison.finals), default=ENOUGH_INPUTS)
    if fewest < ENOUGH_INPUTS:
        inputs = comparison.measure.inputs
        lines.append(
            f"Fewer than {ENOUGH_INPUTS} evaluation {inputs}: {fewest}. Other {inputs} may give another difference, "
            "and no interval over seeds covers that."
        )
    return lines


def terminal_report(comparison: ComparisonRecord) -> RenderableType:
    """Return the result in 100 columns; of a suite also the papers' numbers beside it and its outcomes."""
    parts: list[RenderableType] = [terminal_table(comparison)]
    for table in own_tables(comparison) + suite_tables(comparison):
        rows = [[_folded(name), *cells] for name, *cells in table.rows]
        parts += ["", replace(table, rows=rows).terminal()]
    if claims := suite_of(comparison).claims:
        parts += ["", Text("\n".join(claims))]
    return Group(*parts)


def terminal_table(comparison: ComparisonRecord) -> TerminalTable:
    """Return the result in 100 columns, with a caption that says which differences are clear of zero."""
    table, rows, styles = result_table(comparison), [], []
    for result, cells in zip(comparison.results, table.rows, strict=True):
        # Names are long: what extends its baseline's says only by what.
        baseline = result.baseline.name if result.baseline else result.name
        rows.append([_folded(re.sub(rf"^{re.escape(baseline)}(?:(?=\+)|, )", "", result.name)), *cells[1:]])
        styles.append("bold green" if result.verdict == comparison.measure.better else "bold red")
    # Where a terminal is too narrow, the other columns wrap.
    return replace(table, rows=rows).terminal(whole=("tokens/s",), bold=styles)


def _folded(name: str) -> str:
    """A name that breaks between its mechanisms."""
    return re.sub(r"(?<=.)\+", "\n+", name.strip("`"))


def markdown(comparison: ComparisonRecord) -> str:
    """Return the same tables for GitHub."""
    result = result_table(comparison)
    parts = [result.markdown(), f"{result.note}\n"]
    for table in own_tables(comparison) + suite_tables(comparison):
        parts += [f"{table.title}\n", table.markdown()]
        parts += [f"{table.note}\n"] if table.note else []
    if claims := suite_of(comparison).claims:
        parts.append("".join(f"- {claim}\n" for claim in claims))
    return "\n".join(parts)


def own_tables(comparison: ComparisonRecord) -> list[Table]:
    """Return what there is beside the result: by length, uptrained models, downstream tasks."""
    return [*length_tables(comparison), *uptraining_tables(comparison), *task_tables(comparison)]


def length_tables(comparison: ComparisonRecord) -> list[Table]:
    """Return how each difference changes with the tokens trained on; nothing where too few lengths were evaluated."""
    rows = []
    for result, own, baseline in comparison.compared_losses:
        if (found := trend(own, baseline)) is not None:
            cells = [*found.differences, found.per_doubling, found.further]
            rows.append([f"`{result.name}`", *(with_interval(cell) for cell in cells)])
    whole_runs = [run for run in comparison.finals if run.name not in comparison.uptrained]
    tokens = {run.tokens for run in whole_runs if run.loss is not None}
    if not rows or len(tokens) != 1:
        return []
    whole = tokens.pop()
    headers = ["model", *(f"{compact(fraction * whole)}\ntokens" for fraction in FRACTIONS)]
    headers += ["per doubling", f"{compact(FURTHER * whole)} tokens,\npredicted"]
    note = (
        "Differences to the baseline during training, at the same step and seed. The last two columns are those of a "
        "straight line through each seed's four differences over the logarithm of the tokens. The prediction holds if "
        "the line does. Before the end the learning rate has not come down yet: a run that ends there has another loss."
    )
    return [Table(headers, rows, "Differences by length of training", note)]


def reading(comparison: ComparisonRecord) -> str:
    """Return the result in a sentence for each baseline."""
    return " ".join(_group_reading(comparison, group) for group in comparison.result_groups)


def _group_reading(comparison: ComparisonRecord, group: Sequence[Result]) -> str:
    baseline, *others = group
    clauses = [
        f"{words} {listed([_difference_and_cache(result, baseline) for result in chosen])}"
        for verdict, words in VERDICTS.items()
        if (chosen := [result for result in others if result.verdict == verdict])
    ]
    diverged = [r.name for r in group if all(r.state(seed) == "diverged" for seed in comparison.seeds)]
    waiting = [result.name for result in others if result.verdict == "none" and result.name not in diverged]
    sentences = []
    if clauses:
        open_ends = f"; {listed(waiting)} cannot be compared yet" if waiting else ""
        pairs = sorted({len(result.difference.by_seed) for result in others if result.difference})
        over = "" if pairs == [1] else f", over {' or '.join(map(str, pairs))} seeds"
        sentences.append(
            f"Against {baseline.name}{over}, {comparison.measure.name} is {'; '.join(clauses)}{open_ends}."
        )
    elif not diverged or (waiting and baseline.name not in diverged):
        sentences.append(f"There is no difference to {baseline.name} to report yet.")
    if diverged:
        sentences.append(f"{listed(diverged)} diverged.")
    return " ".join(sentences)


def _difference_and_cache(result: Result, baseline: Result) -> str:
    """`NAME (difference with so much of the baseline's cache)`."""
    assert result.difference is not None
    size = baseline.kv_bytes
    same = size is None or result.kv_bytes in (None, size)
    cache = "" if same else f" with {percent(result.kv_bytes, size)} of the KV cache"
    return f"{result.name} ({signed(result.difference.mean)}{cache})"


def remarks(comparison: ComparisonRecord) -> list[str]:
    """Return the plan's notes, then every run that is missing or diverged."""
    lines = list(comparison.notes)
    for result in comparison.results:
        if absent := [str(seed) for seed in comparison.seeds if result.state(seed) == "missing"]:
            lines.append(f"{result.name}: no finished run yet for seed{'s' * (len(absent) > 1)} {listed(absent)}.")
        for seed, run in sorted(result.finals.items()):
            if run.diverged:
                step, why = run.diverged
                lines.append(f"{result.name}, seed {seed}: diverged at step {step:,} ({why}); left out of every mean.")
    rates = comparison.grid["learning_rates"] if comparison.grid else []
    for name, rate in product(comparison.architectures, rates):
        tried = comparison.grid_runs.get((name, rate))
        if tried is None or tried.state == "missing":
            lines.append(f"{name}, learning rate {rate:g} of the search: no finished run yet.")
        elif tried.diverged:
            lines.append(f"{name}, learning rate {rate:g} of the search: diverged at step {tried.diverged[0]:,}.")
    return lines


def _unlike_runs(comparison: ComparisonRecord) -> list[str]:
    """Data, batches or lengths in which runs differ that are compared."""
    lines = []
    if len({run.data["sha256"] for run in comparison.finals}) > 1:
        lines.append("The runs did not all use the same data; their losses cannot be compared.")
    groups = [[run for result in group for run in result.finals.values()] for group in comparison.from_scratch]
    for seed in comparison.seeds:
        if any(len({run.batch_plan["sha256"] for run in runs if run.seed == seed}) > 1 for runs in groups):
            lines.append(f"Seed {seed}: the runs did not all see the same batches; their differences are not paired.")
    if any(len({run.tokens for run in runs if run.loss is not None}) > 1 for runs in groups):
        lines.append("The runs were not all trained on the same number of tokens.")
    return lines


def _result_cells(comparison: ComparisonRecord, result: Result) -> list[str]:
    reference = (result.baseline or result).kv_bytes
    run, kv_bytes, difference = result.any_run, result.kv_bytes, result.difference
    pairs = len(difference.by_seed) if difference else 0
    remark = "" if pairs == len(comparison.seeds) else f"\n{seeds(pairs)}"
    states = [result.state(seed) for seed in comparison.seeds]
    scores = [mean_with_deviation(list(result.scores.values()))] if result.scores else []
    scores += [f"{states.count(state)} {state}" for state in ("diverged", "missing") if state in states]
    speeds = [run.tokens_per_second for run in result.finals.values() if run.loss is not None and run.tokens_per_second]
    return [
        f"`{result.name}`",
        "baseline" if result.baseline is None else with_interval(difference, remark=remark),
        "\n".join(scores),
        (f"{kv_bytes:,}" + (f" ({percent(kv_bytes, reference)})" if reference else "")) if kv_bytes else ABSENT,
        f"{compact(run.parameters['total'])} ({compact(run.parameters['non_embedding'])})" if run else ABSENT,
        ABSENT if result.learning_rate is None else f"{result.learning_rate:g}",
        f"{np.mean(speeds):,.0f}" if speeds else ABSENT,
    ]
