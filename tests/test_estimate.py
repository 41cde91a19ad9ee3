"""What a conversion is said to take before it starts, against what it takes."""

from math import prod
from pathlib import Path

import pytest
import torch
from converting import source
from reducing import KINDS, sample_of, sweeping
from torch.utils.flop_counter import FlopCounterMode

from leanqkv.checkpoints.tensors import LazyTensors
from leanqkv.checkpoints.write import write_checkpoint
from leanqkv.convert import estimate as of
from leanqkv.convert.sweeps import every
from leanqkv.memory import PeakMemory
from leanqkv.model.shapes import parameter_shapes

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "head_dim": 8, "num_hidden_layers": 2}
SHAPES = {"mha": WIDE, "gqa": WIDE | {"num_key_value_heads": 2}, "qk_norm": WIDE | {"qk_norm": True}}


@pytest.mark.long_cases
@pytest.mark.parametrize("kind", ["latents", "merged"])
@pytest.mark.parametrize("shape", SHAPES)
def test_operations_and_memory_are_those_of_the_sweeps(kind: str, shape: str, tmp_path: Path) -> None:
    """Products over tokens, counted as they are computed; and the most bytes that its tensors hold."""
    model = source("llama", **SHAPES[shape])
    config, length = model[0], 32
    sample = sample_of(config, 64, length)
    counts = []
    for place, tokens in enumerate((sample[:32], sample)):
        (one,) = KINDS[kind](model)
        one.choosing_tokens = None
        memory = PeakMemory()
        with FlopCounterMode(display=False) as counter, memory:
            sweeping(model, tokens, tmp_path / str(place), [one], batch_size=of.BATCH_SIZE).run()
        counts.append(counter.get_total_flops())
    per_token = (counts[1] - counts[0]) / (32 * length * config.num_hidden_layers)
    products, _ = of._operations(config, one, length, sample.size)
    forward = 2 * of._parameters(config) + 4 * length * config.num_attention_heads * config.head_dim
    assert products * forward == pytest.approx(per_token, rel=0.1)
    layer = of._layer_bytes(config, one, length)
    streams = 4 * sample.size * config.hidden_size  # the tests' weights are all in memory, in float64
    assert 0.5 * memory.peak < layer < 3 * memory.peak and streams < memory.peak


def test_fewer_tokens_to_choose_by_are_fewer_passes() -> None:
    model = source("llama", **WIDE)
    (one,) = KINDS["latents"](model)
    few, many = 4 * one.width, 16 * one.width
    one.choosing_tokens = few
    assert (every(one, few), every(one, many)) == (1, 4)
    passes = [of._operations(model[0], one, 32, tokens)[0] for tokens in (few, many)]
    one.choosing_tokens = None
    assert of._operations(model[0], one, 32, many)[0] == passes[0] > passes[1] + 0.74


def test_the_largest_tensor_is_in_memory_as_read_and_as_written(tmp_path: Path) -> None:
    """With a large vocabulary that is more than any layer takes."""
    config, _ = source("llama", **WIDE, vocab_size=20_000)
    shapes, memory = parameter_shapes(config), PeakMemory()
    shapes = {name: shapes[name] for name in sorted(shapes, key=lambda name: -prod(shapes[name]))}  # the head is second
    tensors = LazyTensors(shapes, lambda name: torch.zeros(shapes[name]))
    with memory:
        write_checkpoint(tmp_path / "out", shapes, tensors, torch.bfloat16, job={}, finish=lambda directory: None)
    # Shards are planned with tensors of the meta device, which take no memory.
    peak = memory.peak - 2 * sum(map(prod, shapes.values()))
    (one,) = KINDS["latents"]((config, tensors))
    counted = of._writing_bytes(config, torch.float32, torch.bfloat16)
    assert of._layer_bytes(config, one, 32) < 0.9 * counted < peak < 1.1 * counted
