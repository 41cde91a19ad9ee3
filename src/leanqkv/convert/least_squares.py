"""Least squares for attention's values and output weights, from Gram matrices in float64.

The attention output of a layer is `X D W`: X are the features of its heads, D is block diagonal with the value matrices
V that are fitted, W is W_O with its bias. Of every V the best W solves a ridge regression; over V goes L-BFGS.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

GRAM_ROWS = 512


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
    return start + ridge_step(gram, cross - gram @ start, strength)


def ridge_step(gram: Tensor, rest: Tensor, strength: float) -> Tensor:
    """Return how far `ridge` moves from its start, which leaves `rest = cross - gram @ start`."""
    damping = strength * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    damped = gram.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(torch.where(damping > 0, damping, 1)[..., None])
    return torch.cholesky_solve(rest, torch.linalg.cholesky(damped))


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

    def input_gram(self, values: Tensor) -> Tensor:
        """Return the Gram matrix of each head's inputs, summed over its group, [heads, inputs, inputs]."""
        heads, inputs, _ = values.shape
        rows = self.gram[self.leading : self.leading + heads * self.group * inputs]
        parts = rows[:, self.leading : self.leading + len(rows)].view(
            heads * self.group, inputs, heads * self.group, inputs
        )
        return parts.diagonal(dim1=0, dim2=2).permute(2, 0, 1).unflatten(0, (heads, self.group)).sum(1)

    def error(self, values: Tensor, strength: float) -> Tensor:
        """Return the weighted squared error of the W that fits best, with its pull, less the target's square.

        The gradient is that of the values with W as it is: where W is the best one, its own gradient is zero.
        """
        gram = self.expand(values.mT, self.expand(values.mT, self.gram).T)
        cross = self.expand(values.mT, self.cross)
        output = ridge(gram.detach(), cross.detach(), self.output, strength)
        damping = strength * gram.diagonal().mean()
        pull = damping * (output - self.output).square().sum()
        return self.weight * ((output * (gram @ output - 2 * cross)).sum() + pull)

    def fit_output(self, values: Tensor, strength: float) -> tuple[Tensor, float]:
        """Return the W that fits best with these values, and the weighted squared error that it leaves."""
        gram = self.expand(values.mT, self.expand(values.mT, self.gram).T)
        cross = self.expand(values.mT, self.cross)
        output = ridge(gram, cross, self.output, strength)
        return output, self.weight * (self.target_square + float((output * (gram @ output - 2 * cross)).sum()))


def fit_values(
    terms: Sequence[LayerTerm],
    start: Tensor,
    strength: float,
    updates: int,
    tolerance: float,
    on_iteration: Callable[[int], None] = lambda iteration: None,
) -> tuple[Tensor, list[Tensor], float]:
    """Fit the values that all terms share, with the W of every term that fits them best; return both and the error.

    Args:
        start: values [heads, inputs, head_dim] before the fit, to which they are pulled.
        strength: of the pull, as a share of the mean of a Gram matrix's diagonal.
        updates: steps of L-BFGS, at most.
        tolerance: stop where a step changes the share that is missed, or the values, by less.
        on_iteration: called with the number of each evaluation, from 1.
    """
    values, fits = start, [term.fit_output(start, strength) for term in terms]
    if updates and len(start):
        # In coordinates in which the Gram matrix of each head's inputs is the identity, few steps suffice.
        grams = [term.weight * term.input_gram(start) for term in terms]
        scales = _whitening(sum(grams[1:], grams[0]), strength)
        whole = sum(term.weight * term.target_square for term in terms) or 1.0
        sizes = [gram.diagonal(dim1=1, dim2=2).mean() for gram in grams]
        rows = [output.square().sum(1).mean() for output, _ in fits]
        pull = strength / whole * float(torch.stack(sizes) @ torch.stack(rows))
        step, evaluations = torch.zeros_like(start).contiguous().requires_grad_(), count(1)
        optimizer = torch.optim.LBFGS(
            [step], max_iter=updates, tolerance_grad=0, tolerance_change=tolerance, line_search_fn="strong_wolfe"
        )

        def error() -> Tensor:
            on_iteration(next(evaluations))
            step.grad = None
            values = start + scales @ step
            total = pull * (values - start).square().sum() + sum(term.error(values, strength) for term in terms) / whole
            total.backward()
            return total.detach()

        with torch.enable_grad():
            optimizer.step(error)
        values = start + scales @ step.detach()
        fits = [term.fit_output(values, strength) for term in terms]
    return values, [output for output, _ in fits], sum(error for _, error in fits)


def _whitening(grams: Tensor, strength: float) -> Tensor:
    """The inverse roots of Gram matrices [heads, inputs, inputs], damped."""
    sizes, vectors = torch.linalg.eigh(grams)
    damped = sizes.clamp_min(0) + strength * sizes.mean(-1, keepdim=True)
    return vectors * torch.where(damped > 0, damped, 1).rsqrt()[:, None] @ vectors.mT
