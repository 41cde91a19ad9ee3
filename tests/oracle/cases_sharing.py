"""Keys and values shared between layers, and keys that are values too."""

from typing import Any

from .cases import BIASES, FOUR_LAYERS, HALF_ROTARY, LAYERNORM_BIAS, Case, by_turns, on_both_shapes

FIRST_LAYER_VALUES: list[Case] = on_both_shapes(
    [
        *[(f"skipv1:injection={injection}",) for injection in ("pooling", "dynamic", "odd_even", "resformer")],
        ("skipv1:injection=pooling,ratio=0.75",),
        ("skipv1:injection=dynamic,ratio=0.25",),
        ("skipv1:injection=odd_even,source_layer=1",),
        ("svformer",),
        ("skipkv1",),
        ("skipkv1:ratio=0.25",),
        ("skipkv1:source_layer=1",),
        ("skipv1:keys=true,injection=pooling",),
        ("skipv1-yoco",),
        ("skipv1:middle_keys=true,ratio=0.25,injection=odd_even",),
        ("skipv1:middle_keys=true,source_layer=1",),
    ],
    **FOUR_LAYERS,
) + by_turns(
    [
        ("skipv1:injection=odd_even,ratio=0.25",),
        ("skipv1:injection=resformer,ratio=0.25",),
        ("skipv1:injection=dynamic,source_layer=1",),
        ("skipv1:injection=pooling,source_layer=2",),
        ("skipv1:injection=resformer,source_layer=1",),
        ("gqa", "skipv1:injection=dynamic"),
        ("gqa", "skipv1:injection=resformer"),
        ("identity-value", "skipv1:injection=pooling"),
        ("identity-value", "identity-query", "skipv1:injection=resformer"),
        ("svformer", "gqa"),
        ("skipv1:keys=true,ratio=1.0",),
        ("skipv1:keys=true,injection=dynamic", "gqa"),
        ("skipv1:keys=true,injection=odd_even", "identity-query"),
        ("skipkv1", "identity-key"),
        ("skipkv1", "residual-query"),
        ("skipv1-yoco", "gqa"),
        ("skipv1-yoco:injection=resformer", "identity-query"),
        ("skipv1-yoco", "identity-key"),
        ("skipv1-yoco", "nonlinear-query"),
    ],
    **FOUR_LAYERS,
)
INTERPOLATED_VALUES: list[Case] = on_both_shapes(
    [
        ("resformer",),
        ("resformer:weight=0.3",),
        ("resformer:mode=per_layer",),
        ("resformer:mode=per_token",),
        ("resformer:mode=per_token,weight=0.8", "gqa"),
    ]
) + by_turns(
    [
        ("resformer:mode=per_layer", "identity-value"),
        ("resformer:mode=per_token", "nonlinear-query", "identity-key"),
    ]
)
SHARED_LAYERS: list[Case] = on_both_shapes(
    [
        ("yoco-v",),
        ("yoco",),
        ("yoco-v", "gqa"),
        ("yoco", "mqa"),
        ("cla-v",),
        ("cla",),
        ("cla-v:group_size=3",),
        ("cla:group_size=3",),
        ("fusedkv-lite",),
        ("fusedkv-lite", "gqa"),
    ],
    **FOUR_LAYERS,
) + by_turns(
    [
        ("yoco-v", "identity-value"),
        ("yoco-v", "identity-query"),
        ("yoco", "identity-key"),
        ("yoco", "residual-query"),
        ("cla:group_size=4", "gqa"),
        ("cla-v", "identity-key"),
        ("cla", "identity-query", "identity-value"),
        ("fusedkv-lite", "mlp-query"),
        ("fusedkv-lite", "identity-key"),
    ],
    **FOUR_LAYERS,
)
# Layers with a window have rotary positions of their own.
LOCAL_ROPE: dict[str, Any] = {
    "sliding_window": 3,
    "window_layers": [1],
    "window_rope_parameters": {"rope_theta": 20.0},
}
LATENT_VALUES: list[Case] = on_both_shapes(
    [
        ("latent-values",),
        ("latent-values:rank=5", "gqa"),
        ("latent-values:rank=2,layers=1", "latent-values:rank=7,layers=2", "mqa"),
        ("latent-values:rank=1", "identity-query", "gqa"),
    ],
    **FOUR_LAYERS,
) + by_turns(
    [
        ("latent-values:rank=3", "nonlinear-query", "gqa"),
        ("latent-values", "identity-key"),
        ("latent-values:rank=4,layers=0", "mlp-query"),
        ("latent-values:rank=6", "denseformer"),
        ("latent-values:rank=3,keys=true", "gqa"),
        ("latent-values:rank=2,keys=true", "identity-key"),
        ("latent-values:rank=5,keys=true,layers=0,2", "nonlinear-query"),
        ("latent-values:rank=1,keys=true", "latent-keys", "gqa"),
    ],
    **FOUR_LAYERS,
)
LATENT_KEYS: list[Case] = [
    *on_both_shapes(
        [
            ("latent-keys",),
            ("latent-keys:rank=10", "gqa"),
            ("latent-keys:rank=2,layers=1", "latent-keys:rank=8,layers=2", "mqa"),
            ("latent-keys", "latent-values:rank=3", "gqa"),
            ("latent-keys:rank=4", "identity-query", "latent-values:rank=1"),
        ],
        **FOUR_LAYERS,
    ),
    ("llama", ("latent-keys:columns=0,4,1,3",), {}),
    ("llama", ("latent-keys:columns=2,0,0,1", "gqa"), BIASES),
    ("llama", ("latent-keys:columns=1,0,1,1", "mqa"), BIASES | {"sliding_window": 3}),
    (
        "llama",
        ("latent-keys:columns=3,1,0,2,4,0", "nonlinear-query:anchor=linear"),
        {"head_dim": 12, "attention_multiplier": 0.3},
    ),
    ("llama", ("latent-keys:columns=0,0,3,0,layers=1", "residual-query"), {"attention_bias": True}),
    ("llama", ("latent-keys:rank=14", "latent-values", "gqa"), {"rope_layers": [0, 2], "sliding_window": 3}),
    ("llama", ("latent-keys", "mlp-query"), {"rope_parameters": {"rope_theta": 30.0}}),
    ("llama", ("latent-keys:columns=1,2,1,0", "gqa"), LOCAL_ROPE),
    ("llama", ("latent-keys",), {"position_embedding_type": "learned", "attention_bias": True}),
    ("gpt", ("latent-keys:rank=1", "denseformer"), BIASES),
    ("gpt", ("latent-keys", "gqa"), BIASES | {"head_dim": 5, "sliding_window": 4}),
]
KEYS_AS_VALUES: list[Case] = on_both_shapes(
    [
        ("keys-as-values",),
        ("keys-as-values", "gqa"),
        ("keys-as-values", "cla"),
        ("keys-as-values", "yoco-v"),
        ("keys-as-values", "fusedkv-lite"),
        ("keys-as-values", "skipv1"),
        ("keys-as-values", "skipkv1"),
        ("keys-as-values", "resformer:mode=per_token"),
    ],
    **FOUR_LAYERS,
) + by_turns(
    [
        ("keys-as-values", "mqa", "identity-query"),
        ("keys-as-values", "identity-key"),
        ("keys-as-values", "identity-key:layers=0"),
        ("keys-as-values", "nonlinear-query"),
        ("keys-as-values", "skipkv1:ratio=1.0"),
        ("keys-as-values", "yoco", "gqa"),
        ("keys-as-values", "cla-v", "identity-query"),
        ("keys-as-values", "skipkv1:injection=pooling,ratio=0.25"),
        ("keys-as-values", "skipkv1:injection=resformer"),
        ("keys-as-values", "skipv1:injection=resformer"),
        ("keys-as-values", "skipv0"),
        ("keys-as-values", "svformer", "gqa"),
    ],
    **FOUR_LAYERS,
)
OPTIONS: list[Case] = [
    ("gpt", ("yoco",), {"num_hidden_layers": 3}),
    ("gpt", ("yoco",), {"num_hidden_layers": 2}),
    ("gpt", ("yoco-v",), {"num_hidden_layers": 5}),
    ("gpt", ("fusedkv-lite",), {"num_hidden_layers": 3}),
    ("gpt", ("skipv1-yoco",), {"num_hidden_layers": 3}),
    ("gpt", ("cla",), {"num_hidden_layers": 3}),
    ("gpt", ("fusedkv-lite",), {"num_hidden_layers": 6}),
    ("gpt", ("skipv1:injection=dynamic",), {"num_hidden_layers": 6}),
    ("gpt", ("skipv1:injection=pooling,ratio=0.34",), {"hidden_size": 48, "num_attention_heads": 6}),
    ("gpt", ("gqa", "skipv1:injection=resformer"), {"hidden_size": 48, "num_attention_heads": 8, "head_dim": 6}),
    ("gpt", ("skipkv1",), BIASES | {"qk_norm": True}),
    ("gpt", ("skipv1-yoco",), BIASES | {"qk_norm": True} | FOUR_LAYERS),
    ("gpt", ("resformer:mode=per_token",), BIASES | {"head_dim": 6}),
    ("gpt", ("resformer:mode=per_layer",), BIASES | {"norm_bias": True}),
    ("gpt", ("yoco",), BIASES | {"qk_norm": True} | FOUR_LAYERS),
    ("gpt", ("cla-v",), BIASES | {"head_dim": 6} | FOUR_LAYERS),
    ("gpt", ("fusedkv-lite", "residual-query"), BIASES | {"qk_norm": True} | FOUR_LAYERS),
    ("gpt", ("keys-as-values:layers=0,2",), {}),
    ("gpt", ("keys-as-values:layers=1", "identity-value:layers=0"), BIASES),
    ("gpt", ("keys-as-values:layers=0,1", "skipv1"), {}),
    ("gpt", ("keys-as-values",), BIASES | {"qk_norm": True}),
    ("gpt", ("keys-as-values",), {"position_embedding_type": "none"}),
    ("llama", ("skipkv1", "gqa"), BIASES | {"qk_norm": True} | HALF_ROTARY),
    ("llama", ("skipv1-yoco",), BIASES | {"qk_norm": True} | HALF_ROTARY | FOUR_LAYERS),
    ("llama", ("resformer:mode=per_token", "gqa"), BIASES | LAYERNORM_BIAS | HALF_ROTARY),
    ("llama", ("yoco", "gqa"), BIASES | {"qk_norm": True, "norm_eps": 0.3} | HALF_ROTARY | FOUR_LAYERS),
    ("llama", ("cla", "identity-query"), {"qk_norm": True} | HALF_ROTARY | FOUR_LAYERS),
    ("llama", ("fusedkv-lite", "gqa"), BIASES | {"qk_norm": True, "head_dim": 6} | FOUR_LAYERS),
    ("llama", ("keys-as-values",), {"qk_norm": True}),
    ("llama", ("keys-as-values",), HALF_ROTARY),
    ("llama", ("keys-as-values", "gqa"), BIASES | {"qk_norm": True, "head_dim": 12} | HALF_ROTARY),
    ("llama", ("keys-as-values", "cla", "gqa"), BIASES | {"qk_norm": True} | HALF_ROTARY | FOUR_LAYERS),
    ("llama", ("keys-as-values", "skipkv1"), BIASES | {"qk_norm": True} | HALF_ROTARY),
]
# The factor of an identity key goes with the key, to whichever layer attends with it.
BORROWED_FACTORS = by_turns(
    [
        ("identity-key:layers=1", "yoco"),
        ("identity-key:layers=0", "skipkv1"),
        ("identity-key:layers=0", "cla"),
        ("identity-key:layers=1", "skipv1-yoco"),
        ("identity-key:layers=1", "fusedkv-lite"),
    ],
    **FOUR_LAYERS,
)


