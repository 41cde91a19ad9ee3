"""Which keys a query sees: sliding windows, prefixes, both directions."""

from .cases import BIASES, FOUR_LAYERS, HALF_ROTARY, Case, by_turns, on_both_shapes

BIDIRECTIONAL = {"mask_type": "bidirectional", "task": "masked_lm"}
LOCAL = {"sliding_window": 2, "window_layers": [0, 2, 3]}
TWO_BASES = {
    "rope_parameters": {"rope_theta": 500.0},
    "window_rope_parameters": {"rope_theta": 20.0, "partial_rotary_factor": 0.5},
}
PREFIX = {"mask_type": "prefix"}

CASES: list[Case] = [
    ("gpt", (), {"sliding_window": 64}),
    *on_both_shapes([(), ("gqa", "skipv1"), ("keys-as-values",)], sliding_window=2),
    *by_turns([("skipv0",), ("cla",), ("resformer",)], sliding_window=3, **BIASES),
    *on_both_shapes([("yoco:local=true",), ("yoco-v:local=true",)], sliding_window=2, **FOUR_LAYERS),
    *by_turns([("yoco",), ("cla",)], sliding_window=2, **FOUR_LAYERS),
    *on_both_shapes([("yoco:local=true", "gqa")], sliding_window=2, num_hidden_layers=6),
    *on_both_shapes([(), ("gqa",), ("keys-as-values",), ("nonlinear-query",)], **LOCAL, **FOUR_LAYERS),
    *by_turns([("yoco:local=true",)], sliding_window=2, window_layers=[0], num_hidden_layers=6),
    ("gpt", ("mla:rank=7",), LOCAL | FOUR_LAYERS),
    ("llama", (), LOCAL | TWO_BASES | FOUR_LAYERS),
    ("llama", ("keys-as-values", "gqa"), LOCAL | TWO_BASES | FOUR_LAYERS),
    ("llama", ("skipv1",), {"sliding_window": 2} | TWO_BASES),
    ("llama", (), {"rope_layers": [0, 2]}),
    ("llama", ("gqa", "skipv1"), {"rope_layers": [0, 2]}),
    ("llama", ("keys-as-values",), {"rope_layers": [1]}),
    ("llama", (), LOCAL | TWO_BASES | FOUR_LAYERS | {"rope_layers": [0, 1], "num_hidden_groups": 2}),
    *on_both_shapes([(), ("gqa", "skipv1"), ("keys-as-values",)], **PREFIX),
    *by_turns([("nonlinear-query",), ("cla",)], **PREFIX),
    *on_both_shapes([(), ("gqa", "skipv1"), ("identity-query",)], **BIDIRECTIONAL),
    *by_turns([("resformer",), ("keys-as-values",)], **BIDIRECTIONAL),
    *by_turns([("identity-query",), ("nonlinear-query",)], num_hidden_groups=1, **BIDIRECTIONAL),
    *on_both_shapes([()], qk_norm=True, **BIASES, **BIDIRECTIONAL),
    ("gpt", (), {"tie_word_embeddings": False} | BIDIRECTIONAL),
    ("llama", (), {"tie_word_embeddings": True, "block_type": "parallel"} | BIDIRECTIONAL),
    ("llama", ("yoco", "gqa"), HALF_ROTARY | FOUR_LAYERS | BIDIRECTIONAL),
    ("gpt", ("mla:rank=7", "skipv1"), BIDIRECTIONAL),
    ("llama", ("mla:rank=7,rope_dim=6", "cla"), BIDIRECTIONAL),
    ("gpt", ("mla:rank=7", "resformer"), {"sliding_window": 3}),
    ("llama", ("mla:rank=7,rope_dim=6", "skipv1"), PREFIX),
    ("llama", ("mla:rank=7,rope_dim=6", "yoco:local=true"), FOUR_LAYERS | {"sliding_window": 2}),
]
