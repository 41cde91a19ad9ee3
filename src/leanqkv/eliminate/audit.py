"""Tell what could be eliminated from a model, what that would save, and what stands in the way; nothing is changed.

The results are those of Karbevski & Mijoski 2025 (Propositions 3.2 and 4.1, Theorems 4.2-4.4) and Graef 2024 (Table
1); the speed predicted is Graef's (section 4): decoding at batch 1 is limited by reading the weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoints.disabled_norms import norms_disabled, why_norms_stay, without_norms
from ..checkpoints.stream import PROJECTIONS, Stream
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.shapes import count_parameters
from . import block_diagonal, single_head
from .linalg import FULL_SPECTRUM, Factored
from .projections import Removal, assign_bases, remove_projections, why_not
from .transform import BLOCK_DIAGONAL, SINGLE_HEAD

WAYS = (("query", "output"), ("key", "output"), ("value", "output"), ("query",), ("key",), ("value",), ("output",))


@dataclass(frozen=True)
class Finding:
    """One way to eliminate: whether it is exact for the model."""

    remove: str  # as for `leanqkv eliminate`
    layers: tuple[int, ...] | None  # any one of them; None: all at once
    source: str  # the statement it rests on
    applies: bool
    why_not: str | None  # why it does not apply, or not in all layers
    saves: int  # numbers fewer to store, for the best of the layers; negative where untying a head costs more
    parameters: int  # of the model after it

    @property
    def share(self) -> float:
        """The share of all parameters that it removes."""
        return self.saves / (self.parameters + self.saves)

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
    """Return every result for this configuration; no weights are read."""
    results = [_block_diagonal(config), _single_head(config)]
    norm_free, source = config, ""
    if norms_disabled(config):
        if reason := why_norms_stay(config):
            return [*results, _finding(config, "query", "P1 Remark 2", None, f"its disabled norms stay: {reason}")]
        norm_free, source = without_norms(config, {})[0], "P1 Remark 2, "
    return results + [_projections(config, norm_free, slots, source) for slots in WAYS]


def spectra(
    config: LeanConfig, tensors: Mapping[str, Tensor], progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Spectrum]:
    """Yield the spectrum of each linear projection of every layer's attention, with one tensor in memory at a time.

    progress: called with tensors done and tensors in all.
    """
    names = {
        f"model.layers.{layer.block}.self_attn.{projection}.weight": None
        for layer in config.plan.layers
        for slot, projection in PROJECTIONS.items()
        if getattr(layer, slot).kind == "linear"
    }
    present = [name for name in names if name in tensors]
    for done, name in enumerate(present):
        progress(done, len(present))
        yield spectrum(name, tensors[name])


def spectrum(name: str, weight: Tensor) -> Spectrum:
    """Return rank, condition number and smallest singular value of one matrix."""
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
    """Return the rows of Graef's table (section 4) for this shape: weights per layer, in all, and without Q and P.

    As there, embeddings of input and output are counted both, norms and biases not at all. The last three rows are
    arithmetic: whether Q and P can go exactly is another question (`findings`).
    """
    d, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
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


def _finding(
    config: LeanConfig,
    remove: str,
    source: str,
    saves: int | None,
    reason: str | None = None,
    layers: tuple[int, ...] | None = None,
) -> Finding:
    """saves: None where it is not exact."""
    after = _count(config) - (saves or 0)
    return Finding(remove, layers, source, saves is not None, reason or None, saves or 0, after)


def _count(config: LeanConfig) -> int:
    return count_parameters(config).total


def _block_diagonal(config: LeanConfig) -> Finding:
    reasons = []
    for side, pair in (("keys", "Q-K"), ("values", "V-O")):
        blocks, refused = block_diagonal.eligible(config, side)
        if refused:
            where = f" not in layers {', '.join(map(str, refused))}" if blocks else ""
            reasons.append(f"{pair}{where}: {next(iter(refused.values()))}")
    return _finding(config, BLOCK_DIAGONAL, "P1 Prop. 3.2", block_diagonal.saved(config) or None, "; ".join(reasons))


def _single_head(config: LeanConfig) -> Finding:
    reason = single_head.why_not(config)
    # Eliminations are lazy: their configuration is known without any weights.
    saves = _count(config) - _count(single_head.merge_single_head(config, {})[0]) if reason is None else None
    return _finding(config, SINGLE_HEAD, "P1 Prop. 4.1", saves, reason)


def _projections(original: LeanConfig, config: LeanConfig, slots: tuple[str, ...], prefix: str) -> Finding:
    """One of WAYS for `original`, whose disabled norms are removed in `config`."""
    name, source = ",".join(slots), prefix + _source(config, slots)
    stream = Stream(config, centered=config is not original)
    removals = [Removal(slot, layer) for slot in slots for layer in range(config.num_hidden_layers)]
    refused = {removal: why_not(removal, stream) for removal in removals}
    reason = next(filter(None, refused.values()), None)
    if reason is None:
        try:
            assign_bases(removals, stream)
        except LeanError:
            reason = f"of all layers at once: each needs a basis of its own for the stream, and {stream.why_joined()}"

    def saves(removals: list[Removal]) -> int:
        return _count(original) - _count(remove_projections(stream, {}, removals)[0])

    if reason is None:
        return _finding(original, name, source, saves(removals))
    possible = [removal for removal in removals if refused[removal] is None]
    if len(slots) > 1 or not possible:
        return _finding(original, name, source, None, reason)
    layers = tuple(removal.layer for removal in possible)
    return _finding(original, name, source, max(saves([removal]) for removal in possible), reason, layers)


def _source(config: LeanConfig, slots: tuple[str, ...]) -> str:
    if len(slots) > 1 or slots == ("output",):
        return "P4 Table 1" if config.block_type == "serial" else "P4 section 2"
    if config.num_hidden_groups == 1:
        return "P1 Thm 4.3"
    if config.attention_skip and not config.mlp_skip:
        return "P1 Thm 4.4"
    return "P4 Fig. 2" if not config.attention_skip and not config.mlp_skip else "P1 Thm 4.2"
