"""Every mechanism, and combinations of them, on the two tiny shapes."""

from itertools import product
from typing import Any, NamedTuple

from shapes import randomize, tiny

from leanqkv import LeanConfig, LeanForCausalLM
from leanqkv.presets.catalog import MECHANISMS

PAD = 0
FOUR = {"num_hidden_layers": 4}  # so that the middle layer is not the first
DEEPER = dict.fromkeys(("skipv3", "skipv1-yoco", "yoco-v", "yoco", "cla-v", "cla", "fusedkv-lite"), FOUR)
DEEPER["skipv4"] = {"num_hidden_layers": 5}
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "qk_norm": True}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
LOCAL = FOUR | {"sliding_window": 4, "window_layers": [0, 2, 3]}
ROTARY = {"position_embedding_type": "rope"}
# Of the same layer, of the layer below and of the first one, not the last heads.
SCATTERED = {
    "type": "borrowed_values",
    "heads": [[0, 2, 0, 0], [1, 0, 0, 3], [1, 3, 1, 1], [2, 1, 0, 1], [2, 2, 2, 0]],
}
COMBINED: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    ((), BIASES),
    (("skipv1", "nonlinear-query"), {}),
    (("gqa", "skipv1"), BIASES),
    (("mqa", "skipv1:ratio=1.0"), {}),
    (("identity-query:layers=0,2",), {}),
    (("identity-query:bias=true", "identity-key:bias=true", "identity-value:bias=true", "no-output:bias=true"), {}),
    (("block-identity-key:start=6", "block-identity-value:start=26,width=5", "skipv1"), BIASES),
    (("identity-query", "identity-key", "identity-value", "skipv1:ratio=0.75"), {}),
    (("nonlinear-query:anchor=linear,activation=relu2,norm_out=false", "gqa", "skipv0"), {"head_dim": 6}),
    (("skipv1:injection=pooling",), {}),
    (("skipv1:injection=dynamic,ratio=0.75", "gqa"), FOUR),
    (("skipv1:injection=odd_even",), FOUR),
    (("skipv1:injection=resformer", "nonlinear-query"), {}),
    (("resformer:mode=per_layer", "gqa"), {}),
    (("resformer:mode=per_token,weight=0.7", "keys-as-values"), {}),
    (("mla", "skipv1"), {"attention_bias": True}),
    (("mla:rank=12", "skipv1:injection=dynamic", "nonlinear-query"), FOUR),
    (("mla", "yoco", "mlp-query"), FOUR),
    (("mla", "resformer", "identity-query"), {}),
    (("keys-as-values", "skipv1", "gqa"), BIASES),
    (("keys-as-values", "yoco"), FOUR),
    (("denseformer:dilation=2,period=2", "skipv1"), FOUR),
    (("hyper-connections:streams=2,mode=mhc", "skipv1", "nonlinear-query"), BIASES),
    (("hyper-connections:mode=static", "gqa"), FOUR | {"num_hidden_groups": 2}),
    (("hyper-connections:streams=3", "mla"), {"block_type": "parallel_shared_norm"}),
    (("no-output", "identity-query"), {"block_type": "parallel"}),
    ((), {"block_type": "parallel_shared_norm", "norm_type": "dyt", "norm_eps": 1e-5}),
    ((), {"norm_type": "none", "norm_eps": 1e-5, "attention_skip": False, "mlp_skip": False}),
    (("mlp-query",), {"norm_type": "none", "mlp_skip": False}),
    (("skipv1",), {"block_type": "parallel", "attention_skip": False, "mlp_skip": False}),
    (("yoco-v:local=true",), {"num_hidden_layers": 6, "sliding_window": 4}),
    (("skipv1", "gqa"), {"sliding_window": 5}),
    (("skipv1",), {"mlp_type": "moe", "num_local_experts": 3}),
    (("keys-as-values",), {"mask_type": "prefix"}),
    ((), FOUR | {"num_hidden_groups": 2}),
    (("cla", "identity-query:layers=0,2"), FOUR | {"num_hidden_groups": 2, "group_order": "turns"}),
    (("gqa",), MULTIPLIERS | {"qk_norm": True, "norm_placement": "both"}),
    (("gqa",), LOCAL | {"rope_parameters": {"rope_theta": 500.0}, "window_rope_parameters": {"rope_theta": 20.0}}),
    (("skipv1", "gqa"), MULTIPLIERS | {"qk_norm": "width", "norm_placement": "after"}),
    (("nonlinear-query", "gqa"), FOUR | {"rope_layers": [0, 2]}),
    (("mla",), LOCAL | MULTIPLIERS),
    (("keys-as-values",), LOCAL),
    ((), {"mlp_type": "moe", "num_local_experts": 3, "norm_topk_prob": False}),
    ((), {"key_value": SCATTERED}),
    ((), {"key_value": SCATTERED, **BIASES}),
    (("gqa",), {"key_value": {"type": "borrowed_values", "heads": [[0, 1, 0, 0], [1, 0, 0, 0], [2, 1, 1, 1]]}}),
    (("nonlinear-query",), {"key_value": SCATTERED, "sliding_window": 5}),
    (("borrowed-values:ratio=0.25", "keys-as-values"), {}),
    (("latent-values:rank=5", "gqa"), BIASES),
    (("latent-values:rank=3,layers=1", "latent-values:rank=13,layers=2", "nonlinear-query"), {}),
    (("latent-values", "gqa"), {"sliding_window": 5}),
    (("latent-values:rank=3", "mqa"), FOUR | {"num_hidden_groups": 2}),
    (("latent-keys:rank=9,layers=1", "latent-keys:rank=12,layers=2", "nonlinear-query"), {}),
    (("latent-keys:columns=0,2,3,1", "latent-values:rank=3"), BIASES | {"qk_norm": False}),
    (("latent-keys:rank=3", "mqa"), FOUR | {"num_hidden_groups": 2}),
    (("latent-keys:columns=1,0,2,1", "gqa"), {"sliding_window": 5}),
    (("latent-keys:rank=6", "latent-values:rank=3", "gqa"), {"sliding_window": 4}),
    (("latent-keys:rank=8", "latent-values", "gqa"), FOUR | {"rope_layers": [0, 2]}),
    (("latent-values:rank=3,keys=true", "gqa"), BIASES | {"qk_norm": False}),
    (("latent-values:rank=4,keys=true", "latent-keys:columns=0,2,3,1"), BIASES | {"qk_norm": False}),
    (("latent-values:rank=3,keys=true", "mqa"), FOUR | {"num_hidden_groups": 2}),
    (("latent-values:rank=4,keys=true", "gqa"), FOUR | {"rope_layers": [0, 2]}),
    (("latent-values:rank=5,keys=true", "nonlinear-query"), {}),
    (("latent-values:rank=3,keys=true", "latent-keys:rank=6", "gqa"), {}),
    (("latent-values:keys=true", "identity-key"), {"mask_type": "prefix"}),
    (("latent-keys:before_rotary=true,rank=9", "latent-values:rank=3,keys=true", "gqa"), BIASES | ROTARY),
    (("latent-keys:before_rotary=true,rank=5", "latent-values:keys=true"), {"qk_norm": "width"} | ROTARY),
    (("nonlinear-query", "nonlinear-key", "nonlinear-value", "skipv1"), {"qk_norm": True}),
    (("nonlinear-key:anchor=linear,rank=5", "nonlinear-value:anchor=linear,norm_in=false", "gqa"), BIASES),
    (("nonlinear-value", "latent-keys"), {}),
    (("nonlinear-key", "latent-values:rank=5,keys=true"), {}),
    (("nonlinear-key", "keys-as-values", "skipv1"), {}),
    (("output-gate:per_head=true", "gqa", "skipv1", "nonlinear-query"), BIASES),
    (("output-gate", "mla", "skipv1"), {"attention_bias": True}),
    (("output-gate:per_head=true", "no-output", "keys-as-values"), {"block_type": "parallel"}),
    (("output-gate", "latent-values:rank=3,keys=true", "gqa"), FOUR | {"num_hidden_groups": 2}),
    (("cla",), FOUR | {"sliding_window": 4}),  # layers that store nothing
]


class Variant(NamedTuple):
    shape: str
    mechanisms: tuple[str, ...]
    overrides: dict[str, Any]

    def __str__(self) -> str:
        return "+".join((self.shape, *self.mechanisms, *self.overrides))

    def config(self, **overrides: Any) -> LeanConfig:
        return tiny(self.shape, *self.mechanisms, pad_token_id=PAD, **{**self.overrides, **overrides})

    def trained(self, **overrides: Any) -> LeanForCausalLM:
        """In evaluation mode, with weights far from their start: distinct tokens, nothing near zero. Without norms they
        are such that a matrix keeps the length of what it multiplies, or rounding would grow with every layer."""
        config = self.config(**overrides)
        std = 0.5 if config.norm_type != "none" else config.hidden_size**-0.5
        return randomize(LeanForCausalLM(config), std=std).eval()


# Every preset on both shapes, combinations by turns on one of them.
ALL = [Variant(shape, (name,), DEEPER.get(name, {})) for shape, name in product(("gpt", "llama"), MECHANISMS)]
ALL += [Variant(("gpt", "llama")[i % 2], *combined) for i, combined in enumerate(COMBINED)]
ALL += [Variant(shape, (), {}) for shape in ("gpt", "llama")]
