"""Mixture of experts in place of the MLP: each token goes through the k experts its router scores highest.

Jiang et al. 2024, "Mixtral of Experts", https://arxiv.org/abs/2401.04088; the load-balancing loss is that of Fedus et
al. 2021 (Switch), https://arxiv.org/abs/2101.03961, as `transformers` computes it for Mixtral.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


class Experts(nn.Module):
    """`num_local_experts` gated MLPs; stacked tensors [expert, out, in]."""

    def __init__(self, config):
        super().__init__()
        n, d, ff = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(n, ff, d))
        self.up_proj = nn.Parameter(torch.empty(n, ff, d))
        self.down_proj = nn.Parameter(torch.empty(n, d, ff))
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """tokens: [n, hidden_size]; chosen, weights: [n, k], expert indices and their shares. Returns [n, hidden_size].

        Every expert runs, on an empty selection too: the number of steps does not depend on the routing.
        """
        output = torch.zeros_like(tokens)
        for expert in range(len(self.gate_proj)):
            index, place = torch.where(chosen == expert)
            x = tokens[index]
            hidden = self.activation(F.linear(x, self.gate_proj[expert])) * F.linear(x, self.up_proj[expert])
            share = weights[index, place, None]
            output = output.index_add(0, index, (F.linear(hidden, self.down_proj[expert]) * share).to(output.dtype))
        return output


class MixtureOfExperts(nn.Module):
    """`sum over the k best experts e of share_e expert_e(x)`; the shares are the router's softmax over all experts,
    divided by the sum of the k chosen ones (but where `norm_topk_prob` is false)."""

    kind = "moe"
    routes = True

    def __init__(self, config):
        super().__init__()
        self.top_k, self.normed = config.num_experts_per_tok, config.norm_topk_prob
        self.router = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, positions, hidden_size] -> the same shape, and the router's logits [batch * positions, experts]."""
        tokens = hidden_states.flatten(0, -2)
        logits = self.router(tokens)
        shares = F.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        shares, chosen = shares.topk(self.top_k, dim=-1)
        if self.normed:
            shares = shares / shares.sum(-1, keepdim=True)
        return self.experts(tokens, chosen, shares.to(tokens.dtype)).view_as(hidden_states), logits

    @staticmethod
    def balance_loss(config, router_logits: tuple[Tensor, ...], attention_mask: Any) -> Tensor:
        """`E sum_e f_e p_e` over all layers and tokens: f_e choices of expert e per token, p_e its mean probability.

        router_logits: per layer [batch * positions, experts]; attention_mask: [batch, past + positions], 1 for tokens
        that count; None or of another form: all do.
        """
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, -(len(router_logits[0]) // len(attention_mask)) :]
        else:
            attention_mask = None
        experts, chosen = config.num_local_experts, config.num_experts_per_tok
        return load_balancing_loss_func(router_logits, experts, chosen, attention_mask)  # type: ignore[arg-type,return-value]
