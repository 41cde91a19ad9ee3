"""One of W_Q, W_K, W_V or W_O goes by a change of basis of the stream it reads or writes.

`x -> x Theta` with Theta = W_Q makes the query's weight the identity, and what else reads the stream absorbs Theta^-1,
what writes it Theta (Karbevski & Mijoski 2025, Lemma 3.1 and Theorems 4.2-4.4); Theta = W_O^-1 does the same for the
output projection, and its readers absorb W_O itself (Graef 2024, Table 1 and Fig. 2). One rule covers all of these
results: every basis of the stream (stream.py) can take one weight. https://arxiv.org/abs/2510.23912,
https://arxiv.org/abs/2404.12362
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.registry import make_mechanism
from ..presets.edit import TABLES, set_mechanisms, with_fields
from .linalg import Basis, Factored
from .stream import Place, Stream, StreamTensor, after_attention

PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


class Removal(NamedTuple):
    """`slot` is "query", "key", "value" or "output"; layers count from 0."""

    slot: str
    layer: int

    def __str__(self) -> str:
        return f"the {self.slot} weight of layer {self.layer}"


def weight_name(config: LeanConfig, removal: Removal) -> str:
    return f"model.layers.{config.plan.layers[removal.layer].block}.self_attn.{PROJECTIONS[removal.slot]}.weight"


def place_of(config: LeanConfig, removal: Removal) -> Place:
    """The place on the stream whose basis removes this weight."""
    return after_attention(config, removal.layer) if removal.slot == "output" else Place(removal.layer)


def why_not(config: LeanConfig, removal: Removal, stream: Stream | None = None) -> str | None:
    """What keeps this one weight from being eliminated, or None; a sentence without the weight's name."""
    layer = config.plan.layers[removal.layer]
    kind = getattr(layer, removal.slot).kind
    if kind == "identity":
        return "it is gone already"
    if kind != "linear":
        return f"it is {kind!r}, not a plain matrix"
    if (removal.slot == "key" and not layer.computed_key_heads) or (
        removal.slot == "value" and not layer.computed_value_heads
    ):
        return f"the layer has none of its own, its {removal.slot}s come from another layer"
    if layer.latent is not None and removal.slot in ("key", "value"):
        return "keys and values are made from a latent (MLA), which is narrower than the stream"
    if norm := norm_sentence(config):
        return norm
    shape = config.plan.parameter_shapes[weight_name(config, removal)]
    if shape[0] != shape[1]:
        return f"it is not square ({shape[1]} by {shape[0]}), so it has no inverse"
    identity = make_mechanism(TABLES[removal.slot], removal.slot, {"type": "identity"})
    if clash := identity.cls.clash(config, shape[0] // config.head_dim, identity.options):  # type: ignore[operator]
        return clash
    stream = stream or Stream(config)
    blocked = stream.blocked.get(stream.basis_of[place_of(config, removal)])
    return blocked and f"its change of basis reaches further than its layer, and there {blocked}"


def norm_sentence(config: LeanConfig) -> str | None:
    """Why the norm in front of every sublayer forbids a change of basis, or None without norms."""
    if config.norm_type == "none":
        return None
    allowed = {
        "rmsnorm": "orthogonal changes of basis only",
        "layernorm": "orthogonal changes of basis that keep the all-ones direction only",
        "dyt": "permutations and changes of sign only",
    }[config.norm_type]
    name = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "dyt": "DyT"}[config.norm_type]
    return f"there is {name} in front of what reads the stream, which admits {allowed}"


def is_solved_with(config: LeanConfig, removal: Removal) -> bool:
    """Whether any tensor is divided by the weight: all that read the same stream as a query, key or value; all others
    that write the same stream as an output projection, whose readers are multiplied by it; and what the other end of
    the stream takes so that a head stays tied."""
    stream = Stream(config)
    basis = stream.basis_of[place_of(config, removal)]
    if config.tie_word_embeddings and basis in (stream.start, stream.end):
        return True
    own = weight_name(config, removal)
    touches = [t for t in stream.touches.values() if stream.basis_of[t.place] == basis and t.tensor != own]
    return any(touch.writes == (removal.slot == "output") for touch in touches)


