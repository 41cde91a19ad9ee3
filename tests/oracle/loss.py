"""The losses of a batch."""

from typing import Any

import torch
from torch import Tensor

from .basic import Tensors
from .feedforward import Routed
from .model import sequence


def cross_entropy(logits: Tensor, target: int) -> Tensor:
    """-log softmax(logits)[target]"""
    return (logits - logits.max().detach()).exp().sum().log() + logits.max().detach() - logits[target]


def load_balancing(routed: list[Routed], experts: int) -> Tensor:
    """Switch Transformer, equations 4-6, as Mixtral takes it, over the tokens of all layers together:
    E sum_e f_e P_e, f_e the number of tokens sent to e over the number of tokens, P_e the mean of p_e"""
    loss = torch.zeros((), dtype=torch.float64)
    for e in range(experts):
        f = sum(e in chosen for _, chosen in routed) / len(routed)
        loss = loss + f * sum(p[e] for p, _ in routed) / len(routed)
    return experts * loss


def loss(
    tensors: Tensors,
    config: Any,
    ids: list[list[int]],
    labels: list[list[int]],
    prefixes: list[list[int] | None],
) -> Tensor:
    """The mean cross-entropy of all labels that are not -100, causal: logits at t against the label at t + 1, masked:
    at t; with experts, coefficient * load balancing on top. A row is as long as its sequence, without padding."""
    shift = 0 if config.task == "masked_lm" else 1
    entropies, routed = [], []
    for row, row_labels, prefix in zip(ids, labels, prefixes, strict=True):
        found, memory = sequence(tensors, config, row, prefix)
        routed += memory.routed
        for position in range(len(row) - shift):
            if (target := row_labels[position + shift]) != -100:
                entropies.append(cross_entropy(found[position], target))
    mean = sum(entropies) / len(entropies)
    if config.mlp_type != "moe":
        return mean
    return mean + config.router_aux_loss_coef * load_balancing(routed, config.num_local_experts)
