"""`leanqkv train` and `uptrain`."""

from pathlib import Path
from typing import Annotated

import typer

from ..job import check_out_early
from .options import NAME_HELP, SOURCE, DataOptions, RecipeOptions, RunOptions, TeacherOptions, TextOptions


def train(
    name: Annotated[str, typer.Argument(help=NAME_HELP)], data: DataOptions, recipe: RecipeOptions, run: RunOptions
) -> None:
    """Train one model. Rerun the command to resume; losses are bit-identical.

    Without options the published recipe of the model applies. Several processes: `torchrun --nproc-per-node 2 -m
    leanqkv train …`.

    leanqkv train small+skipv1 --steps 600 --out runs/skipv1
    """
    check_out_early(run.out, "run")
    from .training import train_preset

    train_preset(name, recipe, data, run)


def uptrain(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    steps: int,
    text: TextOptions,
    run: RunOptions,
    learns: TeacherOptions,
    batch_size: int = 16,
    learning_rate: float = 1.5e-4,
    min_learning_rate: float | None = None,
    weight_decay: float = 0.1,
    warmup_steps: int | None = None,
    remove_norms: bool = False,
) -> None:
    """Continue training a checkpoint, for example a converted one. Dropout is off, as in the paper's uptraining.

    The record has the loss before the first step and every validation after it. Rerun the command to resume.

    leanqkv uptrain runs/skipv1 --data book.txt --steps 300 --out runs/uptrained

    leanqkv uptrain runs/skipv1 --data book.txt --steps 300 --teacher runs/baseline --out runs/distilled

    leanqkv uptrain runs/baseline --data book.txt --steps 300 --remove-norms --out runs/norm-free

    Options:
        steps: Optimizer steps.
        learning_rate: Peak learning rate, as in P3's uptraining.
        min_learning_rate: Default: a tenth.
        weight_decay: Weight decay of matrices. Vectors have none.
        warmup_steps: Default: a tenth.
        remove_norms: Replace the standard deviation of one norm after another by a constant, and write a model without
            norms, for `leanqkv eliminate`.
    """
    check_out_early(run.out, "run", source, learns.teacher)
    from .training import uptrain_checkpoint

    end = learning_rate / 10 if min_learning_rate is None else min_learning_rate
    warmup = steps // 10 if warmup_steps is None else warmup_steps
    recipe = (steps, batch_size, learning_rate, end, weight_decay, warmup)
    uptrain_checkpoint(source, recipe, text, run, learns, remove_norms)
