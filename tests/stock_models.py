"""Tiny models of transformers, one or more of every class that can be opened."""

from typing import Any

import torch
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
# Those that give the MLP a size and the norms an epsilon that is felt.
FEED: dict[str, Any] = {"intermediate_size": 48}
RMS: dict[str, Any] = FEED | {"rms_norm_eps": 0.01}
NEOX: dict[str, Any] = FEED | {"layer_norm_eps": 0.01}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GRANITE_FIELDS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 7.0,
}
SOME_WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA = SOME_WINDOWS | {
    "head_dim": 12,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
}
QWEN3_MOE = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-inner": ("gpt2", {"n_inner": 24, "activation_function": "relu", "layer_norm_epsilon": 0.01}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "attn_pdrop": 0, "resid_pdrop": 0.2, "embd_pdrop": 0.3}),
    "gpt2-inverse": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "neox": ("gpt_neox", NEOX),
    "neox-serial": ("gpt_neox", NEOX | {"use_parallel_residual": False, "hidden_act": "gelu_new", "rotary_pct": 1.0}),
    "neox-tied": ("gpt_neox", NEOX | {"tie_word_embeddings": True, "rotary_pct": 0.5, "rotary_emb_base": 500.0}),
    "neox-linear": ("gpt_neox", NEOX | {"rope_scaling": {"type": "linear", "factor": 2.0}, "hidden_dropout": 0.1}),
    "neox-unbiased": ("gpt_neox", NEOX | {"attention_bias": False}),
    "llama": ("llama", RMS),
    "llama-gqa-tied": ("llama", RMS | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-biased": ("llama", RMS | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-attention-bias": ("llama", RMS | {"attention_bias": True, "num_key_value_heads": 1}),
    "llama-head-dim": ("llama", RMS | {"head_dim": 12, "attention_dropout": 0.1}),
    "llama-llama3": ("llama", RMS | {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", RMS | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-yarn": (
        "llama",
        RMS | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "mistral": ("mistral", RMS | {"sliding_window": 5, "num_key_value_heads": 2}),
    "mistral-whole": ("mistral", RMS | {"sliding_window": None, "num_key_value_heads": 2, "head_dim": 12}),
    "qwen2": ("qwen2", RMS | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        RMS | {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", RMS | {"num_key_value_heads": 2, "head_dim": 12}),
    "qwen3-biased-tied": (
        "qwen3",
        RMS | {"num_key_value_heads": 4, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2-upper-window": (
        "qwen2",
        RMS | {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3-some-windows": ("qwen3", RMS | SOME_WINDOWS | {"use_sliding_window": True, "num_key_value_heads": 2}),
    "granite": ("granite", RMS | GRANITE_FIELDS | {"num_key_value_heads": 2}),
    "granite-biased-tied": ("granite", RMS | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", RMS | {"no_rope_layer_interval": 2, "num_key_value_heads": 2}),
    "smollm3-window": (
        "smollm3",
        RMS | {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5, "attention_bias": True},
    ),
    "olmo2": ("olmo2", RMS | {"num_key_value_heads": 2}),
    "olmo2-biased-tied": ("olmo2", RMS | {"attention_bias": True, "tie_word_embeddings": True, "rope_theta": 500.0}),
    "gemma3": ("gemma3_text", RMS | GEMMA),
    "gemma3-defaults": ("gemma3_text", RMS | {"head_dim": 12, "num_key_value_heads": 4, "sliding_window": 5}),
    "gemma3-full": ("gemma3_text", RMS | GEMMA | {"layer_types": ["full_attention"] * 3, "attention_bias": True}),
    "gemma3-windows": ("gemma3_text", RMS | GEMMA | {"layer_types": ["sliding_attention"] * 3, "head_dim": 16}),
    "phi3": ("phi3", RMS | {"num_key_value_heads": 2, "resid_pdrop": 0.1}),
    "phi3-window-tied": ("phi3", RMS | {"sliding_window": 5, "tie_word_embeddings": True, "rope_theta": 500.0}),
    "phi3-partial": ("phi3", RMS | {"partial_rotary_factor": 0.5, "num_key_value_heads": 1}),
    "phi3-long": ("phi3", RMS | {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
    "phi3-longer": ("phi3", RMS | {"rope_parameters": LONG, "original_max_position_embeddings": 8}),
    "mixtral": ("mixtral", RMS | {"num_key_value_heads": 2, "num_local_experts": 4}),
    "mixtral-window": ("mixtral", RMS | {"num_key_value_heads": 4, "num_local_experts": 3, "sliding_window": 5}),
    "qwen3-moe": ("qwen3_moe", RMS | QWEN3_MOE | {"norm_topk_prob": True, "head_dim": 12}),
    "qwen3-moe-unnormed": ("qwen3_moe", RMS | QWEN3_MOE | {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-moe-window": ("qwen3_moe", RMS | QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 5}),
    "smollm3-all-rope": ("smollm3", RMS | {"no_rope_layers": [1, 1, 1]}),
}
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
)


def stock_model(case: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of transformers, random in every weight."""
    model_type, settings = CASES[case]
    torch.manual_seed(0)  # the draws below leave nothing of it
    config = CONFIG_MAPPING[model_type](**SIZES | settings)
    return randomize(AutoModelForCausalLM.from_config(config)).to(dtype).eval()


LOCAL = {"sliding_window": 4, "window_layers": [0, 2], "window_rope_parameters": {"rope_theta": 100.0}}
