"""An identity block in every head of W_K (where W_Q can absorb it) and of W_V (where W_O can).

Karbevski & Mijoski 2025, Proposition 3.2 and the remark after it: with D the inverse transpose of a d_k x d_k block of
W_K (the inverse of one of W_V), the block becomes the identity, and `n_kv d_k^2` numbers a projection need not be
stored. Holds for any norm and any skips. https://arxiv.org/abs/2510.23912
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..presets.edit import set_mechanisms
from .heads import Head, HeadBasis, HeadClasses, change_heads, free_columns

# Windows of the input that are tried for the identity block: their worst head's condition differs by orders.
WINDOWS = 64
SLOTS = {"keys": ("key", "k_proj"), "values": ("value", "v_proj")}


def eligible(config: LeanConfig, side: str) -> tuple[list[int], dict[int, str]]:
    """Blocks whose projection of `side`, "keys" or "values", can hold the identity, and for the others why not.

    A block can where none of its heads is blocked and no head shares a basis with one that has taken it already.
    """
    classes = HeadClasses(config, side)
    taken: set[Head] = set()
    blocks: list[int] = []
    reasons: dict[int, str] = {}
    for layer in config.plan.layers:
        own = [classes.made[head] for head in classes.made if head[0] == layer.block]
        if layer.block in blocks or layer.block in reasons:
            continue
        if not own:
            reasons[layer.block] = "it computes none of its own"
        elif reason := next((classes.blocked[c] for c in own if c in classes.blocked), None):
            reasons[layer.block] = reason
        elif len(set(own)) < len(own):
            reasons[layer.block] = "some of its heads are averaged and share one basis"
        elif taken & set(own):
            reasons[layer.block] = "its values are mixed with another layer's, which takes the one basis they share"
        elif config.hidden_size <= free_columns(config, side):
            reasons[layer.block] = "its one head is as wide as the stream"
        else:
            blocks.append(layer.block)
            taken |= set(own)
    return blocks, reasons


def saved(config: LeanConfig) -> int:
    """Numbers that need not be stored any more."""
    total = 0
    for side in SLOTS:
        width = free_columns(config, side)
        for block in eligible(config, side)[0]:
            total += sum(head[0] == block for head in HeadClasses(config, side).made) * width**2
    return total


def make_blocks_identity(
    config: LeanConfig, tensors: Mapping[str, Tensor], *, search: bool = True
) -> tuple[LeanConfig, LazyTensors, dict[str, float]]:
    """The same function with identity blocks wherever `eligible`.

    Args:
        search: take for every projection the window of the input whose worst head is best conditioned, among up to 64;
            otherwise the first columns.

    Returns:
        the configuration (`block_identity` keys and values), its tensors, lazy, float64 where they changed; and the
        condition number of the worst head's block by tensor name.

    Raises:
        LeanError: not a single projection is eligible; says why.
    """
    conditions: dict[str, float] = {}
    new, changed_tensors = config, tensors
    starts: dict[str, tuple[int, int]] = {}
    for side, (slot, projection) in SLOTS.items():
        classes, width = HeadClasses(config, side), free_columns(config, side)
        bases: dict[Head, HeadBasis] = {}
        blocks, _ = eligible(config, side)
        for block in blocks:
            name = f"model.layers.{block}.self_attn.{projection}.weight"
            weight = tensors[name].double().unflatten(0, (-1, config.head_dim))[:, -width:]  # [heads, width, d]
            start, conditions[name] = _window(weight, search)
            starts[name] = start, width
            for head, columns in enumerate(weight[..., start : start + width]):
                # Columns of the stored weight are rows of W: its block is the transpose.
                bases[classes.made[block, head]] = HeadBasis(columns.T.clone())
        changed_tensors = change_heads(config, changed_tensors, side, bases)
        specs = {}
        for layer in config.plan.layers:
            name = f"model.layers.{layer.block}.self_attn.{projection}.weight"
            if layer.block in blocks:
                specs[layer.layer] = {"type": "block_identity", "start": starts[name][0], "width": None}
                if width < config.head_dim:  # type: ignore[operator]
                    specs[layer.layer]["width"] = width
        new = set_mechanisms(new, slot, specs)
    if not conditions:
        reasons = {**eligible(config, "keys")[1], **eligible(config, "values")[1]}
        raise LeanError(f"no head of this model can take an identity block: {next(iter(reasons.values()))}")

    def compute(name: str) -> Tensor:
        source = name.replace("plain_weight", "weight")
        if source not in starts:
            return changed_tensors[name]
        start, width = starts[source]
        heads = changed_tensors[source].unflatten(0, (-1, config.head_dim))
        if name != source:
            return heads[:, :-width].flatten(0, 1)
        heads = heads[:, -width:]
        return torch.cat((heads[..., :start], heads[..., start + width :]), dim=-1).flatten(0, 1)

    return new, LazyTensors(new.plan.parameter_shapes, compute), conditions


def _window(weight: Tensor, search: bool) -> tuple[int, float]:
    """Where the block starts whose worst head is best conditioned, and that condition; weight: [heads, width, d]."""
    width, d = weight.shape[1:]
    last = d - width
    starts = range(0, last + 1, max(1, last // (WINDOWS - 1))) if search else (0,)

    def worst(start: int) -> float:
        values = torch.linalg.svdvals(weight[..., start : start + width])
        ratios = values[:, 0] / values[:, -1]
        return float(ratios.nan_to_num(torch.inf).max())

    return min(((start, worst(start)) for start in starts), key=lambda found: (found[1], found[0]))
