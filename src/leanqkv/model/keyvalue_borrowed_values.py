"""Borrowed values: single value heads of a layer are heads that it or an earlier layer computes anyway.

Ours; cross-layer attention (Brandon et al. 2024, https://arxiv.org/abs/2405.12981) and SkipV1Former (Wu et al. 2025)
head by head. Near layers have similar values, so a finished checkpoint loses less by it than by first-layer values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor

from .layout import HeadCounts, HeadLayout, HeadSource, KeyValue, heads
from .registry import Rows

Place = tuple[int, int]  # layer, head


@dataclass(frozen=True)
class BorrowedValues(KeyValue):
    """Key head h of layer l attends to the value that its row in `heads` names, or to one of its own without a row.

    A layer computes and caches its own values alone, in the order of their heads.

    Options:
        heads: rows [layer, head, source layer, source head], all counted from 0. Heads are counted as in a layer that
            borrows nothing. The source layer is the same or an earlier one, and computes the source itself.
        ratio: without `heads`, the share of the value heads that every layer but the first borrows, at most 0.5: its
            last ones are the first ones of the layer below.
    """

    kind = "borrowed_values"
    heads: Rows = ()
    ratio: float = 0.5

    @cached_property
    def rows(self) -> dict[Place, Place]:
        """The source of every borrowed head; of two rows for one head, the last."""
        return {(layer, head): (source, place) for layer, head, source, place in self.heads}

    def layout(self, counts: HeadCounts, layer: int) -> HeadLayout:
        own: dict[int, list[int]] = {}  # by source layer, the heads that it computes
        values: list[HeadSource] = []
        for source, place in self._sources(counts, layer):
            index = own.setdefault(source, self._own(counts, source)).index(place)
            if values and (values[-1].layer, values[-1].stop) == (source, index):
                values[-1] = HeadSource(source, values[-1].start, index + 1)
            else:
                values.append(HeadSource(source, index, index + 1))
        return HeadLayout(counts.num_query_heads, heads(layer, 0, counts.num_key_heads), tuple(values))

    def clash(self, config, counts: HeadCounts) -> str | None:
        if config.kv_lora_rank:
            return "a latent (MLA) has no value heads to borrow"
        if not self.heads:
            return self._ratio_clash(counts)
        if self.ratio != type(self).ratio:
            return "heads says which heads are borrowed, and ratio has no meaning with it; leave ratio out"
        layers, number, seen = counts.num_layers, counts.num_value_heads, set()
        shape = f"{layers} layer{'s' * (layers > 1)} of {number} value head{'s' * (number > 1)}"
        for row in self.heads:
            layer, head, source, place = row
            if not (0 <= source <= layer < layers and 0 <= head < number and 0 <= place < number):
                return (
                    f"row {list(row)} of heads does not fit {shape}: it is [layer, head, source layer, source head], "
                    "counted from 0, and the source layer is the same or an earlier one"
                )
            if (layer, head) in seen:
                return f"head {head} of layer {layer} has two rows in heads; leave one out"
            if (source, place) in self.rows:
                return f"row {list(row)} of heads borrows a head that is borrowed itself; name one that is computed"
            seen.add((layer, head))
        if any(spec.get("type") == "keys" for spec in config.value):
            for layer in range(layers):
                if (own := self._own(counts, layer)) != list(range(len(own))):
                    return (
                        f"layer {layer} computes the values of heads {', '.join(map(str, own))}, and keys reused as "
                        "values (value 'keys') are those of a layer's first heads; borrow the last ones"
                    )
        return None

    def _ratio_clash(self, counts: HeadCounts) -> str | None:
        number = counts.num_value_heads
        if not 0 <= self.ratio <= 0.5:
            return f"ratio must be between 0 and 0.5, or heads must name the borrowed ones; found {self.ratio}"
        if self.ratio and not floor(self.ratio * number):
            return (
                f"ratio {self.ratio} of {number} value head{'s' * (number > 1)} is less than one, so nothing "
                "would be borrowed; raise the ratio or num_key_value_heads"
            )
        return None

    def _sources(self, counts: HeadCounts, layer: int) -> Sequence[Place]:
        """For each head of `layer`, the layer and the head whose value it attends to: its own or a borrowed one."""
        number = counts.num_value_heads
        if self.heads:
            return [self.rows.get((layer, head), (layer, head)) for head in range(number)]
        kept = number - floor(self.ratio * number) if layer else number
        return [(layer, head) if head < kept else (layer - 1, head - kept) for head in range(number)]

    def _own(self, counts: HeadCounts, layer: int) -> list[int]:
        """The heads whose values `layer` computes."""
        sources = self._sources(counts, layer)
        return [head for head, source in enumerate(sources) if source == (layer, head)]
