"""Key or value projection with an identity block in every head: `K_g = X[:, s : s + w] + X[:, elsewhere] W_g`.

What the block-diagonal invariance of Karbevski & Mijoski 2025, Proposition 3.2, leaves of a linear projection: the
d_k x d_k block of W_K (or W_V) at the same d_k columns of the input can be made the identity in every head, and W_Q (or
W_O) absorbs what it was. https://arxiv.org/abs/2510.23912
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .registry import Projection


class BlockIdentityProjection(nn.Module):
    """From `hidden_size` to `num_heads * head_dim`; `num_heads * width^2` fewer weights than a linear projection."""

    def __init__(self, config, num_heads: int, start: int, width: int):
        super().__init__()
        d, head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.start, self.stop = num_heads, start, start + width
        plain = num_heads * (head_dim - width)
        self.weight = nn.Parameter(torch.empty(num_heads * width, d - width))
        self.plain_weight = nn.Parameter(torch.empty(plain, d)) if plain else None
        self.bias = nn.Parameter(torch.empty(num_heads * head_dim)) if config.attention_bias else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        elsewhere = torch.cat((hidden_states[..., : self.start], hidden_states[..., self.stop :]), dim=-1)
        mapped = F.linear(elsewhere, self.weight).unflatten(-1, (self.num_heads, -1))
        heads = mapped + hidden_states[..., None, self.start : self.stop]
        if self.plain_weight is not None:
            plain = F.linear(hidden_states, self.plain_weight).unflatten(-1, (self.num_heads, -1))
            heads = torch.cat((plain, heads), dim=-1)
        joined = heads.flatten(-2)
        return joined if self.bias is None else joined + self.bias


@dataclass(frozen=True)
class BlockIdentity(Projection):
    """A key or value of this kind.

    Options:
        start: the first of the `width` columns of the input that the last `width` columns of every head begin as.
        width: null for head_dim. Less where the leading columns of a head are rotated by position: they stay plain.
    """

    kind = "block_identity"
    start: int = 0
    width: int | None = None

    def build(self, config, num_heads: int) -> nn.Module:
        return BlockIdentityProjection(config, num_heads, self.start, self._width(config))

    def clash(self, config, heads: int) -> str | None:
        width = self._width(config)
        if not 1 <= width <= config.head_dim:
            return f"width must be from 1 to head_dim ({config.head_dim}), found {width}"
        last = config.hidden_size - width
        if last < 1:
            return (
                f"an identity block of {width} columns leaves nothing of hidden_size ({config.hidden_size}); an "
                "identity projection does that"
            )
        if not 0 <= self.start <= last:
            return f"start must be from 0 to hidden_size - width ({last}), found {self.start}"
        return None

    def _width(self, config) -> int:
        return config.head_dim if self.width is None else self.width
