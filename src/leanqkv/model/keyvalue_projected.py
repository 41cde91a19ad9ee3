"""Each layer computes its own key and value heads: MHA, GQA and MQA, by `num_key_value_heads`.

Ainslie et al. 2023, "GQA", https://arxiv.org/abs/2305.13245; Shazeer 2019 (MQA), https://arxiv.org/abs/1911.02150
"""

from dataclasses import dataclass

from .layout import HeadLayout, HeadSource


class ProjectedKeyValue:
    """Nothing is shared between layers."""

    @dataclass(frozen=True)
    class Options:
        pass

    @staticmethod
    def layout(config, options: Options, layer: int) -> HeadLayout:
        own = (HeadSource(layer, 0, config.num_key_value_heads),)
        return HeadLayout(config.num_attention_heads, own, own)

    @staticmethod
    def clash(config, options: Options) -> str | None:
        return None
