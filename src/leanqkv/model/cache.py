"""The key/value cache: one entry per tensor of the plan, nothing else, inside transformers' own cache classes.

`DynamicCache(config=...)` and `StaticCache(config=...)`, which `generate` builds by itself, find the layers below
through `config.layer_types`. What a layer stores is what the plan says it computes; borrowed heads are stored once,
where they are computed, and a layer that computes nothing stores nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)


class _Growing:
    """Crops what is stored, as a layer that computes nothing is never initialized; and a reset forgets all of it."""

    keys: Tensor | None
    values: Tensor | None
    is_initialized: bool

    def crop(self, tokens_to_remove: int) -> None:
        if self.is_initialized:
            super().crop(tokens_to_remove)  # type: ignore[misc]

    def reset(self) -> None:
        # transformers 5.17 keeps as many tokens, of zeros
        self.keys, self.values, self.is_initialized = None, None, False
        super().reset()  # type: ignore[misc]


class LeanDynamicLayer(_Growing, DynamicLayer):
    """Grows with every token; keys and values may differ in their number of heads."""


class LeanDynamicWindowLayer(_Growing, DynamicSlidingWindowLayer):
    """Keeps the last `sliding_window - 1` tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        histories = super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        if key_states.shape[-2] > 1:  # a copy in every step would take longer than what it frees is worth
            self.keys, self.values = _own(self.keys), _own(self.values)
        return histories


class LeanStaticLayer(StaticLayer):
    """Allocated once for `max_cache_len` tokens; the parent makes as many value heads as there are key heads.

    shapes: heads and their width, of the two tensors that `update` takes.
    """

    def __init__(self, max_cache_len: int, shapes: Sequence[tuple[int, int]], **kwargs):
        super().__init__(max_cache_len, **kwargs)
        self.shapes = shapes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if not key_states.shape[-2]:  # from `early_initialization`, which knows one shape for all that is cached
            key_states, value_states = (key_states.new_empty(len(key_states), n, 0, width) for n, width in self.shapes)
        super().lazy_initialization(key_states, value_states)
        self.values = value_states.new_zeros((*value_states.shape[:2], self.max_cache_len, value_states.shape[-1]))
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.values)


class LeanStaticWindowLayer(LeanStaticLayer, StaticSlidingWindowLayer):
    """The same for a window."""


def _own(window: Tensor) -> Tensor:
    """The parent keeps a view, and with it a whole prompt of which only the end is needed."""
    if torch.compiler.is_compiling():  # which knows no storages
        return window
    return window.clone() if window.untyped_storage().nbytes() > window.nbytes else window


def layer_type(layer) -> str:
    """The name under which transformers finds the cache layer for a layer of the plan.

    transformers passes nothing to layer types of others, so every window and every shape is a type of its own. A layer
    that computes nothing never updates its cache layer, which then allocates nothing.
    """
    shapes = [(tensor.num_heads, tensor.head_dim) for tensor in layer.cached]
    shapes += [(0, shapes[0][1] if shapes else 0)] * (2 - len(shapes))
    name = "_".join(("leanqkv_attention", *(f"{heads}x{width}" for heads, width in shapes)))
    dynamic: Callable = LeanDynamicLayer
    static: Callable = partial(LeanStaticLayer, shapes=shapes)
    if layer.window is not None:
        name += f"_window_{layer.window}"
        dynamic = partial(LeanDynamicWindowLayer, sliding_window=layer.window)
        static = partial(LeanStaticWindowLayer, shapes=shapes, sliding_window=layer.window)
    # transformers names some settings of the configuration, which the plan has taken into account.
    DYNAMIC_LAYER_TYPE_MAPPING[name] = lambda **settings: dynamic()  # type: ignore[assignment]
    STATIC_LAYER_TYPE_MAPPING[name] = lambda max_cache_len, **settings: static(max_cache_len)  # type: ignore[assignment]
    return name


def dynamic_cache(layers) -> DynamicCache:
    """`DynamicCache(config=...)`, of layers that are planned already: a compiled forward pass cannot make a plan."""
    cache = DynamicCache()
    cache.layers = [DYNAMIC_LAYER_TYPE_MAPPING[layer_type(layer)]() for layer in layers]
    return cache


def check_shapes(layers, cache: Cache) -> None:
    """Refuse a cache that other code filled with tensors of other shapes than these layers of a plan keep."""
    for layer, held in zip(layers, cache.layers, strict=False):
        if type(held) is not DynamicLayer or not held.is_initialized or not layer.cached:
            continue
        assert held.keys is not None and held.values is not None
        found = [(states.shape[1], states.shape[-1]) for states in (held.keys, held.values) if states.shape[1]]
        wanted = [(tensor.num_heads, tensor.head_dim) for tensor in layer.cached]
        if found != wanted:
            raise ValueError(
                f"the cache given holds {_in_words(found)} in layer {layer.layer}, where this model keeps "
                f"{_in_words(wanted)}: PEFT's prefix tuning knows one shape for keys and values of all layers, so use "
                "prompt tuning or LoRA, and make a cache of your own with DynamicCache(config=model.config)"
            )


def _in_words(shapes: Sequence[tuple[int, int]]) -> str:
    return " and ".join(f"{heads} heads of {width}" for heads, width in shapes)


def cache_bytes(past_key_values: Cache) -> int:
    """Bytes of key/value memory that `past_key_values` really holds: each storage once, and whole, so that a view into
    a larger tensor counts as the larger tensor. Of a quantized cache, its scales and offsets too."""
    tensors = [tensor for layer in past_key_values.layers for tensor in cached_tensors(layer)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def cached_tensors(layer: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory of their own that a layer of a cache holds its tokens in."""
    for name in ("keys", "values", "_quantized_keys", "_quantized_values", "paged"):
        yield from _plain_tensors(getattr(layer, name, None))


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors with memory of their own that `value` is made of."""
    if hasattr(value, "tensors"):  # pages
        yield from value.tensors
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _plain_tensors(part)
    elif is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor) and value.numel():
        yield value
