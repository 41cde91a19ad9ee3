"""Nonlinear query: `Q = (X + f(X)) / 2`, `f(X) = LN(act(RMSNorm(X) W_1) W_2)` with a bottleneck of width r = d/2.

Karbevski 2026, "Beyond Linearity in Attention Projections: The Case for Nonlinear Queries", equations 2-3.
https://github.com/MarkoKarbevski/beyond_query_linearity
"""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers.activations import ACT2FN

ACTIVATIONS = ("gelu", "relu", "relu2")


class NonlinearQuery(nn.Module):
    """`Q = (anchor(X) + f(X)) / 2`.

    Options:
        activation: "gelu" (the paper), "relu" or "relu2".
        rank: width r of the bottleneck; null means hidden_size // 2, at which f has as many weights as W_Q.
        norm_in, norm_out: the RMSNorm before W_1 and the LayerNorm after W_2; each has a weight and no bias.
        anchor: "identity" (the paper) or "linear", `(X W_Q + f(X)) / 2`, for pretrained models (section 4).
    """

    @dataclass(frozen=True)
    class Options:
        activation: str = "gelu"
        rank: int | None = None
        norm_in: bool = True
        norm_out: bool = True
        anchor: str = "identity"
        scale: float = 1.0

    def __init__(self, config, num_heads: int, options: Options):
        super().__init__()
        d, width, rank = config.hidden_size, num_heads * config.head_dim, _rank(config, options)
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

    @staticmethod
    def clash(config, num_heads: int, options: Options) -> str | None:
        if options.activation not in ACTIVATIONS:
            return f"activation must be one of {', '.join(ACTIVATIONS)}, found {options.activation!r}"
        if options.anchor not in ("identity", "linear"):
            return f"anchor must be identity or linear, found {options.anchor!r}"
        if options.rank is not None and options.rank < 1:
            return f"rank must be at least 1, found {options.rank}"
        if options.anchor == "identity" and config.num_attention_heads * config.head_dim != config.hidden_size:
            return (
                "the identity anchor needs num_attention_heads * head_dim = hidden_size, found "
                f"{config.num_attention_heads} * {config.head_dim} != {config.hidden_size}; use anchor=linear"
            )
        return None


def _rank(config, options: NonlinearQuery.Options) -> int:
    return options.rank if options.rank is not None else config.hidden_size // 2
