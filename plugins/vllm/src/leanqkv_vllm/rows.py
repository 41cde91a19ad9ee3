"""Where the rows of a batch lie in pages of numbers, and the cache of a layer on these."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from leanqkv.inference.history import History, Places
from leanqkv.inference.step import write
from leanqkv.model.layout import LayerPlan

from .cache import PagedCache
from .pages import Slot
from .step import Step

if TYPE_CHECKING:
    from .histories import Batch

# A request with more new tokens than these has its history gathered once for all of them.
FEW = 8


class Pages:
    """Where the rows of a batch lie in the pages of a group of layers.

    Attributes:
        written: page of every new token, and its place in it, [rows, new tokens].
    """

    def __init__(self, batch: "Batch", cache: PagedCache, step: Step, requests: Tensor):
        self.batch, self.cache = batch, cache
        self.blocks = step.common.block_table_tensor[requests].long()
        slots = step.common.slot_mapping[batch.tokens]
        self.written = slots // cache.block_size, slots % cache.block_size

    def used(self) -> Tensor:
        """Return the pages that hold the rows' tokens."""
        counts = (self.batch.lengths + self.cache.block_size - 1) // self.cache.block_size
        return self.blocks[torch.arange(self.blocks.shape[1], device=counts.device) < counts[:, None]]

    @cached_property
    def read(self) -> tuple[Tensor, Tensor]:
        """Page of every token and its place, [rows, tokens of the longest], to gather them."""
        found, size = self.batch.history.expand(self.batch.real.shape), self.cache.block_size
        # What pads a row is read from the page that belongs to no request.
        return torch.where(self.batch.real, self.blocks.gather(1, found // size), 0), found % size

    def keep(self, name: str, made: Tensor) -> Tensor:
        """As the batch's."""
        return self.batch.keep(f"{self.cache.layer_name}: {name}", made)

    @cached_property
    def table(self) -> Tensor:
        """Addresses of the rows' pages, [rows, pages]."""
        pages = self.cache.kv_cache
        return self.keep("table", self.blocks * (pages.stride(0) * pages.itemsize) + pages.data_ptr())

    @cached_property
    def offsets(self) -> dict[int, Tensor]:
        """Where a tensor's new tokens go, [rows], as numbers behind its first one in all pages; by its columns."""
        [page, place], columns = self.written, {slot.columns for slot in self.cache.group.slots}
        size = self.cache.kv_cache.stride(0) * self.cache.kv_cache.itemsize // self.cache.dtype.itemsize
        return {width: self.keep(f"offsets of {width}", (page * size + place * width)[:, 0]) for width in columns}

    def prepare(self) -> None:
        """Bring what is kept up to date, whether or not it is asked for."""
        _ = self.table, self.places, self.offsets

    def write(self, slot: Slot, new: Tensor) -> None:
        """Write new tokens [rows, heads, new tokens, columns] into their pages."""
        heads = self.cache.heads(slot.layer, slot.name)
        if self.batch.kept is None:
            page, place = self.written
            heads[page, :, place] = new.transpose(1, 2)
            return
        numbers = sum((size - 1) * heads.stride(d) for d, size in enumerate(heads.shape) if d != 1) + 1
        shape = len(new), slot.heads, numbers - slot.columns + 1, slot.columns
        write(new, heads.as_strided(shape, (0, heads.stride(1), 1, 1)), self.offsets[slot.columns])

    @cached_property
    def places(self) -> Places:
        lengths, window = self.batch.lengths, self.cache.group.window
        firsts = None if window is None else self.keep("firsts", (lengths - window).clamp_min(0))
        return Places(self.batch.longest, lengths, firsts, lengths, self.cache.block_size, self.batch.padded_right)

    def gather(self, slot: Slot) -> Tensor:
        """Return a tensor of all rows, [rows, heads, tokens of the longest, columns], padded."""
        page, place = self.read
        return self.cache.heads(slot.layer, slot.name)[page, :, place].transpose(1, 2)

    def history(self, slot: Slot) -> History:
        """What stands for it, to be read where it lies."""
        page = self.cache.kv_cache
        row, size = slot.columns * page.itemsize, self.cache.block_size
        strides = slot.offset * size * page.itemsize, size * row, row
        shape = len(self.blocks), slot.heads, slot.columns
        return History(shape, self.places, self.table, lambda _: self.gather(slot), page.dtype, strides=strides)


class PagedLayer(DynamicLayer):
    """A layer's tensors of the rows of a batch: `update` writes the new tokens into their pages and returns all."""

    def __init__(self, pages: Pages, layer: LayerPlan):
        super().__init__()
        self.pages = pages
        self.slots = [slot for slot in pages.cache.group.slots if slot.layer == layer.layer]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """key_states, value_states: [rows, heads, new tokens, columns], as the layers of the core give them."""
        pages, batch = self.pages, self.pages.batch
        given = [states for states in (key_states, value_states) if states.shape[1]]
        histories: list[Any] = []
        for slot, new in zip(self.slots, given, strict=True):
            pages.write(slot, new)
            if batch.longest == batch.new:  # nothing was there before
                histories.append(new)
            elif batch.new == 1:
                histories.append(pages.history(slot))
            else:
                histories.append(pages.gather(slot))
        return histories[0], histories[1] if len(histories) > 1 else histories[0][:, :0]

    def get_seq_length(self) -> int:
        """Return the tokens before the new ones, those that pad a shorter row included."""
        return self.pages.batch.longest - self.pages.batch.new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens a mask is for, and the first of them."""
        return self.pages.batch.longest, 0
