"""Mean V: W_V heads pooled two by two, everything else as it was.

Wu et al. 2025 (P3), section 5.1, the paper's own method: "a mean pool across every two head projections in layers
beyond the first". https://github.com/Zhoutong-Wu/SkipV1Former
"""

from .heads import KeptHeads, ValueHeads, mean, pools


def mean_v(heads: ValueHeads, kept: int) -> KeptHeads:
    """The mean of heads 2j and 2j + 1 stands at place j; the places above take the first layer's."""
    n = len(heads.value)
    groups = pools(n, kept)
    value = mean(heads.value, groups)
    assert value is not None
    return KeptHeads(value, mean(heads.value_bias, groups), heads.output, tuple(range(n)))
