"""Attention of one layer over one sequence, with keys and values per head."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .basic import Head, Tensors, linear, rmsnorm, rotate, softmax
from .masks import seen, window_holds
from .memory import Memory, attended_values, mixed_with_first
from .projections import KEYS, QUERIES, VALUES
from .sharing import heads_of


def options_of(entries: list[Mapping[str, Any]], layer: int) -> dict[str, Any]:
    """The entry that names this layer, or names no layers; otherwise the layer is linear."""
    for entry in entries:
        if "layers" not in entry or layer in entry["layers"]:
            return {name: value for name, value in entry.items() if name != "layers"}
    return {"type": "linear"}


def split_heads(x: Tensor, dim: int) -> list[Head]:
    return [x[:, start : start + dim] for start in range(0, x.shape[1], dim)]


def turned(heads: list[Head], config: Any, layer: int, direction: int = 1) -> list[Head]:
    """The first head_dim * partial_rotary_factor dimensions turned by the position, in the layers that have rotary
    positions; those with a sliding window may have other angles."""
    if config.position_embedding_type != "rope" or (config.rope_layers and layer not in config.rope_layers):
        return heads
    rope = config.rope_parameters
    if config.window_rope_parameters and window_holds(config, layer):
        rope = config.window_rope_parameters
    n = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    return [rotate(head, n, rope["rope_theta"], direction) for head in heads]


def normed(heads: list[Head], weight: Tensor | None, config: Any) -> list[Head]:
    """`qk_norm`: of every head's vector, or of the vector of all heads side by side."""
    if weight is None:
        return heads
    if config.qk_norm == "width":
        together = rmsnorm(torch.cat(heads, dim=-1), weight, config.norm_eps)
        return split_heads(together, config.head_dim)
    return [rmsnorm(head, weight, config.norm_eps) for head in heads]


def attend(query: Head, key: Head, value: Head, scale: float, keys_seen: list[list[int]]) -> Head:
    """softmax(scale q k^T, over the keys that the position sees) v"""
    rows = [softmax(scale * (key[sees] @ q)) @ value[sees] for q, sees in zip(query, keys_seen, strict=True)]
    return torch.stack(rows)


def gated(heads: list[Head], x: Tensor, tensors: Tensors, config: Any, name: str) -> list[Head]:
    """Column c of head h at position t, times 1 / (1 + e^-a), a the entry of x_t W_g for that head, or for that column
    of that head"""
    if config.output_gate is None:
        return heads
    scores = linear(x, tensors, f"{name}.g_proj")
    per_head, found = config.output_gate.get("per_head", False), []
    for h, head in enumerate(heads):
        rows = []
        for t, row in enumerate(head):
            places = [h if per_head else h * len(row) + c for c in range(len(row))]
            rows.append(row * torch.stack([1 / (1 + (-scores[t, place]).exp()) for place in places]))
        found.append(torch.stack(rows))
    return found


def output(heads: list[Head], x: Tensor, tensors: Tensors, config: Any, layer: int, name: str) -> Tensor:
    """The heads side by side, gated where there is a gate, times W_O unless that is the identity."""
    joined = torch.cat(gated(heads, x, tensors, config, name), dim=-1)
    kind = options_of(config.output, layer)
    if kind["type"] == "identity":
        return joined + tensors[f"{name}.o_proj.bias"] if kind.get("bias") else joined
    return linear(joined, tensors, f"{name}.o_proj")


def attention(x: Tensor, tensors: Tensors, config: Any, layer: int, name: str, memory: Memory) -> Tensor:
    """softmax(scale q_h k_g^T + mask) v_g for every query head h, with its key/value head g = h // group size; the
    heads side by side, times W_O. K = V: the value heads are the leading key heads, normed and turned; as a value
    turned by its position j arrives at position t, the output is turned back by t, and only j - t remains."""
    dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    heads = heads_of(config, layer, config.num_key_value_heads, config.num_key_value_heads)

    def project(table: Mapping[str, Any], entries: list, tensor: str, count: int) -> tuple[list[Head], float]:
        options = options_of(entries, layer)
        if options.pop("keys", False):
            latent = f"{name}.k_up_proj.weight" in tensors
            options["keys"] = linear(x, tensors, f"{name}.k_proj") if latent else torch.cat(plain_keys, dim=-1)
        function = table[options.pop("type")]
        found, factor = function(x, memory.hidden, tensors, config, f"{name}.{tensor}", count * dim, **options)
        assert found.shape[1] == count * dim
        return split_heads(found, dim), factor

    memory.keys[layer], memory.values[layer] = [], []
    if heads.keys:
        plain_keys, memory.key_factors[layer] = project(KEYS, config.key, "k_proj", heads.keys)
        memory.keys[layer] = turned(normed(plain_keys, tensors.get(f"{name}.k_norm.weight"), config), config, layer)
    values_are_keys = options_of(config.value, layer)["type"] == "keys"
    if heads.values:
        built = memory.keys[layer][: heads.values]
        if not values_are_keys:
            built, _ = project(VALUES, config.value, "v_proj", heads.values)
        memory.values[layer] = mixed_with_first(built, x, tensors, name, heads, memory)

    query, query_factor = project(QUERIES, config.query, "q_proj", len(heads.attended_keys) * group)
    query = turned(normed(query, tensors.get(f"{name}.q_norm.weight"), config), config, layer)
    values, keys_seen, mixed = attended_values(heads, memory), seen(config, layer, len(x), memory.prefix), []
    for h, q in enumerate(query):
        lender, index = heads.attended_keys[h // group]
        scale = query_factor * memory.key_factors[lender] * (config.attention_multiplier or 1 / dim**0.5)
        mixed.append(attend(q, memory.keys[lender][index], values[h // group], scale, keys_seen))
    if values_are_keys:
        mixed = turned(mixed, config, layer, -1)
    return output(mixed, x, tensors, config, layer, name)
