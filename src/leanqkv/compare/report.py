"""From the records of a comparison to a terminal table, a Markdown table and one self-contained HTML page."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..files import write_text
from . import figures
from . import published as papers
from .records import ACCURACY, LOSS, Comparison, Result, Run, load_comparison, state_of
from .stability import STABILITY_HEADERS, STABILITY_NOTE, stability_rows
from .statistics import PairedDifference, average, relative_improvement, standard_deviation
from .suite import Suite
from .suites import SUITES
from .text import ABSENT, compact, listed, percent, seeds, signed

WHOLE = ("tokens/s",)  # where a terminal is too narrow the columns before it wrap
DIFFERENCE = 4  # the place of that column
UNITS = {
    LOSS: "Validation loss is in nats per token",
    ACCURACY: "Test accuracy is the share of test images whose class is found",
}
_RUN = ("difference to baseline", "tokens/s", "minutes")
RUN_HEADERS = {
    LOSS: ("architecture", "seed", "validation loss", "perplexity", *_RUN),
    ACCURACY: ("architecture", "seed", "validation loss", "test accuracy", *_RUN),
}
INTERVAL_NOTE = (
    "Differences are paired by seed; after ± stands half of the 95% Student t interval. "
    "“Clearly” means that this interval leaves out zero; it is not corrected for comparing several architectures."
)


def headers(comparison: Comparison) -> tuple[str, ...]:
    return (
        "model",
        "parameters\n(non-emb.)",
        "KV bytes per\ntoken (bf16)",
        f"{comparison.measure.name}\nmean ± s.d.",
        "difference to\nbaseline, 95%",
        "learning\nrate",
        "tokens/s",
    )


def terminal_report(comparison: Comparison) -> RenderableType:
    """The result, and for a suite the papers' numbers beside it and its outcomes, in 100 columns."""
    parts: list[RenderableType] = [terminal_table(comparison)]
    for section in _sections(comparison):
        table = _plain_table(section.heading, section.note, section.headers)
        for cells in section.rows:
            table.add_row(_name(cells[0]), *map(Text, cells[1:]))
        parts += ["", table]
    if claims := _claims(comparison):
        parts += ["", Text("\n".join(claims))]
    return Group(*parts)


def terminal_table(comparison: Comparison) -> Table:
    """The result in 100 columns, with a caption that says which differences are clear of zero."""
    table = _plain_table(comparison.title, _caption(comparison), headers(comparison))
    better = comparison.measure.better
    styles = dict.fromkeys(("lower", "higher"), "bold red") | {better: "bold green"}
    for result in comparison.results:
        cells = [Text(cell) for cell in _cells(comparison, result)]
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


def markdown_table(comparison: Comparison) -> str:
    """The same table for GitHub; a difference clear of zero is bold."""
    columns = headers(comparison)
    lines = [[header.replace("\n", " ") for header in columns], ["---", *["---:"] * (len(columns) - 1)]]
    for result in comparison.results:
        cells = [*map(_cell, _cells(comparison, result))]
        if result.verdict in ("lower", "higher"):
            cells[DIFFERENCE] = f"**{cells[DIFFERENCE]}**"
        lines.append([f"`{cells[0]}`", *cells[1:]])
    parts = [_markdown(lines), f"{_caption(comparison)}\n"]
    for section in _sections(comparison):
        aligned = ["---", *["---:"] * (len(section.headers) - 1)]
        lines = [[header.replace("\n", " ") for header in section.headers], aligned]
        lines += [[f"`{cells[0]}`", *map(_cell, cells[1:])] for cells in section.rows]
        parts += [f"{section.heading}\n", _markdown(lines), *([f"{section.note}\n"] if section.note else [])]
    if claims := _claims(comparison):
        parts.append("".join(f"- {claim}\n" for claim in claims))
    return "\n".join(parts)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


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


@dataclass(frozen=True)
class Section:
    """A table that follows the result."""

    heading: str
    note: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


def _suite(comparison: Comparison) -> Suite | None:
    return SUITES.get(comparison.suite or "")


def _sections(comparison: Comparison) -> list[Section]:
    """What a suite's report holds beyond the result: outcomes of its runs, the papers' numbers beside ours."""
    suite = _suite(comparison)
    if suite is None:
        return []
    found = []
    if suite.stability:
        heading = f"Which runs diverged. Here: {papers.here(comparison)}."
        found.append(Section(heading, STABILITY_NOTE, STABILITY_HEADERS, stability_rows(comparison)))
    for table in papers.published_tables(comparison, suite):
        note = " ".join(filter(None, [papers.caveat(comparison), table.note]))
        found.append(Section(table.heading, note, papers.HEADERS, table.rows))
    return found


