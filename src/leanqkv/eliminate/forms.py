"""Choose among the equal forms of an elimination: bases inside the heads in which rounding loses little.

W_Q can be replaced by W_Q D with any block-diagonal D that W_K absorbs (heads.py), and so can W_K, W_V and W_O. A
stream in the basis Theta = W_Q D is rounded coordinate by coordinate, and its readers multiply that by Theta^-1: for
inputs without a preferred direction, the noise of coordinate c is its column of Theta times its row of Theta^-1, in
norm. Per head, with the Gram matrices A of the columns and B of the rows, the sum of their squares is
`sum_c A_cc B_cc`. D first balances them, A = B = diag(sigma) (Moore 1981, "Principal component analysis in linear
systems"); then a rotation with entries of equal size spreads the sigma evenly, and `(sum sigma)^2 / d_k` remains.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
import torch
from scipy.fft import dct
from scipy.linalg import hadamard
from torch import Tensor

from ..errors import LeanError
from ..model.config import LeanConfig
from .heads import SIDES, Head, HeadClasses, change_heads, free_columns
from .linalg import Basis, Factored
from .projections import Removal, weight_name

SIDE_OF = {slot: side for side, slots in SIDES.items() for slot in slots}


def balance_for_rounding(
    config: LeanConfig, tensors: Mapping[str, Tensor], removals: Iterable[Removal]
) -> Mapping[str, Tensor]:
    """Return the same function, with heads in whose basis removing `removals` loses least to rounding.

    Under rotary positions the rotated columns stay as they are. Heads that are blocked (QK-norm, a nonlinear query)
    stay whole, and so do those of a singular weight.
    """
    bases: dict[str, dict[Head, Basis]] = {side: {} for side in SIDES}
    # The output projection is last: where it shares heads with a value that goes, no stream is in its basis.
    for removal in sorted(removals, key=lambda removal: removal.slot == "output"):
        side = SIDE_OF[removal.slot]
        width = free_columns(config, side)
        if not width:
            continue
        weight = tensors[weight_name(config, removal)].double()
        if removal.slot == "output":
            weight = weight.T
        # Rows of the inverse, which here only decide between equal forms: nothing is solved with them.
        inverse, info = torch.linalg.inv_ex(weight.T)
        if info:
            continue
        weight_rows, inverse_rows = (rows.unflatten(0, (-1, config.head_dim))[:, -width:] for rows in (weight, inverse))
        for head_class, heads in _free_heads(config, removal).items():
            if head_class in bases[side]:
                continue
            columns, rows = (
                torch.einsum("hix,hjx->ij", part, part) / len(heads)
                for part in (weight_rows[heads], inverse_rows[heads])
            )
            if removal.slot == "output":
                columns, rows = rows, columns  # Theta is the inverse
            change = _balanced(columns, rows)
            if change is not None:
                basis = Basis(partial(Factored, change))
                bases[side][head_class] = basis if removal.slot == "query" else basis.transposed_inverse()
    for side, of_side in bases.items():
        if of_side:
            tensors = change_heads(config, tensors, side, of_side)
    return tensors


def keep_mean_zero(config: LeanConfig, tensors: Mapping[str, Tensor], removal: Removal) -> Mapping[str, Tensor]:
    """Return the same function with heads such that the change of basis that removes `removal` keeps the mean zero.

    `x Theta` has mean zero for every x of mean zero if and only if `Theta 1` is a multiple of 1. With Theta = W D and
    D_h a multiple of the reflection that takes 1 to v_h, where `W v = 1`, it is; the heads' columns stay orthogonal.
    Raises a LeanError for an output projection, a singular weight, and heads that are not free.
    """
    side, d = SIDE_OF[removal.slot], config.hidden_size
    width = free_columns(config, side)
    if removal.slot == "output":
        raise LeanError(f"{removal} cannot go in a model whose class subtracts the mean; remove a query, key or value")
    free = _free_heads(config, removal)
    if width != config.head_dim or any(len(heads) > 1 for heads in free.values()) or len(free) * width != d:
        raise LeanError(f"{removal}: no basis inside its heads keeps the mean zero, for they are not all free")
    weight, ones = tensors[weight_name(config, removal)].double(), torch.ones(d, dtype=torch.float64)
    try:
        directions = torch.linalg.solve(weight.T, ones).unflatten(0, (-1, width))
    except RuntimeError:
        raise LeanError(f"{removal} is singular") from None
    directions = directions / directions.norm(dim=1).median()  # any multiple of 1 will do
    bases: dict[Head, Basis] = {}
    for head_class, (head,) in free.items():
        length = directions[head].norm() / math.sqrt(width)
        across = ones[:width] - directions[head] / length
        reflection = torch.eye(width, dtype=torch.float64)
        if across.norm() > 0:
            reflection -= 2 * torch.outer(across, across) / across.square().sum()
        basis = Basis(partial(Factored, reflection * length))
        bases[head_class] = basis if removal.slot == "query" else basis.transposed_inverse()
    return change_heads(config, tensors, side, bases)


def _balanced(columns: Tensor, rows: Tensor) -> Tensor | None:
    """D [n, n] with `D^T columns D = D^-1 rows D^-T`, of constant diagonal; None where a Gram matrix is singular."""
    lower, info = torch.linalg.cholesky_ex(columns)
    squares, vectors = torch.linalg.eigh(lower.T @ rows @ lower)
    if info or squares[0] <= 0:
        return None
    balanced = torch.linalg.solve_triangular(lower.T, vectors, upper=True) * squares.sqrt().sqrt()
    return balanced @ _spreading(len(columns))


def _spreading(n: int) -> Tensor:
    """An orthogonal matrix whose entries are of one size: Hadamard's where there is one, else the cosine transform."""
    if n & (n - 1) == 0:
        return torch.from_numpy(hadamard(n, dtype=np.float64)) / math.sqrt(n)
    return torch.from_numpy(dct(np.eye(n), norm="ortho"))


def _free_heads(config: LeanConfig, removal: Removal) -> dict[Head, list[int]]:
    """Per class of heads with a free basis, the numbers of the weight's heads in it."""
    classes = HeadClasses(config, SIDE_OF[removal.slot])
    class_of = classes.consumed if removal.slot in ("query", "output") else classes.made
    free = defaultdict(list)
    for (block, head), head_class in class_of.items():
        if block == config.plan.layers[removal.layer].block and head_class not in classes.blocked:
            free[head_class].append(head)
    return free
