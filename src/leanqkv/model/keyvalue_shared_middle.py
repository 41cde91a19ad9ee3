"""YOCO: the layers above the middle attend with the values (and keys) of the middle layer, L/2.

Sun et al. 2024, "You Only Cache Once", https://arxiv.org/abs/2405.05254; values alone (YOCO-V): Wu et al. 2025 (P3),
appendix B.1.
"""

from dataclasses import dataclass

from .layout import HeadCounts, HeadLayout, heads


class SharedMiddle:
    """Layers 0 .. L/2 - 1 are full; those above compute no values, and no keys either with `keys`.

    Options:
        keys: share the keys as well (YOCO); otherwise the values alone (YOCO-V).
        local: layers below the middle one attend within `config.sliding_window` positions (YOCO's efficient
            self-decoder) and cache no more than that.
    """

    @dataclass(frozen=True)
    class Options:
        keys: bool = False
        local: bool = False

    @staticmethod
    def layout(counts: HeadCounts, options: Options, layer: int) -> HeadLayout:
        middle = counts.num_layers // 2 - 1
        lender = min(layer, middle)
        return HeadLayout(
            counts.num_query_heads,
            heads(lender if options.keys else layer, 0, counts.num_key_heads),
            heads(lender, 0, counts.num_value_heads),
        )

    @staticmethod
    def windowed(counts: HeadCounts, options: Options, layer: int) -> bool:
        return not options.local or layer < counts.num_layers // 2 - 1

    @staticmethod
    def clash(config, counts: HeadCounts, options: Options) -> str | None:
        if counts.num_layers < 2:
            return "one layer has no half above the middle; use at least 2"
        if options.local and config.sliding_window is None:
            return "local=true needs a sliding_window"
        if options.local and counts.num_layers < 4:
            return "local=true needs a layer below the middle one, so at least 4 layers"
        return None
