"""Where one layer's heads come from: the vocabulary in which a key/value mechanism describes itself to the plan."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadCounts:
    """The heads of a layer that shares nothing. With multi-head latent attention (MLA) the latent's columns stand
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
    """A run of heads whose keys come from one layer: one attention call, or one for each source of its values."""

    queries: slice
    keys: HeadSource
    values: tuple[HeadSource, ...]


def head_groups(layout: HeadLayout) -> tuple[HeadGroup, ...]:
    """Split a layer's heads where the source of the keys changes, and their values where the source of the values does.

    SkipV1Former becomes one group with two sources of values, the layer's own and the first layer's, so that no heads
    of different layers ever have to be copied into one tensor.
    """
    size = layout.num_query_heads // sum(source.num_heads for source in layout.keys)
    groups, start = [], 0
    for keys in layout.keys:
        stop = start + keys.num_heads
        groups.append(HeadGroup(slice(start * size, stop * size), keys, _between(layout.values, start, stop)))
        start = stop
    return tuple(groups)


def _between(sources: tuple[HeadSource, ...], start: int, stop: int) -> tuple[HeadSource, ...]:
    """The sources of heads `start .. stop - 1`, counted over all of `sources`."""
    parts, edge = [], 0
    for source in sources:
        first, last = max(start, edge), min(stop, edge + source.num_heads)
        if first < last:
            parts.append(HeadSource(source.layer, source.start + first - edge, source.start + last - edge))
        edge += source.num_heads
    return tuple(parts)
