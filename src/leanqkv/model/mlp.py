"""The feed-forward half of a block, by `config.mlp_type`."""

from torch import Tensor, nn
from transformers.activations import ACT2FN


class MLP(nn.Module):
    """`act(x W_up) W_down` (GPT)."""

    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(hidden_states)))


class GatedMLP(MLP):
    """`(act(x W_gate) * x W_up) W_down` (LLaMA's SwiGLU with `hidden_act` "silu"; Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


MLPS = {"mlp": MLP, "gated": GatedMLP}
