"""Multi-head attention written with block Hadamard products, and head by head.

Karbevski & Mijoski 2025, appendix A: equation 2, Propositions 3.2 and A.2. https://arxiv.org/abs/2510.23912

With `F = (F_1 | ... | F_h)` and `G` of stacked blocks `G_1, ..., G_h`,

    F box^t G = (F_1 G_1 | ... | F_h G_h),    A box F = (A_1 F_1 | ... | A_h F_h),
    S_c(X) = Softmax_M( (X W_Q) box^t (X W_K)^T / sqrt(d_k) ) box (X W_V),

where the softmax takes each of the h blocks of n columns by itself. X is met only inside `X W_Q`, `X W_K`, `X W_V`.
Everything takes and returns the dtype it is given; the check uses float64.
"""

import math

import torch
from torch import Tensor


def multiply_blocks(f: Tensor, g: Tensor, heads: int) -> Tensor:
    """Return `F box^t G`: f [n, h d_k], g [h d_k, n] -> [n, h n]."""
    return torch.cat([left @ right for left, right in zip(f.chunk(heads, 1), g.chunk(heads, 0), strict=True)], 1)


def apply_blocks(a: Tensor, f: Tensor, heads: int) -> Tensor:
    """Return `A box F`: a [n, h n], f [n, h d_k] -> [n, h d_k]."""
    return torch.cat([left @ right for left, right in zip(a.chunk(heads, 1), f.chunk(heads, 1), strict=True)], 1)


def softmax_blocks(a: Tensor, mask: Tensor, heads: int) -> Tensor:
    """Return row-wise softmax within each block: a [n, h n], mask [n, n] of 0 and -inf, a 0 in each row -> [n, h n]."""
    return torch.cat([torch.softmax(block + mask, -1) for block in a.chunk(heads, 1)], 1)


def repeat_blocks(f: Tensor, groups: int, heads: int) -> Tensor:
    """Return keys or values of grouped queries, [n, groups d_k] -> [n, heads d_k]: each block heads / groups times.

    The paper says that grouped queries are covered (section 6); this is the map that `X W_K` and `X W_V` go through.
    """
    return torch.cat([block for block in f.chunk(groups, 1) for _ in range(heads // groups)], 1)


def block_attention(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, mask: Tensor, heads: int, groups: int | None = None
) -> Tensor:
    """Return equation 2: x [n, d], wq [d, heads d_k], wk and wv [d, groups d_k], mask [n, n] -> [n, heads d_k]."""
    groups = heads if groups is None else groups
    query, key, value = x @ wq, repeat_blocks(x @ wk, groups, heads), repeat_blocks(x @ wv, groups, heads)
    scale = 1 / math.sqrt(query.shape[1] // heads)
    weights = softmax_blocks(scale * multiply_blocks(query, key.T, heads), mask, heads)
    return apply_blocks(weights, value, heads)


def attention_by_heads(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, mask: Tensor, heads: int, groups: int | None = None
) -> Tensor:
    """Return the same after section 3: head i from its own columns `W^i` of each matrix, then side by side."""
    groups = heads if groups is None else groups
    width = wq.shape[1] // heads
    outputs = []
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        group = head * groups // heads
        shared = slice(group * width, (group + 1) * width)
        scores = (x @ wq[:, own]) @ (x @ wk[:, shared]).T / math.sqrt(width)
        outputs.append(torch.softmax(scores + mask, -1) @ (x @ wv[:, shared]))
    return torch.cat(outputs, 1)


def block_diagonal_change(wq: Tensor, wk: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(W_Q D, W_K D^-T)` of Proposition 3.2 for D of blocks [h, d_k, d_k], all invertible."""
    d = torch.block_diag(*blocks)
    return wq @ d, torch.linalg.solve(d, wk.T).T
