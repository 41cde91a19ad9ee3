"""W_O by weighted ridge regression, from Gram matrices in float64; its strength is chosen on tokens held out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..model.transformer import LeanBlock
from .least_squares import ridge_step

# Strengths of the pull towards the W_O that a fit starts from, as shares of the mean of the Gram matrix's diagonal.
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# From so many columns of the target on, strengths are compared on mixtures of them, and on how many.
MANY, SKETCHED = 2048, 512
# A smaller difference of two shares that are missed is one of rounding.
ROUNDING = torch.finfo(torch.float32).eps
# A token is a sink where its stream's mean square is so many times the median.
SINK = 100.0


@dataclass
class Fit:
    """Sums from which W_O is fitted, or judged; all weighted, in float64.

    Attributes:
        gram: of the features, [columns, columns]; cross: with the target, [columns, hidden_size].
        target: the target's sum of squares.
    """

    gram: Any = 0.0
    cross: Any = 0.0
    target: float = 0.0

    def add(self, features: Tensor, target: Tensor) -> None:
        """Add tokens: features [tokens, columns] and their target [tokens, hidden_size]."""
        if not len(features):
            return
        self.gram = added(self.gram, features.T @ features)
        self.cross = added(self.cross, features.T @ target)
        self.target += float(target.cpu().double().square().sum())

    def rest(self, output: Tensor) -> Tensor:
        """Return the cross product of the features with what `output` [columns, hidden_size] leaves of the target."""
        return self.cross - self.gram @ output

    def missed(self, output: Tensor, rest: Tensor | None = None) -> float:
        """Return the share of the target's squares that `output` misses; `rest` is its, if it has been computed."""
        rest = self.rest(output) if rest is None else rest
        error = self.target - float((output * (self.cross + rest)).sum())
        return max(error, 0.0) / (self.target or 1)


def added(total: Any, part: Tensor) -> Tensor:
    """Return a sum in float64 with `part` added, in its own memory; `total` is 0.0 before the first one."""
    part = part.cpu()  # before it is float64, which Apple's GPUs have not
    return total.add_(part) if isinstance(total, Tensor) else part.double()


def fit_output(fitted: Fit, held_out: Fit, start: Tensor) -> tuple[Tensor, float | None, float]:
    """Return W_O, the strength of its pull towards `start` that misses least on held-out tokens, and what it misses.

    The strength is None where `start` itself misses least, as far as sums of float32 products tell.
    """
    rests = fitted.rest(start), held_out.rest(start)
    few = tuple(sketched(matrix) for matrix in rests)

    def change(rests: tuple[Tensor, ...], strength: float) -> float:
        """What is missed less than by `start`, if negative."""
        step = ridge_step(fitted.gram, rests[0], strength)
        return float((step * (held_out.gram @ step - 2 * rests[1])).sum()) / (held_out.target or 1)

    least, best = min((change(few, strength), strength) for strength in RIDGES)
    unfitted = held_out.missed(start, rests[1])
    if least >= -ROUNDING:
        return start, None, unfitted
    missed = max(unfitted + (least if few[0] is rests[0] else change(rests, best)), 0.0)
    return start + ridge_step(fitted.gram + held_out.gram, rests[0] + rests[1], best), best, missed


def sketched(matrix: Tensor) -> Tensor:
    """Return mixtures of a matrix's columns with random signs, whose sums of squares are the same on average; of a few
    columns, themselves. To compare strengths of a fit it takes no more of them."""
    columns = matrix.shape[1]
    if columns < MANY:
        return matrix
    signs = torch.randint(2, (columns, SKETCHED), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return matrix @ signs.to(matrix) / SKETCHED**0.5


def felt_weights(block: LeanBlock, attended: Tensor) -> Tensor:
    """Return what each token's error is multiplied by where a norm follows attention, [batch, length]: to first order
    the norm divides it by the root of the mean square of `attended` [batch, length, hidden_size], its output."""
    norm = block.attention_output_layernorm
    if isinstance(norm, nn.LayerNorm):
        return (attended.var(-1, correction=0) + norm.eps).rsqrt()
    if isinstance(norm, nn.RMSNorm):
        return (attended.square().mean(-1) + (norm.eps or 0)).rsqrt()
    return attended.new_ones(attended.shape[:-1])


def token_weights(stream: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return what each token's error is multiplied by, [batch, length], and which tokens are sinks.

    The weight is the inverse root of the stream's mean square, as what follows reads the normed stream. `epsilon` is
    the norms': without it, a token whose embedding is zero would count for all others.
    """
    square = stream.cpu().double().square().mean(-1)
    weights, sinks = (square + epsilon).rsqrt().float(), square > SINK * square.median()
    return weights.to(stream.device), sinks.to(stream.device)
