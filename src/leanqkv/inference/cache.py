"""A cache that is allocated once, for a known number of tokens, and read where it lies."""

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache

from ..cache_bits import PLAIN, CacheBits
from ..model.cache import LeanDynamicLayer, LeanDynamicWindowLayer, cached_tensors
from ..model.cache_quantized import BLOCK, KiviLayer, Paged, kivi_layers
from ..model.config import LeanConfig
from .codes import quantize
from .history import History, Places
from .repeat import known
from .step import write

# Tokens for which a cache grows, at least.
GROWTH = 64
# Bytes of a large page of Linux, and what asks for these.
LARGE_PAGE, MADV_HUGEPAGE = 2**21, 14


class _InPlace:
    """What layers have in common that write new tokens behind the old ones, into memory with room for more."""

    capacity: int
    keys: Tensor | None
    values: Tensor | None
    _buffers: tuple[Tensor, Tensor] | None = None  # of which `keys` and `values` are the last places held

    @property
    def mark(self) -> Any:
        """An object that is another one after every change, but `advance` and the steps it stands for."""
        return self.keys

    def reset(self) -> None:
        self._buffers = None
        super().reset()  # type: ignore[misc]

    def _allocate(self, history: Tensor) -> Tensor:
        buffer = on_large_pages(history.new_empty((*history.shape[:2], self.capacity, history.shape[-1])))
        buffer[:, :, : history.shape[-2]] = history
        return buffer

    def _in_place(self, place: int) -> bool:
        """Whether the tokens lie in the buffers, the last before `place`: not where other tensors took their places."""
        if self._buffers is None:
            return False
        return all(_ends(*pair, place) for pair in zip((self.keys, self.values), self._buffers, strict=True))


class AllocatedLayer(_InPlace, LeanDynamicLayer):
    """Like LeanDynamicLayer, whose history it is a drop-in for, but new tokens are written behind the old
    ones in place: nothing is concatenated, and what attention reads is a view of exactly the tokens so far, so that no
    mask has to hide the rest."""

    grows = False  # where more tokens come than there is room for

    def __init__(self, capacity: int):
        """capacity: tokens that there is room for."""
        super().__init__()
        self.capacity = capacity

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [batch, heads, new positions, head_dim], of which either may have no heads.

        Raises:
            ValueError: more tokens than there is room for.
        """
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        assert self.keys is not None and self.values is not None
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if end > self.capacity:
            if not self.grows:
                raise ValueError(f"the cache has room for {self.capacity} tokens, {end} are to be kept")
            self.capacity, self._buffers = end + max(GROWTH, end // 4), None
        if not self._in_place(start):
            self._buffers = (self._allocate(self.keys), self._allocate(self.values))
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            if end - start == 1:
                write(new, buffer, start)
            else:
                buffer[:, :, start:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    @property
    def steps(self) -> int:
        """How many more tokens `advance` may count."""
        return 0 if self.keys is None or self._buffers is None else self.capacity - self.keys.shape[-2]

    def advance(self) -> None:
        """Count one more token, which is written without `update` (repeat.py)."""
        assert self.keys is not None and self._buffers is not None
        end = self.keys.shape[-2] + 1
        self.keys, self.values = (buffer.narrow(2, 0, end) for buffer in self._buffers)

    def get_max_length(self) -> int:
        return self.capacity


class AllocatedWindowLayer(_InPlace, LeanDynamicWindowLayer):
    """Keeps the last `sliding_window - 1` tokens as transformers' layer does, and new ones are written behind them in
    place. Attention reads from the beginning of the memory: what has left the window is hidden by the mask, until the
    window goes back to the beginning where the memory ends."""

    def __init__(self, window: int):
        super().__init__(window)
        self.capacity, self._end = window - 1 + BLOCK, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """As AllocatedLayer.update; several new tokens are put behind the window in new memory."""
        if key_states.shape[-2] != 1 or not self.is_initialized or self.record_past:
            self._buffers = None
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        if not self._has_place:
            self._end = self.keys.shape[-2]
            self._buffers = self._allocate(self.keys), self._allocate(self.values)
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            write(new, buffer, self._end)
        self.advance()
        return tuple(buffer.narrow(2, 0, self._end) for buffer in self._buffers)  # type: ignore[return-value]

    @property
    def _has_place(self) -> bool:
        """Whether the next token can be written behind the last."""
        return self._end < self.capacity and self._in_place(self._end)

    @property
    def steps(self) -> int:
        """As AllocatedLayer.steps."""
        return self.capacity - self._end if self._has_place else 0

    def advance(self) -> None:
        """As AllocatedLayer.advance."""
        assert self._buffers is not None
        self._end += 1
        self.cumulative_length += 1
        first = max(self._end - self.sliding_window + 1, 0)
        self.keys, self.values = (buffer.narrow(2, first, self._end - first) for buffer in self._buffers)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many positions attention reads, with the new ones, and how many it does not."""
        if query_length != 1 or not self._has_place or self.record_past:
            return super().get_mask_sizes(query_length)
        return self._end + 1, self.cumulative_length - self._end


