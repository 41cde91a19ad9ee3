"""What `leanqkv train` and `uptrain` do."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoints.open import open_checkpoint
from ..checkpoints.tensors import weights_hash
from ..environment import check_device, free_memory
from ..errors import LeanError, TimeIsUpError
from ..job import check_out
from ..model.config import LeanConfig
from ..presets import Recipe
from ..progress import console, progress_bar, training_display
from ..records import BEGUN, read_record
from ..train import Precision, RunSpec, Step, choose_micro_batch, choose_precision, parse_precision
from ..train import train as train_run
from ..train.directory import AGAIN, RECORD, SPEC
from ..train.micro_batch import split_batch
from ..train.processes import connect, first_decides, is_first, process_count
from ..train.tasks import Data as PreparedData
from ..train.tasks import check_fit, check_teacher, task_of
from ..train.training import check_trackers
from .options import DataOptions, RunOptions, TeacherOptions, outcome, prepare

NO_TEACHER = TeacherOptions()
# Nats that a run's training loss may rise without a word.
ALARMING_RISE = 1.0


def train_model(
    name: str,
    config: LeanConfig,
    recipe: Recipe,
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

    def read() -> PreparedData:
        return prepare(data, [config])

    def specify() -> tuple[RunSpec, PreparedData]:
        return _specify(name, config, recipe, read, run, initial, learns)

    connect(check_device(run.device), run.shard)
    spec, prepared = first_decides(specify)
    # Another machine may have another cache.
    return _train(spec, prepared if is_first() else read(), run, initial, learns.teacher)


def _specify(
    name: str,
    config: LeanConfig,
    recipe: Recipe,
    read: Callable[[], PreparedData],
    run: RunOptions,
    initial: Path | None,
    learns: TeacherOptions,
) -> tuple[RunSpec, PreparedData]:
    """Return the specification of a run and its data."""
    task_of(config, name)
    teacher = learns.teacher
    check_out(run.out, "run", initial, teacher)
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
    spec: RunSpec, data: PreparedData, run: RunOptions, initial: Path | None, teacher: Path | None
) -> dict[str, Any]:
    """Train, showing the progress and the outcome.

    Raises:
        LeanError: the run diverged.
    """
    with training_display() as display, _reported_once(TimeIsUpError, is_first()):
        display.start(spec.recipe.steps)
        record = train_run(
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
def _reported_once(kind: type[LeanError], first: bool) -> Iterator[None]:
    """Of an error that all processes raise, let the first report it and the others end with its exit code."""
    try:
        yield
    except kind as error:
        if first:
            raise
        sys.exit(error.exit_code)


def _settle(run: RunOptions, step: Step, steps: int) -> tuple[int | None, Precision]:
    """Return micro-batch and precision: those asked for; else those of the run in `out`; else the best ones here."""
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
