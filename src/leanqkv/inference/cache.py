"""A cache that is allocated once, for a known number of tokens, and read where it lies."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..cache_bits import PLAIN, CacheBits
from ..model.cache import cached_tensors
from ..model.config import LeanConfig


class AllocatedLayer(DynamicLayer):
    """Like transformers' DynamicLayer, whose history it is a drop-in for, but new tokens are written behind the old
    ones in place: nothing is concatenated, and what attention reads is a view of exactly the tokens so far, so that no
    mask has to hide the rest."""

    def __init__(self, capacity: int):
        """capacity: tokens that there is room for."""
        super().__init__()
        self.capacity = capacity
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [batch, heads, new positions, head_dim], of which either may have no heads.

        Raises:
            ValueError: more tokens than there is room for.
        """
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        assert self.keys is not None and self.values is not None
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if end > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens, {end} are to be kept")
        if self._buffers is None or any(
            held.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
            for held, buffer in zip((self.keys, self.values), self._buffers, strict=True)
            if buffer.numel()
        ):  # at first, and after a selection of sequences has put other tensors into their places
            self._buffers = (self._allocate(self.keys), self._allocate(self.values))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def _allocate(self, history: Tensor) -> Tensor:
        buffer = history.new_empty((*history.shape[:2], self.capacity, history.shape[-1]))
        buffer[:, :, : history.shape[-2]] = history
        return buffer

    def make_room(self, room: int) -> None:
        """Make room for `room` more tokens than there are."""
        held = 0 if self.keys is None else self.keys.shape[-2]
        self.capacity, self._buffers = held + room, None

    def get_max_length(self) -> int:
        return self.capacity

    def reset(self) -> None:
        self._buffers = None
        super().reset()


def allocate_cache(config: LeanConfig, capacity: int, bits: CacheBits = PLAIN) -> Cache:
    """An empty cache for `capacity` tokens, to be given as `past_key_values`.

    A layer makes its tensors, as many heads as its plan says, when the first tokens come. Layers with a sliding window
    keep transformers' own way. A quantized cache, of these `bits`, grows."""
    if bits.quantized:
        return bits.cache(config)
    cache = DynamicCache(config=config)
    cache.layers = [
        AllocatedLayer(capacity) if planned.window is None else layer
        for planned, layer in zip(config.plan.layers, cache.layers, strict=True)
    ]
    return cache


def token_bytes(cache: Cache) -> int:
    """Bytes of keys and values of the tokens in `cache`, without the room for more."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in cached_tensors(layer))


def make_room(cache: Cache, room: int) -> None:
    """Make room for `room` more tokens than `cache` holds."""
    for layer in cache.layers:
        if isinstance(layer, AllocatedLayer):
            layer.make_room(room)


def keep_rows(cache: Cache, rows: Tensor, padding: int) -> None:
    """Keep the sequences `rows` alone, without their first `padding` tokens; then call `make_room`."""
    for layer in _in_use(cache):
        length = _tokens(layer) - padding
        for name in ("keys", "values"):
            states = getattr(layer, name)
            setattr(layer, name, states[rows, :, max(states.shape[-2] - length, 0) :])
        _set_tokens(layer, length)


def join_rows(cache: Cache, other: Cache) -> None:
    """Put the sequences of `other` behind those of `cache`, padded on the left to one length; then call `make_room`."""
    for layer, added in zip(_in_use(cache), _in_use(other), strict=True):
        for name in ("keys", "values"):
            parts = [getattr(layer, name), getattr(added, name)]
            length = max(part.shape[-2] for part in parts)
            padded = [F.pad(part, (0, 0, length - part.shape[-2], 0)) for part in parts]
            setattr(layer, name, torch.cat(padded))
        _set_tokens(layer, max(_tokens(layer), _tokens(added)))


def _in_use(cache: Cache) -> list[Any]:
    """The layers that hold something; one that computes nothing does not."""
    layers: list[Any] = cache.layers
    return [layer for layer in layers if layer.is_initialized]


def _tokens(layer: Any) -> int:
    """How many tokens a layer has seen; one with a window holds fewer."""
    return getattr(layer, "cumulative_length", layer.keys.shape[-2])


def _set_tokens(layer: Any, length: int) -> None:
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = length
