"""The tables of a comparison, for a terminal and as Markdown, and its result in words; made from its records."""

import re
from collections.abc import Sequence
from itertools import product

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..compare.records import ComparisonRecord, Result
from ..compare.statistics import PairedDifference, standard_deviation
from ..compare.suites import SUITES
from .published import published_sections
from .stability import stability_section
from .text import ABSENT, Section, compact, listed, markdown_table, percent, seeds, signed

WHOLE = ("tokens/s",)  # where a terminal is too narrow the columns before it wrap
DIFFERENCE = 4  # the place of that column
INTERVAL_NOTE = (
    "Differences are paired by seed; after ± stands half of the 95% Student t interval. "
    "“Clearly” means that this interval leaves out zero; it is not corrected for comparing several architectures."
)
VERDICTS = {
    "lower": "clearly lower for",
    "higher": "clearly higher for",
    "unclear": "not clearly different for",
    "one seed": "known from one seed only, too few to judge, for",
}


def headers(comparison: ComparisonRecord) -> tuple[str, ...]:
    return (
        "model",
        "parameters\n(non-emb.)",
        "KV bytes per\ntoken (bf16)",
        f"{comparison.measure.name}\nmean ± s.d.",
        "difference to\nbaseline, 95%",
        "learning\nrate",
        "tokens/s",
    )


def terminal_report(comparison: ComparisonRecord) -> RenderableType:
    """Return the result in 100 columns; of a suite also the papers' numbers beside it and its outcomes."""
    parts: list[RenderableType] = [terminal_table(comparison)]
    for section in sections(comparison):
        table = _plain_table(section.heading, section.note, section.headers)
        for cells in section.rows:
            table.add_row(_name(cells[0]), *map(Text, cells[1:]))
        parts += ["", table]
    if claims := suite_claims(comparison):
        parts += ["", Text("\n".join(claims))]
    return Group(*parts)


def terminal_table(comparison: ComparisonRecord) -> Table:
    """Return the result in 100 columns, with a caption that says which differences are clear of zero."""
    table = _plain_table(comparison.title, _caption(comparison), headers(comparison))
    better = comparison.measure.better
    styles = dict.fromkeys(("lower", "higher"), "bold red") | {better: "bold green"}
    for result in comparison.results:
        cells = [Text(cell) for cell in result_cells(comparison, result)]
        cells[DIFFERENCE].stylize(styles.get(result.verdict, ""))
        # Names are long: what extends its baseline's says only by what.
        baseline = result.baseline.name if result.baseline else result.name
        cells[0] = _name(re.sub(rf"^{re.escape(baseline)}(?:(?=\+)|, )", "", result.name))
        table.add_row(*cells)
    return table


def _plain_table(title: str, caption: str, headers: Sequence[str]) -> Table:
    table = Table(
        title=Text(title),
        caption=Text(f"\n{caption}") if caption else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for place, header in enumerate(headers):
        table.add_column(header, justify="right" if place else "left", no_wrap=header in WHOLE, overflow="fold")
    return table


def _name(name: str) -> Text:
    """A name that breaks between its mechanisms."""
    return Text(re.sub(r"(?<=.)\+", "\n+", name))


def markdown(comparison: ComparisonRecord) -> str:
    """Return the same tables for GitHub; a difference clear of zero is bold."""
    rows = []
    for result in comparison.results:
        cells = result_cells(comparison, result)
        if result.verdict in ("lower", "higher"):
            cells[DIFFERENCE] = f"**{cells[DIFFERENCE]}**"
        rows.append(cells)
    parts = [_markdown(headers(comparison), rows), f"{_caption(comparison)}\n"]
    for section in sections(comparison):
        parts += [f"{section.heading}\n", _markdown(section.headers, section.rows)]
        parts += [f"{section.note}\n"] if section.note else []
    if claims := suite_claims(comparison):
        parts.append("".join(f"- {claim}\n" for claim in claims))
    return "\n".join(parts)


def _markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells] for cells in rows]
    return markdown_table(
        [header.replace("\n", " ") for header in headers], [[f"`{name}`", *cells] for name, *cells in escaped]
    )


def sections(comparison: ComparisonRecord) -> list[Section]:
    """Return a suite's further tables: outcomes of its runs, the papers' numbers beside ours."""
    suite = SUITES.get(comparison.suite or "")
    if suite is None:
        return []
    outcomes = [stability_section(comparison)] if suite.stability else []
    return outcomes + published_sections(comparison, suite)


