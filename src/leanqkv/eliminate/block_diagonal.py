"""Remove an identity block from every head of W_K (where W_Q can absorb it) and of W_V (where W_O can).

Karbevski & Mijoski 2025, Proposition 3.2 and the remark after it: with D the inverse transpose of a d_k x d_k block of
W_K (the inverse of one of W_V), the block becomes the identity, and `n_kv d_k^2` numbers a projection need not be
stored. Holds for any norm and any skips. https://arxiv.org/abs/2510.23912
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.stream import PROJECTIONS
from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.shapes import parameter_shapes
from ..presets.edit import set_mechanisms
from .heads import SIDES, Head, HeadClasses, change_heads, free_columns
from .linalg import Basis, Factored

# Windows of the input that are tried for the identity block: their worst head's condition differs by orders.
WINDOWS = 64


def eligible(config: LeanConfig, side: str) -> tuple[dict[int, list[Head]], dict[int, str]]:
    """Return the blocks whose projection of `side`, "keys" or "values", can hold the identity, and why others cannot.

    Each comes with the classes of its heads, which are not blocked and share no basis with heads that took it before.
    """
    classes = HeadClasses(config, side)
    taken: set[Head] = set()
    blocks: dict[int, list[Head]] = {}
    reasons: dict[int, str] = {}
    for block in dict.fromkeys(layer.block for layer in config.plan.layers):
        own = [classes.made[head] for head in classes.made if head[0] == block]
        if not own:
            reasons[block] = "it computes none of its own"
        elif reason := next((classes.blocked[c] for c in own if c in classes.blocked), None):
            reasons[block] = reason
        elif len(set(own)) < len(own):
            reasons[block] = "some of its heads share one basis: they are averaged, or one head of W_O reads both"
        elif taken & set(own):
            reasons[block] = "its values are mixed with another layer's, which takes the one basis they share"
        elif config.hidden_size <= free_columns(config, side):
            reasons[block] = "its one head is as wide as the stream"
        else:
            blocks[block] = own
            taken |= set(own)
    return blocks, reasons


def saved(config: LeanConfig) -> int:
    """Return how many numbers need not be stored any more."""
    return sum(
        len(heads) * free_columns(config, side) ** 2 for side in SIDES for heads in eligible(config, side)[0].values()
    )


def make_blocks_identity(
    config: LeanConfig, tensors: Mapping[str, Tensor], search: bool, message: Callable[[str], None]
) -> tuple[LeanConfig, LazyTensors, dict[str, float]]:
    """Return the same function with identity blocks wherever `eligible`; raise a LeanError if that is nowhere.

    Returns the configuration (`block_identity` keys and values); its tensors, lazy, float64 where they changed; and the
    condition number of the worst head's block by tensor name. With `search` every projection gets the window of the
    input whose worst head is best conditioned, among up to 64; otherwise the first columns.
    """
    conditions: dict[str, float] = {}
    windows: dict[str, tuple[int, int]] = {}  # start and width
    new, changed = config, tensors
    for side, (slot, _) in SIDES.items():
        width = free_columns(config, side)
        bases: dict[Head, Basis] = {}
        specs: dict[int, dict[str, Any]] = {}
        for block, classes in eligible(config, side)[0].items():
            name = f"model.layers.{block}.self_attn.{PROJECTIONS[slot]}.weight"
            message(f"solving: the identity blocks of {name}")
            weight = tensors[name].double().unflatten(0, (-1, config.head_dim))[:, -width:]  # [heads, width, d]
            start, conditions[name] = _best_start(weight, search)
            windows[name] = start, width
            for head_class, columns in zip(classes, weight[..., start : start + width], strict=True):
                bases[head_class] = Basis(partial(Factored, columns.clone()))
            spec = {"type": "block_identity", "start": start, "width": None if width == config.head_dim else width}
            specs |= {layer.layer: spec for layer in config.plan.layers if layer.block == block}
        changed = change_heads(config, changed, side, bases)
        new = set_mechanisms(new, slot, specs)
    if not conditions:
        reasons = {**eligible(config, "keys")[1], **eligible(config, "values")[1]}
        raise LeanError(f"no head of this model can take an identity block: {next(iter(reasons.values()))}")

    def compute(name: str) -> Tensor:
        source = name.replace("plain_weight", "weight")
        if source not in windows:
            return changed[name]
        start, width = windows[source]
        heads = changed[source].unflatten(0, (-1, config.head_dim))
        if name != source:
            return heads[:, :-width].flatten(0, 1)
        heads = heads[:, -width:]
        return torch.cat((heads[..., :start], heads[..., start + width :]), dim=-1).flatten(0, 1)

    return new, LazyTensors(parameter_shapes(new), compute), conditions


def _best_start(weight: Tensor, search: bool) -> tuple[int, float]:
    """Return where the best conditioned window starts and its worst head's condition; weight: [heads, width, d]."""
    width, d = weight.shape[1:]
    last = d - width
    starts = range(0, last + 1, max(1, last // (WINDOWS - 1))) if search else (0,)

    def worst(start: int) -> float:
        values = torch.linalg.svdvals(weight[..., start : start + width])
        return float((values[:, 0] / values[:, -1]).nan_to_num(torch.inf).max())

    condition, start = min((worst(start), start) for start in starts)
    return start, condition
