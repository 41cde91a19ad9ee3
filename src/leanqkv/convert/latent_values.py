"""Calibrated conversion to latent values: of every layer's values as many directions are cached as they are worth.

Ours. On the source's stream, the Gram matrix of attended values gives the best latent of every rank, a weighted
low-rank approximation of W_V, and what each further column takes away from the error. Columns go where they take away
most, over all layers.
"""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ..errors import LeanError
from ..model.config import LeanConfig
from ..presets.edit import with_fields
from .activations import Recorder
from .heads import check_convertible, check_reads_the_stream, output_with_bias, split_heads, value_with_bias
from .low_rank import approximate
from .sweeps import Grams, ReducedHeads, Reduction

# Ranks are multiples of it where the width of the values is: the rows of a cache are then aligned.
STEP = 8
# So many calibration tokens are needed at least for each column of a layer's values.
TOKENS_PER_COLUMN = 4


def latent_target(config: LeanConfig, ranks: Mapping[int, int]) -> LeanConfig:
    """Return the source's configuration with a latent of the given rank in each of the layers."""
    layers: dict[int, list[int]] = {}
    for layer in sorted(ranks):
        layers.setdefault(ranks[layer], []).append(layer)
    value = [{"type": "latent", "rank": rank, "layers": layers[rank]} for rank in sorted(layers)]
    return with_fields(config, value=value)


def count_columns(config: LeanConfig, share: float, layers: tuple[int, ...] | None) -> int:
    """Return how many value columns all layers may cache together.

    Args:
        share: of the source's cache.
        layers: those whose values may become latents; None: all.

    Raises:
        LeanError: the source cannot be converted, or its values cannot be cut to that share; says why.
    """
    check_convertible(config)
    check_reads_the_stream(config)
    last, values = config.num_hidden_layers, value_width(config)
    if layers is not None and (wrong := [layer for layer in layers if not 0 <= layer < last]):
        raise LeanError(f"--layers: the model has layers 0 to {last - 1}, found {wrong[0]}")
    bytes_per_column = torch.bfloat16.itemsize
    total = config.plan.kv_bytes_per_token(torch.bfloat16) // bytes_per_column
    cut = last if layers is None else len(set(layers))
    smallest = total - cut * (values - step_of(values))
    columns = int(share * total + 1e-9) if 0 < share < 1 else 0
    if not smallest <= columns < total:
        raise LeanError(
            f"latent values of this model take from {ceil(1000 * smallest / total) / 10:g}% of its cache up to all of "
            f"it; --cache {100 * share:g}% is out of reach. Its keys stay whole: for less, quantize the cache as well"
        )
    return columns - (total - last * values)


def value_width(config: LeanConfig) -> int:
    """Return the columns of a layer's values."""
    assert config.num_key_value_heads is not None and config.head_dim is not None
    return config.num_key_value_heads * config.head_dim


def step_of(width: int) -> int:
    """Return what ranks are multiples of."""
    return STEP if width > STEP and width % STEP == 0 else 1


