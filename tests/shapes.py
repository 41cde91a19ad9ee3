"""The two tiny shapes that the tests build every mechanism on, weights with nothing trivial in them, closeness."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leanqkv import LeanConfig, preset
from leanqkv.model.hyper_connections import HyperConnection

GPT: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
LLAMA: Mapping[str, Any] = GPT | {
    "position_embedding_type": "rope",
    "norm_type": "rmsnorm",
    "norm_eps": 1e-6,
    "mlp_type": "gated",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SHAPES = {"gpt": GPT, "llama": LLAMA}


def tiny(shape: str, *mechanisms: str, **overrides: Any) -> LeanConfig:
    """The configuration of `shape` with mechanism presets, written as in `BASE+MECHANISM:option=value`."""
    return preset("tiny", *mechanisms, **{**SHAPES[shape], **overrides})


def tokens(batch: int, length: int, vocab_size: int = 97, seed: int = 0) -> Tensor:
    """Random token ids, never 0, which the tests use for padding."""
    return torch.randint(1, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def randomize(model: nn.Module, std: float = 0.3, seed: int = 0) -> nn.Module:
    """Draws every parameter, norm weights and biases included: an initial 1 or 0 hides a missing factor or term.

    Weights of norms are drawn around 1, and hyper-connections around their start: no model's streams shrink at every
    mixing."""
    generator = torch.Generator().manual_seed(seed)
    means = {
        f"{prefix}.{name}": mean
        for prefix, module in model.named_modules()
        if isinstance(module, HyperConnection)
        for name, mean in module.initial_values().items()
    }
    for name, parameter in model.named_parameters():
        draws = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
        parameter.copy_(draws + means.get(name, parameter.ndim == 1 and name.endswith("weight")))
    return model


def assert_near(found: Tensor, expected: Tensor, tolerance: float, what: str = "", floor: float = 0.0) -> None:
    """Agreement relative to the largest expected entry, or to `floor` where everything expected is near zero."""
    worst = (found - expected).abs().max() / expected.abs().max().clamp(min=floor)
    assert worst <= tolerance, f"{what} off by {worst:.1e}".strip()
