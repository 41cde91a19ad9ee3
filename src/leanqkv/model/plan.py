"""The plan: per layer, what is computed, what is borrowed and from where, what is cached.

A pure function of the configuration. The model's wiring, parameter counts and KV bytes are all read off it, so they
cannot disagree, and none of them needs a model to be built.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from .depth_average import averaged_inputs
from .depth_average import clash as depth_average_clash
from .layout import HeadCounts, HeadGroup, HeadLayout, HeadSource, head_groups
from .position import latent_score_scale
from .registry import KEY_VALUES, KEYS, OUTPUTS, QUERIES, VALUES, ConfigError, Mechanism, make_mechanism


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
class LatentShape:
    """Multi-head latent attention (MLA): a latent of `rank` columns, and one rotary key of `rope_dim` for all heads."""

    rank: int
    rope_dim: int


@dataclass(frozen=True)
class BlockWeights:
    """The weights of one block's attention: which mechanisms, and how many heads each computes.

    Layers that share a block agree in all of it but `layer`, the first layer that uses the block. Under MLA the value
    heads are latent columns and the key heads the one rotary key.
    """

    layer: int = field(compare=False)
    query: Mechanism
    key: Mechanism
    value: Mechanism
    output: Mechanism
    key_value: Mechanism
    mixer: Any
    num_query_heads: int
    num_key_heads: int
    num_value_heads: int
    head_dim: int
    latent: LatentShape | None

    @property
    def reuses_keys(self) -> bool:
        """Whether the keys are the values (`keys-as-values`)."""
        return self.value.cls.__dict__.get("reuses_keys", False)

    @property
    def caches_latent(self) -> bool:
        """Whether the value heads are made of a latent, which alone is cached (`latent-values`)."""
        return getattr(self.value.cls, "caches_latent", False)

    @property
    def caches_latent_keys(self) -> bool:
        """Whether the key heads are made of a latent, which alone is cached (`latent-keys`)."""
        return getattr(self.key.cls, "caches_latent_keys", False)

    @property
    def values_read_keys(self) -> bool:
        """Whether the value heads are made of the keys as well as of a latent (`latent-values`)."""
        return self.caches_latent and self.value.options.keys

    @property
    def key_width(self) -> int:
        """Columns of the keys, or of the latent that they are made of."""
        return self.key.cls.width(self.key.options) if self.caches_latent_keys else self.num_key_heads * self.head_dim

    @property
    def query_reads_mlp(self) -> bool:
        """Whether the query is made from the hidden activations of the previous block's MLP (`mlp-query`)."""
        return getattr(self.query.cls, "needs_mlp_hidden", False)

    def build_mixer(self, config) -> Any:
        """The module that new values pass through before they are cached (see HeadLayout), or None."""
        return self.mixer(config, self.key_value.options) if self.mixer is not None else None


