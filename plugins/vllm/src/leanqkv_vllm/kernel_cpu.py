"""vLLM's kernel for CPUs: a schedule for every number of heads, and keys and values that are written in pairs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from .cache import PagedCache
from .paged import Call, view

HEAD_DIMS = tuple(CPUAttentionBackend.get_supported_head_sizes())
WRITES_PAIRS = True


def precision_refusal(precision: str) -> str | None:
    """Return why a cache cannot have that `kv_cache_dtype`; None: it can."""
    known = CPUAttentionBackend.supported_kv_cache_dtypes
    if precision not in known:
        return f"vLLM's kernel for CPUs takes {', '.join(known)}"
    if is_quantized_kv_cache(precision) and not (
        torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    ):
        return "vLLM's kernel for CPUs takes it with AVX-512 or AMX, which this processor lacks"
    return None


@dataclass
class Step:
    """vLLM's metadata of a step, and the kernel's schedule of every shape."""

    common: CommonAttentionMetadata
    schedules: dict[tuple[int, int, int | None], Tensor]
    isa: str
    precision: str


class Backend(CPUAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "LEANQKV_CPU"

    @staticmethod
    def get_builder_cls() -> Any:
        return StepBuilder


class StepBuilder(AttentionMetadataBuilder[Step]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        [self.cache] = get_layers_from_vllm_config(vllm_config, PagedCache, layer_names).values()
        cache = self.cache
        self.isa = _get_attn_isa(cache.dtype, kv_cache_spec.block_size, cache.head_dim, cache.precision)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        given = common_attn_metadata
        schedules = {
            (queries, keys, window): ops.cpu_attn_get_scheduler_metadata(
                num_reqs=given.num_reqs,
                num_heads=queries,
                num_kv_heads=keys,
                head_dim=self.cache.head_dim,
                seq_lens=given.seq_lens,
                dtype=self.cache.dtype,
                query_start_loc=given.query_start_loc,
                causal=True,
                sliding_window_size=-1 if window is None else window,
                isa=self.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                kv_cache_dtype=self.cache.precision,
            )
            for queries, keys, window in self.cache.shapes
        }
        return Step(given, schedules, self.isa, self.cache.precision)


def write(pages: PagedCache, layer: int, key: Tensor, value: Tensor, step: Step) -> None:
    """Write the new keys and values of a layer, [tokens, heads, head_dim] each."""
    slots = step.common.slot_mapping
    for keys, values, key_cache, value_cache in _pairs_to_write(pages, layer, key, value):
        stores = (key_cache, value_cache)
        ops.cpu_attn_reshape_and_cache(keys, values, *stores, slots, step.isa, kv_cache_dtype=step.precision)


def attend(call: Call, queries: Tensor, keys: Tensor, values: Tensor, output: Tensor, step: Step) -> None:
    """Attend with queries [tokens, heads, head_dim] to keys and values in pages."""
    ops.cpu_attention_with_kv_cache(
        query=queries,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=step.common.query_start_loc,
        seq_lens=step.common.seq_lens,
        scale=call.scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1 if call.window is None else call.window,
        block_table=step.common.block_table_tensor,
        softcap=0.0,
        scheduler_metadata=step.schedules[call.shape],
        s_aux=None,
        kv_cache_dtype=step.precision,
    )


def _pairs_to_write(pages: PagedCache, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield new keys and values, equally many heads of both as the kernel writes them, and where they go.

    A layer that caches both, of either more than of the other, writes those without a partner first, each beside one
    that the last write replaces. A layer that caches only one of them writes what it borrows once more beside it.
    """
    names = [slot.name for slot in pages.group.slots if slot.layer == layer]
    if len(names) == 2:
        stores = [pages.heads(layer, name) for name in ("keys", "values")]
        both = min(key.shape[1], value.shape[1])
        for first, second in _pairs(key.shape[1], value.shape[1], both):
            yield key[:, first], value[:, second], stores[0][:, first], stores[1][:, second]
    elif names:
        start = 0
        for call in pages.calls[layer]:
            heads = slice(start, start := start + call.keys.stop - call.keys.start)
            yield key[:, heads], value[:, heads], view(pages, call.keys), view(pages, call.values)


def _pairs(keys: int, values: int, both: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of as many keys as values, the first `both` of each at the end."""
    for start in range(both, max(keys, values), both):
        stop = min(start + both, max(keys, values))
        more, fewer = slice(start, stop), slice(0, stop - start)
        yield (more, fewer) if keys > values else (fewer, more)
    yield slice(0, both), slice(0, both)
