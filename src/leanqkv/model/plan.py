"""The plan: per layer, what is computed, what is borrowed and from where, what is cached.

A pure function of the configuration. The model's wiring, parameter counts and KV bytes are all read off it, so they
cannot disagree, and none of them needs a model to be built.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from .layout import HeadLayout, HeadSource
from .registry import KEY_VALUES, KEYS, QUERIES, VALUES, ConfigError, Mechanism, make_mechanism


@dataclass(frozen=True)
class CachedTensor:
    """One tensor a layer keeps per token: `num_heads * head_dim` elements."""

    name: str
    num_heads: int
    head_dim: int

    @property
    def elements(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class LayerPlan:
    """One layer's attention, completely described. Layers and heads count from 0."""

    layer: int
    head_dim: int
    query: Mechanism
    key: Mechanism
    value: Mechanism
    layout: HeadLayout
    computed_key_heads: int
    computed_value_heads: int
    cached: tuple[CachedTensor, ...]

    @property
    def num_query_heads(self) -> int:
        return self.layout.num_query_heads

    @property
    def attention_scale(self) -> float:
        """Factor on q k^T: `1 / sqrt(head_dim)` times what the query and the key mechanism ask for."""
        return self.head_dim**-0.5 * getattr(self.query.options, "scale", 1.0) * getattr(self.key.options, "scale", 1.0)

    @property
    def borrowed(self) -> tuple[HeadSource, ...]:
        """Keys and values that another layer computes."""
        return tuple(source for source in (*self.layout.keys, *self.layout.values) if source.layer != self.layer)


@dataclass(frozen=True)
class ParameterCount:
    """`non_embedding` leaves out token and position embeddings and an untied output head, as the papers count."""

    total: int
    non_embedding: int


@dataclass(frozen=True)
class Plan:
    """`layers[i]` describes layer i; `parameter_shapes` names every tensor of the checkpoint once (tied ones too)."""

    layers: tuple[LayerPlan, ...]
    parameter_shapes: dict[str, tuple[int, ...]]

    def count_parameters(self) -> ParameterCount:
        embedding = ("model.embed_tokens.", "model.embed_positions.", "lm_head.")
        sizes = {name: prod(shape) for name, shape in self.parameter_shapes.items()}
        total = sum(sizes.values())
        return ParameterCount(total, total - sum(n for name, n in sizes.items() if name.startswith(embedding)))

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes the cache keeps for one token of one sequence, over all layers."""
        return dtype.itemsize * sum(cached.elements for layer in self.layers for cached in layer.cached)


def make_plan(config) -> Plan:
    """The plan of `config`.

    Raises:
        ConfigError: an unknown mechanism or option, or a combination that cannot be built; names the clash.
    """
    num_layers = config.num_hidden_layers
    queries = _per_layer(config, "query", QUERIES)
    keys = _per_layer(config, "key", KEYS)
    values = _per_layer(config, "value", VALUES)
    key_value = make_mechanism(KEY_VALUES, "key_value", config.key_value)
    if reason := key_value.cls.clash(config, key_value.options):
        raise ConfigError(f"key_value {key_value.kind!r}: {reason}")

    layers = []
    for i in range(num_layers):
        layout = key_value.cls.layout(config, key_value.options, i)
        computed_keys = sum(s.num_heads for s in layout.keys if s.layer == i)
        computed_values = sum(s.num_heads for s in layout.values if s.layer == i)
        for slot, mechanism, heads in (
            ("query", queries[i], layout.num_query_heads),
            ("key", keys[i], computed_keys),
            ("value", values[i], computed_values),
        ):
            if reason := mechanism.cls.clash(config, heads, mechanism.options):
                raise ConfigError(f"{slot} {mechanism.kind!r} in layer {i}: {reason}")
        cached = tuple(
            CachedTensor(name, heads, config.head_dim)
            for name, heads in (("keys", computed_keys), ("values", computed_values))
            if heads
        )
        layers.append(
            LayerPlan(
                i, config.head_dim, queries[i], keys[i], values[i], layout, computed_keys, computed_values, cached
            )
        )
    return Plan(tuple(layers), _parameter_shapes(config, layers))


def _per_layer(config, slot: str, table) -> list[Mechanism]:
    """Which mechanism each layer uses for one slot; what no entry names is linear."""
    chosen = [make_mechanism(table, slot, {"type": "linear"})] * config.num_hidden_layers
    claimed: dict[int, str] = {}
    for spec in getattr(config, slot):
        if not isinstance(spec, Mapping):
            raise ConfigError(f'`{slot}` is a list of {{"type": ..., "layers": [...]}}, found {spec!r} in it')
        options = dict(spec)
        layers = options.pop("layers", None)
        mechanism = make_mechanism(table, slot, options)
        for layer in _check_layers(layers, slot, mechanism.kind, config.num_hidden_layers):
            if layer in claimed:
                raise ConfigError(
                    f"layer {layer} has two {slot} mechanisms, {claimed[layer]!r} and {mechanism.kind!r}; "
                    "give each its own layers"
                )
            claimed[layer] = mechanism.kind
            chosen[layer] = mechanism
    return chosen


def _check_layers(layers: Sequence[int] | None, slot: str, kind: str, num_layers: int) -> Sequence[int]:
    if layers is None:
        return range(num_layers)
    if not isinstance(layers, Sequence):
        raise ConfigError(f"{slot} {kind!r}: layers must be a list, [{layers}] for one, found {layers!r}")
    for layer in layers:
        if not isinstance(layer, int) or not 0 <= layer < num_layers:
            raise ConfigError(
                f"{slot} {kind!r}: layers must be whole numbers from 0 to {num_layers - 1}, found {layer!r}"
            )
    return layers


def _parameter_shapes(config, layers: Sequence[LayerPlan]) -> dict[str, tuple[int, ...]]:
    d, ff = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    if config.position_embedding_type == "learned":
        shapes["model.embed_positions.weight"] = (config.max_position_embeddings, d)

    def linear(name: str, out_features: int, in_features: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out_features, in_features)
        if bias:
            shapes[f"{name}.bias"] = (out_features,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = (width,)
        if config.norm_type == "layernorm" and config.norm_bias:
            shapes[f"{name}.bias"] = (width,)

    for plan in layers:
        block = f"model.layers.{plan.layer}"
        norm(f"{block}.input_layernorm", d)
        for name, mechanism, heads in (
            ("q_proj", plan.query, plan.num_query_heads),
            ("k_proj", plan.key, plan.computed_key_heads),
            ("v_proj", plan.value, plan.computed_value_heads),
        ):
            if heads:
                for tensor, shape in mechanism.cls.parameter_shapes(config, heads, mechanism.options).items():
                    shapes[f"{block}.self_attn.{name}.{tensor}"] = shape
        if config.qk_norm:
            shapes[f"{block}.self_attn.q_norm.weight"] = (config.head_dim,)
            if plan.computed_key_heads:
                shapes[f"{block}.self_attn.k_norm.weight"] = (config.head_dim,)
        linear(f"{block}.self_attn.o_proj", d, plan.num_query_heads * config.head_dim, config.attention_output_bias)
        norm(f"{block}.post_attention_layernorm", d)
        if config.mlp_type == "gated":
            linear(f"{block}.mlp.gate_proj", ff, d, config.mlp_bias)
        linear(f"{block}.mlp.up_proj", ff, d, config.mlp_bias)
        linear(f"{block}.mlp.down_proj", d, ff, config.mlp_bias)
    norm("model.norm", d)
    if not config.tie_word_embeddings:
        linear("lm_head", config.vocab_size, d, False)
    return shapes
