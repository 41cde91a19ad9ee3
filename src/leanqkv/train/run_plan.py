"""Estimate of a run's needs: memory of a device, arithmetic, time, and files.

| quantity | formula |
| --- | --- |
| weights, gradients, optimizer | 16 bytes a parameter: float32 weights, gradients and AdamW's two moments; with several devices 4 more for DDP's copy of the gradients. Sharded over D devices: 16 / D, and the unsharded weights and gradients of embeddings, head and two blocks |
| activations | counted on tensors without content, in bfloat16 autocast, for the micro-batch that is chosen |
| operations | counted in the same way: matrix products of forward and backward, with attention over all pairs of positions |
| time | operations / (devices x peak x utilization) |
| checkpoint | 12 bytes a parameter: weights and two moments |
"""  # noqa: E501

from dataclasses import dataclass

import torch

from ..model.config import LeanConfig
from ..model.shapes import count_parameters
from ..presets.recipes import Recipe
from .micro_batch import USABLE_SHARE, Step, choose_micro_batch, split_batch
from .precision import Precision


@dataclass(frozen=True)
class Accelerator:
    """A device to rent: peak of dense bfloat16 products, in operations per second, and memory in bytes."""

    flops: float
    memory: float


# NVIDIA's data sheets: A100 80GB SXM, H100 SXM.
ACCELERATORS = {"a100": Accelerator(312e12, 80e9), "h100": Accelerator(989e12, 80e9)}


@dataclass(frozen=True)
class RunPlan:
    """Needs of a run. Bytes are of one device; operations, tokens and seconds of the whole run.

    Attributes:
        fits: whether a step takes at most three quarters of the device's memory.
        flops_per_token: of forward and backward pass, those of gradient checkpointing included.
        weights_bytes, checkpoint_bytes: of files, in float32: the model, and a checkpoint to resume from.
        kv_bytes: of a sequence of `context_length` tokens in bfloat16.
    """

    parameters: int
    micro_batch_size: int
    accumulation_steps: int
    state_bytes: int
    activation_bytes: int
    fits: bool
    tokens: int
    flops_per_token: float
    flops: float
    seconds: float
    weights_bytes: int
    checkpoint_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int


def plan_run(
    config: LeanConfig,
    recipe: Recipe,
    *,
    context_length: int,
    device: Accelerator,
    devices: int,
    utilization: float,
    micro_batch_size: int | None = None,
    shard: str | None = None,
    gradient_checkpointing: bool = False,
) -> RunPlan:
    """Return what training a model by a recipe needs on so many devices.

    Raises:
        LeanError: a batch that does not divide among the devices, or a model that is not trained here.
    """
    step = Step(
        config,
        recipe.batch_size,
        context_length,
        "cuda",
        Precision("bf16"),
        gradient_checkpointing,
        shard=shard,
        processes=devices,
    )
    chosen = micro_batch_size or choose_micro_batch([step], int(device.memory)).size
    micro, accumulation = split_batch(recipe.batch_size, chosen, devices)
    state, activations, flops = step.state_bytes(), step.activation_bytes(micro), step.flops()
    tokens, sequences = recipe.steps * recipe.batch_size * context_length, recipe.steps * recipe.batch_size
    parameters = count_parameters(config).total
    return RunPlan(
        parameters=parameters,
        micro_batch_size=micro,
        accumulation_steps=accumulation,
        state_bytes=state,
        activation_bytes=activations,
        fits=state + activations <= USABLE_SHARE * device.memory,
        tokens=tokens,
        flops_per_token=flops / context_length,
        flops=float(flops) * sequences,
        seconds=float(flops) * sequences / (devices * device.flops * utilization),
        weights_bytes=4 * parameters,
        checkpoint_bytes=12 * parameters,
        kv_bytes_per_token=config.plan.kv_bytes_per_token(torch.bfloat16),
        kv_bytes=config.plan.kv_bytes(context_length, torch.bfloat16),
    )
