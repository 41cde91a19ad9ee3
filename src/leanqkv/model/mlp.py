"""The feed-forward half of a block, by `config.mlp_type`.

Every kind returns its output and an auxiliary tensor, `mlp_aux` in block.py: the hidden activations of an MLP, which
the next layer's query may read, or the router's logits of a mixture of experts, which its loss needs.
"""

from torch import Tensor, nn
from transformers.activations import ACT2FN

from .moe import MixtureOfExperts


def activation(name: str) -> nn.Module:
    """transformers' activation of that name; GPT-2's "gelu_new" as the one operator that it is, not as eight."""
    return ACT2FN["gelu_pytorch_tanh" if name == "gelu_new" else name]


class MLP(nn.Module):
    """`act(x W_up) W_down` (GPT)."""

    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = activation(config.hidden_act)

    def hidden(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.up_proj(hidden_states))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[..., hidden_size] -> the same shape, and the hidden activations [..., intermediate_size]."""
        hidden = self.hidden(hidden_states)
        return self.down_proj(hidden), hidden


class GatedMLP(MLP):
    """`(act(x W_gate) * x W_up) W_down` (LLaMA's SwiGLU with `hidden_act` "silu"; Shazeer 2020, arXiv 2002.05202).

    As in LeanAttention, inference may replace `project`.
    """

    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def hidden(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.project(hidden_states)
        return self.activation(gate) * up

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up projection, each [..., intermediate_size]."""
        return self.gate_proj(hidden_states), self.up_proj(hidden_states)


MLPS = {"mlp": MLP, "gated": GatedMLP, "moe": MixtureOfExperts}
