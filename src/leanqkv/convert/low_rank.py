"""Weighted low-rank approximation of a layer's values, for every rank at once."""

import torch
from torch import Tensor

# Directions in which attended values are smaller than this share of the largest are left alone.
SMALLEST = 1e-9


def approximate(gram: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best approximation of values X by `X @ combine[:, :r] @ restore[:r]`, for every rank r.

    Best is what leaves the smallest sum of squares of the error times the output matrix: a singular value decomposition
    between the roots of both arguments.

    Args:
        gram: [width, width], X^H X, in float64 or complex128.
        weight: the same shape, W W^H of the output matrix W that the values meet.

    Returns:
        combine [width, width], restore [width, width], and [width] the error that each column takes away, descending.
    """
    left, left_inverse = _roots(gram)
    right, right_inverse = _roots(weight)
    first, sizes, last = torch.linalg.svd(left @ right)
    return left_inverse @ (first * sizes), last @ right_inverse, sizes.square()


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root, and its inverse on the directions that count."""
    values, vectors = torch.linalg.eigh(matrix)
    counts = values > SMALLEST * values[-1].clamp_min(torch.finfo(values.dtype).tiny)
    roots = values.clamp_min(0).sqrt()
    inverse = torch.where(counts, 1 / roots.where(counts, torch.ones_like(roots)), 0)
    return (vectors * roots) @ vectors.mH, (vectors * inverse) @ vectors.mH
