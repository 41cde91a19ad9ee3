"""Decoding: a cache allocated once, weights laid out for few rows, and a loop with nothing else in it."""

from .cache import allocate_cache
from .decoder import Decoder, prepared
from .eviction import EvictingCache

__all__ = ["Decoder", "EvictingCache", "allocate_cache", "prepared"]
