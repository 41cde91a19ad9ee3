"""From the records of a comparison to a terminal table, a Markdown table and one self-contained HTML page."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..files import write_text
from . import figures
from .records import Comparison, Result, load_comparison, state_of
from .statistics import PairedDifference, average, relative_improvement, standard_deviation

HEADERS = (
    "model",
    "parameters\n(non-emb.)",
    "KV bytes per\ntoken (bf16)",
    "validation loss\nmean ± s.d.",
    "difference to\nbaseline, 95%",
    "learning\nrate",
    "tokens/s",
)
WHOLE = ("tokens/s",)  # where a terminal is too narrow the columns before it wrap
DIFFERENCE = 4  # the place of that column
ABSENT = "–"
INTERVAL_NOTE = (
    "Differences are paired by seed; after ± stands half of the 95% Student t interval. "
    "“Clearly” means that this interval leaves out zero; it is not corrected for comparing several architectures."
)


def terminal_table(comparison: Comparison) -> Table:
    """The result in 100 columns, with a caption that says which differences are clear of zero."""
    table = Table(
        title=Text(comparison.title),
        caption=Text(f"\n{_caption(comparison)}"),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for place, header in enumerate(HEADERS):
        table.add_column(header, justify="right" if place else "left", no_wrap=header in WHOLE, overflow="fold")
    styles = {"lower": "bold green", "higher": "bold red"}
    for result in comparison.results:
        cells = [Text(cell) for cell in _cells(comparison, result)]
        cells[DIFFERENCE].stylize(styles.get(result.verdict, ""))
        # Names are long: what extends the baseline's says only by what, and breaks between its mechanisms.
        name = re.sub(rf"^{re.escape(comparison.baseline)}(?=\+)", "", result.name)
        cells[0] = Text(re.sub(r"(?<=.)\+", "\n+", name))
        table.add_row(*cells)
    return table


def markdown_table(comparison: Comparison) -> str:
    """The same table for GitHub; a difference clear of zero is bold."""
    lines = [[header.replace("\n", " ") for header in HEADERS], ["---", *["---:"] * (len(HEADERS) - 1)]]
    for result in comparison.results:
        cells = [cell.replace("|", "\\|").replace("\n", "<br>") for cell in _cells(comparison, result)]
        if result.verdict in ("lower", "higher"):
            cells[DIFFERENCE] = f"**{cells[DIFFERENCE]}**"
        lines.append([f"`{cells[0]}`", *cells[1:]])
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{rows}\n{_caption(comparison)}\n"


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


def reading(comparison: Comparison) -> str:
    """The result in one sentence."""
    size = comparison.results[0].kv_bytes

    def item(result: Result) -> str:
        assert result.difference is not None
        same = size is None or result.kv_bytes in (None, size)
        cache = "" if same else f" with {_percent(result.kv_bytes, size)} of the KV cache"
        return f"{result.name} ({_signed(result.difference.mean)}{cache})"

    others = comparison.results[1:]
    clauses = []
    for verdict, words in (
        ("lower", "clearly lower for"),
        ("higher", "clearly higher for"),
        ("unclear", "not clearly different for"),
        ("one seed", "known from one seed only, too few to judge, for"),
    ):
        if chosen := [item(result) for result in others if result.verdict == verdict]:
            clauses.append(f"{words} {_listed(chosen)}")
    waiting = [result.name for result in others if result.verdict == "none"]
    if not clauses:
        return f"There is no difference to {comparison.baseline} to report yet."
    open_ends = f"; {_listed(waiting)} cannot be compared yet" if waiting else ""
    over = "" if len(comparison.seeds) == 1 else f", over {_seeds(len(comparison.seeds))}"
    return f"Against {comparison.baseline}{over}, validation loss is {'; '.join(clauses)}{open_ends}."


def _caption(comparison: Comparison) -> str:
    """What the table says in words, and how to read its intervals where it has any."""
    judged = any(result.verdict in ("lower", "higher", "unclear") for result in comparison.results)
    return f"{reading(comparison)} {INTERVAL_NOTE}" if judged else reading(comparison)


def remarks(comparison: Comparison) -> list[str]:
    """The plan's notes, then every run that is missing or diverged and whatever makes runs hard to compare."""
    lines = list(comparison.notes)
    for result in comparison.results:
        if absent := [str(seed) for seed in comparison.seeds if result.state(seed) == "missing"]:
            lines.append(f"{result.name}: no finished run yet for seed{'s' * (len(absent) > 1)} {_listed(absent)}.")
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
    for seed in comparison.seeds:
        if len({run.batch_plan["sha256"] for run in comparison.finals if run.seed == seed}) > 1:
            lines.append(f"Seed {seed}: the runs did not all see the same batches; their differences are not paired.")
    if len({run.tokens for run in comparison.finals if run.loss is not None}) > 1:
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
        headers=HEADERS,
        rows=[(_cells(comparison, result), result.verdict) for result in comparison.results],
        difference=DIFFERENCE,
        words={"lower": "clearly lower", "higher": "clearly higher", "unclear": "not clear"},
        figures=_figures(comparison),
        facts=_facts(comparison),
        recipes=_recipes(comparison),
        run_rows=_run_rows(comparison),
        remarks=remarks(comparison),
        version=__version__,
    )


