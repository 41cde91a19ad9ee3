"""Identity projection: the input itself, cut into heads, stands for the query, the key or the value.

Karbevski & Mijoski 2025, "W_K, W_V is probably all you need", section 5 and Remark 1: `Q = X` (or `K = X`, `V = X`),
with the attention scale `1 / (2 sqrt(d_k))` for query and key. https://arxiv.org/abs/2510.23912
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class IdentityProjection(nn.Module):
    """`X` itself (+ b): head i is columns `[i * head_dim, (i + 1) * head_dim)` of the normed input; no weight.

    The bias is what is left of a linear projection whose weight was eliminated exactly.
    """

    def __init__(self, config, num_heads: int, options):
        super().__init__()
        self.width = num_heads * config.head_dim
        self.bias = nn.Parameter(torch.empty(self.width)) if options.bias else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        kept = hidden_states[..., : self.width]
        return kept if self.bias is None else kept + self.bias

    @staticmethod
    def clash(config, num_heads: int, options) -> str | None:
        if config.num_attention_heads * config.head_dim != config.hidden_size:
            return (
                f"an identity needs num_attention_heads * head_dim = hidden_size, found "
                f"{config.num_attention_heads} * {config.head_dim} != {config.hidden_size}"
            )
        return None


class IdentityQuery(IdentityProjection):
    """`Q = X`. `scale` multiplies `1 / sqrt(head_dim)`: at initialisation the logits of an identity query spread about
    1.8 times as wide as a linear one's (P1 appendix B), which the paper's factor 1/2 takes back."""

    @dataclass(frozen=True)
    class Options:
        scale: float = 0.5
        bias: bool = False


class _IdentityKeyOrValue(IdentityProjection):
    @staticmethod
    def clash(config, num_heads: int, options) -> str | None:
        if config.num_key_value_heads != config.num_attention_heads:
            return (
                "an identity key or value needs as many key/value heads as query heads (MHA): with grouped heads the "
                f"input's {config.num_attention_heads} slices do not fit {config.num_key_value_heads} key/value heads"
            )
        return IdentityProjection.clash(config, num_heads, options)


class IdentityKey(_IdentityKeyOrValue):
    """`K = X`, with the attention scale of the identity query."""

    @dataclass(frozen=True)
    class Options:
        scale: float = 0.5
        bias: bool = False


class IdentityValue(_IdentityKeyOrValue):
    """`V = X`, standard attention scale. A layer that computes fewer value heads takes the leading slices of `X`."""

    @dataclass(frozen=True)
    class Options:
        bias: bool = False
