"""W_O by weighted ridge regression, from Gram matrices in float64; its strength is chosen on tokens held out."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .least_squares import ridge

# Strengths of the pull towards the W_O that a fit starts from, as shares of the mean of the Gram matrix's diagonal.
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
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
        self.gram = self.gram + (features.T @ features).cpu().double()
        self.cross = self.cross + (features.T @ target).cpu().double()
        self.target += float(target.cpu().double().square().sum())

    def missed(self, output: Tensor) -> float:
        """Return the share of the target's squares that `output` [columns, hidden_size] misses."""
        error = self.target + float((output * (self.gram @ output - 2 * self.cross)).sum())
        return max(error, 0.0) / (self.target or 1)


def fit_output(fitted: Fit, held_out: Fit, start: Tensor) -> tuple[Tensor, float | None, float]:
    """Return W_O, the strength of its pull towards `start` that misses least on held-out tokens, and what it misses.

    The strength is None where `start` itself misses least.
    """
    options: list[tuple[float, float | None, Tensor]] = [(held_out.missed(start), None, start)]
    for strength in RIDGES:
        output = ridge(fitted.gram, fitted.cross, start, strength)
        options.append((held_out.missed(output), strength, output))
    missed, best, output = min(options, key=lambda option: option[0])
    if best is not None:
        output = ridge(fitted.gram + held_out.gram, fitted.cross + held_out.cross, start, best)
    return output, best, missed


def token_weights(stream: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return what each token's error is multiplied by, [batch, length], and which tokens are sinks.

    The weight is the inverse root of the stream's mean square, as what follows reads the normed stream. `epsilon` is
    the norms': without it, a token whose embedding is zero would count for all others.
    """
    square = stream.cpu().double().square().mean(-1)
    weights, sinks = (square + epsilon).rsqrt().float(), square > SINK * square.median()
    return weights.to(stream.device), sinks.to(stream.device)
