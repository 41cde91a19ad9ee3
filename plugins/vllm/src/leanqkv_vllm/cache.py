"""The one object per group of layers that vLLM allocates pages for."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from leanqkv.cache_bits import PLAIN, CacheBits
from leanqkv.model.cache_quantized import BLOCK

from .codes import Codes, CodesSpec
from .pages import Group, Slot


class PagedCache(nn.Module, AttentionLayerBase):
    """The pages of a group of layers. vLLM finds it by its name, and takes it for a layer with attention.

    Args:
        name: in vLLM's context, which has to end with a number.
        backend: which makes the metadata of a step.
        shapes: (query heads, key heads, window) of the attention calls that the metadata is for.
        bits: of codes in the pages.

    Attributes:
        dtype: of the model. precision: of the cache, as vLLM's `kv_cache_dtype` names it.
        codes: where codes lie in a page; None: the pages hold numbers.
        kernel, calls: the module of vLLM's kernel, and its calls by layer; none where leanqkv's own code attends.
        histories: what that code shares, of the first group of layers.
    """

    kernel: ModuleType
    calls: dict[int, list[Any]]
    histories: Any

    def __init__(
        self, name: str, group: Group, head_dim: int, backend: Any, shapes: tuple = (), bits: CacheBits = PLAIN
    ):
        super().__init__()
        config = get_current_vllm_config()
        self.layer_name, self.group, self.head_dim, self.backend, self.shapes = name, group, head_dim, backend, shapes
        self.dtype, self.precision = config.model_config.dtype, config.cache_config.cache_dtype
        self.codes = Codes(group, bits, self.dtype) if bits.quantized else None
        self.kv_cache = torch.tensor([])
        self.block_size = 0
        self._views: dict[tuple[int, str], Tensor] = {}
        config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> Any:
        """Return the backend."""
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Return what a page holds: `numbers_per_token` of every token, as one head of that many columns; or codes."""
        if self.codes is not None:
            return CodesSpec(
                block_size=BLOCK,
                num_kv_heads=1,
                head_size=self.head_dim,
                dtype=torch.uint8,
                num_head_slots=1,
                state_content_bytes=self.codes.page_bytes // BLOCK,
                tail=self.codes.tail,
            )
        self.block_size = vllm_config.cache_config.block_size
        stored = kv_cache_dtype_str_to_dtype(self.precision, vllm_config.model_config)
        given: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": 1,
            "head_size": self.head_dim,
            "dtype": stored,
            "num_head_slots": 1,
            "state_content_bytes": self.group.numbers_per_token * stored.itemsize,
        }
        if self.group.window is None:
            return FullAttentionSpec(**given)
        return SlidingWindowSpec(**given, sliding_window=self.group.window)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the allocated pages, [pages, 1, block_size, numbers per token, or bytes]."""
        self.kv_cache, self.block_size, codes = kv_cache, kv_cache.shape[2], self.codes
        pages = kv_cache.flatten(1)
        for slot in self.group.slots:
            view = slot.view(pages, self.block_size) if codes is None else codes.numbers(slot, pages)
            self._views[slot.layer, slot.name] = view

    def heads(self, layer: int, name: str) -> Tensor:
        """Return a layer's tensor in all pages, [pages, heads, block_size, columns]: as numbers."""
        return self._views[layer, name]

    def codes_of(self, slot: Slot) -> Tensor:
        """Return a tensor's codes in all pages, [pages, bytes]."""
        assert self.codes is not None
        return self.codes.codes(slot, self.kv_cache.flatten(1))
