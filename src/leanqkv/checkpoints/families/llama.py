"""LLaMA (TinyLlama), Mistral, Qwen2 and Qwen3: one layout, with other biases, windows and norms."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from ...errors import LeanError
from ...model.config import LeanConfig
from .family import Family

_MODULES = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_NO_BIASES = dict.fromkeys(("norm_bias", "attention_bias", "attention_output_bias", "mlp_bias"), False)
_ATTENTION_BIASES = dict.fromkeys(("attention_bias", "attention_output_bias"), "attention_bias")


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


def _family(
    model_type: str,
    architecture: str,
    biases: Mapping[str, bool | str],
    *settings: str,
    read: Callable[[PreTrainedConfig], dict[str, Any]] = lambda stock: {},
    write: Callable[[LeanConfig], dict[str, Any]] = lambda config: {},
    ordinary: Mapping[str, Any] | None = None,
    qk_norm: bool = False,
) -> Family:
    same = ("intermediate_size", "num_key_value_heads", "hidden_act", "attention_dropout", *settings)
    return Family(
        model_type=model_type,
        architecture=architecture,
        fixed={
            "position_embedding_type": "rope",
            "norm_type": "rmsnorm",
            "mlp_type": "gated",
            "qk_norm": qk_norm,
            "scaled_residual_init": False,
        },
        settings={name: name for name in same} | {"norm_eps": "rms_norm_eps"},
        biases={**_NO_BIASES, **biases},
        ordinary=ordinary or {},
        read=read,
        write=write,
        partial_rope=False,
        prefix="model.",
        modules={"embed_tokens": "embed_tokens", "norm": "norm"},
        layer="layers.{}",
        layer_modules={name: (name,) for name in (*_MODULES, *(_HEAD_NORMS if qk_norm else ()))},
        head="lm_head",
        ignorable=("rotary_emb.inv_freq",),
    )


LLAMA = _family("llama", "LlamaForCausalLM", {**_ATTENTION_BIASES, "mlp_bias": "mlp_bias"}, "head_dim")
MISTRAL = _family("mistral", "MistralForCausalLM", {}, "head_dim", "sliding_window", ordinary={"layer_types": None})
QWEN2 = _family("qwen2", "Qwen2ForCausalLM", {"attention_bias": True}, read=_qwen2, write=_write_qwen_window)
QWEN3 = _family(
    "qwen3",
    "Qwen3ForCausalLM",
    _ATTENTION_BIASES,
    "head_dim",
    read=_qwen_window,
    write=_write_qwen_window,
    qk_norm=True,
)
