"""Calibrated conversion to latent keys and values: as many columns of each layer are cached as they are worth.

Ours. Columns of keys and of values are measured in the same unit, the error of attention's output that they take away,
and go where they take away most: over all layers, and over keys and values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.layers import make_rms_norm
from ..model.layout import LayerPlan
from ..presets.edit import set_mechanisms
from .activations import Recorder
from .heads import felt_output, may_be_cut, output_with_bias, split_heads, value_with_bias
from .latent_keys import KeyGrams, KeyLatent, UnrotatedKeyGrams, can_be_latent, column_gains, columns_of, key_latent
from .latent_values import ValueGram, choose_ranks, step_of, value_gains, value_latents, value_width
from .low_rank import EIGENVECTORS, LARGE
from .sweeps import ReducedHeads, Reduction
from .targets import LatentsOptions

# So many calibration tokens are needed at least for each column of a layer's values.
TOKENS_PER_COLUMN = 4
# So many tokens, and so many for each column, are enough to choose by; with 16 for each a real model lost more.
CHOOSING_TOKENS, CHOOSING_TOKENS_PER_COLUMN = 32_768, 64
# Of the names of what is measured of the keys.
KEYS = "keys."
# How much more an error of the keys counts than one of the values that moves attention's output as far. W_O, which is
# fitted afterwards, makes up for a part of lost values and for little of moved scores.
KEY_WEIGHT = 10.0


def convert(config: LeanConfig, tensors: Mapping[str, Tensor], options: LatentsOptions) -> "Latents":
    """Return the reduction of a source."""
    return Latents(
        config,
        tensors,
        options.cache,
        options.layers,
        separate=options.separate,
        unrotated=options.unrotated,
        at_context=options.at_context,
    )


class LatentGrams:
    """Gram matrices for key and value latents of a layer; `keys` is None where the keys stay."""

    def __init__(self, values: ValueGram, keys: KeyGrams | None):
        self.values, self.keys = values, keys

    def add(self, recorder: Recorder, weight: Tensor) -> None:
        """Add a run of queries; `weight` [batch, queries] multiplies each token's output."""
        self.values.add(recorder, weight)
        if self.keys is not None:
            self.keys.add(recorder, weight)


