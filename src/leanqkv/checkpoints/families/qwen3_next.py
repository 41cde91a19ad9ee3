"""Qwen3-Next where all of its layers are attention: RMSNorms of one plus their weight, QK-norm, and a gate of every
column of the heads, whose matrix lies head by head behind the query's.

The published checkpoints have linear attention in three of four layers and experts, and are refused.
"""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from ...errors import LeanError
from ...model.config import LeanConfig
from .family import ATTENTION_BIASES
from .llama import QWEN3


def _read(stock: PreTrainedConfig) -> dict[str, Any]:
    if other := sorted({*stock.layer_types} - {"full_attention"}):
        raise LeanError(f"layer_types {', '.join(other)} cannot be expressed here, only full_attention")
    dense = {i for i in range(stock.num_hidden_layers) if not stock.num_experts or (i + 1) % stock.decoder_sparse_step}
    if len(dense | {*stock.mlp_only_layers}) < stock.num_hidden_layers:
        raise LeanError(f"num_experts {stock.num_experts} cannot be expressed here: all tokens share one more expert")
    return {}


def _write(config: LeanConfig) -> dict[str, Any]:
    return {"layer_types": ["full_attention"] * config.num_hidden_layers, "num_experts": 0}


QWEN3_NEXT = replace(
    QWEN3,
    model_type="qwen3_next",
    fixed={**QWEN3.fixed, "norm_offset": 1.0, "output_gate": {"type": "sigmoid", "per_head": False}},
    biases=ATTENTION_BIASES,
    partial_rope=True,
    interleaved=True,
    layer_modules={**QWEN3.layer_modules, "self_attn.q_proj": ("self_attn.q_proj", "self_attn.g_proj")},
    read=_read,
    write=_write,
)
