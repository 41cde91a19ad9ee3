"""`leanqkv train` and `uptrain`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    NAME_HELP,
    SOURCE,
    TEXT_EVALUATION,
    BatchSize,
    ContextLength,
    Data,
    Device,
    EvaluateEvery,
    EvaluationSequences,
    KeepCheckpoints,
    LearningRate,
    MaxDocuments,
    MicroBatchSize,
    MinLearningRate,
    PrecisionOption,
    ScheduleSteps,
    Steps,
    TextField,
    Tokenizer,
    WarmupSteps,
    WeightDecay,
    console,
    evaluation_size,
    outcome,
    precision_for,
    prepare,
    recipe_overrides,
)

if TYPE_CHECKING:
    from ..model.config import LeanConfig
    from ..presets import Recipe


def train(
    name: Annotated[str, typer.Argument(help=NAME_HELP)],
    out: Annotated[Path, typer.Option(help="Directory of the run; goes on where an earlier start of it left off.")],
    data: Data = None,
    steps: Steps = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and the order of the batches.")] = 0,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    context_length: ContextLength = None,
    learning_rate: LearningRate = None,
    min_learning_rate: MinLearningRate = None,
    weight_decay: WeightDecay = None,
    warmup_steps: WarmupSteps = None,
    schedule_steps: ScheduleSteps = None,
    precision: PrecisionOption = "auto",
    device: Device = None,
    tokenizer: Tokenizer = None,
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    evaluate_every: EvaluateEvery = 50,
    evaluation_sequences: EvaluationSequences = None,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Less memory for more time.")] = False,
    keep_checkpoints: KeepCheckpoints = False,
) -> None:
    """Train one model; the same command goes on after an interruption, with the same losses.

    Without options the published recipe of the model applies. Several processes: `torchrun -m leanqkv.cli train …`.

    leanqkv train small+skipv1 --steps 600 --out runs/skipv1

    leanqkv train vit-tiny+skipv1 --data cifar10 --out runs/cifar10
    """
    from ..presets import preset, recipe

    overrides = recipe_overrides(
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        min_learning_rate=min_learning_rate,
        weight_decay=weight_decay,
        warmup_steps=warmup_steps,
        schedule_steps=schedule_steps,
    )
    run_one(
        name,
        preset(name),
        recipe(name, **overrides),
        out,
        data=data,
        tokenizer=tokenizer,
        text_field=text_field,
        max_documents=max_documents,
        precision=precision,
        device=device,
        context_length=context_length,
        micro_batch_size=micro_batch_size,
        evaluation_sequences=evaluation_sequences,
        evaluate_every=evaluate_every,
        keep_checkpoints=keep_checkpoints,
        gradient_checkpointing=gradient_checkpointing,
        seed=seed,
    )


def uptrain(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")],
    out: Annotated[Path, typer.Option(help="Directory of the run; goes on where an earlier start of it left off.")],
    data: Data = None,
    teacher: Annotated[
        Path | None, typer.Option(help="Checkpoint whose predictions are matched as well.", show_default=False)
    ] = None,
    distillation: Annotated[
        float, typer.Option(min=0, max=1, help="With --teacher: share of KL(teacher || model) in the loss.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of the batches.")] = 0,
    batch_size: BatchSize = 16,
    micro_batch_size: MicroBatchSize = None,
    context_length: ContextLength = None,
    learning_rate: Annotated[float, typer.Option(help="Peak, as in P3's uptraining.")] = 1.5e-4,
    min_learning_rate: Annotated[float | None, typer.Option(help="Default: a tenth.", show_default=False)] = None,
    weight_decay: Annotated[float, typer.Option(min=0, help="On matrices only.")] = 0.1,
    warmup_steps: Annotated[int | None, typer.Option(min=0, help="Default: a tenth.", show_default=False)] = None,
    precision: PrecisionOption = "auto",
    device: Device = None,
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    evaluate_every: EvaluateEvery = 50,
    evaluation_sequences: EvaluationSequences = None,
    keep_checkpoints: KeepCheckpoints = False,
) -> None:
    """Go on training a checkpoint, such as a converted one; dropout is off, as in the paper's uptraining.

    Its loss before the first step is in the record, and so is every validation after it. Killed and started again, the
    same command goes on, bit-identically.

    leanqkv uptrain runs/skipv1 --data book.txt --steps 300 --out runs/uptrained

    leanqkv uptrain runs/skipv1 --data book.txt --steps 300 --teacher runs/baseline --out runs/distilled
    """
    from ..checkpoints.open import open_checkpoint
    from ..checkpoints.tensors import weights_hash
    from ..errors import LeanError
    from ..model.config import LeanConfig
    from ..presets import Recipe

    overrides = open_checkpoint(source).config.as_overrides()
    config = LeanConfig(**{key: value for key, value in overrides.items() if not key.endswith("_dropout")})
    if teacher is not None and (found := open_checkpoint(teacher).config.vocab_size) != config.vocab_size:
        raise LeanError(f"the teacher has {found:,} tokens, the model {config.vocab_size:,}: they cannot be compared")
    recipe = Recipe(
        steps,
        batch_size or 16,
        learning_rate,
        learning_rate / 10 if min_learning_rate is None else min_learning_rate,
        weight_decay,
        steps // 10 if warmup_steps is None else warmup_steps,
    )
    record = run_one(
        source.name,
        config,
        recipe,
        out,
        data=data,
        tokenizer=str(source),
        text_field=text_field,
        max_documents=max_documents,
        precision=precision,
        device=device,
        context_length=context_length,
        micro_batch_size=micro_batch_size,
        evaluation_sequences=evaluation_sequences,
        evaluate_every=evaluate_every,
        keep_checkpoints=keep_checkpoints,
        seed=seed,
        role="uptrain",
        initial=source,
        teacher=teacher,
        initial_sha256=weights_hash(source),
        teacher_sha256=None if teacher is None else weights_hash(teacher),
        distillation=0.0 if teacher is None else distillation,
    )
    console.print(f"validation loss before the first step: {record['evaluations'][0]['loss']:.4f}", highlight=False)


def run_one(
    name: str,
    config: "LeanConfig",
    recipe: "Recipe",
    out: Path,
    *,
    data: str | None,
    tokenizer: str | None,
    text_field: str,
    max_documents: int | None,
    precision: str,
    device: str | None,
    context_length: int | None,
    micro_batch_size: int | None,
    evaluation_sequences: int | None,
    initial: Path | None = None,
    teacher: Path | None = None,
    keep_checkpoints: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Reads the data, chooses the precision, trains, and returns the record; `settings` are further fields of the
    RunSpec. Arguments are those of the command line.

    Raises:
        LeanError: whatever does not fit together, before anything is read or written where that is possible.
    """
    from ..environment import check_device, default_device
    from ..progress import training_display
    from ..train import RunSpec, train
    from ..train.directory import check_out
    from ..train.tasks import check_fit, check_trainable

    check_trainable(name, config)
    check_out(out)
    context = context_length or config.max_position_embeddings
    assert context is not None
    prepared = prepare(data, [config], tokenizer, text_field, max_documents)
    check_fit(name, config, prepared, context)
    arithmetic = precision_for(
        precision, out, config, recipe, micro_batch_size, context, check_device(device or default_device())
    )
    spec = RunSpec(
        name=name,
        config=config.as_overrides(),
        recipe=recipe,
        context_length=context,
        precision=str(arithmetic),
        precision_timings=arithmetic.timings,
        data_sha256=prepared.sha256,
        micro_batch_size=micro_batch_size,
        evaluation_sequences=evaluation_sequences or evaluation_size(prepared, TEXT_EVALUATION),
        **settings,
    )
    with training_display() as display:
        display.start(recipe.steps)

        def progress(step: int, total: int, loss: float | None, rate: float | None) -> None:
            display.update(name, step, total, loss, rate)

        record = train(
            spec,
            prepared,
            out,
            device=device,
            initial=initial,
            teacher=teacher,
            keep_checkpoints=keep_checkpoints,
            progress=progress,
        )
        display.finish(name, recipe.steps, outcome(record))
    contents = [name for name in ("model.safetensors", "tokenizer.json", "record.json") if (out / name).exists()]
    console.print(f"{out}: {', '.join(contents)}", highlight=False)
    return record
