"""Calibrated merging of value heads: two key heads of a layer read one value, which is fitted to stand for both.

Ours. On the source's stream, Gram matrices of attended values give for every pair of heads the best value head for
both patterns, a weighted low-rank approximation, and what is lost by it. The cheapest pairs of all layers are merged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import floor
from typing import Any

import torch
from torch import Tensor

from ..errors import LeanError
from ..model.config import LeanConfig
from ..presets.edit import with_fields
from .activations import Recorder
from .heads import felt_output, may_be_cut, output_with_bias, split_heads, value_with_bias
from .low_rank import EIGENVECTORS, approximate
from .sweeps import ReducedHeads, Reduction
from .targets import MergedValuesOptions


def convert(config: LeanConfig, tensors: Mapping[str, Tensor], options: MergedValuesOptions) -> "MergedValues":
    """Return the reduction of a source."""
    return MergedValues(config, tensors, options.ratio, options.layers)


@dataclass(frozen=True)
class Pair:
    """Value heads of one layer that can be merged.

    Attributes:
        heads: the first one's place holds the merged value.
        cost: squared error of the attention's output, weighted, per token and unit of hidden_size.
        combine: [2 * head_dim, head_dim]: both values, side by side, times this is the merged value.
        restore: [head_dim, 2 * head_dim]: the merged value times this is nearly both values, side by side.
    """

    layer: int
    heads: tuple[int, int]
    cost: float
    combine: Tensor
    restore: Tensor


def count_merges(config: LeanConfig, ratio: float, layers: tuple[int, ...] | None) -> int:
    """Return how many pairs are merged: as many as SkipV1Former of that ratio borrows heads in those layers.

    Raises:
        LeanError: the source cannot be converted, or there is nothing to merge; says why.
    """
    # Without `layers`, all but the first, which borrows nothing.
    heads, number = config.num_key_value_heads, sum(may_be_cut(config, layers)) - (layers is None)
    if not number:
        raise LeanError("no layer's values would be merged, as in a model of one layer; name its layers by `layers`")
    per_layer = floor(ratio * heads) if 0 <= ratio <= 1 else 0
    if not per_layer or 2 * per_layer > heads:
        raise LeanError(
            f"a ratio of {ratio} merges {per_layer} pairs of {heads} value heads a layer. At least one is merged, and "
            "each head with one other at most: choose another `ratio`, or a model with more value heads"
        )
    return per_layer * number


def choose_pairs(candidates: list[Pair], count: int) -> dict[int, list[Pair]]:
    """Return the `count` cheapest pairs by layer; a head is in one pair at most.

    Raises:
        LeanError: there are too few.
    """
    chosen: dict[int, list[Pair]] = {}
    taken: set[tuple[int, int]] = set()
    for pair in sorted(candidates, key=lambda candidate: (candidate.cost, candidate.layer, candidate.heads)):
        places = {(pair.layer, head) for head in pair.heads}
        if len(taken) < 2 * count and not places & taken:
            chosen.setdefault(pair.layer, []).append(pair)
            taken |= places
    if len(taken) < 2 * count:
        raise LeanError(f"only {len(taken) // 2} disjoint pairs of value heads can be merged, {count} are asked for")
    return chosen


def fit_pair(gram: Tensor, weight: Tensor, layer: int, heads: tuple[int, int], scale: float) -> Pair:
    """Return the pair whose merged value approximates both best.

    Args:
        gram: [2 * head_dim, 2 * head_dim], of both values under the patterns of both heads, in float64.
        weight: the same shape, block diagonal: W_O W_O^T of both heads, summed over their query heads.
        scale: what the cost is divided by.
    """
    width = len(gram) // 2
    combine, restore, errors = approximate(gram, weight)
    return Pair(layer, heads, float(errors[width:].sum()) / scale, combine[:, :width], restore[:width])


class PairGrams:
    """Gram matrices of one layer's values under its patterns, summed over tokens and the query heads of each group.

    Sums in float64 are on the CPU: Apple's GPUs have no float64.

    Attributes:
        alone: [heads, heads, head_dim, head_dim], float64: under head g's patterns, of the values of head k.
        cross: the same shape: under head g's patterns, of the values of heads g and k.
    """

    def __init__(self, heads: int, width: int):
        self.alone = torch.zeros(heads, heads, width, width, dtype=torch.float64)
        self.cross = torch.zeros_like(self.alone)

    def add(self, recorder: Recorder, weight: Tensor) -> None:
        """Add a run of queries; `weight` [batch, queries] multiplies each token's values."""
        values = recorder.values
        heads, width = values.shape[1], values.shape[3]
        side_by_side = values.transpose(1, 2).flatten(2)  # [batch, length, heads * head_dim]
        by_group = recorder.patterns.unflatten(1, (heads, -1))
        for head in range(heads):
            attended = by_group[:, head] @ side_by_side[:, None] * weight[:, None, :, None]
            columns = attended.flatten(0, 2).unflatten(1, (heads, width)).transpose(0, 1)  # [heads, rows, head_dim]
            self.alone[head] += (columns.mT @ columns).cpu().double()
            self.cross[head] += (columns[head].T @ columns).cpu().double()

    def of_pair(self, first: int, second: int) -> Tensor:
        """Return the Gram matrix of both values, side by side, under the patterns of both heads."""
        corner = self.cross[first, second] + self.cross[second, first].T
        upper = torch.cat((self.alone[first, first] + self.alone[second, first], corner), dim=1)
        lower = torch.cat((corner.T, self.alone[first, second] + self.alone[second, second]), dim=1)
        return torch.cat((upper, lower))


