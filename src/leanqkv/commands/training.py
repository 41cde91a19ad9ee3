"""What `leanqkv train` and `uptrain` do."""

from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoints.open import open_checkpoint
from ..checkpoints.tensors import weights_hash
from ..checkpoints.tokenizer import check_same_tokens
from ..environment import check_device, free_memory
from ..errors import LeanError, TimeIsUpError
from ..job import check_out
from ..model.config import LeanConfig
from ..presets import preset
from ..presets.recipes import Recipe, recipe
from ..progress import console, progress_bar, training_display
from ..records import BEGUN, loss_name, read_record
from ..train.directory import AGAIN, RECORD, SPEC
from ..train.micro_batch import Step, choose_micro_batch
from ..train.norm_removal import check_removal, removal_schedule
from ..train.precision import Precision, choose_precision, parse_precision
from ..train.processes import connect, first_decides, is_first
from ..train.spec import RunSpec
from ..train.tasks import Data as PreparedData
from ..train.tasks import check_fit, task_of
from ..train.training import check_trackers, read_teacher
from ..train.training import train as train_run
from .options import DataOptions, RecipeOptions, RunOptions, TeacherOptions, TextOptions, changed, outcome, prepare

# Nats that a run's training loss may rise without a word.
ALARMING_RISE = 1.0


@dataclass(frozen=True)
class Start:
    """What a run begins with, and what it learns from beside the text.

    Attributes:
        checkpoint: whose weights it continues; None: new weights.
        remove_norms: one after another.
    """

    checkpoint: Path | None = None
    learns: TeacherOptions = field(default_factory=TeacherOptions)
    remove_norms: bool = False


def train_preset(name: str, changes: RecipeOptions, data: DataOptions, run: RunOptions) -> None:
    """Train the model of a name by its recipe with these changes."""
    train_model(name, preset(name), recipe(name, **changed(changes)), data, run, Start())


def uptrain_checkpoint(
    source: Path, sizes: tuple[Any, ...], text: TextOptions, run: RunOptions, learns: TeacherOptions, remove_norms: bool
) -> None:
    """Train a checkpoint further, without dropout; `sizes` are the fields of the recipe."""
    overrides = open_checkpoint(source).config.as_overrides()
    config = LeanConfig(**{key: value for key, value in overrides.items() if not key.endswith("_dropout")})
    has_tokenizer = task_of(config, source.name).has_tokenizer
    data = DataOptions(**vars(text), tokenizer=str(source) if has_tokenizer else None)
    record = train_model(source.name, config, Recipe(*sizes), data, run, Start(source, learns, remove_norms))
    first = record["evaluations"][0]
    console.print(f"{loss_name(first)} before the first step: {first['loss']:.4f}")
    for stage in record["norms"]["stages"] if remove_norms and is_first() else ():
        console.print(f"norms removed: {stage['removed']}, step {stage['step']:,}: {stage['loss']:.4f}")


def train_model(
    name: str, config: LeanConfig, recipe: Recipe, data: DataOptions, run: RunOptions, start: Start
) -> dict[str, Any]:
    """Read the data, choose micro-batch and precision, train, and return the record.

    Of several processes the first does what comes before the training, and the others do as it says.

    Raises:
        LeanError: options that do not fit together, before anything is read or written if possible.
    """
    connect(check_device(run.device), run.shard)
    spec, prepared = first_decides(lambda: _specify(name, config, recipe, data, run, start))
    if not is_first():  # another machine may have another cache
        prepared = prepare(data, [config])
    return _train(spec, prepared, run, start)