def suite_claims(comparison: ComparisonRecord) -> list[str]:
    suite = SUITES.get(comparison.suite or "")
    return list(suite.claims) if suite else []


def reading(comparison: ComparisonRecord) -> str:
    """Return the result in a sentence for each baseline."""
    return " ".join(
        _group_reading(comparison, [result for result in comparison.results if result.name in names])
        for names in comparison.groups
    )


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
        over = "" if len(comparison.seeds) == 1 else f", over {seeds(len(comparison.seeds))}"
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


def _caption(comparison: ComparisonRecord) -> str:
    """The result in words, and how to read the table's intervals where it has any."""
    judged = any(result.verdict in ("lower", "higher", "unclear") for result in comparison.results)
    return f"{reading(comparison)} {INTERVAL_NOTE}" if judged else reading(comparison)


def remarks(comparison: ComparisonRecord) -> list[str]:
    """Return the plan's notes, then every run that is missing or diverged and whatever makes runs hard to compare."""
    lines = list(comparison.notes)
    for result in comparison.results:
        if absent := [str(seed) for seed in comparison.seeds if result.state(seed) == "missing"]:
            lines.append(f"{result.name}: no finished run yet for seed{'s' * (len(absent) > 1)} {listed(absent)}.")
        for seed, run in sorted(result.finals.items()):
            if run.diverged:
                step, why = run.diverged
                lines.append(f"{result.name}, seed {seed}: diverged at step {step:,} ({why}); left out of every mean.")
    rates = comparison.grid.learning_rates if comparison.grid else []
    for name, rate in product(comparison.architectures, rates):
        tried = comparison.grid_runs.get((name, rate))
        if tried is None or tried.state == "missing":
            lines.append(f"{name}, learning rate {rate:g} of the search: no finished run yet.")
        elif tried.diverged:
            lines.append(f"{name}, learning rate {rate:g} of the search: diverged at step {tried.diverged[0]:,}.")
    return lines + _unlike_runs(comparison)


def _unlike_runs(comparison: ComparisonRecord) -> list[str]:
    """Data, batches or lengths in which runs differ that are compared."""
    lines = []
    if len({run.data["sha256"] for run in comparison.finals}) > 1:
        lines.append("The runs did not all use the same data; their losses cannot be compared.")
    groups = [
        [run for result in comparison.results if result.name in names for run in result.finals.values()]
        for names in comparison.groups
    ]
    for seed in comparison.seeds:
        if any(len({run.batch_plan["sha256"] for run in runs if run.seed == seed}) > 1 for runs in groups):
            lines.append(f"Seed {seed}: the runs did not all see the same batches; their differences are not paired.")
    if any(len({run.tokens for run in runs if run.loss is not None}) > 1 for runs in groups):
        lines.append("The runs were not all trained on the same number of tokens.")
    return lines


def result_cells(comparison: ComparisonRecord, result: Result) -> list[str]:
    """Return one row of the table, as text; a line break separates a value from a remark on it."""
    reference = (result.baseline or result).kv_bytes
    run, kv_bytes = result.any_run, result.kv_bytes
    states = [result.state(seed) for seed in comparison.seeds]
    scores = [_with_spread(list(result.scores.values()))] if result.scores else []
    scores += [f"{states.count(state)} {state}" for state in ("diverged", "missing") if state in states]
    speeds = [run.tokens_per_second for run in result.finals.values() if run.loss is not None and run.tokens_per_second]
    return [
        result.name,
        f"{compact(run.parameters['total'])} ({compact(run.parameters['non_embedding'])})" if run else ABSENT,
        (f"{kv_bytes:,}" + (f" ({percent(kv_bytes, reference)})" if reference else "")) if kv_bytes else ABSENT,
        "\n".join(scores),
        "baseline" if result.baseline is None else _difference(result.difference, len(comparison.seeds)),
        ABSENT if result.learning_rate is None else f"{result.learning_rate:g}",
        f"{np.mean(speeds):,.0f}" if speeds else ABSENT,
    ]


def _difference(difference: PairedDifference | None, planned: int) -> str:
    if difference is None:
        return ABSENT
    spread = "" if difference.half_width is None else f" ± {difference.half_width:.4f}"
    pairs = len(difference.by_seed)
    return f"{signed(difference.mean)}{spread}" + ("" if pairs == planned else f"\n{seeds(pairs)}")


def _with_spread(values: Sequence[float]) -> str:
    deviation = standard_deviation(values)
    return f"{np.mean(values):.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")
