"""Initial weights: every tensor has a random stream of its own, keyed by the seed and the tensor's name.

Two variants built from one seed share the draw of every tensor they both have, and a tensor with fewer rows (value
heads, MLP neurons) gets the leading rows of the wider one: comparisons start from the same point.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor


def normal(shape: tuple[int, ...], std: float | Tensor, seed: int, name: str) -> Tensor:
    """Draw from N(0, std^2), float32 on the CPU, filled row by row from the stream of (`seed`, `name`)."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    # One value after another, so that a shorter tensor is a prefix of a longer one; torch's generators are not.
    draws = np.random.Generator(np.random.PCG64(key)).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(draws).mul_(std)
