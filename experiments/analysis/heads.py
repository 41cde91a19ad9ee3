"""What heads do: attend to the token before, or to what came after the same token earlier (induction).

Olsson et al. 2022, "In-context learning and induction heads", https://arxiv.org/abs/2209.11895; Wu et al. 2025 (P3),
appendix C.2, which expects the heads with the first layer's values to be the copying ones.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from leanqkv.model.causal_lm import LeanForCausalLM
from leanqkv.model.layout import LayerPlan


def value_layers(plan: LayerPlan) -> tuple[int, ...] | None:
    """Return every query head's layer of values; None under MLA, whose heads share a latent."""
    if plan.latent is not None:
        return None
    held = [source.layer for source in plan.layout.values for _ in range(source.num_heads)]
    group = plan.num_query_heads // len(held)
    return tuple(layer for layer in held for _ in range(group))


def previous_token_scores(patterns: Tensor) -> Tensor:
    """Return the mean weight of the token before, where there is one: [batch, heads, n, n] -> [heads], float64."""
    return patterns.double().diagonal(-1, -2, -1).mean((0, 2))


def induction_scores(patterns: Tensor) -> Tensor:
    """Return the weight of the token after the earlier occurrence, averaged over the second copy of a doubled text.

    patterns: [batch, heads, 2 n, 2 n] on sequences of n tokens given twice: query n + i, key i + 1. Returns [heads],
    float64.
    """
    n = patterns.shape[-1] // 2
    return patterns.double().diagonal(1 - n, -2, -1)[..., 1:].mean((0, 2))


def matching_weights(patterns: Tensor, tokens: Tensor) -> tuple[Tensor, int]:
    """Return induction on any text: the weight of all positions that follow an earlier occurrence of the query's token.

    An occurrence right before the query is left out, for what follows it is the query itself.

    Args:
        patterns: [batch, heads, n, n].
        tokens: [batch, n].

    Returns:
        the sum over the queries that have such positions, [heads], float64, and how many these are.
    """
    earlier = (tokens[:, :, None] == tokens[:, None, :]).tril(-2)
    after = F.pad(earlier, (1, 0))[..., :-1]
    return (patterns.double() * after[:, None]).sum((0, 2, 3)), int(after.any(-1).sum())


def uniform_patterns(length: int) -> Tensor:
    """Return [1, 1, length, length] of a head that attends to all positions so far alike: scores at chance."""
    seen = torch.ones(length, length, dtype=torch.float64).tril()
    return (seen / seen.sum(-1, keepdim=True))[None, None]


def repeated_tokens(vocab_size: int, sequences: int, period: int, seed: int) -> Tensor:
    """Return [sequences, 2 period] int64: random tokens, then the same again."""
    drawn = np.random.default_rng([seed, 2]).integers(0, vocab_size, (sequences, period))
    return torch.from_numpy(np.tile(drawn, 2))


@torch.no_grad()
def copy_losses(model: LeanForCausalLM, tokens: Tensor) -> tuple[float, float]:
    """Return the loss in nats over the first and over the second copy of `repeated_tokens`: the gain from copying.

    The first token of a copy follows from nothing and is left out.
    """
    n = tokens.shape[1] // 2
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)
    return losses[:, : n - 1].mean().item(), losses[:, n:].mean().item()
