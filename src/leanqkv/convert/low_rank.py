"""Weighted low-rank approximation of a layer's values, for every rank at once."""

import torch
from torch import Tensor

# Directions in which the output matrix is smaller than this share of the largest are left alone.
SMALLEST = 1e-9

# A matrix is large from this width on, and at most one in so many of its eigenvectors are few; steps to find them.
LARGE, FEW, ITERATIONS = 1024, 8, 8
# Eigenvectors of a matrix of width n take the time of a product of so many times n^3 operations.
EIGENVECTORS = 45


def approximate(gram: Tensor, weight: Tensor, rank: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best approximation of values X by `X @ combine[:, :r] @ restore[:r]`, for every rank r.

    Best is what leaves the smallest sum of squares of the error times the output matrix W. With R the root of W W^H, it
    keeps the first eigenvectors H of R X^H X R: `combine = R H` and `restore = H^H / R`.

    Args:
        gram: [width, width], X^H X, in float64 or complex128.
        weight: W W^H, of the same shape, or [blocks, size, size], the blocks on its diagonal.
        rank: how many columns are asked for; None: all.

    Returns:
        combine [width, rank], restore [rank, width], and [rank] the error that each column takes away, descending.
    """
    root, inverse = _roots(weight if weight.dim() == 3 else weight[None])
    inner = _times(root, _times(root, gram).mH)
    gains, vectors = _eigenvectors((inner + inner.mH) / 2, len(inner) if rank is None else rank)
    return _times(root, vectors), _times(inverse, vectors).mH.contiguous(), gains.clamp_min(0)


def _eigenvectors(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues, descending, and their vectors [width, count].

    Of a large matrix a few are found by subspace iteration with twice as many vectors (Halko et al. 2011,
    https://arxiv.org/abs/0909.4061): all of them would take a hundred times as long.
    """
    width = len(matrix)
    if width < LARGE or FEW * count > width:
        values, vectors = torch.linalg.eigh(matrix)
        return values.flip(0)[:count], vectors.flip(1)[:, :count]
    draws = torch.randn(width, 2 * count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = draws.to(matrix.dtype)
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix @ basis).Q
    values, vectors = torch.linalg.eigh(basis.mH @ matrix @ basis)
    return values.flip(0)[:count], basis @ vectors.flip(1)[:, :count]


def _times(blocks: Tensor, matrix: Tensor) -> Tensor:
    """A block diagonal matrix times `matrix`."""
    return (blocks @ matrix.unflatten(0, blocks.shape[:2])).flatten(0, 1)


def _roots(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square roots, and their inverses on the directions that count."""
    values, vectors = torch.linalg.eigh(matrices)
    counts = values > SMALLEST * values.amax().clamp_min(torch.finfo(values.dtype).tiny)
    roots = values.clamp_min(0).sqrt()
    inverse = torch.where(counts, 1 / roots.where(counts, torch.ones_like(roots)), 0)
    return (vectors * roots[:, None]) @ vectors.mH, (vectors * inverse[:, None]) @ vectors.mH