@dataclass(frozen=True)
class LayerPlan:
    """One layer, completely described. Layers and heads count from 0; under MLA (`latent`) the computed "value heads"
    are latent columns and the computed "key heads" the one rotary key."""

    layer: int
    block: int  # whose weights it uses: model.layers.{block}
    head_dim: int
    query: Mechanism
    key: Mechanism
    value: Mechanism
    output: Mechanism
    key_value: Mechanism
    layout: HeadLayout
    groups: tuple[HeadGroup, ...]  # of `layout`; none under MLA
    computed_key_heads: int
    computed_value_heads: int
    latent: LatentShape | None = None
    window: int | None = None  # attends to that many positions, its own included; None: to all
    rope: str | None = None  # the field of the configuration with its rotary parameters; None: no rotary positions
    lends_mlp_hidden: bool = False
    averaged: tuple[int, ...] = ()  # DenseFormer: the outputs averaged after this block
    key_scales: tuple[tuple[int, float], ...] = ()  # layers whose keys it attends with: the factor they ask for
    score_scale: float = 1.0  # the factor that rotary positions ask for (MLA)
    attention_multiplier: float | None = None  # in place of 1 / sqrt(head_dim)
    attention_divisor: int = 1  # of the factor on q k^T
    value_rank: int | None = None  # of the latent that its value heads are made of; None: they are made of the input
    caches: bool = True  # false where the whole input is seen at once: nothing is kept for later

    @property
    def num_query_heads(self) -> int:
        return self.layout.num_query_heads

    def attention_scale(self, key_layer: int) -> float:
        """Factor on q k^T: `attention_multiplier` or `1 / sqrt(head_dim)`, over `attention_divisor`, times the `scale`
        options of the query and of the layer that made the keys, times `score_scale`."""
        width = self.head_dim + (self.latent.rope_dim if self.latent else 0)
        base = width**-0.5 if self.attention_multiplier is None else self.attention_multiplier
        query_scale, key_scale = getattr(self.query.options, "scale", 1.0), dict(self.key_scales).get(key_layer, 1.0)
        return base / self.attention_divisor * query_scale * key_scale * self.score_scale

    @property
    def borrowed(self) -> tuple[HeadSource, ...]:
        """Keys and values that another layer computes."""
        return tuple(source for source in (*self.layout.keys, *self.layout.values) if source.layer != self.layer)

    @property
    def lenders(self) -> set[int]:
        """The layers whose keys, values or new values this one needs."""
        mixed = set() if self.layout.mixed_with is None else {self.layout.mixed_with}
        return {source.layer for source in self.borrowed} | mixed

    @cached_property
    def cached(self) -> tuple[CachedTensor, ...]:
        """The tensors that the layer keeps of every token, for itself and for the layers that borrow from it."""
        values = self.computed_value_heads + self.layout.derived_value_heads
        if self.latent is not None:
            width = values + self.computed_key_heads * self.latent.rope_dim
            tensors = [CachedTensor("latent", 1, width)] if width else []
        else:
            if self.reuses_keys and self.layout.mixer is None:
                values = 0  # the keys are the values
            heads = {"keys": (self.computed_key_heads, self.head_dim), "values": (values, self.head_dim)}
            if self.key_rank is not None:
                heads["keys"] = 1, self.key_rank
            if self.value_rank is not None:
                heads["values"] = 1, self.value_rank
            tensors = [CachedTensor(name, number, width) for name, (number, width) in heads.items() if number]
        return tuple(tensors) if self.caches else ()

    @property
    def weights(self) -> BlockWeights:
        """The weights that it computes with."""
        return BlockWeights(
            layer=self.layer,
            query=self.query,
            key=self.key,
            value=self.value,
            output=self.output,
            key_value=self.key_value,
            mixer=self.layout.mixer,
            num_query_heads=self.num_query_heads,
            num_key_heads=self.computed_key_heads,
            num_value_heads=self.computed_value_heads,
            head_dim=self.head_dim,
            latent=self.latent,
        )

    @property
    def key_rank(self) -> int | None:
        """Real columns of the latent that its key heads are made of; None: they are made of the input."""
        return self.key.cls.width(self.key.options) if hasattr(self.key.cls, "caches_latent_keys") else None

    @property
    def key_columns(self) -> tuple[int, ...] | None:
        """Complex columns of that latent, by frequency; None without rotary positions."""
        return getattr(self.key.options, "columns", None)

    @cached_property
    def reuses_keys(self) -> bool:
        """Whether its keys are its values (`keys-as-values`)."""
        return self.weights.reuses_keys

    @cached_property
    def values_read_keys(self) -> bool:
        """Whether its values are made of its keys as well as of a latent (`latent-values`)."""
        return self.weights.values_read_keys


@dataclass(frozen=True)
class ParameterCount:
    """`non_embedding` leaves out token and position embeddings and an untied output head, as the papers count; of a
    model of images, the map of the patches, the class token, the position embeddings and the head."""

    total: int
    non_embedding: int


