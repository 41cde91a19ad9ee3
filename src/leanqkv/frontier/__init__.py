"""The frontier of a checkpoint: bytes of KV cache per token against loss, by kind of reduction and by precision."""

from .measure import Frontier
from .points import PRECISIONS, Candidate, candidates

__all__ = ["PRECISIONS", "Candidate", "Frontier", "candidates"]
