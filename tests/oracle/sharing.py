"""Which key and value heads a layer builds, and which heads, of which layers, it attends with.

Every function is given the layer and, for an unshared model, the number of key heads and of value heads of a layer.
Under MLA the latent's columns stand in place of the value heads and the one RoPE key in place of the key heads.
Layers count from 0; the middle layer, number L / 2 in papers, is m = L // 2 - 1.
"""

from math import floor
from typing import Any, NamedTuple

At = tuple[int, int]  # (layer, index of the head among those that this layer builds)
Sum = list[tuple[float, At]]  # a head that is a weighted sum of built ones


class Heads(NamedTuple):
    """A layer builds `keys` key heads and `values` value heads; its heads attend with `attended_keys` and
    `attended_values`. With `mixing` (mode, weight), the values built are first mixed with those of layer 0."""

    keys: int
    values: int
    attended_keys: list[At]
    attended_values: list[Sum]
    mixing: tuple[str, float] | None = None


def at(layer: int, count: int) -> list[At]:
    """All heads of a layer."""
    return [(layer, h) for h in range(count)]


def plain(heads: list[At]) -> list[Sum]:
    """Each head by itself."""
    return [[(1.0, head)] for head in heads]


def taken(layer: int, keys_of: int, values_of: int, keys: int, values: int) -> Heads:
    """Keys and values from the layers named; the layer builds those that are its own."""
    return Heads(
        keys if keys_of == layer else 0,
        values if values_of == layer else 0,
        at(keys_of, keys),
        plain(at(values_of, values)),
    )


def projected(config: Any, layer: int, n_keys: int, n_values: int) -> Heads:
    """Every layer has its own keys and values."""
    return taken(layer, layer, layer, n_keys, n_values)


def injected_values(injection: str, layer: int, source: int, n: int, kept: int) -> list[Sum]:
    """The value heads after the `kept` own ones, out of the source's V_1 with n heads; s = n - kept.
    Second half, ResFormer: V_1[kept:]. Pooling: (V_1[j] + V_1[kept + j]) / 2. Dynamic: second half for the first
    layer after the source, and from layer to layer one head further, around the end. Odd/even: the first s heads
    where the layer's number, counted from 1, is odd, the second half where it is even."""
    s = n - kept
    if injection == "pooling":
        return [[(0.5, (source, j)), (0.5, (source, kept + j))] for j in range(s)]
    if injection == "dynamic":
        return plain([(source, (kept + (layer - source - 1) + j) % n) for j in range(s)])
    if injection == "odd_even" and (layer + 1) % 2 == 1:
        return plain([(source, j) for j in range(s)])
    assert injection in ("second_half", "odd_even", "resformer")
    return plain([(source, kept + j) for j in range(s)])


def first_layer_values(
    config: Any,
    layer: int,
    n_keys: int,
    n_values: int,
    ratio: float = 0.5,
    source_layer: int = 0,
    inject: bool = True,
    injection: str = "second_half",
    keys: bool = False,
    middle_keys: bool = False,
) -> Heads:
    """SkipV1Former: with s = floor(r H_kv), a layer after the source builds the first H_kv - s value heads; the other
    s are the source's. With the injection "resformer", V_1's head h is added to the own head h.
    Keys (SkipKV1Former): the same of key heads, always with the second half. Middle keys (SkipV1-YOCO): the layers
    after the middle one attend with its keys. Not injected (SkipV0): those s key/value heads are left out, with the
    query heads they serve."""
    kept, kept_keys = n_values - floor(ratio * n_values), n_keys - floor(ratio * n_keys)
    middle = config.num_hidden_layers // 2 - 1
    built_keys, attended_keys = n_keys, at(layer, n_keys)
    if middle_keys and layer > middle:
        built_keys, attended_keys = 0, at(middle, n_keys)
    if layer <= source_layer:
        return Heads(built_keys, n_values, attended_keys, plain(at(layer, n_values)))
    if not inject:
        return Heads(kept_keys, kept, at(layer, kept_keys), plain(at(layer, kept)))
    if keys:
        built_keys, attended_keys = kept_keys, at(layer, kept_keys) + at(source_layer, n_keys)[kept_keys:]
    own = plain(at(layer, kept))
    if injection == "resformer":
        own = [[(1.0, (layer, h)), (1.0, (source_layer, h))] for h in range(kept)]
    return Heads(built_keys, kept, attended_keys, own + injected_values(injection, layer, source_layer, n_values, kept))


def interpolated_values(
    config: Any, layer: int, n_keys: int, n_values: int, mode: str = "fixed", weight: float = 0.5
) -> Heads:
    """ResFormer: after the first layer, lambda V + (1 - lambda) V_1."""
    return projected(config, layer, n_keys, n_values)._replace(mixing=(mode, weight) if layer else None)


def shared_middle(
    config: Any, layer: int, n_keys: int, n_values: int, keys: bool = False, local: bool = False
) -> Heads:
    """YOCO-V: the layers after the middle one attend with its values. Keys (YOCO): and with its keys. Local says in
    which layers the sliding window holds: see masks.py."""
    lender = min(layer, config.num_hidden_layers // 2 - 1)
    return taken(layer, lender if keys else layer, lender, n_keys, n_values)


def shared_adjacent(
    config: Any, layer: int, n_keys: int, n_values: int, group_size: int = 2, keys: bool = False
) -> Heads:
    """CLA-V: among every group_size adjacent layers, all attend with the values of the first. Keys (CLA): and with
    its keys."""
    lender = layer - layer % group_size
    return taken(layer, lender if keys else layer, lender, n_keys, n_values)


def first_values_middle_keys(config: Any, layer: int, n_keys: int, n_values: int) -> Heads:
    """FusedKV-Lite: the layers after the middle one attend with the first layer's values and the middle one's keys."""
    middle = config.num_hidden_layers // 2 - 1
    if layer <= middle:
        return projected(config, layer, n_keys, n_values)
    return taken(layer, middle, 0, n_keys, n_values)


def borrowed_values(
    config: Any, layer: int, n_keys: int, n_values: int, heads: list[list[int]] | None = None, ratio: float = 0.5
) -> Heads:
    """Every row [layer, head, source layer, source head] replaces one value head by one that the source layer builds.
    Without rows, with s = floor(r H_kv): after the first layer, the last s heads are the first s of the layer before.
    A layer builds the heads that no row replaces, in their order."""
    s = floor(ratio * n_values)
    rows = heads or [[i, n_values - s + j, i - 1, j] for i in range(1, config.num_hidden_layers) for j in range(s)]
    built: dict[int, list[int]] = {}
    for i in range(config.num_hidden_layers):
        replaced = [head for row_layer, head, _, _ in rows if row_layer == i]
        built[i] = [head for head in range(n_values) if head not in replaced]
    attended: list[At] = []
    for h in range(n_values):
        source, head = layer, h
        for row_layer, row_head, source_layer, source_head in rows:
            if (row_layer, row_head) == (layer, h):
                source, head = source_layer, source_head
        attended.append((source, built[source].index(head)))
    return Heads(n_keys, len(built[layer]), at(layer, n_keys), plain(attended))


SHARING = {
    "projected": projected,
    "first_layer_values": first_layer_values,
    "interpolated_values": interpolated_values,
    "shared_middle": shared_middle,
    "shared_adjacent": shared_adjacent,
    "first_values_middle_keys": first_values_middle_keys,
    "borrowed_values": borrowed_values,
}


def heads_of(config: Any, layer: int, n_keys: int, n_values: int) -> Heads:
    options = dict(config.key_value)
    return SHARING[options.pop("type")](config, layer, n_keys, n_values, **options)
