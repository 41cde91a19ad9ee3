"""Calibrated conversion to latent keys and values: as many columns of each layer are cached as they are worth.

Ours. Columns of keys and of values are measured in the same unit, the error of attention's output that they take away,
and go where they take away most: over all layers, and over keys and values.
"""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ..errors import LeanError
from ..model.config import LeanConfig
from ..presets.edit import set_mechanisms
from .activations import Recorder
from .heads import check_convertible, check_reads_the_stream, output_with_bias, split_heads, value_with_bias
from .latent_keys import KeyGrams, column_gains, columns_of, key_latent, keys_stay
from .latent_values import ValueGram, choose_ranks, step_of, value_latents, value_width
from .sweeps import Grams, ReducedHeads, Reduction

# So many calibration tokens are needed at least for each column of a layer's values.
TOKENS_PER_COLUMN = 4
# Of the names of what is measured of the keys.
KEYS = "keys."
# How much more an error of the keys counts than one of the values that moves attention's output as far. W_O, which is
# fitted afterwards, makes up for a part of lost values and for little of moved scores.
KEY_WEIGHT = 10.0


class LatentGrams(Grams):
    """What both kinds of latents need of a layer; `keys` is None where the keys stay."""

    def __init__(self, values: ValueGram, keys: KeyGrams | None):
        self.values, self.keys = values, keys

    def add(self, recorder: Recorder, weight: Tensor) -> None:
        """Add a batch; `weight` [batch, length] multiplies each token's output."""
        self.values.add(recorder, weight)
        if self.keys is not None:
            self.keys.add(recorder, weight)


