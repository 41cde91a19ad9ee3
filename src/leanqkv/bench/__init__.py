"""Inference measured: memory, prefill and decoding of several models, side by side."""

from .measure import Row, measure
from .memory import PeakMemory, held_bytes, weight_bytes

__all__ = ["PeakMemory", "Row", "held_bytes", "measure", "weight_bytes"]
