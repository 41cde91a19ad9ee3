"""Layers attend with all values, or all values and keys, of another layer.

- YOCO: Sun et al. 2024, "You Only Cache Once", https://arxiv.org/abs/2405.05254
- CLA: Brandon et al. 2024, "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention",
  https://arxiv.org/abs/2405.12981
- FusedKV-Lite: "Reconstructing KV Caches with Cross-layer Fusion For Enhanced Transformers",
  https://arxiv.org/abs/2512.03870

Values alone (YOCO-V, CLA-V): Wu et al. 2025 (P3), appendix B.1.
"""

from dataclasses import dataclass

from .layout import HeadCounts, HeadLayout, KeyValue, shared_layout


@dataclass(frozen=True)
class SharedMiddle(KeyValue):
    """YOCO: the layers above the middle attend with the values of layer L/2, counted from 1; they compute none.

    Options:
        keys: share the keys as well (YOCO); otherwise the values alone (YOCO-V).
        local: layers below the middle one attend within `config.sliding_window` positions (YOCO's efficient
            self-decoder) and cache no more than that.
    """

    kind = "shared_middle"
    keys: bool = False
    local: bool = False

    def layout(self, counts: HeadCounts, layer: int) -> HeadLayout:
        lender = min(layer, counts.num_layers // 2 - 1)
        return shared_layout(counts, lender if self.keys else layer, lender)

    def windowed(self, counts: HeadCounts, layer: int) -> bool:
        return not self.local or layer < counts.num_layers // 2 - 1

    def clash(self, config, counts: HeadCounts) -> str | None:
        if counts.num_layers < 2:
            return "one layer has no half above the middle; use at least 2"
        if self.local and config.sliding_window is None:
            return "local=true needs a sliding_window"
        if self.local and counts.num_layers < 4:
            return "local=true needs a layer below the middle one, so at least 4 layers"
        return None


@dataclass(frozen=True)
class SharedAdjacent(KeyValue):
    """CLA: layer l attends with the values of layer `l - l % group_size`, the first of each group.

    Options:
        keys: share the keys as well (CLA); otherwise the values alone (CLA-V).
        group_size: adjacent layers that share, 2 or 3 in the papers.
    """

    kind = "shared_adjacent"
    keys: bool = False
    group_size: int = 2

    def layout(self, counts: HeadCounts, layer: int) -> HeadLayout:
        lender = layer - layer % self.group_size
        return shared_layout(counts, lender if self.keys else layer, lender)

    def clash(self, config, counts: HeadCounts) -> str | None:
        if 2 <= self.group_size <= counts.num_layers:
            return None
        return (
            f"group_size must be at least 2 and at most the number of layers ({counts.num_layers}), "
            f"found {self.group_size}"
        )


class FirstValuesMiddleKeys(KeyValue):
    """FusedKV-Lite: the layers above the middle attend with the first layer's values and the keys of layer L/2, counted
    from 1; they compute neither and cache nothing."""

    kind = "first_values_middle_keys"

    def layout(self, counts: HeadCounts, layer: int) -> HeadLayout:
        middle = counts.num_layers // 2 - 1
        return shared_layout(counts, layer, layer) if layer <= middle else shared_layout(counts, middle, 0)

    def clash(self, config, counts: HeadCounts) -> str | None:
        return "one layer has no half above the middle; use at least 2" if counts.num_layers < 2 else None
