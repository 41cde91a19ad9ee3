"""Residual linear query: `Q = (X + X W_Q) / 2`, the linear control of the nonlinear query.

Karbevski 2026, the `residual` option of its public code. https://github.com/MarkoKarbevski/beyond_query_linearity
"""

from dataclasses import dataclass

from torch import Tensor

from .projection_identity import IdentityQuery
from .projection_linear import LinearProjection


class ResidualQuery(LinearProjection):
    """`Q = (X + X W_Q) / 2`; W_Q keeps the name and the initial draw of the linear query."""

    @dataclass(frozen=True)
    class Options:
        scale: float = 1.0

    def forward(self, hidden_states: Tensor) -> Tensor:
        return (hidden_states[..., : self.out_features] + super().forward(hidden_states)) / 2

    @staticmethod
    def clash(config, num_heads: int, options) -> str | None:
        return IdentityQuery.clash(config, num_heads, options)
