"""vLLM's Triton kernel for GPUs, and one that writes heads of keys or of values alone. Neither has run on a GPU yet."""

from typing import Any

from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from .cache import PagedCache
from .paged import Call
from .step import PlainBackend, Step

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
WRITES_PAIRS = False


def precision_refusal(precision: str) -> str | None:
    """Return why a cache cannot have that `kv_cache_dtype`: our kernel writes what it is given."""
    return "on a GPU only 'auto' is possible"


class Backend(PlainBackend):
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


@triton.jit
def _store(
    new, cache, slots, block_size, new_token, new_head, cache_page, cache_head, width: tl.constexpr, lanes: tl.constexpr
):
    """One head of one token into its place; a token without a place has slot -1."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        columns = tl.arange(0, lanes)
        inside = columns < width
        values = tl.load(new + token * new_token + head * new_head + columns, mask=inside)
        place = (slot // block_size) * cache_page + head * cache_head + (slot % block_size) * width
        tl.store(cache + place + columns, values, mask=inside)


def store(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write heads of new tokens into pages.

    Args:
        new: [tokens, heads, columns], columns contiguous.
        cache: [pages, heads, block_size, columns], the last two contiguous.
        slots: [tokens], page times block_size plus the place in it; -1 for none.
    """
    tokens, heads, width = new.shape
    if tokens and heads:
        strides = (new.stride(0), new.stride(1), cache.stride(0), cache.stride(1))
        lanes = triton.next_power_of_2(width)
        _store[(tokens, heads)](new, cache, slots, cache.shape[2], *strides, width=width, lanes=lanes)


def write(pages: PagedCache, layer: int, key: Tensor, value: Tensor, step: Step) -> None:
    """Write the new keys and values of a layer, [tokens, heads, head_dim] each; what it does not cache has no heads."""
    for slot in pages.group.slots:
        if slot.layer == layer:
            new = key if slot.name == "keys" else value
            store(new, pages.heads(layer, slot.name), step.common.slot_mapping)


def attend(call: Call, queries: Tensor, keys: Tensor, values: Tensor, output: Tensor, step: Step) -> None:
    """Attend with queries [tokens, heads, head_dim] to keys and values in pages."""
    unified_attention(
        q=queries,
        k=keys.transpose(1, 2),  # [pages, block_size, heads, head_dim]
        v=values.transpose(1, 2),
        out=output,
        cu_seqlens_q=step.common.query_start_loc,
        max_seqlen_q=step.common.max_query_len,
        seqused_k=step.common.seq_lens,
        max_seqlen_k=step.common.max_seq_len,
        softmax_scale=call.scale,
        causal=True,
        window_size=(-1 if call.window is None else call.window - 1, 0 if call.window is not None else -1),
        block_table=step.common.block_table_tensor,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
