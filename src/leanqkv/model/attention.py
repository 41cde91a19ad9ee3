"""Self-attention whose keys and values may lie in several layers: query x key/value x output.

`LeanAttention.forward` reads from top to bottom: project, split into heads, cache, attend, project back.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .key_latent import Columns, LatentKeys, absorb, absorbing_keys_pays, rotation_of_columns
from .layout import HeadSource
from .norm import make_rms_norm
from .plan import BlockWeights, LayerPlan
from .position import Rotation, Rotations, rotate, rotation_back, rotation_of
from .value_latent import LatentAndKeys, LatentValues, absorbing_pays, expand, from_latent


class KeyValues(NamedTuple):
    """Keys and values that a layer computed and that later layers may borrow; None for what it does not compute.

    keys, values: [batch, heads, positions, head_dim] with their whole history; they may be the cache's own tensors, so
    they are never changed in place. new_values: those of this call's positions alone, before any mixing or caching.
    Latent keys and values (key_latent.py, value_latent.py) are one head of their latent's width.
    Under MLA (attention_latent.py) `keys` is the rotary key and `values` the latent, [batch, positions, columns].
    """

    keys: Tensor | None
    values: Tensor | None
    new_values: Tensor | None


def attend(
    attention: Any,
    query: Tensor,
    key: Tensor,
    values: Sequence[Tensor] | LatentAndKeys,
    mask: Tensor | None,
    scaling: float,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention of one group of heads whose values lie in one tensor or in several.

    One call for each tensor of values: copying them into one at every decoding step costs more (P3, appendix B.2).

    Args:
        query: [batch, heads, positions, head_dim]; key: [batch, heads / group size, key positions, head_dim].
        values: of consecutive key heads, each [batch, its heads, key positions, head_dim]; or what all of them are made
            of, which then is what every head attends to.

    Returns:
        output [batch, positions, heads, head_dim]; weights [batch, heads, positions, key positions] or None.
    """
    config = attention.config
    attention_function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention)
    dropout = config.attention_dropout if attention.training else 0.0
    group_size = query.shape[1] // key.shape[1]
    if isinstance(values, LatentAndKeys):
        values = [values.joined().expand(-1, key.shape[1], -1, -1)]
    outputs, start = [], 0
    for value in values:
        stop = start + value.shape[1]
        heads = query[:, start * group_size : stop * group_size], key[:, start:stop], value
        outputs.append(attention_function(attention, *heads, mask, dropout=dropout, scaling=scaling, **kwargs))
        start = stop
    return concatenate_heads(outputs)