@dataclass(frozen=True)
class Plan:
    """`layers[i]` describes layer i."""

    layers: tuple[LayerPlan, ...]
    config: Any = field(repr=False, compare=False)
    routes: bool  # whether the blocks hand out router logits (experts)

    @cached_property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of a checkpoint, by name; tied tensors once."""
        from .shapes import parameter_shapes  # which builds blocks, and these are built from plans

        return parameter_shapes(self.config, self)

    @property
    def blocks(self) -> list[BlockWeights]:
        """The weights of every block, `model.layers.{i}`: those of the first layer that uses it."""
        first_users = {layer.block: layer.weights for layer in reversed(self.layers)}
        return [first_users[block] for block in sorted(first_users)]

    @property
    def passed_beside_hidden_states(self) -> str | None:
        """What a block returns beside its output, and the mechanism that needs it; None where that is nothing."""
        if self.lenders:
            return f"borrowed heads (key_value {self.layers[0].key_value.kind!r})"
        if self.routes:
            return "router logits (mlp_type 'moe')"
        reads_mlp = next((layer for layer in self.layers if layer.weights.query_reads_mlp), None)
        return f"hidden activations of an MLP (query {reads_mlp.query.kind!r})" if reads_mlp else None

    @cached_property
    def reads_keys_in(self) -> int | None:
        """The first layer whose values are made of cached keys; None: there is none."""
        return next((layer.layer for layer in self.layers if layer.values_read_keys), None)

    @property
    def lenders(self) -> set[int]:
        """Layers whose keys, values or new values another layer needs."""
        return set().union(*(layer.lenders for layer in self.layers))

    def count_parameters(self) -> ParameterCount:
        embedding = ("model.embed_", "lm_head.", "classifier.")
        sizes = {name: prod(shape) for name, shape in self.parameter_shapes.items()}
        total = sum(sizes.values())
        return ParameterCount(total, total - sum(n for name, n in sizes.items() if name.startswith(embedding)))

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes the cache keeps for one token of one sequence, over all layers, while no window is full."""
        return dtype.itemsize * sum(cached.elements for layer in self.layers for cached in layer.cached)

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes the cache keeps for a sequence of `tokens`; a windowed layer keeps the last `window - 1` of them."""

        def kept(layer: LayerPlan) -> int:
            return tokens if layer.window is None else min(tokens, layer.window - 1)

        return dtype.itemsize * sum(kept(layer) * cached.elements for layer in self.layers for cached in layer.cached)


def make_plan(config) -> Plan:
    """The plan of `config`.

    Raises:
        ConfigError: an unknown mechanism or option, or a combination that cannot be built; names the clash.
    """
    fields = SimpleNamespace(**vars(config))  # transformers' own attribute access takes longer than all of this
    plan = Plan(tuple(_make_layers(fields)), config, config.mlp_type == "moe")
    _ = plan.reads_keys_in  # as the layers' properties
    return plan


def _make_layers(config) -> list[LayerPlan]:
    num_layers = config.num_hidden_layers
    queries = _per_layer(config, "query", QUERIES)
    keys = _per_layer(config, "key", KEYS)
    values = _per_layer(config, "value", VALUES)
    outputs = _per_layer(config, "output", OUTPUTS)
    latent = LatentShape(config.kv_lora_rank, config.qk_rope_head_dim) if config.kv_lora_rank else None
    counts = HeadCounts(num_layers, config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    if latent is not None:
        counts = HeadCounts(num_layers, config.num_attention_heads, int(latent.rope_dim > 0), latent.rank)
    key_value = make_mechanism(KEY_VALUES, "key_value", config.key_value)
    if reason := key_value.clash(config, counts):
        raise ConfigError(f"key_value {key_value.kind!r}: {reason}")
    averaged = {}
    if config.depth_average is not None:
        if reason := depth_average_clash(config.depth_average, num_layers):
            raise ConfigError(f"depth_average: {reason}")
        averaged = averaged_inputs(config.depth_average, num_layers)

    layers = []
    for i in range(num_layers):
        layout = key_value.cls.layout(counts, key_value.options, i)
        computed_keys = sum(s.num_heads for s in layout.keys if s.layer == i)
        computed_values = max((s.stop for s in layout.values if s.layer == i), default=0)  # one head may serve twice
        windowed = getattr(key_value.cls, "windowed", lambda *_: True)(counts, key_value.options, i)
        windowed = windowed and (config.window_layers is None or i in config.window_layers)
        window = config.sliding_window if windowed else None
        rope = _rope(config, i, window)
        layer = LayerPlan(
            layer=i,
            block=i * config.num_hidden_groups // num_layers if config.num_hidden_groups else i,
            head_dim=config.head_dim,
            query=queries[i],
            key=keys[i] if latent else _key_in_layer(config, keys[i], i, computed_keys, rope),
            value=values[i],
            output=outputs[i],
            key_value=key_value,
            layout=layout,
            groups=() if latent else head_groups(layout),
            computed_key_heads=computed_keys,
            computed_value_heads=computed_values,
            latent=latent,
            window=window,
            rope=rope,
            lends_mlp_hidden=i + 1 < num_layers and getattr(queries[i + 1].cls, "needs_mlp_hidden", False),
            averaged=averaged.get(i, ()),
            key_scales=tuple(
                (source.layer, getattr(keys[source.layer].options, "scale", 1.0)) for source in layout.keys
            ),
            score_scale=latent_score_scale(config) if latent else 1.0,
            attention_multiplier=config.attention_multiplier,
            attention_divisor=i + 1 if config.scale_attn_by_inverse_layer_idx else 1,
            value_rank=_value_rank(config, values[i], computed_values),
            caches=config.mask_type != "bidirectional",
        )
        (_refuse_latent if latent else _refuse)(config, layer)
        layers.append(layer)
    _refuse_across(config, layers)
    for layer in layers:  # a compiled forward pass cannot fill a cached_property (Python 3.11)
        _ = layer.cached, layer.reuses_keys, layer.values_read_keys
    return layers


def _key_in_layer(config, key: Mechanism, layer: int, heads: int, rope: str | None) -> Mechanism:
    """The key mechanism with the options that it has in this layer: a latent's columns depend on rotary positions."""
    if not hasattr(key.cls, "in_layer"):
        return key
    if reason := key.cls.clash_in_layer(config, heads, key.options, rope):
        raise ConfigError(f"key {key.kind!r} in layer {layer}: {reason}")
    return replace(key, options=key.cls.in_layer(config, heads, key.options, rope))


