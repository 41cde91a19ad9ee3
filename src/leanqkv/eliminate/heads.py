"""Changes of basis inside the heads: (W_Q, W_K) -> (W_Q D, W_K D^-T) and (W_V, W_O) -> (W_V D, D^-1 W_O), head by head.

Karbevski & Mijoski 2025, Proposition 3.2 and the remark after it. Heads that several layers attend with, that are mixed
with other layers' heads or belong to a shared block must change together. https://arxiv.org/abs/2510.23912
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..model.config import LeanConfig
from ..model.layout import HeadSource
from ..model.plan import LayerPlan

Head = tuple[int, int]  # block of weights, head


@dataclass(frozen=True)
class HeadBasis:
    """S, or its inverse: what makes the heads becomes `S^-T` times its rows, what consumes them `S` times its rows."""

    matrix: Tensor  # [width, width], float64
    inverse: bool = False

    def make(self, rows: Tensor) -> Tensor:
        return self.matrix.T @ rows if self.inverse else torch.linalg.solve(self.matrix.T, rows)

    def consume(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve(self.matrix, rows) if self.inverse else self.matrix @ rows


class HeadClasses:
    """The heads of `side`, "keys" or "values", that share a basis.

    made[block, head] and consumed[block, query head] name the class of each head's projection (W_K or W_V) and of each
    query head's (W_Q or W_O); `blocked` says of classes why their basis must stay.
    """

    def __init__(self, config: LeanConfig, side: str):
        self.side = side
        self._parent: dict[Head, Head] = {}
        slot = "key" if side == "keys" else "value"
        made: dict[Head, Head] = {}
        consumed: dict[Head, Head] = {}
        blocked: dict[Head, str] = {}
        group = config.num_attention_heads // config.num_key_value_heads  # type: ignore[operator]
        whole = _blocked_everywhere(config, side)
        for layer in config.plan.layers:
            for head, joined in _joined(config, layer, side):
                self._join((layer.layer, head), joined)
            own = layer.computed_key_heads if side == "keys" else layer.computed_value_heads
            for head in range(own):
                self._join(made.setdefault((layer.block, head), (layer.layer, head)), (layer.layer, head))
                if reason := whole or _blocked_maker(layer, slot):
                    blocked.setdefault((layer.layer, head), reason)
            consumer = "query" if side == "keys" else "output"
            for place, source in enumerate(_flat(layer.layout.keys if side == "keys" else layer.layout.values)):
                for query_head in range(place * group, (place + 1) * group):
                    self._join(consumed.setdefault((layer.block, query_head), source), source)
                if (kind := getattr(layer, consumer).kind) != "linear":
                    blocked.setdefault(source, f"the {consumer} of layer {layer.layer} is {kind!r}")
        self.made = {head: self._find(node) for head, node in made.items()}
        self.consumed = {head: self._find(node) for head, node in consumed.items()}
        self.blocked = {self._find(node): reason for node, reason in blocked.items()}

    def _find(self, node: Head) -> Head:
        while (parent := self._parent.get(node, node)) != node:
            node = parent
        return node

    def _join(self, one: Head, other: Head) -> None:
        first, second = sorted((self._find(one), self._find(other)))
        self._parent[second] = first


def free_columns(config: LeanConfig, side: str) -> int:
    """How many of a head's last columns a change of basis may touch: those that no rotary position turns."""
    if side == "values" or config.position_embedding_type != "rope":
        return config.head_dim  # type: ignore[return-value]
    assert config.rope_parameters is not None
    rotated = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    return config.head_dim - rotated  # type: ignore[operator]


def change_heads(
    config: LeanConfig, tensors: Mapping[str, Tensor], side: str, bases: Mapping[Head, HeadBasis]
) -> LazyTensors:
    """The tensors of the same function with other bases in the heads of the classes in `bases`; lazy.

    A basis is as wide as the last columns of a head that it acts on; the columns before them stay.
    """
    classes = HeadClasses(config, side)
    maker, consumer = ("k_proj", "q_proj") if side == "keys" else ("v_proj", "o_proj")
    of_tensor: dict[str, tuple[Mapping[Head, Head], int, Callable[[HeadBasis, Tensor], Tensor]]] = {}
    for layer in config.plan.layers:
        name = f"model.layers.{layer.block}.self_attn"
        for kind in ("weight", "bias"):
            of_tensor[f"{name}.{maker}.{kind}"] = (classes.made, layer.block, HeadBasis.make)
            if side == "keys":
                of_tensor[f"{name}.{consumer}.{kind}"] = (classes.consumed, layer.block, HeadBasis.consume)
        if side == "values":
            of_tensor[f"{name}.{consumer}.weight"] = (classes.consumed, layer.block, HeadBasis.consume)

    def compute(name: str) -> Tensor:
        if name not in of_tensor:
            return tensors[name]
        found, block, change = of_tensor[name]
        by_columns = name.endswith("o_proj.weight")
        rows = tensors[name].T if by_columns else tensors[name]
        heads = rows.double().reshape(-1, config.head_dim, *rows.shape[1:]).clone()  # type: ignore[arg-type]
        for head in range(len(heads)):
            basis = bases.get(found[block, head])
            if basis is not None:
                part = heads[head, -len(basis.matrix) :]
                part.copy_(change(basis, part.reshape(len(part), -1)).view_as(part))
        changed = heads.view(rows.shape)
        return changed.T if by_columns else changed

    return LazyTensors(config.plan.parameter_shapes, compute)


def _flat(sources: tuple[HeadSource, ...]) -> Iterator[Head]:
    for source in sources:
        for head in range(source.start, source.stop):
            yield source.layer, head


def _joined(config: LeanConfig, layer: LayerPlan, side: str) -> Iterator[tuple[int, Head]]:
    """Heads of `layer` that are added to other heads, and so must share their basis."""
    layout = layer.layout
    if side == "keys" or layout.mixer is None:
        return
    if layout.mixed_with is not None:
        for head in range(layer.computed_value_heads):
            yield head, (layout.mixed_with, head)
    n, pooled = layer.computed_value_heads, layout.derived_value_heads
    for head in range(pooled):
        yield n + head, (layer.layer, head)
        yield n + head, (layer.layer, n - pooled + head)


def _blocked_everywhere(config: LeanConfig, side: str) -> str | None:
    if config.kv_lora_rank is not None:
        return "keys and values are made from a latent (MLA), whose heads this does not treat"
    if side == "keys" and config.qk_norm:
        return "QK-norm norms every query and key head in its own coordinates"
    if side == "keys" and free_columns(config, side) == 0:
        return (
            "rotary positions turn every column of the heads; what commutes with them is a scaled rotation of each "
            f"pair, {config.head_dim} numbers a head, which are left in place"
        )
    return None


def _blocked_maker(layer: LayerPlan, slot: str) -> str | None:
    kind = getattr(layer, slot).kind
    if layer.reuses_keys:
        return f"the keys of layer {layer.layer} are its values"
    return None if kind == "linear" else f"the {slot} of layer {layer.layer} is {kind!r}"
