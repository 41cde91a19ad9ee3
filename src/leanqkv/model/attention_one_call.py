"""Self-attention for vLLM without a plugin: one call of the attention interface in `forward`.

vLLM's backend for models of transformers reads the source of `forward` to find the call and its scale, and keeps one
pair of keys and values for each layer. The plugin leanqkv-vllm has neither limit.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import KeyValues, LeanAttention, eager_attention
from .plan import LayerPlan
from .position import Rotations, rotation_of
from .registry import ConfigError

# The attention implementation that vLLM sets.
VLLM = "vllm"


def clash(config) -> str | None:
    """Return why vLLM's backend for models of transformers cannot keep what the plan caches; None: it can."""
    wanted = [(name, config.num_key_value_heads, config.head_dim) for name in ("keys", "values")]
    for layer in config.plan.layers:
        found = [(tensor.name, tensor.num_heads, tensor.head_dim) for tensor in layer.cached]
        if found != wanted or layer.borrowed or layer.layout.mixer is not None:
            kinds = (layer.key_value.kind, layer.value.kind, layer.key.kind, "kv_lora_rank")
            what = next(kind for kind in kinds if kind not in ("projected", "linear"))
            return f"layer {layer.layer} does not cache one key and one value of its own for each head ({what!r})"
    if config.sliding_window is not None:
        return "sliding_window"
    if config.num_hidden_groups:
        return "several layers share a block, and vLLM counts one layer for each block"
    return None


class OneCallAttention(LeanAttention):
    """LeanAttention of a layer that borrows nothing."""

    def __init__(self, config, weights):
        if reason := clash(config):
            raise ConfigError(f"vLLM cannot run this model without the plugin leanqkv-vllm: {reason}")
        super().__init__(config, weights)
        self.scaling = config.plan.layers[weights.layer].attention_scale(weights.layer)

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
        query, key, value = self.project(hidden_states, mlp_hidden)
        rotation = rotation_of(layer, position_embeddings)
        query = self._split_heads(query, self.q_norm, rotation)
        key = self._split_heads(key, self.k_norm, rotation)
        value = self._split_heads(value, None, None)
        attention_function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        output, weights = attention_function(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        output = output.reshape(*hidden_states.shape[:-1], -1)  # vLLM's is without a batch
        return self.o_proj(output), weights, KeyValues(None, None, None)
