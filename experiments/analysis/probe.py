"""Linear probes: how well the next token can be read off each layer (Wu et al. 2025, appendix C.1).

LayerNorm and a linear head on the output of every layer of a frozen model, a learning rate out of a grid for each.
https://github.com/Zhoutong-Wu/SkipV1Former. The norm has no weights of its own, since the head's can be any multiple of
them: the functions are the same. Heads start at zero; each one's problem is convex.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from leanqkv.model.causal_lm import LeanForCausalLM

RATES = (1e-4, 2e-4, 3e-4)  # the paper's grid
# "All other hyperparameters remaining consistent with those used during pretraining": those of the paper's GPT-2.
BETAS, WEIGHT_DECAY, WARMUP, LAST = (0.9, 0.95), 0.1, 0.1, 0.1


class Probe(nn.Linear):
    """A head from the normed output of a layer, [..., hidden_size], to logits, [..., vocab_size]; zero at first."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(F.layer_norm(states, states.shape[-1:]))


@torch.no_grad()
def layer_outputs(model: LeanForCausalLM, tokens: Tensor) -> list[Tensor]:
    """Return every block's output, [batch, positions, hidden_size] each, for `tokens` [batch, positions]."""
    outputs: list[Tensor] = []
    with ExitStack() as hooks:
        for block in model.model.layers:
            hooks.enter_context(block.register_forward_hook(lambda _m, _in, out: outputs.append(out[0])))
        model.model(input_ids=tokens, use_cache=False)
    return outputs


def train_probes(
    batches: Iterable[tuple[Sequence[Tensor], Tensor]],
    *,
    steps: int,
    vocab_size: int,
    rates: Sequence[float] = RATES,
    progress: Callable[[], None] = lambda: None,
) -> list[list[Probe]]:
    """Train a probe for every layer and every learning rate, all of them in one pass over the data.

    AdamW, its rate rising over the first tenth of the steps and then following a cosine down to a tenth. No term joins
    two probes, so each is what it would be if it were trained alone; there is no clipping, which would join them.

    Args:
        batches: `steps` times the layers' outputs, [tokens, hidden_size] each, and the next tokens, [tokens] int64.
        progress: called after each step.

    Returns:
        probes by layer, then by rate.
    """
    probes: list[list[Probe]] = []
    optimizer = schedule = None
    for states, targets in batches:
        if optimizer is None:
            probes = [[Probe(layer.shape[-1], vocab_size).to(layer) for _ in rates] for layer in states]
            groups: list[dict[str, Any]] = []
            for rate, at_rate in zip(rates, zip(*probes, strict=True), strict=True):
                groups.append({"params": [probe.weight for probe in at_rate], "lr": rate})
                groups.append({"params": [probe.bias for probe in at_rate], "lr": rate, "weight_decay": 0.0})
            optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
            warmup = max(1, round(WARMUP * steps))
            schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, steps, min_lr_rate=LAST)
        for layer, its in zip(states, probes, strict=True):
            for probe in its:
                F.cross_entropy(probe(layer), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert schedule is not None
        schedule.step()
        progress()
    return probes


@torch.no_grad()
def probe_losses(probes: Sequence[Sequence[Probe]], states: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats of each sequence, [layers, rates, batch], float64 on the CPU.

    states: [batch, positions, hidden_size] of every layer; targets: [batch, positions], the next tokens.
    """
    losses = [
        torch.stack([F.cross_entropy(probe(layer).mT, targets, reduction="none") for probe in its])
        for layer, its in zip(states, probes, strict=True)
    ]
    return torch.stack(losses).cpu().double().mean(-1)


def phases(layers: int) -> tuple[range, range]:
    """Return the paper's two phases, layers 0–6 and 7–11 of 12; at other depths the boundary is at the same share."""
    boundary = 7 * layers // 12
    return range(boundary), range(boundary, layers)


def slope_interval(losses: np.ndarray, layers: range) -> tuple[float, float] | None:
    """Return the slope in nats a layer of the straight line through the loss of `layers`, and half its 95 % interval.

    losses: [all layers, sequences]. The line is the one of least squares; the interval is Student's t over the
    sequences' slopes, whose mean is that of the mean loss. It is of one trained model and one set of probes. None for
    fewer than two layers, or sequences.
    """
    if len(layers) < 2 or losses.shape[1] < 2:
        return None
    slopes = np.polyfit(layers, losses[list(layers)], 1)[0]
    return float(slopes.mean()), float(stats.t.ppf(0.975, len(slopes) - 1) * stats.sem(slopes))
