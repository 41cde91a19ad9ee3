"""What the equations are tested on: shape, mechanism presets, configuration fields. Here the projections, the heads
and the plain model; the other files of this folder named cases_* hold the rest."""

from typing import Any

Case = tuple[str, tuple[str, ...], dict[str, Any]]

BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
HALF_ROTARY = {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}
LAYERNORM_BIAS = {"norm_type": "layernorm", "norm_bias": True}
FOUR_LAYERS = {"num_hidden_layers": 4}  # the fewest with a layer before the middle one


def on_both_shapes(named: list[tuple[str, ...]], **overrides: Any) -> list[Case]:
    return [(shape, names, overrides) for names in named for shape in ("gpt", "llama")]


def by_turns(named: list[tuple[str, ...]], **overrides: Any) -> list[Case]:
    """Combinations of what is already tested on both shapes, each on one of them."""
    return [(("gpt", "llama")[i % 2], names, overrides) for i, names in enumerate(named)]


PROJECTIONS: list[Case] = on_both_shapes(
    [
        (),
        ("identity-query",),
        ("identity-query:layers=0,2",),
        ("identity-query:scale=1.0",),
        ("identity-key",),
        ("identity-key:layers=1",),
        ("identity-key:scale=0.8",),
        ("identity-value",),
        ("identity-value:layers=1,2",),
        ("identity-query:bias=true", "identity-key:bias=true", "identity-value:bias=true", "no-output:bias=true"),
        ("block-identity-key",),
        ("block-identity-key:start=5", "block-identity-value:start=24"),
        ("block-identity-key:layers=1,2", "gqa"),
        ("block-identity-key:start=2,width=3", "gqa"),
        ("block-identity-value:start=3", "gqa", "skipv1"),
        ("identity-query", "identity-key", "identity-value"),
        ("nonlinear-query",),
        ("nonlinear-query:activation=relu",),
        ("nonlinear-query:activation=relu2",),
        ("nonlinear-query:norm_in=false",),
        ("nonlinear-query:norm_out=false",),
        ("nonlinear-query:norm_in=false,norm_out=false",),
        ("nonlinear-query:rank=5",),
        ("nonlinear-query:anchor=linear",),
        ("nonlinear-query:scale=0.7",),
        ("nonlinear-query:layers=1", "identity-query:layers=0", "residual-query:layers=2"),
        ("residual-query",),
        ("residual-query:scale=0.6,layers=1,2",),
        ("skipv1",),
        ("skipv1:ratio=0.25",),
        ("skipv1:ratio=0.8",),
        ("skipv1:ratio=1.0",),
        ("skipv2",),
        ("skipv0",),
        ("skipv0:ratio=0.25",),
        ("skipv0:source_layer=1",),
        ("gqa",),
        ("mqa",),
        ("mqa", "nonlinear-query"),
        ("mqa", "skipv1:ratio=1.0"),
        ("gqa", "skipv1"),
        ("gqa", "skipv1:ratio=1.0"),
        ("gqa", "skipv2"),
        ("gqa", "skipv0"),
        ("gqa", "identity-query"),
        ("gqa", "residual-query"),
        ("gqa", "nonlinear-query", "skipv1"),
        ("identity-query", "skipv1"),
        ("identity-query", "skipv0"),
        ("identity-key", "skipv1"),
        ("identity-key", "skipv0"),
        ("identity-value", "skipv1"),
        ("identity-value", "skipv0"),
        ("identity-value:layers=0", "skipv1"),
        ("residual-query", "skipv0"),
        ("nonlinear-query", "skipv0"),
        ("nonlinear-query:anchor=linear", "gqa", "skipv0"),
    ]
)
OPTIONS: list[Case] = [
    ("gpt", (), BIASES | {"norm_bias": True}),
    ("gpt", (), {"attention_bias": True, "qk_norm": True}),
    ("gpt", (), {"attention_output_bias": True}),
    ("gpt", (), {"mlp_bias": True}),
    ("gpt", ("block-identity-key", "block-identity-value:start=1"), BIASES | {"qk_norm": True}),
    ("gpt", (), {"norm_bias": True}),
    ("gpt", (), {"norm_eps": 0.3}),
    ("gpt", (), {"position_embedding_type": "none"}),
    ("gpt", (), {"hidden_act": "relu2"}),
    ("gpt", (), {"tie_word_embeddings": False}),
    ("gpt", (), {"norm_type": "rmsnorm"}),
    ("gpt", (), {"head_dim": 6}),
    ("gpt", ("skipv1", "residual-query"), BIASES | {"norm_bias": True, "qk_norm": True}),
    ("gpt", ("skipv0",), BIASES | {"qk_norm": True}),
    ("gpt", ("nonlinear-query:anchor=linear",), BIASES | {"norm_eps": 0.3, "norm_bias": True}),
    ("gpt", ("nonlinear-query:anchor=linear", "gqa"), {"head_dim": 6}),
    ("gpt", ("skipv1:ratio=0.34",), {"hidden_size": 48, "num_attention_heads": 6}),
    ("gpt", ("gqa", "skipv1"), {"hidden_size": 48, "num_attention_heads": 8, "num_hidden_layers": 4}),
    ("gpt", ("gqa:group_size=4",), {"hidden_size": 48, "num_attention_heads": 8}),
    ("gpt", ("skipv2", "identity-query:layers=0,3"), {"num_hidden_layers": 4}),
    ("gpt", ("skipv3",), {"num_hidden_layers": 4}),
    ("gpt", ("skipv4",), {"num_hidden_layers": 5}),
    ("gpt", ("identity-query", "identity-key"), {"qk_norm": True}),
    ("llama", (), BIASES),
    ("llama", (), {"qk_norm": True, "norm_eps": 0.3}),
    ("llama", (), {"head_dim": 6}),
    ("llama", (), {"head_dim": 10, "qk_norm": True, "num_key_value_heads": 2}),
    ("llama", (), HALF_ROTARY),
    ("llama", (), {"rope_parameters": {"rope_theta": 500.0}}),
    ("llama", (), {"mlp_type": "mlp", "hidden_act": "gelu"}),
    ("llama", (), {"tie_word_embeddings": True}),
    ("llama", (), LAYERNORM_BIAS | BIASES),
    ("llama", ("skipv1", "gqa"), BIASES | {"qk_norm": True, "head_dim": 12} | HALF_ROTARY),
    ("llama", ("skipv0", "gqa"), {"attention_bias": True, "qk_norm": True}),
    ("llama", ("identity-query", "gqa"), {"qk_norm": True} | HALF_ROTARY),
    ("llama", ("identity-key", "identity-value"), BIASES | HALF_ROTARY),
    ("llama", ("residual-query", "skipv1"), BIASES | HALF_ROTARY),
    ("llama", ("nonlinear-query", "skipv1:ratio=0.75"), {"qk_norm": True, "norm_eps": 0.3}),
    ("llama", ("nonlinear-query:anchor=linear,norm_out=false", "gqa"), BIASES | {"head_dim": 6}),
]
FROM_MLP: list[Case] = [
    *on_both_shapes(
        [
            ("mlp-query",),
            ("mlp-query:scale=0.7",),
            ("mlp-query:layers=0,2",),
            ("mlp-query", "gqa"),
            ("mlp-query", "skipv0", "gqa"),
        ]
    ),
    *by_turns(
        [
            ("mlp-query:layers=1", "identity-query:layers=0", "residual-query:layers=2"),
            ("mlp-query", "skipv1", "identity-key"),
        ]
    ),
    ("gpt", ("mlp-query",), BIASES | {"qk_norm": True}),
    ("gpt", ("mlp-query",), {"intermediate_size": 32, "hidden_act": "relu2"}),
    ("llama", ("mlp-query", "mqa"), BIASES | {"qk_norm": True} | HALF_ROTARY),
    ("llama", ("mlp-query",), {"mlp_type": "mlp", "hidden_act": "relu"}),
]
CASES = PROJECTIONS + OPTIONS + FROM_MLP
