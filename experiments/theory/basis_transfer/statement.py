"""A GELU MLP with a skip connection learns another one that is written in a changed basis.

Karbevski & Mijoski 2025, appendix D, equation 3; the later version (arXiv 2510.23912, section 8.4) adds the loss, the
optimiser and the linear baseline. https://arxiv.org/abs/2510.23912

    target  Y(X) = W_2 GELU(W_1 X) + Z X - X,    model  W_2' GELU(W_1' X) + X

Our reading. X is standard normal. The hidden width is 4 d, on both sides: "of the same shape". The target is printed
with `- X`: with the model's `+ X` that leaves `W_2' GELU(W_1' X)` to stand for `W_2 GELU(W_1 X) + (Z - 2) X`. By what
the weights are normalised is lost in the text at hand, so `READINGS` lists several ways, and the linear baseline, which
needs no training, says which of them the paper's 11 to 14 % fit.

The convention of columns is the paper's; here X is rows [n, d] and matrices act as `X @ W.T`. float32, the dtype of
training; the linear baseline in float64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Reading:
    """Variances of the entries of W_1 and W_2, times d, and whether `- X` is part of the target; Z has 1 / d."""

    w1: float
    w2: float
    minus_x: bool = True


READINGS = {
    "both by √(4d)": Reading(1 / 4, 1 / 4),
    "W₁ by √d, W₂ by √(4d)": Reading(1, 1 / 4),
    "both by √d": Reading(1, 1),
    "Xavier, 2 / (d + 4d)": Reading(2 / 5, 2 / 5),
    "both by √(4d), without − X": Reading(1 / 4, 1 / 4, minus_x=False),
    "W₁ by √d, W₂ by √(4d), without − X": Reading(1, 1 / 4, minus_x=False),
}
# The two whose linear baseline is nearest to the paper's range, below and within it.
FITTING = ("both by √(4d)", "both by √(4d), without − X")


class Target(NamedTuple):
    """W_1 [4d, d], W_2 [d, 4d], and the linear part `Z - I` (or Z), [d, d]."""

    w1: Tensor
    w2: Tensor
    linear: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[n, d] -> [n, d]."""
        return F.gelu(x @ self.w1.T) @ self.w2.T + x @ self.linear.T


@dataclass(frozen=True)
class Recipe:
    """AdamW on fresh X; learning rate: linear warm-up, cosine to zero. The loss is the relative squared error. Steps,
    batch, optimiser, cosine and clipping at 3 are the paper's; learning rate, warm-up and weight decay ours."""

    steps: int = 4000
    batch_size: int = 1024
    learning_rate: float = 1e-2
    warmup_steps: int = 100
    weight_decay: float = 0.0
    clip: float = 3.0
    evaluation: int = 20_000
    ridge_samples: int = 100_000
    ridge: float = 1e-4


def make_target(d: int, reading: Reading, seed: int) -> Target:
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(4 * d, d, generator=generator) * (reading.w1 / d) ** 0.5
    w2 = torch.randn(d, 4 * d, generator=generator) * (reading.w2 / d) ** 0.5
    z = torch.randn(d, d, generator=generator) / d**0.5
    return Target(w1, w2, z - torch.eye(d) if reading.minus_x else z)


def streaming_ridge(target: Target, samples: int, ridge: float, generator: torch.Generator) -> Tensor:
    """Return the linear map G [d, d] of least squared error over `samples` fresh X plus `ridge * samples * ||G||^2`.

    It is `(sum Y^T X) (sum X^T X + ridge samples I)^-1`, summed batch by batch in float64.
    """
    d = len(target.linear)
    squares = ridge * samples * torch.eye(d, dtype=torch.float64, device=target.w1.device)
    products = torch.zeros_like(squares)
    for begin in range(0, samples, 8192):
        x = torch.randn(min(8192, samples - begin), d, generator=generator, device=target.w1.device)
        squares += x.double().T @ x.double()
        products += target(x).double().T @ x.double()
    return torch.linalg.solve(squares, products.T).T


def best_linear(target: Target) -> Tensor:
    """Return the limit of `streaming_ridge` without ridge, [d, d] in float64, in closed form (Stein's lemma):
    `W_2 diag(E GELU'(w x)) W_1` plus the linear part, and E GELU' = 1/2 for a centred normal, as
    GELU'(z) + GELU'(-z) = 1."""
    return (target.w2 @ target.w1 / 2 + target.linear).double()


def large_width_error(reading: Reading) -> float:
    """Return the best linear map's relative error for d to infinity.

    Hidden units are normal with variance s^2 = `w1`, and the target's parts uncorrelated: `E r^2` of what a line
    through zero leaves of GELU, over the mean square of all.
    """
    points, weights = (torch.from_numpy(part) for part in _gauss_hermite(80))
    hidden = reading.w1**0.5 * points
    left = float((weights * (F.gelu(hidden) - hidden / 2) ** 2).sum())
    total = float((weights * F.gelu(hidden) ** 2).sum())
    gain = 4 * reading.w2  # 4 d units of variance w2 / d each
    return math.sqrt(gain * left / (gain * total + 1 + reading.minus_x))


def _gauss_hermite(count: int) -> tuple:
    from numpy.polynomial.hermite_e import hermegauss

    points, weights = hermegauss(count)
    return points, weights / weights.sum()


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Return `||output - expected|| / ||expected||`, over everything."""
    return float((output - expected).norm() / expected.norm())


def cosine_distance(output: Tensor, expected: Tensor) -> float:
    """Return one minus the mean cosine of rows."""
    return float(1 - F.cosine_similarity(output, expected, dim=1).mean())


class Student(torch.nn.Module):
    """`W_2' GELU(W_1' X) + X`, no biases; PyTorch's default initial weights."""

    def __init__(self, d: int):
        super().__init__()
        self.up = torch.nn.Linear(d, 4 * d, bias=False)
        self.down = torch.nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) + x


def train(target: Target, recipe: Recipe, seed: int, progress: Callable[[int], None] | None = None) -> Student:
    """Train on the target's device and return the model."""
    device, d = target.w1.device, len(target.linear)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = Student(d).to(device)
    generator = torch.Generator(device).manual_seed(1000 + seed)
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.99)
    )
    for step in range(recipe.steps):
        decay = (1 + math.cos(math.pi * step / recipe.steps)) / 2
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * min(1.0, (step + 1) / recipe.warmup_steps) * decay
        x = torch.randn(recipe.batch_size, d, generator=generator, device=device)
        with torch.no_grad():
            expected = target(x)
        loss = (student(x) - expected).square().sum() / expected.square().sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), recipe.clip)
        optimizer.step()
        if progress is not None:
            progress(step + 1)
    return student
