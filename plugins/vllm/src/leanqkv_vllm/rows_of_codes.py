"""Where the rows of a batch lie in pages of codes (codes.py), and the cache of a layer on these.

A row's new tokens lie in one page, so a step is computed in pieces that end where a page ends.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from leanqkv.inference.codes import quantize
from leanqkv.inference.history import History, Places
from leanqkv.model.cache_quantized import BLOCK
from leanqkv.model.layout import LayerPlan

from .cache import PagedCache
from .pages import Slot
from .rows import FEW, PagedLayer, Pages
from .step import Step

if TYPE_CHECKING:
    from .histories import Batch


def pieces_by_page(starts: Tensor, lengths: Tensor, positions: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the tokens of a step that are computed together, as `Batch` takes them, in the order of their positions.

    Tokens of one row lie in one page: those behind it see it as codes. A few that do not fill it are rows of their own.

    starts, lengths: of the requests' tokens among those of the step, and of the requests. positions: of every token.
    """
    counts = starts.diff()
    few = (counts <= FEW) & (lengths // BLOCK == (lengths - counts) // BLOCK)
    requests = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    tokens = torch.where(few[requests])[0]
    if len(tokens):
        yield requests[tokens], tokens[:, None], positions[tokens][:, None], len(tokens) == len(requests), True
    together: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for request in torch.where(~few)[0].tolist():
        token, number = int(starts[request]), 0
        while token < starts[request + 1]:
            place = int(positions[token]) % BLOCK
            count = min(BLOCK - place, int(starts[request + 1]) - token)
            together[number, place, count].append((request, token))
            token, number = token + count, number + 1
    for (_, _, count), rows in sorted(together.items()):
        chosen, first = torch.tensor(rows, device=counts.device).unbind(1)
        places = first[:, None] + torch.arange(count, device=counts.device)
        yield chosen, places, positions[places], False, False


class CodesPages(Pages):
    """Where the rows of a batch lie in pages of codes, and their newest tokens in the pages behind these.

    Attributes:
        counts: pages of codes of every row, [rows].
        written: page of every new token, and its place in it, [rows, new tokens], as a number.
    """

    def __init__(self, batch: "Batch", cache: PagedCache, step: Step, requests: Tensor):
        assert cache.codes is not None
        self.batch, self.cache, self.codes = batch, cache, cache.codes
        self.blocks = step.common.block_table_tensor[requests].long()
        self.counts = batch.positions[:, 0] // BLOCK
        self.written = self._numbers_at(batch.positions)

    def _numbers_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        place, tail = positions % BLOCK, self.codes.tail
        # The token that fills a block lies in none of these pages.
        page = (positions // BLOCK + place // tail).clamp_max(self.blocks.shape[1] - 1)
        return self.blocks.gather(1, page), place % tail

    @cached_property
    def tails(self) -> Tensor:
        """Addresses of the pages with the rows' numbers, [rows, pages]."""
        most = range((BLOCK - 1) // self.codes.tail + 1)
        behind = [(self.counts + number).clamp_max(self.blocks.shape[1] - 1) for number in most]
        return self.keep("tails", self.table.gather(1, torch.stack(behind, 1)))

    def prepare(self) -> None:
        super().prepare()
        _ = self.tails

    @cached_property
    def places(self) -> Places:
        batch, paged = self.batch, self.keep("paged", self.counts * BLOCK)
        tail = self.codes.tail if batch.in_place else 0
        return Places(batch.longest, batch.lengths, None, paged, BLOCK, batch.padded_right, tail, batch.causal)

    def newest(self, slot: Slot, rows: slice, stop: int) -> Tensor:
        """Return the rows' numbers, [rows, heads, tokens, columns], of tokens before place `stop` of their blocks."""
        positions = self.counts[rows, None] * BLOCK + torch.arange(stop, device=self.counts.device)
        place, tail = positions % BLOCK, self.codes.tail
        page = self.blocks[rows].gather(1, positions // BLOCK + place // tail)
        return self.cache.heads(slot.layer, slot.name)[page, :, place % tail].transpose(1, 2)

    def close(self, slot: Slot, numbers: Tensor) -> None:
        """Make codes of whole blocks [rows, heads, BLOCK, columns]."""
        pages = self.blocks.gather(1, self.counts[:, None])[:, 0]
        self.cache.codes_of(slot)[pages] = quantize(self.codes.layouts[slot], numbers)[:, 0]

    def whole(self, slot: Slot, newest: Tensor | None) -> Tensor:
        """Return a tensor of all rows, [rows, heads, tokens of the longest, columns], padded.

        newest: the rows' numbers; None: they are in pages."""
        layout, dtype, padding = self.codes.layouts[slot], self.codes.dtype, self.batch.padded_right
        if newest is not None and not padding:  # as many of every row, behind its pages, which end alike
            if not (most := int(self.counts.max())):
                return newest
            numbers = torch.arange(most, device=self.counts.device) - (most - self.counts)[:, None]
            pages = self.cache.codes_of(slot)[self.blocks.gather(1, numbers.clamp_min(0))]
            made = layout.dequantize(pages, dtype)
            if numbers.min() < 0:
                made = made.masked_fill_((numbers < 0).repeat_interleave(BLOCK, 1)[:, None, :, None], 0)
            return torch.cat((made, newest), 2)
        rows = []
        for row, (count, length) in enumerate(zip(self.counts.tolist(), self.batch.lengths.tolist(), strict=True)):
            numbers = (
                self.newest(slot, slice(row, row + 1), length - count * BLOCK) if newest is None else newest[[row]]
            )
            if count:
                pages = self.cache.codes_of(slot)[self.blocks[row, :count]]
                numbers = torch.cat((layout.dequantize(pages[None], dtype), numbers), 2)
            missing = self.batch.longest - length
            rows.append(F.pad(numbers, (0, 0, 0, missing) if padding else (0, 0, missing, 0)))
        return torch.cat(rows)

    def lying(self, slot: Slot, newest: Tensor | None) -> History:
        """What stands for it, to be read where it lies."""
        cache, (codes, numbers), size = self.cache, self.codes.starts(slot), self.codes.dtype.itemsize
        shape = len(self.blocks), slot.heads, slot.columns
        given: dict[str, Any] = {"newest": newest, "layout": self.codes.layouts[slot], "strides": (codes, 0, 0)}
        if newest is None:
            _, head, token, _ = cache.heads(slot.layer, slot.name).stride()
            given["tails"] = self.tails, (numbers, head * size, token * size)
        return History(shape, self.places, self.table, lambda _: self.whole(slot, newest), self.codes.dtype, **given)


class Kept(NamedTuple):
    """What a tensor of several new tokens is made of: codes in pages, and numbers."""

    pages: CodesPages
    slot: Slot
    newest: Tensor

    def whole(self) -> Tensor:
        """Return the tensor."""
        return self.pages.whole(self.slot, self.newest)


class CodesLayer(PagedLayer):
    """PagedLayer on pages of codes. What is handed out holds numbers of a block that these tokens fill.

    Attributes:
        heads: whether the layer attends to what it caches, and not to something made of that.
    """

    pages: CodesPages

    def __init__(self, pages: CodesPages, layer: LayerPlan):
        super().__init__(pages, layer)
        self.heads = (layer.latent, layer.key_rank, layer.value_rank) == (None, None, None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        pages, batch = self.pages, self.pages.batch
        given = [states for states in (key_states, value_states) if states.shape[1]]
        newest: list[Any] = [None] * len(given)
        if not batch.in_place:  # all is read before anything is written: codes lie where other numbers did
            before = int(batch.positions[0, 0]) % BLOCK
            newest = [
                torch.cat((pages.newest(slot, slice(None), before), new), 2) if before else new
                for slot, new in zip(self.slots, given, strict=True)
            ]
        histories: list[Any] = []
        for slot, new, numbers in zip(self.slots, given, newest, strict=True):
            if numbers is not None and numbers.shape[2] == BLOCK:
                pages.close(slot, numbers)
            else:
                pages.write(slot, new)
            if batch.new == 1 or (batch.causal and self.heads):
                histories.append(pages.lying(slot, numbers))
            else:
                histories.append(batch.make(Kept(pages, slot, numbers)))
        return histories[0], histories[1] if len(histories) > 1 else histories[0][:, :0]
