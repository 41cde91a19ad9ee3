"""Queries that are the mean of the input and a linear map: of the input itself, or of the MLP below.

Karbevski 2026 (P2): `Q = (X + X W_Q) / 2`, the `residual` option of its public code, is the linear control of the
nonlinear query. `Q = (X + H[:, :d] W') / 2` is section 4, "Extensions". Our reading of "MLP_hidden(X)[0:d] W'": the MLP
that has just run, that of the block before, lends H, which enters its down projection, so nothing is computed twice.
The first layer has none before it and keeps a linear query. https://github.com/MarkoKarbevski/beyond_query_linearity
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .registry import Projection, width_clash


class ResidualQuery(nn.Module):
    """`Q = (X + X W_Q) / 2`; W_Q keeps the name and the initial draw of the linear query.

    Not an nn.Linear: tools that replace or merge linear layers would compute `X W_Q` in its place.
    """

    def __init__(self, config, num_heads: int):
        super().__init__()
        self.width = num_heads * config.head_dim
        self.weight = nn.Parameter(torch.empty(self.width, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(self.width)) if config.attention_bias else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.halve(hidden_states, F.linear(hidden_states, self.weight, self.bias))

    def halve(self, residual: Tensor, mapped: Tensor) -> Tensor:
        """The mean of the leading columns of `residual` and `mapped`, [..., width]."""
        return (residual[..., : self.width] + mapped) / 2


class QueryFromMLP(ResidualQuery):
    """`Q = (X + H[:, :d] W') / 2`, W' [d, d] under the linear query's name and with its initial draw."""

    def forward(self, hidden_states: Tensor, mlp_hidden: Tensor) -> Tensor:  # type: ignore[override]
        """hidden_states: [batch, positions, hidden_size]; mlp_hidden: [batch, positions, intermediate_size]."""
        return self.halve(hidden_states, F.linear(mlp_hidden[..., : self.weight.shape[1]], self.weight, self.bias))


@dataclass(frozen=True)
class Residual(Projection):
    """A residual query."""

    kind = "residual"
    passes_input = True
    scale: float = 1.0

    def build(self, config, num_heads: int) -> nn.Module:
        return ResidualQuery(config, num_heads)

    def clash(self, config, heads: int) -> str | None:
        return width_clash(config, "an identity")


class FromMLP(Residual):
    """A query from the MLP below."""

    kind = "from_mlp"
    reads_mlp = True
    linear_in_first_layer = True

    def build(self, config, num_heads: int) -> nn.Module:
        return QueryFromMLP(config, num_heads)

    def clash(self, config, heads: int) -> str | None:
        if config.mlp_type == "moe":
            return "an MLP of experts (moe) has no one set of hidden activations to lend"
        if config.intermediate_size < config.hidden_size:
            return (
                f"it takes the first hidden_size ({config.hidden_size}) hidden activations of an MLP, which has only "
                f"intermediate_size ({config.intermediate_size})"
            )
        return super().clash(config, heads)
