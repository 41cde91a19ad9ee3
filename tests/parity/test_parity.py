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
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

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


def llama_tensors(reference: PreTrainedModel, qk_norm: bool = False) -> dict[str, Tensor]:
    """Our names -> theirs; a Llama and a Qwen3 differ in the norms of query and key heads alone."""
    theirs = reference.state_dict()
    names = {"model.embed_tokens.weight": "model.embed_tokens.weight", "model.norm.weight": "model.norm.weight"}
    if not reference.config.tie_word_embeddings:
        names["lm_head.weight"] = "lm_head.weight"
    parts = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "self_attn.q_proj": "self_attn.q_proj",
        "self_attn.k_proj": "self_attn.k_proj",
        "self_attn.v_proj": "self_attn.v_proj",
        "self_attn.o_proj": "self_attn.o_proj",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
    }
    if qk_norm:
        parts |= {"self_attn.q_norm": "self_attn.q_norm", "self_attn.k_norm": "self_attn.k_norm"}
    for layer in range(reference.config.num_hidden_layers):
        for our_part, their_part in parts.items():
            for kind in ("weight", "bias"):
                if f"model.layers.{layer}.{their_part}.{kind}" in theirs:
                    names[f"model.layers.{layer}.{our_part}.{kind}"] = f"model.layers.{layer}.{their_part}.{kind}"
    return {our_name: theirs[their_name] for our_name, their_name in names.items()}


def gpt2_tensors(reference: GPT2LMHeadModel) -> dict[str, Tensor]:
    """GPT-2 stores its matrices untransposed and query, key and value side by side."""
    theirs = reference.state_dict()
    tensors = {
        "model.embed_tokens.weight": theirs["transformer.wte.weight"],
        "model.embed_positions.weight": theirs["transformer.wpe.weight"],
        "model.norm.weight": theirs["transformer.ln_f.weight"],
        "model.norm.bias": theirs["transformer.ln_f.bias"],
    }
    for layer in range(reference.config.n_layer):
        block, source = f"model.layers.{layer}", f"transformer.h.{layer}"
        for our_part, their_part in (("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2")):
            tensors[f"{block}.{our_part}.weight"] = theirs[f"{source}.{their_part}.weight"]
            tensors[f"{block}.{our_part}.bias"] = theirs[f"{source}.{their_part}.bias"]
        weights = theirs[f"{source}.attn.c_attn.weight"].chunk(3, dim=1)
        biases = theirs[f"{source}.attn.c_attn.bias"].chunk(3)
        for letter, weight, bias in zip("qkv", weights, biases, strict=True):
            tensors[f"{block}.self_attn.{letter}_proj.weight"] = weight.T
            tensors[f"{block}.self_attn.{letter}_proj.bias"] = bias
        for our_part, their_part in (
            ("self_attn.o_proj", "attn.c_proj"),
            ("mlp.up_proj", "mlp.c_fc"),
            ("mlp.down_proj", "mlp.c_proj"),
        ):
            tensors[f"{block}.{our_part}.weight"] = theirs[f"{source}.{their_part}.weight"].T
            tensors[f"{block}.{our_part}.bias"] = theirs[f"{source}.{their_part}.bias"]
    return tensors


def test_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2Config(
        vocab_size=97, n_positions=64, n_embd=32, n_layer=3, n_head=4, n_inner=48, layer_norm_epsilon=0.01
    )
    reference = randomize(GPT2LMHeadModel(config)).double().eval()
    assert config.activation_function == "gelu_new"
    biases = dict.fromkeys(("norm_bias", "attention_bias", "attention_output_bias", "mlp_bias"), True)
    found = ours(GPT | biases | {"hidden_act": "gelu_new", "norm_eps": 0.01}, gpt2_tensors(reference))
    assert_same_function(found, reference, monkeypatch, norm=None)


# The rotary variants of transformers, by name; longer than the pretrained context where that matters.
ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 500.0},
    "linear": {"rope_theta": 10000.0, "factor": 2.0},
    "dynamic": {"rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("rope_type", ROTARY)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_llama(rope_type: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = {"rope_type": rope_type, **ROTARY[rope_type]}
    reference = randomize(
        LlamaForCausalLM(LlamaConfig(**COMMON, rope_parameters=dict(rotary), attention_bias=bias, mlp_bias=bias))
    )
    reference = reference.double().eval()
    config = LLAMA | {"num_key_value_heads": 2, "norm_eps": 0.01, "rope_parameters": rotary, "mlp_bias": bias}
    config |= {"attention_bias": bias, "attention_output_bias": bias}
    assert_same_function(ours(config, llama_tensors(reference)), reference, monkeypatch, norm=LlamaRMSNorm)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_qwen3(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = {"rope_type": "default", "rope_theta": 1e6}
    reference = randomize(
        Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=12, rope_parameters=dict(rotary), tie_word_embeddings=tied))
    )
    reference = reference.double().eval()
    config = LLAMA | {
        "num_key_value_heads": 2,
        "norm_eps": 0.01,
        "rope_parameters": rotary,
        "tie_word_embeddings": tied,
    }
    found = ours(config | {"head_dim": 12, "qk_norm": True}, llama_tensors(reference, qk_norm=True))
    assert_same_function(found, reference, monkeypatch, norm=Qwen3RMSNorm)


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


