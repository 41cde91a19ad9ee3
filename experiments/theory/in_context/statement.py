"""In-context linear regression by two layers of linear attention, with and without the first layer's value.

Wu et al. 2025, "Improving model representation and reducing KV cache via skip connections with first value heads",
section 4 and appendix A: Theorems 1 and 2, Assumption 1, equations 2 to 6. https://github.com/Zhoutong-Wu/SkipV1Former

The task: `y_i = W x_i + eps_i` with `W` of shape [d, d], `W - W_0` and `x_i` standard normal, `eps_i` normal with
variance `sigma^2` per entry. The model sees `(x_1, y_1, ..., x_n, y_n, x_{n+1})`, an array of shape [d, 2n + 1], and
predicts `y_{n+1}`; the loss is the squared error summed over d entries. Under Assumption 1 the first layer leaves `x_i`
as it is, writes `(A x_i; B y_i)` over `y_i` and `(A x_{n+1}; 0)` over the last token, A of shape [a, d], B of shape
[d - a, d]. With `C = sum_i (x_i; y_i)(x_i; y_i)^T` of shape [2d, 2d], `F = diag(A, B)` of shape [d, 2d], `X` and `Y` of
shape [d, n], the second layer then predicts `T x_{n+1}`,

    T  = W^1 G^1 M^1 + W^2 G^2 M^2,    M^h = R^h A,     R^h of shape [d, a], W^h of shape [d, d],
    G^h = X X^T + F C F^T                              for attention (equation 5),
    G^2 = X X^T + Y (A X; B Y)^T, G^1 as above         with the first layer's value in the second head (equation 6).

Everything below `sample` is exact: T is linear in C, so the loss needs the first two moments of C and its covariance
with W alone, and those are polynomials of Gaussians (Isserlis). All arithmetic is in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

FLOAT = torch.float64


@dataclass(frozen=True)
class Task:
    """The regression: `d` entries per token, `n` examples, noise of standard deviation `sigma`, `W_0 = prior * I`."""

    d: int
    n: int
    sigma: float
    prior: float = 0.0

    @property
    def signal(self) -> float:
        """`n / (n + d + 1 + sigma^2)`: the share of an entry of W that one entry of `Y X^T` explains, at `W_0 = 0`."""
        return self.n / (self.n + self.d + 1 + self.sigma**2)

    @property
    def zero_loss(self) -> float:
        """The loss of predicting zero, `E |y|^2`."""
        return self.d * self.sigma**2 + self.d**2 + self.d * self.prior**2

    @property
    def smallest_prior(self) -> float:
        """Theorem 2 asks for `sigma_d(W_0)` above this, `2 sqrt(d) sigma`."""
        return 2 * self.d**0.5 * self.sigma

    @property
    def in_hypothesis(self) -> bool:
        return self.prior > self.smallest_prior


@dataclass(frozen=True)
class Weights:
    """A first layer's copy and a second layer under Assumption 1, with 0 <= a <= d."""

    copy_x: Tensor  # A [a, d]
    copy_y: Tensor  # B [d - a, d]
    scores: Tensor  # R [2, d, a]; M^h = R^h A
    values: Tensor  # W [2, d, d]


# Moments


def second_moments(task: Task) -> tuple[Tensor, Tensor, float]:
    """Return `E[C_ij C_kl]` [2d, 2d, 2d, 2d], `E[C_ij W_pq]` [2d, 2d, d, d] and `E |W|^2`, exactly.

    Given W the columns `(x_i; y_i)` are normal with covariance `Sigma = K K^T + diag(0, sigma^2 I)`, `K = (I; W)`, so C
    is Wishart; the columns of K are independent normal vectors, so `K K^T` is a non-central Wishart matrix.
    """
    d, n = task.d, task.n
    identity = torch.eye(d, dtype=FLOAT)
    mean_k = torch.cat([identity, task.prior * identity])  # [2d, d]
    lower = torch.diag(
        torch.cat([torch.zeros(d, dtype=FLOAT), torch.ones(d, dtype=FLOAT)])
    )  # covariance of K's columns
    central = mean_k @ mean_k.T
    mean = central + (d + task.sigma**2) * lower  # E[Sigma]
    squares = torch.einsum("ij,kl->ijkl", mean, mean)
    for left, right in ((d * lower, lower), (central, lower), (lower, central)):
        squares = squares + torch.einsum("ik,jl->ijkl", left, right) + torch.einsum("il,jk->ijkl", left, right)
    swapped = torch.einsum("ikjl->ijkl", squares) + torch.einsum("iljk->ijkl", squares)
    with_target = (
        torch.einsum("ij,pq->ijpq", mean, mean_k[d:])
        + torch.einsum("ip,jq->ijpq", lower[:, d:], mean_k)
        + torch.einsum("jp,iq->ijpq", lower[:, d:], mean_k)
    )
    return n**2 * squares + n * swapped, n * with_target, d**2 + d * task.prior**2


