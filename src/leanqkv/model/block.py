"""One transformer block: pre-norm, attention, MLP, each with its skip connection."""

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import KeyValues, LeanAttention
from .mlp import MLPS
from .norm import make_norm
from .plan import LayerPlan


class LeanBlock(GradientCheckpointingLayer):
    """`Y = X + Attn(norm(X))`, `Z = Y + MLP(norm(Y))`."""

    def __init__(self, config, plan: LayerPlan):
        super().__init__()
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.self_attn = LeanAttention(config, plan)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.mlp = MLPS[config.mlp_type](config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        borrowed: dict[int, KeyValues] | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, KeyValues]:
        """The block's output [batch, positions, hidden_size] and its own keys and values (see LeanAttention)."""
        attended, _, key_values = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            borrowed=borrowed,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states))), key_values
