"""Tiny models of transformers, one or more of every class that can be opened."""

from pathlib import Path
from typing import Any

import torch
import yaml
from shapes import randomize
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 3,
    "eos_token_id": [4, 5],
    "pad_token_id": 6,
}
# By name, the type of a model and its other settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
ONE_OF_EACH = (
    "gpt2",
    "neox",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "granite",
    "smollm3",
    "olmo2",
    "gemma3",
    "phi3",
    "mixtral",
    "qwen3-moe",
    "qwen3-next",
)


def stock_model(case: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of transformers, random in every weight."""
    model_type, settings = CASES[case]
    torch.manual_seed(0)  # the draws below leave nothing of it
    config = CONFIG_MAPPING[model_type](**SIZES | settings)
    return randomize(AutoModelForCausalLM.from_config(config)).to(dtype).eval()


LOCAL = {"sliding_window": 4, "window_layers": [0, 2], "window_rope_parameters": {"rope_theta": 100.0}}
