"""Attention of any mechanism: leanqkv's own code, on a cache in vLLM's pages.

The model around it is compiled as a whole. Between a layer's projections and its output stands one custom operator,
which runs the core's attention. Tokens that a request has one or a few of, as in decoding and of drafts, are rows of
one batch whose history is read where it lies, by leanqkv's kernel (leanqkv/inference/attention.cpp). For longer pieces
of a prompt the history is gathered. In pages of codes (codes.py) these pieces end where a page ends.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from leanqkv.inference.attention import attend_one_query, attend_one_query_to_latent
from leanqkv.inference.history import History, Places
from leanqkv.model.attention import KeyValues
from leanqkv.model.attention_latent import LatentAttention
from leanqkv.model.cache_quantized import BLOCK
from leanqkv.model.latent import absorbing_pays
from leanqkv.model.latent_heads import LatentHeadsAttention
from leanqkv.model.layout import LayerPlan
from leanqkv.model.position import BACK, Rotation, Rotations, make_masks
from leanqkv.model.transformer import LeanModel

from .cache import PagedCache
from .pages import Slot
from .step import Step

# A request with more new tokens than these has its history gathered once for all of them.
FEW = 8
# Positions of a history for which absorbing a latent takes fewer multiplications, if it does for any number.
MANY = 2**30


class Histories:
    """What the operators of a model's layers share: the batches of the current step.

    Args:
        model: whose attention `use_histories` has replaced.
        limit: positions of the longest request that there can be.
    """

    def __init__(self, model: LeanModel, caches: Sequence[PagedCache], limit: int):
        self.model, self.plan, self.caches, self.limit = model, model.config.plan, caches, limit
        self.config = copy(model.config)
        self.config._attn_implementation = "sdpa"
        self.lenders, self.batches, self.passes = self.plan.lenders, [], 1
        self._cores: dict[int, Any] = {}
        self._tables: Rotations = {}

    def begin(self, steps: Sequence[Step]) -> None:
        """Prepare a step. steps: the metadata of every one of the caches."""
        common, cache = steps[0].common, self.caches[0]
        like = cache.kv_cache.new_empty(0, dtype=cache.dtype)  # pages of codes are of another
        starts, lengths = common.query_start_loc.long(), common.seq_lens.long()
        counts = starts.diff()
        requests = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        tokens = torch.arange(len(requests), device=counts.device)
        positions = tokens - starts[requests] + (lengths - counts)[requests]
        self.batches, self.passes = [], 1
        if cache.codes is not None:
            for *given, whole, in_place in pieces_by_page(starts, lengths, positions):
                self.batches.append(Batch(self, steps, *given, whole=whole, like=like, in_place=in_place))
            return
        few = counts <= FEW
        if few.any():
            chosen = tokens if few.all() else tokens[few[requests]]
            given = requests[chosen], chosen[:, None], positions[chosen][:, None]
            self.batches.append(Batch(self, steps, *given, whole=len(chosen) == len(tokens), like=like))
        for count in counts[~few].unique().tolist():
            [chosen] = torch.where(counts == count)
            places = starts[chosen][:, None] + torch.arange(count, device=counts.device)
            self.batches.append(Batch(self, steps, chosen, places, positions[places], whole=False, like=like))
        self.passes = 2 if self._read_each_other() else 1

    def _read_each_other(self) -> bool:
        """Whether a batch reads pages that another one writes in this step: of prompts that begin alike."""
        for batch, number in product(self.batches, range(len(self.caches))):
            others = [other.pages[number].written[0].flatten() for other in self.batches if other is not batch]
            if others and torch.isin(batch.pages[number].used(), torch.cat(others)).any():
                return True
        return False

    def attend(self, hidden_states: Tensor, projected: list[Tensor | None], output: Tensor, number: int) -> None:
        """The attention of a layer, of all tokens of the step: see `core_attention`."""
        layer = self.plan.layers[number]
        core = self._core(layer.block)
        # What a batch reads of another one's new tokens is written when it is computed again.
        for batch in self.batches * self.passes:
            parts = [None if part is None else batch.rows_of(part) for part in projected]
            found, _, own = core(
                batch.rows_of(hidden_states) if core.mixer is not None else None,
                layer,
                position_embeddings=batch.rotations,
                attention_mask=batch.masks[layer.window],
                borrowed=batch.lent_to(layer),
                past_key_values=batch.cache,
                mlp_hidden=(*parts, None),
            )
            if number in self.lenders:
                batch.borrowed[number] = batch.to_lend(own)
            batch.put(output, found)

    def _core(self, block: int) -> Any:
        """The attention of a block, between its projections and its output."""
        if block not in self._cores:
            attention = self.model.layers[block].self_attn
            core = copy(attention)  # which shares its modules
            original = type(attention).__bases__[1]
            core.__class__ = CORES.get(original, original)
            core.project = lambda hidden_states, projected: projected
            core.project_output = lambda heads, gate: heads
            core.config, core.attend = self.config, attend_one_query
            self._cores[block] = core
        return self._cores[block]

    def tables(self, longest: int, like: Tensor) -> Rotations:
        """Rotations of positions from 0 to at least `longest`, [positions, rotated dimensions]; and what turns them
        back, where values are made of keys."""
        held = next((len(cos) for cos, _ in self._tables.values()), 0)
        rotary = self.model.rotary_emb
        if rotary is not None and held < longest:
            positions = torch.arange(max(longest, min(2 * held, self.limit)), device=like.device)[None]
            history = None if self.plan.reads_keys_in is None else positions
            self._tables = {name: (cos[0], sin[0]) for name, (cos, sin) in rotary(like, positions, history).items()}
        return self._tables


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


class Batch:
    """Requests of a step that attend together, as rows with equally many new tokens.

    Args:
        requests: of every row, [rows].
        tokens, positions: the rows' new tokens among those of the step, and their positions, [rows, new tokens].
        whole: whether these are all tokens of the step, one in each row.
        in_place: of pages of codes, whether the numbers behind them are read where they lie.

    Attributes:
        cache, masks, rotations: as the core's attention takes them.
        padded_right: whether shorter rows are padded on the right, so that positions are counted alike, or on the left.
        history, real: positions of the padded rows' tokens, [1 or rows, tokens of the longest], and which tokens are.
        borrowed: keys and values of the layers so far that later ones borrow.
        pages: of every group of layers.
    """

    def __init__(
        self,
        histories: Histories,
        steps: Sequence[Step],
        requests: Tensor,
        tokens: Tensor,
        positions: Tensor,
        *,
        whole: bool,
        like: Tensor,
        in_place: bool = True,
    ):
        self.tokens, self.new, self.whole = tokens, tokens.shape[1], whole
        self.positions, self.in_place = positions, in_place
        self.lengths = positions[:, -1] + 1
        self.longest = int(self.lengths.max())
        self.borrowed: dict[int, KeyValues] = {}
        self._parts: list[Any] = []  # of the last layer, the tensors that are made of pages of codes, and of what
        coded = histories.caches[0].codes is not None
        kinds: tuple[type[Pages], type[PagedLayer]] = (CodesPages, CodesLayer) if coded else (Pages, PagedLayer)
        self.pages = [kinds[0](self, *given, requests) for given in zip(histories.caches, steps, strict=True)]
        of = {number: pages for pages in self.pages for number in pages.cache.group.layers}
        self.cache = Cache(layers=[kinds[1](of.get(one.layer, self.pages[0]), one) for one in histories.plan.layers])
        self.padded_right = self.new == 1
        history = torch.arange(self.longest, device=tokens.device)[None]
        if not self.padded_right:
            history = history - (self.longest - self.lengths)[:, None]
        self.real, self.history = (history >= 0) & (history < self.lengths[:, None]), history.clamp_min(0)
        self.masks = self._masks(histories, like)
        tables = histories.tables(self.longest, like)
        self.rotations = {name: self._rotation(name, table, positions) for name, table in tables.items()} or None

    def _rotation(self, name: str, table: Rotation, positions: Tensor) -> Rotation:
        chosen = self.history if name.startswith(BACK) else positions
        return table[0][chosen], table[1][chosen]

    def _masks(self, histories: Histories, like: Tensor) -> dict[int | None, Any]:
        """By window; of rows with one token each, additive masks where the rows are of several lengths."""
        if self.new > 1:
            embeds = like.new_empty(len(self.real), self.new, 1)
            return make_masks(histories.config, histories.plan, embeds, self.real.long(), None, self.cache, None)
        masks = {}
        for window in {layer.window for layer in histories.plan.layers}:
            seen = self.real if window is None else self.real & (self.history >= self.lengths[:, None] - window)
            hidden = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
            masks[window] = None if seen.all() else hidden[:, None, None]
        return masks

    def make(self, kept: "Kept") -> Tensor:
        """Return the tensor of what is kept, and note that it is made of that."""
        self._parts.append((kept.whole(), kept))
        return self._parts[-1][0]

    def to_lend(self, own: KeyValues) -> KeyValues:
        """Return keys and values for later layers: in the place of a tensor made of codes, what it is made of."""
        found = [next((kept for made, kept in self._parts if made is part), part) for part in own]
        return KeyValues(*found)

    def lent_to(self, layer: LayerPlan) -> dict[int, KeyValues]:
        """Return keys and values that a layer may borrow. Tensors made of codes are made for this layer alone."""
        self._parts = []
        lent = {number: self.borrowed[number] for number in layer.lenders if number in self.borrowed}
        made = {
            number: KeyValues(*(part.whole() if isinstance(part, Kept) else part for part in parts))
            for number, parts in lent.items()
        }
        return {**self.borrowed, **made}

    def rows_of(self, tensor: Tensor) -> Tensor:
        """[tokens of the step, ...] to [rows, new tokens, ...]."""
        return tensor[: len(self.tokens), None] if self.whole else tensor[self.tokens]

    def put(self, output: Tensor, found: Tensor) -> None:
        """Write [rows, new tokens, ...] to its places among the tokens of the step."""
        if self.whole:
            output[: len(self.tokens)] = found[:, 0]
        else:
            output[self.tokens] = found


class Pages:
    """Where the rows of a batch lie in the pages of a group of layers.

    Attributes:
        written: page of every new token, and its place in it, [rows, new tokens].
    """

    def __init__(self, batch: Batch, cache: PagedCache, step: Step, requests: Tensor):
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

    @cached_property
    def table(self) -> Tensor:
        """Addresses of the rows' pages, [rows, pages]."""
        pages = self.cache.kv_cache
        return self.blocks * (pages.stride(0) * pages.itemsize) + pages.data_ptr()

    @cached_property
    def places(self) -> Places:
        lengths, window = self.batch.lengths, self.cache.group.window
        firsts = None if window is None else (lengths - window).clamp_min(0)
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
            page, place = pages.written
            pages.cache.heads(slot.layer, slot.name)[page, :, place] = new.transpose(1, 2)
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


