"""One layer, completely described: where its heads come from, which weights it computes with, what it caches."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from .registry import Mechanism, Projection


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
    `mixer(config, key_value)(values, lent, hidden_states)`, where `lent` are the new values of layer `mixed_with`. The
    mixer may append `derived_value_heads` of its own, which other layers then borrow like any others.
    """

    num_query_heads: int
    keys: tuple[HeadSource, ...]
    values: tuple[HeadSource, ...]
    mixer: Any = None
    mixed_with: int | None = None
    derived_value_heads: int = 0


class KeyValue(Mechanism):
    """Shares key and value heads between layers."""

    def layout(self, counts: HeadCounts, layer: int) -> HeadLayout:
        """Return where the heads of a layer come from."""
        raise NotImplementedError

    def windowed(self, counts: HeadCounts, layer: int) -> bool:
        """Return whether `config.sliding_window` holds in a layer."""
        return True


class ProjectedKeyValue(KeyValue):
    """Each layer computes its own heads: MHA, GQA and MQA, by `num_key_value_heads`.

    Ainslie et al. 2023, "GQA", https://arxiv.org/abs/2305.13245; Shazeer 2019 (MQA), https://arxiv.org/abs/1911.02150
    """

    kind = "projected"

    def layout(self, counts: HeadCounts, layer: int) -> HeadLayout:
        return shared_layout(counts, layer, layer)


def heads(layer: int, start: int, stop: int) -> tuple[HeadSource, ...]:
    """Return one source, or none where there are no heads to take."""
    return (HeadSource(layer, start, stop),) if stop > start else ()


def shared_layout(counts: HeadCounts, keys: int, values: int, **options: Any) -> HeadLayout:
    """Return the layout of a layer with all keys of one layer and all values of one. options: see HeadLayout."""
    keys_of, values_of = heads(keys, 0, counts.num_key_heads), heads(values, 0, counts.num_value_heads)
    return HeadLayout(counts.num_query_heads, keys_of, values_of, **options)


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


def _between(sources: Iterable[HeadSource], start: int, stop: int) -> tuple[HeadSource, ...]:
    """The sources of heads `start .. stop - 1`, counted over all of `sources`."""
    parts, edge = [], 0
    for source in sources:
        first, last = max(start, edge), min(stop, edge + source.num_heads)
        if first < last:
            parts.append(HeadSource(source.layer, source.start + first - edge, source.start + last - edge))
        edge += source.num_heads
    return tuple(parts)


@dataclass(frozen=True)
class CachedTensor:
    """One tensor a layer keeps per token: `num_heads * head_dim` elements."""

    name: str
    num_heads: int
    head_dim: int

    @property
    def elements(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention (MLA): a latent of `rank` columns, and one rotary key of `rope_dim` for all heads."""

    rank: int
    rope_dim: int


@dataclass(frozen=True)
class BlockWeights:
    """The weights of one block's attention: which mechanisms, and how many heads each computes. Layers that share a
    block agree in all of it."""

    query: Projection
    key: Projection
    value: Projection
    output: Projection
    output_gate: Any  # an OutputGate, or None
    key_value: KeyValue
    mixer: Any  # of the layout
    head_dim: int
    num_query_heads: int
    computed_key_heads: int
    computed_value_heads: int
    key_rank: int | None  # real columns of the latent that the key heads are made of; None: they are made of the input
    value_rank: int | None  # the same for the value heads
    latent: LatentShape | None

    @property
    def attention(self) -> str:
        """The attention that computes it, by its name in mechanisms.py."""
        if self.latent is not None:
            return "latent"
        return self.key.attention if self.key_rank is not None else self.value.attention

    def computed_heads(self, slot: str) -> int:
        """Return how many heads the layer's own query, key, value or output has; 0 if it has none of its own."""
        heads = {"key": self.computed_key_heads, "value": self.computed_value_heads}
        return heads.get(slot, self.num_query_heads)

    def build_mixer(self, config) -> Any:
        """Return the module that new values pass through before they are cached (see HeadLayout), or None."""
        return self.mixer(config, self.key_value) if self.mixer is not None else None


@dataclass(frozen=True, kw_only=True)
class LayerPlan(BlockWeights):
    """One layer: its weights, and how they are wired. Layers and heads count from 0."""

    layer: int
    block: int  # whose weights it uses: model.layers.{block}
    layout: HeadLayout
    groups: tuple[HeadGroup, ...]  # of `layout`; none under MLA
    window: int | None = None  # attends to that many positions, its own included; None: to all
    rope: str | None = None  # the field of the configuration with its rotary parameters; None: no rotary positions
    lends_mlp_hidden: bool = False
    averaged: tuple[int, ...] = ()  # DenseFormer: the outputs averaged after this block
    connections: Any = None  # hyper-connections in place of its skip connections
    key_scales: tuple[tuple[int, float], ...] = ()  # layers whose keys it attends with: the factor they ask for
    score_scale: float = 1.0  # the factor that rotary positions ask for (MLA)
    attention_multiplier: float | None = None  # in place of 1 / sqrt(head_dim)
    attention_divisor: int = 1  # of the factor on q k^T
    caches: bool = True  # false where the whole input is seen at once: nothing is kept for later

    @property
    def weights(self) -> BlockWeights:
        """The part of the plan that all layers of a shared block have."""
        return BlockWeights(*(getattr(self, field.name) for field in fields(BlockWeights)))

    def attention_scale(self, key_layer: int) -> float:
        """Factor on q k^T: `attention_multiplier` or `1 / sqrt(head_dim)`, over `attention_divisor`, times the `scale`
        options of the query and of the layer that made the keys, times `score_scale`."""
        width = self.head_dim + (self.latent.rope_dim if self.latent else 0)
        base = width**-0.5 if self.attention_multiplier is None else self.attention_multiplier
        key_scale = dict(self.key_scales).get(key_layer, 1.0)
        return base / self.attention_divisor * self.query.scale * key_scale * self.score_scale

    @property
    def borrowed(self) -> tuple[HeadSource, ...]:
        """Keys and values that another layer computes."""
        return tuple(source for source in (*self.layout.keys, *self.layout.values) if source.layer != self.layer)

    @property
    def lenders(self) -> set[int]:
        """The layers whose keys, values or new values this one needs."""
        mixed = set() if self.layout.mixed_with is None else {self.layout.mixed_with}
        return {source.layer for source in self.borrowed} | mixed

    @cached_property
    def cached(self) -> tuple[CachedTensor, ...]:
        """The tensors that the layer keeps of every token, for itself and for the layers that borrow from it."""
        value_heads = self.computed_value_heads + self.layout.derived_value_heads
        if self.latent is not None:
            tensors = [CachedTensor("latent", 1, value_heads + self.computed_key_heads * self.latent.rope_dim)]
        else:
            if self.value.reuses_keys and self.layout.mixer is None:
                value_heads = 0  # the keys are the values
            keys = (self.computed_key_heads, self.head_dim) if self.key_rank is None else (1, self.key_rank)
            values = (value_heads, self.head_dim) if self.value_rank is None else (1, self.value_rank)
            tensors = [CachedTensor("keys", *keys), CachedTensor("values", *values)]
        return tuple(tensor for tensor in tensors if tensor.elements) if self.caches else ()
