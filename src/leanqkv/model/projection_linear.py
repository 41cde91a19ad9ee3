"""Linear projection `X W` (+ b): the standard query, key and value.

Vaswani et al. 2017, https://arxiv.org/abs/1706.03762
"""

from dataclasses import dataclass

from torch import nn


class LinearProjection(nn.Linear):
    """`X W`, from `hidden_size` to `num_heads * head_dim`, with a bias where `config.attention_bias` says so."""

    @dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, config, num_heads: int, options: Options):
        super().__init__(config.hidden_size, num_heads * config.head_dim, bias=config.attention_bias)
