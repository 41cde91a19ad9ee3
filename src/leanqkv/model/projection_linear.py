"""Linear projection `X W` (+ b): the standard query, key and value.

Vaswani et al. 2017, https://arxiv.org/abs/1706.03762
"""

from dataclasses import dataclass

from torch import nn


class LinearProjection:
    """`X W`, from `hidden_size` to `num_heads * head_dim`, with a bias where `config.attention_bias` says so."""

    @dataclass(frozen=True)
    class Options:
        pass

    @staticmethod
    def build(config, num_heads: int, options: Options) -> nn.Linear:
        """Return a plain nn.Linear: quantizers and adapters recognize one by its exact type."""
        return nn.Linear(config.hidden_size, num_heads * config.head_dim, bias=config.attention_bias)
