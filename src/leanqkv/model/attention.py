"""query x key/value x output -> the calls into scaled-dot-product attention."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .fused import Joined, project
from .layout import HeadSource
from .plan import LayerPlan
from .position import rotate


class KeyValues(NamedTuple):
    """What a layer computed and others may borrow; None for what it does not compute.

    keys, values: [batch, heads, positions, head_dim] with their whole history; they may be the cache's own tensors, so
    they are never changed in place. new_values: those of this call's positions alone, before any mixing or caching.
    Under MLA (attention_latent.py) `keys` is the rotary key and `values` the latent, [batch, positions, columns].
    """

    keys: Tensor | None
    values: Tensor | None
    new_values: Tensor | None


class JoinableInputs(nn.Module):
    """Attention whose first products may be one.

    joined: what `fused.join` made of `joinable_inputs` for inference alone: it does not follow the weights.
    """

    config: Any
    joined: Joined | None = None

    def input_projections(self) -> list[nn.Module | None]:
        """The projections of a layer's input, the query first."""
        raise NotImplementedError

    def joinable_inputs(self) -> list[nn.Module | None]:
        """Those of this layer's own input, which that of a query made from the MLP below is not."""
        projections = self.input_projections()
        return projections[1:] if getattr(projections[0], "needs_mlp_hidden", False) else projections

    def project_inputs(self, hidden_states: Tensor, mlp_hidden: Tensor | None) -> list[Tensor | None]:
        """What `input_projections` give, in order; None for those that are not there."""
        query, *_ = projections = self.input_projections()
        joinable = self.joinable_inputs()
        projected = project(joinable, hidden_states, self.config.fuse_projections, self.joined)
        if len(joinable) == len(projections):
            return projected
        assert query is not None
        return [query(hidden_states, mlp_hidden), *projected]


