"""`leanqkv plan-run`: what a run needs, before machines are rented for it."""

from dataclasses import dataclass
from typing import Annotated

import typer

from .options import NAME_HELP, ContextLength, MicroBatchSize, RecipeOptions, recipe_overrides


@dataclass(frozen=True)
class MachineOptions:
    """What a run is planned for.

    Options:
        accelerator: a100 or h100, of 80 GB each.
        flops: Peak of another device, in operations per second, as 150e12.
        memory: Memory of that device in GB.
    """

    accelerator: str = "a100"
    flops: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class PlanOptions:
    """How the run is done there.

    Options:
        devices: Number of devices.
        utilization: Share of the peak FLOPs that the run reaches.
        shard: fsdp: plan for `leanqkv train --shard fsdp`.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time.
    """

    devices: int = 8
    utilization: float = 0.4
    context_length: ContextLength = None
    micro_batch_size: MicroBatchSize = None
    shard: str | None = None
    gradient_checkpointing: Annotated[bool, typer.Option()] = False


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

    show_plans(names, recipe_overrides(**vars(recipe)), machine, plan)
