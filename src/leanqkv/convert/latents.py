"""Calibrated conversion to latent keys and values: as many columns of each layer are cached as they are worth.

Ours. Both kinds of columns are measured in the same unit, the error of attention's output that they take away, and go
where they take away most: over all layers, and over keys and values.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import LeanError
from ..model.config import LeanConfig
from ..presets.edit import set_mechanisms
from .activations import Recorder
from .heads import check_convertible, check_reads_the_stream, output_with_bias, split_heads, value_with_bias
from .latent_keys import KeyGrams, column_gains, key_latent, keys_stay
from .latent_values import ValueGram, choose_ranks, step_of, value_latents, value_width
from .sweeps import Grams, ReducedHeads, Reduction


def count_columns(config: LeanConfig, share: float, cut: Mapping[str, list[bool]]) -> int:
    """Return how many columns the keys and values of all layers may take together.

    Args:
        share: of the source's cache.
        cut: by "keys" and "values", whether those of a layer may become latents.

    Raises:
        LeanError: the source cannot be cut to that share; says what is possible.
    """
    width = value_width(config)
    total = 2 * width * config.num_hidden_layers
    smallest = total - sum(map(sum, cut.values())) * (width - step_of(width))
    columns = int(share * total + 1e-9)
    if not smallest <= columns < total:
        raise LeanError(
            f"latents of this model take from {smallest / total:.1%} of its cache up to all of it; --cache "
            f"{100 * share:g}% is out of reach. For less, quantize the cache as well"
        )
    return columns


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

    Raises:
        LeanError: the source cannot be converted, or not to that share; says why.
    """

    measures = "latents"

    def __init__(
        self, config: LeanConfig, tensors: Mapping[str, Tensor], share: float, layers: tuple[int, ...] | None = None
    ):
        check_convertible(config)
        check_reads_the_stream(config)
        last = config.num_hidden_layers
        if layers is not None and (wrong := [layer for layer in layers if not 0 <= layer < last]):
            raise LeanError(f"--layers: the model has layers 0 to {last - 1}, found {wrong[0]}")
        self.config, self.tensors = config, tensors
        self.name, self.width = f"latents-{100 * share:g}", value_width(config)
        values = [layers is None or layer in layers for layer in range(last)]
        keys = [may and keys_stay(config, plan) is None for may, plan in zip(values, config.plan.layers, strict=True)]
        self.cut = {"keys": keys, "values": values}
        self.columns = count_columns(config, share, self.cut)
        self.ranks: dict[str, list[int]] = {}
        self._measured: Callable[[int], Mapping[str, Tensor]] = lambda layer: {}

    def grams(self, layer: int) -> LatentGrams:
        heads, plan = split_heads(self.config, self.tensors, layer), self.config.plan.layers[layer]
        values = ValueGram(self.width, None if heads.value_bias is None else heads.value_bias.flatten())
        if keys_stay(self.config, plan) is not None:
            return LatentGrams(values, None)
        return LatentGrams(values, KeyGrams(heads.output.mT, plan.rope is not None, plan.attention_scale(layer)))

    def measure(self, layer: int, grams: LatentGrams, tokens: int) -> dict[str, Tensor]:
        """Return the best latents of every rank, and the error that each of their columns takes away."""
        output = split_heads(self.config, self.tensors, layer).output.mT
        found = {"values": value_latents(grams.values, output, tokens)}
        if grams.keys is not None:
            found["keys"] = grams.keys.latents()
        return {f"{side}.{name}": tensor for side, part in found.items() for name, tensor in part.items()}

    def choose(self, measured: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Choose the ranks of every layer's keys and values."""
        self._measured = measured
        layers = range(self.config.num_hidden_layers)
        whole = torch.zeros(self.width, dtype=torch.float64)
        gains = [self._side(layer, "values")["gains"] for layer in layers]
        gains += [column_gains(self._side(layer, "keys")) if self.cut["keys"][layer] else whole for layer in layers]
        ranks = choose_ranks(torch.stack(gains), self.columns, [*self.cut["values"], *self.cut["keys"]])
        self.ranks = {"values": ranks[: len(layers)], "keys": ranks[len(layers) :]}
        self.first = min(layer for side in self.ranks.values() for layer in layers if side[layer] < self.width)
        values = {
            layer: {"type": "latent", "rank": rank}
            for layer, rank in enumerate(self.ranks["values"])
            if rank < self.width
        }
        keys = {
            layer: self._key_mechanism(layer, rank)
            for layer, rank in enumerate(self.ranks["keys"])
            if rank < self.width
        }
        self.target = set_mechanisms(set_mechanisms(self.config, "value", values), "key", keys)

    def _key_mechanism(self, layer: int, rank: int) -> dict[str, Any]:
        columns = key_latent(self._side(layer, "keys"), self._key(layer), rank).columns
        return {"type": "latent", **({"rank": rank} if columns is None else {"columns": columns})}

    def reduce(self, layer: int) -> ReducedHeads:
        """Return a layer's heads, made from its latents."""
        heads = split_heads(self.config, self.tensors, layer)
        value, rank = value_with_bias(heads), self.ranks["values"][layer]
        rows = output_with_bias(self.config, self.tensors, layer, heads.output.mT)
        made, key = {}, None
        if rank < self.width:
            stored = self._side(layer, "values")
            latent = heads.value.flatten(0, 1).T @ stored["combine"][:, :rank]  # [hidden_size, rank]
            up = stored["restore"][:rank].unflatten(1, (len(value), -1)).transpose(0, 1)  # [heads, rank, head_dim]
            made = {"v_proj.weight": latent.T, "v_up_proj.weight": up.transpose(1, 2).flatten(0, 1)}
            value = latent @ up
            if heads.value_bias is not None:
                made["v_up_proj.bias"] = heads.value_bias.flatten()
                value = torch.cat((value, heads.value_bias[:, None]), dim=1)
        if self.ranks["keys"][layer] < self.width:
            reduced = key_latent(self._side(layer, "keys"), self._key(layer), self.ranks["keys"][layer])
            inputs, key = self.config.hidden_size, reduced.key
            made |= {"k_proj.weight": reduced.latent[:, :inputs], "k_up_proj.weight": reduced.up}
            if self.config.attention_bias:
                made["k_proj.bias"] = reduced.latent[:, inputs]
        return ReducedHeads(value, rows, made, self.config.attention_output_bias, key)

    def _key(self, layer: int) -> Tensor:
        """W_K head by head with its bias, [heads, head_dim, hidden_size (+ 1)], in float64."""
        name = f"model.layers.{layer}.self_attn.k_proj"
        key = self.tensors[f"{name}.weight"].double()
        if self.config.attention_bias:
            key = torch.cat((key, self.tensors[f"{name}.bias"].double()[:, None]), dim=1)
        return key.unflatten(0, (-1, self.config.head_dim))

    def _side(self, layer: int, side: str) -> dict[str, Tensor]:
        """What was measured of a layer's keys or values."""
        stored = self._measured(layer)
        return {name.removeprefix(f"{side}."): tensor for name, tensor in stored.items() if name.startswith(side)}

    def report(self, layer: int) -> dict[str, Any]:
        """Return the columns that a layer's keys and values take in the cache."""
        return {f"{side[:-1]}_columns": self.ranks[side][layer] for side in ("keys", "values")}

    def disk_bytes(self) -> int:
        """Return the bytes of the best latents of a layer, in float64."""
        return 2 * 8 * self.width * (2 * self.width + 1)
