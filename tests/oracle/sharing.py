"""Which key and value heads a layer builds, and which value heads come from another layer."""

from math import floor
from typing import Any, NamedTuple


class Heads(NamedTuple):
    """A layer attends with `keys` key heads, `values` value heads of its own and, after them, the value heads
    `borrowed` of layer `source`."""

    keys: int
    values: int
    source: int = 0
    borrowed: range = range(0)


def projected(config: Any, layer: int) -> Heads:
    """Every layer has its own H_kv keys and values."""
    return Heads(config.num_key_value_heads, config.num_key_value_heads)


def first_layer_values(
    config: Any, layer: int, ratio: float = 0.5, source_layer: int = 0, inject: bool = True
) -> Heads:
    """SkipV1Former: with s = floor(r H_kv), a layer after the source builds the first H_kv - s value heads; the other
    s are the source's, at the same indices. Not injected (SkipV0): those s key/value heads are left out, with the
    query heads they serve."""
    heads = config.num_key_value_heads
    left = heads - floor(ratio * heads)
    if layer <= source_layer:
        return Heads(heads, heads)
    if inject:
        return Heads(heads, left, source_layer, range(left, heads))
    return Heads(left, left)


SHARING = {"projected": projected, "first_layer_values": first_layer_values}
