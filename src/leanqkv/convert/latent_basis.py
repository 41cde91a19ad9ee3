"""A basis of a latent in which most heads read few of its columns.

Ours. A latent mixes all heads, so that in most of its bases every head is made of every column, and when decoding every
query reads them all. The latents here have columns of whole heads first, and behind them what is orthogonal to these,
where an error of any column counts as much as in the best latent: a whole head reads its own columns alone.

Rounding, or codes, put an error into every column that grows with the column. Heads that are no longer whole are sums
of columns, some of which cancel; there are as many whole heads as leave these errors about as large as they were.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# How much larger the mean square of attention's output that errors of the columns leave may become.
MOST_NOISE = 1.25


def leverage(combine: Tensor, restore: Tensor, heads: int) -> Tensor:
    """Return how many columns' worth of each head a latent holds, [heads]: all of them, or fewer.

    combine [width, rank], restore [rank, width]: of a latent, see `approximate`.
    """
    return (combine * restore.mT).real.sum(1).unflatten(0, (heads, -1)).sum(1)


def whole_heads_first(
    combine: Tensor, restore: Tensor, gains: Tensor, order: Sequence[Tensor]
) -> tuple[Tensor, Tensor, int]:
    """Return the same latent, `combine` and `restore`, in a basis of whole heads and the rest, and how many are whole.

    Args:
        combine [width, rank], restore [rank, width], gains [rank]: of a latent, see `approximate`.
        order: the rows of each head, those that shall be whole before others first.
    """
    up, rank = restore.mT, restore.shape[0]
    rows = torch.stack([*order])
    for count in range(min(len(rows), rank // rows.shape[1]), 0, -1):
        own = rows[:count].flatten()
        basis, inverse, noise = _basis(up[own], gains)
        if noise <= MOST_NOISE:
            made = up @ inverse
            made[own] = torch.eye(len(own), rank, dtype=made.dtype)
            return combine @ basis.mT, made.mT.contiguous(), count
    return combine, restore, 0


def _basis(own: Tensor, gains: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the basis [rank, rank] whose first rows are `own`, its inverse, and the noise: how much of an error of the
    output errors of its columns leave, by that of the old columns, which are uncorrelated and count alike."""
    count = len(own)
    orthogonal, triangle = torch.linalg.qr(own.mH, mode="complete")
    # own = triangle^H orthogonal[:, :count]^H
    identity = torch.eye(count, dtype=own.dtype)
    inverse = orthogonal[:, :count] @ torch.linalg.solve_triangular(triangle[:count].mH, identity, upper=False)
    rest = orthogonal[:, count:]
    if rest.shape[1]:
        # Behind the whole heads the columns are those of most energy first, as before: what shares scales is alike.
        rest = rest @ torch.linalg.eigh(rest.mH @ (gains[:, None] * rest))[1].flip(1)
    kept = (own.abs().square() @ gains * inverse.abs().square().sum(0)).sum()
    noise = (kept + (rest.abs().square().mT @ gains).sum()) / gains.sum()
    return torch.cat((own, rest.mH)), torch.cat((inverse, rest), dim=1), float(noise)
