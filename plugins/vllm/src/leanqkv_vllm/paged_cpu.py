"""Attention of key and value heads by vLLM's kernel for CPUs, which reads the pages where they lie."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from leanqkv.model.attention import KeyValues, LeanAttention, mix, slice_heads
from leanqkv.model.plan import LayerPlan, Plan
from leanqkv.model.position import rotation_of

from .cache import PagedCache

# A name that transformers has no masks for: none is made.
IMPLEMENTATION = "leanqkv_paged"
HEAD_DIMS = CPUAttentionBackend.get_supported_head_sizes()


class Heads(NamedTuple):
    """Heads `[start, stop)` of the tensor that a layer caches under a name."""

    layer: int
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Call:
    """One call of the kernel: query heads, and where their keys and values lie."""

    queries: slice
    keys: Heads
    values: Heads
    scale: float
    window: int | None

    @property
    def shape(self) -> tuple[int, int, int | None]:
        """Query heads, key heads and window, on which the kernel's schedule depends."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start, self.window


def calls_of(layer: LayerPlan) -> list[Call]:
    """Return the calls of a layer: one for each source of values in each source of keys."""
    found = []
    for group in layer.groups:
        size = (group.queries.stop - group.queries.start) // group.keys.num_heads
        query, key, lender = group.queries.start, group.keys.start, group.keys.layer
        for source in group.values:
            count = source.num_heads
            queries, keys = slice(query, query + count * size), Heads(lender, "keys", key, key + count)
            values = Heads(source.layer, "values", source.start, source.stop)
            found.append(Call(queries, keys, values, layer.attention_scale(lender), layer.window))
            query, key = query + count * size, key + count
    return found


def refusal(plan: Plan) -> str | None:
    """Return why the kernel cannot attend as the plan asks; None: it can."""
    for layer in plan.layers:
        if layer.latent is not None or layer.reuses_keys or layer.key_rank is not None or layer.value_rank is not None:
            return "the kernel reads keys and values alone"
        if len(layer.cached) == 1 and not _attends_with_all(layer):
            return f"layer {layer.layer} computes heads for others alone, and the kernel writes pairs"
        if layer.head_dim not in HEAD_DIMS:
            return f"the kernel takes heads of {', '.join(map(str, HEAD_DIMS))} columns"
    return None


def _attends_with_all(layer: LayerPlan) -> bool:
    """Whether a layer attends with every head that it computes."""
    own = {
        name: sum(source.num_heads for source in sources if source.layer == layer.layer)
        for name, sources in (("keys", layer.layout.keys), ("values", layer.layout.values))
    }
    return all(own[tensor.name] >= tensor.num_heads for tensor in layer.cached)


@dataclass
class Step:
    """vLLM's metadata of a step, and the kernel's schedule of every shape."""

    common: CommonAttentionMetadata
    schedules: dict[tuple[int, int, int | None], Tensor]
    isa: str


class PagedBackend(CPUAttentionBackend):
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
        self.isa = _get_attn_isa(self.cache.dtype, kv_cache_spec.block_size, self.cache.head_dim, "auto")

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
                enable_kv_split=True,
            )
            for queries, keys, window in self.cache.shapes
        }
        return Step(given, schedules, self.isa)


class PagedAttention(LeanAttention):
    """LeanAttention up to its keys and values; from there on, vLLM's pages.

    Attributes:
        caches: the name of the pages of every layer that this block computes.
    """

    caches: dict[int, str]

    def forward(
        self,
        hidden_states: Tensor,
        layer: LayerPlan,
        position_embeddings: Any = None,
        borrowed: dict[int, KeyValues] | None = None,
        mlp_hidden: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, KeyValues]:
        """As LeanAttention.forward, of the tokens of a step [1, tokens, hidden_size]."""
        query, key, value = self.project(hidden_states, mlp_hidden)
        rotation = rotation_of(layer, position_embeddings)
        query = self._split_heads(query, self.q_norm, rotation)
        key = self._split_heads(key, self.k_norm, rotation)
        new_values = value = self._split_heads(value, None, None)
        if self.mixer is not None:
            value = mix(self.mixer, value, layer, borrowed, hidden_states)
        own = KeyValues(key, value, new_values)
        if not caches_both(layer):
            key, value = self._attended(layer, {**(borrowed or {}), layer.layer: own})
        paged = [_by_token(heads, query) for heads in (query, key, value)]
        output = torch.empty_like(paged[0])
        torch.ops.vllm.leanqkv_paged_attention(*paged, output, layer.layer, self.caches[layer.layer])
        return self.o_proj(output.flatten(1)[None]), None, own

    @staticmethod
    def _attended(layer: LayerPlan, sources: dict[int, KeyValues]) -> tuple[Tensor, Tensor]:
        """The new keys and values of all heads that a layer attends with, the borrowed ones too."""
        keys = [slice_heads(sources[source.layer].keys, source) for source in layer.layout.keys]
        values = [slice_heads(sources[source.layer].values, source) for source in layer.layout.values]
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)


def _by_token(heads: Tensor | None, like: Tensor) -> Tensor:
    """[1, heads, tokens, head_dim] to [tokens, heads, head_dim]; no heads of None."""
    if heads is None:
        return like.new_empty(like.shape[2], 0, like.shape[3])
    return heads[0].transpose(0, 1).contiguous()


def caches_both(layer: LayerPlan) -> bool:
    """Whether a layer caches keys as well as values."""
    return len(layer.cached) == 2


def paged_attention(query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer: int, cache: str) -> None:
    """Write the new keys and values of a layer into its pages, and attend: the custom operator of a layer.

    Args:
        query, key, value, output: [tokens, heads, head_dim], each with its own number of heads.
        cache: the name of the layer's pages.
    """
    context = get_forward_context()
    if context.attn_metadata is None:  # vLLM measures the memory
        return
    pages, step = context.no_compile_layers[cache], context.attn_metadata[cache]
    tokens, slots = step.common.num_actual_tokens, step.common.slot_mapping
    for keys, values, key_cache, value_cache in _writes(pages, layer, key, value):
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, step.isa)
    for call in pages.calls[layer]:
        queries = query[:tokens, call.queries]
        found = torch.empty_like(queries, memory_format=torch.contiguous_format)
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=_view(pages, call.keys),
            value_cache=_view(pages, call.values),
            output=found,
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
        )
        output[:tokens, call.queries] = found


def _writes(pages: PagedCache, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, ...]]:
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
            yield key[:, heads], value[:, heads], _view(pages, call.keys), _view(pages, call.values)


def _pairs(keys: int, values: int, both: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of as many keys as values, the first `both` of each at the end."""
    for start in range(both, max(keys, values), both):
        stop = min(start + both, max(keys, values))
        more, fewer = slice(start, stop), slice(0, stop - start)
        yield (more, fewer) if keys > values else (fewer, more)
    yield slice(0, both), slice(0, both)


def _view(pages: PagedCache, heads: Heads) -> Tensor:
    return pages.heads(heads.layer, heads.name)[:, heads.start : heads.stop]


def use_pages(attention: nn.Module, caches: dict[int, str]) -> None:
    """Make a block's attention attend through the pages."""
    assert isinstance(attention, LeanAttention)
    attention.__class__, attention.caches = PagedAttention, caches


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention)  # never called: PagedAttention is
direct_register_custom_op("leanqkv_paged_attention", paged_attention, mutates_args=["output"])
