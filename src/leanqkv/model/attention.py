"""Self-attention whose keys and values may lie in several layers: query x key/value x output.

`LeanAttention.forward` reads from top to bottom: project, split into heads, cache, attend, project back.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .layers import make_rms_norm
from .layout import HeadSource, LayerPlan
from .position import Rotation, Rotations, rotate, rotation_of
from .registry import ConfigError

# The attention implementation that vLLM sets.
VLLM = "vllm"


class KeyValues(NamedTuple):
    """Keys and values that a layer computed and that later layers may borrow; None for what it does not compute.

    keys, values: [batch, heads, positions, head_dim] with their whole history; they may be the cache's own tensors, so
    they are never changed in place. new_values: those of this call's positions alone, before any mixing or caching.
    Latent keys and values (latent_heads.py) are one head of their latent's width.
    Under MLA (attention_latent.py) `keys` is the rotary key and `values` the latent, one head each.
    """

    keys: Tensor | None
    values: Tensor | None
    new_values: Tensor | None


def attend(
    attention: Any, query: Tensor, key: Tensor, values: Sequence[Tensor], mask: Tensor | None, scaling: float, **kwargs
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention of one group of heads whose values lie in one tensor or in several.

    One call for each tensor of values: copying them into one at every decoding step costs more (P3, appendix B.2).

    Args:
        query: [batch, heads, positions, head_dim]; key: [batch, heads / group size, key positions, head_dim].
        values: of consecutive key heads, each [batch, its heads, key positions, head_dim].

    Returns:
        output [batch, positions, heads, head_dim]; weights [batch, heads, positions, key positions] or None.
    """
    config = attention.config
    attention_function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention)
    dropout = config.attention_dropout if attention.training else 0.0
    group_size = query.shape[1] // key.shape[1]
    outputs, start = [], 0
    for value in values:
        stop = start + value.shape[1]
        heads = query[:, start * group_size : stop * group_size], key[:, start:stop], value
        outputs.append(attention_function(attention, *heads, mask, dropout=dropout, scaling=scaling, **kwargs))
        start = stop
    return concatenate_heads(outputs)


class Attention(nn.Module):
    """Base class of all self-attention. It is built for the first layer that uses its block; how its heads are
    wired, and with which other layers, is in the plan of the layer that is computed with it.

    Inference replaces steps by faster ones that give the same: `project` (inference/joined.py), `attend`
    (inference/attention.py), `rotate` (inference/step.py) and LeanAttention's `project_heads` (inference/layer.py).
    """

    attend = staticmethod(attend)
    rotate = staticmethod(rotate)
    # What `project` gives, in its order: query, key, value and the output's gate.
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "g_proj")

    def __init__(self, config, layer: LayerPlan):
        super().__init__()
        self.config, self.layer_idx = config, layer.layer
        self.head_dim, self.is_causal = config.head_dim, not config.bidirectional
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.query_reads_mlp = layer.query.reads_mlp
        self.q_proj: Any = layer.query.build(config, layer.num_query_heads)

    def project(self, hidden_states: Tensor, mlp_hidden: Tensor | None) -> tuple[Any, ...]:
        """Return what the `projections` make of the input, each [batch, positions, width]; None where there is none."""
        query = self.q_proj(hidden_states, mlp_hidden) if self.query_reads_mlp else self.q_proj(hidden_states)
        others = [getattr(self, name) for name in self.projections[1:]]
        return query, *(None if other is None else other(hidden_states) for other in others)

    def make_output(self, config, layer: LayerPlan) -> None:
        """Make the output projection, and the gate before it where there is one."""
        gate, heads = layer.output_gate, layer.num_query_heads
        self.o_proj: Any = layer.output.build(config, heads)
        self.g_proj: Any = None if gate is None else gate.build(config, heads)

    def project_output(self, heads: Tensor, gate: Tensor | None) -> Tensor:
        """Return what attention adds to the stream, [batch, positions, hidden_size].

        heads: [batch, positions, heads, head_dim]; gate: what the sigmoid is taken of, for every column of them or for
        every head, [batch, positions, width].
        """
        if gate is not None:
            heads = heads * gate.sigmoid().unflatten(-1, (heads.shape[-2], -1))
        return self.o_proj(heads.flatten(-2))


