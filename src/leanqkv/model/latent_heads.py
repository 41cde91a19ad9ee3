"""Latent keys and latent values, each beside the other or beside ordinary heads.

Keys: a layer caches complex columns `c`, and its key heads are complex-linear maps of them, `k_h = u_h c`. Rotary
positions multiply frequency f of every head by the same `exp(i s w_f)`, which commutes with every complex-linear map
between the heads at that frequency. So `k_h,f = sum of u_h,j c_j` over the columns j of frequency f, and columns are
rotated before they are cached. Ours; TransMLA (Meng et al. 2025, https://arxiv.org/abs/2502.07864) rotates key heads
into each other, frequency by frequency. With `before_rotary` a layer caches `c = x W_c` as it is, and key heads are any
linear maps of it, which are normed, with `qk_norm`, and rotated whenever they are read: fewer columns hold as much, and
every head of every cached token is made again at each step. Palu (Chang et al. 2024, https://arxiv.org/abs/2407.21118)
caches such keys.

Values: a layer caches `c = x W_c`, and its value heads `v_h = c W_h` are made from it. Ours; the values' half of
multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1), beside keys that keep their rotary
positions. With `keys`, values are made of the latent and of the layer's own keys, `v_h = c W_h + k U_h`, and the latent
holds what the keys do not. There k is as it was before rotary positions: cached keys are turned back when they are
read, so that nothing else is cached. Slim attention (Graef & Wasielewski 2025, https://arxiv.org/abs/2503.05840) makes
values of the keys alone, which takes a square W_K: without grouped heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .attention import KeyValues, LeanAttention, attend, autocast, update_cache
from .latent import Absorbing, Columns, ComplexUp, absorbing_pays, expand, rotate_columns
from .layout import LayerPlan
from .position import BACK, HISTORY, Rotation, Rotations, rotate, rotation_of
from .registry import ConfigError, Projection


@dataclass(frozen=True)
class LatentKeys(Projection):
    """`k_proj` makes the latent, and `k_up_proj` the key heads of it.

    With rotary positions the latent, [batch, positions, 2 P], has the real parts of P complex columns and then the
    imaginary ones, each in the order of their frequencies; dimension i of a head and i + head_dim / 2 are a complex
    number too. Without rotary positions it has `rank` real columns and key heads are any linear map of them.

    Options:
        columns: complex columns of each of the head_dim / 2 frequencies, from 0 to the number of key heads; by default
            half of the heads. For layers with rotary positions.
        rank: real columns, by default half of the width of the key heads; with rotary positions they are spread evenly
            over the frequencies.
        before_rotary: whether `rank` columns are cached as they are before rotary positions, which turn the key heads
            when they are read.
    """

    kind = "latent"
    attention = "latent_heads"
    columns: tuple[int, ...] | None = None
    rank: int | None = None
    before_rotary: bool = False

    def in_layer(self, config, layer: int, num_heads: int, rope: str | None) -> "LatentKeys":
        if reason := self._clash_in_layer(config, num_heads, rope):
            raise ConfigError(f"key {self.kind!r} in layer {layer}: {reason}")
        if rope is None or self.before_rotary:
            rank = num_heads * config.head_dim // 2 if self.rank is None else self.rank
            return replace(self, rank=rank, before_rotary=rope is not None)
        if self.columns is not None:
            return self
        frequencies = config.head_dim // 2
        total = frequencies * ((num_heads + 1) // 2) if self.rank is None else self.rank // 2
        spread = ((f + 1) * total // frequencies - f * total // frequencies for f in range(frequencies))
        return LatentKeys(columns=tuple(spread))

    def _clash_in_layer(self, config, num_heads: int, rope: str | None) -> str | None:
        if config.key_value["type"] != "projected":
            return f"key_value {config.key_value['type']!r} shares heads, and here only a latent of the keys is kept"
        if config.qk_norm and not (rope and self.before_rotary):
            return "qk_norm norms every head's key, and queries on the latent never make the keys" + (
                "; with before_rotary=true they are made whenever they are read" if rope else ""
            )
        if self.columns is not None and self.rank is not None:
            return "columns and rank both say how wide the latent is; give one of them"
        width = num_heads * config.head_dim
        if rope is not None and not self.before_rotary:
            return self._rotary_clash(config, num_heads, getattr(config, rope))
        if self.columns is not None:
            without = "keys are cached before rotary positions" if rope else "this layer has no rotary positions"
            return f"columns are of rotary frequencies, and {without}; give rank in their place"
        if not 1 <= (rank := width // 2 if self.rank is None else self.rank) <= width:
            return f"rank must be from 1 to {width}, the width of its {num_heads} key heads; found {rank}"
        return None

    def _rotary_clash(self, config, num_heads: int, rope: dict) -> str | None:
        frequencies, width = config.head_dim // 2, num_heads * config.head_dim
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            return f"latent keys rotate whole heads; found partial_rotary_factor {rope['partial_rotary_factor']}"
        if self.rank is not None and not (0 < self.rank <= width and self.rank % 2 == 0):
            return f"rank must be even and from 2 to {width}, the width of its {num_heads} key heads; found {self.rank}"
        if self.columns is None:
            return None
        if len(self.columns) != frequencies:
            return f"columns must be {frequencies} numbers, one for each frequency; found {len(self.columns)}"
        if (found := next((number for number in self.columns if not 0 <= number <= num_heads), None)) is not None:
            return f"columns must be from 0 to {num_heads}, the number of key heads; found {found}"
        return None if any(self.columns) else "columns are 0 for every frequency; give at least one column"

    def latent_rank(self, config, num_heads: int) -> int:
        """Return the real columns that are cached, of a mechanism that `in_layer` gave."""
        return self.rank or 2 * sum(self.columns or ())

    def build(self, config, num_heads: int) -> nn.Linear:
        return nn.Linear(config.hidden_size, self.latent_rank(config, num_heads), bias=config.attention_bias)

    def build_up(self, config, num_heads: int, key_columns: int) -> nn.Module:
        """Return the map of the latent to the key heads; their bias is part of the latent."""
        if self.columns is not None:
            return ComplexUp(num_heads, self.columns)
        up = nn.Linear(key_columns, num_heads * config.head_dim, bias=False)
        up.initial_std = up.in_features**-0.5
        return up


@dataclass(frozen=True)
class LatentValues(Projection):
    """`v_proj` makes the latent, [batch, positions, rank], and `v_up_proj` the value heads of it, and of the keys.

    Options:
        rank: columns of the latent; by default half of the width of the value heads.
        keys: whether the values are made of the layer's keys too.
    """

    kind = "latent"
    attention = "latent_heads"
    rank: int | None = None
    keys: bool = False

    @property
    def reads_keys(self) -> bool:  # type: ignore[override]
        return self.keys

    def latent_rank(self, config, num_heads: int) -> int:
        return num_heads * config.head_dim // 2 if self.rank is None else self.rank

    def build(self, config, num_heads: int) -> nn.Linear:
        return nn.Linear(config.hidden_size, self.latent_rank(config, num_heads), bias=False)

    def build_up(self, config, num_heads: int, key_columns: int) -> nn.Linear:
        """Return the map of the latent, and of the keys behind it if it reads them, to the value heads; with the bias
        that the values have."""
        columns = self.latent_rank(config, num_heads) + (key_columns if self.keys else 0)
        return nn.Linear(columns, num_heads * config.head_dim, bias=config.attention_bias)

    def clash(self, config, heads: int) -> str | None:
        if config.key_value["type"] != "projected":
            return f"key_value {config.key_value['type']!r} shares value heads, and here only a latent is kept"
        width = heads * config.head_dim
        if not 1 <= self.latent_rank(config, heads) <= width:
            return f"rank must be from 1 to {width}, the width of its {heads} value heads; found {self.rank}"
        return None


class LatentAndKeys(NamedTuple):
    """Inputs from which values that read keys are rebuilt: a latent and, behind it, the keys before rotary positions.

    latent: [batch, 1, key positions, rank].
    keys: [batch, heads, key positions, head_dim], as attention reads them; latent ones are one head.
    new: [batch, positions, width], those of this call as they are projected.
    back: the inverse rotation of a layer's heads, [batch or 1, key positions, at most head_dim]; None: there is none.
    frequencies: of the complex columns of latent keys, each of which `back` turns by its own.
    """

    latent: Tensor
    keys: Tensor
    new: Tensor
    back: Rotation | None
    frequencies: Columns | None = None

    @property
    def columns(self) -> int:
        return self.latent.shape[-1] + self.new.shape[-1]

    def joined(self) -> Tensor:
        """Both as one head, [batch, 1, key positions, columns]."""
        if self.keys.shape[2] == self.new.shape[1]:
            return torch.cat((self.latent, self.new[:, None].to(self.latent.dtype)), dim=-1)
        keys, back = self.keys, self.back
        if back is not None:
            keys = rotate(keys, back) if self.frequencies is None else rotate_columns(keys, back, self.frequencies)
        return torch.cat((self.latent[:, 0], *keys.unbind(1)), dim=-1)[:, None]


def attend_to_inputs(
    attention: Any,
    query: Tensor,
    key: Tensor,
    values: Sequence[Tensor] | LatentAndKeys,
    mask: Tensor | None,
    scaling: float,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """As `attend`; or, in place of values, to the inputs that all of them are made of."""
    if isinstance(values, LatentAndKeys):
        values = [values.joined().expand(-1, key.shape[1], -1, -1)]
    return attend(attention, query, key, values, mask, scaling, **kwargs)


def attend_turned(
    attention: Any,
    query: Tensor,
    latent: Tensor,
    values: Sequence[Tensor] | LatentAndKeys,
    mask: Tensor | None,
    scaling: float,
    rotation: Rotation,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """As `attend_to_inputs`, to keys that are made of a latent [batch, 1, key positions, rank], normed and turned."""
    heads = attention.split_heads(attention.k_up_proj(latent[:, 0]), attention.k_norm, rotation)
    return attention.attend(attention, query, heads, values, mask, scaling, **kwargs)


class LatentHeadsAttention(Absorbing, LeanAttention):
    """LeanAttention of a layer whose keys or values are made of latents. Such a layer borrows nothing."""

    kind = "latent_heads"
    attend = staticmethod(attend_to_inputs)
    attend_turned = staticmethod(attend_turned)
    rotate_columns = staticmethod(rotate_columns)

    def __init__(self, config, layer: LayerPlan):
        super().__init__(config, layer)
        self.turns_keys = layer.key.before_rotary

    def forward(
        self,
        hidden_states: Tensor,
        layer: LayerPlan,
        position_embeddings: Rotations | None = None,
        attention_mask: Tensor | None = None,
        borrowed: dict[int, KeyValues] | None = None,
        past_key_values: Cache | None = None,
        mlp_hidden: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None, KeyValues]:
        """Attention of one layer, as LeanAttention.forward; a latent is one head of its own width."""
        query, new_keys, value, gate = self.project(hidden_states, mlp_hidden)
        rotation = rotation_of(layer, position_embeddings)
        query = self.split_heads(query, self.q_norm, rotation)
        if self.k_up_proj is None:
            key = self.split_heads(new_keys, self.k_norm, rotation)
        else:
            key = self._latent_head(new_keys, layer.key.columns, rotation)
        value = self.split_heads(value, None, None) if self.v_up_proj is None else self._latent_head(value, None, None)
        own = KeyValues(*update_cache(past_key_values, layer, key, value), value)
        key, values = own.keys, own.values
        assert key is not None and values is not None

        inputs = self.inputs_of_values(own, new_keys, layer, position_embeddings)
        absorbed = self._absorbs_values(query, key, values.shape[-1] if inputs is None else inputs.columns)
        attended: Any
        if absorbed:
            attended = inputs or [values.expand(-1, layer.computed_key_heads, -1, -1)]
        elif self.v_up_proj is not None:
            latent = values if inputs is None else inputs.joined()
            attended = [expand(self.v_up_proj, latent[:, 0], self.head_dim)]
        else:
            attended = [values]
        attend: Any = self.attend
        if self.turns_keys:
            attend = self.attend_turned
            # Without a history, the keys that are read are those of this call.
            kwargs["rotation"] = rotation_of(layer, position_embeddings, HISTORY) or rotation
        elif self.k_up_proj is not None and self.absorbs(self.k_up_proj, query, *key.shape[2:]):
            query, key = self.absorb(query), key.expand(-1, layer.computed_key_heads, -1, -1)
        elif self.k_up_proj is not None:
            key = expand(self.k_up_proj, key[:, 0], self.head_dim)
        scaling = layer.attention_scale(layer.layer)
        output, weights = attend(self, query, key, attended, attention_mask, scaling, **kwargs)
        if absorbed:
            output = self.restore(output)
        return self.project_output(output, gate), weights, own

    def inputs_of_values(
        self, own: KeyValues, new_keys: Tensor, layer: LayerPlan, position_embeddings: Rotations | None
    ) -> LatentAndKeys | None:
        """Return what values that read keys are made of; None: they are what is cached, or made of that alone."""
        if not layer.value.reads_keys:
            return None
        assert own.keys is not None and own.values is not None
        back = None if layer.key.before_rotary else rotation_of(layer, position_embeddings, BACK)
        return LatentAndKeys(own.values, own.keys, new_keys, back, layer.key.columns)

    def _absorbs_values(self, query: Tensor, key: Tensor, columns: int) -> bool:
        """Whether heads attend to latent values themselves. With dropout their weights do not add up to 1."""
        dropped = self.training and self.config.attention_dropout > 0
        if self.v_up_proj is None or dropped:
            return False
        return self.absorbs(self.v_up_proj, query, key.shape[2], columns)

    def absorbs(self, up: nn.Module, query: Tensor, positions: int, columns: int) -> bool:
        """Whether heads attend to a latent itself; see `absorbing_pays`."""
        return absorbing_pays(up, query, positions, columns)

    def _latent_head(self, projected: Tensor, columns: Columns | None, rotation: Rotation | None) -> Tensor:
        """[batch, positions, columns] to the one head that is cached of it, its complex columns rotated."""
        head = projected[:, None]
        if columns is not None and rotation is not None:
            head = self.rotate_columns(head, rotation, columns)
        return autocast(head)
