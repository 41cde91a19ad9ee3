"""Output of attention: the projection W_O (P), or none at all.

Linear: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762. None: Graef 2024 (P4), "KV-weights are all you need for
skipless transformers", Fig. 4, blocks without Q and P: https://arxiv.org/abs/2404.12362
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class LinearOutput:
    """The heads side by side times W_O, from `num_heads * head_dim` to `hidden_size`."""

    @dataclass(frozen=True)
    class Options:
        pass

    @staticmethod
    def build(config, num_heads: int, options: Options) -> nn.Linear:
        return nn.Linear(num_heads * config.head_dim, config.hidden_size, bias=config.attention_output_bias)


class IdentityOutput(nn.Module):
    """The heads side by side (+ b) are the output."""

    @dataclass(frozen=True)
    class Options:
        bias: bool = False

    def __init__(self, config, num_heads: int, options: Options):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.hidden_size)) if options.bias else None

    def forward(self, heads: Tensor) -> Tensor:
        return heads if self.bias is None else heads + self.bias

    @staticmethod
    def clash(config, num_heads: int, options: Options) -> str | None:
        if num_heads * config.head_dim != config.hidden_size:
            return (
                f"without an output projection the heads side by side ({num_heads} * {config.head_dim}) must be "
                f"hidden_size ({config.hidden_size}) wide"
            )
        return None