class LeanAttention(Attention):
    """Self-attention with heads of keys and values."""

    kind = "heads"

    def __init__(self, config, layer: LayerPlan):
        super().__init__(config, layer)
        key_heads, value_heads = layer.computed_key_heads, layer.computed_value_heads
        self.k_proj = layer.key.build(config, key_heads) if key_heads else None
        self.v_proj = layer.value.build(config, value_heads) if value_heads else None
        key_columns = key_heads * self.head_dim if layer.key_rank is None else layer.key_rank
        self.k_up_proj: Any = layer.key.build_up(config, key_heads, key_columns)
        self.v_up_proj: Any = layer.value.build_up(config, value_heads, key_columns)
        self.make_output(config, layer)
        self.q_norm = self._make_norm(layer.num_query_heads)
        self.k_norm = self._make_norm(key_heads)
        self.mixer = layer.build_mixer(config)

    def forward(
        self, hidden_states: Tensor, layer: LayerPlan, *, position_embeddings=None, mlp_hidden=None, **kwargs
    ) -> tuple[Tensor, Tensor | None, KeyValues]:
        """Attention of one layer.

        Args:
            hidden_states: [batch, positions, hidden_size], after the block's norm.
            layer: where the heads come from and what is cached.
            position_embeddings: rotary `(cos, sin)` by the name of their parameters, or None without RoPE.
            mlp_hidden: [batch, positions, intermediate_size], of the previous block, for `mlp-query`.
            kwargs: mask, borrowed heads and cache, as `attend_heads` takes them.

        Returns:
            output [batch, positions, hidden_size]; attention weights [batch, heads, positions, key positions] (eager
            attention alone, else None); this layer's own keys and values.
        """
        rotation = rotation_of(layer, position_embeddings)
        query, key, value, gate = self.project_heads(hidden_states, mlp_hidden, rotation)
        output, attention_weights, own = self.attend_heads(query, key, value, layer, hidden_states, rotation, **kwargs)
        return self.project_output(output, gate), attention_weights, own

    def attend_heads(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        layer: LayerPlan,
        hidden_states: Any,
        rotation: Rotation | None,
        attention_mask: Tensor | None = None,
        borrowed: dict[int, KeyValues] | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None, KeyValues]:
        """What `forward` does with what `project_heads` gives: cache and attend; the output is still in heads.

        Args:
            attention_mask: as `make_masks` makes it for the attention implementation in use.
            borrowed: keys and values of the earlier layers that this one borrows from.
            past_key_values: the cache; what this layer computes is appended to it.
        """
        if layer.value.reuses_keys and layer.computed_value_heads:
            value = key[:, : layer.computed_value_heads]

        new_values = value
        if self.mixer is not None:
            value = mix(self.mixer, value, layer, borrowed, hidden_states)
        key, value = update_cache(past_key_values, layer, key, value)
        own = KeyValues(key, value, new_values)

        sources = {**(borrowed or {}), layer.layer: own}
        outputs = []
        for group in layer.groups:
            group_key = slice_heads(sources[group.keys.layer].keys, group.keys)
            group_values = [slice_heads(sources[source.layer].values, source) for source in group.values]
            given = query[:, group.queries], group_key, group_values, attention_mask
            outputs.append(self.attend(self, *given, layer.attention_scale(group.keys.layer), **kwargs))
        output, attention_weights = concatenate_heads(outputs)

        if layer.value.reuses_keys and rotation is not None:
            cos, sin = rotation
            output = self.rotate(output.transpose(1, 2), (cos, -sin)).transpose(1, 2)
        return output, attention_weights, own

    def project_heads(
        self, hidden_states: Tensor, mlp_hidden: Tensor | None, rotation: Rotation | None
    ) -> tuple[Any, Any, Any, Any]:
        """As `project`, but query, key and value are [batch, heads, positions, head_dim], normed and rotated."""
        query, key, value, gate = self.project(hidden_states, mlp_hidden)
        query = self.split_heads(query, self.q_norm, rotation)
        key = self.split_heads(key, self.k_norm, rotation)
        return query, key, self.split_heads(value, None, None), gate

    def _make_norm(self, heads: int) -> nn.Module | None:
        """`qk_norm` of that many heads, each alone or all of them together."""
        if not self.config.qk_norm or not heads:
            return None
        width = heads * self.head_dim if self.config.qk_norm == "width" else self.head_dim
        return make_rms_norm(self.config, width)

    def split_heads(self, projected: Tensor | None, norm: nn.Module | None, rotation: Rotation | None) -> Any:
        """[batch, positions, width] to [batch, heads, positions, head_dim], normed and rotated."""
        if projected is None:
            return None
        if norm is not None and self.config.qk_norm == "width":
            projected, norm = norm(projected), None
        heads = projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if norm is not None:
            heads = norm(heads)
        if rotation is not None:
            heads = self.rotate(heads, rotation)
        return autocast(heads)


class OneCallAttention(LeanAttention):
    """LeanAttention of a layer that borrows nothing, for vLLM without a plugin: one call of the attention interface.

    vLLM's backend for models of transformers reads the source of `forward` to find the call and its scale, and keeps
    one pair of keys and values for each layer. The plugin leanqkv-vllm has neither limit.
    """

    def __init__(self, config, layer: LayerPlan):
        if reason := one_call_clash(config):
            raise ConfigError(f"vLLM cannot run this model without the plugin leanqkv-vllm: {reason}")
        super().__init__(config, layer)
        self.scaling = layer.attention_scale(layer.layer)

    def forward(
        self,
        hidden_states: Tensor,
        layer: LayerPlan,
        position_embeddings: Rotations | None = None,
        attention_mask: Tensor | None = None,
        borrowed: dict[int, KeyValues] | None = None,
        past_key_values: Cache | None = None,
        mlp_hidden: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, KeyValues]:
        """As LeanAttention.forward. The interface keeps a cache, so none is given."""
        rotation = rotation_of(layer, position_embeddings)
        query, key, value, gate = self.project_heads(hidden_states, mlp_hidden, rotation)
        attention_function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        output, weights = attention_function(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        output = output.reshape(*hidden_states.shape[:-1], -1, self.head_dim)  # vLLM's is without a batch
        return self.project_output(output, gate), weights, KeyValues(None, None, None)


def one_call_clash(config) -> str | None:
    """Return why vLLM's backend for models of transformers cannot keep what the plan caches; None: it can."""
    wanted = [(name, config.num_key_value_heads, config.head_dim) for name in ("keys", "values")]
    for layer in config.plan.layers:
        found = [(tensor.name, tensor.num_heads, tensor.head_dim) for tensor in layer.cached]
        if found != wanted or layer.borrowed or layer.layout.mixer is not None:
            others = [part.kind for part in (layer.value, layer.key) if part.kind in ("keys", "latent")]
            what = next(kind for kind in (layer.key_value.kind, *others, "kv_lora_rank") if kind != "projected")
            return f"layer {layer.layer} does not cache one key and one value of its own for each head ({what!r})"
    if config.sliding_window is not None:
        return "sliding_window"
    if config.num_hidden_groups:
        return "several layers share a block, and vLLM counts one layer for each block"
    return None


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
    if layer.value.reuses_keys and len(layer.cached) == 1 and values is not None:
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