def rows(*heads: list[int]) -> dict[str, Any]:
    return {"key_value": {"type": "borrowed_values", "heads": list(heads)}}


# Of three layers, four and two heads: of the same layer, of the layer below and of the first one, not the last heads.
SCATTERED = rows([0, 2, 0, 0], [1, 0, 0, 3], [1, 3, 1, 1], [2, 1, 0, 1], [2, 2, 2, 0])
GROUPED = rows([0, 1, 0, 0], [1, 0, 0, 0], [2, 1, 1, 1])
ALL_OF_A_LAYER = rows([1, 0, 0, 3], [1, 1, 0, 2], [1, 2, 0, 1], [1, 3, 0, 1])
BORROWED_VALUES: list[Case] = (
    on_both_shapes([("borrowed-values",), ("borrowed-values:ratio=0.25",), ("borrowed-values", "gqa")])
    + on_both_shapes([()], **SCATTERED)
    + on_both_shapes([("gqa",)], **GROUPED)
    + by_turns([(), ("nonlinear-query",)], **ALL_OF_A_LAYER)
    + by_turns(
        [("identity-query",), ("identity-key",), ("identity-value",), ("residual-query", "denseformer")], **SCATTERED
    )
    + by_turns([("borrowed-values", "keys-as-values"), ("borrowed-values", "keys-as-values")])
    + by_turns([("keys-as-values",)] * 2, **rows([0, 3, 0, 1], [1, 2, 0, 0], [1, 3, 1, 1], [2, 3, 0, 2]))
    + by_turns([("gqa",)] * 2, **GROUPED | BIASES | {"qk_norm": True, "head_dim": 6})
    + [("llama", (), SCATTERED | BIASES | LAYERNORM_BIAS | HALF_ROTARY | {"sliding_window": 3})]
    + [("gpt", (), {"num_hidden_groups": 1} | rows(*([i, 3 - i, i, 0] for i in range(3))))]
)
CASES = (
    BORROWED_VALUES
    + BORROWED_FACTORS
    + FIRST_LAYER_VALUES
    + INTERPOLATED_VALUES
    + SHARED_LAYERS
    + KEYS_AS_VALUES
    + LATENT_VALUES
    + LATENT_KEYS
    + OPTIONS
)
