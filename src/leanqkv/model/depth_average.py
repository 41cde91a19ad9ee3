"""DenseFormer: after a block, a learned weighted average over its output, all earlier ones and the embedding.

Pagliardini et al. 2024, "DenseFormer: Enhancing Information Flow in Transformers via Depth Weighted Averaging",
https://arxiv.org/abs/2402.02622. Cited by Wu et al. 2025 (P3), appendix B.1.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

DEFAULTS = {"dilation": 1, "period": 1}


class DepthAverage(nn.Module):
    """`Y_i = sum_j alpha_ij X_j` over j = i, i - dilation, i - 2 dilation, ... >= 0, ascending in `weight`. Starts as
    the identity: 1 for the block's own output, 0 for the others."""

    kind = "average"

    def __init__(self, inputs: tuple[int, ...]):
        super().__init__()
        self.inputs = inputs
        self.weight = nn.Parameter(torch.empty(len(inputs)))

    def initial_values(self) -> dict[str, Tensor]:
        return {"weight": torch.tensor([0.0] * (len(self.inputs) - 1) + [1.0])}

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """outputs: the embedding and every block's output so far, each [batch, positions, hidden_size]."""
        average = self.weight[0] * outputs[self.inputs[0]]
        for weight, index in zip(self.weight[1:], self.inputs[1:], strict=True):
            average = average + weight * outputs[index]
        return average.to(outputs[-1].dtype)

    @staticmethod
    def inputs_after(spec: Mapping[str, Any], num_layers: int) -> dict[int, tuple[int, ...]]:
        """Per layer after which an average is taken: which outputs enter it (0: the embedding, i + 1: block i's)."""
        dilation, period = (spec.get(name, default) for name, default in DEFAULTS.items())
        return {
            i: tuple(range((i + 1) % dilation, i + 2, dilation)) for i in range(num_layers) if (i + 1) % period == 0
        }

    @staticmethod
    def clash(spec: Mapping[str, Any], num_layers: int) -> str | None:
        """Return why the averages cannot be taken, or None."""
        for name, value in spec.items():
            if name not in DEFAULTS:
                return f"no option {name!r}: valid: {', '.join(DEFAULTS)}"
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= num_layers:
                return f"{name} must be a whole number from 1 to the number of layers ({num_layers}), found {value!r}"
        return None
