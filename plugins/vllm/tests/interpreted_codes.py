"""Attention over pages under Triton's interpreter on a CPU, against loops in float64; test_triton.py starts it."""

import interpreted  # which turns the interpreter on

assert interpreted  # isort: split

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from leanqkv_vllm import attention_triton
from leanqkv_vllm.attention_triton import one_query_attention
from leanqkv_vllm.codes import Codes
from leanqkv_vllm.pages import Group, Slot
from leanqkv_vllm.rows import Pages
from leanqkv_vllm.rows_of_codes import CodesPages
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from leanqkv.cache_bits import CacheBits
from leanqkv.inference.history import History
from leanqkv.model.cache_quantized import BLOCK

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_dot = InterpreterBuilder.create_dot


def dot(builder: Any, a: Any, b: Any, *given: Any) -> Any:
    """The interpreter multiplies the bits of bfloat16 numbers as if they were integers."""

    def numbers(of: Any) -> Any:
        if of.dtype.scalar != tl.bfloat16:
            return of
        return TensorHandle((of.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return _dot(builder, numbers(a), numbers(b), *given)


InterpreterBuilder.create_dot = dot


class Rows:
    """Rows of ragged lengths whose tensors lie in pages as the plugin lays them out, behind a tensor of another layer.

    bits: "16" has pages of numbers. in_place: whether the newest numbers lie in pages too, as they do with codes unless
    they fill a block in this step.
    """

    def __init__(
        self,
        slots: list[tuple[str, int, int]],
        lengths: list[int],
        bits: str,
        dtype: torch.dtype,
        window: int | None,
        in_place: bool,
    ):
        heads = [Slot(0, "values", 1, 12, 0)]
        for name, count, columns in slots:
            heads.append(Slot(1, name, count, columns, heads[-1].offset + heads[-1].heads * heads[-1].columns))
        group, self.slots, self.lengths, self.dtype = Group(window, (0, 1), tuple(heads)), heads[1:], lengths, dtype
        given = CacheBits.of(bits)
        self.codes = Codes(group, given, dtype) if given.quantized else None
        size = BLOCK if self.codes else 16
        page_bytes = self.codes.page_bytes if self.codes else group.numbers_per_token * size * dtype.itemsize
        each = max(lengths) // size + 65
        table = torch.randperm(len(lengths) * each).view(len(lengths), each)
        self.table = table
        memory = torch.randint(255, (table.numel(), page_bytes), dtype=torch.uint8)  # what is read of it is seen
        memory = memory if self.codes else memory.view(dtype)
        positions = torch.tensor(lengths)[:, None] - 1
        batch: Any = SimpleNamespace(
            positions=positions,
            lengths=positions[:, 0] + 1,
            longest=max(lengths),
            in_place=in_place,
            padded_right=True,
            causal=False,
        )
        batch.kept, batch.keep = None, lambda name, made: made
        cache: Any = SimpleNamespace(
            codes=self.codes, kv_cache=memory, block_size=size, group=group, heads=self._view, codes_of=self._codes_of
        )
        cache.layer_name = "layers.0.pages"
        batch.tokens, self.memory, self.in_place = torch.arange(len(lengths))[:, None], memory, in_place
        common = SimpleNamespace(block_table_tensor=table, slot_mapping=torch.zeros(len(lengths), dtype=torch.long))
        step: Any = SimpleNamespace(common=common)
        self.pages = (CodesPages if self.codes else Pages)(batch, cache, step, torch.arange(len(lengths)))
        self.held = {slot.name: [self._fill(slot, row, table) for row in range(len(lengths))] for slot in self.slots}

    def _view(self, layer: int, name: str) -> Tensor:
        slot = next(slot for slot in self.slots if slot.name == name)
        return self.codes.numbers(slot, self.memory) if self.codes else slot.view(self.memory, 16)

    def _codes_of(self, slot: Slot) -> Tensor:
        return self.codes.codes(slot, self.memory)

    def _fill(self, slot: Slot, row: int, table: Tensor) -> Tensor:
        """Write a row's tensor into its pages; return what they say, [heads, tokens, columns]."""
        length = self.lengths[row]
        states = torch.randn(1, slot.heads, length, slot.columns).mul(1 + 3 * torch.rand(slot.columns)).to(self.dtype)
        if self.codes is None:
            for token in range(length):
                self._view(1, slot.name)[table[row, token // 16], :, token % 16] = states[0, :, token]
            return states[0]
        layout, paged, tail = self.codes.layouts[slot], (length - 1) // BLOCK * BLOCK, self.codes.tail
        if paged:
            made = layout.quantize(states[:, :, :paged])[0]
            self._codes_of(slot)[table[row, : paged // BLOCK]] = made
            states[0, :, :paged] = layout.dequantize(made, self.dtype)
        for token in range(paged, length if self.in_place else 0):
            page = table[row, paged // BLOCK + (token - paged) // tail]
            self._view(1, slot.name)[page, :, (token - paged) % tail] = states[0, :, token]
        return states[0]

    def history(self, name: str) -> History:
        slot = next(slot for slot in self.slots if slot.name == name)
        if self.codes is None:
            return self.pages.history(slot)
        newest = None
        if not self.in_place:
            newest = torch.stack([held[:, (held.shape[1] - 1) // BLOCK * BLOCK :] for held in self.held[name]])
        return self.pages.lying(slot, newest)


def loops(query: Tensor, keys: list[Tensor], values: list[Tensor], scaling: float, window: int | None) -> Tensor:
    """Attention [rows, 1, query heads, columns] of the equation, in float64; keys, values: of a row, by query head."""
    found = torch.zeros(len(query), 1, query.shape[1], values[0].shape[-1], dtype=torch.float64)
    for row in range(len(query)):
        length = keys[row].shape[1]
        seen = range(0 if window is None else max(0, length - window), length)
        for head in range(query.shape[1]):
            scores = [float(query[row, head, 0].double() @ keys[row][head, at].double()) * scaling for at in seen]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            for weight, at in zip(weights, seen, strict=True):
                found[row, 0, head] += weight * values[row][head, at].double()
    return found


def masks(lengths: list[int], window: int | None) -> Tensor | None:
    at, ends = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
    seen = (at < ends) & (at >= ends - (window or max(lengths)))
    return None if seen.all() else torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None, None]


def check(kind: str, lengths: list[int], bits: str, dtype: torch.dtype, window: int | None, **given: Any) -> None:
    """One call of the kernel. given: of `Rows`, key heads, queries of each, and columns."""
    heads, group, columns, in_place = (given[name] for name in ("heads", "group", "columns", "in_place"))
    slots = {
        "heads": [("keys", heads, columns), ("values", heads, columns)],
        "latent values": [("keys", heads, columns), ("values", 1, columns + 4)],
        "latent keys": [("keys", 1, columns + 2), ("values", heads, columns)],
        "latents": [("keys", 1, columns + 2), ("values", 1, columns + 4)],
        "keys as values": [("keys", heads, columns)],
        "mla": [("latent", 1, columns + 6)],
    }[kind]
    rows = Rows(slots, lengths, bits, dtype, window, in_place)
    key = rows.history(slots[0][0])
    value = key if len(slots) == 1 else rows.history(slots[1][0])
    if kind == "mla":
        key, value = key[..., :columns].beside(key[..., columns:]), key[..., :columns]
    one = [part.shape[1] == 1 and kind != "heads" for part in (key, value)]
    key, value = (
        part.expand(-1, heads, -1, -1) if alone else part for part, alone in zip((key, value), one, strict=True)
    )
    query = torch.randn(len(lengths), heads * group, 1, key.shape[-1]).to(dtype)
    by_query = []
    for part, name in ((key, slots[0][0]), (value, slots[-1][0])):
        held = [row[..., : part.shape[-1]].expand(heads, -1, -1) for row in rows.held[name]]
        by_query.append([row.repeat_interleave(group, 0) for row in held])
    scaling = key.shape[-1] ** -0.5
    split = heads // 2
    values = [value[:, :split], value[:, split:]] if split and kind == "heads" else [value]
    found = one_query_attention(query, key, values, None if given["unmasked"] else masks(lengths, window), scaling)
    assert found is not None and found.dtype == dtype
    wanted = loops(query, *by_query, scaling, window)
    largest = max(float(row.abs().max()) for row in by_query[1])
    near = 8 * torch.finfo(dtype).eps * largest  # of scores, weights and output, each rounded
    torch.testing.assert_close(
        found.double(), wanted, rtol=0, atol=near, msg=lambda text: f"{kind} {bits} {given}: {text}"
    )


KINDS = ("heads", "latent values", "latent keys", "latents", "keys as values", "mla")
BITS = ("16", "8", "4", "2", "8/4", "4/8", "2/4", "8/2")


def draw(number: int) -> None:
    """A case: every kind with all bits comes by within as many cases as there are pairs of the two."""
    choose = random.Random(number)
    attention_triton.PART_TOKENS = choose.choice((BLOCK, 512))  # several parts or one
    in_place = choose.random() < 0.75
    length = choose.choice((64, 128, 192))  # rows that fill their block in this step are equally long behind the pages
    lengths = [choose.choice((1, 2, 63, 65, 70, 90, 127, 129, 150, 200)) for _ in range(choose.randint(1, 4))]
    given = {
        "heads": choose.choice((1, 2, 4)),
        "group": choose.choice((1, 3, 17)),
        "columns": choose.choice((4, 16, 20, 64, 80)),
        "in_place": in_place,
    }
    # The first position that a window sees is known of pages of numbers, which are a group of their own.
    given["unmasked"] = BITS[number // len(KINDS) % len(BITS)] == "16" and choose.random() < 0.5
    case = KINDS[number % len(KINDS)], lengths if in_place else [length] * 2, BITS[number // len(KINDS) % len(BITS)]
    check(*case, DTYPES[number % 5 % 3], choose.choice((None, None, 1, 40, 66, 100)), **given)


def check_window() -> None:
    """A window that no mask tells of: it begins within a page."""
    given = {"heads": 2, "group": 3, "columns": 16, "in_place": True, "unmasked": True}
    for window in (40, 66, 100):
        check("heads", [70, 150, 200], "16", torch.float32, window, **given)


def check_table() -> None:
    """A block table that is shorter than a row is refused: nothing is read beyond it."""
    for bits in ("16", "4"):
        rows = Rows([("keys", 1, 16)], [70, 10], bits, torch.float32, None, True)
        key = rows.history("keys")
        key.table = key.table[:, :1]
        try:
            one_query_attention(torch.randn(2, 1, 1, 16), key, [key], None, 1.0)
        except ValueError as error:
            assert "a row of 70 tokens has 1 pages" in str(error)
        else:
            raise AssertionError("a table of one page was taken")


def check_largest() -> None:
    """What codes stand for may be beyond float16's largest number by less than half a scale."""
    rows = Rows([("keys", 1, 16)], [65], "2", torch.float16, None, True)
    [slot], layout = rows.slots, rows.codes.layouts[rows.slots[0]]
    states = torch.linspace(-65504, 65504, BLOCK).half()[None, None, :, None].expand(-1, -1, -1, 16)
    rows._codes_of(slot)[rows.table[0, 0]] = layout.quantize(states)[0, 0]
    key = rows.history("keys")
    found = one_query_attention(torch.full((1, 1, 1, 16), 0.01, dtype=torch.float16), key, [key], None, 1.0)
    assert found is not None and found.isfinite().all() and found.min() > 65000


if __name__ == "__main__":
    import sys

    torch.manual_seed(0)
    check_table()
    check_largest()
    check_window()
    for number in range(*map(int, sys.argv[1:3])):
        torch.manual_seed(number)
        draw(number)
    print("RIGHT")