def check(config: LeanConfig, removals: Iterable[Removal]) -> dict[Place, Removal]:
    """Which removal each basis of the stream serves.

    Raises:
        LeanError: a removal that is impossible, or two that would need different bases of one stream; says why.
    """
    stream, serves = Stream(config), dict[Place, Removal]()
    for removal in removals:
        if reason := why_not(config, removal, stream):
            raise LeanError(f"{removal} cannot be eliminated exactly: {reason}")
        basis = stream.basis_of[place_of(config, removal)]
        other = serves.setdefault(basis, removal)
        if weight_name(config, other) != weight_name(config, removal):
            raise LeanError(
                f"{other} and {removal} cannot both be eliminated: each needs a basis of its own for the stream, and "
                f"these two see one, since {stream.why_joined()}; remove one of them"
            )
    return serves


def remove_projections(
    config: LeanConfig, tensors: Mapping[str, Tensor], removals: Iterable[Removal]
) -> tuple[LeanConfig, LazyTensors, dict[str, Callable[[], Factored]]]:
    """The same function without these weights.

    Args:
        config, tensors: a model; neither is changed. Tensors may be lazy, each is read when its successor is.
        removals: at most one for every basis of the stream; those of one shared block count once.

    Returns:
        the configuration without the weights (a tied head is untied only where nothing else keeps it exact); its
        tensors, float64 where they changed; and, by name, a function giving the factored weight that was removed.

    Raises:
        LeanError: as `check`.
    """
    removals = _with_shared_blocks(config, removals)
    serves = check(config, removals)
    stream = Stream(config)

    # Layers are visited in order, and one basis is left when the next is entered: two factorisations at a time do.
    @lru_cache(maxsize=2)
    def factor(name: str) -> Factored:
        return Factored(tensors[name].double().T)

    bases = {
        place: Basis(partial(factor, weight_name(config, removal)), inverse=removal.slot == "output")
        for place, removal in serves.items()
    }
    tied = bool(config.tie_word_embeddings)
    if tied and (stream.start in bases or stream.end in bases):
        tied = _keep_tied(stream, bases)
    slots = {slot: {r.layer for r in removals if r.slot == slot} for slot in PROJECTIONS}
    new = with_fields(config, tie_word_embeddings=tied) if config.task != "image_classification" else config
    for slot, layers in slots.items():
        spec = {"type": "identity"} | ({"scale": 1.0} if slot in ("query", "key") else {})
        biased = config.attention_output_bias if slot == "output" else config.attention_bias
        new = set_mechanisms(new, slot, dict.fromkeys(layers, spec | ({"bias": True} if biased else {})))

    def compute(name: str) -> Tensor:
        source = "model.embed_tokens.weight" if name == "lm_head.weight" and name not in tensors else name
        tensor, touch = tensors[source], stream.touches.get(name)
        if name == "lm_head.weight":
            touch = StreamTensor(name, Place(config.num_hidden_layers))
        basis = bases.get(stream.basis_of[touch.place]) if touch else None
        if touch is None or basis is None:
            return tensor
        if not touch.writes:
            return basis.read(tensor.flatten(0, -2)).view(tensor.shape)
        moved = tensor.movedim(touch.axis, -1)
        return basis.write(moved.reshape(-1, moved.shape[-1])).view(moved.shape).movedim(-1, touch.axis)

    names = [weight_name(config, removal) for removal in serves.values()]
    return new, LazyTensors(new.plan.parameter_shapes, compute), {name: partial(factor, name) for name in names}


def _with_shared_blocks(config: LeanConfig, removals: Iterable[Removal]) -> list[Removal]:
    """A weight that several layers share goes from all of them."""
    layers = config.plan.layers
    found = {
        Removal(removal.slot, layer.layer)
        for removal in removals
        for layer in layers
        if layer.block == layers[removal.layer].block
    }
    return sorted(found)


def _keep_tied(stream: Stream, bases: dict[Place, Basis]) -> bool:
    """Gives the other end of the stream the basis under which embedding and head stay one matrix, if it is free."""
    for one, other in ((stream.start, stream.end), (stream.end, stream.start)):
        if one in bases and other not in bases and other not in stream.blocked:
            bases[other] = bases[one].transposed_inverse()  # E Theta = E (Theta^-T)^-T
            return True
    return False
