"""`leanqkv train` and `uptrain`."""

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
    TextOptions,
    option_groups,
    outcome,
    prepare,
    recipe_overrides,
)

if TYPE_CHECKING:
    from ..model.config import LeanConfig
    from ..presets import Recipe
    from ..train import Precision, RunSpec
    from ..train.tasks import Data as PreparedData


@option_groups
def train(
    name: Annotated[str, typer.Argument(help=NAME_HELP)], data: DataOptions, recipe: RecipeOptions, run: RunOptions
) -> None:
    """Train one model; the same command goes on after an interruption, with the same losses.

    Without options the published recipe of the model applies. Several processes: `torchrun -m leanqkv.cli train …`.

    leanqkv train small+skipv1 --steps 600 --out runs/skipv1

    leanqkv train vit-tiny+skipv1 --data cifar10 --out runs/cifar10
    """
    from .. import presets

    train_model(name, presets.preset(name), presets.recipe(name, **recipe_overrides(**vars(recipe))), data, run)


@option_groups
def uptrain(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")],
    text: TextOptions,
    run: RunOptions,
    teacher: Annotated[
        Path | None, typer.Option(help="Checkpoint whose predictions are matched as well.", show_default=False)
    ] = None,
    distillation: Annotated[
        float, typer.Option(min=0, max=1, help="With --teacher: share of KL(teacher || model) in the loss.")
    ] = 0.5,
    batch_size: BatchSize = 16,
    learning_rate: Annotated[float, typer.Option(help="Peak, as in P3's uptraining.")] = 1.5e-4,
    min_learning_rate: Annotated[float | None, typer.Option(help="Default: a tenth.", show_default=False)] = None,
    weight_decay: Annotated[float, typer.Option(min=0, help="On matrices only.")] = 0.1,
    warmup_steps: Annotated[int | None, typer.Option(min=0, help="Default: a tenth.", show_default=False)] = None,
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
    record = train_model(source.name, config, recipe, data, run, source, teacher, distillation)
    console.print(f"validation loss before the first step: {record['evaluations'][0]['loss']:.4f}", highlight=False)


def train_model(
    name: str,
    config: "LeanConfig",
    recipe: "Recipe",
    data: DataOptions,
    run: RunOptions,
    initial: Path | None = None,
    teacher: Path | None = None,
    distillation: float = 0.0,
) -> dict[str, Any]:
    """Read the data, choose the precision, train, and return the record.

    Raises:
        LeanError: options that do not fit together, before anything is read or written if possible.
    """
    from ..checkpoints.open import open_checkpoint
    from ..checkpoints.tensors import weights_hash
    from ..environment import check_device
    from ..train import RunSpec, parse_precision
    from ..train.directory import check_out
    from ..train.tasks import check_fit, check_teacher, task_of

    task_of(config, name)
    check_out(run.out)
    check_device(run.device)
    parse_precision(run.precision)
    context = run.context_length or config.max_position_embeddings
    assert context is not None
    if teacher is not None:
        check_teacher(name, config, teacher.name, open_checkpoint(teacher).config, context)
    prepared = prepare(data.data, [config], data.tokenizer, data.text_field, data.max_documents)
    check_fit(name, config, prepared, context)
    precision = _precision(run, config, recipe, context)
    start: dict[str, Any] = {}
    if initial is not None:
        with progress_bar("hashing the weights"):
            start = {"role": "uptrain", "initial_sha256": weights_hash(initial)}
            if teacher is not None:
                start |= {"teacher_sha256": weights_hash(teacher), "distillation": distillation}
    spec = RunSpec(
        name=name,
        config=config.as_overrides(),
        recipe=recipe,
        seed=run.seed,
        context_length=context,
        precision=str(precision),
        precision_timings=precision.timings,
        data_sha256=prepared.sha256,
        micro_batch_size=run.micro_batch_size,
        evaluation_sequences=run.evaluation_sequences or prepared.evaluation_size(RunSpec.evaluation_sequences),
        evaluate_every=run.evaluate_every,
        gradient_checkpointing=run.gradient_checkpointing,
        **start,
    )
    return _train(spec, prepared, run, initial, teacher)


def _train(
    spec: "RunSpec", data: "PreparedData", run: RunOptions, initial: Path | None, teacher: Path | None
) -> dict[str, Any]:
    """Train, showing the progress and the outcome."""
    from ..train import train

    with training_display() as display:
        display.start(spec.recipe.steps)
        record = train(
            spec,
            data,
            run.out,
            device=run.device,
            initial=initial,
            teacher=teacher,
            keep_checkpoints=run.keep_checkpoints,
            progress=partial(display.update, spec.name),
        )
        display.finish(spec.name, spec.recipe.steps, outcome(record))
    files = [file for file in ("model.safetensors", "tokenizer.json", "record.json") if (run.out / file).exists()]
    console.print(f"{run.out}: {', '.join(files)}", highlight=False)
    return record


def _precision(run: RunOptions, config: "LeanConfig", recipe: "Recipe", context_length: int) -> "Precision":
    """Return the precision asked for; of "auto" that of the run in `out`, or the fastest one on this machine."""
    from ..environment import check_device
    from ..files import read_json
    from ..train import choose_precision, parse_precision
    from ..train.directory import SPEC

    precision = parse_precision(run.precision)
    if precision is None and (run.out / SPEC).exists():
        spec = read_json(run.out / SPEC)
        precision = parse_precision(spec["precision"], spec["precision_timings"])
        assert precision is not None
        return precision
    if precision is None:
        with progress_bar("timing precisions") as bar:
            precision = choose_precision(
                config,
                batch_size=run.micro_batch_size or recipe.batch_size,
                context_length=context_length,
                steps=recipe.steps,
                device=check_device(run.device),
                progress=bar.describe,
            )
    console.print(f"precision: {precision}", highlight=False)
    return precision
