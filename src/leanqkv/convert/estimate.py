"""What a conversion in sweeps takes, before it starts: forward passes, time, memory and disk.

Products over tokens are counted in float32, per layer, against those of a forward pass; factorizations, which do not
grow with the tokens, in float64. Time comes from one batch through the first layer and one product in float64.
"""

import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import psutil
import torch
from torch import Tensor

from ..checkpoints.open import Checkpoint
from ..checkpoints.write import SHARD_BYTES
from ..model.config import LeanConfig
from ..model.shapes import count_parameters, parameter_shapes
from .activations import PATTERNS_AT_A_TIME, Layers, batches
from .latent_values import value_width
from .output_fit import MANY, RIDGES, SKETCHED
from .sweeps import BATCH_SIZE, Reduction, check_enough, disk_bytes, every

# Rows and columns of the product in float64 that is timed.
PRODUCT = 1024


@dataclass(frozen=True)
class Estimate:
    """Needs of a conversion.

    Attributes:
        tokens: to calibrate on.
        passes: forward passes over them that it takes, all of its work told in these.
        seconds: of its calibration.
        memory_bytes: at most at one time; evaluation_bytes: with source and result to be compared.
        read_bytes: of the source's weights, which are read twice.
        scratch_bytes: at most on the disk during calibration; written_bytes: of the result.
    """

    tokens: int
    passes: float
    seconds: float
    memory_bytes: int
    evaluation_bytes: int
    read_bytes: int
    scratch_bytes: int
    written_bytes: int


def estimate(
    reduction: Reduction, source: Checkpoint, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Estimate:
    """Return what the conversion of `source` by `reduction` needs on this machine.

    Args:
        shape: sequences and their length.
        dtype: of the stored result.

    Raises:
        LeanError: these are too few.
    """
    config, (sequences, length) = reduction.config, shape
    check_enough([reduction], sequences, sequences * length)
    tokens, layers = sequences * length, config.num_hidden_layers
    rate, forward = _double_rate(), _forward_seconds(config, reduction.tensors, length, device)
    products, factorizations = _operations(config, reduction, length, tokens)
    seconds = layers * (products * forward * tokens + factorizations / rate)
    parameters, files = count_parameters(config).total, {source.stored.file(name) for name in source.stored}
    held = max(_layer_bytes(config, reduction, length), _writing_bytes(config, source.dtype, dtype))
    made = max(0, reduction.made_bytes() // 4 - 2 * layers * config.hidden_size * value_width(config))
    return Estimate(
        tokens=tokens,
        passes=seconds / (layers * forward * tokens),
        seconds=seconds,
        memory_bytes=psutil.Process().memory_info().rss + held,
        evaluation_bytes=2 * 4 * parameters,
        read_bytes=sum(file.stat().st_size for file in files),
        scratch_bytes=disk_bytes(config, [reduction], tokens),
        written_bytes=dtype.itemsize * (parameters + made),
    )


def _parameters(config: LeanConfig, part: str = "") -> int:
    """Of the first layer, or of a part of it."""
    return sum(prod(shape) for name, shape in parameter_shapes(config).items() if f"model.layers.0.{part}" in name)


def _operations(config: LeanConfig, reduction: Reduction, length: int, tokens: int) -> tuple[float, float]:
    """Return the products over tokens in forward passes of a layer, and the operations in float64 of a layer."""
    rows, hidden, width = config.num_attention_heads * config.head_dim, config.hidden_size, value_width(config)
    scores = 4 * length * rows
    forward = 2 * _parameters(config) + scores
    attention = 2 * _parameters(config, "self_attn.") + scores
    per_token, per_layer = reduction.operations(length)
    # Attention but W_O again on the converted stream, its heads and their sums; all but attention again.
    fitting = attention - 2 * rows * hidden + 2 * hidden * width + scores / 2 + 2 * rows * (rows + hidden)
    fitting += 2 * rows * hidden + forward - attention
    few = SKETCHED if hidden >= MANY else hidden
    solved = len(RIDGES) * (rows**3 / 3 + 4 * rows**2 * few) + 2 * rows**3 / 3 + 10 * rows**2 * hidden
    return (1 + per_token / forward) / every(reduction, tokens) + 1 + fitting / forward, per_layer + solved


def _layer_bytes(config: LeanConfig, reduction: Reduction, length: int) -> int:
    """Return the most bytes of a layer's weights, activations and sums."""
    rows, hidden, width = config.num_attention_heads * config.head_dim, config.hidden_size, value_width(config)
    batch = next(batches((BATCH_SIZE, length), BATCH_SIZE)).stop * length
    activations = 4 * batch * (2 * (config.intermediate_size or 0) + 6 * hidden)
    activations += 4 * 4 * min(batch * config.num_attention_heads * length, PATTERNS_AT_A_TIME)
    sums = 8 * 2 * rows * (rows + hidden)
    solving = 8 * (3 * rows * hidden + 2 * rows * rows) + 8 * hidden * (rows + 2 * width)
    return 4 * _parameters(config) + activations + max(reduction.held_bytes(), sums + solving)


def _writing_bytes(config: LeanConfig, stored: torch.dtype, dtype: torch.dtype) -> int:
    """Return the most bytes of a shard that is collected, beside its largest tensor as it is read."""
    sizes = [prod(shape) for shape in parameter_shapes(config).values()]
    shard = min(dtype.itemsize * sum(sizes), max(SHARD_BYTES, dtype.itemsize * max(sizes)))
    return shard + stored.itemsize * max(sizes)


def _seconds(work: Callable[[], Any], repeats: int) -> float:
    """The fastest of `repeats` calls, behind one that is not counted."""
    work()
    return min(timeit.repeat(work, number=1, repeat=repeats))


def _double_rate() -> float:
    """Operations per second of a product in float64, which is on the CPU on every device."""
    matrix = torch.ones(PRODUCT, PRODUCT, dtype=torch.float64)
    return 2 * PRODUCT**3 / _seconds(lambda: matrix @ matrix, 3)


@torch.no_grad()
def _forward_seconds(config: LeanConfig, tensors: Mapping[str, Tensor], length: int, device: torch.device) -> float:
    """Seconds of a forward pass of a token through a layer."""
    layers = Layers(config, tensors, length, device)
    block = layers.block(0)
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(BATCH_SIZE, length, config.hidden_size, generator=generator).to(device)
    return _seconds(lambda: layers.run(block, 0, stream), 2) / (BATCH_SIZE * length)
