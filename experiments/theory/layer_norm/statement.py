"""A change of basis through a normalisation layer.

Karbevski & Mijoski 2025, appendix C, Lemma C.1, Remarks 5 and 6, Theorem C.2. https://arxiv.org/abs/2510.23912

For `L(x) = (x - mean) / sqrt(var + eps)` and an invertible A [d, d] there are a diagonal D and a map f with

    L(f(x)) = D A L(x)  for all x,    f(x) = L^-1(M_0 L(x)) + h(x) 1,    M_0 = D A,

where D is `lambda diag(A^-T 1)`, for it to keep the zero-mean subspace H, and lambda makes the norm of M_0 on H one,
for it to keep the ball that L maps to. RMSNorm has no H: D = I / ||A||. DyT maps to a cube: D divides every row of A by
the sum of its absolute values. For LayerNorm there is no other D up to lambda, since `1^T D A` has to vanish on H; any
smaller lambda does as well.

Vectors are the last dimension, [..., d]; matrices act on columns, so `M x` is `x @ M.T`. Everything in float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT = torch.float64


class Conjugacy(NamedTuple):
    """D as its diagonal [d], and `M_0 = D A` [d, d]."""

    diagonal: Tensor
    matrix: Tensor


def layer_norm(x: Tensor, eps: float) -> Tensor:
    """Return LayerNorm without weight and bias: [..., d] -> H, norm below sqrt(d)."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Return RMSNorm without weight: [..., d] -> [..., d], norm below sqrt(d)."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def radial_inverse(z: Tensor, eps: float) -> Tensor:
    """Return the c with norm(c) = z, of mean zero under LayerNorm: `sqrt(d eps / (d - ||z||^2)) z` for `||z||^2 < d`.

    Raises:
        ValueError: a z outside the ball, which no c is mapped to.
    """
    d = z.shape[-1]
    room = d - z.square().sum(-1, keepdim=True)
    if (room <= 0).any():
        raise ValueError("a vector outside the ball of radius sqrt(d) is the norm of none")
    return (d * eps / room).sqrt() * z


def conjugacy(a: Tensor, norm: str) -> Conjugacy:
    """Return D and M_0 for an invertible A [d, d] and norm "layernorm", "rmsnorm" or "dyt"."""
    if norm == "layernorm":
        ones = torch.ones(len(a), dtype=a.dtype)
        diagonal = torch.linalg.solve(a.T, ones)
        matrix = diagonal[:, None] * a
        centred = matrix - matrix.mean(1, keepdim=True)  # M P, with P the projection onto H
        scale = 1 / torch.linalg.matrix_norm(centred, 2)
        return Conjugacy(scale * diagonal, scale * matrix)
    if norm == "rmsnorm":
        diagonal = torch.ones(len(a), dtype=a.dtype) / torch.linalg.matrix_norm(a, 2)
    else:
        diagonal = 1 / a.abs().sum(1)
    return Conjugacy(diagonal, diagonal[:, None] * a)


def carried(x: Tensor, matrix: Tensor, norm: str, eps: float) -> Tensor:
    """Return f(x) [..., d] with h = 0, for the M_0 of `conjugacy`. DyT is `tanh(x)` here; see `normalised`.

    Raises:
        ValueError: a matrix that takes L(x) out of what L maps to.
    """
    image = normalised(x, norm, eps) @ matrix.T
    if norm == "dyt":
        return torch.atanh(image)
    return radial_inverse(image, eps)


def normalised(x: Tensor, norm: str, eps: float) -> Tensor:
    """Return L(x). DyT has alpha = gamma = 1, beta = 0: A and D absorb the scalings alpha and gamma, but not beta."""
    if norm == "dyt":
        return torch.tanh(x)
    return layer_norm(x, eps) if norm == "layernorm" else rms_norm(x, eps)


def defect(x: Tensor, matrix: Tensor, norm: str, eps: float) -> Tensor:
    """Return `||L(f(x)) - M_0 L(x)|| / ||M_0 L(x)||` [...]: zero if the identity holds."""
    expected = normalised(x, norm, eps) @ matrix.T
    reached = normalised(carried(x, matrix, norm, eps), norm, eps)
    return (reached - expected).norm(dim=-1) / expected.norm(dim=-1)


