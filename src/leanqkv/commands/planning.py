"""The table of `leanqkv plan-run`."""

from collections.abc import Sequence

from rich.table import Table

from ..errors import LeanError
from ..presets import preset
from ..presets.recipes import recipe
from ..progress import console, progress_bar
from ..train.processes import check_shard
from ..train.run_plan import ACCELERATORS, Accelerator, RunPlan, plan_run
from ..train.tasks import check_context
from .options import RecipeOptions, changed
from .texts import MachineOptions, PlanOptions


def show_plans(names: Sequence[str], changes: RecipeOptions, machine: MachineOptions, options: PlanOptions) -> None:
    """Print what runs of these models need, by their recipes with these changes."""
    check_shard(options.shard)
    device, plans = _device(machine), {}
    with progress_bar("counting") as bar:
        for done, name in enumerate(names):
            config = preset(name)
            context = options.context_length or config.max_position_embeddings
            check_context(name, config, context)
            how = {**vars(options), "context_length": context}
            plans[name] = plan_run(config, recipe(name, **changed(changes)), device=device, **how)
            bar(done + 1, len(names))
    title = f"{options.devices} devices of {device.flops / 1e12:,.0f} TFLOP/s and {device.memory / 1e9:,.0f} GB at "
    table = Table("", title=f"{title}{options.utilization:.0%} of their peak")
    for name in plans:
        table.add_column(name, justify="right")
    for row in zip(*(_rows(plan) for plan in plans.values()), strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    console.print(table)


def _device(machine: MachineOptions) -> Accelerator:
    """Return the device that options name.

    Raises:
        LeanError: one that is not known.
    """
    name, flops, memory = machine.accelerator, machine.flops, machine.memory
    if (known := ACCELERATORS.get(name)) is None:
        raise LeanError(f"`accelerator` is {name!r}; give {' or '.join(ACCELERATORS)}, or `flops` and `memory`")
    return Accelerator(flops or known.flops, known.memory if memory is None else memory * 1e9)


def _rows(plan: RunPlan) -> list[tuple[str, str]]:
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
