"""Remove one of W_Q, W_K, W_V or W_O by a change of basis of the stream it reads or writes.

`x -> x Theta` with Theta = W_Q makes the query's weight the identity. All other readers of the stream absorb Theta^-1,
its writers Theta (Karbevski & Mijoski 2025, Lemma 3.1, Theorems 4.2-4.4, https://arxiv.org/abs/2510.23912). With
Theta = W_O^-1 the output projection goes, and its readers absorb W_O (Graef 2024, Table 1 and Fig. 2,
https://arxiv.org/abs/2404.12362). One rule covers all: each basis of the stream (stream.py) can take one weight.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

from torch import Tensor

from ..checkpoints.stream import PROJECTIONS, Stream, StreamPoint, StreamTensor, after_attention
from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.plan import LAYER_SLOTS
from ..model.registry import make_mechanism
from ..model.shapes import parameter_shapes
from ..presets.edit import set_mechanisms, with_fields
from .linalg import Basis, Factored

# What each norm commutes with.
NORMS = {
    "rmsnorm": ("RMSNorm", "orthogonal changes of basis only"),
    "layernorm": ("LayerNorm", "orthogonal changes of basis that keep the all-ones direction only"),
    "dyt": ("DyT", "permutations and changes of sign only"),
}


class Removal(NamedTuple):
    """`slot` is "query", "key", "value" or "output"; layers count from 0."""

    slot: str
    layer: int

    def __str__(self) -> str:
        return f"the {self.slot} weight of layer {self.layer}"


def weight_name(config: LeanConfig, removal: Removal) -> str:
    """Return the name of the tensor."""
    return f"model.layers.{config.plan.layers[removal.layer].block}.self_attn.{PROJECTIONS[removal.slot]}.weight"


def point_of(config: LeanConfig, removal: Removal) -> StreamPoint:
    """Return the point on the stream whose basis removes this weight."""
    return after_attention(config, removal.layer) if removal.slot == "output" else StreamPoint(removal.layer)


def why_not(removal: Removal, stream: Stream) -> str | None:
    """Return why this one weight cannot be eliminated, without the weight's name, or None."""
    config = stream.config
    layer = config.plan.layers[removal.layer]
    kind = getattr(layer, removal.slot).kind
    if kind == "identity":
        return "it is gone already"
    if kind != "linear":
        return f"it is {kind!r}, not a plain matrix"
    if layer.latent is not None and removal.slot in ("key", "value"):
        return "keys and values are made from a latent (MLA), which is narrower than the stream"
    if not layer.computed_heads(removal.slot):
        kind = layer.key_value.kind
        return f"the layer has none of its own, its {removal.slot}s come from another layer (key_value is {kind!r})"
    if config.norm_type != "none":
        norm, admitted = NORMS[config.norm_type]
        place = "writes the stream precedes" if config.norm_placement == "after" else "reads the stream follows"
        return f"every matrix that {place} {norm}, which admits {admitted}"
    shape = parameter_shapes(config)[weight_name(config, removal)]
    if shape[0] != shape[1]:
        return f"it is not square ({shape[1]} by {shape[0]}), so it has no inverse{_fewer_heads(config, removal)}"
    identity = make_mechanism(LAYER_SLOTS[removal.slot], removal.slot, {"type": "identity"})
    if clash := identity.clash(config, shape[0] // config.head_dim):
        return clash
    if blocked := stream.blocked.get(_basis_of(removal, stream)):
        return f"its change of basis reaches further than its layer, and there {blocked}"
    if stream.centered and removal.slot == "output" and is_solved_with(removal, stream):
        return "the mean that its norms subtract is folded into it, and so it is singular"
    return None


def _fewer_heads(config: LeanConfig, removal: Removal) -> str:
    """Say what leaves the layer fewer heads of this kind than attention has; empty where nothing does."""
    layer = config.plan.layers[removal.layer]
    heads = layer.computed_heads(removal.slot)
    if heads >= config.num_attention_heads:
        return ""
    grouped = removal.slot in ("key", "value") and heads == config.num_key_value_heads
    reason = f"num_key_value_heads is {heads}" if grouped else f"key_value is {layer.key_value.kind!r}"
    return f": the layer computes {heads} of {config.num_attention_heads} heads, {reason}"


def is_solved_with(removal: Removal, stream: Stream) -> bool:
    """Return whether any tensor is divided by the weight.

    A query, key or value divides all else that reads its stream, an output projection all else that writes its stream.
    Keeping a head tied divides what the other end of the stream takes.
    """
    basis = _basis_of(removal, stream)
    if stream.config.tie_word_embeddings and basis in (stream.start, stream.end):
        return True
    own = weight_name(stream.config, removal)
    others = (t for t in stream.tensors.values() if stream.basis_of[t.point] == basis and t.name != own)
    return any(tensor.writes == (removal.slot == "output") for tensor in others)


def assign_bases(removals: Iterable[Removal], stream: Stream) -> dict[StreamPoint, Removal]:
    """Return which removal each basis of the stream serves.

    Raises a LeanError for a removal that is impossible, and for two that would need different bases of one stream.
    """
    serves: dict[StreamPoint, Removal] = {}
    for removal in removals:
        if reason := why_not(removal, stream):
            raise LeanError(f"{removal} cannot be eliminated exactly: {reason}")
        other = serves.setdefault(_basis_of(removal, stream), removal)
        if weight_name(stream.config, other) != weight_name(stream.config, removal):
            raise LeanError(
                f"{other} and {removal} cannot both be eliminated: each needs a basis of its own for the stream, and "
                f"these two see one, since {stream.why_joined()}; remove one of them"
            )
    return serves


def remove_projections(
    stream: Stream, tensors: Mapping[str, Tensor], removals: Iterable[Removal]
) -> tuple[LeanConfig, LazyTensors, dict[str, Callable[[], Factored]]]:
    """Return the function of `stream.config` without these weights: a new configuration and its lazy tensors.

    Changed tensors are float64; a tied head is untied only where nothing else keeps it exact. The third value gives, by
    name, a function that returns the factored weight that was removed. Raises a LeanError as `assign_bases` does.
    """
    config = stream.config
    # A weight that several layers share goes from all of them.
    names = {weight_name(config, removal) for removal in removals}
    every = (Removal(slot, layer) for slot in PROJECTIONS for layer in range(config.num_hidden_layers))
    removals = [removal for removal in every if weight_name(config, removal) in names]
    serves = assign_bases(removals, stream)

    # Layers are visited in order, and one basis is left when the next is entered: two factorizations at a time do.
    @lru_cache(maxsize=2)
    def factor(name: str) -> Factored:
        return Factored(tensors[name].double().T)

    bases = {
        point: Basis(partial(factor, weight_name(config, removal)), inverse=removal.slot == "output")
        for point, removal in serves.items()
    }
    new = _without_weights(config, removals, tied=bool(config.tie_word_embeddings) and _keep_tied(stream, bases))

    def compute(name: str) -> Tensor:
        source = "model.embed_tokens.weight" if name == "lm_head.weight" and name not in tensors else name
        values, tensor = tensors[source], stream.tensors.get(name)
        if name == "lm_head.weight":
            tensor = StreamTensor(name, StreamPoint(config.num_hidden_layers))
        basis = bases.get(stream.basis_of[tensor.point]) if tensor else None
        if tensor is None or basis is None:
            return values
        if not tensor.writes:
            return basis.read(values.reshape(-1, config.hidden_size)).view(values.shape)
        rows = values.movedim(tensor.axis, -1)
        return basis.write(rows.reshape(-1, rows.shape[-1])).view(rows.shape).movedim(-1, tensor.axis)

    return new, LazyTensors(parameter_shapes(new), compute), {name: partial(factor, name) for name in names}


def _basis_of(removal: Removal, stream: Stream) -> StreamPoint:
    return stream.basis_of[point_of(stream.config, removal)]


def _keep_tied(stream: Stream, bases: dict[StreamPoint, Basis]) -> bool:
    """Return whether embedding and head stay one matrix, after giving the other end of the stream the basis for it."""
    for one, other in ((stream.start, stream.end), (stream.end, stream.start)):
        if one in bases and other not in bases and other not in stream.blocked:
            bases[other] = bases[one].transposed_inverse()  # E Theta = E (Theta^-T)^-T
            return True
    return stream.start not in bases and stream.end not in bases


def _without_weights(config: LeanConfig, removals: Iterable[Removal], tied: bool) -> LeanConfig:
    new = with_fields(config, tie_word_embeddings=tied) if config.task != "image_classification" else config
    for slot in PROJECTIONS:
        spec = {"type": "identity"} | ({"scale": 1.0} if slot in ("query", "key") else {})
        biased = config.attention_output_bias if slot == "output" else config.attention_bias
        layers = (removal.layer for removal in removals if removal.slot == slot)
        new = set_mechanisms(new, slot, dict.fromkeys(layers, spec | ({"bias": True} if biased else {})))
    return new
