"""CLA: values (and keys) are shared by every few adjacent layers; the first of each group computes them.

Brandon et al. 2024, "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention",
https://arxiv.org/abs/2405.12981; values alone (CLA-V): Wu et al. 2025 (P3), appendix B.1.
"""

from dataclasses import dataclass

from .layout import HeadCounts, HeadLayout, heads


class SharedAdjacent:
    """Layer l attends with the values of layer `l - l % group_size`.

    Options:
        keys: share the keys as well (CLA); otherwise the values alone (CLA-V).
        group_size: adjacent layers that share, 2 or 3 in the papers.
    """

    @dataclass(frozen=True)
    class Options:
        keys: bool = False
        group_size: int = 2

    @staticmethod
    def layout(counts: HeadCounts, options: Options, layer: int) -> HeadLayout:
        lender = layer - layer % options.group_size
        return HeadLayout(
            counts.num_query_heads,
            heads(lender if options.keys else layer, 0, counts.num_key_heads),
            heads(lender, 0, counts.num_value_heads),
        )

    @staticmethod
    def clash(config, counts: HeadCounts, options: Options) -> str | None:
        if not 2 <= options.group_size <= counts.num_layers:
            return (
                f"group_size must be at least 2 and at most the number of layers ({counts.num_layers}), "
                f"found {options.group_size}"
            )
        return None
