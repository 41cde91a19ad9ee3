"""`leanqkv train` and `uptrain`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ..job import check_out
from .options import (
    NAME_HELP,
    SOURCE,
    BatchSize,
    DataOptions,
    RecipeOptions,
    RunOptions,
    TeacherOptions,
    TextOptions,
    console,
    option_groups,
    recipe_overrides,
)


@option_groups
def train(
    name: Annotated[str, typer.Argument(help=NAME_HELP)], data: DataOptions, recipe: RecipeOptions, run: RunOptions
) -> None:
    """Train one model; the same command goes on after an interruption, with the same losses.

    Without options the published recipe of the model applies. Several processes: `torchrun --nproc-per-node 2 -m
    leanqkv train …`.

    leanqkv train small+skipv1 --steps 600 --out runs/skipv1
    """
    _check_out(run.out)
    from .. import presets
    from .training import train_model

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
    _check_out(run.out, source, learns.teacher)
    from ..checkpoints.open import open_checkpoint
    from ..model.config import LeanConfig
    from ..presets import Recipe
    from ..train.tasks import task_of
    from .training import train_model

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


def _check_out(out: Path, *sources: Path | None) -> None:
    """Refuse a directory before anything is loaded. Of several processes the first one does so later, for all."""
    if "RANK" not in os.environ:
        check_out(out, "run", *sources)