def _ends(held: Tensor | None, buffer: Tensor, place: int) -> bool:
    """Whether these are places of the buffer, the last of which is before `place`."""
    if held is None or held.shape[:2] != buffer.shape[:2]:
        return False
    first = buffer.narrow(2, place - held.shape[2], 1)
    return not buffer.numel() or (held.data_ptr() == first.data_ptr() and held.stride() == first.stride())


class KernelPaged(Paged):
    """Paged, whose pages are made by the kernel where it applies."""

    quantize_blocks = staticmethod(quantize)


class QuantizedLayer(KiviLayer):
    """KiviLayer whose tensors are read where they lie if there is one new token of every row.

    Rows may have different lengths then: `join_rows` puts those of several caches together.
    """

    paged_class = KernelPaged
    _lengths: Tensor | None = None  # positions held by every row; None: as the last prompt left them
    _histories: Sequence[History] = ()  # of the pages that there are, to be handed out again and again

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: it lays out histories of its own pages."""
        return {**self.__dict__, "_histories": ()}

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Any, Any]:
        """As KiviLayer.update; of one new token a `History` of each tensor."""
        if not self.is_initialized or key_states.shape[2] != 1:
            self._end()
            return super().update(key_states, value_states, *args, **kwargs)
        before = self._begin()
        if self._same is None:
            with known():
                self._behind = before - self._paged
        place = self._behind if self._same is None else self._same
        for paged, new in zip(self.paged, (key_states, value_states), strict=True):
            write(new, paged.newest, place)
        with known():
            self._lengths = lengths = before + 1
        seen, _ = self.get_mask_sizes(1)
        firsts = None if self.window is None else (lengths - seen).clamp_min_(0)
        places = Places(seen, lengths, firsts, self._paged, BLOCK)
        histories = [history.at(places) for history in self._histories]
        self.cumulative_length += 1
        self._until_full -= 1
        if self._same is not None:
            self._same += 1
        if not self._until_full:
            self._quantize(lengths - self._paged)
        elif self.window is not None and self._same is not None and not (self.window - 1 - self._same) % BLOCK:
            for paged in self.paged:  # the oldest page has left the window
                self._drop(paged, self._same)
            self._lengths = self._count_pages() + self._same
        return histories[0], histories[1]

    @property
    def mark(self) -> Any:
        """As those of the other layers."""
        return self._lengths

    @property
    def steps(self) -> int:
        """As AllocatedLayer.steps: the token that fills a block is not among them."""
        return self._until_full - 1

    def advance(self) -> None:
        """As AllocatedLayer.advance."""
        assert self._lengths is not None
        self._lengths += 1
        self.cumulative_length += 1
        self._until_full -= 1
        if self._same is None:
            self._behind += 1
        else:
            self._same += 1

    @property
    def room_bytes(self) -> int:
        """Bytes of the places behind the pages that hold no token yet."""
        if self._lengths is None:
            return 0
        free = BLOCK * len(self._lengths) - int((self._lengths - self._paged).sum())
        return sum(free * paged.newest[:, :, 0].nbytes // len(self._lengths) for paged in self.paged)

    def _begin(self) -> Tensor:
        """Make room behind the pages for a block of every row; return how many positions each holds."""
        if self._lengths is None:
            count, rows = self.paged[0].newest.shape[2], len(self.paged[0].pages)
            for paged in self.paged:
                old = paged.newest
                paged.newest = old.new_zeros((*old.shape[:2], BLOCK, old.shape[-1]))
                paged.newest[:, :, :count] = old
            self._lay_out(torch.full((rows,), count))
        elif not self._histories:
            self._count_pages()
        assert self._lengths is not None
        return self._lengths

    def _end(self) -> None:
        """Go back to what several new tokens are written behind."""
        if self._lengths is not None and self._same is None:
            raise ValueError("rows of different lengths take one new token at a time")
        for paged in self.paged if self._lengths is not None else ():
            paged.newest = paged.newest[:, :, : self._same]
        self._lengths = None

    def _count_pages(self) -> Tensor:
        """Lay out the tables anew; return how many positions of every row are in pages."""
        self._histories = [self._history(paged) for paged in self.paged]
        counts = [[len(pages) for pages in paged.pages] for paged in self.paged]
        # A tensor without heads has no pages.
        self._paged = torch.tensor([BLOCK * max(both) for both in zip(*counts, strict=True)])
        return self._paged

    def _lay_out(self, newest: Tensor) -> None:
        """Lay out the tables anew, for so many places of every row behind the pages; note after how many steps the
        first row fills a block, and where all write if all write in one place."""
        self._lengths, counts = self._count_pages() + newest, newest.tolist()
        self._until_full = BLOCK - max(counts)
        self._same = counts[0] if len(set(counts)) == 1 else None

    def _quantize(self, newest: Tensor) -> None:
        """Make pages of the blocks that are full. What was handed out goes on to name the old ones."""
        full = [row for row, count in enumerate(newest.tolist()) if count == BLOCK]
        for paged in self.paged:
            paged.quantize(full, BLOCK)
            self._drop(paged, 0)
        self._lay_out(torch.where(newest == BLOCK, 0, newest))

    def _history(self, paged: Paged) -> History:
        # A copy: the layer may have other pages when the tensor is wanted.
        held = Paged(paged.layout, paged.newest)
        held.pages, held.newest = [list(own) for own in paged.pages], paged.newest

        def make(places: Places) -> Tensor:
            return self._whole(held, (places.lengths - places.paged).tolist(), places.longest)

        shape = len(paged.newest), paged.newest.shape[1], paged.newest.shape[-1]
        most = max(1, max(map(len, paged.pages)))
        addresses = [[page.data_ptr() for page in row] + [0] * (most - len(row)) for row in paged.pages]
        table = torch.tensor(addresses)
        return History(shape, None, table, make, paged.newest.dtype, newest=paged.newest, layout=paged.layout)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        super().batch_select_indices(indices)
        if self._lengths is not None:
            self._lay_out((self._lengths - self._paged)[indices])

    def join(self, other: "QuantizedLayer") -> None:
        """Put the rows of `other` behind these."""
        newest = torch.cat([layer._begin() - layer._paged for layer in (self, other)])
        for paged, added in zip(self.paged, other.paged, strict=True):
            paged.pages += added.pages
            paged.newest = torch.cat((paged.newest, added.newest))
        self._lay_out(newest)
        self.cumulative_length = max(self.cumulative_length, other.cumulative_length)

    def reset(self) -> None:
        super().reset()
        self._lengths = None


def on_large_pages(memory: Tensor) -> Tensor:
    """Ask Linux to hold new memory in pages of 2 MB: it is read faster, as the processor looks up fewer addresses than
    of pages of 4 kB. Where the system does not know this, or has it switched off, nothing changes."""
    advise = _advise()
    if memory.device.type == "cpu" and memory.nbytes >= LARGE_PAGE and advise is not None:
        first = -(-memory.data_ptr() // LARGE_PAGE) * LARGE_PAGE
        size = (memory.data_ptr() + memory.nbytes - first) // LARGE_PAGE * LARGE_PAGE
        if size:
            advise(first, size, MADV_HUGEPAGE)
    return memory


@functools.cache
def _advise() -> Any | None:
    """Return the C library's `madvise` on Linux."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def allocate_cache(config: LeanConfig, capacity: int, bits: CacheBits = PLAIN) -> Cache:
    """An empty cache for `capacity` tokens, to be given as `past_key_values`.

    A layer makes its tensors, as many heads as its plan says, when the first tokens come. Layers with a sliding window
    have room for it and a block more. A quantized cache, of these `bits`, grows."""
    if bits.quantized:
        cache = bits.cache(config)
        cache.layers = kivi_layers(config.plan, bits.key_bits, bits.value_bits, QuantizedLayer)
        return cache
    cache = DynamicCache(config=config)
    cache.layers = [
        AllocatedLayer(capacity) if planned.window is None else AllocatedWindowLayer(planned.window)
        for planned in config.plan.layers
    ]
    return cache


