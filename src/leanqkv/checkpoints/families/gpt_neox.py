"""GPT-NeoX (Pythia). Query, key and value of each head lie side by side in one matrix."""

from typing import Any

from transformers import PreTrainedConfig

from .family import ATTENTION_BIASES, Family


def _read(stock: PreTrainedConfig) -> dict[str, Any]:
    block_type = "parallel" if stock.use_parallel_residual else "serial"
    return {"block_type": block_type, "embedding_dropout": stock.hidden_dropout}


GPT_NEOX = Family(
    model_type="gpt_neox",
    fixed={
        "position_embedding_type": "rope",
        "norm_type": "layernorm",
        "mlp_type": "mlp",
        "scaled_residual_init": False,
    },
    settings={
        **{name: name for name in ("intermediate_size", "hidden_act", "attention_dropout", "hidden_dropout")},
        "norm_eps": "layer_norm_eps",
    },
    biases={"norm_bias": True, "mlp_bias": True, **ATTENTION_BIASES},
    ordinary={"head_dim": None},
    read=_read,
    write=lambda config: {"use_parallel_residual": config.block_type == "parallel"},
    partial_rope=True,
    prefix="gpt_neox.",
    modules={"embed_in": "embed_tokens", "final_layer_norm": "norm"},
    layer="layers.{}",
    layer_modules={
        "input_layernorm": ("input_layernorm",),
        "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.dense": ("self_attn.o_proj",),
        "post_attention_layernorm": ("post_attention_layernorm",),
        "mlp.dense_h_to_4h": ("mlp.up_proj",),
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
    },
    head="embed_out",
    head_too="lm_head",
    ignorable=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    interleaved=True,
)