def test_gpt_neox_is_parallel_with_two_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPTNeoXConfig(
        **{**COMMON, "num_key_value_heads": None, "rms_norm_eps": None},
        layer_norm_eps=0.01,
        use_parallel_residual=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )
    reference = randomize(GPTNeoXForCausalLM(config)).double().eval()
    parts = {
        "input_layernorm": "gpt_neox.layers.{}.input_layernorm",
        "post_attention_layernorm": "gpt_neox.layers.{}.post_attention_layernorm",
        "self_attn.o_proj": "gpt_neox.layers.{}.attention.dense",
        "mlp.up_proj": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "mlp.down_proj": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    }
    names = {
        "model.embed_tokens": "gpt_neox.embed_in",
        "model.norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out" if "embed_out.weight" in reference.state_dict() else "lm_head",
    }
    theirs = reference.state_dict()
    tensors = renamed(theirs, 3, names, parts)
    for layer in range(3):
        for kind in ("weight", "bias"):
            # Query, key and value of a head lie side by side.
            packed = theirs[f"gpt_neox.layers.{layer}.attention.query_key_value.{kind}"].unflatten(0, (4, 3, 8))
            for position, letter in enumerate("qkv"):
                part = packed[:, position].flatten(0, 1)
                tensors[f"model.layers.{layer}.self_attn.{letter}_proj.{kind}"] = part
    rotary = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    shape = GPT | BIASES | {"position_embedding_type": "rope", "rope_parameters": rotary, "tie_word_embeddings": False}
    found = ours(shape | {"block_type": "parallel", "norm_eps": 0.01}, tensors)
    assert_same_function(found, reference, monkeypatch, norm=None)


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


def test_mistral_attends_within_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = randomize(MistralForCausalLM(MistralConfig(**COMMON, sliding_window=5))).double().eval()
    config = LLAMA | {"num_key_value_heads": 2, "norm_eps": 0.01, "sliding_window": 5}
    assert_same_function(ours(config, llama_tensors(reference)), reference, monkeypatch, norm=MistralRMSNorm)


def test_mixtral(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, and the loss with the load-balancing loss in it. Its router rounds to float32."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    config = MixtralConfig(
        **COMMON, **sizes, sliding_window=None, output_router_logits=True, experts_implementation="eager"
    )
    reference = randomize(MixtralForCausalLM(config)).double().eval()
    theirs = reference.state_dict()
    same = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo"))
    parts = {part: f"model.layers.{{}}.{part}" for part in same} | {"mlp.router": "model.layers.{}.mlp.gate"}
    names = {name: name for name in ("model.embed_tokens", "model.norm", "lm_head")}
    tensors = renamed(theirs, 3, names, parts)
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up = theirs[f"{experts}.gate_up_proj"].chunk(2, dim=1)
        tensors |= {f"{experts}.gate_proj": gate, f"{experts}.up_proj": up}
        tensors[f"{experts}.down_proj"] = theirs[f"{experts}.down_proj"]
    shape = LLAMA | sizes | {"num_key_value_heads": 2, "norm_eps": 0.01, "rope_parameters": {"rope_theta": 1e6}}
    found = ours(shape | {"mlp_type": "moe", "output_router_logits": True}, tensors)
    monkeypatch.setattr(MixtralRMSNorm, "forward", exact_rmsnorm)
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for padding in ({}, {"attention_mask": mask}):
        one, other = (model(input_ids=ids, labels=ids, **padding) for model in (found, reference))
        assert_near(one.logits[1], other.logits[1], 1e-5)
        assert_near(one.logits[0, 5:], other.logits[0, 5:], 1e-5)
        assert_near(one.aux_loss, other.aux_loss, 1e-5)
        assert list(one) == list(other)
        if not padding:
            assert_near(one.loss, other.loss, 1e-5)


DEEPSEEK_YARN = {"rope_type": "yarn", **ROTARY["yarn"], "mscale": 0.7, "mscale_all_dim": 1.3}


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