def choose_ranks(gains: Tensor, columns: int, cut: list[bool]) -> list[int]:
    """Return every layer's rank: STEP columns at a time go where they take away most of the error.

    Args:
        gains: [layers, width], the error that each column takes away, descending in a layer.
        columns: of all layers together, at most.
        cut: whether a layer's values may become a latent; the others keep their width.
    """
    width = gains.shape[1]
    step = step_of(width)
    ranks = [step if may else width for may in cut]
    blocks = [
        (-float(gains[layer, start : start + step].sum()), layer)
        for layer in range(len(gains))
        if cut[layer]
        for start in range(step, width, step)
    ]
    for _, layer in sorted(blocks)[: (columns - sum(ranks)) // step]:
        ranks[layer] += step
    return ranks


class ValueGram(Grams):
    """The Gram matrix [width, width] of a layer's values under the patterns of every head, in float64 on the CPU."""

    def __init__(self, width: int, bias: Tensor | None):
        self.total = torch.zeros(width, width, dtype=torch.float64)
        self._bias = bias

    def add(self, recorder: Recorder, weight: Tensor) -> None:
        """Add a batch; `weight` [batch, length] multiplies each token's values."""
        values = recorder.values.transpose(1, 2).flatten(2)  # [batch, length, width]
        if self._bias is not None:  # it stays beside the latent: every head's patterns add up to 1
            values = values - self._bias.to(values)
        for head in range(recorder.patterns.shape[1]):
            attended = (recorder.patterns[:, head] @ values * weight[..., None]).flatten(0, 1)
            self.total += (attended.T @ attended).cpu().double()


def value_latents(grams: ValueGram, output: Tensor, tokens: int) -> dict[str, Tensor]:
    """Return the best latent of every rank (see `approximate`), and the error that each of its columns takes away.

    output: W_O as [heads, group, head_dim, hidden_size]; tokens: how many the sums are over.
    """
    weights = torch.einsum("hgkd,hgld->hkl", output, output)
    combine, restore, gains = approximate(grams.total, torch.block_diag(*weights))
    return {"combine": combine.contiguous(), "restore": restore.contiguous(), "gains": gains / tokens}


class LatentValues(Reduction):
    """Latents whose ranks go where they are worth most.

    Args:
        share, layers: as `count_columns` takes them.

    Raises:
        LeanError: the source cannot be converted, or not to that share; says why.
    """

    measures = "latents"

    def __init__(
        self, config: LeanConfig, tensors: Mapping[str, Tensor], share: float, layers: tuple[int, ...] | None = None
    ):
        self.config, self.tensors = config, tensors
        self.name = f"latent{100 * share:.10g}"
        self.columns = count_columns(config, share, layers)
        self.cut = [layers is None or layer in layers for layer in range(config.num_hidden_layers)]
        self.width = value_width(config)
        self.least_tokens = TOKENS_PER_COLUMN * self.width
        self.ranks: list[int] = []
        self._measured: Callable[[int], Mapping[str, Tensor]] = lambda layer: {}

    def grams(self, layer: int) -> ValueGram:
        bias = split_heads(self.config, self.tensors, layer).value_bias
        return ValueGram(self.width, None if bias is None else bias.flatten())

    def measure(self, layer: int, grams: ValueGram, tokens: int) -> dict[str, Tensor]:
        """Return the best latent of every rank, and the error that each of its columns takes away."""
        output = split_heads(self.config, self.tensors, layer).output.mT  # [heads, group, head_dim, hidden_size]
        weights = torch.einsum("hgkd,hgld->hkl", output, output)
        combine, restore, gains = approximate(grams.total, torch.block_diag(*weights))
        return {"combine": combine.contiguous(), "restore": restore.contiguous(), "gains": gains / tokens}

    def choose(self, measured: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Choose every layer's rank."""
        self._measured = measured
        gains = torch.stack([measured(layer)["gains"] for layer in range(self.config.num_hidden_layers)])
        self.ranks = choose_ranks(gains, self.columns, self.cut)
        latents = {layer: rank for layer, rank in enumerate(self.ranks) if rank < self.width}
        self.first = min(latents)
        self.target = latent_target(self.config, latents)

    def reduce(self, layer: int) -> ReducedHeads:
        """Return a layer's heads, made from its latent."""
        heads = split_heads(self.config, self.tensors, layer)
        value, rank = value_with_bias(heads), self.ranks[layer]
        rows = output_with_bias(self.config, self.tensors, layer, heads.output.mT)
        if rank == self.width:
            return ReducedHeads(value, rows, {}, self.config.attention_output_bias)
        stored = self._measured(layer)
        latent = heads.value.flatten(0, 1).T @ stored["combine"][:, :rank].double()  # [hidden_size, rank]
        up = stored["restore"][:rank].double().unflatten(1, (len(value), -1)).transpose(0, 1)  # [heads, rank, head_dim]
        made = {"v_proj.weight": latent.T, "v_up_proj.weight": up.transpose(1, 2).flatten(0, 1)}
        restored = latent @ up
        if heads.value_bias is not None:
            made["v_up_proj.bias"] = heads.value_bias.flatten()
            restored = torch.cat((restored, heads.value_bias[:, None]), dim=1)
        return ReducedHeads(restored, rows, made, self.config.attention_output_bias)

    def report(self, layer: int) -> dict[str, Any]:
        """Return the columns that a layer's values take in the cache."""
        return {"rank": self.ranks[layer]}

    def disk_bytes(self) -> int:
        """Return the bytes of the best latents of a layer, in float64."""
        return 8 * self.width * (2 * self.width + 1)
