"""How alike heads are, and tokens: cosine similarity (Wu et al. 2025, appendix C.2).

https://github.com/Zhoutong-Wu/SkipV1Former
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BUCKETS = 8


def head_similarity(heads: Tensor) -> Tensor:
    """Return the cosine between any two heads' outputs at one token, averaged over tokens.

    heads: [batch, positions, heads, width]. Returns [heads, heads], float64, ones on the diagonal.

    Before W_O every head has coordinates of its own, which an invertible matrix between W_V and W_O changes at will
    (Karbevski & Mijoski 2025, Proposition 3.2, there for W_Q and W_K); `contributions` are free of that.
    """
    unit = F.normalize(heads.double(), dim=-1)
    return torch.einsum("bthx,btgx->hg", unit, unit) / (unit.shape[0] * unit.shape[1])


def contributions(output: nn.Module, heads: Tensor) -> Tensor:
    """Return what each head adds to the attention's output: its columns of W_O times its own output.

    output: the layer's o_proj; heads: [batch, positions, heads, width]. Returns [batch, positions, heads, hidden_size].
    """
    number, width = heads.shape[-2:]
    weight = getattr(output, "weight", None)
    if weight is None:  # without W_O the heads lie side by side
        weight = torch.eye(number * width, dtype=heads.dtype)
    return torch.einsum("bthx,dhx->bthd", heads, weight.to(heads.device).unflatten(1, (number, width)))


def token_similarity(states: Tensor) -> Tensor:
    """Return the cosine between any two tokens of a text, averaged over texts; near 1 where they are oversmoothed.

    states: [batch, positions, hidden_size]. Returns [positions, positions], float64, ones on the diagonal.
    """
    unit = F.normalize(states.double(), dim=-1)
    return (unit @ unit.mT).mean(0)


def off_diagonal_mean(similarity: Tensor) -> float:
    """Return the mean over all pairs of different heads or tokens; 1 where there is only one."""
    n = len(similarity)
    return ((similarity.sum() - similarity.trace()) / (n * (n - 1))).item() if n > 1 else 1.0


def bucketed(similarity: Tensor, buckets: int = BUCKETS) -> Tensor:
    """Return [positions, positions] averaged over `buckets` runs of positions, without pairs of a token with itself.

    Raises:
        ValueError: fewer than two positions a bucket.
    """
    n = len(similarity)
    if n < 2 * buckets:
        raise ValueError(f"{n} positions do not make {buckets} buckets of two")
    different = 1 - torch.eye(n, dtype=similarity.dtype, device=similarity.device)
    total, count = (F.adaptive_avg_pool2d(x[None], buckets)[0] for x in (similarity * different, different))
    return total / count
