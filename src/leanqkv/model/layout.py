"""Where one layer's heads come from: the vocabulary in which a key/value mechanism describes itself to the plan."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class HeadCounts:
    """What a layer that shares nothing would have. With multi-head latent attention (MLA) the latent's columns stand
    in for the value heads and the one rotary key for the key heads: they are what is computed, borrowed and cached."""

    num_layers: int
    num_query_heads: int
    num_key_heads: int
    num_value_heads: int


@dataclass(frozen=True)
class HeadSource:
    """Heads `[start, stop)` of the keys (or values) that layer `layer` holds. Layers count from 0."""

    layer: int
    start: int
    stop: int

    @property
    def num_heads(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class HeadLayout:
    """The key and value heads one layer attends with, in order; query head i uses key/value head i // group size.

    `keys` and `values` describe the same number of heads (but under MLA). A source of the layer itself is computed
    there; any other is borrowed, and cached where it is computed.

    A layer with a `mixer`, a module class, passes its new values through it before they are cached:
    `mixer(config, options)(values, lent, hidden_states)`, where `lent` are the new values of layer `mixed_with`. The
    mixer may append `derived_value_heads` of its own, which other layers then borrow like any others.
    """

    num_query_heads: int
    keys: tuple[HeadSource, ...]
    values: tuple[HeadSource, ...]
    mixer: Any = None
    mixed_with: int | None = None
    derived_value_heads: int = 0


def heads(layer: int, start: int, stop: int) -> tuple[HeadSource, ...]:
    """One source, or none where there are no heads to take."""
    return (HeadSource(layer, start, stop),) if stop > start else ()


@dataclass(frozen=True)
class HeadGroup:
    """A run of heads whose keys come from one layer and whose values come from one layer: one attention call."""

    queries: slice
    keys: HeadSource
    values: HeadSource


def head_groups(layout: HeadLayout) -> tuple[HeadGroup, ...]:
    """Cuts a layer's heads where the source of its keys or of its values changes.

    SkipV1Former becomes two groups, the layer's own values and the first layer's, so that no value heads of different
    layers ever have to be copied into one tensor.
    """

    def bounds(sources: tuple[HeadSource, ...]) -> list[int]:
        edges = [0]
        for source in sources:
            edges.append(edges[-1] + source.num_heads)
        return edges

    def part(sources: tuple[HeadSource, ...], start: int, stop: int) -> HeadSource:
        for source, edge in zip(sources, bounds(sources)[:-1], strict=True):
            if edge <= start < edge + source.num_heads:
                offset = source.start - edge
                return HeadSource(source.layer, start + offset, stop + offset)
        raise AssertionError(f"no source for head {start}")

    edges = sorted({*bounds(layout.keys), *bounds(layout.values)})
    size = layout.num_query_heads // edges[-1]
    return tuple(
        HeadGroup(slice(start * size, stop * size), part(layout.keys, start, stop), part(layout.values, start, stop))
        for start, stop in pairwise(edges)
    )
