"""What could be eliminated from a model, what that would save, and what stands in the way: nothing is changed.

The results are those of Karbevski & Mijoski 2025 (Propositions 3.2 and 4.1, Theorems 4.2-4.4) and Graef 2024 (Table
1); the speed predicted is Graef's (section 4): decoding at batch 1 is limited by reading the weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from . import block_diagonal, layernorm_free, single_head
from .linalg import FULL_SPECTRUM, Factored
from .projections import PROJECTIONS, Removal, check, remove_projections, why_not
from .stream import Stream

WAYS = (("query", "output"), ("key", "output"), ("value", "output"), ("query",), ("key",), ("value",), ("output",))


@dataclass(frozen=True)
class Finding:
    """One way to eliminate: whether it holds for the model.

    Attributes:
        remove, layer: as for `leanqkv eliminate`; layer None: all layers, a list: any one of them.
        source: the statement it rests on.
        applies: whether it is exact here.
        why_not: the reason it is not, or where it does not hold if it holds elsewhere.
        saves: numbers fewer to store, for the best of the layers; negative where untying a head costs more.
        parameters: of the model after it.
    """

    remove: str
    layer: tuple[int, ...] | None
    source: str
    applies: bool
    why_not: str | None
    saves: int
    parameters: int

    @property
    def speedup(self) -> float:
        """Predicted at batch 1: the weights before over those after."""
        return (self.parameters + self.saves) / self.parameters


@dataclass(frozen=True)
class Spectrum:
    """A weight of attention: shape [out, in], numerical rank, sigma_max / sigma_min, sigma_min."""

    tensor: str
    shape: tuple[int, int]
    rank: int
    condition: float
    smallest: float


def findings(config: LeanConfig) -> list[Finding]:
    """Every result for this configuration; no weights are read."""
    found = [_block_diagonal(config), _single_head(config)]
    free, source = config, ""
    if layernorm_free.norms_disabled(config):
        if reason := layernorm_free.why_not(config):
            found.append(_refused(config, "query", "P1 Remark 2", f"its disabled norms stay: {reason}"))
            return found
        free, source = _without_norms(config), "P1 Remark 2, "
    for slots in WAYS:
        found.extend(_projections(config, free, slots, source))
    return found


def spectra(
    config: LeanConfig, tensors: Mapping[str, Tensor], progress: Callable[[str], None] | None = None
) -> Iterator[Spectrum]:
    """The linear projections of every layer's attention, one tensor in memory at a time."""
    seen = set()
    for layer in config.plan.layers:
        for slot, projection in PROJECTIONS.items():
            name = f"model.layers.{layer.block}.self_attn.{projection}.weight"
            if name in seen or name not in tensors or getattr(layer, slot).kind != "linear":
                continue
            seen.add(name)
            if progress is not None:
                progress(name)
            yield spectrum(name, tensors[name])


def spectrum(name: str, weight: Tensor) -> Spectrum:
    rows, columns = weight.shape
    if rows == columns > FULL_SPECTRUM:
        largest, smallest = Factored(weight).extremes
        if smallest > largest * rows * torch.finfo(torch.float64).eps:
            return Spectrum(name, (rows, columns), rows, largest / smallest, smallest)
    values = torch.linalg.svdvals(weight.double())
    rank = int((values > values[0] * max(rows, columns) * torch.finfo(torch.float64).eps).sum())
    smallest = float(values[-1])
    return Spectrum(name, (rows, columns), rank, float(values[0]) / smallest if smallest else float("inf"), smallest)


def weight_table(config: LeanConfig) -> dict[str, float]:
    """The rows of Graef's table (section 4) for this shape: weights per layer, in all, and without Q and P.

    As there, embeddings of input and output are counted both, norms and biases not at all. The last three rows are
    arithmetic: whether Q and P can go exactly is another question (`findings`).
    """
    d, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    assert groups is not None
    matrices = {"gated": 3, "mlp": 2, "moe": 3 * (config.num_local_experts or 1)}[config.mlp_type]
    per_layer = {
        "Q+P weights per layer": 2 * d * d,
        "K+V weights per layer": 2 * d * d // heads * groups,
        "FFN weights per layer": matrices * d * config.intermediate_size,
    }
    embeddings = 2 * d * (config.vocab_size or 0)  # a model of images has no vocabulary
    total = config.num_hidden_layers * sum(per_layer.values()) + embeddings
    without = total - config.num_hidden_layers * 2 * d * d
    return per_layer | {
        "input and output embeddings": embeddings,
        "total weights": total,
        "total without Q and P": without,
        "weight savings": 1 - without / total,
        "possible speedup at batch 1": total / without,
    }


