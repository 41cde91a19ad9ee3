"""Decoding: a cache allocated once, weights laid out for few rows, and a loop with nothing else in it."""

from .cache import allocate_cache
from .decoder import Decoder, prepared

__all__ = ["Decoder", "allocate_cache", "prepared"]
