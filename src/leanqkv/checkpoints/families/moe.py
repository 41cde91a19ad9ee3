"""Mixtral and Qwen3-MoE: experts in every layer, which their files hold one by one."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from ...errors import LeanError
from ...model.config import LeanConfig
from .llama import LLAMA, MISTRAL, QWEN3

_EXPERTS = {**LLAMA.fixed, "mlp_type": "moe"}
_SETTINGS = {name: name for name in ("num_experts_per_tok", "router_aux_loss_coef")}


def _dense(modules: dict[str, tuple[str, ...]], router: str) -> dict[str, tuple[str, ...]]:
    """Modules in a layer with a router in place of the MLP."""
    return {name: ours for name, ours in modules.items() if "mlp" not in name} | {router: ("mlp.router",)}


def _read_qwen3_moe(stock: PreTrainedConfig) -> dict[str, Any]:
    if stock.mlp_only_layers or stock.decoder_sparse_step != 1:
        raise LeanError(
            f"mlp_only_layers {stock.mlp_only_layers} and decoder_sparse_step {stock.decoder_sparse_step} cannot be "
            "expressed here: all layers have experts"
        )
    return {}


def _write_qwen3_moe(config: LeanConfig) -> dict[str, Any]:
    # Its configuration does not declare a head_dim, but its checkpoints have one, and its layers take it.
    return {"head_dim": config.head_dim, "use_sliding_window": config.sliding_window is not None}


MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    fixed={**_EXPERTS, "norm_topk_prob": True},
    settings={**MISTRAL.settings, **_SETTINGS, "num_local_experts": "num_local_experts"},
    layer_modules=_dense(dict(MISTRAL.layer_modules), "block_sparse_moe.gate"),
    experts={
        "block_sparse_moe.experts.{}.w1": "mlp.experts.gate_proj",
        "block_sparse_moe.experts.{}.w3": "mlp.experts.up_proj",
        "block_sparse_moe.experts.{}.w2": "mlp.experts.down_proj",
    },
)
QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    fixed={**_EXPERTS, "qk_norm": True},
    settings={
        **{ours: theirs for ours, theirs in MISTRAL.settings.items() if ours != "head_dim"},
        **_SETTINGS,
        "intermediate_size": "moe_intermediate_size",
        "num_local_experts": "num_experts",
        "norm_topk_prob": "norm_topk_prob",
    },
    layer_modules=_dense(dict(QWEN3.layer_modules), "mlp.gate"),
    experts={f"mlp.experts.{{}}.{name}": f"mlp.experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
)
