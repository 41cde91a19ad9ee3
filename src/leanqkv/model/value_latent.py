"""Latent values: a layer caches `c = x W_c`, of `rank` columns, and its value heads `v_h = c W_h` are made from it.

Ours; the values' half of multi-head latent attention (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434, section 2.1),
beside ordinary keys, which keep their rotary positions. Every low-rank factorization of a finished W_V is one, so a
checkpoint can be converted to it in closed form.

With `keys`, values are made of the latent and of the layer's own keys, `v_h = c W_h + k U_h`, and the latent holds what
the keys do not. There k is as it was before rotary positions: cached keys are turned back when they are read, so that
nothing else is cached. Slim attention (Graef & Wasielewski 2025, https://arxiv.org/abs/2503.05840) makes values of the
keys alone, which takes a square W_K: without grouped heads.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .key_latent import Columns, rotation_of_columns
from .position import Rotation, rotate
from .projection_linear import is_plain_linear


class LatentValues:
    """`v_proj` makes the latent, [batch, positions, rank], and `v_up_proj` the value heads of it.

    Expanded, a layer attends to the value heads. Absorbed, every head attends to the latent itself, and its output goes
    through its part of `v_up_proj`: the same, since attention is linear in the values, and cheaper when decoding, where
    expanding would touch the whole history at each step.

    Options:
        rank: columns of the latent; by default half of the width of the value heads.
        keys: whether the values are made of the layer's keys too.
    """

    caches_latent = True

    @dataclass(frozen=True)
    class Options:
        rank: int | None = None
        keys: bool = False

    @staticmethod
    def rank(config, num_heads: int, options: Options) -> int:
        """Return the latent's columns."""
        return num_heads * config.head_dim // 2 if options.rank is None else options.rank

    @staticmethod
    def build(config, num_heads: int, options: Options) -> nn.Linear:
        return nn.Linear(config.hidden_size, LatentValues.rank(config, num_heads, options), bias=False)

    @staticmethod
    def build_up(config, num_heads: int, options: Options, key_columns: int) -> nn.Linear:
        """Return the map of the latent, and of the keys behind it if it reads them, to the value heads; with the bias
        that the values have."""
        columns = LatentValues.rank(config, num_heads, options) + (key_columns if options.keys else 0)
        return nn.Linear(columns, num_heads * config.head_dim, bias=config.attention_bias)

    @staticmethod
    def clash(config, num_heads: int, options: Options) -> str | None:
        if config.key_value["type"] != "projected":
            return f"key_value {config.key_value['type']!r} shares value heads, and here only a latent is kept"
        if options.keys and config.qk_norm:
            return "values are made of keys as they are projected, and qk_norm norms these; leave keys=true out"
        width = num_heads * config.head_dim
        if not 1 <= LatentValues.rank(config, num_heads, options) <= width:
            return f"rank must be from 1 to {width}, the width of its {num_heads} value heads; found {options.rank}"
        return None


class LatentAndKeys(NamedTuple):
    """What values are made of that read keys: a latent and, behind it, the keys as they were before rotary positions.

    latent: [batch, 1, key positions, rank].
    keys: [batch, heads, key positions, head_dim], as attention reads them; latent ones are one head.
    new: [batch, positions, width], those of this call as they are projected.
    back: what turns the heads of a layer back, [batch or 1, key positions, at most head_dim]; None: nothing does.
    frequencies: of the complex columns of latent keys, each of which `back` turns by its own.
    """

    latent: Tensor
    keys: Tensor
    new: Tensor
    back: Rotation | None
    frequencies: Columns | None = None

    @property
    def columns(self) -> int:
        return self.latent.shape[-1] + self.new.shape[-1]

    def joined(self) -> Tensor:
        """Both as one head, [batch, 1, key positions, columns]."""
        if self.keys.shape[2] == self.new.shape[1]:
            return torch.cat((self.latent, self.new[:, None].to(self.latent.dtype)), dim=-1)
        keys, back = self.keys, self.back
        if back is not None:
            keys = rotate(keys, back if self.frequencies is None else rotation_of_columns(back, self.frequencies))
        return torch.cat((self.latent[:, 0], *keys.unbind(1)), dim=-1)[:, None]


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


def absorbing_pays(up: nn.Linear, query: Tensor, key: Tensor, rank: int) -> bool:
    """Whether attending to the latent takes fewer multiplications than making the value heads of it.

    It reads the weight of `up` without a call, so an adapter, hook or quantized weight there leaves the other form.

    Args:
        query: [batch, query heads, queries, head_dim]; key: [batch, heads, keys, head_dim].
        rank: columns of the latent, with those of the keys where values read them.
    """
    if not is_plain_linear(up):
        return False
    (heads, queries, head_dim), keys = query.shape[1:], key.shape[2]
    width = up.out_features
    expanded = keys * rank * width + queries * keys * heads * head_dim
    absorbed = queries * keys * heads * rank + queries * heads * rank * head_dim
    return absorbed < expanded
