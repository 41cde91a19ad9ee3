"""The residual stream of a model: where its basis may differ, and which tensors write or read it.

Between two places that a skip connection joins there is one basis; where a sublayer has no skip, the stream after it is
free to be in another. Everything the theorems of Karbevski & Mijoski 2025 (section 4) and Graef 2024 (Table 1) say
about which weights can go together follows from that.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..model.config import LeanConfig
from ..model.plan import LayerPlan


class Place(NamedTuple):
    """A place on the stream: before layer `layer` (the last one: before the head), or `middle`, between its attention
    and its MLP."""

    layer: int
    middle: bool = False

    def __str__(self) -> str:
        return f"between attention and MLP of layer {self.layer}" if self.middle else f"before layer {self.layer}"


@dataclass(frozen=True)
class StreamTensor:
    """A tensor that reads the stream at a place (along its last axis) or writes it (along `axis`)."""

    tensor: str
    place: Place
    writes: bool = False
    axis: int = -1


class Stream:
    """The stream of `config`: `touches` of every tensor on it, `basis_of` a place, `blocked` places with the reason.

    `basis_of[place]` names the first place with the same basis; two places whose name differs may be given different
    bases.
    """

    def __init__(self, config: LeanConfig):
        self.config = config
        self.touches = {touch.tensor: touch for touch in _touches(config)}
        self._parent: dict[Place, Place] = {}
        for one, other in _joined(config):
            first, second = sorted((self._find(one), self._find(other)))
            self._parent[second] = first
        places = [Place(i, middle) for i in range(config.num_hidden_layers) for middle in (False, True)]
        places.append(Place(config.num_hidden_layers))
        self.basis_of = {place: self._find(place) for place in places}
        self.blocked: dict[Place, str] = {}
        for place, reason in _blocked(config):
            self.blocked.setdefault(self._find(place), reason)

    def _find(self, place: Place) -> Place:
        while (parent := self._parent.get(place, place)) != place:
            place = parent
        return place

    @property
    def start(self) -> Place:
        """The basis that the embeddings write."""
        return self.basis_of[Place(0)]

    @property
    def end(self) -> Place:
        """The basis that the head reads."""
        return self.basis_of[Place(self.config.num_hidden_layers)]

    def why_joined(self) -> str:
        """The reason, for a person, that places of this model share a basis."""
        config = self.config
        reasons = []
        if config.attention_skip or config.mlp_skip:
            reasons.append("skip connections carry the stream past them")
        elif config.block_type != "serial":
            reasons.append("in a parallel block the outputs of attention and MLP are added")
        if config.num_hidden_groups and config.num_hidden_groups < config.num_hidden_layers:
            reasons.append("layers share one block")
        if config.depth_average is not None:
            reasons.append("averages over depth mix the layers' outputs")
        return " and ".join(reasons)


def after_attention(config: LeanConfig, layer: int) -> Place:
    """Where the output projection of `layer` writes."""
    return Place(layer, middle=True) if config.block_type == "serial" else Place(layer + 1)


def _touches(config: LeanConfig) -> Iterator[StreamTensor]:
    """Every tensor of a model without norms that reads or writes the stream."""
    shapes = config.plan.parameter_shapes

    def touch(tensor: str, place: Place, writes: bool = False, axis: int = -1) -> Iterator[StreamTensor]:
        if tensor in shapes:
            yield StreamTensor(tensor, place, writes, axis)

    start, end = Place(0), Place(config.num_hidden_layers)
    for name in ("embed_tokens.weight", "embed_positions.weight", "embed_patches.class_token"):
        yield from touch(f"model.{name}", start, writes=True)
    for name in ("projection.weight", "projection.bias"):
        yield from touch(f"model.embed_patches.{name}", start, writes=True, axis=0)
    for name in ("lm_head.weight", "classifier.weight"):
        yield from touch(name, end)
    for layer in config.plan.layers:
        block, i = f"model.layers.{layer.block}", layer.layer
        before, middle = Place(i), after_attention(config, i)
        for name in ("q_proj", "q_rope_proj", "k_rope_proj", "kv_down_proj", "k_proj", "v_proj"):
            yield from touch(f"{block}.self_attn.{name}.weight", before)
        if getattr(layer.key_value.options, "mode", None) == "per_token":  # a gate made of the stream
            yield from touch(f"{block}.self_attn.mixer.weight", before)
        mlp = middle if config.block_type == "serial" else before
        for name in ("up_proj.weight", "gate_proj.weight", "router.weight", "experts.up_proj", "experts.gate_proj"):
            yield from touch(f"{block}.mlp.{name}", mlp)
        for name, place, axis in (
            ("self_attn.o_proj.weight", middle, 0),
            ("self_attn.o_proj.bias", middle, 0),
            ("mlp.down_proj.weight", Place(i + 1), 0),
            ("mlp.down_proj.bias", Place(i + 1), 0),
            ("mlp.experts.down_proj", Place(i + 1), 1),
        ):
            yield from touch(f"{block}.{name}", place, writes=True, axis=axis)


def _joined(config: LeanConfig) -> Iterator[tuple[Place, Place]]:
    """Pairs of places that have one basis."""
    first_user: dict[int, int] = {}
    for layer in config.plan.layers:
        i = layer.layer
        before, middle, after = Place(i), after_attention(config, i), Place(i + 1)
        if config.block_type == "serial":
            if config.attention_skip:
                yield before, middle
            if config.mlp_skip:
                yield middle, after
        elif config.mlp_skip:
            yield before, after
        # Layers that share a block see their streams in the same basis, and leave them in the same.
        j = first_user.setdefault(layer.block, i)
        yield Place(j), before
        yield after_attention(config, j), middle
        yield Place(j + 1), after
        for averaged in layer.averaged:
            yield Place(averaged), after


def _blocked(config: LeanConfig) -> Iterator[tuple[Place, str]]:
    """Places where the stream must stay in its basis, and why."""
    for layer in config.plan.layers:
        i = layer.layer
        for slot in ("query", "key", "value", "output"):
            mechanism = getattr(layer, slot)
            if mechanism.kind == "linear" or (slot == "value" and mechanism.kind == "keys") or not _has(layer, slot):
                continue
            place = after_attention(config, i) if slot == "output" else Place(i)
            yield (
                place,
                f"the {slot} of layer {i} is {mechanism.kind!r}: it passes on the stream's own coordinates, and a "
                "change of basis would have to give it a full matrix",
            )


def _has(layer: LayerPlan, slot: str) -> bool:
    return {"key": layer.computed_key_heads, "value": layer.computed_value_heads}.get(slot, 1) > 0
