"""ResFormer: every later layer's values are interpolated with the first layer's, `V <- lambda V + (1 - lambda) V_1`.

Zhou et al. 2024, "Value Residual Learning", https://arxiv.org/abs/2410.17897; Wu et al. 2025 (P3), section 3.2.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layout import HeadCounts, HeadLayout, KeyValue, shared_layout

MODES = ("fixed", "per_layer", "per_token")


class Interpolation(nn.Module):
    """`lambda V + (1 - lambda) V_1`, lambda a number, a weight of the layer, or each token's `sigmoid(x w + b)`."""

    def __init__(self, config, options):
        super().__init__()
        self.mode, self.start = options.mode, options.weight
        if options.mode == "per_token":
            self.weight = nn.Parameter(torch.empty(1, config.hidden_size))
            self.bias = nn.Parameter(torch.empty(1))
        elif options.mode == "per_layer":
            self.weight = nn.Parameter(torch.empty(1))

    def initial_values(self) -> dict[str, float]:
        if self.mode == "per_token":
            return {"weight": 0.0, "bias": math.log(self.start / (1 - self.start))}
        return {"weight": self.start}

    def forward(self, values: Tensor, lent: Tensor | None, hidden_states: Tensor) -> Tensor:
        """values, lent: [batch, heads, positions, head_dim]; hidden_states: [batch, positions, hidden_size]."""
        assert lent is not None
        share: Tensor | float
        if self.mode == "per_token":
            share = torch.sigmoid(nn.functional.linear(hidden_states, self.weight, self.bias))[:, None]
        else:
            share = self.weight if self.mode == "per_layer" else self.start
        return share * values + (1 - share) * lent


@dataclass(frozen=True)
class InterpolatedValues(KeyValue):
    """The first layer's values enter every later layer's; nothing less is computed or cached. Under MLA, latents.

    Options:
        mode: "fixed" (lambda = weight), "per_layer" (one learned weight a layer) or "per_token" (a learned gate).
        weight: lambda, or where it starts: 1/2 in the papers.
    """

    kind = "interpolated_values"
    mode: str = "fixed"
    weight: float = 0.5

    def layout(self, counts: HeadCounts, layer: int) -> HeadLayout:
        mixes = {"mixer": Interpolation, "mixed_with": 0} if layer > 0 else {}
        return shared_layout(counts, layer, layer, **mixes)

    def clash(self, config, counts: HeadCounts) -> str | None:
        if self.mode not in MODES:
            return f"mode must be one of {', '.join(MODES)}, found {self.mode!r}"
        if self.mode == "per_token" and not 0 < self.weight < 1:
            return f"a gate's weight must lie between 0 and 1, found {self.weight}"
        return None
