"""Least squares for attention's values and output weights, in turns, from Gram matrices in float64.

The attention output of a layer is `X D W`: X are the features of its heads, D is block diagonal with the value matrices
V that are fitted, W is W_O with its bias. With V fixed, W solves a ridge regression; with W fixed, so does each V.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from ..errors import LeanError

GRAM_ROWS = 512
CG_TOLERANCE, CG_ITERATIONS = 1e-7, 500


def add_gram(gram: Tensor, features: Tensor, rows: int = GRAM_ROWS) -> None:
    """Add `features^T @ features` to the upper triangle of `gram`, `rows` of it at a time; the rest is undefined."""
    for start in range(0, len(gram), rows):
        part = slice(start, start + rows)
        gram[part, start:] += features[:, part].T @ features[:, start:]


def ridge(gram: Tensor, cross: Tensor, start: Tensor, strength: float) -> Tensor:
    """Return the W that minimizes `|T - X W|^2 + damping |W - start|^2`, given `gram = X^T X` and `cross = X^T T`.

    Any leading dimensions. The damping is `strength` times the mean of the Gram matrix's diagonal. Where X is zero, W
    is `start`.
    """
    damping = strength * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    damping = torch.where(damping > 0, damping, 1)[..., None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype)
    return start + torch.linalg.solve(gram + damping, cross - gram @ start)


@dataclass(frozen=True)
class LayerTerm:
    """One layer's least-squares term `weight * |T - X D W|^2`.

    Attributes:
        gram: X^T X. Of X's columns the first `leading` go to W directly, then come those of the fitted values, head by
            head and query head by query head; all that follow go to W directly, too.
        cross: X^T T, [columns, hidden_size].
        target_square: |T|^2.
        output: W before the fit, to which it is pulled, [rows, hidden_size].
        group: query heads per value head.
        leading: columns ahead of those of the fitted values.
        weight: how much the layer's error counts.
    """

    gram: Tensor
    cross: Tensor
    target_square: float
    output: Tensor
    group: int
    leading: int
    weight: float = 1.0

    def expand(self, values: Tensor, matrix: Tensor) -> Tensor:
        """Return D @ matrix for `values` [heads, inputs, head_dim]; with transposed values, D^T @ matrix."""
        heads, _, width = values.shape
        end = self.leading + heads * self.group * width
        blocks = matrix[self.leading : end].unflatten(0, (heads, self.group, width))
        return torch.cat((matrix[: self.leading], (values[:, None] @ blocks).flatten(0, 2), matrix[end:]))

    def fit_output(self, values: Tensor, strength: float) -> tuple[Tensor, float]:
        """Return the W that fits best with these values, and the weighted squared error that it leaves."""
        gram = self.expand(values.mT, self.expand(values.mT, self.gram).T)
        cross = self.expand(values.mT, self.cross)
        output = ridge(gram, cross, self.output, strength)
        return output, self.weight * (self.target_square + float((output * (gram @ output - 2 * cross)).sum()))

    def value_equation(self, head: int, values: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `sum over q, r of A_qr V M_rq = right`, the equation for the step V of one head away from `values`.

        q and r are the query heads of the group, A [q, inputs, r, inputs] their part of X^T X, and
        M [r, head_dim, q, head_dim] the products of their rows of W = `output`.
        """
        _, inputs, width = values.shape
        rows = output[self.leading + head * self.group * width :][: self.group * width]
        by_query = rows.unflatten(0, (self.group, width))
        start, right = self.leading + head * self.group * inputs, torch.zeros_like(values[head])
        for q, query_rows in enumerate(by_query):
            own = slice(start + q * inputs, start + (q + 1) * inputs)
            # In this order nothing is as large as the Gram matrix times all of W.
            explained = self.gram[own] @ self.expand(values, output @ query_rows.T)
            right += self.weight * (self.cross[own] @ query_rows.T - explained)
        own = slice(start, start + self.group * inputs)
        gram = (self.weight * self.gram[own, own]).view(self.group, inputs, self.group, inputs)
        return gram, torch.einsum("rkd,qld->rkql", by_query, by_query), right


def fit_values(
    terms: Sequence[LayerTerm],
    start: Tensor,
    strength: float,
    updates: int,
    tolerance: float,
    on_iteration: Callable[[int], None] = lambda iteration: None,
) -> tuple[Tensor, list[Tensor], float]:
    """Fit the values that all terms share and W of every term, in turns; return both and the sum of the terms' errors.

    Args:
        start: values [heads, inputs, head_dim] before the fit, to which they are pulled.
        strength: of the pull, as a share of the mean of a Gram matrix's diagonal.
        updates: of the values, at most.
        tolerance: stop where a turn lowers the error by a smaller share.
        on_iteration: called with the number of each turn, from 1.
    """
    values, error = start, torch.inf
    outputs: list[Tensor] = []
    for update in range(updates + 1):
        on_iteration(update + 1)
        if update:
            values = update_values(terms, outputs, values, start, strength)
        previous, fits = error, [term.fit_output(values, strength) for term in terms]
        outputs, error = [output for output, _ in fits], sum(term_error for _, term_error in fits)
        if previous - error < tolerance * error:
            break
    return values, outputs, error


