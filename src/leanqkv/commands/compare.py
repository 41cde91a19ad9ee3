"""`leanqkv compare` and `report`."""

import math
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import LeanError
from ..job import check_out
from . import options
from .options import (
    NAME_HELP,
    ClusterOptions,
    ContextLength,
    DataOptions,
    Device,
    MicroBatchSize,
    PrecisionOption,
    RecipeOptions,
    console,
    option_groups,
    outcome,
    prepare,
    recipe_overrides,
)

if TYPE_CHECKING:
    from ..compare.suite import Comparison


LearningRateGrid = Annotated[
    str | None,
    typer.Option(help="1e-3,2e-3,3e-3: search every model's learning rate on a seed of its own, report its best."),
]


def _list_suites(asked: bool) -> None:
    if not asked:
        return
    from ..compare.suites import SUITES

    for name, suite in SUITES.items():
        runs = suite.scales["tiny"].runs
        console.print(
            f"{name:16}{runs:4} runs at tiny  {suite.title} ({suite.source})", highlight=False, soft_wrap=True
        )
    raise typer.Exit


@option_groups
def compare(
    *,
    out: Annotated[Path, typer.Option(help="Directory of the comparison; goes on where an earlier start left off.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"A suite, or models, the baseline first: {NAME_HELP}", show_default=False),
    ] = None,
    suite: Annotated[str | None, typer.Option(help="The same as its name alone.", show_default=False)] = None,
    scale: Annotated[
        str | None, typer.Option(help="Of a suite: tiny (the default), small or paper.", show_default=False)
    ] = None,
    _list: Annotated[
        bool, typer.Option("--list", is_eager=True, callback=_list_suites, help="List the suites, and stop.")
    ] = False,
    data: DataOptions,
    recipe: RecipeOptions,
    cluster: ClusterOptions,
    seeds: Annotated[int | None, typer.Option(help="Paired seeds. Default: the suite's, else 3.")] = None,
    lr_grid: LearningRateGrid = None,
    grid_steps: Annotated[
        int | None,
        typer.Option(help="With --lr-grid: steps of the search, with as short a schedule.", show_default=False),
    ] = None,
    micro_batch_size: MicroBatchSize = None,
    context_length: ContextLength = None,
    precision: PrecisionOption = "auto",
    device: Device = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time. Default: one a core for small models on a CPU, else 1.")
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option()] = None,
    evaluation_sequences: Annotated[int | None, typer.Option()] = None,
) -> None:
    """Train several models on the same batches and seeds, and report paired differences.

    leanqkv compare quickstart --out runs/quickstart

    leanqkv compare --suite kv-sharing --scale small --seeds 3 --out runs/kv-sharing

    leanqkv compare small small+skipv1 small+nonlinear-query --seeds 3 --steps 600 --out runs/mine

    leanqkv compare gpt2-124m gpt2-124m+skipv1 --launcher submitit --partition gpu --out runs/gpt2
    """
    check_out(out, "comparison")
    if lr_grid is not None and recipe.learning_rate is not None:
        raise LeanError("--lr-grid and --learning-rate clash: the grid decides the learning rate; use one of them")
    if grid_steps is not None and lr_grid is None:
        raise LeanError("--grid-steps goes with --lr-grid; leave it out")
    from ..compare.suites import choose

    where = cluster.chosen()
    chosen = choose(names or [], suite, scale)
    comparison = replace(
        chosen,
        seeds=tuple(range(seeds)) if seeds else chosen.seeds,
        recipe=recipe_overrides(**vars(recipe)),
        learning_rates=None if lr_grid is None else learning_rates("--lr-grid", lr_grid),
        grid_steps=grid_steps,
        context_length=context_length,
        micro_batch_size=micro_batch_size,
        evaluate_every=evaluate_every or chosen.evaluate_every,
        command=f"{options.PROGRAM} {shlex.join(sys.argv[1:])}",
    )
    prepared = _prepare(comparison, data)
    sequences = evaluation_sequences or prepared.evaluation_size(chosen.evaluation_sequences)
    comparison = replace(comparison, evaluation_sequences=sequences)
    if differing := comparison.recipe_differences:
        console.print(f"recipes: the models differ in {' and '.join(differing)}", highlight=False)
    train_with_display(comparison, prepared, out, precision=precision, device=device, jobs=jobs, cluster=where)
    _show_report(out)


def _prepare(comparison: "Comparison", options: DataOptions) -> Any:
    """The data of the command line, or else the comparison's own."""
    if options.data is None:
        options = replace(options, data=comparison.data, tokenizer=options.tokenizer or comparison.tokenizer)
    return prepare(options, [*comparison.configs.values()])


def train_with_display(comparison: "Comparison", data: Any, out: Path, **options: Any) -> None:
    """Run a comparison with a bar for every run; `options` are those of `run_comparison`."""
    from ..compare.comparison import PlannedRun, Update, run_comparison
    from ..progress import training_display

    def label(job: PlannedRun) -> str:
        role = f" lr {job.spec.recipe.learning_rate:g}" if job.spec.role == "grid" else ""
        return f"{job.spec.name}{role} seed {job.spec.seed}"

    with training_display() as display:

        def on_update(update: Update) -> None:
            job, steps = update.job, update.job.spec.recipe.steps
            if update.record is not None:
                display.finish(label(job), steps, outcome(update.record))
            else:
                display.update(label(job), update.step, steps, update.loss, update.tokens_per_second)

        run_comparison(
            comparison,
            data,
            out,
            on_message=partial(console.print, highlight=False),
            on_jobs=lambda jobs: display.start(sum(job.spec.recipe.steps for job in jobs)),
            on_update=on_update,
            **options,
        )


def learning_rates(option: str, text: str, below: float = math.inf) -> tuple[float, ...]:
    """Return the learning rates that an option lists.

    Raises:
        LeanError: not positive numbers under `below` between commas, or one of them twice.
    """
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise LeanError(f"{option} takes learning rates between commas, 1e-3,2e-3; found {text!r}") from None
    if any(not 0 < rate < below for rate in rates) or len({*rates}) < len(rates):
        bound = "" if below == math.inf else f" below {below:g}"
        raise LeanError(f"{option} takes positive learning rates{bound}, each once, found {text!r}")
    return rates


def report(
    directory: Annotated[
        Path, typer.Argument(help="Directory of a comparison, a bench, an analysis, a demo or a conversion.")
    ],
) -> None:
    """Make the table and report.html again, from the records alone."""
    from ..analyze.record import RECORD as ANALYSIS
    from ..records import reading
    from ..report import analysis, bench, conversion, demo

    for name, write, table in (
        (bench.RECORD, bench.write_page, bench.table),
        (ANALYSIS, analysis.write_page, analysis.terminal),
        (demo.RECORD, demo.write_page, demo.terminal_table),
        (conversion.RECORD, conversion.write_pages, conversion.terminal_table),
    ):
        if (directory / name).exists():
            page = write(directory)
            with reading(directory / name, "make it again in another --out") as record:
                console.print(table(record))
            console.print(f"report: {page}", highlight=False, soft_wrap=True)
            return
    _show_report(directory)


def _show_report(directory: Path) -> None:
    """Write a comparison's table and page, and print its result."""
    from ..compare.records import load_comparison
    from ..report.comparison import terminal_report
    from ..report.comparison_page import write_report

    page = write_report(directory)
    console.print(terminal_report(load_comparison(directory)))
    console.print(f"report: {page}", highlight=False, soft_wrap=True)
