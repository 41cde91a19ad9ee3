"""`leanqkv plan-run`: what a run needs, before machines are rented for it."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ..errors import LeanError
from ..progress import console, progress_bar
from .options import NAME_HELP, ContextLength, MicroBatchSize, RecipeOptions, recipe_overrides

if TYPE_CHECKING:
    from ..train.run_plan import Accelerator, RunPlan


def plan_run(
    names: Annotated[list[str], typer.Argument(help=NAME_HELP)],
    recipe: RecipeOptions,
    accelerator: str = "a100",
    flops: float | None = None,
    memory: float | None = None,
    devices: int = 8,
    utilization: float = 0.4,
    context_length: ContextLength = None,
    micro_batch_size: MicroBatchSize = None,
    shard: str | None = None,
    gradient_checkpointing: Annotated[bool, typer.Option()] = False,
) -> None:
    """Show memory, arithmetic, time and files of a training run, before it is started; nothing is trained or written.

    Without options the published recipe of the model applies.

    leanqkv plan-run gpt2-355m gpt2-355m+skipv1 --devices 8

    leanqkv plan-run llama-1b+skipv1 --accelerator h100 --devices 32 --shard fsdp --gradient-checkpointing

    leanqkv plan-run llama-130m --flops 165e12 --memory 24 --devices 1

    Options:
        accelerator: a100 or h100, of 80 GB each.
        flops: Peak of another device, in operations per second, as 150e12.
        memory: Its memory in GB.
        devices: How many of them.
        utilization: Share of the peak that the run reaches.
        shard: fsdp: as `leanqkv train --shard fsdp`.
        gradient_checkpointing: Less memory for more time.
    """
    from .. import presets
    from ..train.processes import check_shard
    from ..train.run_plan import plan_run as plan
    from ..train.tasks import check_context

    check_shard(shard)
    device = _device(accelerator, flops, memory)
    plans = {}
    with progress_bar("counting") as bar:
        for done, name in enumerate(names):
            config = presets.preset(name)
            context = context_length or config.max_position_embeddings
            if context is None:
                raise LeanError(f"{name} has any number of positions; give --context-length")
            check_context(name, config, context)
            plans[name] = plan(
                config,
                presets.recipe(name, **recipe_overrides(**vars(recipe))),
                context_length=context,
                device=device,
                devices=devices,
                utilization=utilization,
                micro_batch_size=micro_batch_size,
                shard=shard,
                gradient_checkpointing=gradient_checkpointing,
            )
            bar(done + 1, len(names))
    _print(plans, device, devices, utilization)


def _device(name: str, flops: float | None, memory: float | None) -> "Accelerator":
    """Return the device that options name.

    Raises:
        LeanError: one that is not known.
    """
    from ..train.run_plan import ACCELERATORS, Accelerator

    if name not in ACCELERATORS:
        raise LeanError(f"--accelerator is {name!r}; give {' or '.join(ACCELERATORS)}, or --flops and --memory")
    known = ACCELERATORS[name]
    return Accelerator(flops or known.flops, known.memory if memory is None else memory * 1e9)


def _print(plans: "dict[str, RunPlan]", device: "Accelerator", devices: int, utilization: float) -> None:
    title = f"{devices} devices of {device.flops / 1e12:,.0f} TFLOP/s and {device.memory / 1e9:,.0f} GB at "
    table = Table("", title=f"{title}{utilization:.0%} of their peak")
    for name in plans:
        table.add_column(name, justify="right")
    for row in zip(*(_rows(plan) for plan in plans.values()), strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    console.print(table)


def _rows(plan: "RunPlan") -> list[tuple[str, str]]:
    """Return what is shown of a plan, by its name in the table."""
    steps = f" x {plan.accumulation_steps}" if plan.accumulation_steps > 1 else ""
    total = plan.state_bytes + plan.activation_bytes
    return [
        ("parameters", f"{plan.parameters / 1e6:,.1f} M"),
        ("micro-batch", f"{plan.micro_batch_size}{steps}"),
        ("weights, gradients, optimizer", _size(plan.state_bytes)),
        ("activations", _size(plan.activation_bytes)),
        ("memory of a device", _size(total) + ("" if plan.fits else ", too much")),
        ("tokens", f"{plan.tokens / 1e9:,.2f} B"),
        ("FLOP per token", f"{plan.flops_per_token / 1e9:,.2f} G"),
        ("FLOP", f"{plan.flops:.2e}"),
        ("time", _duration(plan.seconds)),
        ("weights on disk (fp32)", _size(plan.weights_bytes)),
        ("checkpoint of a run", _size(plan.checkpoint_bytes)),
        ("KV cache per token (bf16)", f"{plan.kv_bytes_per_token:,} B"),
        ("KV cache of a sequence (bf16)", _size(plan.kv_bytes)),
    ]


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} h" if hours >= 1 else f"{seconds / 60:,.1f} min"
