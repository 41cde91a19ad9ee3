"""Nonlinear query, key or value: `Q = (X + f(X)) / 2`, `f(X) = LN(act(RMSNorm(X) W_1) W_2)` with a narrow W_1.

Karbevski 2026 (P2), "Beyond Linearity in Attention Projections: The Case for Nonlinear Queries", equations 2-3; keys
and values, with the same f, are its section 2.2 and Karbevski & Mijoski 2025, section 6.
https://github.com/MarkoKarbevski/beyond_query_linearity, https://arxiv.org/abs/2510.23912
"""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers.activations import ACT2FN

from .registry import Projection, slices_clash, width_clash

ACTIVATIONS = ("gelu", "relu", "relu2")


class NonlinearProjection(nn.Module):
    """`(anchor(X) + f(X)) / 2`, from `hidden_size` to `width`."""

    def __init__(self, config, width: int, rank: int, options: "Nonlinear"):
        super().__init__()
        d = config.hidden_size
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
        """The projection, from `RMSNorm(X) W_1` [..., rank]."""
        residual = self.norm_out(self.up_proj(self.activation(bottleneck)))
        anchor = hidden_states[..., : self.width] if self.anchor is None else self.anchor(hidden_states)
        return (anchor + residual) / 2


@dataclass(frozen=True)
class Nonlinear(Projection):
    """A projection of this kind.

    Options:
        activation: "gelu" (the paper), "relu" or "relu2".
        rank: width r of the bottleneck; null: as many weights in f as in the linear projection, d / 2 where that is
            square. A query's is always d / 2 (the paper).
        norm_in, norm_out: the RMSNorm before W_1 and the LayerNorm after W_2; each has a weight and no bias.
        anchor: "identity" (the paper) or "linear", `(X W + f(X)) / 2`, for pretrained models (section 4).
    """

    kind = "nonlinear"
    activation: str = "gelu"
    rank: int | None = None
    norm_in: bool = True
    norm_out: bool = True
    anchor: str = "identity"

    @property
    def passes_input(self) -> bool:  # type: ignore[override]
        return self.anchor == "identity"

    def build(self, config, num_heads: int) -> nn.Module:
        width = num_heads * config.head_dim
        return NonlinearProjection(config, width, self.rank or self.own_rank(config.hidden_size, width), self)

    def own_rank(self, d: int, width: int) -> int:
        """Return r at which `r (d + width)` weights are the `d width` of a linear projection, or just fewer."""
        return max(1, d * width // (d + width))

    def anchor_clash(self, config) -> str | None:
        """Return why the input cannot be the anchor, or None."""
        return slices_clash(config, "the identity anchor of a key or value")

    def clash(self, config, heads: int) -> str | None:
        if self.activation not in ACTIVATIONS:
            return f"activation must be one of {', '.join(ACTIVATIONS)}, found {self.activation!r}"
        if self.anchor not in ("identity", "linear"):
            return f"anchor must be identity or linear, found {self.anchor!r}"
        if self.rank is not None and self.rank < 1:
            return f"rank must be at least 1, found {self.rank}"
        clash = self.anchor_clash(config) if self.anchor == "identity" else None
        return None if clash is None else f"{clash}; use anchor=linear"


@dataclass(frozen=True)
class NonlinearQuery(Nonlinear):
    """A nonlinear query; `scale` as that of any query."""

    scale: float = 1.0

    def own_rank(self, d: int, width: int) -> int:
        return d // 2

    def anchor_clash(self, config) -> str | None:
        return width_clash(config, "the identity anchor")


@dataclass(frozen=True)
class NonlinearKey(Nonlinear):
    """A nonlinear key; `scale` as that of any key."""

    scale: float = 1.0


class NonlinearValue(Nonlinear):
    """A nonlinear value. A layer that computes fewer value heads takes the leading slices of `X` for its anchor."""
