"""Normalisation layers, by `config.norm_type`.

LayerNorm: https://arxiv.org/abs/1607.06450; RMSNorm: https://arxiv.org/abs/1910.07467; DyT: Zhu et al. 2025,
"Transformers without Normalization", https://arxiv.org/abs/2503.10622
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DynamicTanh(nn.Module):
    """DyT: `weight * tanh(alpha x) + bias`, alpha one learned number that starts at 1/2."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def initial_values(self) -> dict[str, float]:
        return {"alpha": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * torch.tanh(self.alpha * x)
        return y if self.bias is None else y + self.bias


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm times `offset + weight`, added in float32 or wider, as Gemma computes it: a narrow sum loses digits."""

    def __init__(self, width: int, eps: float, offset: float):
        self.offset = offset
        super().__init__(width, eps=eps)

    def initial_values(self) -> dict[str, float]:
        return {"weight": 1.0 - self.offset}

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(torch.promote_types(self.weight.dtype, wide)) + self.offset
        return F.rms_norm(x.to(weight.dtype), self.normalized_shape, weight, self.eps).to(x.dtype)


def make_rms_norm(config, width: int) -> nn.RMSNorm:
    """The RMSNorm of `width` features, with the configuration's `norm_eps` and `norm_offset`."""
    if config.norm_offset:
        return OffsetRMSNorm(width, config.norm_eps, config.norm_offset)
    return nn.RMSNorm(width, eps=config.norm_eps)


def make_norm(config, width: int) -> nn.Module:
    """The norm of a stream of `width` features: LayerNorm or DyT (with or without bias), RMSNorm, or none."""
    if config.norm_type == "layernorm":
        return nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
    if config.norm_type == "rmsnorm":
        return make_rms_norm(config, width)
    return DynamicTanh(width, config.norm_bias) if config.norm_type == "dyt" else nn.Identity()