class LeanAttention(nn.Module):
    """Self-attention with heads of keys and values.

    The weights are those of a block; how they are wired, and with which other layers, is in the plan of the layer that
    is computed with them (layers may share a block). Inference replaces two steps by faster ones that give the same:
    `project` (inference/joined.py) and `attend` (inference/attention.py).
    """

    attend = staticmethod(attend)

    def __init__(self, config, weights: BlockWeights):
        super().__init__()
        self.config = config
        self.layer_idx = weights.layer
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.is_causal = not config.bidirectional
        self.query_reads_mlp = weights.query_reads_mlp
        self.q_proj = weights.query.build(config, weights.num_query_heads)
        self.k_proj = weights.key.build(config, weights.num_key_heads) if weights.num_key_heads else None
        computes_values = weights.num_value_heads and not weights.reuses_keys
        self.v_proj = weights.value.build(config, weights.num_value_heads) if computes_values else None
        self.k_up_proj: nn.Module | None = None
        if weights.caches_latent_keys:
            self.k_up_proj = LatentKeys.build_up(config, weights.num_key_heads, weights.key.options)
        self.v_up_proj: nn.Linear | None = None
        if weights.caches_latent:
            self.v_up_proj = LatentValues.build_up(
                config, weights.num_value_heads, weights.value.options, weights.key_width
            )
        self.o_proj = weights.output.build(config, weights.num_query_heads)
        self.q_norm = self._make_norm(weights.num_query_heads)
        self.k_norm = self._make_norm(weights.num_key_heads)
        self.mixer = weights.build_mixer(config)

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
        """Attention of one layer.

        Args:
            hidden_states: [batch, positions, hidden_size], after the block's norm.
            layer: where the heads come from and what is cached.
            position_embeddings: rotary `(cos, sin)` by the name of their parameters, or None without RoPE.
            attention_mask: as `masks.py` makes it for the attention implementation in use.
            borrowed: keys and values of the earlier layers that this one borrows from.
            past_key_values: the cache; what this layer computes is appended to it.
            mlp_hidden: [batch, positions, intermediate_size], of the previous block, for `mlp-query`.

        Returns:
            output [batch, positions, hidden_size]; attention weights [batch, heads, positions, key positions] (eager
            attention alone, else None); this layer's own keys and values.
        """
        query, key, value = self.project(hidden_states, mlp_hidden)
        new_keys = key
        rotation = rotation_of(layer, position_embeddings)
        query = self._split_heads(query, self.q_norm, rotation)
        if self.k_up_proj is None:
            key = self._split_heads(key, self.k_norm, rotation)
        else:
            key = latent_head(key, layer.key_columns, rotation)
        value = self._split_heads(value, None, None) if self.v_up_proj is None else latent_head(value)
        if layer.reuses_keys and layer.computed_value_heads:
            value = key[:, : layer.computed_value_heads]

        new_values = value
        if self.mixer is not None:
            value = mix(self.mixer, value, layer, borrowed, hidden_states)
        key, value = update_cache(past_key_values, layer, key, value)
        own = KeyValues(key, value, new_values)

        both = None
        if layer.values_read_keys:
            both = self._latent_and_keys(own, new_keys, layer, rotation_back(layer, position_embeddings))
        query, attended, absorbed = self._attended(query, own, both, layer)
        sources = {**(borrowed or {}), layer.layer: attended}
        outputs = []
        for group in layer.groups:
            scaling = layer.attention_scale(group.keys.layer)
            group_query = query[:, group.queries]
            group_key = slice_heads(sources[group.keys.layer].keys, group.keys)
            group_values: Any = both if absorbed else None  # of all heads: such a layer borrows nothing
            if group_values is None:
                group_values = [slice_heads(sources[source.layer].values, source) for source in group.values]
            outputs.append(self.attend(self, group_query, group_key, group_values, attention_mask, scaling, **kwargs))
        output, attention_weights = concatenate_heads(outputs)

        if absorbed and self.v_up_proj is not None:
            output = from_latent(self.v_up_proj, output, self.head_dim)
        if layer.reuses_keys and rotation is not None:
            cos, sin = rotation
            output = rotate(output.transpose(1, 2), (cos, -sin)).transpose(1, 2)
        return self.o_proj(output.flatten(2)), attention_weights, own

    def project(self, hidden_states: Tensor, mlp_hidden: Tensor | None) -> tuple[Any, Any, Any]:
        """Query, key and value, each [batch, positions, width]; None for what the layer does not compute."""
        query = self.q_proj(hidden_states, mlp_hidden) if self.query_reads_mlp else self.q_proj(hidden_states)
        key = self.k_proj(hidden_states) if self.k_proj is not None else None
        value = self.v_proj(hidden_states) if self.v_proj is not None else None
        return query, key, value

    def _attended(
        self, query: Tensor, own: KeyValues, both: LatentAndKeys | None, layer: LayerPlan
    ) -> tuple[Tensor, KeyValues, bool]:
        """Own heads as they are attended to, with the query for them: made of latents, or latents in their place.

        The last value tells whether the output is made of latent values and is still to go through `v_up_proj`.
        """
        key: Any = own.keys
        value: Any = own.values
        attended, absorbed = own, False
        if self.v_up_proj is not None:
            absorbed = self._absorbs(self.v_up_proj, query, key, value.shape[-1] if both is None else both.columns)
        if absorbed:
            attended = attended._replace(values=value.expand(-1, layer.computed_value_heads, -1, -1))
        elif self.v_up_proj is not None:
            latent = value if both is None else both.joined()
            attended = attended._replace(values=expand(self.v_up_proj, latent, self.head_dim))
        if self.k_up_proj is not None and absorbing_keys_pays(self.k_up_proj, query, key):
            query = absorb(self.k_up_proj, query)
            attended = attended._replace(keys=key.expand(-1, layer.computed_key_heads, -1, -1))
        elif self.k_up_proj is not None:
            attended = attended._replace(keys=expand(self.k_up_proj, key, self.head_dim))
        return query, attended, absorbed

    @staticmethod
    def _latent_and_keys(own: KeyValues, new_keys: Any, layer: LayerPlan, back: Rotation | None) -> LatentAndKeys:
        """What own values are made of where they read keys; `back` turns the heads of keys back."""
        assert own.keys is not None and own.values is not None
        return LatentAndKeys(own.values, own.keys, new_keys, back, layer.key_columns)

    def _absorbs(self, up: nn.Linear, query: Tensor, key: Tensor, columns: int) -> bool:
        """Whether heads attend to latent values themselves. With dropout their weights do not add up to 1."""
        dropped = self.training and self.config.attention_dropout > 0
        return not dropped and absorbing_pays(up, query, key, columns)

    def _make_norm(self, heads: int) -> nn.Module | None:
        """`qk_norm` of that many heads, each alone or all of them together."""
        if not self.config.qk_norm or not heads:
            return None
        width = heads * self.head_dim if self.config.qk_norm == "width" else self.head_dim
        return make_rms_norm(self.config, width)

    def _split_heads(self, projected: Tensor | None, norm: nn.Module | None, rotation: Rotation | None) -> Any:
        """[batch, positions, width] to [batch, heads, positions, head_dim], normed and rotated."""
        if projected is None:
            return None
        if norm is not None and self.config.qk_norm == "width":
            projected, norm = norm(projected), None
        heads = projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if norm is not None:
            heads = norm(heads)
        if rotation is not None:
            heads = rotate(heads, rotation)
        return autocast(heads)