def report(config: LeanConfig, spectrum_list: list[Spectrum]) -> dict[str, Any]:
    """All of it as JSON."""
    plan = config.plan
    return {
        "parameters": plan.count_parameters().total,
        "kv_bytes_per_token_bf16": plan.kv_bytes_per_token(torch.bfloat16),
        "findings": [asdict(finding) | {"speedup": finding.speedup} for finding in findings(config)],
        "spectra": [asdict(found) for found in spectrum_list],
    }


def _count(config: LeanConfig) -> int:
    return config.plan.count_parameters().total


def _refused(config: LeanConfig, remove: str, source: str, reason: str) -> Finding:
    return Finding(remove, None, source, False, reason, 0, _count(config))


def _block_diagonal(config: LeanConfig) -> Finding:
    source = "P1 Prop. 3.2"
    reasons = []
    for side, pair in (("keys", "Q-K"), ("values", "V-O")):
        blocks, refused = block_diagonal.eligible(config, side)
        if not blocks:
            reasons.append(f"{pair}: {next(iter(refused.values()))}")
        elif refused:
            numbers = ", ".join(map(str, refused))
            reasons.append(f"{pair} not in layers {numbers}: {next(iter(refused.values()))}")
    saves = block_diagonal.saved(config)
    return Finding("block-diagonal", None, source, saves > 0, "; ".join(reasons) or None, saves, _count(config) - saves)


def _single_head(config: LeanConfig) -> Finding:
    source = "P1 Prop. 4.1"
    if reason := single_head.why_not(config):
        return _refused(config, "single-head", source, reason)
    after = _count(single_head.merge_single_head(config, _NOTHING)[0])
    return Finding("single-head", None, source, True, None, _count(config) - after, after)


def _projections(original: LeanConfig, config: LeanConfig, slots: tuple[str, ...], prefix: str) -> Iterator[Finding]:
    name, source, stream = ",".join(slots), prefix + _source(config, slots), Stream(config)
    removals = [Removal(slot, layer) for slot in slots for layer in range(config.num_hidden_layers)]

    def refused(removal: Removal) -> str | None:
        reason = why_not(config, removal, stream)
        return reason or (layernorm_free.why_not_after(config, removal) if config is not original else None)

    reason = next(filter(None, map(refused, removals)), None)
    if reason is None:
        try:
            check(config, removals)
        except LeanError:
            reason = f"of all layers at once: each needs a basis of its own for the stream, and {stream.why_joined()}"
    possible = [removal for removal in removals if refused(removal) is None]
    if reason is None:
        after = _count(remove_projections(config, _NOTHING, removals)[0])
        yield Finding(name, None, source, True, None, _count(original) - after, after)
    elif len(slots) > 1 or not possible:
        yield _refused(original, name, source, reason)
    else:
        after = min(_count(remove_projections(config, _NOTHING, [removal])[0]) for removal in possible)
        layers = tuple(removal.layer for removal in possible)
        yield Finding(name, layers, source, True, reason, _count(original) - after, after)


def _source(config: LeanConfig, slots: tuple[str, ...]) -> str:
    if len(slots) > 1 or slots == ("output",):
        return "P4 Table 1" if config.block_type == "serial" else "P4 section 2"
    if config.num_hidden_groups == 1:
        return "P1 Thm 4.3"
    if config.attention_skip and not config.mlp_skip:
        return "P1 Thm 4.4"
    return "P4 Fig. 2" if not config.attention_skip and not config.mlp_skip else "P1 Thm 4.2"


def _without_norms(config: LeanConfig) -> LeanConfig:
    return layernorm_free.without_norms(config, _NOTHING)[0]


def _no_tensor(name: str) -> Tensor:
    raise AssertionError(f"{name} was read, though only shapes are asked for")


# Eliminations are lazy: their configuration is known without any weights.
_NOTHING = LazyTensors({}, _no_tensor)
