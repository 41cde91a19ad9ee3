"""Attention of key and value heads by a kernel of vLLM, which reads the pages where they lie."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from leanqkv.model.attention import KeyValues, LeanAttention, mix, slice_heads
from leanqkv.model.layout import LayerPlan
from leanqkv.model.plan import Plan
from leanqkv.model.position import rotation_of

from .cache import PagedCache

# A name that transformers has no masks for: none is made.
IMPLEMENTATION = "leanqkv_paged"


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


def kernel_refusal(plan: Plan, kernel: ModuleType) -> str | None:
    """Return why a kernel of vLLM cannot attend as the plan asks; None: it can."""
    for layer in plan.layers:
        if layer.value.reuses_keys or any(x is not None for x in (layer.latent, layer.key_rank, layer.value_rank)):
            return "the kernel reads keys and values alone"
        if len(layer.cached) == 1 and not _attends_with_all(layer):
            return f"layer {layer.layer} computes heads for others alone, and the kernel writes pairs"
        if layer.head_dim not in kernel.HEAD_DIMS:
            return f"the kernel takes heads of {', '.join(map(str, kernel.HEAD_DIMS))} columns"
    return None


def precision_refusal(vllm_config: Any, kernel: ModuleType | None, why: str | None) -> str | None:
    """Return why the cache cannot have the precision that the engine asks for; None: it can."""
    precision, dtype = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
    if precision in ("auto", str(dtype).removeprefix("torch.")):
        return None
    reason = f"leanqkv's own code attends ({why})" if kernel is None else kernel.precision_refusal(precision)
    return None if reason is None else f"kv_cache_dtype {precision!r} is not possible, give 'auto': {reason}"


def _attends_with_all(layer: LayerPlan) -> bool:
    """Whether a layer attends with every head that it computes."""
    own = {
        name: sum(source.num_heads for source in sources if source.layer == layer.layer)
        for name, sources in (("keys", layer.layout.keys), ("values", layer.layout.values))
    }
    return all(own[tensor.name] >= tensor.num_heads for tensor in layer.cached)


class PagedAttention(LeanAttention):
    """LeanAttention up to its keys and values; from there on, vLLM's pages.

    Attributes:
        caches: the name of the pages of every layer that this block computes.
        writes_pairs: whether the kernel writes keys and values together.
    """

    caches: dict[int, str]
    writes_pairs: bool

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
        query, key, value, gate = self.project(hidden_states, mlp_hidden)
        rotation = rotation_of(layer, position_embeddings)
        query = self.split_heads(query, self.q_norm, rotation)
        key = self.split_heads(key, self.k_norm, rotation)
        new_values = value = self.split_heads(value, None, None)
        if self.mixer is not None:
            value = mix(self.mixer, value, layer, borrowed, hidden_states)
        own = KeyValues(key, value, new_values)
        if self.writes_pairs and len(layer.cached) == 1:
            key, value = self._attended(layer, {**(borrowed or {}), layer.layer: own})
        paged = [_by_token(heads, query) for heads in (query, key, value)]
        output = torch.empty_like(paged[0])
        torch.ops.vllm.leanqkv_paged_attention(*paged, output, layer.layer, self.caches[layer.layer])
        return self.project_output(output[None], gate), None, own

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
    tokens = step.common.num_actual_tokens
    pages.kernel.write(pages, layer, key[:tokens], value[:tokens], step)
    for call in pages.calls[layer]:
        queries, found = query[:tokens, call.queries], output[:tokens, call.queries]
        made = found if found.is_contiguous() else torch.empty_like(found, memory_format=torch.contiguous_format)
        pages.kernel.attend(call, queries, view(pages, call.keys), view(pages, call.values), made, step)
        if made is not found:
            found.copy_(made)


def view(pages: PagedCache, heads: Heads) -> Tensor:
    """Return heads in all pages, [pages, heads, block_size, head_dim]."""
    return pages.heads(heads.layer, heads.name)[:, heads.start : heads.stop]


def use_pages(attention: nn.Module, caches: dict[int, str], kernel: ModuleType) -> None:
    """Make a block's attention attend through the pages."""
    assert isinstance(attention, LeanAttention)
    attention.__class__, attention.caches, attention.writes_pairs = PagedAttention, caches, kernel.WRITES_PAIRS


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention)  # never called: PagedAttention is
direct_register_custom_op(
    "leanqkv_paged_attention", paged_attention, mutates_args=["output"], fake_impl=lambda *arguments: None
)