def update_values(
    terms: Sequence[LayerTerm], outputs: Sequence[Tensor], values: Tensor, start: Tensor, strength: float
) -> Tensor:
    """Return `values` after one round over the heads: each is fitted with W = `outputs` and the other heads fixed."""
    values = values.clone()
    for head in range(len(values)):
        # The step away from `start` is what is pulled to zero.
        others = values.clone()
        others[head] = start[head]
        equations = [term.value_equation(head, others, output) for term, output in zip(terms, outputs, strict=True)]
        values[head] = start[head] + solve_value(equations, values[head] - start[head], strength)
    return values


def solve_value(equations: Sequence[tuple[Tensor, Tensor, Tensor]], guess: Tensor, strength: float) -> Tensor:
    """Return the V that solves the sum of `equations` (see `value_equation`), damped; `guess` where they are all zero.

    One equation of one query head is solved in closed form by two damped ridge regressions, others by conjugate
    gradients from `guess`.
    """
    right = torch.stack([layer_right for _, _, layer_right in equations]).sum(0)
    factors = [(gram, product) for gram, product, _ in equations]
    if len(factors) == 1 and len(factors[0][0]) == 1:
        gram, product = factors[0][0][0, :, 0], factors[0][1][0, :, 0]
        half = ridge(product, right.T, torch.zeros_like(right.T), strength).T
        return ridge(gram, half, torch.zeros_like(half), strength)
    damping = strength * sum(float(_diagonal(gram).mean() * _diagonal(product).mean()) for gram, product in factors)

    def apply(value: Tensor) -> Tensor:
        total = damping * value
        for gram, product in factors:
            total = total + (gram.flatten(2) @ torch.einsum("jk,rkql->qrjl", value, product).flatten(1, 2)).sum(0)
        return total

    return conjugate_gradients(apply, right, guess, kronecker_inverse(factors, damping)) if damping else guess


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    right: Tensor,
    guess: Tensor,
    precondition: Callable[[Tensor], Tensor],
    max_iterations: int = CG_ITERATIONS,
) -> Tensor:
    """Return the matrix V with `apply(V) = right`, up to a residual of CG_TOLERANCE relative to `right`.

    Args:
        apply: linear, symmetric and positive definite; `precondition`, nearly its inverse, as well.

    Raises:
        LeanError: no convergence within `max_iterations`.
    """

    def operator(function: Callable[[Tensor], Tensor]) -> LinearOperator:
        def on_vector(vector: np.ndarray) -> np.ndarray:
            return function(torch.from_numpy(vector).view(right.shape)).numpy().ravel()

        return LinearOperator((right.numel(), right.numel()), on_vector, dtype=np.float64)

    solution, not_converged = cg(
        operator(apply),
        right.numpy().ravel(),
        guess.numpy().ravel(),
        rtol=CG_TOLERANCE,
        maxiter=max_iterations,
        M=operator(precondition),
    )
    value = torch.from_numpy(solution).view(right.shape)
    if not_converged:
        residual = float((right - apply(value)).norm() / right.norm())
        raise LeanError(
            f"the fit of a value matrix did not converge: a relative residual of {residual:.1e} is left after "
            f"{max_iterations} steps of conjugate gradients. Use more calibration text, or leave the fit out with "
            "`refit_lent=False` or `refit_values=False`"
        )
    return value


def kronecker_inverse(factors: Sequence[tuple[Tensor, Tensor]], damping: float) -> Callable[[Tensor], Tensor]:
    """Return a preconditioner: the function from `right` to the V with `A V M + damping V = right`.

    One A and one M stand for all factors: each is the sum of its kind, weighted by the traces of the other.
    """
    left: Any = 0
    right: Any = 0
    total: Any = 0
    for gram, product in factors:
        gram_traces, product_traces = torch.einsum("qiri->qr", gram), torch.einsum("rkqk->qr", product)
        left += torch.einsum("qirj,qr->ij", gram, product_traces)
        right += torch.einsum("rkql,qr->kl", product, gram_traces)
        total += (gram_traces * product_traces).sum()
    (left_scales, left), (right_scales, right) = torch.linalg.eigh(left), torch.linalg.eigh(right)
    scales = left_scales.clamp_min(0)[:, None] * right_scales.clamp_min(0) / total + damping
    return lambda residual: left @ (left.T @ residual @ right / scales) @ right.T


def _diagonal(blocks: Tensor) -> Tensor:
    """The diagonal of a matrix [q, i, q, i]."""
    return blocks.flatten(2).flatten(0, 1).diagonal()
