"""`leanqkv train` and `uptrain`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..progress import console, progress_bar, training_display
from .options import (
    NAME_HELP,
    SOURCE,
    BatchSize,
    DataOptions,
    RecipeOptions,
    RunOptions,
    TeacherOptions,
    TextOptions,
    option_groups,
    outcome,
    prepare,
    recipe_overrides,
)

if TYPE_CHECKING:
    from ..errors import LeanError
    from ..model.config import LeanConfig
    from ..presets import Recipe
    from ..train import Precision, RunSpec, Step
    from ..train.tasks import Data as PreparedData


NO_TEACHER = TeacherOptions()
# Nats that a run's training loss may rise without a word.
ALARMING_RISE = 1.0


@option_groups
def train(
    name: Annotated[str, typer.Argument(help=NAME_HELP)], data: DataOptions, recipe: RecipeOptions, run: RunOptions
) -> None:
    """Train one model; the same command goes on after an interruption, with the same losses.

    Without options the published recipe of the model applies. Several processes: `torchrun --nproc-per-node 2 -m
    leanqkv train …`.

    leanqkv train small+skipv1 --steps 600 --out runs/skipv1

    leanqkv train vit-tiny+skipv1 --data cifar10 --out runs/cifar10
    """
    from .. import presets

    train_model(name, presets.preset(name), presets.recipe(name, **recipe_overrides(**vars(recipe))), data, run)


@option_groups
def uptrain(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")],
    text: TextOptions,
    run: RunOptions,
    learns: TeacherOptions,
    batch_size: BatchSize = 16,
    learning_rate: Annotated[float, typer.Option(help="Peak, as in P3's uptraining.")] = 1.5e-4,
    min_learning_rate: Annotated[float | None, typer.Option(help="Default: a tenth.", show_default=False)] = None,
    weight_decay: Annotated[float, typer.Option(help="On matrices only.")] = 0.1,
    warmup_steps: Annotated[int | None, typer.Option(help="Default: a tenth.", show_default=False)] = None,
) -> None:
    """Go on training a checkpoint, such as a converted one; dropout is off, as in the paper's uptraining.

    Its loss before the first step is in the record, and so is every validation after it. Killed and started again, the
    same command goes on, bit-identically.

    leanqkv uptrain runs/skipv1 --data book.txt --steps 300 --out runs/uptrained

    leanqkv uptrain runs/skipv1 --data book.txt --steps 300 --teacher runs/baseline --out runs/distilled
    """
    from ..checkpoints.open import open_checkpoint
    from ..model.config import LeanConfig
    from ..presets import Recipe
    from ..train.tasks import task_of

    overrides = open_checkpoint(source).config.as_overrides()
    config = LeanConfig(**{key: value for key, value in overrides.items() if not key.endswith("_dropout")})
    recipe = Recipe(
        steps,
        batch_size or 16,
        learning_rate,
        learning_rate / 10 if min_learning_rate is None else min_learning_rate,
        weight_decay,
        steps // 10 if warmup_steps is None else warmup_steps,
    )
    has_tokenizer = task_of(config, source.name).has_tokenizer
    data = DataOptions(**vars(text), tokenizer=str(source) if has_tokenizer else None)
    record = train_model(source.name, config, recipe, data, run, source, learns)
    console.print(f"validation loss before the first step: {record['evaluations'][0]['loss']:.4f}", highlight=False)


def train_model(
    name: str,
    config: "LeanConfig",
    recipe: "Recipe",
    data: DataOptions,
    run: RunOptions,
    initial: Path | None = None,
    learns: TeacherOptions = NO_TEACHER,
) -> dict[str, Any]:
    """Read the data, choose micro-batch and precision, train, and return the record.

    Of several processes the first does what comes before the training, and the others do as it says.

    Raises:
        LeanError: options that do not fit together, before anything is read or written if possible.
    """
    from ..environment import check_device
    from ..train.processes import connect, first_decides, is_first

    def read() -> "PreparedData":
        return prepare(data, [config])

    def specify() -> "tuple[RunSpec, PreparedData]":
        return _specify(name, config, recipe, read, run, initial, learns)

    connect(check_device(run.device), run.shard)
    spec, prepared = first_decides(specify)
    # Another machine may have another cache.
    return _train(spec, prepared if is_first() else read(), run, initial, learns.teacher)


def _specify(
    name: str,
    config: "LeanConfig",
    recipe: "Recipe",
    read: Callable[[], "PreparedData"],
    run: RunOptions,
    initial: Path | None,
    learns: TeacherOptions,
) -> "tuple[RunSpec, PreparedData]":
    """Return the specification of a run and its data."""
    from ..checkpoints.open import open_checkpoint
    from ..checkpoints.tensors import weights_hash
    from ..environment import check_device
    from ..train import RunSpec, Step, parse_precision
    from ..train.directory import check_out
    from ..train.tasks import check_fit, check_teacher, task_of
    from ..train.training import check_trackers

    task_of(config, name)
    teacher = learns.teacher
    check_out(run.out, initial, teacher)
    check_trackers(run.report_to or ())
    asked = parse_precision(run.precision)
    context = run.context_length or config.max_position_embeddings
    assert context is not None
    teacher_config: LeanConfig | None = None
    if teacher is not None:
        teacher_config = open_checkpoint(teacher).config
        check_teacher(name, config, teacher.name, teacher_config, context)
    prepared = read()
    evaluated = run.evaluation_sequences or prepared.evaluation_size(RunSpec.evaluation_sequences)
    check_fit(name, config, prepared, context, recipe, evaluated)
    step = Step(
        config,
        recipe.batch_size,
        context,
        check_device(run.device),
        asked,
        run.gradient_checkpointing,
        teacher_config,
        run.shard,
    )
    micro_batch_size, precision = _settle(run, step, recipe.steps)
    start: dict[str, Any] = {}
    if initial is not None:
        with progress_bar("hashing the weights"):
            start = {"role": "uptrain", "initial_sha256": weights_hash(initial)}
            if teacher is not None and teacher_config is not None:
                start |= {**asdict(learns), "teacher_sha256": weights_hash(teacher)}
                start["teacher_config"] = teacher_config.as_overrides()
                del start["teacher"]  # where it lies does not decide the numbers
    spec = RunSpec(
        name=name,
        config=config.as_overrides(),
        recipe=recipe,
        seed=run.seed,
        context_length=context,
        precision=str(precision),
        precision_timings=precision.timings,
        data_sha256=prepared.sha256,
        micro_batch_size=micro_batch_size,
        evaluation_sequences=evaluated,
        evaluate_every=run.evaluate_every,
        gradient_checkpointing=run.gradient_checkpointing,
        shard=run.shard,
        **start,
    )
    return spec, prepared


def _train(
    spec: "RunSpec", data: "PreparedData", run: RunOptions, initial: Path | None, teacher: Path | None
) -> dict[str, Any]:
    """Train, showing the progress and the outcome.

    Raises:
        LeanError: the run diverged.
    """
    from ..errors import LeanError, TimeIsUpError
    from ..train import train
    from ..train.directory import RECORD
    from ..train.processes import is_first

    with training_display() as display, _reported_once(TimeIsUpError, is_first()):
        display.start(spec.recipe.steps)
        record = train(
            spec,
            data,
            run.out,
            device=run.device,
            initial=initial,
            teacher=teacher,
            keep_checkpoints=run.keep_checkpoints,
            max_hours=run.max_hours,
            report_to=run.report_to or (),
            progress=partial(display.update, spec.name),
        )
        display.finish(spec.name, spec.recipe.steps, outcome(record))
    if record["diverged"]:
        if not is_first():
            sys.exit(2)  # it is reported once
        raise LeanError(
            f"{spec.name} diverged at step {record['diverged']['step']:,}: {record['diverged']['reason']}; no model "
            f"is written. {run.out / RECORD} has its losses; choose another --out and a smaller --learning-rate"
        )
    rise = record.get("rise")
    if rise is not None and rise["nats"] > ALARMING_RISE:
        console.print(
            f"warning: at step {rise['step']:,} the training loss was {rise['nats']:.2f} nats above the lowest one "
            "before; a smaller --learning-rate or more --warmup-steps keep it down",
            highlight=False,
        )
    files = [file for file in ("model.safetensors", "tokenizer.json", "record.json") if (run.out / file).exists()]
    console.print(f"{run.out}: {', '.join(files)}", highlight=False)
    return record


@contextmanager
def _reported_once(kind: "type[LeanError]", first: bool) -> Iterator[None]:
    """Of an error that all processes raise, let the first report it and the others end with its exit code."""
    try:
        yield
    except kind as error:
        if first:
            raise
        sys.exit(error.exit_code)


def _settle(run: RunOptions, step: "Step", steps: int) -> "tuple[int | None, Precision]":
    """Return micro-batch and precision: those asked for; else those of the run in `out`; else the best ones here."""
    from ..errors import LeanError
    from ..records import BEGUN, read_record
    from ..train import choose_micro_batch, choose_precision, free_memory, parse_precision
    from ..train.directory import AGAIN, SPEC
    from ..train.micro_batch import split_batch
    from ..train.processes import process_count

    begun = read_record(run.out / SPEC, BEGUN, AGAIN) if (run.out / SPEC).exists() else None
    micro_batch_size, precision = run.micro_batch_size, step.precision
    if micro_batch_size is None and begun is not None:
        micro_batch_size = begun.get("micro_batch_size")
    elif micro_batch_size is None:
        chosen = choose_micro_batch([step], free_memory(step.device))
        micro_batch_size = chosen.size
        console.print(str(chosen), highlight=False, soft_wrap=True)
    if precision is None and begun is not None:
        precision = parse_precision(begun["precision"], begun.get("precision_timings", {}))
        if precision is None:
            raise LeanError(f"{run.out / SPEC} names no precision that was chosen; {AGAIN}")
        return micro_batch_size, precision
    if precision is None:
        with progress_bar("timing precisions") as bar:
            precision = choose_precision(
                step.config,
                batch_size=split_batch(step.batch_size, micro_batch_size, process_count())[0],
                context_length=step.context_length,
                steps=steps,
                device=step.device,
                progress=bar.describe,
            )
    console.print(f"precision: {precision}", highlight=False)
    return micro_batch_size, precision
