"""What the layers of one sequence leave for later ones, and the value heads they put together from it."""

from dataclasses import dataclass, field

from torch import Tensor

from .basic import Head, Tensors
from .feedforward import Routed
from .sharing import Heads


@dataclass
class Memory:
    """The heads that each layer built, by layer, as attended with; the factor of its keys on the attention scale; what
    entered the last MLP's W_down; where the tokens were routed. And, for the mask, which positions are the prefix."""

    prefix: list[int] | None = None
    keys: dict[int, list[Head]] = field(default_factory=dict)
    key_factors: dict[int, float] = field(default_factory=dict)
    values: dict[int, list[Head]] = field(default_factory=dict)
    hidden: Tensor | None = None
    routed: list[Routed] = field(default_factory=list)


def own_share(x: Tensor, tensors: Tensors, name: str, mode: str, weight: float) -> Tensor | float:
    """lambda: fixed; a weight of the layer; or of every position, sigmoid(x w + b) = 1 / (1 + e^-(x w + b))"""
    if mode == "fixed":
        return weight
    if mode == "per_layer":
        return tensors[f"{name}.mixer.weight"]
    return 1 / (1 + (-(x @ tensors[f"{name}.mixer.weight"].T + tensors[f"{name}.mixer.bias"])).exp())


def mixed_with_first(
    own: list[Head], x: Tensor, tensors: Tensors, name: str, heads: Heads, memory: Memory
) -> list[Head]:
    """lambda V + (1 - lambda) V_1, where the layer mixes"""
    if heads.mixing is None:
        return own
    lam = own_share(x, tensors, name, *heads.mixing)
    return [lam * v + (1 - lam) * v_1 for v, v_1 in zip(own, memory.values[0], strict=True)]


def attended_values(heads: Heads, memory: Memory) -> list[Head]:
    """Every value head as its weighted sum of built ones."""
    return [sum(w * memory.values[layer][h] for w, (layer, h) in terms) for terms in heads.attended_values]