def _specify(
    name: str, config: LeanConfig, recipe: Recipe, data: DataOptions, run: RunOptions, start: Start
) -> tuple[RunSpec, PreparedData]:
    """Return the specification of a run and its data."""
    task_of(config, name)
    teacher = start.learns.teacher
    check_out(run.out, "run", start.checkpoint, teacher)
    if start.remove_norms:
        check_removal(run.shard, run.keep_checkpoints)
    schedule = removal_schedule(config, recipe.steps) if start.remove_norms else None
    check_trackers(run.report_to or ())
    asked = parse_precision(run.precision)
    context = run.context_length or config.max_position_embeddings
    teacher_config = read_teacher(teacher, name, config, context)
    if teacher is not None and start.checkpoint is not None:
        check_same_tokens(start.checkpoint, teacher, "--teacher", "a teacher has to read the same tokens")
    prepared = prepare(data, [config])
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
        start.remove_norms,
    )
    micro_batch_size, precision = _settle(run, step, recipe.steps)
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
        norm_schedule=schedule,
        shard=run.shard,
        **_origin(start, teacher_config),
    )
    return spec, prepared


def _origin(start: Start, teacher_config: LeanConfig | None) -> dict[str, Any]:
    """Return the fields of a specification that say what the run begins with, and what it learns from."""
    if start.checkpoint is None:
        return {}
    with progress_bar("hashing the weights"):
        origin: dict[str, Any] = {"role": "uptrain", "initial_sha256": weights_hash(start.checkpoint)}
        if start.learns.teacher is not None and teacher_config is not None:
            origin |= {**asdict(start.learns), "teacher_sha256": weights_hash(start.learns.teacher)}
            origin["teacher_config"] = teacher_config.as_overrides()
            del origin["teacher"]  # where it lies does not decide the numbers
    return origin


def _train(spec: RunSpec, data: PreparedData, run: RunOptions, start: Start) -> dict[str, Any]:
    """Train, showing the progress and the outcome.

    Raises:
        LeanError: the run diverged.
    """
    with training_display() as display:
        display.start(spec.recipe.steps)
        try:
            record = train_run(
                spec,
                data,
                run.out,
                device=run.device,
                initial=start.checkpoint,
                teacher=start.learns.teacher,
                keep_checkpoints=run.keep_checkpoints,
                max_hours=run.max_hours,
                report_to=run.report_to or (),
                progress=partial(display.update, spec.name),
            )
        except TimeIsUpError as error:
            raise _reported_once(error) from None
        display.finish(spec.name, spec.recipe.steps, outcome(record))
    if stop := record["diverged"]:
        diverged = LeanError(
            f"{spec.name} diverged at step {stop['step']:,}: {stop['reason']}; no model is written. "
            f"{run.out / RECORD} has its losses; choose another --out and a smaller --learning-rate"
        )
        raise _reported_once(diverged)
    if (rise := record["rise"]) is not None and rise["nats"] > ALARMING_RISE:
        console.print(
            f"warning: at step {rise['step']:,} the training loss was {rise['nats']:.2f} nats above the lowest one "
            "before; a smaller --learning-rate or more --warmup-steps keep it down",
        )
    files = [file for file in ("model.safetensors", "tokenizer.json", "record.json") if (run.out / file).exists()]
    console.print(f"{run.out}: {', '.join(files)}")
    return record


def _reported_once(error: LeanError) -> BaseException:
    """Return an error that all processes raise in the first of them, and the end with its exit code in the others."""
    return error if is_first() else SystemExit(error.exit_code)


def _settle(run: RunOptions, step: Step, steps: int) -> tuple[int | None, Precision]:
    """Return micro-batch and precision: those asked for; else those of the run in `out`; else the best ones here."""
    begun = read_record(run.out / SPEC, BEGUN, AGAIN) if (run.out / SPEC).exists() else None
    micro_batch_size, precision = run.micro_batch_size, step.precision
    if micro_batch_size is None and begun is not None:
        micro_batch_size = begun["micro_batch_size"]
    elif micro_batch_size is None:
        chosen = choose_micro_batch([step], free_memory(step.device))
        micro_batch_size = chosen.size
        console.print(str(chosen), soft_wrap=True)
    if precision is None and begun is not None:
        precision = parse_precision(begun["precision"], begun["precision_timings"])
        if precision is None:
            raise LeanError(f"{run.out / SPEC} names no precision that was chosen; {AGAIN}")
        return micro_batch_size, precision
    if precision is None:
        with progress_bar("timing precisions") as bar:
            precision = choose_precision(step, micro_batch_size, steps, bar.describe)
    console.print(f"precision: {precision}")
    return micro_batch_size, precision
