"""query x key/value x output -> the calls into scaled-dot-product attention."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .layout import HeadSource
from .plan import LayerPlan
from .position import rotate
from .registry import Mechanism

# The keys and values, each [batch, heads, positions, head_dim], that a layer computed and others may borrow; None for
# what it does not compute itself.
KeyValues = tuple[Any, Any]


@dataclass(frozen=True)
class HeadGroup:
    """A run of heads whose keys come from one layer and whose values come from one layer: one attention call."""

    queries: slice
    keys: HeadSource
    values: HeadSource


def head_groups(plan: LayerPlan) -> list[HeadGroup]:
    """Cuts a layer's heads where the source of its keys or of its values changes.

    SkipV1Former becomes two groups, the layer's own values and the first layer's, so that no value heads of different
    layers ever have to be copied into one tensor.
    """

    def bounds(sources: tuple[HeadSource, ...]) -> list[int]:
        edges = [0]
        for source in sources:
            edges.append(edges[-1] + source.num_heads)
        return edges

    def part(sources: tuple[HeadSource, ...], start: int, stop: int) -> HeadSource:
        for source, edge in zip(sources, bounds(sources)[:-1], strict=True):
            if edge <= start < edge + source.num_heads:
                offset = source.start - edge
                return HeadSource(source.layer, start + offset, stop + offset)
        raise AssertionError(f"no source for head {start}")

    keys, values = plan.layout.keys, plan.layout.values
    edges = sorted({*bounds(keys), *bounds(values)})
    size = plan.num_query_heads // edges[-1]
    return [
        HeadGroup(slice(start * size, stop * size), part(keys, start, stop), part(values, start, stop))
        for start, stop in pairwise(edges)
    ]


class LeanAttention(nn.Module):
    """Self-attention of one layer, wired as its plan says."""

    def __init__(self, config, plan: LayerPlan):
        super().__init__()
        self.config = config
        self.layer_idx = plan.layer
        self.head_dim = plan.head_dim
        self.scaling = plan.attention_scale
        self.groups = head_groups(plan)
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.is_causal = True

        def projection(mechanism: Mechanism, heads: int) -> nn.Module | None:
            return mechanism.cls(config, heads, mechanism.options) if heads else None

        self.q_proj = projection(plan.query, plan.num_query_heads)
        self.k_proj = projection(plan.key, plan.computed_key_heads)
        self.v_proj = projection(plan.value, plan.computed_value_heads)
        self.o_proj = nn.Linear(
            plan.num_query_heads * plan.head_dim, config.hidden_size, bias=config.attention_output_bias
        )
        self.q_norm = nn.RMSNorm(plan.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(plan.head_dim, eps=config.norm_eps) if config.qk_norm and self.k_proj else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        borrowed: dict[int, KeyValues] | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None, KeyValues]:
        """Attends.

        Args:
            hidden_states: [batch, positions, hidden_size], already normed.
            position_embeddings: rotary `(cos, sin)`, or None without RoPE.
            attention_mask: as `create_causal_mask` makes it for the attention implementation in use.
            borrowed: keys and values, with their whole history, of the layers this one borrows from.
            past_key_values: the cache; what this layer computes is appended to it.

        Returns:
            output [batch, positions, hidden_size]; attention weights [batch, heads, positions, key positions] (eager
            attention alone, else None); this layer's own keys and values with their whole history, not to be changed
            in place: they may be the cache's own tensors.
        """
        batch, positions, _ = hidden_states.shape
        queries: Any = self._heads(self.q_proj, self.q_norm, hidden_states, position_embeddings)
        keys = self._heads(self.k_proj, self.k_norm, hidden_states, position_embeddings)
        values = self._heads(self.v_proj, None, hidden_states, None)
        if past_key_values is not None and keys is not None:
            # A layer without values of its own stores keys and zero value heads.
            stored = values if values is not None else keys[:, :0]
            keys, stored = past_key_values.update(keys, stored, self.layer_idx)
            values = stored if values is not None else None
        sources = {**(borrowed or {}), self.layer_idx: (keys, values)}

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        outputs, weights = [], []
        for group in self.groups:
            output, weight = attend(
                self,
                queries[:, group.queries],
                sources[group.keys.layer][0][:, group.keys.start : group.keys.stop],
                sources[group.values.layer][1][:, group.values.start : group.values.stop],
                attention_mask,
                dropout=self.config.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                **kwargs,
            )
            outputs.append(output)
            weights.append(weight)
        output = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
        output = self.o_proj(output.reshape(batch, positions, -1))
        return output, torch.cat(weights, dim=1) if weights[0] is not None else None, (keys, values)

    def _heads(self, projection, norm, hidden_states, position_embeddings) -> Tensor | None:
        """Projects and cuts into heads: [batch, heads, positions, head_dim], normed and rotated where asked."""
        if projection is None:
            return None
        heads = projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if norm is not None:
            heads = norm(heads)
        if position_embeddings is not None:
            heads = rotate(heads, position_embeddings)
        # An identity passes its input on in full precision where a linear layer's output is autocast.
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
