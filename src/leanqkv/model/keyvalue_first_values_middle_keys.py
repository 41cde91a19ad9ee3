"""FusedKV-Lite: the layers above the middle attend with the first layer's values and the middle layer's keys.

"Reconstructing KV Caches with Cross-layer Fusion For Enhanced Transformers", https://arxiv.org/abs/2512.03870
"""

from dataclasses import dataclass

from .layout import HeadCounts, HeadLayout, heads


class FirstValuesMiddleKeys:
    """Layers 0 .. L/2 - 1 are full; those above compute neither keys nor values and cache nothing."""

    @dataclass(frozen=True)
    class Options:
        pass

    @staticmethod
    def layout(counts: HeadCounts, options: Options, layer: int) -> HeadLayout:
        middle = counts.num_layers // 2 - 1
        above = layer > middle
        return HeadLayout(
            counts.num_query_heads,
            heads(middle if above else layer, 0, counts.num_key_heads),
            heads(0 if above else layer, 0, counts.num_value_heads),
        )

    @staticmethod
    def clash(config, counts: HeadCounts, options: Options) -> str | None:
        return "one layer has no half above the middle; use at least 2" if counts.num_layers < 2 else None
