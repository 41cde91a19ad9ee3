"""`leanqkv compare` and `report`."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..environment import without_places
from ..errors import LeanError, needs
from ..job import check_out, check_out_early
from . import options
from .options import NAME_HELP, ClusterOptions, DataOptions, RecipeOptions, changed, console, outcome, prepare
from .texts import TaskScoring

if TYPE_CHECKING:
    from ..compare.suite import Comparison


def _list_suites(asked: bool) -> None:
    if not asked:
        return
    from ..compare.suites import SUITES

    for name, suite in SUITES.items():
        runs = suite.scales["tiny"].runs
        console.print(f"{name:16}{runs:4} runs at tiny  {suite.title} ({suite.source})", soft_wrap=True)
    raise typer.Exit


def compare(
    *,
    out: Path,
    names: Annotated[
        list[str] | None, typer.Argument(help=f"A suite, or models, the baseline first: {NAME_HELP}")
    ] = None,
    suite: str | None = None,
    scale: str | None = None,
    base: str | None = None,
    _list: Annotated[bool, typer.Option("--list", is_eager=True, callback=_list_suites)] = False,
    data: DataOptions,
    recipe: RecipeOptions,
    cluster: ClusterOptions,
    tasks: TaskScoring,
    seeds: int | None = None,
    lr_grid: str | None = None,
    grid_steps: int | None = None,
    micro_batch_size: int | None = None,
    context_length: int | None = None,
    precision: str = "auto",
    device: str | None = None,
    jobs: int | None = None,
    evaluate_every: int | None = None,
    evaluation_sequences: int | None = None,
    shard: str | None = None,
) -> None:
    """Train several models on the same batches and seeds, and report paired differences.

    leanqkv compare quickstart --out runs/quickstart

    leanqkv compare --suite kv-sharing --scale small --seeds 3 --out runs/kv-sharing

    leanqkv compare query --base encoder-tiny --out runs/encoder

    leanqkv compare small small+skipv1 small+nonlinear-query --seeds 3 --steps 600 --out runs/mine

    leanqkv compare gpt2-124m gpt2-124m+skipv1 --launcher submitit --partition gpu --out runs/gpt2

    torchrun --nproc-per-node 8 -m leanqkv compare llama-1b llama-1b+skipv1 --shard fsdp --out runs/llama

    Options:
        out: Directory of the comparison. Rerun to resume.
        suite: A suite by name, the same as giving its name alone.
        scale: Scale of a suite: tiny (default), small or paper.
        base: Build a suite's models on another base of the same shape, such as encoder-tiny or tiny+mask_type=prefix.
        _list: List the suites, and stop.
        seeds: Number of paired seeds. Default: the suite's, else 3.
        lr_grid: Learning rates such as 1e-3,2e-3,3e-3: search the best for every model on a separate seed.
        grid_steps: With --lr-grid: steps of the search, with a schedule of the same length.
        jobs: Parallel runs. Default: one per core for small models on a CPU, else 1. Under torchrun 1.
        shard: fsdp: split weights and optimizer over the processes of torchrun, or of each job of --launcher submitit.
    """
    check_out_early(out, "comparison")
    from ..compare.comparison import processes_of_a_run
    from ..compare.suites import choose
    from ..train.processes import first_decides, is_first

    asked: dict[str, Any] = {"seeds": tuple(range(seeds or 0)), "evaluate_every": evaluate_every}
    asked["tasks"] = tuple(map(str.strip, tasks.tasks.split(","))) if tasks.tasks else ()

    def planned() -> "Comparison":
        check_out(out, "comparison")
        return replace(
            choose(names or [], suite, scale, base),
            **{field: value for field, value in asked.items() if value},
            recipe=changed(recipe),
            learning_rates=_search(lr_grid, grid_steps, recipe),
            grid_steps=grid_steps,
            context_length=context_length,
            micro_batch_size=micro_batch_size,
            limit=tasks.limit,
            command=f"{options.PROGRAM} {without_places(sys.argv[1:])}",
        )

    how: dict[str, Any] = {"device": device, "jobs": jobs, "cluster": cluster.chosen()}
    processes_of_a_run(shard=shard, **how)
    # Of torchrun's processes the first one plans, and reads the data before the others do.
    comparison = first_decides(planned)
    if data.data is None:
        data = replace(data, data=comparison.data, tokenizer=data.tokenizer or comparison.tokenizer)
    prepared = first_decides(lambda: prepare(data, [*comparison.configs.values()]))
    if not is_first():  # another machine may have another cache
        prepared = prepare(data, [*comparison.configs.values()])
    sequences = evaluation_sequences or prepared.evaluation_size(comparison.evaluation_sequences)
    comparison = replace(comparison, evaluation_sequences=sequences, shard=shard)
    if differing := comparison.recipe_differences:
        console.print(f"recipes: the models differ in {' and '.join(differing)}")
    train_with_display(comparison, prepared, out, precision=precision, include_path=tasks.include_path, **how)
    if is_first():
        from ..report.comparison_page import KIND
        from ..report.page import written

        page = KIND.write(out)
        console.print(KIND.show(out))
        console.print(written(page), soft_wrap=True)


def _search(lr_grid: str | None, grid_steps: int | None, recipe: RecipeOptions) -> tuple[float, ...] | None:
    """Return the learning rates to search; None: those of the recipes."""
    if grid_steps is not None and lr_grid is None:
        raise LeanError("--grid-steps goes with --lr-grid; leave it out")
    if lr_grid is None:
        return None
    if recipe.learning_rate is not None:
        raise LeanError("--lr-grid and --learning-rate clash: the grid decides the learning rate; use one of them")
    return learning_rates("--lr-grid", lr_grid)


def train_with_display(comparison: "Comparison", data: Any, out: Path, **options: Any) -> None:
    """Run a comparison with a bar for every run; `options` are those of `run_comparison`."""
    from ..compare.comparison import Update, run_comparison
    from ..progress import training_display

    with training_display() as display:

        def on_update(update: Update) -> None:
            spec, steps = update.job.spec, update.job.spec.recipe.steps
            role = f" lr {spec.recipe.learning_rate:g}" if spec.role == "grid" else ""
            label = f"{spec.name}{role} seed {spec.seed}"
            if update.record is not None:
                display.finish(label, steps, outcome(update.record))
            else:
                display.update(label, update.step, steps, update.loss, update.tokens_per_second)

        run_comparison(
            comparison,
            data,
            out,
            on_message=console.print,
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
    directory: Annotated[Path, typer.Argument(help="Directory of a comparison, bench, conversion or frontier.")],
) -> None:
    """Rewrite the table and the page of a directory from its records."""
    from ..report.kinds import kind_of

    kind = kind_of(directory)
    page = kind.write(directory)
    if page is None:
        needs("report", "matplotlib")
    console.print(kind.show(directory))
    console.print(f"report: {page}", soft_wrap=True)
