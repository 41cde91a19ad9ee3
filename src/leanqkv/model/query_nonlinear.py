"""Nonlinear query: `Q = (X + f(X)) / 2`, `f(X) = LN(act(RMSNorm(X) W_1) W_2)` with a bottleneck of width r = d/2.

Karbevski 2026, "Beyond Linearity in Attention Projections: The Case for Nonlinear Queries", equations 2-3.
https://github.com/MarkoKarbevski/beyond_query_linearity
"""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers.activations import ACT2FN

from .registry import Projection, width_clash

ACTIVATIONS = ("gelu", "relu", "relu2")


@dataclass(frozen=True)
class Nonlinear(Projection):
    """A query of this kind.

    Options:
        activation: "gelu" (the paper), "relu" or "relu2".
        rank: width r of the bottleneck; null means hidden_size // 2, at which f has as many weights as W_Q.
        norm_in, norm_out: the RMSNorm before W_1 and the LayerNorm after W_2; each has a weight and no bias.
        anchor: "identity" (the paper) or "linear", `(X W_Q + f(X)) / 2`, for pretrained models (section 4).
    """

    kind = "nonlinear"
    activation: str = "gelu"
    rank: int | None = None
    norm_in: bool = True
    norm_out: bool = True
    anchor: str = "identity"
    scale: float = 1.0

    def build(self, config, num_heads: int) -> nn.Module:
        return NonlinearQuery(config, num_heads, self)

    def clash(self, config, heads: int) -> str | None:
        if self.activation not in ACTIVATIONS:
            return f"activation must be one of {', '.join(ACTIVATIONS)}, found {self.activation!r}"
        if self.anchor not in ("identity", "linear"):
            return f"anchor must be identity or linear, found {self.anchor!r}"
        if self.rank is not None and self.rank < 1:
            return f"rank must be at least 1, found {self.rank}"
        clash = width_clash(config, "the identity anchor") if self.anchor == "identity" else None
        return None if clash is None else f"{clash}; use anchor=linear"


class NonlinearQuery(nn.Module):
    """`Q = (anchor(X) + f(X)) / 2`."""

    def __init__(self, config, num_heads: int, options: Nonlinear):
        super().__init__()
        d, width = config.hidden_size, num_heads * config.head_dim
        rank = d // 2 if options.rank is None else options.rank
        self.width, self.eps = width, config.norm_eps
        self.norm_in = nn.RMSNorm(d, eps=config.norm_eps) if options.norm_in else nn.Identity()
        self.down_proj = nn.Linear(d, rank, bias=False)
        self.activation = ACT2FN[options.activation]
        self.up_proj = nn.Linear(rank, width, bias=False)
        self.norm_out = nn.LayerNorm(width, eps=config.norm_eps, bias=False) if options.norm_out else nn.Identity()
        self.anchor = nn.Linear(d, width, bias=config.attention_bias) if options.anchor == "linear" else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.from_bottleneck(hidden_states, self.down_proj(self.norm_in(hidden_states)))

    def from_bottleneck(self, hidden_states: Tensor, bottleneck: Tensor) -> Tensor:
        """The query, from `RMSNorm(X) W_1` [..., rank]."""
        residual = self.norm_out(self.up_proj(self.activation(bottleneck)))
        anchor = hidden_states[..., : self.width] if self.anchor is None else self.anchor(hidden_states)
        return (anchor + residual) / 2