def token_bytes(cache: Cache) -> int:
    """Bytes of keys and values of the tokens in `cache`, without the room for more."""
    held = sum(tensor.nbytes for layer in cache.layers for tensor in cached_tensors(layer))
    return held - sum(layer.room_bytes for layer in cache.layers if isinstance(layer, QuantizedLayer))


def let_grow(cache: Cache) -> None:
    """Let a cache take any number of tokens; where there is no room for one it is allocated anew."""
    for layer in cache.layers:
        if isinstance(layer, AllocatedLayer):
            layer.grows = True


def keep_rows(cache: Cache, rows: Tensor, length: int) -> None:
    """Keep the sequences `rows` alone, with their last `length` tokens."""
    for layer in _in_use(cache):
        if isinstance(layer, QuantizedLayer):
            layer.batch_select_indices(rows)
        else:
            both = layer.keys, layer.values
            layer.keys, layer.values = (one[rows, :, max(one.shape[-2] - length, 0) :] for one in both)
        layer.cumulative_length = length


def join_rows(cache: Cache, other: Cache) -> None:
    """Put the sequences of `other` behind those of `cache`, which has to grow for more tokens: see `let_grow`.

    They are padded on the left to one length; those of a quantized cache keep their own."""
    for layer, added in zip(_in_use(cache), _in_use(other), strict=True):
        if isinstance(layer, QuantizedLayer):
            layer.join(added)
            continue
        for name in ("keys", "values"):
            parts = [getattr(layer, name), getattr(added, name)]
            length = max(part.shape[-2] for part in parts)
            padded = [F.pad(part, (0, 0, length - part.shape[-2], 0)) for part in parts]
            setattr(layer, name, torch.cat(padded))
        layer.cumulative_length = max(layer.get_seq_length(), added.get_seq_length())


def _in_use(cache: Cache) -> list[Any]:
    """The layers that hold something; one that computes nothing does not. Some count the tokens that they have seen, in
    `cumulative_length`."""
    layers: list[Any] = cache.layers
    return [layer for layer in layers if layer.is_initialized]