class Latents(Reduction):
    """Latents of keys and values whose ranks go where they are worth most.

    Args:
        share: of the source's cache, at most.
        layers: those that may be reduced; None: all.
        keys: whether keys may become latents, where they can.

    Attributes:
        ranks, key_ranks: columns of every layer's values and keys in the cache, once they are chosen.

    Raises:
        LeanError: the source cannot be converted, or not to that share; says why.
    """

    def __init__(
        self,
        config: LeanConfig,
        tensors: Mapping[str, Tensor],
        share: float,
        layers: tuple[int, ...] | None = None,
        keys: bool = True,
    ):
        self.config, self.tensors = config, tensors
        kind = "latents" if keys else "latent-values"
        self.name, self.measures = f"{kind}-{100 * share:.10g}", f"best-{kind}"
        self.cut = may_be_cut(config, layers)
        self._may_cut_keys = keys
        self.key_cut = [may and self._keys_can(layer) for layer, may in enumerate(self.cut)]
        self.width = value_width(config)
        self.columns = count_columns(config, share, sum(self.cut) + sum(self.key_cut))
        self.least_tokens = TOKENS_PER_COLUMN * self.width
        self.ranks: list[int] = []
        self.key_ranks: list[int] = []
        self._measured: Callable[[int], Mapping[str, Tensor]] = lambda layer: {}

    def _keys_can(self, layer: int) -> bool:
        return self._may_cut_keys and keys_stay(self.config, self.config.plan.layers[layer]) is None

    def grams(self, layer: int) -> LatentGrams:
        heads, plan = split_heads(self.config, self.tensors, layer), self.config.plan.layers[layer]
        values = ValueGram(self.width, None if heads.value_bias is None else heads.value_bias.flatten())
        keys = KeyGrams(heads.output.mT, plan.rope is not None, plan.attention_scale(layer))
        return LatentGrams(values, keys if self._keys_can(layer) else None)

    def measure(self, layer: int, grams: LatentGrams, tokens: int) -> dict[str, Tensor]:
        """Return the best latents of every rank, and the error that each of their columns takes away."""
        found = value_latents(grams.values, split_heads(self.config, self.tensors, layer).output.mT, tokens)
        if grams.keys is not None:
            found |= {f"{KEYS}{name}": tensor for name, tensor in grams.keys.latents().items()}
        return found

    def choose(self, measured: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Choose the ranks of every layer's keys and values."""
        self._measured = measured
        layers = range(self.config.num_hidden_layers)
        gains = [measured(layer)["gains"] for layer in layers]
        whole = torch.zeros(self.width, dtype=torch.float64)
        gains += [KEY_WEIGHT * column_gains(self._keys(layer)) if self.key_cut[layer] else whole for layer in layers]
        ranks = choose_ranks(torch.stack(gains), self.columns, [*self.cut, *self.key_cut])
        self.ranks, self.key_ranks = ranks[: len(layers)], ranks[len(layers) :]
        both = zip(self.ranks, self.key_ranks, strict=True)
        self.first = next(layer for layer, pair in enumerate(both) if min(pair) < self.width)
        values = {layer: {"type": "latent", "rank": self.ranks[layer]} for layer in self._reduced(self.ranks)}
        keys = {layer: self._key_mechanism(layer) for layer in self._reduced(self.key_ranks)}
        self.target = set_mechanisms(set_mechanisms(self.config, "value", values), "key", keys)

    def _reduced(self, ranks: list[int]) -> list[int]:
        return [layer for layer, rank in enumerate(ranks) if rank < self.width]

    def _key_mechanism(self, layer: int) -> dict[str, Any]:
        gains, rank = self._keys(layer)["gains"], self.key_ranks[layer]
        return {"type": "latent", **({"rank": rank} if gains.dim() == 1 else {"columns": columns_of(gains, rank)})}

    def reduce(self, layer: int) -> ReducedHeads:
        """Return a layer's heads, made from its latents."""
        rows = output_with_bias(
            self.config, self.tensors, layer, split_heads(self.config, self.tensors, layer).output.mT
        )
        value, made = self._reduce_values(layer)
        key, made_keys = self._reduce_keys(layer)
        return ReducedHeads(value, rows, made | made_keys, self.config.attention_output_bias, key)

    def _reduce_values(self, layer: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The value heads, [heads, hidden_size (+ 1), head_dim], and the tensors that make them."""
        heads, rank = split_heads(self.config, self.tensors, layer), self.ranks[layer]
        if rank == self.width:
            return value_with_bias(heads), {}
        stored = self._measured(layer)
        latent = heads.value.flatten(0, 1).T @ stored["combine"][:, :rank]  # [hidden_size, rank]
        restore = stored["restore"][:rank].unflatten(1, (len(heads.value), -1))
        up = restore.transpose(0, 1)  # [heads, rank, head_dim]
        made = {"v_proj.weight": latent.T, "v_up_proj.weight": up.transpose(1, 2).flatten(0, 1)}
        value = latent @ up
        if heads.value_bias is not None:
            made["v_up_proj.bias"] = heads.value_bias.flatten()
            value = torch.cat((value, heads.value_bias[:, None]), dim=1)
        return value, made

    def _reduce_keys(self, layer: int) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The key heads side by side, [width, hidden_size (+ 1)], and what makes them; None: the source's."""
        if self.key_ranks[layer] == self.width:
            return None, {}
        reduced = key_latent(self._keys(layer), self._key(layer), self.key_ranks[layer])
        inputs = self.config.hidden_size
        made = {"k_proj.weight": reduced.latent[:, :inputs], "k_up_proj.weight": reduced.up}
        if self.config.attention_bias:
            made["k_proj.bias"] = reduced.latent[:, inputs]
        return reduced.key, made

    def _key(self, layer: int) -> Tensor:
        """W_K head by head with its bias, [heads, head_dim, hidden_size (+ 1)], in float64."""
        name = f"model.layers.{layer}.self_attn.k_proj"
        key = self.tensors[f"{name}.weight"].double()
        if self.config.attention_bias:
            key = torch.cat((key, self.tensors[f"{name}.bias"].double()[:, None]), dim=1)
        return key.unflatten(0, (-1, self.config.head_dim))

    def _keys(self, layer: int) -> dict[str, Tensor]:
        """What was measured of a layer's keys."""
        stored = self._measured(layer)
        return {name.removeprefix(KEYS): tensor for name, tensor in stored.items() if name.startswith(KEYS)}

    def report(self, layer: int) -> dict[str, Any]:
        """Return the columns that a layer's keys and values take in the cache."""
        keys = {"key_rank": self.key_ranks[layer]} if any(self.key_cut) else {}
        return {**keys, "rank": self.ranks[layer]}

    def disk_bytes(self) -> int:
        """Return the bytes of the best latents of a layer, in float64; complex ones for every frequency are fewer."""
        return 8 * self.width * (2 * self.width + 1) * (1 + any(self.key_cut))


def may_be_cut(config: LeanConfig, layers: tuple[int, ...] | None) -> list[bool]:
    """Return whether a layer may be reduced, for each.

    Raises:
        LeanError: the source cannot be converted, or it has no such layers; says why.
    """
    check_convertible(config)
    check_reads_the_stream(config)
    last = config.num_hidden_layers
    if layers is not None and (wrong := [layer for layer in layers if not 0 <= layer < last]):
        raise LeanError(f"--layers: the model has layers 0 to {last - 1}, found {wrong[0]}")
    return [layers is None or layer in layers for layer in range(last)]


def count_columns(config: LeanConfig, share: float, cut: int) -> int:
    """Return how many columns the keys and values of all layers may take together.

    Args:
        share: of the source's cache.
        cut: how many of the layers' keys and values may become latents.

    Raises:
        LeanError: the source cannot be cut to that share; says what is possible.
    """
    width = value_width(config)
    total = 2 * width * config.num_hidden_layers
    smallest = total - cut * (width - step_of(width))
    columns = int(share * total + 1e-9) if 0 < share < 1 else 0
    if not smallest <= columns < total:
        raise LeanError(
            f"latents of this model take from {ceil(1000 * smallest / total) / 10:g}% of its cache up to all of it; "
            f"--cache {100 * share:g}% is out of reach. For less, quantize the cache as well"
        )
    return columns