def _claims(comparison: Comparison) -> list[str]:
    suite = _suite(comparison)
    return list(suite.claims) if suite else []


def reading(comparison: Comparison) -> str:
    """The result in a sentence for each baseline."""
    return " ".join(
        _group_reading(comparison, [result for result in comparison.results if result.name in names])
        for names in comparison.groups
    )


def _group_reading(comparison: Comparison, group: Sequence[Result]) -> str:
    baseline, *others = group
    size = baseline.kv_bytes

    def item(result: Result) -> str:
        assert result.difference is not None
        same = size is None or result.kv_bytes in (None, size)
        cache = "" if same else f" with {percent(result.kv_bytes, size)} of the KV cache"
        return f"{result.name} ({signed(result.difference.mean)}{cache})"

    clauses = []
    for verdict, words in (
        ("lower", "clearly lower for"),
        ("higher", "clearly higher for"),
        ("unclear", "not clearly different for"),
        ("one seed", "known from one seed only, too few to judge, for"),
    ):
        if chosen := [item(result) for result in others if result.verdict == verdict]:
            clauses.append(f"{words} {listed(chosen)}")
    fallen = [r.name for r in group if all(r.state(seed) == "diverged" for seed in comparison.seeds)]
    waiting = [result.name for result in others if result.verdict == "none" and result.name not in fallen]
    if clauses:
        open_ends = f"; {listed(waiting)} cannot be compared yet" if waiting else ""
        over = "" if len(comparison.seeds) == 1 else f", over {seeds(len(comparison.seeds))}"
        said = f"Against {baseline.name}{over}, {comparison.measure.name} is {'; '.join(clauses)}{open_ends}."
    elif not fallen or (waiting and baseline.name not in fallen):
        said = f"There is no difference to {baseline.name} to report yet."
    else:
        said = ""
    return " ".join(filter(None, [said, f"{listed(fallen)} diverged." if fallen else ""]))


def _caption(comparison: Comparison) -> str:
    """What the table says in words, and how to read its intervals where it has any."""
    judged = any(result.verdict in ("lower", "higher", "unclear") for result in comparison.results)
    return f"{reading(comparison)} {INTERVAL_NOTE}" if judged else reading(comparison)


def remarks(comparison: Comparison) -> list[str]:
    """The plan's notes, then every run that is missing or diverged and whatever makes runs hard to compare."""
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
        if state_of(tried) == "missing":
            lines.append(f"{name}, learning rate {rate:g} of the search: no finished run yet.")
        elif tried and tried.diverged:
            lines.append(f"{name}, learning rate {rate:g} of the search: diverged at step {tried.diverged[0]:,}.")
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


def html_page(comparison: Comparison) -> str:
    """The report: one file that needs nothing else; the same records give the same bytes."""
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        comparison=comparison,
        css=Markup((here / "report.css").read_text(encoding="utf-8")),
        reading=reading(comparison),
        interval_note=INTERVAL_NOTE,
        finished=sum(run.loss is not None or run.diverged is not None for run in comparison.finals),
        planned=len(comparison.architectures) * len(comparison.seeds),
        headers=headers(comparison),
        rows=[(_cells(comparison, result), result.verdict) for result in comparison.results],
        difference=DIFFERENCE,
        words={"lower": "clearly lower", "higher": "clearly higher", "unclear": "not clear"},
        better=comparison.measure.better,
        unit=UNITS[comparison.measure],
        figures=_figures(comparison),
        facts=_facts(comparison),
        recipes=_recipes(comparison),
        run_headers=RUN_HEADERS[comparison.measure],
        run_rows=_run_rows(comparison),
        sections=_sections(comparison),
        claims=_claims(comparison),
        remarks=remarks(comparison),
        version=__version__,
    )


def _cells(comparison: Comparison, result: Result) -> list[str]:
    """One row of the table, as text; a line break separates a value from a remark on it."""
    reference = (result.baseline or result).kv_bytes
    run, kv_bytes = result.any_run, result.kv_bytes
    states = [result.state(seed) for seed in comparison.seeds]
    counted = [f"{states.count(state)} {state}" for state in ("diverged", "missing") if state in states]
    found = [_with_spread(list(result.scores.values()))] if result.scores else []
    speeds = [run.tokens_per_second for run in result.finals.values() if run.loss is not None and run.tokens_per_second]
    return [
        result.name,
        f"{compact(run.parameters['total'])} ({compact(run.parameters['non_embedding'])})" if run else ABSENT,
        (f"{kv_bytes:,}" + (f" ({percent(kv_bytes, reference)})" if reference else "")) if kv_bytes else ABSENT,
        "\n".join([*found, *counted]),
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


def _with_spread(values: Sequence[float]) -> str:
    deviation = standard_deviation(values)
    return f"{np.mean(values):.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")
