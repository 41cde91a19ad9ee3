"""Identity: the input itself, cut into heads, stands for the query, the key or the value; heads stand for the output.

Karbevski & Mijoski 2025, "W_K, W_V is probably all you need", section 5 and Remark 1: `Q = X` (or `K = X`, `V = X`),
with the attention scale `1 / (2 sqrt(d_k))` for query and key. https://arxiv.org/abs/2510.23912
Output: Graef 2024 (P4), "KV-weights are all you need for skipless transformers", Fig. 4, blocks without Q and P:
https://arxiv.org/abs/2404.12362
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .registry import Projection, slices_clash, width_clash


class IdentityProjection(nn.Module):
    """The leading `width` columns of its input (+ b); no weight.

    The bias is what is left of a linear projection whose weight was eliminated exactly.
    """

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.width = width
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        kept = inputs[..., : self.width]
        return kept if self.bias is None else kept + self.bias


class Identity(Projection):
    """Head i is columns `[i * head_dim, (i + 1) * head_dim)` of the normed input."""

    kind = "identity"
    passes_input = True

    def build(self, config, num_heads: int) -> nn.Module:
        return IdentityProjection(num_heads * config.head_dim, self.bias)

    def clash(self, config, heads: int) -> str | None:
        return width_clash(config, "an identity")


@dataclass(frozen=True)
class IdentityQuery(Identity):
    """`Q = X`. `scale` multiplies `1 / sqrt(head_dim)`: at initialisation the logits of an identity query spread about
    1.8 times as wide as a linear one's (P1 appendix B), which the paper's factor 1/2 takes back."""

    scale: float = 0.5
    bias: bool = False


class _IdentityKeyOrValue(Identity):
    def clash(self, config, heads: int) -> str | None:
        return slices_clash(config, "an identity key or value")


@dataclass(frozen=True)
class IdentityKey(_IdentityKeyOrValue):
    """`K = X`, with the attention scale of the identity query."""

    scale: float = 0.5
    bias: bool = False


@dataclass(frozen=True)
class IdentityValue(_IdentityKeyOrValue):
    """`V = X`, standard attention scale. A layer that computes fewer value heads takes the leading slices of `X`."""

    bias: bool = False


@dataclass(frozen=True)
class IdentityOutput(Projection):
    """The heads side by side (+ b) are the output."""

    kind = "identity"
    bias: bool = False

    def build(self, config, num_heads: int) -> nn.Module:
        return IdentityProjection(config.hidden_size, self.bias)

    def clash(self, config, heads: int) -> str | None:
        if heads * config.head_dim == config.hidden_size:
            return None
        return (
            f"without an output projection the heads side by side ({heads} * {config.head_dim}) must be "
            f"hidden_size ({config.hidden_size}) wide"
        )
