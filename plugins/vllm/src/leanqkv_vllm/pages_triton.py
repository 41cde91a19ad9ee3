"""Heads in pages, read where they lie, for GPUs. It has not run on a GPU yet.

They lie as codes with numbers behind them (codes.py), or all as numbers. Codes become numbers in registers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from leanqkv.inference.history import History
from leanqkv.model.cache_quantized import SCALE_DTYPE


class Source(NamedTuple):
    """Where heads lie: what the functions below take as `source`.

    Attributes:
        first_head: of the tensor that lies in pages. head: from one to the next; 0 where all are one.
        pages: addresses of pages of codes, [rows, pages]. pages_row: from row to row.
        codes, scales, offsets: bytes of a page before them. codes_head: bytes from head to head.
        tails: addresses of pages of numbers, [rows, pages], of `tail` tokens each. tails_row: from row to row.
        numbers: bytes of such a page before them. numbers_head, numbers_token: bytes from one to the next.
    """

    first_head: int
    head: int
    pages: Tensor
    pages_row: int
    codes: int
    codes_head: int
    scales: int
    offsets: int
    tails: Tensor
    tails_row: int
    tail: int
    numbers: int
    numbers_head: int
    numbers_token: int


def source_of(heads: History) -> Source:
    """Return where heads [rows, heads, positions, columns] lie.

    Raises:
        ValueError: the block table is shorter than the longest row.
    """
    places, layout, table, codes = heads.places, heads.layout, heads.table, (0, 0, 0, 0)
    tails, tail, numbers = table, places.page, heads.strides
    if triton.cdiv(places.longest, places.page) > table.shape[1]:
        raise ValueError(f"a row of {places.longest} tokens has {table.shape[1]} pages of {places.page}")
    if layout is not None:
        scales = heads.strides[0] + layout.code_bytes
        offsets = scales + layout.heads * layout.head_scales * SCALE_DTYPE.itemsize
        codes = heads.strides[0], layout.code_bytes // layout.heads, scales, offsets
        if heads.tails is not None:
            (tails, numbers), tail = heads.tails, places.tail
        else:  # one page of each row
            newest: Any = heads.newest
            row, *rest, _ = (stride * newest.itemsize for stride in newest.stride())
            tails = newest.data_ptr() + row * torch.arange(len(newest), device=newest.device)[:, None]
            tail, numbers = newest.shape[2], (0, *rest)
    strides = 0 if heads.expanded else 1, table.stride(0), tails.stride(0)
    return Source(heads.first_head, strides[0], table, strides[1], *codes, tails, strides[2], tail, *numbers)


@triton.jit
def numbers(source, row, head, tokens, stop, columns, width: tl.constexpr, dtype: tl.constexpr):
    """Numbers [tokens, width], zeros beyond `stop` tokens and `columns`."""
    column = tl.arange(0, width)
    page = tl.load(source.tails + row * source.tails_row + tokens // source.tail, mask=tokens < stop, other=0)
    at = page + source.numbers + head * source.numbers_head + tokens % source.tail * source.numbers_token
    inside = (tokens < stop)[:, None] & (column < columns)[None, :]
    return tl.load(at.to(tl.pointer_type(dtype))[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def decoded(
    source, row, head, first, page: tl.constexpr, layout: tl.constexpr, count: tl.constexpr, width: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Numbers [count, width] of the tokens from `first` on, of one page of codes (PageLayout); zeros beyond the columns
    that there are."""
    at = tl.load(source.pages + row * source.pages_row + first // page)
    words: tl.constexpr = 32 // layout.bits  # codes in four bytes of a lane
    depth: tl.constexpr = count if layout.per_token else width
    token, column, word = first % page + tl.arange(0, count), tl.arange(0, width), tl.arange(0, depth // words)
    inside = (column < layout.columns)[None, :]
    if layout.per_token:
        lane, rows, there = column, first % page // words + word, inside
        scale = token[:, None] * layout.groups + column[None, :] // layout.width
    else:
        lane, rows, there = token, word, (word < layout.depth // words)[:, None]
        scale = column[None, :]
    packed = (at + source.codes + head * source.codes_head).to(tl.pointer_type(tl.int32))
    packed = tl.load(packed + rows[:, None] * layout.lanes + lane[None, :], mask=there, other=0)
    place = tl.arange(0, words)
    codes = packed[:, None, :] >> (place % 4 * 8 + place // 4 * layout.bits)[None, :, None]
    codes = tl.reshape(codes & (2**layout.bits - 1), (depth, lane.shape[0])).to(tl.float32)
    if not layout.per_token:
        codes = tl.trans(codes)
    scale += head * layout.head_scales
    scales = tl.load((at + source.scales).to(tl.pointer_type(tl.bfloat16)) + scale, mask=inside, other=0.0)
    offsets = tl.load((at + source.offsets).to(tl.pointer_type(tl.bfloat16)) + scale, mask=inside, other=0.0)
    found = codes * scales.to(tl.float32) + offsets.to(tl.float32)
    if dtype == tl.float16:  # of which the largest entries are less than half a scale from infinity
        found = tl.clamp(found, -65504.0, 65504.0)
    return found.to(dtype)
