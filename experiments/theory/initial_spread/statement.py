"""How wide attention logits spread at initialisation, and how far a token's logit with itself stands out.

Karbevski & Mijoski 2025, appendix B. https://arxiv.org/abs/2510.23912
Karbevski 2026, section 2.2. https://github.com/MarkoKarbevski/beyond_query_linearity

Weights are N(0, sigma^2), x a normed input of d entries with `||x||^2 = d`. A linear query has entries of variance
`||x||^2 sigma^2`, an identity query is a slice of x, of norm `||x|| / sqrt(h)`; so before the attention scale

    std(q k) = ||x||^2 sigma^2 sqrt(d_k)  (linear),   ||x||^2 sigma / sqrt(h)  (identity),   ratio 1 / (sigma sqrt(d)).

The ratio depends on the width alone: 1.8 at d = 768 and sigma = 0.02. The paper's ||x|| = 1 cancels.

Where a x is in the query and b x in the key, without a weight, a token's logit with itself is on average
`a b ||x||^2 / (h sqrt(d_k)) = a b sqrt(d_k)`; with another token, or where one of the two has no x in it, it is 0.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from leanqkv.model.causal_lm import LeanForCausalLM
from leanqkv.model.config import LeanConfig


def identity_ratio(width: int, sigma: float) -> float:
    """Return the identity query's spread over the linear one's, at the same attention scale."""
    return 1 / (sigma * math.sqrt(width))


# Of a mechanism's spread to the linear query's, from the identity's ratio r: what the first layer of independent parts
# of known size gives. The nonlinear query's f ends in a LayerNorm, so it is as long as X and not aligned with it.
PREDICTED: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0,
    "identity": lambda r: r,
    "residual": lambda r: math.sqrt(r**2 + 1) / 2,
    "nonlinear": lambda r: r / math.sqrt(2),
    "from_mlp": lambda r: 1.0,  # its first layer is a linear query
}


def own_logit(config: LeanConfig) -> float:
    """Return what a token's first logit with itself is above those with others, on average, at the scale in use."""
    layer = config.plan.layers[0]
    shares = {"identity": 1.0, "residual": 0.5, "nonlinear": 0.5}
    passed = [shares[part.kind] if part.passes_input else 0.0 for part in (layer.query, layer.key)]
    return passed[0] * passed[1] * layer.head_dim * layer.attention_scale(0)


def logit_spreads(config: LeanConfig, seed: int, batch: int, length: int) -> tuple[list[float], list[float]]:
    """Return the standard deviation of every layer's attention logits over all pairs of tokens, in an untrained model.

    Random tokens [batch, length], float32. Returns the spreads over `1 / sqrt(d_k)`, whatever the mechanism asks for,
    and the factors on `1 / sqrt(d_k)` that it asks for.
    """
    scale = 1 / math.sqrt(config.plan.layers[0].head_dim)
    spreads = [float((logits * scale).std()) for logits in initial_logits(config, seed, batch, length)]
    return spreads, [plan.attention_scale(plan.layer) / scale for plan in config.plan.layers]


class OwnLogits(NamedTuple):
    """Of one layer, at the scale in use.

    own: a token's logit with itself above those with others, on average over tokens and heads. spread: the standard
    deviation of those with others. weight: what the last token gives itself, of all.
    """

    own: float
    spread: float
    weight: float


def own_logits(config: LeanConfig, seed: int, batch: int, length: int) -> list[OwnLogits]:
    """Return every layer's, of random tokens [batch, length] in an untrained model, float32."""
    found = []
    for plan, products in zip(config.plan.layers, initial_logits(config, seed, batch, length), strict=True):
        logits = products * plan.attention_scale(plan.layer)
        own = logits.diagonal(dim1=-2, dim2=-1)
        others = logits[..., ~torch.eye(length, dtype=torch.bool)]
        weight = logits[..., -1, :].softmax(-1)[..., -1]
        found.append(OwnLogits(float(own.mean() - others.mean()), float(others.std()), float(weight.mean())))
    return found


@torch.no_grad()
def initial_logits(config: LeanConfig, seed: int, batch: int, length: int) -> Iterator[Tensor]:
    """Yield `Q K^T` of every layer of an untrained model, [batch, heads, length, length], of random tokens, float32."""
    torch.manual_seed(seed)
    model = LeanForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, length), generator=generator)
    seen: dict[tuple[int, str], Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj"):
            getattr(block.self_attn, name).register_forward_hook(
                lambda _module, _inputs, output, at=(layer, name): seen.update({at: output})
            )
    model(input_ids=tokens, use_cache=False)
    head_dim = config.plan.layers[0].head_dim
    for layer in range(config.num_hidden_layers):
        query, key = (seen[layer, name].unflatten(-1, (-1, head_dim)).transpose(1, 2) for name in ("q_proj", "k_proj"))
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        yield query @ key.transpose(-1, -2)