@dataclass(eq=False)
class MergedValues(Reduction):
    """The cheapest pairs of value heads of all layers, merged.

    Args:
        ratio, layers: as `count_merges` takes them.

    Raises:
        LeanError: the source cannot be converted, or there is nothing to merge; says why.
    """

    name = "merged"
    measures = "pairs"

    config: LeanConfig
    tensors: Mapping[str, Tensor]
    ratio: float = 0.5
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.count = count_merges(self.config, self.ratio, self.layers)
        self.heads, self.width = self.config.num_key_value_heads, self.config.head_dim

    def grams(self, layer: int) -> PairGrams:
        return PairGrams(self.heads, self.width)

    def measure(self, layer: int, grams: PairGrams, tokens: int) -> dict[str, Tensor]:
        """Return the cost of merging each pair of a layer's heads."""
        pairs: dict[str, Tensor] = {}
        output = felt_output(self.config, self.tensors, layer)  # [heads, group, head_dim, hidden_size]
        weights = torch.einsum("hgkd,hgld->hkl", output, output)
        allowed = self.layers is None or layer in self.layers
        for first, second in combinations(range(len(output) if allowed else 0), 2):
            weight = torch.block_diag(weights[first], weights[second])
            scale = 2 * output.shape[1] * tokens * self.config.hidden_size
            pair = fit_pair(grams.of_pair(first, second), weight, layer, (first, second), scale)
            name = f"{first}.{second}"
            pairs |= {f"{name}.combine": pair.combine.contiguous(), f"{name}.restore": pair.restore.contiguous()}
            pairs[f"{name}.cost"] = torch.tensor(pair.cost, dtype=torch.float64)
        return pairs or {"none": torch.zeros(1)}

    def choose(self, measured: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Choose the cheapest pairs of all layers."""
        layers = range(self.config.num_hidden_layers)
        self.chosen = choose_pairs([pair for layer in layers for pair in _pairs(measured(layer), layer)], self.count)
        self.first = min(self.chosen)
        merged = sorted((layer, *pair.heads) for layer, pairs in self.chosen.items() for pair in pairs)
        rows = [[layer, second, layer, first] for layer, first, second in merged]
        self.target = with_fields(self.config, key_value={"type": "borrowed_values", "heads": rows})

    def reduce(self, layer: int) -> ReducedHeads:
        """Return a layer's heads with its pairs merged."""
        return merge_heads(self.config, self.tensors, layer, self.chosen.get(layer, []))

    def report(self, layer: int) -> dict[str, Any]:
        """Return the pairs of a layer."""
        return {"merged": [list(pair.heads) for pair in self.chosen.get(layer, [])]}

    def operations(self, length: int) -> tuple[float, float]:
        """Return those of every head's values under the patterns of all others, and those of every pair."""
        per_token = self.config.num_attention_heads * (2 * length + 4 * self.width) * self.heads * self.width
        return per_token, EIGENVECTORS * (2 * self.width) ** 3 * self.heads * (self.heads - 1) / 2

    def held_bytes(self) -> int:
        """Return the bytes of a layer's Gram matrices and of its pairs, in float64."""
        return 2 * 8 * self.heads**2 * self.width**2 + self.measured_bytes()

    def made_bytes(self) -> int:
        """Return the bytes of the value projections in float32."""
        left = self.config.num_hidden_layers * self.heads - self.count
        return 4 * left * self.width * (self.config.hidden_size + 1)

    def measured_bytes(self) -> int:
        """Return the bytes of every pair with its cost, in float64."""
        return 8 * self.heads * (self.heads - 1) // 2 * (4 * self.width**2 + 1)


def merge_heads(config: LeanConfig, tensors: Mapping[str, Tensor], layer: int, pairs: list[Pair]) -> ReducedHeads:
    """Return a layer's heads with `pairs` merged: combined values, and W_O that restores both from them."""
    heads = split_heads(config, tensors, layer)
    value, output = value_with_bias(heads).clone(), heads.output.mT.clone()
    width = value.shape[2]
    for pair in pairs:
        first, second = pair.heads
        value[first] = value[first] @ pair.combine[:width] + value[second] @ pair.combine[width:]
        value[second] = value[first]
        output[first] = pair.restore[:, :width] @ output[first]
        output[second] = pair.restore[:, width:] @ output[second]
    gone = {pair.heads[1] for pair in pairs}
    kept = value[[head for head in range(len(value)) if head not in gone]]
    made = {"v_proj.weight": kept[:, : config.hidden_size].transpose(1, 2).flatten(0, 1)}
    if config.attention_bias:
        made["v_proj.bias"] = kept[:, config.hidden_size].flatten()
    rows = output_with_bias(config, tensors, layer, output)
    return ReducedHeads(value, rows, made, config.attention_output_bias)


def _pairs(stored: Mapping[str, Tensor], layer: int) -> list[Pair]:
    pairs = []
    for name in (name.removesuffix(".cost") for name in stored if name.endswith(".cost")):
        first, second = map(int, name.split("."))
        cost = float(stored[f"{name}.cost"])
        pairs.append(Pair(layer, (first, second), cost, stored[f"{name}.combine"], stored[f"{name}.restore"]))
    return pairs
