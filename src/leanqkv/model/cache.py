"""The key/value cache: one entry per tensor of the plan, nothing else, inside transformers' own cache classes.

`DynamicCache(config=...)` and `StaticCache(config=...)`, which `generate` builds by itself, find the layers below
through `config.layer_types`. What a layer stores is what the plan says it computes; borrowed heads are stored once,
where they are computed, and a layer that computes nothing stores nothing.
"""

from functools import cache

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

LAYER_TYPE = "leanqkv_attention"


class LeanDynamicLayer(DynamicLayer):
    """Grows with every token; keys and values may differ in their number of heads."""

    _layer_type = LAYER_TYPE

    def crop(self, tokens_to_remove: int) -> None:
        if self.is_initialized:  # a layer that computes nothing never is
            super().crop(tokens_to_remove)


class _UnequalHeads(StaticLayer):
    """Static buffers for values with their own number of heads; the parent makes as many as there are key heads."""

    # `early_initialization` assumes as many value heads as key heads; buffers are made at the first update instead.
    supports_early_init = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads, _, self.k_head_dim = key_states.shape
        self.v_head_dim = value_states.shape[-1]
        self.keys, self.values = (
            states.new_zeros((*states.shape[:2], self.max_cache_len, states.shape[-1]))
            for states in (key_states, value_states)
        )
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            for tensor in (self.keys, self.values, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True


class LeanStaticLayer(_UnequalHeads):
    """Allocated once for `max_cache_len` tokens."""

    _layer_type = LAYER_TYPE


@cache
def windowed_layer_type(window: int) -> str:
    """The layer type of attention within the last `window` positions; transformers passes no window to layer types of
    others, so every window is a type of its own."""
    name = f"{LAYER_TYPE}_window_{window}"

    class LeanDynamicWindowLayer(DynamicSlidingWindowLayer):
        _layer_type = name

        def __init__(self, **kwargs):
            super().__init__(sliding_window=window)

        def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
            histories = super().update(key_states, value_states, *args, **kwargs)
            assert self.keys is not None and self.values is not None
            self.keys, self.values = _own(self.keys), _own(self.values)
            return histories

    class LeanStaticWindowLayer(_UnequalHeads, StaticSlidingWindowLayer):
        _layer_type = name

        def __init__(self, max_cache_len: int, **kwargs):
            super().__init__(max_cache_len=max_cache_len, sliding_window=window)

    return name


def _own(window: Tensor) -> Tensor:
    """The parent keeps a view, and with it a whole prompt of which only the end is needed."""
    return window.clone() if window.untyped_storage().nbytes() > 2 * window.nbytes else window


def layer_type(plan) -> str:
    """The cache layer for a layer of this plan. One that computes nothing never updates its own, which then allocates
    nothing."""
    return LAYER_TYPE if plan.window is None else windowed_layer_type(plan.window)


def cache_bytes(past_key_values: Cache) -> int:
    """Bytes of key/value memory that `past_key_values` really holds: each storage once, and whole, so that a view into
    a larger tensor counts as the larger tensor."""
    storages = {}
    for layer in past_key_values.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
