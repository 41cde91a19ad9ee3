"""`leanqkv plan-run`: what a run needs, before machines are rented for it."""

from typing import Annotated

import typer

from .options import NAME_HELP, RecipeOptions
from .texts import MachineOptions, PlanOptions


def plan_run(
    names: Annotated[list[str], typer.Argument(help=NAME_HELP)],
    recipe: RecipeOptions,
    machine: MachineOptions,
    plan: PlanOptions,
) -> None:
    """Estimate memory, FLOPs, time and disk of a training run. Nothing is trained or written.

    Without options the published recipe of the model applies.

    leanqkv plan-run gpt2-355m gpt2-355m+skipv1 --devices 8

    leanqkv plan-run llama-1b+skipv1 --accelerator h100 --devices 32 --shard fsdp --gradient-checkpointing

    leanqkv plan-run llama-130m --flops 165e12 --memory 24 --devices 1
    """
    from .planning import show_plans

    show_plans(names, recipe, machine, plan)
