"""LLaMA (TinyLlama), Mistral, Qwen2 and Qwen3: one layout, with other biases, windows and norms."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from ...errors import LeanError
from ...model.config import LeanConfig
from .family import ATTENTION_BIASES, Family

_MODULES = {
    name: (name,)
    for name in (
        *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
}


def _qwen_window(stock: PreTrainedConfig) -> dict[str, Any]:
    """Only the layers from `max_window_layers` on are windowed; here all or none can be."""
    kinds = set(stock.layer_types)
    if kinds == {"full_attention"}:
        return {"sliding_window": None}
    if kinds == {"sliding_attention"} and stock.sliding_window is not None:
        return {"sliding_window": stock.sliding_window}
    raise LeanError(
        f"use_sliding_window {stock.use_sliding_window!r} with max_window_layers {stock.max_window_layers!r} and "
        f"layer_types {', '.join(sorted(kinds))} cannot be expressed here: all layers have the window, or none"
    )


def _write_qwen_window(config: LeanConfig) -> dict[str, Any]:
    window = config.sliding_window
    windowed_from = config.num_hidden_layers if window is None else 0
    return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": windowed_from}


def _qwen2(stock: PreTrainedConfig) -> dict[str, Any]:
    # Its configuration does not declare a head_dim, but its layers take one that is there.
    return _qwen_window(stock) | {"head_dim": getattr(stock, "head_dim", None)}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fixed={
        "position_embedding_type": "rope",
        "norm_type": "rmsnorm",
        "mlp_type": "gated",
        "scaled_residual_init": False,
    },
    settings={
        **{name: name for name in ("intermediate_size", "num_key_value_heads", "head_dim", "hidden_act")},
        "attention_dropout": "attention_dropout",
        "norm_eps": "rms_norm_eps",
    },
    biases={**ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
    partial_rope=False,
    prefix="model.",
    modules={"embed_tokens": "embed_tokens", "norm": "norm"},
    layer="layers.{}",
    layer_modules=_MODULES,
    head="lm_head",
    ignorable=("rotary_emb.inv_freq",),
)
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    settings={**LLAMA.settings, "sliding_window": "sliding_window"},
    biases={},
    ordinary={"layer_types": None},
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    settings={ours: theirs for ours, theirs in LLAMA.settings.items() if ours != "head_dim"},
    biases={"attention_bias": True},
    read=_qwen2,
    write=_write_qwen_window,
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={**LLAMA.fixed, "qk_norm": True},
    biases=ATTENTION_BIASES,
    layer_modules={**_MODULES, "self_attn.q_norm": ("self_attn.q_norm",), "self_attn.k_norm": ("self_attn.k_norm",)},
    read=_qwen_window,
    write=_write_qwen_window,
)