@lru_cache(maxsize=64)
def nodes(task: Task) -> tuple[Tensor, Tensor, float]:
    """Return matrices C [r, 2d, 2d] and W [r, d, d] that have the exact moments, and `E |W|^2`.

    `sum_s C_s x C_s = E[C x C]` and `sum_s C_s x W_s = E[C x W]`, so a sum over these few matrices is the expectation
    over all tasks, for the square of anything linear in C and W (up to `E |W|^2`).
    """
    moments, with_target, target = second_moments(task)
    size = 2 * task.d
    eigenvalues, vectors = torch.linalg.eigh(moments.reshape(size**2, size**2))
    kept = eigenvalues > 1e-10 * eigenvalues[-1]
    roots = vectors[:, kept] * eigenvalues[kept].sqrt()
    duals = vectors[:, kept] / eigenvalues[kept].sqrt()
    targets = duals.T @ with_target.reshape(size**2, task.d**2)
    return roots.T.reshape(-1, size, size).contiguous(), targets.reshape(-1, task.d, task.d).contiguous(), target


def loss_of(task: Task, prediction: Callable[[Tensor], Tensor]) -> float:
    """Return the exact loss of a prediction `T x_{n+1}`, given T [r, d, d] as a linear function of C [r, 2d, 2d]."""
    c, w, target = nodes(task)
    t = prediction(c)
    return float(task.d * task.sigma**2 + target - 2 * (t * w).sum() + (t * t).sum())


# The model


def copying(copy_x: Tensor, copy_y: Tensor) -> Tensor:
    """Return `F = diag(A, B)` of shape [d, 2d]; A or B may have no rows."""
    right, left = torch.zeros_like(copy_x), torch.zeros_like(copy_y)
    return torch.cat([torch.cat([copy_x, right], 1), torch.cat([left, copy_y], 1)])


def attended(c: Tensor, copy: Tensor, first_layer_value: bool) -> tuple[Tensor, Tensor]:
    """Return `G^1`, `G^2` [r, d, d] from C [r, 2d, 2d] and F [d, 2d]: equations 5 and 6."""
    d = len(copy)
    g = c[:, :d, :d] + copy @ c @ copy.T
    return (g, c[:, :d, :d] + c[:, d:] @ copy.T) if first_layer_value else (g, g)


def predict(weights: Weights, c: Tensor, first_layer_value: bool) -> Tensor:
    """Return T [r, d, d] from C [r, 2d, 2d]."""
    g = attended(c, copying(weights.copy_x, weights.copy_y), first_layer_value)
    return sum(weights.values[h] @ g[h] @ weights.scores[h] @ weights.copy_x for h in range(2))  # type: ignore[return-value]


def exact_loss(task: Task, weights: Weights, first_layer_value: bool) -> float:
    """Return the loss of given weights, without sampling."""
    return loss_of(task, lambda c: predict(weights, c, first_layer_value))


