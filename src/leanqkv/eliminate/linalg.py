"""Solving with square matrices in float64: one factorization, its condition number, never an inverse."""

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
import scipy.sparse.linalg as sparse
import torch
from torch import Tensor

# Up to this size all singular values are computed; above, the two extreme ones by Lanczos on the factorization.
FULL_SPECTRUM = 1024
# Rows that are multiplied at a time: bounds the float64 copies of an embedding or a head.
CHUNK_ROWS = 8192


class Factored:
    """A square float64 matrix A with its LU factorization."""

    def __init__(self, matrix: Tensor):
        """matrix: [d, d], any floating dtype; converted to float64 without rounding."""
        self.matrix = matrix.double()
        self._lu, self._pivots, info = torch.linalg.lu_factor_ex(self.matrix)
        self.singular = bool(info != 0)

    def solve(self, right: Tensor, transposed: bool = False) -> Tensor:
        """Return `A^-1 right`, or `A^-T right`; right: [d, n]."""
        return torch.linalg.lu_solve(self._lu, self._pivots, right, adjoint=transposed)

    @cached_property
    def extremes(self) -> tuple[float, float]:
        """The largest and the smallest singular value; the smallest of a singular matrix is 0."""
        d = len(self.matrix)
        if d <= FULL_SPECTRUM:
            values = torch.linalg.svdvals(self.matrix)
            return float(values[0]), 0.0 if self.singular else float(values[-1])
        largest = math.sqrt(_largest_eigenvalue(d, lambda v: self.matrix.T @ (self.matrix @ v)))
        if self.singular:
            return largest, 0.0
        return largest, 1 / math.sqrt(_largest_eigenvalue(d, lambda v: self.solve(self.solve(v, transposed=True))))

    @property
    def condition(self) -> float:
        """sigma_max / sigma_min, the 2-norm condition number; infinite for a singular matrix."""
        largest, smallest = self.extremes
        return largest / smallest if smallest else math.inf


def _largest_eigenvalue(d: int, product: Callable[[Tensor], Tensor]) -> float:
    """Return that of a symmetric positive operator on [d], by Lanczos from a fixed start, to one part in a thousand."""

    def apply(vector: np.ndarray) -> np.ndarray:
        return product(torch.from_numpy(vector.reshape(d, 1).copy())).numpy().reshape(d)

    operator = sparse.LinearOperator((d, d), matvec=apply, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(d)
    return float(sparse.eigsh(operator, k=1, tol=1e-3, v0=start, return_eigenvectors=False)[0])


class Basis:
    """A change of basis of row vectors, `x -> x Theta`; Theta is a matrix A, its inverse, or a transpose of either.

    Weights that write the vectors are changed by `write`, those that read them by `read`. Both take rows [n, d] of any
    floating dtype and return float64.
    """

    def __init__(self, factor: Callable[[], Factored], inverse: bool = False, transposed: bool = False):
        """`factor` returns A; it is called whenever A is needed, so that a large one need not stay in memory."""
        self.factor, self.inverse, self.transposed = factor, inverse, transposed

    def write(self, rows: Tensor) -> Tensor:
        """Return `rows Theta`."""
        factor = self.factor()
        result = torch.empty(rows.shape, dtype=torch.float64)
        for start in range(0, len(rows), CHUNK_ROWS):
            part = rows[start : start + CHUNK_ROWS].double()
            if self.inverse:
                changed = factor.solve(part.T, transposed=not self.transposed).T
            else:
                changed = part @ (factor.matrix.T if self.transposed else factor.matrix)
            result[start : start + CHUNK_ROWS] = changed
        return result

    def read(self, rows: Tensor) -> Tensor:
        """Return `rows Theta^-T`, which read `x Theta` as `rows` read `x`."""
        return self.transposed_inverse().write(rows)

    def transposed_inverse(self) -> "Basis":
        """Return Theta^-T."""
        return Basis(self.factor, not self.inverse, not self.transposed)