def _value_rank(config, value: Mechanism, heads: int) -> int | None:
    """The columns that are cached in place of the value heads; None: the heads are."""
    return value.cls.rank(config, heads, value.options) if hasattr(value.cls, "caches_latent") else None


def _rope(config, layer: int, window: int | None) -> str | None:
    """The field with the rotary parameters of a layer that attends within `window`; None: no rotary positions."""
    if config.position_embedding_type != "rope" or layer not in (config.rope_layers or range(layer + 1)):
        return None
    return "rope_parameters" if window is None or not config.window_rope_parameters else "window_rope_parameters"


def _refuse(config, layer: LayerPlan) -> None:
    for slot, mechanism, heads in (
        ("query", layer.query, layer.num_query_heads),
        ("key", layer.key, layer.computed_key_heads),
        ("value", layer.value, layer.computed_value_heads),
        ("output", layer.output, layer.num_query_heads),
    ):
        if reason := mechanism.clash(config, heads):
            raise ConfigError(f"{slot} {mechanism.kind!r} in layer {layer.layer}: {reason}")
        named = {index for spec in getattr(config, slot) for index in spec.get("layers") or ()}
        if not heads and layer.layer in named:
            raise ConfigError(
                f"{slot} {mechanism.kind!r} in layer {layer.layer}: it computes no {slot}s of its own, they come from "
                "another layer; leave it out of `layers`"
            )
    if layer.values_read_keys and layer.window is not None:
        raise ConfigError(
            f"value {layer.value.kind!r} in layer {layer.layer}: values that are made of keys need all of them, and a "
            f"sliding window ({layer.window}) lets the old ones go; leave keys=true out there"
        )
    if layer.reuses_keys and layer.key_rank is not None:
        raise ConfigError(
            f"value 'keys' in layer {layer.layer}: its keys are a latent (key {layer.key.kind!r}), and no heads are "
            "kept that could be its values; use latent values beside latent keys"
        )
    if layer.reuses_keys and layer.computed_value_heads > layer.computed_key_heads:
        raise ConfigError(
            f"value 'keys' in layer {layer.layer}: it computes {layer.computed_value_heads} value heads but only "
            f"{layer.computed_key_heads} keys of its own, so there is nothing to reuse as values"
        )


