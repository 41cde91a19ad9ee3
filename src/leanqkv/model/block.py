"""One transformer block: attention and MLP, serial or parallel, with or without skips and norms."""

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import KeyValues, LeanAttention
from .attention_latent import LatentAttention
from .attention_one_call import VLLM, OneCallAttention
from .mlp import MLPS
from .norm import make_norm
from .plan import BlockWeights, LayerPlan
from .position import Rotations


class LeanBlock(GradientCheckpointingLayer):
    """Serial: `Y = [X +] Attn(norm(X))`, `Z = [Y +] MLP(norm(Y))`. Parallel: `Z = [X +] Attn(norm(X)) + MLP(norm(X))`.

    P1 section 4 and P4 sections 1-2 name the shapes: skipless, attention skip alone, parallel. The skips are those in
    brackets; a parallel block has one. `residual_multiplier` scales what a skip is added to, or stands in its place.
    Norms after a sublayer (`norm_placement`) act on its output: OLMo 2 (https://arxiv.org/abs/2501.00656) and, with
    those before it, Gemma 3 (https://arxiv.org/abs/2503.19786).
    """

    def __init__(self, config, weights: BlockWeights):
        super().__init__()
        self.config = config
        before, after = ({"both", place} for place in ("before", "after"))
        self.input_layernorm = self._norm(before)
        attention = LatentAttention if weights.latent else LeanAttention
        if config._attn_implementation == VLLM:
            attention = OneCallAttention
        self.self_attn = attention(config, weights)
        if config.block_type != "parallel_shared_norm":
            self.post_attention_layernorm = self._norm(before)
        self.attention_output_layernorm, self.mlp_output_layernorm = self._norm(after), self._norm(after)
        self.mlp = MLPS[config.mlp_type](config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def _norm(self, placements: set[str]) -> nn.Module:
        """A norm of the stream where the configuration places one."""
        config = self.config
        return make_norm(config, config.hidden_size) if config.norm_placement in placements else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        layer: LayerPlan,
        attention_mask: Tensor | None = None,
        position_embeddings: Rotations | None = None,
        borrowed: dict[int, KeyValues] | None = None,
        past_key_values: Cache | None = None,
        mlp_hidden: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, KeyValues, Tensor]:
        """One layer; arguments as LeanAttention.forward.

        Returns:
            output [batch, positions, hidden_size]; the layer's own keys and values (see LeanAttention); what the MLP
            hands out beside its output (see mlp.py).
        """
        normed = self.input_layernorm(hidden_states)
        attended, _, key_values = self.self_attn(
            normed,
            layer,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            borrowed=borrowed,
            past_key_values=past_key_values,
            mlp_hidden=mlp_hidden,
            **kwargs,
        )
        attended = self._scaled(self.attention_output_layernorm(attended))
        if self.config.block_type == "serial":
            hidden_states = hidden_states + attended if self.config.attention_skip else attended
            output, mlp_aux = self.mlp(self.post_attention_layernorm(hidden_states))
            output = self._scaled(self.mlp_output_layernorm(output))
            return hidden_states + output if self.config.mlp_skip else output, key_values, mlp_aux
        if self.config.block_type == "parallel":
            normed = self.post_attention_layernorm(hidden_states)
        output, mlp_aux = self.mlp(normed)
        output = attended + self._scaled(output)
        return hidden_states + output if self.config.mlp_skip else output, key_values, mlp_aux

    def _scaled(self, output: Tensor) -> Tensor:
        """What a sublayer adds to the stream."""
        output, factor = self.dropout(output), self.config.residual_multiplier
        return output if factor == 1 else output * factor