def latent_head(projected: Any, columns: Columns | None = None, rotation: Rotation | None = None) -> Any:
    """[batch, positions, columns] to the one head that is cached of it, its complex columns rotated."""
    if projected is None:
        return None
    head = projected[:, None]
    if columns is not None and rotation is not None:
        head = rotate(head, rotation_of_columns(rotation, columns))
    return autocast(head)


def slice_heads(tensor: Tensor | None, source: HeadSource) -> Tensor:
    """The heads of `tensor` [batch, heads, ...] that `source` names, as a view."""
    assert tensor is not None
    return tensor[:, source.start : source.stop]


def concatenate_heads(outputs: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Outputs [batch, positions, heads, head_dim] and weights [batch, heads, positions, key positions] of all calls."""
    if len(outputs) == 1:
        return outputs[0]
    heads, weights = zip(*outputs, strict=True)
    return torch.cat(heads, dim=2), None if weights[0] is None else torch.cat(weights, dim=1)


def mix(
    mixer: nn.Module, values: Any, layer: LayerPlan, borrowed: dict[int, KeyValues] | None, hidden_states: Tensor
) -> Tensor:
    """A layer's new values [batch, heads, positions, head_dim] after its mixer; see HeadLayout."""
    lent = None
    if layer.layout.mixed_with is not None:
        assert borrowed is not None
        lent = borrowed[layer.layout.mixed_with].new_values
    return autocast(mixer(values, lent, hidden_states))


def update_cache(past_key_values: Cache | None, layer: LayerPlan, keys: Any, values: Any) -> tuple[Any, Any]:
    """Keys and values with their history, after appending what the plan says is cached."""
    if past_key_values is None or not layer.cached:
        return keys, values
    tensors = {"keys": keys, "values": values}
    first, *others = (tensors[cached.name] for cached in layer.cached)
    # transformers' layers hold two tensors and measure their length by the first.
    histories = past_key_values.update(first, others[0] if others else first[:, :0], layer.layer)
    for cached, history in zip(layer.cached, histories, strict=False):
        tensors[cached.name] = history
    if layer.reuses_keys and len(layer.cached) == 1 and values is not None:
        tensors["values"] = tensors["keys"][:, : layer.computed_value_heads]
    return tensors["keys"], tensors["values"]


def autocast(heads: Tensor) -> Tensor:
    """An identity passes its input on in full precision where a linear layer's output is autocast."""
    device = heads.device.type
    return heads.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else heads


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Attention written out, with its weights; grouped heads are expanded by view.

    query: [batch, heads, positions, head_dim]; key, value: [batch, heads / group size, key positions, head_dim];
    attention_mask: additive. Returns [batch, positions, heads, head_dim] and the weights.
    """
    group_size = query.shape[1] // key.shape[1]
    grouped = query.unflatten(1, (-1, group_size))
    scores = (grouped @ key.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    output = (weights.unflatten(1, (-1, group_size)) @ value.unsqueeze(2)).flatten(1, 2)
    return output.transpose(1, 2), weights
