"""DenseFormer: after a block, a learned weighted average over its output, all earlier ones and the embedding.

Pagliardini et al. 2024, "DenseFormer: Enhancing Information Flow in Transformers via Depth Weighted Averaging",
https://arxiv.org/abs/2402.02622. Cited by Wu et al. 2025 (P3), appendix B.1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .registry import Mechanism


class DepthAverage(nn.Module):
    """`Y_i = sum_j alpha_ij X_j` over j = i, i - dilation, i - 2 dilation, ... >= 0, ascending in `weight`. Starts as
    the identity: 1 for the block's own output, 0 for the others."""

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


@dataclass(frozen=True)
class DepthAverages(Mechanism):
    """An average after every `period`-th block, over every `dilation`-th output down from the block's own."""

    kind = "average"
    dilation: int = 1
    period: int = 1

    @staticmethod
    def build(inputs: tuple[int, ...]) -> DepthAverage:
        return DepthAverage(inputs)

    def inputs_after(self, i: int) -> tuple[int, ...]:
        """Return which outputs are averaged after layer i (0: the embedding, j + 1: block j's); none: no average."""
        if (i + 1) % self.period:
            return ()
        return tuple(range((i + 1) % self.dilation, i + 2, self.dilation))

    def clash(self, config, heads: Any = None) -> str | None:
        layers = config.num_hidden_layers
        for name in ("dilation", "period"):
            if not 1 <= (value := getattr(self, name)) <= layers:
                return f"{name} must be a whole number from 1 to the number of layers ({layers}), found {value!r}"
        return None