class CodesPages(Pages):
    """Where the rows of a batch lie in pages of codes, and their newest tokens in the pages behind these.

    Attributes:
        counts: pages of codes of every row, [rows].
        written: page of every new token, and its place in it, [rows, new tokens], as a number.
    """

    def __init__(self, batch: Batch, cache: PagedCache, step: Step, requests: Tensor):
        assert cache.codes is not None
        self.batch, self.cache, self.codes = batch, cache, cache.codes
        self.blocks = step.common.block_table_tensor[requests].long()
        self.counts = batch.positions[:, 0] // BLOCK
        self.written = self._numbers_at(batch.positions)

    def _numbers_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        place, tail = positions % BLOCK, self.codes.tail
        return self.blocks.gather(1, positions // BLOCK + place // tail), place % tail

    @cached_property
    def tails(self) -> Tensor:
        """Addresses of the pages with the rows' numbers, [rows, pages]."""
        most = range((BLOCK - 1) // self.codes.tail + 1)
        behind = [(self.counts + number).clamp_max(self.blocks.shape[1] - 1) for number in most]
        return self.table.gather(1, torch.stack(behind, 1))

    @cached_property
    def places(self) -> Places:
        batch, paged = self.batch, self.counts * BLOCK
        tail = self.codes.tail if batch.in_place else 0
        return Places(batch.longest, batch.lengths, None, paged, BLOCK, batch.padded_right, tail)

    def newest(self, slot: Slot, rows: slice, stop: int) -> Tensor:
        """Return the rows' numbers, [rows, heads, tokens, columns], of tokens before place `stop` of their blocks."""
        positions = self.counts[rows, None] * BLOCK + torch.arange(stop, device=self.counts.device)
        place, tail = positions % BLOCK, self.codes.tail
        page = self.blocks[rows].gather(1, positions // BLOCK + place // tail)
        return self.cache.heads(slot.layer, slot.name)[page, :, place % tail].transpose(1, 2)

    def close(self, slot: Slot, numbers: Tensor) -> None:
        """Make codes of whole blocks [rows, heads, BLOCK, columns]."""
        pages = self.blocks.gather(1, self.counts[:, None])[:, 0]
        self.cache.codes_of(slot)[pages] = self.codes.layouts[slot].quantize(numbers)[:, 0]

    def whole(self, slot: Slot, newest: Tensor | None) -> Tensor:
        """Return a tensor of all rows, [rows, heads, tokens of the longest, columns], padded.

        newest: the rows' numbers; None: they are in pages."""
        layout, dtype, padding = self.codes.layouts[slot], self.codes.dtype, self.batch.padded_right
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
    """The same on pages of codes. What is handed out holds numbers of a block that these tokens fill."""

    pages: CodesPages

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        pages, batch = self.pages, self.pages.batch
        given = [states for states in (key_states, value_states) if states.shape[1]]
        newest: list[Any] = [None] * len(given)
        if not batch.in_place:  # all is read before anything is written: codes lie where other numbers did
            before = int(batch.positions[0, 0]) % BLOCK
            newest = [
                torch.cat((pages.newest(slot, slice(None), before), new), 2)
                for slot, new in zip(self.slots, given, strict=True)
            ]
        histories: list[Any] = []
        for slot, new, numbers in zip(self.slots, given, newest, strict=True):
            if numbers is not None and numbers.shape[2] == BLOCK:
                pages.close(slot, numbers)
            else:
                page, place = pages.written
                pages.cache.heads(slot.layer, slot.name)[page, :, place] = new.transpose(1, 2)
            if batch.new == 1:
                histories.append(pages.lying(slot, numbers))
            else:
                histories.append(batch.make(Kept(pages, slot, numbers)))
        return histories[0], histories[1] if len(histories) > 1 else histories[0][:, :0]


class LatentHeadsCore(LatentHeadsAttention):
    """Latents that are read where they lie, however few tokens there are: heads made of them would be gathered."""

    def absorbs(self, up: nn.Module, query: Tensor, positions: int, columns: int) -> bool:
        return super().absorbs(up, query, MANY if query.shape[2] == 1 else positions, columns)


class LatentCore(LatentAttention):
    """MLA whose absorbed form is one call of the kernel, if the latent and the rotary key lie in pages."""

    attend_to_latent = staticmethod(attend_one_query_to_latent)

    def _absorbing_pays(self, query: Tensor, pieces: list[Any], mask: Any) -> bool:
        if not isinstance(pieces[0], History):
            return super()._absorbing_pays(query, pieces, mask)
        size = query, MANY, self.latent.rank
        return absorbing_pays(self.k_up_proj, *size) and absorbing_pays(self.v_up_proj, *size)


CORES: dict[type, type] = {LatentHeadsAttention: LatentHeadsCore, LatentAttention: LatentCore}


class OpaqueAttention:
    """Attention of a block, of which `torch.compile` sees the projections and the output alone.

    Attributes:
        pages: the name under which vLLM's context has the `Histories`.
    """

    pages: str

    def forward(self: Any, hidden_states: Tensor, layer: LayerPlan, mlp_hidden: Tensor | None = None, **kwargs: Any):
        """As Attention.forward, of the tokens of a step [1, tokens, hidden_size]."""
        *projected, gate = self.project(hidden_states, mlp_hidden)
        output = hidden_states.new_empty(hidden_states.shape[1], layer.num_query_heads, self.head_dim)
        parts = [None if part is None else part[0] for part in projected]
        torch.ops.vllm.leanqkv_core_attention(hidden_states[0], parts, output, layer.layer, self.pages)
        return self.project_output(output[None], gate), None, KeyValues(None, None, None)


def use_histories(model: LeanModel, caches: Sequence[PagedCache], limit: int) -> Histories:
    """Make a model's attention run through the operator; return what a step begins with."""
    histories = caches[0].histories = Histories(model, caches, limit)
    for block in model.layers:
        attention = block.self_attn
        attention.__class__ = type("OpaqueAttention", (OpaqueAttention, type(attention)), {})
        attention.pages = caches[0].layer_name
    return histories


def core_attention(
    hidden_states: Tensor, projected: list[Tensor | None], output: Tensor, layer: int, pages: str
) -> None:
    """Attend with what a layer projects, and write its new keys and values into their pages: the custom operator.

    Args:
        hidden_states: [tokens, hidden_size], which mixers read.
        projected: what the core's `project` returns but for the gate, each [tokens, width].
        output: [tokens, query heads, head_dim], which is written.
    """
    context = get_forward_context()
    if context.attn_metadata is not None:  # None: vLLM measures the memory
        context.no_compile_layers[pages].histories.attend(hidden_states, projected, output, layer)


direct_register_custom_op(
    "leanqkv_core_attention", core_attention, mutates_args=["output"], fake_impl=lambda *arguments: None
)
