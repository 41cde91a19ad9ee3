"""Latent values: a layer caches `c = x W_c`, of `rank` columns, and its value heads `v_h = c W_h` are made from it.

Ours; the values' half of multi-head latent attention (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434, section 2.1),
beside ordinary keys, which keep their rotary positions. Every low-rank factorization of a finished W_V is one, so a
checkpoint can be converted to it in closed form.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .projection_linear import is_plain_linear


class LatentValues:
    """`v_proj` makes the latent, [batch, positions, rank], and `v_up_proj` the value heads of it.

    Expanded, a layer attends to the value heads. Absorbed, every head attends to the latent itself, and its output goes
    through its part of `v_up_proj`: the same, since attention is linear in the values, and cheaper when decoding, where
    expanding would touch the whole history at each step.

    Options:
        rank: columns of the latent; by default half of the width of the value heads.
    """

    caches_latent = True

    @dataclass(frozen=True)
    class Options:
        rank: int | None = None

    @staticmethod
    def rank(config, num_heads: int, options: Options) -> int:
        """Return the latent's columns."""
        return num_heads * config.head_dim // 2 if options.rank is None else options.rank

    @staticmethod
    def build(config, num_heads: int, options: Options) -> nn.Linear:
        return nn.Linear(config.hidden_size, LatentValues.rank(config, num_heads, options), bias=False)

    @staticmethod
    def build_up(config, num_heads: int, options: Options) -> nn.Linear:
        """Return the map of the latent to the value heads, with the bias that the values have."""
        rank = LatentValues.rank(config, num_heads, options)
        return nn.Linear(rank, num_heads * config.head_dim, bias=config.attention_bias)

    @staticmethod
    def clash(config, num_heads: int, options: Options) -> str | None:
        if config.key_value["type"] != "projected":
            return f"key_value {config.key_value['type']!r} shares value heads, and here only a latent is kept"
        width = num_heads * config.head_dim
        if not 1 <= LatentValues.rank(config, num_heads, options) <= width:
            return f"rank must be from 1 to {width}, the width of its {num_heads} value heads; found {options.rank}"
        return None


def expand(up: nn.Module, latent: Tensor, head_dim: int) -> Tensor:
    """The heads [batch, heads, positions, head_dim] of a latent [batch, 1, positions, columns]."""
    return up(latent[:, 0]).unflatten(-1, (-1, head_dim)).transpose(1, 2)


def from_latent(up: nn.Linear, attended: Tensor, head_dim: int) -> Tensor:
    """Outputs [batch, positions, query heads, head_dim] of attended latents [batch, positions, query heads, rank]."""
    weight = up.weight.to(attended.dtype).unflatten(0, (-1, head_dim))  # [heads, head_dim, rank]
    grouped = attended.unflatten(2, (len(weight), -1))
    output = torch.einsum("btkgr,kxr->btkgx", grouped, weight)
    if up.bias is not None:  # every head's weights add up to 1
        output = output + up.bias.to(attended.dtype).view(len(weight), 1, head_dim)
    return output.flatten(2, 3)


def absorbing_pays(up: nn.Linear, query: Tensor, key: Tensor, latent: Tensor) -> bool:
    """Whether attending to the latent takes fewer multiplications than making the value heads of it.

    It reads the weight of `up` without a call, so an adapter, hook or quantized weight there leaves the other form.

    Args:
        query: [batch, query heads, queries, head_dim]; key: [batch, heads, keys, head_dim].
        latent: [batch, 1, keys, rank].
    """
    if not is_plain_linear(up):
        return False
    (heads, queries, head_dim), keys = query.shape[1:], key.shape[2]
    rank, width = latent.shape[-1], up.out_features
    expanded = keys * rank * width + queries * keys * heads * head_dim
    absorbed = queries * keys * heads * rank + queries * heads * rank * head_dim
    return absorbed < expanded
