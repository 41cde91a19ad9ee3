"""MLA: attention of one layer over one sequence, with keys and values out of a latent."""

from typing import Any

import torch
from torch import Tensor

from .attention import attend, options_of, output, split_heads
from .basic import Head, Tensors, linear, rotate
from .masks import seen
from .memory import Memory, attended_values, mixed_with_first
from .projections import QUERIES
from .sharing import heads_of


def turned(x: Tensor, config: Any) -> list[Head]:
    """Heads of d_R dimensions, all of which turn by their rotary position."""
    n, theta = config.qk_rope_head_dim, config.rope_parameters["rope_theta"]
    return [rotate(head, n, theta) for head in split_heads(x, n)]


def latent_attention(x: Tensor, tensors: Tensors, config: Any, layer: int, name: str, memory: Memory) -> Tensor:
    """c = x W_down. Head h: k_C = c W_UK,h, v = c W_UV,h and the content query q_h; beside them, for positions, a
    query q_R,h of its own and one key k_R for all heads, both turned: the score is
    scale (q_h . k_C + q_R,h . k_R), scale = query factor / sqrt(head_dim + d_R). What layers share are columns of c
    and the key k_R."""
    dim, d_rope, count = config.head_dim, config.qk_rope_head_dim, config.num_attention_heads
    heads = heads_of(config, layer, 1, config.kv_lora_rank)

    memory.keys[layer], memory.values[layer] = [], []
    if heads.values:  # the latent's columns, as heads of dimension 1
        built = split_heads(linear(x, tensors, f"{name}.kv_down_proj"), 1)
        memory.values[layer] = mixed_with_first(built, x, tensors, name, heads, memory)
    c = torch.cat(attended_values(heads, memory), dim=-1)
    key = split_heads(c @ tensors[f"{name}.k_up_proj.weight"].T, dim)
    value = split_heads(c @ tensors[f"{name}.v_up_proj.weight"].T, dim)

    options = options_of(config.query, layer)
    function = QUERIES[options.pop("type")]
    found, factor = function(x, memory.hidden, tensors, config, f"{name}.q_proj", count * dim, **options)
    query = split_heads(found, dim)
    if d_rope:
        if heads.keys:
            memory.keys[layer] = turned(linear(x, tensors, f"{name}.k_rope_proj"), config)
        lender, index = heads.attended_keys[0]
        position_key = memory.keys[lender][index]
        position_query = turned(linear(x, tensors, f"{name}.q_rope_proj"), config)
        query = [torch.cat(parts, dim=-1) for parts in zip(query, position_query, strict=True)]
        key = [torch.cat((head, position_key), dim=-1) for head in key]

    scale = factor * (config.attention_multiplier or 1 / (dim + d_rope) ** 0.5)
    keys_seen = seen(config, layer, len(x), memory.prefix)
    mixed = [attend(q, k, v, scale, keys_seen) for q, k, v in zip(query, key, value, strict=True)]
    return output(mixed, x, tensors, config, layer, name)
