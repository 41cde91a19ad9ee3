"""SVD: the best approximation of W_V W_O by matrices as narrow as the heads that stay.

Wu et al. 2025 (P3), appendix B.1: "construct a best H'-rank approximation to the original W_O W_V using SVD".
https://github.com/Zhoutong-Wu/SkipV1Former
"""

import torch

from .heads import KeptHeads, ValueHeads


def svd(heads: ValueHeads, kept: int) -> KeptHeads:
    """Our reading: the product of the whole matrices, in which heads are added up and their patterns do not count.

    Its rank is that of `kept` heads, and the singular values are shared evenly by both factors. The other columns of
    W_O are zero. A value bias, which attention passes on whole, becomes one that W_O passes on alike, as far as it can.
    """
    n, width, _ = heads.value.shape
    group = heads.output.shape[1]
    product = torch.einsum("hkd,hgok->do", heads.value, heads.output)
    left, sigma, right = torch.linalg.svd(product)
    rank = kept * width
    root = sigma[:rank].sqrt()
    value = (left[:, :rank] * root).T.unflatten(0, (kept, width))
    columns = (root[:, None] * right[:rank]).unflatten(0, (kept, width)) / group  # [kept, width, d]
    output = torch.zeros_like(heads.output)
    output[:kept] = columns.transpose(1, 2)[:, None]
    bias = None
    if heads.value_bias is not None:
        passed = torch.einsum("hk,hgok->o", heads.value_bias, heads.output)
        solved = torch.linalg.lstsq((columns * group).flatten(0, 1).T, passed[:, None], driver="gelsd").solution
        bias = solved.view(kept, width)
    return KeptHeads(value, bias, output, tuple(range(n)))
