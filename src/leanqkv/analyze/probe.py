"""Linear probes: how well the next token can be read off each layer (Wu et al. 2025, appendix C.1).

LayerNorm and a linear head on the output of every layer of a frozen model, a learning rate out of a grid for each.
https://github.com/Zhoutong-Wu/SkipV1Former. The norm has no weights of its own, since the head's can be any multiple of
them: the functions are the same. Heads start at zero; each one's problem is convex.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

RATES = (1e-4, 2e-4, 3e-4)  # the paper's grid
PAPER_STEPS = 4000
# "All other hyperparameters remaining consistent with those used during pretraining": those of the paper's GPT-2.
BETAS, WEIGHT_DECAY, WARMUP, LAST = (0.9, 0.95), 0.1, 0.1, 0.1


@dataclass(frozen=True)
class Head:
    """One probe's weights: [vocab_size, hidden_size] and [vocab_size]."""

    weight: nn.Parameter
    bias: nn.Parameter

    def logits(self, states: Tensor) -> Tensor:
        """[tokens, hidden_size] -> [tokens, vocab_size]."""
        return F.linear(F.layer_norm(states, states.shape[-1:]), self.weight, self.bias)


def train_probes(
    batches: Iterable[tuple[Sequence[Tensor], Tensor]],
    *,
    steps: int,
    vocab_size: int,
    rates: Sequence[float] = RATES,
    progress: Callable[[], None] = lambda: None,
) -> list[list[Head]]:
    """Trains a probe for every layer and every learning rate, all of them in one pass over the data.

    AdamW, its rate rising over the first tenth of the steps and then following a cosine down to a tenth. No term joins
    two probes, so each is what it would be if it were trained alone; there is no clipping, which would join them.

    Args:
        batches: `steps` times the layers' outputs, [tokens, hidden_size] each, and the next tokens, [tokens] int64.
        progress: is called after each step.

    Returns:
        heads by layer, then by rate.
    """
    heads: list[list[Head]] = []
    optimizer = schedule = None
    for states, targets in batches:
        if optimizer is None:
            heads = [[_zeros(vocab_size, layer) for _ in rates] for layer in states]
            by_rate = list(zip(rates, zip(*heads, strict=True), strict=True))
            groups = [{"params": [h.weight for h in found], "lr": rate} for rate, found in by_rate]
            groups += [{"params": [h.bias for h in found], "lr": rate, "weight_decay": 0.0} for rate, found in by_rate]
            optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
            warmup = max(1, round(WARMUP * steps))
            schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, steps, min_lr_rate=LAST)
        for layer, found in zip(states, heads, strict=True):
            for head in found:
                F.cross_entropy(head.logits(layer), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert schedule is not None
        schedule.step()
        progress()
    return heads


def _zeros(vocab_size: int, like: Tensor) -> Head:
    shapes = (vocab_size, like.shape[-1]), (vocab_size,)
    weight, bias = (nn.Parameter(torch.zeros(s, dtype=like.dtype, device=like.device)) for s in shapes)
    return Head(weight, bias)


@torch.no_grad()
def probe_losses(heads: Sequence[Sequence[Head]], states: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Cross-entropy in nats of each sequence, [layers, rates, batch], float64 on the CPU.

    states: [batch, positions, hidden_size] of every layer; targets: [batch, positions], the next tokens.
    """
    losses = [
        [F.cross_entropy(h.logits(layer).flatten(0, 1), targets.flatten(), reduction="none") for h in found]
        for layer, found in zip(states, heads, strict=True)
    ]
    return torch.stack([torch.stack(row) for row in losses]).cpu().double().unflatten(-1, targets.shape).mean(-1)


def phases(layers: int) -> tuple[range, range]:
    """The paper's two phases, layers 0–6 and 7–11 of 12, with the boundary at the same share of another depth."""
    boundary = 7 * layers // 12
    return range(boundary), range(boundary, layers)


def slope_interval(losses: np.ndarray, layers: range) -> tuple[float, float] | None:
    """Slope in nats a layer of the straight line through the loss of `layers`, and half its 95 % interval.

    losses: [all layers, sequences]. The line is the one of least squares; the interval is Student's t over the
    sequences' slopes, whose mean is that of the mean loss. It is of one trained model and one set of probes. None for
    fewer than two layers, or sequences.
    """
    if len(layers) < 2 or losses.shape[1] < 2:
        return None
    places = np.array(layers) - np.mean(layers)
    slopes = places @ losses[list(layers)] / (places @ places)
    error = slopes.std(ddof=1) / len(slopes) ** 0.5
    return float(slopes.mean()), float(stats.t.ppf(0.975, len(slopes) - 1) * error)
