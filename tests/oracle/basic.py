"""Activations, norms, the linear map and rotary positions; `x` is [positions, features]."""

from collections.abc import Mapping
from functools import cache
from math import cos, sin
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Head = Tensor  # [positions, head_dim]


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


def softmax(scores: Tensor) -> Tensor:
    """e^s / sum e^s over one row"""
    weights = (scores - scores.max().detach()).exp()
    return weights / weights.sum()


def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(biased variance + eps) * w + b"""
    centered = x - x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (centered * centered).sum(-1, keepdim=True) / x.shape[-1]
    y = centered / (variance + eps) ** 0.5 * weight
    return y if bias is None else y + bias


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w"""
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight


def dyt(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """w * tanh(alpha x) + b, with one alpha"""
    y = weight * (alpha * x).tanh()
    return y if bias is None else y + bias


def block_norm(x: Tensor, tensors: Tensors, config: Any, name: str) -> Tensor:
    """The norm before attention, before the MLP and at the end; "none" is the identity."""
    if config.norm_type == "none":
        return x
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    if config.norm_type == "rmsnorm":
        return rmsnorm(x, weight, config.norm_eps)
    if config.norm_type == "dyt":
        return dyt(x, tensors[f"{name}.alpha"], weight, bias)
    return layernorm(x, weight, bias, config.norm_eps)


@cache
def rotation(position: int, size: int, n: int, theta: float) -> Tensor:
    """The matrix of a rotary position: among the first n of `size` dimensions the pair (i, i + n/2) turns by the angle
    position * theta^(-2i/n); dimensions from n on stay. A negative position turns back."""
    matrix = [[float(row == column) for column in range(size)] for row in range(size)]
    for i in range(n // 2):
        j, angle = i + n // 2, position * theta ** (-2 * i / n)
        matrix[i][i], matrix[i][j] = cos(angle), -sin(angle)
        matrix[j][i], matrix[j][j] = sin(angle), cos(angle)
    return torch.tensor(matrix, dtype=torch.float64)


def rotate(head: Head, n: int, theta: float, direction: int = 1) -> Head:
    """The vector at every position turned by that position, or back with the direction -1."""
    return torch.stack([rotation(direction * position, len(x), n, theta) @ x for position, x in enumerate(head)])
