"""Inference measured: memory, prefill and decoding of several models, side by side."""

from .memory import PeakMemory, held_bytes

__all__ = ["PeakMemory", "held_bytes"]