def forward(weights: Weights, tokens: Tensor, first_layer_value: bool) -> Tensor:
    """Return predictions [N, d] for tokens [N, d, 2n + 1], by equations 2 and 3 token by token."""
    a, d = weights.copy_x.shape
    x, y = tokens[..., 0::2], tokens[..., 1::2]
    copied = torch.cat([weights.copy_x @ x[..., :-1], weights.copy_y @ y], 1)
    last = torch.cat([weights.copy_x @ x[..., -1:], torch.zeros(len(x), d - a, 1, dtype=FLOAT)], 1)
    first = torch.cat([torch.stack([x[..., :-1], copied], -1).flatten(-2), last], -1)
    mask = torch.ones(tokens.shape[-1], dtype=FLOAT)
    mask[-1] = 0  # the matrix P: the last token is no key
    out = torch.zeros(len(x), d, 1, dtype=FLOAT)
    for h in range(2):
        # W_K^T W_Q (A; 0) = R A, so W_K = I and W_Q = (R, 0).
        query = torch.cat([weights.scores[h], torch.zeros(d, d - a, dtype=FLOAT)], 1) @ last
        value = tokens if first_layer_value and h == 1 else first
        out = out + weights.values[h] @ (value * mask) @ (first.transpose(1, 2) @ query)
    return out[..., 0]


# What the theory says


def closed_form_loss(task: Task, rows: int, first_layer_value: bool) -> float:
    """Return the least loss with `rows` = a rows in A, over A, B, second layer, at `W_0 = 0`; an infimum for attention.

    Entries of `G = Y X^T` are uncorrelated with equal variance, terms even in Y are orthogonal to W, and what is odd in
    Y is a linear map of G: for attention through `B G A^T`, so of rank a (d - a); with the first value into the row
    space of A, so of rank a d. Each rank saves at most `signal`.
    """
    if task.prior:
        raise ValueError(f"the closed form is for W_0 = 0, found {task.prior}")
    rank = rows * (task.d if first_layer_value else task.d - rows)
    return task.zero_loss - rank * task.signal


def closed_form_gap(task: Task) -> float:
    """Return best attention minus best with the first value, A and B free, at `W_0 = 0`:

    `c = (d^2 - floor(d/2) ceil(d/2)) n / (n + d + 1 + sigma^2)`.
    """
    best = min(closed_form_loss(task, rows, False) for rows in range(task.d + 1))
    return best - closed_form_loss(task, task.d, True)


def first_value_optimum(task: Task, rows: int) -> Weights:
    """Return weights that reach `closed_form_loss(task, rows, True)`.

    Head 1 removes `X X^T`, head 2 leaves `Y X^T` times the step size.

    With rows = d it is the construction of the paper's proof, one step of gradient descent.
    """
    d = task.d
    identity = torch.eye(d, dtype=FLOAT)
    copy_x = identity[:rows]
    seen = copy_x.T @ copy_x
    step = task.signal / task.n
    values = torch.stack([-step * (identity - seen / 2), step * identity])
    return Weights(copy_x, torch.zeros(d - rows, d, dtype=FLOAT), copy_x.T.expand(2, d, rows).clone(), values)


def attention_near_optimum(task: Task, rows: int, scale: float) -> Weights:
    """Return weights that tend to `closed_form_loss(task, rows, False)` as `scale`, of A and B, outgrows `X X^T`."""
    d = task.d
    identity = torch.eye(d, dtype=FLOAT)
    scores, values = torch.zeros(2, d, rows, dtype=FLOAT), torch.zeros(2, d, d, dtype=FLOAT)
    scores[0, :rows] = identity[:rows, :rows] / scale
    values[0, : d - rows, rows:] = task.signal / task.n / scale**2 * identity[: d - rows, : d - rows]
    return Weights(scale * identity[:rows], scale * identity[: d - rows], scores, values)


def reversing_copy(task: Task) -> Tensor:
    """Return `A = -I / w` for `W_0 = w I`, which takes W_0 out of the first value's head:

    `X X^T + Y X^T A^T = ((W_0 - W) X X^T - eps X^T) / w`.
    """
    return -torch.eye(task.d, dtype=FLOAT) / task.prior


def reversed_first_value_loss(task: Task) -> float:
    """Return the least loss with the first value at A = `reversing_copy`, over the second layer, exactly.

    One head is left for W_0, of which the share `(d + 1) / (n + d + 1)` remains; the other explains W - W_0. They are
    uncorrelated.
    """
    d, n = task.d, task.n
    left = task.prior**2 * d * (d + 1) / (n + d + 1)
    return d * task.sigma**2 + left + d**2 * (1 - task.signal)


