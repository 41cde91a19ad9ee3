"""Query from the MLP below: `Q = (X + f) / 2`, f the first d hidden activations of the previous block's MLP times W'.

Karbevski 2026 (P2), section 4, "Extensions". https://github.com/MarkoKarbevski/beyond_query_linearity
Our reading of "MLP_hidden(X)[0:d] W'": the MLP that has just run, that of the block before, lends what enters its down
projection, so nothing is computed twice. The first layer has none before it and keeps a linear query.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from .projection_identity import IdentityQuery
from .query_residual import ResidualQuery


class QueryFromMLP(ResidualQuery):
    """`Q = (X + H[:, :d] W') / 2`, W' [d, d] under the linear query's name and with its initial draw."""

    @dataclass(frozen=True)
    class Options:
        scale: float = 1.0

    needs_mlp_hidden = True
    in_first_layer = "linear"

    def forward(self, hidden_states: Tensor, mlp_hidden: Tensor) -> Tensor:  # type: ignore[override]
        """hidden_states: [batch, positions, hidden_size]; mlp_hidden: [batch, positions, intermediate_size]."""
        return self.halve(hidden_states, F.linear(mlp_hidden[..., : self.weight.shape[1]], self.weight, self.bias))

    @staticmethod
    def clash(config, num_heads: int, options) -> str | None:
        if config.mlp_type == "moe":
            return "an MLP of experts (moe) has no one set of hidden activations to lend"
        if config.intermediate_size < config.hidden_size:
            return (
                f"it takes the first hidden_size ({config.hidden_size}) hidden activations of an MLP, which has only "
                f"intermediate_size ({config.intermediate_size})"
            )
        return IdentityQuery.clash(config, num_heads, options)