@dataclass(eq=False)
class Latents(Reduction):
    """Latents of keys and values whose ranks go where they are worth most.

    Args:
        share: of the source's cache, at most.
        layers: those that may be reduced; None: all.
        keys: whether keys may become latents, where they can.
        separate: whether latent values are made of their latent alone, and not of the layer's keys too. They lose more,
            and cached keys need not be turned back in decoding.
        unrotated: whether latent keys are cached before rotary positions, which turn the heads when these are read: in
            layers that see all tokens.
        at_context: tokens of the context at which the share is counted, of which a layer with a window keeps the last
            ones alone; None: one that every window holds.
        exact: whether the values' Gram matrices are summed over heads one by one, and over all tokens; for comparison.

    Attributes:
        before_rotary: whether a latent of every layer's keys would be cached before rotary positions.
        ranks, key_ranks: columns of every layer's values and keys in the cache, once they are chosen.

    Raises:
        LeanError: the source cannot be converted, or not to that share; says why.
    """

    config: LeanConfig
    tensors: Mapping[str, Tensor]
    share: float
    layers: tuple[int, ...] | None = None
    keys: bool = True
    separate: bool = False
    unrotated: bool = False
    at_context: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        config = self.config
        kind = "exact-" * self.exact + "separate-" * self.separate + "unrotated-" * self.unrotated
        kind += "latents" if self.keys else "latent-values"
        context = "" if self.at_context is None else f" at {self.at_context} tokens"
        self.name, self.measures = f"{kind}-{100 * self.share:.10g}{context}", f"best-{kind}"
        self.cut = may_be_cut(config, self.layers)
        layers = config.plan.layers
        self.before_rotary = [self.unrotated and plan.rope is not None and plan.window is None for plan in layers]
        could = [can_read_keys(config, plan, before) for plan, before in zip(layers, self.before_rotary, strict=True)]
        self.could_read_keys, self.from_keys = any(could), [not self.separate and can for can in could]
        self.key_cut = [may and self._keys_can(layer) for layer, may in enumerate(self.cut)]
        self.width = value_width(config)
        check_context(config, self.at_context)
        self.costs = config.plan.kept_tokens(self.at_context or 1)  # which every window holds
        self.budget = self._budget(context)
        self.least_tokens = TOKENS_PER_COLUMN * self.width
        if not self.exact:
            # Keys as wide as the stream make its values whatever the tokens are: few tell the rest.
            held = all(self.from_keys) and self.width >= config.hidden_size
            per_column = TOKENS_PER_COLUMN if held else CHOOSING_TOKENS_PER_COLUMN
            self.choosing_tokens = max(CHOOSING_TOKENS, per_column * self.width)

    def _budget(self, context: str) -> int:
        """Return what the cached columns of all layers may cost together.

        Args:
            context: at which they are counted, in words, for the error.

        Raises:
            LeanError: the source cannot be cut to that share; says what is possible.
        """
        total, columns = 2 * self.width * sum(self.costs), self.width - step_of(self.width)
        each = list(zip(self.config.plan.layers, self.costs, self.cut, self.key_cut, strict=True))
        smallest = total - columns * sum(cost * (values + keys) for _, cost, values, keys in each)
        budget = int(self.share * total + 1e-9) if 0 < self.share < 1 else 0
        if not smallest <= budget < total:
            least = f"{ceil(1000 * smallest / total) / 10:g}%"
            left = [layer for layer, _, values, keys in each if values and not keys]
            normed = self.config.qk_norm and any(layer.rope and not layer.window for layer in left)
            other = "take unrotated-latents, which reduce normed keys too, or " if normed else ""
            raise LeanError(
                f"latents of this model take from {least} of its cache up to all of it{context}; "
                f"`cache={100 * self.share:g}%` is out of reach. For less, {other}quantize the cache as well"
            )
        return budget

    @property
    def same_as_latents(self) -> str | None:
        """Why they would be the same if they were neither separate nor unrotated; None: they would not."""
        if self.unrotated:
            turned = any(may and before for may, before in zip(self.key_cut, self.before_rotary, strict=True))
            return None if turned else "no layer of this model can cache a latent of keys before rotary positions"
        return None if self.could_read_keys else "no layer of this model can make values of its keys"

    def _keys_can(self, layer: int) -> bool:
        return self.keys and can_be_latent(self.config, self.config.plan.layers[layer], self.before_rotary[layer])

    def grams(self, layer: int) -> LatentGrams:
        heads, plan = split_heads(self.config, self.tensors, layer), self.config.plan.layers[layer]
        bias = None if heads.value_bias is None else heads.value_bias.flatten()
        signs = None if self.exact else torch.Generator().manual_seed(layer)
        values = ValueGram(self.width, bias, self.width if self.from_keys[layer] else 0, self._inputs(layer), signs)
        if not self._keys_can(layer):
            return LatentGrams(values, None)
        felt, scaling = felt_output(self.config, self.tensors, layer), plan.attention_scale(layer)
        if self.before_rotary[layer]:
            norm = key_norm(self.config, self.tensors, layer)
            return LatentGrams(values, UnrotatedKeyGrams(felt, scaling, torch.Generator().manual_seed(layer), norm))
        return LatentGrams(values, KeyGrams(felt, plan.rope is not None, scaling))

    def _inputs(self, layer: int) -> int:
        """How many columns the layer's keys and values are made of, if fewer than they have; else 0."""
        inputs = self.config.hidden_size + (self.config.attention_bias and self.from_keys[layer])
        return inputs if inputs < self.width * (1 + self.from_keys[layer]) else 0

    def measure(self, layer: int, grams: LatentGrams, tokens: int) -> dict[str, Tensor]:
        """Return the sums over values, the best latents of keys, and the error that every column takes away."""
        key = self._key(layer).flatten(0, 1) if self.from_keys[layer] else None
        gram = self._of_values(layer, grams.values.total, key)
        gains = value_gains(gram, felt_output(self.config, self.tensors, layer))
        found = {"gram": grams.values.total, "gains": gains / tokens}
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
        ranks = choose_ranks(torch.stack(gains), self.budget, [*self.cut, *self.key_cut], 2 * self.costs)
        self.ranks, self.key_ranks = ranks[: len(layers)], ranks[len(layers) :]
        both = zip(self.ranks, self.key_ranks, strict=True)
        self.first = next(layer for layer, pair in enumerate(both) if min(pair) < self.width)
        values = {layer: self._value_mechanism(layer) for layer in layers if self.ranks[layer] < self.width}
        keys = {layer: self._key_mechanism(layer) for layer in layers if not self._keeps_keys(layer)}
        self.target = set_mechanisms(set_mechanisms(self.config, "key", keys), "value", values)

    def _keeps_keys(self, layer: int) -> bool:
        """Whether the source's keys stay. Values are made of keys before their norm, which a latent holds, be it of all
        columns."""
        read = self.config.qk_norm and self.from_keys[layer] and self.ranks[layer] < self.width
        return self.key_ranks[layer] == self.width and not read

    def _value_mechanism(self, layer: int) -> dict[str, Any]:
        return {"type": "latent", "rank": self.ranks[layer], **({"keys": True} if self.from_keys[layer] else {})}

    def _key_mechanism(self, layer: int) -> dict[str, Any]:
        gains, rank = self._keys(layer)["gains"], self.key_ranks[layer]
        if gains.dim() > 1:
            return {"type": "latent", "columns": columns_of(gains, rank)}
        before = {"before_rotary": True} if self.before_rotary[layer] else {}
        return {"type": "latent", "rank": rank, **before}

    def reduce(self, layer: int) -> ReducedHeads:
        """Return a layer's heads, made from its latents."""
        output, inputs = split_heads(self.config, self.tensors, layer).output.mT, self.config.hidden_size
        rows = output_with_bias(self.config, self.tensors, layer, output)
        key = None
        if not self._keeps_keys(layer):
            key = key_latent(self._keys(layer), self._key(layer), self.key_ranks[layer])
        value, made = self._reduce_values(layer, key)
        if key is not None:
            made |= {"k_proj.weight": key.latent[:, :inputs], "k_up_proj.weight": key.up}
            if self.config.attention_bias:
                made["k_proj.bias"] = key.latent[:, inputs]
        return ReducedHeads(value, rows, made, self.config.attention_output_bias, None if key is None else key.key)

    def _reduce_values(self, layer: int, key: KeyLatent | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The value heads, [heads, hidden_size (+ 1), head_dim], and the tensors that make them."""
        heads, rank = split_heads(self.config, self.tensors, layer), self.ranks[layer]
        if rank == self.width:
            return value_with_bias(heads), {}
        cached, columns = self._cached_keys(layer, key) if self.from_keys[layer] else (None, None)
        gram = self._of_values(layer, self._measured(layer)["gram"], cached)
        felt = felt_output(self.config, self.tensors, layer)
        found = value_latents(gram, felt, None if self._inputs(layer) else columns, rank)
        combine, restore = found.combine, found.restore
        by_keys = torch.zeros(self.width, self.config.hidden_size + 1, dtype=torch.float64)
        if cached is not None:
            by_keys = found.from_keys.T @ cached  # [width, hidden_size (+ 1)]
        inputs = self.config.hidden_size
        latent = combine.T @ (heads.value.flatten(0, 1) - by_keys[:, :inputs])  # [rank, hidden_size]
        value = restore.T @ latent + by_keys[:, :inputs]
        made = {"v_proj.weight": latent, "v_up_proj.weight": torch.cat((restore, found.from_keys)).T}
        if heads.value_bias is not None:
            # The keys' bias is in what is made of the keys, and not in the latent, which has none.
            bias = heads.value_bias.flatten() - restore.T @ combine.T @ by_keys[:, inputs]
            made["v_up_proj.bias"] = bias
            value = torch.cat((value, (bias + by_keys[:, inputs])[:, None]), dim=1)
        return value.unflatten(0, (len(heads.value), -1)).mT, made

    def _of_values(self, layer: int, gram: Tensor, keys: Tensor | None) -> Tensor:
        """Return the Gram matrix of a layer's values and `keys`, [columns, hidden_size (+ 1)], of the one that was
        summed up; it is that one unless it is of the layer's inputs."""
        if not self._inputs(layer):
            return gram
        rows = split_heads(self.config, self.tensors, layer).value.flatten(0, 1)
        if keys is not None:
            rows = torch.cat((torch.nn.functional.pad(rows, (0, keys.shape[1] - rows.shape[1])), keys))
        return rows @ gram @ rows.T

    def _cached_keys(self, layer: int, key: KeyLatent | None) -> tuple[Tensor, Tensor | None]:
        """Return the cached key projection, [columns, hidden_size (+ 1)], and the map from keys to it, [width, columns]
        or None for all of them; key: the latent that they become."""
        if key is None:
            return self._key(layer).flatten(0, 1), None
        themselves = torch.eye(self.width, dtype=torch.float64).unflatten(0, (-1, self.config.head_dim))
        return key.latent, key_latent(self._keys(layer), themselves, self.key_ranks[layer]).latent.T

    def _key(self, layer: int) -> Tensor:
        """W_K head by head with its bias, [heads, head_dim, hidden_size (+ 1)], in float64."""
        name = f"model.layers.{layer}.self_attn.k_proj"
        key = self.tensors[f"{name}.weight"].double()
        if self.config.attention_bias:
            key = torch.cat((key, self.tensors[f"{name}.bias"].double()[:, None]), dim=1)
        return key.unflatten(0, (-1, self.config.head_dim))

    def _keys(self, layer: int) -> dict[str, Tensor]:
        """Return the measurements of a layer's keys."""
        stored = self._measured(layer)
        return {name.removeprefix(KEYS): tensor for name, tensor in stored.items() if name.startswith(KEYS)}

    def report(self, layer: int) -> dict[str, Any]:
        """Return the columns that a layer's keys and values take in the cache, and whether values are made of both."""
        keys = {"key_rank": self.key_ranks[layer]} if any(self.key_cut) else {}
        from_keys = self.from_keys[layer] and self.ranks[layer] < self.width
        return {**keys, "rank": self.ranks[layer], "from_keys": from_keys}

    def _columns(self) -> tuple[int, int]:
        """Columns of the largest Gram matrix of a layer, and of its keys and values."""
        both = self.width * (1 + any(self.from_keys))
        return max(self._inputs(layer) or both for layer in range(self.config.num_hidden_layers)), both

    def operations(self, length: int) -> tuple[float, float]:
        """Return those of one Gram matrix and of the keys' importance, and those of regression and eigenvectors."""
        columns, both = self._columns()
        queries, width = self.config.num_attention_heads, self.width
        per_token = (queries if self.exact else 1) * 2 * columns * (columns + length)
        # Of the importance; and of what unrotated keys meet.
        per_token += (6 if self.unrotated else 4) * length * queries * self.config.head_dim
        projected = 2 * both * columns * (both + columns) if columns < both else 0
        regressed = (both > width) * 9 * width**3
        by_frequency = self.config.position_embedding_type == "rope" and not self.unrotated
        of_keys = EIGENVECTORS * width**3 * (any(self.key_cut) and not by_frequency)
        # Where keys are as wide as the stream, a few eigenvectors are nearly always enough to choose by.
        factored = 2 - (any(self.from_keys) and width >= max(LARGE, self.config.hidden_size))
        return per_token, 2 * (projected + regressed) + factored * EIGENVECTORS * width**3 + of_keys

    def held_bytes(self) -> int:
        """Return the bytes of a layer's Gram matrices and of what their factorization makes, in float64."""
        columns, both = self._columns()
        return 8 * (2 * columns**2 + both**2 + 8 * self.width**2)

    def made_bytes(self) -> int:
        """Return the bytes of what makes the columns, and of what is made of them, in float32."""
        layers = self.config.num_hidden_layers
        columns = min(self.budget // min(self.costs), 2 * layers * self.width)
        return 4 * (columns * (self.config.hidden_size + self.width) + 2 * layers * self.width)

    def measured_bytes(self) -> int:
        """Return the bytes of the values' sums and the keys' best latents of a layer, in float64; complex ones for
        every frequency are fewer."""
        columns, _ = self._columns()
        return 8 * (columns**2 + self.width + self.width * (2 * self.width + 1) * any(self.key_cut))


def can_read_keys(config: LeanConfig, layer: LayerPlan, before_rotary: bool) -> bool:
    """Return whether a layer's latent values can be made of its cached keys: all of them, and linear in its input; or
    of a latent of keys before rotary positions, and so before their norm."""
    return layer.key.kind == "linear" and layer.window is None and (before_rotary or not config.qk_norm)


def key_norm(config: LeanConfig, tensors: Mapping[str, Tensor], layer: int) -> nn.RMSNorm | None:
    """Return the norm of a layer's keys in float64; None: they have none."""
    if not config.qk_norm:
        return None
    weight = tensors[f"model.layers.{layer}.self_attn.k_norm.weight"].double()
    norm = make_rms_norm(config, len(weight))
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def check_context(config: LeanConfig, tokens: int | None) -> None:
    """Check the context at which bytes are counted.

    Raises:
        LeanError: the model has no such positions.
    """
    limit = config.max_position_embeddings
    if tokens is not None and not 0 < tokens <= limit:
        raise LeanError(f"`at_context` must be from 1 to {limit}, the positions of this model, found {tokens}")
