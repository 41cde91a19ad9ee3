"""Attention of one query per row over pages, where they lie, for GPUs. It has not run on a GPU yet.

What leanqkv's kernel for CPUs does (leanqkv/inference/attention.py), but for values that are made of keys. Softmax goes
along (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867), so no score is stored.

A program takes up to TILE queries of a row that share a head, and a part of the positions ("flash-decoding", Dao et al.
2023, https://pytorch.org/blog/flash-decoding). The parts are put together at the end.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from leanqkv.inference.history import History
from leanqkv.model.attention_latent import attend_to_latent
from leanqkv.model.cache_quantized import BLOCK
from leanqkv.model.latent_heads import attend_to_inputs

from .pages_triton import decoded, numbers, source_of
from .refusals import COLUMNS_ON_GPU

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PART_TOKENS = 512  # for which a program of its own pays
PROGRAMS = 512  # that keep a GPU busy
TILE = tl.constexpr(16)  # rows of the smallest product that matrix units take


@triton.jit
def _added(sums, most, total, query, key, value, scaling, mask, tokens, first, stop):
    """Weighted sums [TILE, width], highest scores and sums of weights [TILE] with these tokens, from `first` on."""
    seen = (tokens >= first) & (tokens < stop)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
    if mask is not None:
        scores += tl.load(mask + tokens, mask=seen, other=0.0)[None, :]
    scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # where nothing is seen yet
    weights, before = tl.exp(scores - base[:, None]), tl.exp(most - base)
    sums = sums * before[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return sums, higher, total * before + tl.sum(weights, 1)


@triton.jit
def _attend(
    query, keys, values, mask, output, highest, totals, lengths, firsts, paged, query_row, query_head, mask_row,
    scaling, heads, tiles, group, part_tokens, key_columns, value_columns, of_keys: tl.constexpr,
    of_values: tl.constexpr, key_width: tl.constexpr, value_width: tl.constexpr, same: tl.constexpr,
    count: tl.constexpr, page: tl.constexpr,
):  # fmt: skip
    """A part of the positions of a row, `count` at once. of_keys, of_values: layouts of codes; None: there are none."""
    row, head, part = tl.program_id(0), tl.program_id(1) // tiles, tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = query.dtype.element_ty
    queries, column = tl.program_id(1) % tiles * TILE + tl.arange(0, TILE), tl.arange(0, key_width)
    there, queries = queries < group, queries + head * group
    inside = there[:, None] & (column < key_columns)[None, :]
    own = tl.load(query + row * query_row + queries[:, None] * query_head + column[None, :], mask=inside, other=0.0)
    key_head, value_head = keys.first_head + head * keys.head, values.first_head + head * values.head
    if mask is not None:
        mask += row * mask_row
    first, pages = tl.load(firsts + row), tl.load(paged + row)
    start = tl.maximum(part * part_tokens, first // page * page)
    stop = tl.minimum((part + 1) * part_tokens, tl.load(lengths + row))
    sums, total = tl.zeros((TILE, value_width), tl.float32), tl.zeros((TILE,), tl.float32)
    most = tl.full((TILE,), float("-inf"), tl.float32)
    if of_keys is not None:
        for token in range(start, tl.minimum(stop, pages), count):
            key = decoded(keys, row, key_head, token, page, of_keys, count, key_width, dtype)
            value = key if same else decoded(values, row, value_head, token, page, of_values, count, value_width, dtype)
            tokens = token + tl.arange(0, count)
            sums, most, total = _added(sums, most, total, own, key, value, scaling, mask, tokens, first, stop)
    for token in range(tl.maximum(start, pages), stop, count):
        tokens = token + tl.arange(0, count)
        place, end = tokens - pages, stop - pages
        key = numbers(keys, row, key_head, place, end, key_columns, key_width, dtype)
        value = key if same else numbers(values, row, value_head, place, end, value_columns, value_width, dtype)
        sums, most, total = _added(sums, most, total, own, key, value, scaling, mask, tokens, first, stop)
    at, column = (part * tl.num_programs(0) + row) * heads * group + queries, tl.arange(0, value_width)
    tl.store(highest + at, most, mask=there)
    tl.store(totals + at, total, mask=there)
    inside = there[:, None] & (column < value_columns)[None, :]
    tl.store(output + at[:, None] * value_columns + column[None, :], sums, mask=inside)


def attend_one_query(
    attention: Any, query: Tensor, key: Any, values: Any, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """As leanqkv.inference.attention.attend_one_query: by the kernel where that applies."""
    output = one_query_attention(query, key, values, mask, scaling)
    given = query, key, values, mask, scaling
    return attend_to_inputs(attention, *given, **kwargs) if output is None else (output, None)


def attend_one_query_to_latent(
    attention: Any,
    queries: Sequence[Tensor],
    keys: Sequence[Any],
    values: Sequence[Any],
    mask: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor | None]:
    """As in leanqkv.inference.attention, of one latent and of a rotary key that lies beside it."""
    key = keys[0] if len(values) == 1 and all(isinstance(piece, History) for piece in keys) else None
    for piece in keys[1:]:
        key = None if key is None else key.beside(piece)
    output = None if key is None else one_query_attention(torch.cat([*queries], dim=-1), key, values, mask, scaling)
    if output is not None:
        return output, None
    return attend_to_latent(attention, queries, keys, values, mask, scaling)


def one_query_attention(
    query: Tensor, key: Any, values: Sequence[Any], attention_mask: Tensor | None, scaling: float
) -> Tensor | None:
    """As leanqkv.inference.attention.one_query_attention, of heads in pages; None where the kernel does not apply."""
    if query.shape[2] != 1 or query.dtype not in DTYPES or not all(_lies(heads, query) for heads in (key, *values)):
        return None
    group, start, found = query.shape[1] // key.shape[1], 0, []
    for value in values:
        stop = start + value.shape[1]
        queries = query[:, start * group : stop * group, 0].contiguous()
        found.append(_attention(queries, key[:, start:stop], value, attention_mask, scaling))
        start = stop
    return torch.cat(found, 1)[:, None]


def launch(width: int, itemsize: int) -> dict[str, int]:
    """Return how many tokens are read at once, and Triton's options, so that the shared memory of a GPU is enough."""
    size = width * itemsize
    options = {"num_warps": 8, "num_stages": 1} if size > 512 else {"num_warps": 4, "num_stages": 2}
    return {"count": max(16, min(BLOCK, 16384 // size)), **options}


def _lies(heads: Any, query: Tensor) -> bool:
    """Whether the kernel can read heads in their pages: of codes, all columns or the first ones."""
    if not isinstance(heads, History) or heads.dtype != query.dtype or heads.shape[-1] > COLUMNS_ON_GPU[query.itemsize]:
        return False
    return heads.places.padded_right and (heads.layout is None or not heads.first_column)


def _attention(query: Tensor, key: History, value: History, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of queries [rows, query heads, columns] to keys and values that lie in one tensor each."""
    (rows, query_heads, columns), width, places = query.shape, value.shape[-1], key.places
    heads, longest = 1 if key.expanded and value.expanded else key.shape[1], places.longest
    group = query_heads // heads
    tiles = triton.cdiv(group, TILE.value)
    parts = max(1, min(PROGRAMS // (rows * heads * tiles), triton.cdiv(longest, PART_TOKENS)))
    part_tokens = BLOCK * triton.cdiv(triton.cdiv(longest, BLOCK), parts)
    output = query.new_empty(parts, rows, query_heads, width, dtype=torch.float32)
    highest, totals = torch.empty_like(output[..., 0]), torch.empty_like(output[..., 0])
    firsts = torch.zeros_like(places.lengths) if places.firsts is None else places.firsts
    if mask is not None:  # [rows or 1, 1, 1, longest]; what is behind a window is not read
        mask = mask[:, 0, 0].float().expand(rows, -1).contiguous()
        firsts = torch.maximum(firsts, (mask > -torch.inf).int().argmax(-1))
    paged = torch.zeros_like(places.lengths) if key.layout is None else places.paged
    widths = [max(TILE.value, triton.next_power_of_2(number)) for number in (columns, width)]
    names = ("strides", "first_head", "first_column", "expanded", "shape")
    same = key.table is value.table and all(getattr(key, name) == getattr(value, name) for name in names)
    _attend[rows, heads * tiles, parts](
        query, source_of(key), source_of(value), mask, output, highest, totals, places.lengths, firsts, paged,
        *query.stride()[:2], longest, scaling, heads, tiles, group, part_tokens, columns, width, key.layout,
        value.layout, *widths, same=same, page=BLOCK, **launch(max(widths), query.itemsize),
    )  # fmt: skip
    weights = (highest - highest.amax(0)).exp()
    return ((output * weights[..., None]).sum(0) / (totals * weights).sum(0)[..., None]).to(query.dtype)
