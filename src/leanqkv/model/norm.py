"""Normalisation layers, by `config.norm_type`."""

from torch import nn


def make_norm(config, width: int) -> nn.Module:
    """The norm of one residual stream of `width` features: LayerNorm (with or without bias) or RMSNorm."""
    if config.norm_type == "layernorm":
        return nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
    return nn.RMSNorm(width, eps=config.norm_eps)
