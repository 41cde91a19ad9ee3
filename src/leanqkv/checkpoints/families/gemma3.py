"""Gemma 3's language model: norms before and after every sublayer, windows in most layers, RoPE of two bases.

Its norms multiply by one plus their weight (`norm_offset`). Gemma 3's report:
https://arxiv.org/abs/2503.19786
"""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from ...errors import LeanError
from ...model.config import LeanConfig
from .family import ATTENTION_BIASES, read_rope, write_rope
from .llama import LLAMA, QK_NORMS, read_windows, write_windows


def _read(stock: PreTrainedConfig) -> dict[str, Any]:
    if stock.use_bidirectional_attention:
        raise LeanError("use_bidirectional_attention True cannot be expressed here, only False")
    windows = read_windows(stock)
    ropes = {kind: read_rope(stock.rope_parameters[kind], partial=False) for kind in sorted({*stock.layer_types})}
    if "sliding_attention" in ropes:
        windows["window_rope_parameters"] = ropes["sliding_attention"]
    scale = stock.query_pre_attn_scalar**-0.5
    return windows | {
        "rope_parameters": ropes.get("full_attention"),
        "attention_multiplier": None if scale == stock.head_dim**-0.5 else scale,
        "embedding_multiplier": stock.hidden_size**0.5,
    }


def _write(config: LeanConfig) -> dict[str, Any]:
    full = write_rope(config.rope_parameters, partial=False)
    local = write_rope(config.window_rope_parameters, partial=False) or full
    scale = config.attention_multiplier
    # The class asks for a window even where no layer has one: its default.
    windows = {name: value for name, value in write_windows(config).items() if value is not None}
    return windows | {
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "query_pre_attn_scalar": config.head_dim if scale is None else round(scale**-2),
    }


GEMMA3 = replace(
    LLAMA,
    model_type="gemma3_text",
    fixed={**LLAMA.fixed, "norm_offset": 1.0, "norm_placement": "both", "qk_norm": True},
    settings={**LLAMA.settings, "hidden_act": "hidden_activation"},
    biases=ATTENTION_BIASES,
    ordinary={"final_logit_softcapping": None, "attn_logit_softcapping": None},
    layer_modules={
        **{name: ours for name, ours in LLAMA.layer_modules.items() if name != "post_attention_layernorm"},
        **QK_NORMS,
        "pre_feedforward_layernorm": ("post_attention_layernorm",),
        "post_attention_layernorm": ("attention_output_layernorm",),
        "post_feedforward_layernorm": ("mlp_output_layernorm",),
    },
    partial_rope=None,
    read=_read,
    write=_write,
)
