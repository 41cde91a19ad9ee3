"""Changes of basis inside the heads: (W_Q, W_K) -> (W_Q D, W_K D^-T) and (W_V, W_O) -> (W_V D, D^-1 W_O), head by head.

Karbevski & Mijoski 2025, Proposition 3.2 and the remark after it. Heads that several layers attend with, that are mixed
with other layers' heads or belong to a shared block must change together. https://arxiv.org/abs/2510.23912
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scipy.cluster.hierarchy import DisjointSet
from torch import Tensor

from ..checkpoints.stream import PROJECTIONS
from ..checkpoints.tensors import LazyTensors
from ..model.config import LeanConfig
from ..model.layout import LayerPlan
from ..model.shapes import parameter_shapes
from .linalg import Basis

Head = tuple[int, int]  # layer or block of weights, head
# Whose weight makes the heads of a side, and whose weight uses them.
SIDES = {"keys": ("key", "query"), "values": ("value", "output")}


class HeadClasses:
    """The heads of `side`, "keys" or "values", that share a basis.

    Attributes:
        made: (block, head) of W_K or W_V -> its class.
        consumed: (block, query head) of W_Q or W_O -> its class.
        blocked: class -> why its basis must stay.
    """

    def __init__(self, config: LeanConfig, side: str):
        layers = config.plan.layers
        slot, consumer = SIDES[side]
        classes = DisjointSet((layer.layer, head) for layer in layers for head in range(_held_heads(layer, slot)))
        made: dict[Head, Head] = {}
        consumed: dict[Head, Head] = {}
        blocked: dict[Head, str] = {}
        group = config.num_attention_heads // config.num_key_value_heads
        for layer in layers:
            for head, other in _added_heads(layer, side):
                classes.merge((layer.layer, head), other)
            for head in range(layer.computed_heads(slot)):
                classes.merge(made.setdefault((layer.block, head), (layer.layer, head)), (layer.layer, head))
                if reason := _why_blocked(config, layer, side):
                    blocked.setdefault((layer.layer, head), reason)
            sources = layer.layout.keys if side == "keys" else layer.layout.values
            attended = [(source.layer, head) for source in sources for head in range(source.start, source.stop)]
            for query_head, source_head in enumerate(head for head in attended for _ in range(group)):
                classes.merge(consumed.setdefault((layer.block, query_head), source_head), source_head)
                if (kind := getattr(layer, consumer).kind) != "linear":
                    blocked.setdefault(source_head, f"the {consumer} of layer {layer.layer} is {kind!r}")
        self.made = {head: classes[node] for head, node in made.items()}
        self.consumed = {head: classes[node] for head, node in consumed.items()}
        self.blocked = {classes[node]: reason for node, reason in blocked.items()}


def free_columns(config: LeanConfig, side: str) -> int:
    """Return how many of a head's last columns a change of basis may touch: those that no rotary position turns, in any
    layer."""
    if side == "values" or config.position_embedding_type != "rope":
        return config.head_dim
    ropes = [rope for rope in (config.rope_parameters, config.window_rope_parameters) if rope]
    return config.head_dim - max(_rotated_columns(config, rope) for rope in ropes)


def _rotated_columns(config: LeanConfig, rope: Mapping[str, Any]) -> int:
    """Return the number of leading columns of a head among which are all that rotary positions turn.

    The "proportional" variant turns the first columns of each half; all others turn the first columns of the head.
    """
    width: int = config.head_dim
    share = rope.get("partial_rotary_factor", 1.0)
    return width // 2 + int(share * width // 2) if rope["rope_type"] == "proportional" else int(width * share)


def change_heads(
    config: LeanConfig, tensors: Mapping[str, Tensor], side: str, bases: Mapping[Head, Basis]
) -> LazyTensors:
    """Return the lazy tensors of the same function with other bases in the free columns of the classes in `bases`.

    With the basis D of a class, W_Q becomes W_Q D and W_K becomes W_K D^-T; likewise W_O^T and W_V.
    """
    classes, width = HeadClasses(config, side), free_columns(config, side)
    maker, consumer = (PROJECTIONS[slot] for slot in SIDES[side])
    changes: dict[str, tuple[Mapping[Head, Head], int, Callable[[Basis, Tensor], Tensor]]] = {}
    for layer in config.plan.layers:
        if side == "keys" and layer.key_rank is not None:
            continue  # blocked, so nothing changes
        name = f"model.layers.{layer.block}.self_attn"
        made_by = "v_up_proj" if side == "values" and layer.value_rank is not None else maker
        for kind in ("weight", "bias"):
            changes[f"{name}.{made_by}.{kind}"] = (classes.made, layer.block, Basis.read)
            if side == "keys" or kind == "weight":
                changes[f"{name}.{consumer}.{kind}"] = (classes.consumed, layer.block, Basis.write)

    def compute(name: str) -> Tensor:
        if name not in changes:
            return tensors[name]
        class_of, block, change = changes[name]
        by_columns = name.endswith("o_proj.weight")
        rows = tensors[name].T if by_columns else tensors[name]
        wanted = [bases.get(class_of[block, head]) for head in range(len(rows) // config.head_dim)]
        if not any(basis is not None for basis in wanted):
            return tensors[name]  # as of a key that is partly an identity, whose rows are not those of whole heads
        heads = rows.double().reshape(-1, config.head_dim, *rows.shape[1:]).clone()
        for head, basis in enumerate(wanted):
            if basis is not None:
                part = heads[head, -width:]
                part.copy_(change(basis, part.reshape(width, -1).T).T.view_as(part))
        changed = heads.view(rows.shape)
        return changed.T if by_columns else changed

    return LazyTensors(parameter_shapes(config), compute)


def _held_heads(layer: LayerPlan, slot: str) -> int:
    """How many heads other layers can attend with: the computed ones, and means of them."""
    return layer.computed_heads(slot) + (layer.layout.derived_value_heads if slot == "value" else 0)


def _added_heads(layer: LayerPlan, side: str) -> Iterator[tuple[int, Head]]:
    """Heads of `layer` that are added to other heads, and so must share their basis."""
    layout = layer.layout
    if side == "keys" or layout.mixer is None:
        return
    if layout.mixed_with is not None:
        for head in range(layer.computed_value_heads):
            yield head, (layout.mixed_with, head)
    computed, means = layer.computed_value_heads, layout.derived_value_heads
    for head in range(means):
        yield computed + head, (layer.layer, head)
        yield computed + head, (layer.layer, computed - means + head)


def _why_blocked(config: LeanConfig, layer: LayerPlan, side: str) -> str | None:
    slot = SIDES[side][0]
    kind = getattr(layer, slot).kind
    if config.kv_lora_rank is not None:
        return "keys and values are made from a latent (MLA), whose heads this does not treat"
    if side == "values" and layer.output_gate is not None and not layer.output_gate.per_head:
        return (
            "a gate multiplies every column of the heads by a number of its own (output_gate), which admits diagonal "
            "changes of basis only"
        )
    if side == "keys" and config.qk_norm:
        return "QK-norm norms every query and key head in its own coordinates"
    if side == "keys" and free_columns(config, side) == 0:
        return (
            "rotary positions turn every column of the heads; what commutes with them is a scaled rotation of each "
            f"pair, {config.head_dim} numbers a head, which are left in place"
        )
    if layer.value.reuses_keys:
        return f"the keys of layer {layer.layer} are its values"
    if side == "keys" and layer.value.reads_keys:
        return f"the values of layer {layer.layer} are made of its keys"
    return None if kind == "linear" else f"the {slot} of layer {layer.layer} is {kind!r}"
