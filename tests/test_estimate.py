"""What a conversion is said to take before it starts, against what it takes."""

from pathlib import Path

import pytest
from converting import source
from reducing import KINDS, sample_of, sweeping
from torch.utils.flop_counter import FlopCounterMode

from leanqkv.convert import estimate as of
from leanqkv.convert.sweeps import every
from leanqkv.memory import PeakMemory

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
