"""Where one layer's heads come from: the vocabulary in which a key/value mechanism describes itself to the plan."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadSource:
    """Heads `[start, stop)` of the keys (or values) that layer `layer` computes. Layers count from 0."""

    layer: int
    start: int
    stop: int

    @property
    def num_heads(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class HeadLayout:
    """The key and value heads one layer attends with, in order; query head i uses key/value head i // group size.

    `keys` and `values` describe the same number of heads. A source of the layer itself is computed there; any other
    is borrowed, and cached where it is computed.
    """

    num_query_heads: int
    keys: tuple[HeadSource, ...]
    values: tuple[HeadSource, ...]
