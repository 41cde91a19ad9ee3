"""The MLP, dense or a mixture of experts; `x` is [positions, features]."""

from typing import Any

import torch
from torch import Tensor

from .basic import ACTIVATIONS, Tensors, linear, softmax

Routed = tuple[Tensor, list[int]]  # one token's router probabilities and the experts it went to


def mlp(x: Tensor, tensors: Tensors, config: Any, name: str) -> tuple[Tensor, Tensor]:
    """act(x W_up) W_down, or gated: (act(x W_gate) * (x W_up)) W_down; also what enters W_down"""
    act = ACTIVATIONS[config.hidden_act]
    up = linear(x, tensors, f"{name}.up_proj")
    inner = act(linear(x, tensors, f"{name}.gate_proj")) * up if config.mlp_type == "gated" else act(up)
    return linear(inner, tensors, f"{name}.down_proj"), inner


def expert(x: Tensor, tensors: Tensors, config: Any, name: str, e: int) -> Tensor:
    """(act(x G_e) * (x U_e)) D_e for one token"""
    gate, up, down = (tensors[f"{name}.experts.{part}_proj"][e] for part in ("gate", "up", "down"))
    return down @ (ACTIVATIONS[config.hidden_act](gate @ x) * (up @ x))


def mixture(x: Tensor, tensors: Tensors, config: Any, name: str) -> tuple[Tensor, list[Routed]]:
    """Every token: p = softmax(x W_router); the k experts of the largest p, sum_e p_e / (sum of the k p) expert_e(x);
    without norm_topk_prob undivided"""
    rows, routed = [], []
    for token in x:
        p = softmax(tensors[f"{name}.router.weight"] @ token)
        ranked = sorted(range(config.num_local_experts), key=lambda e, p=p: -p[e].item())
        chosen = ranked[: config.num_experts_per_tok]
        total = sum(p[e] for e in chosen) if config.norm_topk_prob else 1
        rows.append(sum(p[e] / total * expert(token, tensors, config, name, e) for e in chosen))
        routed.append((p, chosen))
    return torch.stack(rows), routed
