"""Mean VO: W_V heads and their columns of W_O pooled two by two, the other columns zero.

Wu et al. 2025 (P3), appendix B.1. https://github.com/Zhoutong-Wu/SkipV1Former
"""

import torch

from .heads import KeptHeads, ValueHeads, mean, pools


def mean_vo(heads: ValueHeads, kept: int) -> KeptHeads:
    """As mean_v, and place j's columns of W_O are the mean of those of heads 2j and 2j + 1; the first layer's heads are
    multiplied by zeros."""
    n = len(heads.value)
    groups = pools(n, kept)
    value, output = mean(heads.value, groups), mean(heads.output, groups)
    assert value is not None and output is not None
    rest = torch.zeros_like(heads.output[kept:])
    return KeptHeads(value, mean(heads.value_bias, groups), torch.cat((output, rest)), tuple(range(n)))
