"""Multi-head latent attention (MLA): keys and values are made from one narrow latent, which alone is cached.

`c = x W_dkv`, `k_h = c W_uk,h`, `v_h = c W_uv,h`, and beside them a rotary key `k_R = RoPE(x W_kr)` that all heads
share; scores `(q_h . k_h + q_R,h . k_R) / sqrt(head_dim + rope_dim)`. DeepSeek-AI 2024, "DeepSeek-V2",
https://arxiv.org/abs/2405.04434, section 2.1; Wu et al. 2025 (P3), section 5.2 and appendix B.2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .attention import Attention, KeyValues, autocast, mix
from .latent import Absorbing, absorbing_pays, expand
from .layout import LatentShape, LayerPlan
from .position import Rotation, Rotations, rotation_of


def attend_to_latent(
    attention: Any,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor | None]:
    """Attention of all heads to one key and one value that lie in pieces, which are not joined.

    Args:
        queries: columns of the query, [batch, heads, positions, columns], of each of `keys`.
        keys, values: columns of the key and of the value, each [batch, 1, key positions, columns].

    Returns:
        output [batch, positions, heads, columns of all values]; weights [batch, heads, positions, key positions].
    """
    heads, t = queries[0].shape[1:3]
    # Every head is one more query. Not query @ key^T: on a CPU that takes several times as long in bfloat16.
    products = (key[:, 0] @ query.flatten(1, 2).mT for query, key in zip(queries, keys, strict=True))
    scores: Any = sum(products)
    scores = scores.mT.contiguous().unflatten(1, (heads, t)) * scaling
    if mask is not None:
        hidden = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    weights = F.dropout(weights, attention.config.attention_dropout, attention.training)
    output = torch.cat([weights.flatten(1, 2) @ value[:, 0] for value in values], dim=-1)
    return output.unflatten(1, (heads, t)).transpose(1, 2), weights


class LatentAttention(Absorbing, Attention):
    """MLA of one layer: a latent that its keys and its values are both made of, expanded or absorbed (latent.py).

    The latent of a layer may come in pieces from several layers (SkipV1-MLA); the absorbed form never joins them.
    Inference replaces `attend_to_latent` too (inference/attention.py).
    """

    kind = "latent"
    attend_to_latent = staticmethod(attend_to_latent)
    # Query, rotary query, rotary key, latent and the output's gate.
    projections = ("q_proj", "q_rope_proj", "k_rope_proj", "kv_down_proj", "g_proj")

    def __init__(self, config, layer: LayerPlan):
        super().__init__(config, layer)
        assert layer.latent is not None
        self.latent: LatentShape = layer.latent
        self.num_heads, self.num_key_value_groups = layer.num_query_heads, 1
        d, bias, rope_dim = config.hidden_size, config.attention_bias, self.latent.rope_dim
        columns, width = layer.computed_value_heads, self.num_heads * self.head_dim
        self.q_rope_proj = nn.Linear(d, self.num_heads * rope_dim, bias=bias) if rope_dim else None
        self.k_rope_proj = nn.Linear(d, rope_dim, bias=bias) if layer.computed_key_heads else None
        self.kv_down_proj = nn.Linear(d, columns, bias=bias) if columns else None
        self.k_up_proj = nn.Linear(self.latent.rank, width, bias=False)
        self.v_up_proj = nn.Linear(self.latent.rank, width, bias=False)
        self.make_output(config, layer)
        self.mixer = layer.build_mixer(config)

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
        """Attention of one layer, as LeanAttention.forward; this layer's own rotary key [batch, 1, positions, rope_dim]
        and latent [batch, 1, positions, columns] take the places of keys and values."""
        query, query_rope, key_rope, latent, gate = self.project(hidden_states, mlp_hidden)
        query = autocast(query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        rotation = rotation_of(layer, position_embeddings)
        query_rope, key_rope = (self._rotated(x, rotation) for x in (query_rope, key_rope))
        # A mixer, and a layer that mixes this one's values in, see heads: each latent column is one, of width 1.
        new_values = None if latent is None else latent.transpose(1, 2)[..., None]
        if self.mixer is not None:
            latent = mix(self.mixer, new_values, layer, borrowed, hidden_states).squeeze(-1).transpose(1, 2)[:, None]
        elif latent is not None:
            latent = autocast(latent)[:, None]
        key_rope, latent = self._update_cache(past_key_values, layer, key_rope, latent)
        own = KeyValues(key_rope, latent, new_values)

        sources = {**(borrowed or {}), layer.layer: own}
        pieces: list[Any] = [sources[s.layer].values[..., s.start : s.stop] for s in layer.layout.values]  # type: ignore[index]
        key_rope = sources[layer.layout.keys[0].layer].keys if layer.layout.keys else None
        form = self._absorbed if self._absorbing_pays(query, pieces, attention_mask) else self._expanded
        scaling = layer.attention_scale(layer.layer)
        output, weights = form(query, query_rope, pieces, key_rope, attention_mask, scaling, **kwargs)
        return self.project_output(output, gate), weights, own

    def _rotated(self, projected: Tensor | None, rotation: Rotation | None) -> Tensor | None:
        if projected is None:
            return None
        assert rotation is not None
        heads = projected.unflatten(-1, (-1, self.latent.rope_dim)).transpose(1, 2)
        return autocast(self.rotate(heads, rotation))

    def _update_cache(
        self, past_key_values: Cache | None, layer: LayerPlan, key_rope: Any, latent: Any
    ) -> tuple[Any, Any]:
        """Rotary key and latent with their history; the cache holds the two side by side as one head."""
        if past_key_values is None or not layer.cached:
            return key_rope, latent
        columns = 0 if latent is None else latent.shape[-1]
        parts = [part for part in (latent, key_rope) if part is not None]
        new = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        history, _ = past_key_values.update(new, new[:, :0], layer.layer)
        return history[..., columns:] if key_rope is not None else None, history[..., :columns] if columns else None

    def _absorbing_pays(self, query: Tensor, pieces: list[Tensor], mask: Any) -> bool:
        """Whether the absorbed form takes fewer multiplications, and its mask is known."""
        readable = isinstance(mask, Tensor) or (mask is None and query.shape[2] == 1)  # none may mean a causal one
        size = query, pieces[0].shape[2], self.latent.rank
        return readable and absorbing_pays(self.k_up_proj, *size) and absorbing_pays(self.v_up_proj, *size)

    def _expanded(self, query, query_rope, pieces, key_rope, mask, scaling: float, **kwargs):
        latent = torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]
        key, value = (expand(up, latent[:, 0], self.head_dim) for up in (self.k_up_proj, self.v_up_proj))
        if query_rope is not None:
            query = torch.cat((query, query_rope), dim=-1)
            key = torch.cat((key, key_rope.expand(-1, self.num_heads, -1, -1)), dim=-1)
        return self.attend(self, query, key, [value], mask, scaling, **kwargs)

    def _absorbed(self, query, query_rope, pieces, key_rope, mask, scaling: float, **kwargs):
        columns = [piece.shape[-1] for piece in pieces]
        queries, keys = [*self.absorb(query).split(columns, dim=-1)], pieces
        if query_rope is not None:
            queries, keys = [*queries, query_rope], [*keys, key_rope]
        latent, weights = self.attend_to_latent(self, queries, keys, pieces, mask, scaling)
        return self.restore(latent), weights if self.config._attn_implementation == "eager" else None