def contraction(x: Tensor, matrix: Tensor, norm: str, eps: float) -> Tensor:
    """Return alpha(x) [...] of `f(x) = alpha(x) M_0 (x - mean)`: `(1 + (||y||^2 - ||M_0 y||^2) / (d eps))^-1/2`.

    LayerNorm and RMSNorm (there y = x, not centred) alone; f is near to M_0 where alpha is near to one. NaN where the
    bracket is negative: M y is so long that no f exists.
    """
    y = x - x.mean(-1, keepdim=True) if norm == "layernorm" else x
    gap = y.square().sum(-1) - (y @ matrix.T).square().sum(-1)
    return (1 + gap / (y.shape[-1] * eps)) ** -0.5


class Defects(NamedTuple):
    """`1 - ||Sigma u||^2` for unit u uniform on the sphere, [matrices * vectors]: the metric defect of Remark 5,
    `(||y||^2 - ||Sigma y||^2) / ||y||^2`, of Sigma as it is and clamped to at most one; and the mean of its largest
    singular value."""

    plain: Tensor
    clamped: Tensor
    largest: float


def random_defects(d: int, matrices: int, vectors: int, seed: int) -> Defects:
    """Return the defects of matrices of N(0, 1/d) entries, with Sigma their singular values."""
    generator = torch.Generator().manual_seed(seed)
    plain, clamped, largest = [], [], []
    for _ in range(matrices):
        values = torch.linalg.svdvals(torch.randn(d, d, generator=generator, dtype=FLOAT) / d**0.5)
        u = torch.randn(vectors, d, generator=generator, dtype=FLOAT)
        squares = u.square() / u.square().sum(1, keepdim=True)
        plain.append(1 - squares @ values.square())
        clamped.append(1 - squares @ values.clamp(max=1).square())
        largest.append(float(values[0]))
    return Defects(torch.cat(plain), torch.cat(clamped), sum(largest) / matrices)


def clamped_defect_limit() -> float:
    """Return the clamped mean defect for large d: `1 - E min(s, 1)^2`, where s follows the quarter-circle law
    `sqrt(4 - s^2) / pi` on [0, 2], which the singular values of a square matrix of N(0, 1/d) entries tend to."""
    from scipy.integrate import quad

    below, _ = quad(lambda s: s**2 * (4 - s**2) ** 0.5 / torch.pi, 0, 1)
    above, _ = quad(lambda s: (4 - s**2) ** 0.5 / torch.pi, 1, 2)
    return 1 - below - above


def alpha_deviation(defects: Tensor, ratio: float, d: int) -> tuple[float, float]:
    """Return the median of |1 - alpha| over the y for which f exists, and the share of those for which it does not.

    At `||y||^2 = ratio d^{3/2} eps`, where Remark 5 has `|1 - alpha| = O(ratio)`; `defects` as in `Defects`. A mean
    square need not be finite, since the bracket comes near zero.
    """
    bracket = 1 + ratio * d**0.5 * defects
    alpha = bracket[bracket > 0] ** -0.5
    return float((1 - alpha).abs().median()), float((bracket <= 0).to(FLOAT).mean())


def shifted_box_escape(matrix: Tensor, low: float, high: float) -> bool:
    """Return whether `D A` leaves the cube (low, high)^d for every diagonal D.

    It does if some row of A takes the value zero on the cube, which no factor moves, and zero is not in it. So DyT with
    a bias beta of `|beta| >= |gamma|` has no f for such A.
    """
    least = matrix.clamp(min=0).sum(1) * low + matrix.clamp(max=0).sum(1) * high
    most = matrix.clamp(min=0).sum(1) * high + matrix.clamp(max=0).sum(1) * low
    return bool((low >= 0 or high <= 0) and ((least < 0) & (most > 0)).any())


def linear_error(x: Tensor, y: Tensor) -> float:
    """Return `||y - G x - g|| / ||y - mean||` on the second half of the rows for the affine map fitted to the first.

    One where no affine map predicts anything, zero for an affine y. x and y [n, d].
    """
    half = len(x) // 2
    features = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    fitted = torch.linalg.lstsq(features[:half], y[:half], driver="gelsd").solution
    rest = y[half:]
    return float((rest - features[half:] @ fitted).norm() / (rest - rest.mean(0)).norm())
