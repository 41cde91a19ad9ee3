"""Gate of attention's output: the heads side by side times `sigmoid(X W_g)`, before W_O; X is attention's input.

Qiu et al. 2025, "Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free",
section 2.2, at the position G1; https://arxiv.org/abs/2505.06708. Named by Karbevski 2026 (P2), section 4.
"""

from dataclasses import dataclass

from torch import nn

from .registry import Mechanism


@dataclass(frozen=True)
class OutputGate(Mechanism):
    """One factor between 0 and 1 for every column of the heads, or with `per_head` one for every query head."""

    kind = "sigmoid"
    per_head: bool = False

    def build(self, config, num_heads: int) -> nn.Linear:
        """Return the map from `hidden_size` to what the sigmoid is taken of; biased as query, key and value are."""
        width = num_heads if self.per_head else num_heads * config.head_dim
        return nn.Linear(config.hidden_size, width, bias=config.attention_bias)