def _refuse_latent(config, layer: LayerPlan) -> None:
    for slot, mechanism in (("key", layer.key), ("value", layer.value)):
        if mechanism.kind != "linear":
            raise ConfigError(
                f"{slot} {mechanism.kind!r} in layer {layer.layer}: with a latent (kv_lora_rank) keys and values are "
                f"made from it, there is no {slot} projection to replace"
            )
    if config.num_key_value_heads != config.num_attention_heads:
        raise ConfigError(
            f"num_key_value_heads ({config.num_key_value_heads}) has no meaning with a latent (kv_lora_rank): each of "
            f"the {config.num_attention_heads} heads makes its own key and value from it; leave it out"
        )
    if config.qk_norm:
        raise ConfigError(
            "qk_norm cannot act with a latent (kv_lora_rank): it norms every head's key, and the keys are never made "
            "when decoding from the latent"
        )
    for slot, mechanism in (("query", layer.query), ("output", layer.output)):
        if reason := mechanism.clash(config, layer.num_query_heads):
            raise ConfigError(f"{slot} {mechanism.kind!r} in layer {layer.layer}: {reason}")


def _refuse_across(config, layers: Sequence[LayerPlan]) -> None:
    if config.position_embedding_type == "rope" and len({layer.reuses_keys for layer in layers}) > 1:
        raise ConfigError(
            "value 'keys' with rotary positions must be used in all layers or none: rotated and plain values of "
            "different layers do not mix"
        )
    for layer in layers:
        borrows_keys = layer.reuses_keys or any(source.layer != layer.layer for source in layer.layout.keys)
        for lender in layer.lenders:
            if layers[lender].window != layer.window:  # what one keeps is not what the other's mask is for
                raise ConfigError(
                    f"layer {layer.layer} would borrow from layer {lender}, which has another sliding window: "
                    f"{layers[lender].window}, not {layer.window}"
                )
            if borrows_keys and layers[lender].rope != layer.rope:
                raise ConfigError(
                    f"layer {layer.layer} would borrow keys from layer {lender}, which has other rotary positions: "
                    f"{layers[lender].rope}, not {layer.rope}"
                )
    first_of_block: dict[int, LayerPlan] = {}
    for layer in layers:
        first = first_of_block.setdefault(layer.block, layer)
        if layer.weights != first.weights:
            raise ConfigError(
                f"num_hidden_groups: layers {first.layer} and {layer.layer} would share one block, but do not compute "
                "the same with it; share blocks only between layers with the same mechanisms and heads of their own"
            )


def _per_layer(config, slot: str, table) -> list[Mechanism]:
    """The mechanism of each layer for one slot; layers that no entry names are linear."""
    linear = make_mechanism(table, slot, {"type": "linear"})
    chosen = [linear] * config.num_hidden_layers
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
            stands_in = layer == 0 and getattr(mechanism.cls, "in_first_layer", None) == "linear"
            chosen[layer] = linear if stands_in else mechanism
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
