"""The plan: per layer, what is computed, what is borrowed and from where, what is cached.

A pure function of the configuration. The model's wiring, parameter counts and KV bytes are all read off it, so they
cannot disagree, and none of them needs a model to be built.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from .layout import HeadCounts, LatentShape, LayerPlan, head_groups
from .mechanisms import CONNECTIONS, DEPTH, KEY_VALUES, KEYS, MLPS, OUTPUT_GATES, OUTPUTS, QUERIES, VALUES
from .position import latent_score_scale
from .registry import ConfigError, Projection, make_mechanism

# What a configuration chooses in each layer, and what once for the whole model: by field, the mechanisms it can name.
LAYER_SLOTS = {"query": QUERIES, "key": KEYS, "value": VALUES, "output": OUTPUTS}
MODEL_SLOTS = {
    "key_value": KEY_VALUES,
    "output_gate": OUTPUT_GATES,
    "depth_average": DEPTH,
    "hyper_connections": CONNECTIONS,
}


@dataclass(frozen=True)
class Plan:
    """`layers[i]` describes layer i."""

    layers: tuple[LayerPlan, ...]
    routes: bool  # whether the blocks hand out router logits (experts)

    @property
    def blocks(self) -> list[LayerPlan]:
        """The first layer that uses each block, `model.layers.{i}`."""
        first_users = {layer.block: layer for layer in reversed(self.layers)}
        return [first_users[block] for block in sorted(first_users)]

    @property
    def passed_beside_hidden_states(self) -> str | None:
        """Extra outputs of a block and the mechanism that uses them, or None."""
        if self.lenders:
            return f"borrowed heads (key_value {self.layers[0].key_value.kind!r})"
        if self.routes:
            return "router logits (mlp_type 'moe')"
        reads_mlp = next((layer for layer in self.layers if layer.query.reads_mlp), None)
        return f"hidden activations of an MLP (query {reads_mlp.query.kind!r})" if reads_mlp else None

    @cached_property
    def turns_keys_in(self) -> int | None:
        """The first layer that turns cached keys when it reads them: back, where values are made of them, or by rotary
        positions, where they are cached as before. None: there is none."""
        turning = (layer.layer for layer in self.layers if layer.value.reads_keys or layer.key.before_rotary)
        return next(turning, None)

    @property
    def warning(self) -> str | None:
        """What can be built and starts badly: queries and keys that both pass the input on (P2 section 2.2)."""
        for layer in self.layers:
            if layer.query.passes_input and layer.key.passes_input and layer.computed_key_heads:
                return (
                    f"query {layer.query.kind!r} and key {layer.key.kind!r} in layer {layer.layer} both pass the input "
                    "X on: X X^T is in the scores, without a weight, and each token starts by attending to itself; use "
                    "anchor=linear or a linear projection in one of them"
                )
        return None

    @property
    def lenders(self) -> set[int]:
        """Layers whose keys, values or new values another layer needs."""
        return set().union(*(layer.lenders for layer in self.layers))

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes the cache keeps for one token of one sequence, over all layers, while no window is full."""
        return self.kv_bytes(1, dtype)

    def kept_tokens(self, tokens: int) -> list[int]:
        """How many of so many tokens each layer keeps: one with a window the last `window - 1`."""
        return [tokens if layer.window is None else min(tokens, layer.window - 1) for layer in self.layers]

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes the cache keeps for a sequence of `tokens`."""
        layers = zip(self.layers, self.kept_tokens(tokens), strict=True)
        return dtype.itemsize * sum(kept * cached.elements for layer, kept in layers for cached in layer.cached)


def make_plan(config) -> Plan:
    """The plan of `config`.

    Raises:
        ConfigError: an unknown mechanism or option, or a combination that cannot be built; names the clash.
    """
    fields = SimpleNamespace(**vars(config))  # transformers' own attribute access takes longer than all of this
    plan = Plan(tuple(_make_layers(fields)), MLPS[config.mlp_type].routes)
    _ = plan.turns_keys_in  # as the layers' properties
    return plan


def _make_layers(config) -> list[LayerPlan]:
    num_layers = config.num_hidden_layers
    chosen = {slot: _per_layer(config, slot) for slot in LAYER_SLOTS}
    latent = LatentShape(config.kv_lora_rank, config.qk_rope_head_dim) if config.kv_lora_rank else None
    counts = HeadCounts(num_layers, config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    if latent is not None:
        counts = HeadCounts(num_layers, config.num_attention_heads, int(latent.rope_dim > 0), latent.rank)
    key_value = _of_model(config, "key_value", counts)
    gate, connections = _of_model(config, "output_gate"), _of_model(config, "hyper_connections")
    averages = _of_model(config, "depth_average")
    layers = []
    for i in range(num_layers):
        projections: dict[str, Any] = {slot: mechanisms[i] for slot, mechanisms in chosen.items()}
        layout = key_value.layout(counts, i)
        computed_keys = sum(s.num_heads for s in layout.keys if s.layer == i)
        computed_values = max((s.stop for s in layout.values if s.layer == i), default=0)  # one head may serve twice
        windowed = key_value.windowed(counts, i) and (config.window_layers is None or i in config.window_layers)
        window = config.sliding_window if windowed else None
        rope = _rope(config, i, window)
        if latent is None:
            projections["key"] = projections["key"].in_layer(config, i, computed_keys, rope)
        layer = LayerPlan(
            layer=i,
            block=_block(config, i),
            head_dim=config.head_dim,
            **projections,
            output_gate=gate,
            key_value=key_value,
            layout=layout,
            mixer=layout.mixer,
            groups=() if latent else head_groups(layout),
            num_query_heads=layout.num_query_heads,
            computed_key_heads=computed_keys,
            computed_value_heads=computed_values,
            key_rank=projections["key"].latent_rank(config, computed_keys),
            value_rank=projections["value"].latent_rank(config, computed_values),
            latent=latent,
            window=window,
            rope=rope,
            lends_mlp_hidden=i + 1 < num_layers and chosen["query"][i + 1].reads_mlp,
            averaged=averages.inputs_after(i) if averages else (),
            connections=connections,
            key_scales=tuple((source.layer, chosen["key"][source.layer].scale) for source in layout.keys),
            score_scale=latent_score_scale(config) if latent else 1.0,
            attention_multiplier=config.attention_multiplier,
            attention_divisor=i + 1 if config.scale_attn_by_inverse_layer_idx else 1,
            caches=config.mask_type != "bidirectional",
        )
        if clash := _clash(config, layer):
            slot, reason = clash
            raise ConfigError(f"{slot} {getattr(layer, slot).kind!r} in layer {i}: {reason}")
        layers.append(layer)
    _refuse_across(config, layers)
    for layer in layers:  # a compiled forward pass cannot fill a cached_property (Python 3.11)
        _ = layer.cached
    return layers


def _block(config, layer: int) -> int:
    """The block whose weights a layer uses."""
    groups = config.num_hidden_groups or config.num_hidden_layers
    return layer % groups if config.group_order == "turns" else layer * groups // config.num_hidden_layers


def _of_model(config, slot: str, counts: HeadCounts | None = None) -> Any:
    """The mechanism that the whole model has in a slot; None: there is none."""
    if (spec := getattr(config, slot)) is None:
        return None
    if slot == "depth_average":  # its one type goes without saying
        spec = {"type": "average"} | spec
    mechanism = make_mechanism(MODEL_SLOTS[slot], slot, spec)
    if reason := mechanism.clash(config, counts):
        raise ConfigError(f"{slot} {mechanism.kind!r}: {reason}")
    return mechanism


def _rope(config, layer: int, window: int | None) -> str | None:
    """The field with the rotary parameters of a layer that attends within `window`; None: no rotary positions."""
    if config.position_embedding_type != "rope" or layer not in (config.rope_layers or range(layer + 1)):
        return None
    return "rope_parameters" if window is None or not config.window_rope_parameters else "window_rope_parameters"


def _clash(config, layer: LayerPlan) -> tuple[str, str] | None:
    """The slot of a layer whose mechanism it cannot have, and why; None where it can have all of them."""
    for slot in LAYER_SLOTS:
        mechanism, heads = getattr(layer, slot), layer.computed_heads(slot)
        if layer.latent is not None and slot in ("key", "value"):
            if mechanism.kind != "linear":
                return slot, (
                    "with a latent (kv_lora_rank) keys and values are made from it, there is no "
                    f"{slot} projection to replace"
                )
            continue
        if reason := mechanism.clash(config, heads):
            return slot, reason
        named = {index for spec in getattr(config, slot) for index in spec.get("layers") or ()}
        if not heads and layer.layer in named:
            return slot, f"it computes no {slot}s of its own, they come from another layer; leave it out of `layers`"
    if layer.value.reads_keys and layer.window is not None:
        return "value", (
            f"values that are made of keys need all of them, and a sliding window ({layer.window}) lets the old ones "
            "go; leave keys=true out there"
        )
    if layer.value.reads_keys and config.qk_norm and not layer.key.before_rotary:
        return "value", (
            "values are made of keys as they are projected, and qk_norm norms these before they are cached; leave "
            "keys=true out, or cache a latent of the keys with before_rotary=true"
        )
    if layer.key.before_rotary and layer.window is not None:
        return "key", (
            f"keys that are turned when they are read need the positions of all, and a sliding window ({layer.window}) "
            "lets old ones go; leave before_rotary=true out there"
        )
    if layer.value.reuses_keys and layer.key_rank is not None:
        return "value", (
            f"its keys are a latent (key {layer.key.kind!r}), and no heads are kept that could be its values; use "
            "latent values beside latent keys"
        )
    if layer.value.reuses_keys and layer.computed_value_heads > layer.computed_key_heads:
        return "value", (
            f"it computes {layer.computed_value_heads} value heads but only {layer.computed_key_heads} keys of its "
            "own, so there is nothing to reuse as values"
        )
    return None


def _refuse_across(config, layers: Sequence[LayerPlan]) -> None:
    if config.position_embedding_type == "rope" and len({layer.value.reuses_keys for layer in layers}) > 1:
        raise ConfigError(
            "value 'keys' with rotary positions must be used in all layers or none: rotated and plain values of "
            "different layers do not mix"
        )
    for layer in layers:
        borrows_keys = layer.value.reuses_keys or any(source.layer != layer.layer for source in layer.layout.keys)
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


def _per_layer(config, slot: str) -> list[Projection]:
    """The mechanism of each layer for one slot; layers that no entry names are linear."""
    table = LAYER_SLOTS[slot]
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
            chosen[layer] = linear if layer == 0 and mechanism.linear_in_first_layer else mechanism
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
