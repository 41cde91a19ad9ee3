"""Activations, norms, the linear map, the MLP and positions; `x` is [positions, features]."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def gelu(x: Tensor) -> Tensor:
    """x P(N(0, 1) <= x)"""
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x)"""
    return x / (1 + (-x).exp())


def relu(x: Tensor) -> Tensor:
    """max(x, 0)"""
    return x * (x > 0)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2"""
    return relu(x) * relu(x)


ACTIVATIONS = {"gelu": gelu, "silu": silu, "relu": relu, "relu2": relu2}


def linear(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    """x W + b, without b where the model has none"""
    y = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(biased variance + eps) * w + b"""
    centered = x - x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (centered * centered).sum(-1, keepdim=True) / x.shape[-1]
    y = centered / (variance + eps) ** 0.5 * weight
    return y if bias is None else y + bias


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w"""
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight


def block_norm(x: Tensor, tensors: Tensors, config: Any, name: str) -> Tensor:
    """The norm before attention, before the MLP and at the end."""
    if config.norm_type == "rmsnorm":
        return rmsnorm(x, tensors[f"{name}.weight"], config.norm_eps)
    return layernorm(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), config.norm_eps)


def mlp(x: Tensor, tensors: Tensors, config: Any, name: str) -> Tensor:
    """act(x W_up) W_down, or gated: (act(x W_gate) * (x W_up)) W_down"""
    act = ACTIVATIONS[config.hidden_act]
    up = linear(x, tensors, f"{name}.up_proj")
    inner = act(linear(x, tensors, f"{name}.gate_proj")) * up if config.mlp_type == "gated" else act(up)
    return linear(inner, tensors, f"{name}.down_proj")


def rotate(x: Tensor, position: int, config: Any) -> Tensor:
    """Rotary position of one head's vector: with n = head_dim * partial_rotary_factor, the pair (i, i + n/2) turns by
    the angle position * theta^(-2i/n); dimensions from n on stay."""
    n = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    theta = config.rope_parameters["rope_theta"]
    turned = list(x)
    for i in range(n // 2):
        angle = torch.tensor(position * theta ** (-2 * i / n), dtype=x.dtype)
        a, b = x[i], x[i + n // 2]
        turned[i] = a * angle.cos() - b * angle.sin()
        turned[i + n // 2] = b * angle.cos() + a * angle.sin()
    return torch.stack(turned)
