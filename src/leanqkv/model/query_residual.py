"""Residual linear query: `Q = (X + X W_Q) / 2`, the linear control of the nonlinear query.

Karbevski 2026, the `residual` option of its public code. https://github.com/MarkoKarbevski/beyond_query_linearity
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .projection_identity import IdentityQuery


class ResidualQuery(nn.Module):
    """`Q = (X + X W_Q) / 2`; W_Q keeps the name and the initial draw of the linear query.

    Not an nn.Linear: tools that replace or merge linear layers would compute `X W_Q` in its place.
    """

    @dataclass(frozen=True)
    class Options:
        scale: float = 1.0

    def __init__(self, config, num_heads: int, options):
        super().__init__()
        self.width = num_heads * config.head_dim
        self.weight = nn.Parameter(torch.empty(self.width, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(self.width)) if config.attention_bias else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.halve(hidden_states, F.linear(hidden_states, self.weight, self.bias))

    def halve(self, residual: Tensor, mapped: Tensor) -> Tensor:
        """The mean of the leading columns of `residual` and `mapped`, [..., width]."""
        return (residual[..., : self.width] + mapped) / 2

    @staticmethod
    def clash(config, num_heads: int, options) -> str | None:
        return IdentityQuery.clash(config, num_heads, options)
