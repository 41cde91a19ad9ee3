"""Token ids to logits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .basic import Tensors, block_norm, linear, mlp, rmsnorm, rotate
from .projections import KEYS, QUERIES, VALUES
from .sharing import SHARING

Head = list[Tensor]  # one vector per position


def options_of(entries: list[Mapping[str, Any]], layer: int) -> dict[str, Any]:
    """The entry that names this layer, or names no layers; otherwise the layer is linear."""
    for entry in entries:
        if "layers" not in entry or layer in entry["layers"]:
            return {name: value for name, value in entry.items() if name != "layers"}
    return {"type": "linear"}


def split_heads(x: Tensor, count: int, dim: int) -> list[Head]:
    return [[row[h * dim : (h + 1) * dim] for row in x] for h in range(count)]


def normed_and_turned(heads: list[Head], weight: Tensor | None, config: Any) -> list[Head]:
    """The norm of every head's vector (`qk_norm`), then its rotary position."""
    if weight is not None:
        heads = [[rmsnorm(x, weight, config.norm_eps) for x in head] for head in heads]
    if config.position_embedding_type == "rope":
        heads = [[rotate(x, position, config) for position, x in enumerate(head)] for head in heads]
    return heads


def attend(query: Head, key: Head, value: Head, scale: float) -> Tensor:
    """softmax(scale q k^T, over the positions up to its own) v, [positions, head_dim]"""
    rows = []
    for position, q in enumerate(query):
        scores = torch.stack([scale * (q * k).sum() for k in key[: position + 1]])
        weights = (scores - scores.max().detach()).exp()
        weights = weights / weights.sum()
        rows.append(sum(w * v for w, v in zip(weights, value, strict=False)))
    return torch.stack(rows)


def attention(x: Tensor, tensors: Tensors, config: Any, layer: int, values: dict[int, list[Head]]) -> Tensor:
    """softmax(scale q_h k_g^T + causal mask) v_g for every query head h, with its key/value head g = h // group size;
    the heads side by side, times W_O. `values` collects every layer's own value heads."""
    name, dim = f"model.layers.{layer}.self_attn", config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    sharing = dict(config.key_value)
    heads = SHARING[sharing.pop("type")](config, layer, **sharing)

    def project(table: Mapping[str, Any], entries: list, tensor: str, count: int) -> tuple[list[Head], float]:
        options = options_of(entries, layer)
        found, factor = table[options.pop("type")](x, tensors, config, f"{name}.{tensor}", count * dim, **options)
        return split_heads(found, count, dim), factor

    query, query_factor = project(QUERIES, config.query, "q_proj", heads.keys * group)
    key, key_factor = project(KEYS, config.key, "k_proj", heads.keys)
    values[layer], _ = project(VALUES, config.value, "v_proj", heads.values) if heads.values else ([], 1.0)
    value = values[layer] + [values[heads.source][i] for i in heads.borrowed]
    query = normed_and_turned(query, tensors.get(f"{name}.q_norm.weight"), config)
    key = normed_and_turned(key, tensors.get(f"{name}.k_norm.weight"), config)
    scale = query_factor * key_factor / dim**0.5
    mixed = [attend(q, key[h // group], value[h // group], scale) for h, q in enumerate(query)]
    return linear(torch.cat(mixed, dim=-1), tensors, f"{name}.o_proj")


def sequence_logits(tensors: Tensors, config: Any, ids: list[int]) -> Tensor:
    """One sequence: blocks Y = X + Attn(norm(X)), Z = Y + MLP(norm(Y)); final norm; logits, [positions, vocabulary]"""
    embedding = tensors["model.embed_tokens.weight"]
    x = torch.stack([embedding[i] for i in ids])
    if config.position_embedding_type == "learned":
        x = x + torch.stack([tensors["model.embed_positions.weight"][p] for p in range(len(ids))])
    values: dict[int, list[Head]] = {}
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        x = x + attention(block_norm(x, tensors, config, f"{name}.input_layernorm"), tensors, config, layer, values)
        x = x + mlp(block_norm(x, tensors, config, f"{name}.post_attention_layernorm"), tensors, config, f"{name}.mlp")
    head = embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
    return block_norm(x, tensors, config, "model.norm") @ head.T


def logits(tensors: Tensors, config: Any, ids: Tensor) -> Tensor:
    """[batch, positions, vocabulary] for token ids [batch, positions]"""
    return torch.stack([sequence_logits(tensors, config, row) for row in ids.tolist()])
