"""Top VO: the heads whose W_V and W_O are largest stay, with their columns of W_O; the other columns are zero.

Wu et al. 2025 (P3), appendix B.1: "select the H' head projections in W_V and the H' output columns in W_O with the
highest norms". https://github.com/Zhoutong-Wu/SkipV1Former
"""

import torch

from .heads import KeptHeads, ValueHeads
from .top_v import largest


def top_vo(heads: ValueHeads, kept: int) -> KeptHeads:
    """Our reading, the one kindest to the method: both are of one head, by the product of their norms, and it keeps its
    queries and key, so that what stays is what it was."""
    n = len(heads.value)
    norms = heads.value.flatten(1).norm(dim=1) * heads.output.flatten(1).norm(dim=1)
    chosen = largest(norms, kept)
    bias = None if heads.value_bias is None else heads.value_bias[chosen]
    output = torch.cat((heads.output[chosen], torch.zeros_like(heads.output[kept:])))
    return KeptHeads(heads.value[chosen], bias, output, (*chosen, *(h for h in range(n) if h not in chosen)))