def _cells(comparison: Comparison, result: Result) -> list[str]:
    """One row of the table, as text; a line break separates a value from a remark on it."""
    reference = comparison.results[0].kv_bytes
    run, kv_bytes = result.any_run, result.kv_bytes
    states = [result.state(seed) for seed in comparison.seeds]
    counted = [f"{states.count(state)} {state}" for state in ("diverged", "missing") if state in states]
    loss = [_with_spread(list(result.losses.values()))] if result.losses else []
    speeds = [run.tokens_per_second for run in result.finals.values() if run.loss is not None and run.tokens_per_second]
    return [
        result.name,
        f"{_compact(run.parameters['total'])} ({_compact(run.parameters['non_embedding'])})" if run else ABSENT,
        (f"{kv_bytes:,}" + (f" ({_percent(kv_bytes, reference)})" if reference else "")) if kv_bytes else ABSENT,
        "\n".join([*loss, *counted]),
        "baseline" if result.name == comparison.baseline else _difference(result.difference, len(comparison.seeds)),
        ABSENT if result.learning_rate is None else f"{result.learning_rate:g}",
        f"{np.mean(speeds):,.0f}" if speeds else ABSENT,
    ]


def _difference(difference: PairedDifference | None, planned: int) -> str:
    if difference is None:
        return ABSENT
    spread = "" if difference.half_width is None else f" ± {difference.half_width:.4f}"
    pairs = len(difference.by_seed)
    return f"{_signed(difference.mean)}{spread}" + ("" if pairs == planned else f"\n{_seeds(pairs)}")


def _figures(comparison: Comparison) -> list[tuple[str, str, figures.Drawing]]:
    """Heading, caption and drawing of every figure that has something to show."""
    results, found = comparison.results, []
    curves = [
        figures.Series(
            result.name,
            result.style,
            average(result.curves()),
            [
                (run.diverged[0], max(run.evaluations.items(), default=(0, math.inf))[1])
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
                "Validation loss during training",
                "Lines are means over seeds, bands reach from the lowest to the highest seed. The first evaluations, "
                "where every model is still bad, lie above the upper edge.",
                figures.loss_curves(curves, per_step.pop() if len(per_step) == 1 else None),
            )
        )
    gains = [
        figures.Series(result.name, result.style, relative_improvement(result.curves(), results[0].curves()))
        for result in results[1:]
    ]
    gains = [series for series in gains if series.points]
    if gains:
        found.append(
            (
                f"Improvement over {comparison.baseline}",
                f"How much lower the validation loss is than that of {comparison.baseline} at the same step and seed, "
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
    if points:
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
                f"{run.recipe['steps']:,} steps of {run.recipe['batch_size']:,} sequences of {run.context_length:,} "
                f"tokens: {run.recipe['steps'] * run.recipe['batch_size'] * run.context_length:,} tokens"
                for run in runs
            ),
        ),
        ("Validation", _distinct(f"{run.batch_plan['evaluation_sequences']:,} sequences" for run in runs)),
        ("Seeds", [", ".join(map(str, comparison.seeds))]),
        (
            "Learning rates",
            [
                f"for each architecture the one of {_listed([f'{rate:g}' for rate in grid.learning_rates])} with the "
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
    """Every final run: architecture, seed, loss, perplexity, difference to the baseline, tokens/s, minutes."""
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
                    f"{run.perplexity:,.2f}" if run and run.perplexity is not None else ABSENT,
                    ABSENT if difference is None else _signed(difference),
                    f"{run.tokens_per_second:,.0f}" if run and run.tokens_per_second else ABSENT,
                    f"{run.seconds / 60:,.1f}" if run else ABSENT,
                ]
            )
    return rows


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


def _seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _percent(part: int | None, whole: int | None) -> str:
    return f"{100 * part / whole:.0f}%" if part is not None and whole else ABSENT


def _compact(count: int) -> str:
    """Three digits: 786k, 1.34M, 124M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{float(f'{count / size:.3g}'):g}{unit}"
    return str(count)


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
