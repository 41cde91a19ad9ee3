"""Pages of codes of 8, 4 or 2 bits: what lies where in them, and what vLLM is told of them.

A page holds a block of tokens as codes (PageLayout in leanqkv/model/cache_quantized.py), which are made once, when its
last token is there. Until then a request's newest tokens, fewer than a block, are the model's own numbers. These take
more room than their codes will: they lie in the page of their block and in those behind it, which vLLM reserves for
the request. So all that is known of a request is in its block table, whatever is preempted, moved or started again.

A token attends to the blocks before its own as codes, and to its own block as numbers. In what pieces a prompt is read,
and which of its blocks were found in the cache, makes no difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Self

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.utils.math_utils import round_up
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from leanqkv.cache_bits import CacheBits
from leanqkv.model.cache_quantized import BLOCK, page_layout

from .pages import Group, Slot


class Codes:
    """Where a group's tensors lie in a page, as codes of BLOCK tokens or as numbers of `tail` tokens.

    A layer's tensors take the same bytes either way: its codes are written while other layers' numbers are still read.

    Attributes:
        layouts: of the codes of every tensor.
        page_bytes: a multiple of BLOCK.
    """

    def __init__(self, group: Group, bits: CacheBits, dtype: torch.dtype):
        self.dtype = dtype
        self.layouts = {
            slot: page_layout(slot.name, bits.key_bits, bits.value_bits, slot.heads, slot.columns)
            for slot in group.slots
        }
        by_layer = [[slot for slot in group.slots if slot.layer == layer] for layer in group.layers]
        sizes = {slot: round_up(layout.page_bytes, BLOCK) for slot, layout in self.layouts.items()}
        self.tail = min(sum(sizes[slot] for slot in own) // self._token_bytes(own) for own in by_layer)
        self._starts: dict[Slot, tuple[int, int]] = {}
        self.page_bytes = 0
        for own in by_layer:
            numbers = self.page_bytes
            for slot in own:
                self._starts[slot] = self.page_bytes, numbers
                self.page_bytes += sizes[slot]
                numbers += self.tail * self._token_bytes([slot])

    def _token_bytes(self, slots: Sequence[Slot]) -> int:
        return sum(slot.heads * slot.columns for slot in slots) * self.dtype.itemsize

    def starts(self, slot: Slot) -> tuple[int, int]:
        """Return how many bytes of a page lie before a tensor's codes, and before its numbers."""
        return self._starts[slot]

    def codes(self, slot: Slot, pages: Tensor) -> Tensor:
        """Return a tensor's codes in all pages, [pages, bytes], of pages [pages, bytes]."""
        start, _ = self._starts[slot]
        return pages[:, start : start + self.layouts[slot].page_bytes]

    def numbers(self, slot: Slot, pages: Tensor) -> Tensor:
        """Return a tensor's numbers in all pages, [pages, heads, tail, columns], of pages [pages, bytes]."""
        _, start = self._starts[slot]
        return slot.view(pages.view(self.dtype), self.tail, start // self.dtype.itemsize)


def pages_of(tokens: int, tail: int) -> int:
    """Return how many pages a request takes that has had so many tokens: numbers are `tail` to a page."""
    whole, rest = divmod(tokens, BLOCK)
    most = ceil((BLOCK - 1) / tail)  # behind the block before, until it was full
    return whole + max(ceil(rest / tail), most - 1 if whole else 0)


class CodesManager(FullAttentionManager):
    """Reserves the pages of a request; a page is found by others from the step after the one that makes its codes."""

    supports_fine_grained_hash_lookup = False

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        return super().get_num_blocks_to_allocate(request_id, self._with_tail(num_tokens), *args, **kwargs)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> Any:
        return super().allocate_new_blocks(request_id, self._with_tail(num_tokens), num_tokens_main_model)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        super().cache_blocks(request, min(num_tokens, request.num_computed_tokens), *args, **kwargs)

    def _with_tail(self, tokens: int) -> int:
        spec: Any = self.kv_cache_spec
        return BLOCK * pages_of(tokens, spec.tail)


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # vLLM registers its own only where there are none yet


@register_kv_cache_spec(manager_class=CodesManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class CodesSpec(FullAttentionSpec):
    """A page of codes.

    Attributes:
        tail: tokens of a page of numbers.
    """

    tail: int

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return pages_of(vllm_config.model_config.max_model_len, self.tail) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        return pages_of(max_len, self.tail)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        [spec] = specs  # all layers are one object
        return spec
