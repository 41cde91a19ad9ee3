"""What surrounds attention: norms, the order of a block, skips, shared blocks, no W_O, experts, depth averages."""

from .cases import BIASES, FOUR_LAYERS, HALF_ROTARY, Case, by_turns, on_both_shapes

PARALLEL = {"block_type": "parallel"}
SHARED_NORM = {"block_type": "parallel_shared_norm"}
SKIPLESS = {"attention_skip": False, "mlp_skip": False}
IDENTITY_OUTPUT = {"output": [{"type": "identity"}]}
EXPERTS = {"mlp_type": "moe", "num_local_experts": 4, "num_experts_per_tok": 2}


MULTIPLIERS = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
}
AFTER, BOTH = {"norm_placement": "after"}, {"norm_placement": "both"}


def dense(dilation: int, period: int) -> dict:
    return {"depth_average": {"dilation": dilation, "period": period}}


PLAIN = [
    {"norm_type": "dyt"},
    {"norm_type": "dyt", "norm_bias": True},
    {"norm_type": "none"},
    PARALLEL,
    PARALLEL | {"norm_type": "none"},
    PARALLEL | SKIPLESS,
    PARALLEL | BIASES | {"norm_type": "dyt", "norm_bias": True},
    SHARED_NORM,
    SHARED_NORM | SKIPLESS,
    SHARED_NORM | {"norm_type": "none"},
    {"attention_skip": False},
    {"mlp_skip": False},
    SKIPLESS,
    SKIPLESS | {"norm_type": "none"},
    {"num_hidden_groups": 1},
    {"num_hidden_groups": 2} | FOUR_LAYERS,
    {"num_hidden_groups": 3} | BIASES | PARALLEL | {"num_hidden_layers": 6},
    IDENTITY_OUTPUT,
    {"output": [{"type": "identity", "layers": [0, 2]}]},
    IDENTITY_OUTPUT | PARALLEL | SKIPLESS | {"norm_type": "none"},
    EXPERTS,
    EXPERTS | {"num_experts_per_tok": 1},
    EXPERTS | {"num_experts_per_tok": 4},
    EXPERTS | {"num_local_experts": 3, "hidden_act": "relu2"} | PARALLEL,
    EXPERTS | {"num_hidden_groups": 1},
    EXPERTS | {"norm_topk_prob": False},
    MULTIPLIERS,
    MULTIPLIERS | PARALLEL | BIASES,
    MULTIPLIERS | SKIPLESS | {"norm_type": "none"},
    AFTER,
    AFTER | {"qk_norm": "width"},
    AFTER | {"norm_type": "dyt", "norm_bias": True} | MULTIPLIERS,
    BOTH | {"qk_norm": True},
    BOTH | SKIPLESS | BIASES,
    BOTH | {"num_hidden_groups": 1},
    dense(1, 1),
    dense(2, 1),
    dense(1, 2),
    dense(2, 2) | {"num_hidden_layers": 5},
    dense(3, 2) | {"num_hidden_layers": 5},
    dense(1, 2) | {"num_hidden_groups": 2} | FOUR_LAYERS,
    dense(2, 1) | SHARED_NORM | {"norm_type": "dyt"},
]
CASES: list[Case] = [
    *[(shape, (), overrides) for overrides in PLAIN for shape in ("gpt", "llama")],
    *on_both_shapes([("denseformer",), ("denseformer:dilation=2,period=3", "skipv1", "mlp-query")], **FOUR_LAYERS),
    *by_turns([("mlp-query",), ("skipv1", "gqa"), ("resformer:mode=per_token", "identity-query")], **PARALLEL),
    *by_turns([("identity-query", "gqa"), ("skipv1",), ("yoco",)], **IDENTITY_OUTPUT, **FOUR_LAYERS),
    *by_turns([("yoco",), ("cla", "gqa"), ("identity-query", "skipv1")], **EXPERTS, **FOUR_LAYERS),
    *by_turns([("identity-query",), ("nonlinear-query", "gqa")], num_hidden_groups=1),
    *by_turns([("gqa", "skipv1"), ("nonlinear-query", "yoco"), ("mla:rank=7",)], **MULTIPLIERS, **FOUR_LAYERS),
    *by_turns([("identity-query", "skipv1"), ("mlp-query",), ("resformer",)], **BOTH),
    *on_both_shapes([("gqa",), ("skipkv1", "gqa"), ("identity-query", "yoco")], qk_norm="width", **FOUR_LAYERS),
    *by_turns(
        [
            ("identity-query:layers=0,1", "identity-value:layers=2,3"),
            ("yoco",),
            ("skipv1:source_layer=1,injection=dynamic",),
            ("skipv1:source_layer=1,injection=odd_even",),
            ("fusedkv-lite",),
            ("svformer:source_layer=1", "keys-as-values"),
            ("skipv0:source_layer=1",),
        ],
        num_hidden_groups=2,
        **FOUR_LAYERS,
    ),
    *by_turns([("yoco:local=true",)], num_hidden_groups=2, num_hidden_layers=6, sliding_window=2),
    *on_both_shapes([("identity-query", "skipv1")], mlp_skip=False, norm_type="none"),
    ("llama", ("keys-as-values", "gqa"), IDENTITY_OUTPUT | SHARED_NORM | HALF_ROTARY),
    ("gpt", ("mla:rank=7",), IDENTITY_OUTPUT | EXPERTS),
    ("llama", ("mla:rank=7,rope_dim=6",), IDENTITY_OUTPUT | EXPERTS),
    ("llama", ("nonlinear-query", "resformer"), EXPERTS | dense(1, 1) | {"norm_type": "dyt"}),
]