def split_attention(task: Task, copy_x: Tensor) -> Weights:
    """Return attention with A a multiple of the identity that predicts `W_0 x`, each head one half of the entries."""
    d, n = task.d, task.n
    identity = torch.eye(d, dtype=FLOAT)
    scale = float(copy_x[0, 0])
    halves = torch.arange(d) < d // 2
    masks = torch.stack([torch.diag(half.to(FLOAT)) for half in (halves, ~halves)])
    sizes = masks.sum((1, 2))
    step = task.prior / (n + sizes + 1) / (1 + scale**2)
    return Weights(scale * identity, torch.zeros(0, d, dtype=FLOAT), masks / scale, step[:, None, None] * masks)


def split_attention_loss(task: Task) -> float:
    """Return the loss of `split_attention`: `d_h (d_h + 1) / (n + d_h + 1)` of w^2 remains for half of d_h entries."""
    halves = (task.d // 2, task.d - task.d // 2)
    left = sum(half * (half + 1) / (task.n + half + 1) for half in halves)
    return task.d * task.sigma**2 + task.d**2 + task.prior**2 * left


def reversal_bound(task: Task) -> float:
    """Return an upper bound of the gap at A = `reversing_copy`, over the second layers; negative for large w."""
    return split_attention_loss(task) - reversed_first_value_loss(task)


def reversal_prior(task: Task) -> float:
    """Return the w above which `reversal_bound` is negative."""
    unit, none = (Task(task.d, task.n, task.sigma, w) for w in (1.0, 0.0))
    at_zero = reversal_bound(none)
    return (at_zero / (at_zero - reversal_bound(unit))) ** 0.5


# Exact optimisation


@dataclass(frozen=True)
class Optimum:
    """The least exact loss over the starts of an optimiser, and each start's; an upper bound of the minimum."""

    loss: float
    losses: tuple[float, ...]
    size: float  # the largest entry of A and B there
    weights: Weights | None  # none where the copying is not that of Assumption 1


def _explained(task: Task, g: tuple[Tensor, Tensor], m: Tensor) -> tuple[Tensor, Tensor]:
    """The loss with the values best for `G^h M^h`, and those values [d, 2d]; a hair of ridge keeps it solvable."""
    _, w, target = nodes(task)
    h = torch.cat([g[0] @ m[0], g[1] @ m[1]], 1)  # [r, 2d, d]
    gram, cross = torch.einsum("sij,skj->ik", h, h), torch.einsum("sij,skj->ik", w, h)
    ridge = (1e-11 * gram.diagonal().mean() + 1e-300) * torch.eye(2 * task.d, dtype=FLOAT)
    values = torch.linalg.solve(gram + ridge, cross.T).T
    return task.d * task.sigma**2 + target - (cross * values).sum(), values


def _descend(
    loss: Callable[[Tensor], Tensor], size: int, starts: int, seed: int, steps: int
) -> tuple[Tensor, list[float]]:
    def with_gradient(at: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.tensor(at, dtype=FLOAT, requires_grad=True)
        value = loss(point)
        return value.item(), torch.autograd.grad(value, point)[0].numpy()

    generator = torch.Generator().manual_seed(seed)
    results = []
    for _ in range(starts):
        start = torch.randn(size, generator=generator, dtype=FLOAT).numpy()
        options = {"maxiter": steps, "ftol": 1e-14, "gtol": 1e-9}
        results.append(minimize(with_gradient, start, jac=True, method="L-BFGS-B", options=options))
    best = min(results, key=lambda result: result.fun)
    return torch.tensor(best.x, dtype=FLOAT), sorted(float(result.fun) for result in results)


def optimise(
    task: Task,
    rows: int,
    first_layer_value: bool,
    *,
    copy: tuple[Tensor, Tensor] | None = None,
    starts: int = 6,
    seed: int = 0,
    steps: int = 600,
) -> Optimum:
    """Minimize the exact loss under Assumption 1 over A, B (unless `copy` fixes them) and the second layer.

    L-BFGS from `starts` random points over A [rows, d], B [d - rows, d] and R; the values W are solved for every time.
    """
    d = task.d
    if rows == 0:  # the last token is zero, so is the prediction
        return Optimum(task.zero_loss, (task.zero_loss,), 0.0, None)
    copied = 0 if copy is not None else d * d

    def unpack(point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = (
            copy if copy is not None else (point[: rows * d].reshape(rows, d), point[rows * d : copied].reshape(-1, d))
        )
        return a, b, point[copied:].reshape(2, d, rows)

    def solved(point: Tensor) -> tuple[Tensor, Tensor]:
        a, b, scores = unpack(point)
        return _explained(task, attended(nodes(task)[0], copying(a, b), first_layer_value), scores @ a)

    best, losses = _descend(lambda point: solved(point)[0], copied + 2 * d * rows, starts, seed, steps)
    a, b, scores = unpack(best)
    values = torch.stack(solved(best)[1].split(d, 1))
    size = max(float(matrix.abs().max()) for matrix in (a, b) if len(matrix))
    return Optimum(losses[0], tuple(losses), size, Weights(a, b, scores, values))


def optimise_any_copy(
    task: Task, first_layer_value: bool, *, starts: int = 12, seed: int = 0, steps: int = 600
) -> Optimum:
    """Minimize without Assumption 1's form: the tokens of pair i become `F_1 (x_i; y_i)` and `F_2 (x_i; y_i)`.

    Any F of shape [d, 2d]: also sums of x and y in the same entries, which Assumption 1 leaves out. The last token
    becomes a linear map of `x_{n+1}`.
    """
    d = task.d

    def solved(point: Tensor) -> Tensor:
        first, second = point[: 4 * d * d].reshape(2, d, 2 * d)
        c = nodes(task)[0]
        g = first @ c @ first.T + second @ c @ second.T
        other = c[:, :d] @ first.T + c[:, d:] @ second.T if first_layer_value else g
        return _explained(task, (g, other), point[4 * d * d :].reshape(2, d, d))[0]

    best, losses = _descend(solved, 6 * d * d, starts, seed, steps)
    return Optimum(losses[0], tuple(losses), float(best[: 4 * d * d].abs().max()), None)


# Sampling


def sample(task: Task, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return `count` sequences: tokens [count, d, 2n + 1] and the answers `y_{n+1}` [count, d]."""
    d, n = task.d, task.n

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator, dtype=FLOAT)

    w = task.prior * torch.eye(d, dtype=FLOAT) + normal(d, d)
    x = normal(d, n + 1)
    y = w @ x + task.sigma * normal(d, n + 1)
    return torch.stack([x, y], -1).flatten(-2)[..., :-1], y[..., -1]


def half_width(values: Tensor) -> float:
    """Return half the 95 % interval of the mean of many independent values."""
    return 1.959964 * float(values.std()) / len(values) ** 0.5


def sampled_losses(task: Task, models: list[tuple[Weights, bool]], count: int, seed: int, chunk: int = 5000) -> Tensor:
    """Return squared errors [len(models), count] of `forward`, all models on the same sequences."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for begin in range(0, count, chunk):
        tokens, answers = sample(task, min(chunk, count - begin), generator)
        errors = [forward(weights, tokens, skip) - answers for weights, skip in models]
        parts.append(torch.stack([(error**2).sum(1) for error in errors]))
    return torch.cat(parts, 1)


def proof_constant(task: Task, rows: int, count: int, seed: int) -> Tensor:
    """Return samples [count] whose mean is the proof's constant, `|L Y X^T - (its best approximation of rank a)|^2`.

    At `W_0 = 0`. L is the diagonal of the proof, all entries `1 / (n + d + 1 + sigma^2)`.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, _ = sample(task, count, generator)
    product = tokens[..., 1::2] @ tokens[..., 0:-1:2].transpose(1, 2)
    singular = torch.linalg.svdvals(product * task.signal / task.n)
    return (singular[:, rows:] ** 2).sum(1)


def last_step(task: Task, count: int, seed: int) -> Tensor:
    """Return samples [count] of `sigma_d(W X X^T) - |eps X^T|_2`, whose mean the proof needs to be positive."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator, dtype=FLOAT)

    w, x = task.prior * torch.eye(task.d, dtype=FLOAT) + normal(task.d, task.d), normal(task.d, task.n)
    noise = task.sigma * normal(task.d, task.n) @ x.transpose(1, 2)
    clean = torch.linalg.svdvals(w @ x @ x.transpose(1, 2))[:, -1]
    return clean - torch.linalg.svdvals(noise)[:, 0]
