"""How wide attention logits spread at initialisation, by query mechanism.

Karbevski & Mijoski 2025, appendix B. https://arxiv.org/abs/2510.23912

Weights are N(0, sigma^2), x a normed input of d entries with `||x||^2 = d`. A linear query has entries of variance
`||x||^2 sigma^2`, an identity query is a slice of x, of norm `||x|| / sqrt(h)`; so before the attention scale

    std(q k) = ||x||^2 sigma^2 sqrt(d_k)  (linear),   ||x||^2 sigma / sqrt(h)  (identity),   ratio 1 / (sigma sqrt(d)).

The ratio depends on the width alone: 1.8 at d = 768 and sigma = 0.02. The paper's ||x|| = 1 cancels.
"""

import math
from collections.abc import Callable

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


@torch.no_grad()
def logit_spreads(config: LeanConfig, seed: int, batch: int, length: int) -> tuple[list[float], list[float]]:
    """Return the standard deviation of every layer's attention logits over all pairs of tokens, in an untrained model.

    Random tokens [batch, length], float32. Returns the spreads over `1 / sqrt(d_k)`, whatever the mechanism asks for,
    and the factors on `1 / sqrt(d_k)` that it asks for.
    """
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
    scale = 1 / math.sqrt(head_dim)
    spreads = []
    for layer in range(config.num_hidden_layers):
        query, key = (seen[layer, name].unflatten(-1, (-1, head_dim)).transpose(1, 2) for name in ("q_proj", "k_proj"))
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        spreads.append(float((query @ key.transpose(-1, -2) * scale).std()))
    return spreads, [plan.attention_scale(plan.layer) / scale for plan in config.plan.layers]