class LeanAttention(JoinableInputs):
    """Self-attention with heads of keys and values, wired as the plan of the layer that calls it says."""

    def __init__(self, config, plan: LayerPlan):
        super().__init__()
        self.config = config
        self.layer_idx = plan.layer
        self.head_dim = plan.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.is_causal = not config.bidirectional
        self.q_proj = plan.query.cls(config, plan.num_query_heads, plan.query.options)
        self.k_proj = self.v_proj = None
        if plan.computed_key_heads:
            self.k_proj = plan.key.cls(config, plan.computed_key_heads, plan.key.options)
        if plan.computed_value_heads and not plan.reuses_keys:
            self.v_proj = plan.value.cls(config, plan.computed_value_heads, plan.value.options)
        self.o_proj = plan.output.cls(config, plan.num_query_heads, plan.output.options)
        self.q_norm = nn.RMSNorm(plan.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(plan.head_dim, eps=config.norm_eps) if config.qk_norm and self.k_proj else None
        self.mixer = make_mixer(config, plan)

    def forward(
        self,
        hidden_states: Tensor,
        plan: LayerPlan,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        borrowed: dict[int, KeyValues] | None = None,
        past_key_values: Cache | None = None,
        mlp_hidden: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None, KeyValues]:
        """Attends.

        Args:
            hidden_states: [batch, positions, hidden_size], already normed.
            plan: of the layer that this call is; blocks that share weights differ in it.
            position_embeddings: rotary `(cos, sin)`, or None without RoPE.
            attention_mask: as `masks.py` makes it for the attention implementation in use.
            borrowed: what the layers computed that this one borrows from.
            past_key_values: the cache; what this layer computes is appended to it.
            mlp_hidden: [batch, positions, intermediate_size], of the block before, for the query that is made from it.

        Returns:
            output [batch, positions, hidden_size]; attention weights [batch, heads, positions, key positions] (eager
            attention alone, else None); this layer's own keys and values.
        """
        borrowed = borrowed or {}
        projected = self.project_inputs(hidden_states, mlp_hidden)
        queries: Any = self._heads(projected[0], self.q_norm, position_embeddings)
        keys = self._heads(projected[1], self.k_norm, position_embeddings)
        values = self._heads(projected[2], None, None)
        if plan.reuses_keys and plan.computed_value_heads:
            assert keys is not None
            values = keys[:, : plan.computed_value_heads]
        new_values = values
        if self.mixer is not None:
            values = mix(self.mixer, values, plan, borrowed, hidden_states)
            if plan.layout.mixed_with is None:
                new_values = values
        keys, values = update_cache(past_key_values, plan, keys, values)
        own = KeyValues(keys, values, new_values)
        sources = {**borrowed, plan.layer: own}

        found = [
            self._attend(
                queries[:, group.queries],
                slice_heads(sources[group.keys.layer].keys, group.keys),
                [slice_heads(sources[source.layer].values, source) for source in group.values],
                attention_mask,
                plan.attention_scale(group.keys.layer),
                **kwargs,
            )
            for group in plan.groups
        ]
        output, weights = _joined_heads(found)
        if plan.reuses_keys and position_embeddings is not None:
            cos, sin = position_embeddings
            output = rotate(output.transpose(1, 2), (cos, -sin)).transpose(1, 2)
        output = self.o_proj(output.flatten(2))
        return output, weights, own

    def _attend(
        self, query: Tensor, key: Tensor, values: list[Tensor], mask: Tensor | None, scaling: float, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of heads whose values lie in one or several tensors: one call for each of these, unless the
        attention function has a `split_values` that takes them all, and does not return None."""
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if len(values) > 1 and hasattr(attend, "split_values"):
            output = attend.split_values(query, key, values, mask, scaling)
            if output is not None:
                return output, None
        size = query.shape[1] // key.shape[1]
        dropout = self.config.attention_dropout if self.training else 0.0
        found, start = [], 0
        for value in values:
            stop = start + value.shape[1]
            heads = query[:, start * size : stop * size], key[:, start:stop]
            found.append(attend(self, *heads, value, mask, dropout=dropout, scaling=scaling, **kwargs))
            start = stop
        return _joined_heads(found)

    def input_projections(self) -> list[nn.Module | None]:
        return [self.q_proj, self.k_proj, self.v_proj]

    def _heads(self, projected: Tensor | None, norm, position_embeddings) -> Tensor | None:
        """[batch, positions, width] cut into heads, [batch, heads, positions, head_dim], normed and rotated."""
        if projected is None:
            return None
        heads = projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if norm is not None:
            heads = norm(heads)
        if position_embeddings is not None:
            heads = rotate(heads, position_embeddings)
        return autocast(heads)


def slice_heads(tensor: Tensor | None, source: HeadSource) -> Tensor:
    assert tensor is not None
    return tensor[:, source.start : source.stop]


def _joined_heads(found: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Outputs [batch, positions, heads, head_dim] and weights [batch, heads, positions, key positions] of all calls."""
    if len(found) == 1:
        return found[0]
    outputs, weights = zip(*found, strict=True)
    return torch.cat(outputs, dim=2), None if weights[0] is None else torch.cat(weights, dim=1)


def make_mixer(config, plan: LayerPlan) -> nn.Module | None:
    return plan.layout.mixer(config, plan.key_value.options) if plan.layout.mixer is not None else None


def mix(mixer: nn.Module, values, plan: LayerPlan, borrowed: dict[int, KeyValues], hidden_states: Tensor) -> Tensor:
    """Passes a layer's new values, [batch, heads, positions, head_dim], through its mixer; see HeadLayout."""
    lender = plan.layout.mixed_with
    lent = borrowed[lender].new_values if lender is not None else None
    return autocast(mixer(values, lent, hidden_states))


def update_cache(past_key_values: Cache | None, plan: LayerPlan, keys: Any, values: Any) -> tuple[Any, Any]:
    """Appends what the plan says is cached and returns keys and values with their history."""
    if past_key_values is None or not plan.cached:
        return keys, values
    tensors = {"keys": keys, "values": values}
    first, *others = (tensors[cached.name] for cached in plan.cached)
    # transformers' layers hold two tensors and measure their length by the first.
    histories = past_key_values.update(first, others[0] if others else first[:, :0], plan.layer)
    for cached, history in zip(plan.cached, histories, strict=False):
        tensors[cached.name] = history
    if plan.reuses_keys and len(plan.cached) == 1 and values is not None:
        tensors["values"] = tensors["keys"][:, : plan.computed_value_heads]
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

    query: [batch, heads, positions, head_dim]; key, value: [batch, heads / group, key positions, head_dim];
    attention_mask: additive. Returns [batch, positions, heads, head_dim] and the weights.
    """
    group = query.shape[1] // key.shape[1]
    grouped = query.unflatten(1, (-1, group))
    scores = (grouped @ key.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    output = (weights.unflatten(1, (-1, group)) @ value.unsqueeze(2)).flatten(1, 2)
    return output.transpose(1, 2), weights
