"""`leanqkv compare` and `report`."""

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    NAME_HELP,
    BatchSize,
    ContextLength,
    Data,
    Device,
    LearningRate,
    MaxDocuments,
    MicroBatchSize,
    PrecisionOption,
    Steps,
    TextField,
    Tokenizer,
    WarmupSteps,
    WeightDecay,
    console,
    evaluation_size,
    outcome,
    prepare,
    recipe_overrides,
)

if TYPE_CHECKING:
    from ..compare.suite import Comparison


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


def compare(
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
    data: Data = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Paired seeds. Default: the suite's, else 3.")] = None,
    steps: Steps = None,
    lr_grid: Annotated[
        str | None,
        typer.Option(help="1e-3,2e-3,3e-3: search every model's learning rate on a seed of its own, report its best."),
    ] = None,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    context_length: ContextLength = None,
    learning_rate: LearningRate = None,
    weight_decay: WeightDecay = None,
    warmup_steps: WarmupSteps = None,
    precision: PrecisionOption = "auto",
    device: Device = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time. Default: one a core for small models on a CPU, else 1.")
    ] = None,
    tokenizer: Tokenizer = None,
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    evaluate_every: Annotated[int | None, typer.Option(min=1)] = None,
    evaluation_sequences: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Train several models on the same batches and seeds, and report paired differences.

    leanqkv compare quickstart --out runs/quickstart

    leanqkv compare --suite kv-sharing --scale small --seeds 3 --out runs/kv-sharing

    leanqkv compare vit-digits vit-digits+skipv1 --data digits --out runs/images

    leanqkv compare small small+skipv1 small+nonlinear-query --seeds 3 --steps 600 --out runs/mine
    """
    from ..compare.suites import choose
    from ..errors import LeanError
    from ..presets import preset

    if lr_grid is not None and learning_rate is not None:
        raise LeanError("--lr-grid and --learning-rate clash: the grid decides the learning rate; use one of them")
    chosen = choose(names or [], suite, scale)
    comparison = replace(
        chosen,
        seeds=tuple(range(seeds)) if seeds else chosen.seeds,
        recipe=recipe_overrides(
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
        ),
        learning_rates=_grid(lr_grid),
        context_length=context_length,
        micro_batch_size=micro_batch_size,
        evaluate_every=evaluate_every or chosen.evaluate_every,
        command=shlex.join(["leanqkv", *sys.argv[1:]]),
    )
    if data is None:
        data, tokenizer = chosen.data, tokenizer or chosen.tokenizer
    configs = [preset(entry.model) for entry in chosen.entries.values()]
    prepared = prepare(data, configs, tokenizer, text_field, max_documents)
    evaluated = evaluation_sequences or evaluation_size(prepared, chosen.evaluation_sequences)
    comparison = replace(comparison, evaluation_sequences=evaluated)
    train_with_display(comparison, prepared, out, precision=precision, device=device, jobs=jobs)
    _show_report(out)


def train_with_display(comparison: "Comparison", data: Any, out: Path, **options: Any) -> None:
    """Run a comparison with a bar for every run; `options` are those of `run_comparison`."""
    from ..compare.comparison import Job, Update, run_comparison
    from ..progress import training_display

    def label(job: Job) -> str:
        role = f" lr {job.spec.recipe.learning_rate:g}" if job.spec.role == "grid" else ""
        return f"{job.spec.name}{role} seed {job.spec.seed}"

    with training_display() as display:

        def on_jobs(jobs: Sequence[Job]) -> None:
            display.start(sum(job.spec.recipe.steps for job in jobs))

        def on_update(update: Update) -> None:
            job, steps = update.job, update.job.spec.recipe.steps
            if update.record is not None:
                display.finish(label(job), steps, outcome(update.record))
            else:
                display.update(label(job), update.step, steps, update.loss, update.tokens_per_second)

        def on_message(text: str) -> None:
            console.print(text, highlight=False)

        run_comparison(comparison, data, out, on_message=on_message, on_jobs=on_jobs, on_update=on_update, **options)


def _grid(text: str | None) -> tuple[float, ...] | None:
    from ..errors import LeanError

    if text is None:
        return None
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise LeanError(f"--lr-grid takes learning rates between commas, 1e-3,2e-3; found {text!r}") from None
    if any(not 0 < rate < math.inf for rate in rates) or len({*rates}) < len(rates):
        raise LeanError(f"--lr-grid takes positive learning rates, each once, found {text!r}")
    return rates


def report(
    directory: Annotated[Path, typer.Argument(help="Directory of a comparison, a bench, an analysis or a demo.")],
) -> None:
    """Make the table and report.html again, from the records alone."""
    from ..analyze.record import RECORD as ANALYSIS
    from ..files import read_json
    from ..report import analysis, bench, demo

    if (directory / bench.RECORD).exists():
        page, table = bench.write_page(directory), bench.table(read_json(directory / bench.RECORD))
    elif (directory / ANALYSIS).exists():
        page, table = analysis.write_page(directory), analysis.terminal(read_json(directory / ANALYSIS))
    elif (directory / demo.RECORD).exists():
        page, table = demo.write_page(directory), demo.terminal_table(read_json(directory / demo.RECORD))
    else:
        _show_report(directory)
        return
    console.print(table)
    console.print(f"report: {page}", highlight=False, soft_wrap=True)


def _show_report(directory: Path) -> None:
    """Write a comparison's table and page, and print its result."""
    from ..compare.records import load_comparison
    from ..report.comparison import terminal_report
    from ..report.comparison_page import write_report

    page = write_report(directory)
    console.print(terminal_report(load_comparison(directory)))
    console.print(f"report: {page}", highlight=False, soft_wrap=True)
