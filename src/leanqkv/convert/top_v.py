"""Top V: the W_V heads of largest norm stay, everything else as it was.

Wu et al. 2025 (P3), appendix B.1: "select the H' rows with the largest norm of head projections W_V to be the new head
projections". https://github.com/Zhoutong-Wu/SkipV1Former
"""

import torch

from .heads import KeptHeads, ValueHeads


def largest(norms: torch.Tensor, kept: int) -> list[int]:
    """The places of the largest, in ascending order."""
    return sorted(norms.topk(kept).indices.tolist())


def top_v(heads: ValueHeads, kept: int) -> KeptHeads:
    """Our reading: W_V alone changes, so a head that stays stands at the place of its rank, with that place's queries,
    key and columns of W_O."""
    chosen = largest(heads.value.flatten(1).norm(dim=1), kept)
    bias = None if heads.value_bias is None else heads.value_bias[chosen]
    return KeptHeads(heads.value[chosen], bias, heads.output, tuple(range(len(heads.value))))
