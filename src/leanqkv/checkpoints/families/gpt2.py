"""GPT-2. Its matrices are stored [in, out], query, key and value side by side."""

from .family import Family

GPT2 = Family(
    model_type="gpt2",
    fixed={"position_embedding_type": "learned", "norm_type": "layernorm", "mlp_type": "mlp"},
    settings={
        "norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
        "attention_dropout": "attn_pdrop",
        "hidden_dropout": "resid_pdrop",
        "embedding_dropout": "embd_pdrop",
        "scale_attn_by_inverse_layer_idx": "scale_attn_by_inverse_layer_idx",
    },
    biases=dict.fromkeys(("norm_bias", "attention_bias", "attention_output_bias", "mlp_bias"), True),
    ordinary={"scale_attn_weights": True, "add_cross_attention": False},
    read=lambda stock: {"intermediate_size": 4 * stock.n_embd if stock.n_inner is None else stock.n_inner},
    write=lambda config: {"n_inner": config.intermediate_size},
    prefix="transformer.",
    modules={"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"},
    layer="h.{}",
    layer_modules={
        "ln_1": ("input_layernorm",),
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.c_proj": ("self_attn.o_proj",),
        "ln_2": ("post_attention_layernorm",),
        "mlp.c_fc": ("mlp.up_proj",),
        "mlp.c_proj": ("mlp.down_proj",),
    },
    head="lm_head",
    ignorable=(".attn.bias", ".attn.masked_bias"),
    transposed=True,
)
