"""Each layer computes its own key and value heads: MHA, GQA and MQA, by `num_key_value_heads`.

Ainslie et al. 2023, "GQA", https://arxiv.org/abs/2305.13245; Shazeer 2019 (MQA), https://arxiv.org/abs/1911.02150
"""

from dataclasses import dataclass

from .layout import HeadCounts, HeadLayout, heads


class ProjectedKeyValue:
    """Nothing is shared between layers."""

    @dataclass(frozen=True)
    class Options:
        pass

    @staticmethod
    def layout(counts: HeadCounts, options: Options, layer: int) -> HeadLayout:
        return HeadLayout(
            counts.num_query_heads, heads(layer, 0, counts.num_key_heads), heads(layer, 0, counts.num_value_heads)
        )
