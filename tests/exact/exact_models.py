"""Random models in float64 and the one oracle of these tests: the logits of a plainly built model."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leanqkv import ConfigError, LeanConfig, LeanForCausalLM, LeanForMaskedLM
from leanqkv.model.shapes import parameter_shapes

VOCABULARY = 13
# Rounding of float64 through four layers of matrices some dozen wide, per unit of the condition number.
ROUNDING = 1e-13


def small(**overrides: Any) -> LeanConfig:
    """A model without norms, such as the theorems ask for, unless `overrides` say otherwise."""
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 16,
        "norm_type": "none",
    }
    return LeanConfig(**fields | overrides)


def weights(config: LeanConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor random: matrices keep the length of what they multiply, biases and norm weights are far from their
    start."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in parameter_shapes(config).items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) > 1:
            drawn *= 1.0 if "embed_" in name else shape[-1] ** -0.5
        else:
            drawn = 0.3 * drawn + (0 if name.endswith("bias") else 1)
        if name.endswith(("connection.pre", "connection.residual")):  # streams are averaged, not added up
            drawn /= config.hyper_connections["streams"]
        if name.endswith("connection.scale"):
            drawn *= 0.1
        tensors[name] = drawn
    return tensors


def with_condition(size: int, condition: float, seed: int = 0) -> Tensor:
    """[size, size] with singular values from 1 down to 1 / condition, and no structure beside."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0] for _ in range(2)
    )
    values = torch.logspace(0, -1, size, dtype=torch.float64) ** torch.log10(torch.tensor(condition)).item()
    return left @ torch.diag(values) @ right


def build(config: LeanConfig, tensors: Mapping[str, Tensor]) -> LeanForCausalLM | LeanForMaskedLM:
    """The model with exactly these tensors, float64."""
    kind = LeanForMaskedLM if config.task == "masked_lm" else LeanForCausalLM
    torch.manual_seed(0)
    model = kind(config).double().eval()
    state = dict(tensors)
    assert state.keys() == parameter_shapes(config).keys()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
