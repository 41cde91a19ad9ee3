"""transformers' own tests of models and of generation, on ours: `make test-hf CLONE=…`, a clone of transformers.

Nothing of them is copied. The clone must be of the version that is installed.
"""

import os
import sys
import unittest
from typing import Any

import pytest
import torch
from shapes import tiny, tokens
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from leanqkv import LeanConfig, LeanForCausalLM, LeanModel

CLONE = os.environ.get("TRANSFORMERS_CLONE")
if not CLONE:
    pytest.skip("TRANSFORMERS_CLONE is no clone of transformers", allow_module_level=True)
sys.path.insert(0, CLONE)
from tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from tests.test_modeling_common import ModelTesterMixin  # noqa: E402

MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "baseline": ((), {}),
    "gqa": (("gqa",), {}),
    "nonlinear-query": (("nonlinear-query",), {}),
    "denseformer": (("denseformer",), {}),
    "mla": (("mla",), {}),
    "skipv1": (("skipv1",), {}),
    "yoco": (("yoco",), {}),
    "moe": ((), {"mlp_type": "moe", "num_local_experts": 4}),
    "rope": (("gqa",), {"shape": "llama"}),
    "latents": (("latent-keys", "latent-values", "gqa"), {"shape": "llama"}),
}
ROTARY = {"rope", "latents"}
# By test: the models that it cannot hold for, and why.
CANNOT_HOLD: dict[str, tuple[set[str], str]] = {
    **dict.fromkeys(
        (
            *(f"test_model_rope_scaling_from_config_{kind}" for kind in ("0_linear", "1_dynamic", "2_yarn")),
            "test_model_rope_with_partial_rotation",
        ),
        (MODELS.keys() - ROTARY, "there are no rotary positions"),
    ),
    "test_model_rope_scaling_frequencies": (set(MODELS), "the module of rotary positions is built from a plan"),
    "test_training_gradient_checkpointing_use_reentrant_true": (
        {"skipv1", "yoco", "moe"},
        "refused: reentrant checkpointing loses the gradient of borrowed heads and of router logits",
    ),
}
MODEL_MAPPING_NAMES["leanqkv"] = "LeanModel"  # it has no loss, say the tests of training by this


class Sizes:
    """The inputs and sizes that transformers' tests ask for."""

    batch_size, seq_length, is_training = 3, 7, True

    def __init__(self, name: str):
        self.mechanisms, self.fields = MODELS[name]
        config = self.get_config()
        self.hidden_size, self.num_hidden_layers = config.hidden_size, config.num_hidden_layers
        self.num_attention_heads = config.num_attention_heads

    def get_config(self) -> LeanConfig:
        fields = {"shape": "gpt", "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        fields |= self.fields
        return tiny(fields.pop("shape"), *self.mechanisms, **fields)

    def prepare_config_and_inputs_for_common(self) -> tuple[LeanConfig, dict[str, torch.Tensor]]:
        ids = tokens(self.batch_size, self.seq_length)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Common(ModelTesterMixin, GenerationTesterMixin):
    all_model_classes = (LeanModel, LeanForCausalLM)
    name = ""

    def setUp(self) -> None:
        models, reason = CANNOT_HOLD.get(self._testMethodName, ({}, ""))
        if self.name in models:
            self.skipTest(reason)
        self.model_tester = Sizes(self.name)

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config) -> None:
        """The cache is the plan's."""
        for layer, held in zip(config.plan.layers, past_key_values.layers, strict=True):
            found = [
                tuple(states.shape) for states in (held.keys, held.values) if states is not None and states.numel()
            ]
            assert found == [(batch_size, cached.num_heads, seq_length, cached.head_dim) for cached in layer.cached]


for name in MODELS:
    made = type(f"Test_{name}", (Common, unittest.TestCase), {"name": name, "__module__": __name__})
    globals()[made.__name__] = made
