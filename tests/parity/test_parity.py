"""Plain transformers are those of `transformers`: the same weights, moved by hand, give the same logits in float64."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from shapes import GPT, LLAMA, assert_near, randomize, tokens
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from leanqkv import LeanConfig, LeanForCausalLM

TOLERANCE = 1e-12  # relative to the largest logit
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.01,
}


def ours(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> LeanForCausalLM:
    """A model of ours with exactly these tensors: none missing, none left over."""
    model = LeanForCausalLM(LeanConfig(**config)).double()
    if model.config.tie_word_embeddings:
        tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def exact_rmsnorm(norm: nn.Module, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


@torch.no_grad()
def assert_same_function(
    found: LeanForCausalLM, reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, norm: type[nn.Module] | None
) -> None:
    """With and without left padding, and token by token onto a cache.

    The RMSNorm `norm` of transformers rounds to float32: compared so to float32, then, made exact, to float64.
    """
    ids = tokens(2, 12)
    if norm is not None:
        assert_near(found(input_ids=ids).logits, reference(input_ids=ids).logits, tolerance=1e-5)
        monkeypatch.setattr(norm, "forward", exact_rmsnorm)
    expected = reference(input_ids=ids).logits
    assert expected.dtype == torch.float64
    assert_near(found(input_ids=ids).logits, expected, TOLERANCE)

    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    assert_near(found(**padded).logits[0, 5:], reference(**padded).logits[0, 5:], TOLERANCE)
    assert_near(found(**padded).logits[1], expected[1], TOLERANCE)

    cache = None
    for position in range(ids.shape[1]):
        step = found(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        assert_near(step.logits[:, 0], expected[:, position], TOLERANCE)


BIASES = dict.fromkeys(("norm_bias", "attention_bias", "attention_output_bias", "mlp_bias"), True)


def renamed(
    theirs: Mapping[str, Tensor], layers: int, names: dict[str, str], parts: dict[str, str]
) -> dict[str, Tensor]:
    """Our names -> theirs, of the model and of the parts of layer `{}`; weights and, where there are any, biases."""
    names = names | {
        f"model.layers.{layer}.{ours}": theirs_.format(layer)
        for layer in range(layers)
        for ours, theirs_ in parts.items()
    }
    return {
        f"{our_name}.{kind}": theirs[f"{their_name}.{kind}"]
        for our_name, their_name in names.items()
        for kind in ("weight", "bias")
        if f"{their_name}.{kind}" in theirs
    }


def test_phi_is_parallel_with_one_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = PhiConfig(**{**COMMON, "rms_norm_eps": None}, layer_norm_eps=0.01, rope_parameters=rotary)
    reference = randomize(PhiForCausalLM(config)).double().eval()
    torch.nn.init.zeros_(reference.lm_head.bias)  # a bias of the head is the one thing that ours does not have
    parts = {
        "input_layernorm": "model.layers.{}.input_layernorm",
        **{f"self_attn.{x}_proj": f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"},
        "self_attn.o_proj": "model.layers.{}.self_attn.dense",
        "mlp.up_proj": "model.layers.{}.mlp.fc1",
        "mlp.down_proj": "model.layers.{}.mlp.fc2",
    }
    names = {"model.embed_tokens": "model.embed_tokens", "model.norm": "model.final_layernorm", "lm_head": "lm_head"}
    tensors = renamed(reference.state_dict(), 3, names, parts)
    del tensors["lm_head.bias"]
    shape = GPT | BIASES | {"position_embedding_type": "rope", "rope_parameters": rotary, "tie_word_embeddings": False}
    shape |= {
        "block_type": "parallel_shared_norm",
        "norm_eps": 0.01,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_new",
    }
    assert_same_function(ours(shape, tensors), reference, monkeypatch, norm=None)


DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}


@pytest.mark.parametrize("rotary", [None, DEEPSEEK_YARN], ids=["default", "yarn"])
def test_deepseek_v3_without_its_latent_norm(rotary: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLA. P3's equations have no norm on the latent; DeepSeek's is taken out."""
    mla = {"kv_lora_rank": 12, "qk_rope_head_dim": 4}
    mla |= {"rope_parameters": rotary} if rotary else {}
    config = DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        **mla,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=3,
        rope_interleave=False,
        tie_word_embeddings=False,
    )
    reference = randomize(DeepseekV3ForCausalLM(config)).double().eval()
    theirs = reference.state_dict()
    same = ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj")
    parts = {part: f"model.layers.{{}}.{part}" for part in (*same, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
    names = {name: name for name in ("model.embed_tokens", "model.norm", "lm_head")}
    tensors = renamed(theirs, 3, names, parts)
    for layer in range(3):
        reference.model.layers[layer].self_attn.kv_a_layernorm = nn.Identity()
        block = f"model.layers.{layer}.self_attn"
        query = theirs[f"{block}.q_proj.weight"].unflatten(0, (4, 12))
        up = theirs[f"{block}.kv_b_proj.weight"].unflatten(0, (4, 16))
        down = theirs[f"{block}.kv_a_proj_with_mqa.weight"]
        tensors |= {
            f"{block}.q_proj.weight": query[:, :8].flatten(0, 1),
            f"{block}.q_rope_proj.weight": query[:, 8:].flatten(0, 1),
            f"{block}.kv_down_proj.weight": down[:12],
            f"{block}.k_rope_proj.weight": down[12:],
            f"{block}.k_up_proj.weight": up[:, :8].flatten(0, 1),
            f"{block}.v_up_proj.weight": up[:, 8:].flatten(0, 1),
        }
    found = ours(LLAMA | mla | {"norm_eps": 0.01}, tensors)
    assert_same_function(found, reference, monkeypatch, norm=DeepseekV3RMSNorm)