SKIPLESS = {"attention_skip": False, "mlp_skip": False}
IDS = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def logits(config: LeanConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    return build(config, tensors)(input_ids=IDS).logits


def relative(computed: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest logit."""
    assert expected.isfinite().all()
    return ((computed - expected).abs().max() / expected.abs().max()).item()


def tolerance(conditions: Mapping[str, float]) -> float:
    return ROUNDING * max([1.0, *conditions.values()])


def elements(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensors[name].numel() for name in tensors)


# --- random configurations --------------------------------------------------------------------------------------------

SHARING: tuple[dict[str, Any], ...] = (
    {"type": "first_layer_values"},
    {"type": "first_layer_values", "ratio": 1.0},
    {"type": "first_layer_values", "inject": False},
    {"type": "first_layer_values", "injection": "pooling"},
    {"type": "first_layer_values", "injection": "resformer"},
    {"type": "first_layer_values", "injection": "dynamic"},
    {"type": "first_layer_values", "keys": True},
    {"type": "first_layer_values", "middle_keys": True},
    {"type": "interpolated_values"},
    {"type": "interpolated_values", "mode": "per_token"},
    {"type": "shared_middle"},
    {"type": "shared_middle", "keys": True},
    {"type": "shared_adjacent"},
    {"type": "shared_adjacent", "keys": True},
    {"type": "first_values_middle_keys"},
)
ODD_QUERIES: tuple[dict[str, Any], ...] = (
    {"type": "identity", "scale": 0.7},
    {"type": "nonlinear"},
    {"type": "nonlinear", "anchor": "linear", "norm_in": False},
    {"type": "residual"},
    {"type": "from_mlp"},
)


def random_config(draw: random.Random) -> LeanConfig:
    """Any architecture with a vocabulary; every second one without mechanisms, most without norms."""
    while True:
        try:
            fields = _random_fields(draw)
            return small(**fields | _scales_and_layers(random.Random(repr(fields)), fields))
        except ConfigError:
            continue


def borrowing_config(draw: random.Random) -> LeanConfig:
    """The same, in which single value heads are borrowed by rows drawn at random, of every layer's some or all."""
    while True:
        fields = _random_fields(draw)
        number = fields["num_key_value_heads"]
        places = [(layer, head) for layer in range(fields["num_hidden_layers"]) for head in range(number)]
        borrowed = set(draw.sample(places, draw.randint(1, len(places) - 1))) if len(places) > 1 else set()
        computed = [place for place in places if place not in borrowed]
        rows = []
        for layer, head in sorted(borrowed):
            if sources := [place for place in computed if place[0] <= layer]:
                rows.append([layer, head, *draw.choice(sources)])
        if rows:
            try:
                return small(**fields | {"key_value": {"type": "borrowed_values", "heads": rows}})
            except ConfigError:
                continue


def _random_fields(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice((1, 2, 2, 3, 4, 4, 6))
    width = heads * draw.choice((2, 4) if heads > 2 else (4, 6))
    layers = draw.randint(1, 4)

    def flag(chance: float = 0.5) -> bool:
        return draw.random() < chance

    fields: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": width + draw.randint(0, 8),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if flag(0.7) else draw.choice([g for g in range(1, heads + 1) if heads % g == 0]),
        "norm_type": "none" if flag(0.85) else draw.choice(("layernorm", "rmsnorm", "dyt")),
        "block_type": draw.choice(("serial", "serial", "serial", "parallel", "parallel_shared_norm")),
        "tie_word_embeddings": flag(),
        **{name: flag() for name in ("attention_skip", "mlp_skip")},
        **{name: flag(0.4) for name in ("attention_bias", "attention_output_bias", "mlp_bias")},
        "qk_norm": flag(0.2),
        "hidden_act": draw.choice(("gelu", "silu", "relu")),
        "mlp_type": draw.choice(("mlp", "mlp", "gated", "moe")),
        "position_embedding_type": draw.choice(("learned", "rope", "none")),
    }
    if fields["block_type"] != "serial":
        fields["mlp_skip"] = fields["attention_skip"]
    if fields["mlp_type"] == "moe":
        fields |= {"mlp_bias": False, "num_local_experts": 3, "num_experts_per_tok": 2}
    if flag(0.2):
        fields["head_dim"] = draw.choice((2, 4, 8))
    if fields["position_embedding_type"] == "rope" and flag():
        fields["rope_parameters"] = {"partial_rotary_factor": 0.5}
    if fields["norm_type"] in ("layernorm", "dyt"):
        fields["norm_bias"] = flag()
    if flag(0.2):
        fields["num_hidden_groups"] = draw.choice([g for g in range(1, layers + 1) if layers % g == 0])
        fields["group_order"] = ("runs", "turns")[width % 4 // 2]
    if flag(0.15):
        fields["task"] = "masked_lm"
    elif flag(0.1):
        fields["sliding_window"] = 4
    return fields if flag() else fields | _mechanism(draw, fields)


def _scales_and_layers(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Multipliers, norms after the sublayers, and windows and rotary positions in some layers, each now and then."""
    some = sorted(draw.sample(range(fields["num_hidden_layers"]), draw.randint(1, fields["num_hidden_layers"])))
    rotary, more = fields["position_embedding_type"] == "rope", {}
    for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
        more |= {name: draw.uniform(0.3, 2.0)} if draw.random() < 0.3 else {}
    if fields["norm_type"] != "none":
        more["norm_placement"] = draw.choice(("before", "after", "both"))
    if fields["qk_norm"]:
        more["qk_norm"] = draw.choice((True, "width"))
    if rotary and draw.random() < 0.3:
        more["rope_layers"] = some
    if "sliding_window" in fields:
        more["window_layers"] = some
        more |= {"window_rope_parameters": {"rope_theta": 100.0}} if rotary else {}
    if fields["attention_skip"] and fields["mlp_skip"] and "depth_average" not in fields and draw.random() < 0.5:
        more["hyper_connections"] = {"type": "hyper", "streams": 2, "mode": draw.choice(("static", "dynamic", "mhc"))}
    return more


def _mechanism(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a mechanism that not every layer, or not every model, has."""
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    some = sorted(draw.sample(range(layers), draw.randint(1, layers)))
    odd = draw.choice(("sharing", "sharing", "query", "key", "value", "output", "average", "latent", "keys as values"))
    if odd == "sharing":
        return {"key_value": draw.choice(SHARING)}
    if odd == "query":
        return {"query": [{**draw.choice(ODD_QUERIES), "layers": some}]}
    if odd in ("key", "value", "output"):
        kinds = ("identity",) if odd == "output" else ("identity", "block_identity", "nonlinear")
        return {odd: [{"type": draw.choice(kinds), "layers": some}]}
    if odd == "average":
        spans = {"dilation": draw.randint(1, min(2, layers)), "period": draw.randint(1, min(2, layers))}
        return {"depth_average": spans}
    if odd == "latent":
        latent = {"kv_lora_rank": draw.choice((3, 5)), "qk_norm": False, "num_key_value_heads": heads}
        rotary = fields["position_embedding_type"] == "rope"
        return latent | ({"rope_parameters": None, "qk_rope_head_dim": 2} if rotary else {})
    return {"value": [{"type": "keys"}]}
