"""Caches in 8, 4 or 2 bits. KIVI: keys per channel, values per token, in blocks of tokens that are quantized once.

KIVI (Liu et al. 2024, https://arxiv.org/abs/2402.02750, section 3): some channels of the keys are far larger than the
others, those of the values are not, so each is scaled along the dimension in which its sizes are alike. The newest
tokens, fewer than a block, stay in the model's precision.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, QuantizedCache, QuantoQuantizedLayer

# The backend of a quantized cache that is made here, and what its `cache_config` may hold.
KIVI, KIVI_OPTIONS = "kivi", ("key_bits", "value_bits")

BITS = (2, 4, 8)
# Tokens of a block.
BLOCK = 64
# Columns of a value that share a scale, at most.
COLUMNS = 64
# Of scales and offsets: the range of float32 in two bytes.
SCALE_DTYPE = torch.bfloat16


class LeanQuantizedCache(QuantizedCache):
    """A quantized cache for the tensors of the plan: `LeanQuantizedCache("kivi", config, key_bits=8, value_bits=4)`.

    `generate(cache_implementation="quantized", cache_config={"backend": "kivi", "key_bits": 8})` makes one.
    """

    def __init__(self, backend: str, config, **options: Any):
        """Make the layers.

        Args:
            backend, options: "kivi" with key_bits and value_bits (see `KiviLayer`), which needs no further package; or
                as transformers' QuantizedCache takes them, which names the package that a missing backend needs.

        Raises:
            ValueError: an unknown option; or some layers keep a sliding window, which "kivi" alone does.
        """
        # transformers' own take `self`, a backend and a configuration first.
        valid = KIVI_OPTIONS if backend == KIVI else tuple(signature(QuantizedCache.__init__).parameters)[3:]
        if unknown := [name for name in options if name not in valid]:
            raise ValueError(
                f"backend {backend!r} of the quantized cache has no option {unknown[0]!r}; it has {', '.join(valid)}"
            )
        given = {name: value for name, value in options.items() if value is not None}
        if backend == KIVI:
            Cache.__init__(self, layers=kivi_layers(config.plan, **given))  # type: ignore[arg-type]
            return
        # What leaves a window cannot be taken out of another backend's tensors.
        windowed = next((layer for layer in config.plan.layers if layer.window is not None), None)
        if windowed is not None:
            raise ValueError(
                f"backend {backend!r} of the quantized cache keeps all positions, but layer {windowed.layer} keeps a "
                f"sliding window of {windowed.window}; use backend {KIVI!r}"
            )
        whole: Any = PreTrainedConfig(num_hidden_layers=config.num_hidden_layers)  # type: ignore[call-arg]
        super().__init__(backend, whole, **options)
        self.layers = [_quantized_layer(type(layer), given) for layer in self.layers]


def _quantized_layer(kind: type, options: dict[str, Any]) -> Any:
    """A layer of transformers' class `kind` whose keys or values may be tensors without heads."""

    class Layer(kind):
        # The backends take no empty tensors.
        def _quantize(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super()._quantize(tensor, *args, **kwargs) if tensor.numel() else (tensor, None)

        def _dequantize(self, quantized: Any) -> Tensor:
            is_empty = isinstance(quantized, tuple) and not quantized[0].numel()
            return quantized[0] if is_empty else super()._dequantize(quantized)

    class WholeGroups(Layer):
        # Quanto refuses numbers that do not fill its groups: the last ones are repeated until they do.
        def _quantize(self, tensor: Tensor, axis: int) -> Any:
            if not tensor.numel():
                return super()._quantize(tensor, axis)
            rows = tensor.flatten(0, -2) if axis == -1 else tensor.flatten(1).T
            missing = -len(rows) % self.q_group_size
            rows = torch.cat((rows, rows[-1:].expand(missing, -1)))
            return super()._quantize((rows if axis == -1 else rows.T).contiguous(), axis), tensor.shape, axis

        def _dequantize(self, quantized: Any) -> Tensor:
            if len(quantized) == 2:
                return super()._dequantize(quantized)
            whole, shape, axis = quantized
            rows = super()._dequantize(whole)
            if axis == -1:
                return rows[: shape[:-1].numel()].view(shape)
            return rows[:, : shape[1:].numel()].reshape(shape)

    return (WholeGroups if issubclass(kind, QuantoQuantizedLayer) else Layer)(**options)


@dataclass(frozen=True)
class PageLayout:
    """How a page keeps BLOCK tokens of a cached tensor: codes, then scales, then offsets, each of all heads.

    A head's codes are a matrix [depth, lanes]: scaled by channel [columns, tokens], by token [tokens, columns]. Four
    codes of a lane lie in four bytes, lane behind lane, in the lowest bits those of the first four, in the next bits
    those of the next four. So a processor multiplies vectors of four codes as they lie, and adds nothing up across a
    vector. Scales and offsets: [heads, columns], or of every token and group of columns, [heads, BLOCK, groups].
    """

    bits: int
    heads: int
    columns: int
    per_token: bool

    @cached_property
    def groups(self) -> int:
        """Groups of a token's columns, each with a scale of its own if scales are by token."""
        return ceil(self.columns / COLUMNS) if self.per_token else 1

    @cached_property
    def width(self) -> int:
        """Columns of a group; the last one may have fewer."""
        return ceil(self.columns / self.groups / 4) * 4

    @cached_property
    def lanes(self) -> int:
        """Lanes of a head's codes."""
        return self.columns if self.per_token else BLOCK

    @cached_property
    def depth(self) -> int:
        """Codes of a lane, filled up so that four of them in all places of four bytes are whole."""
        whole = 32 // self.bits
        return BLOCK if self.per_token else ceil(self.columns / whole) * whole

    @cached_property
    def scales(self) -> tuple[int, ...]:
        """The shape of scales, and of offsets."""
        return (self.heads, BLOCK, self.groups) if self.per_token else (self.heads, self.columns)

    @cached_property
    def head_scales(self) -> int:
        """Scales of a head."""
        return prod(self.scales[1:])

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of a page's codes."""
        return self.heads * self.depth * self.lanes * self.bits // 8

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.code_bytes + 2 * prod(self.scales) * SCALE_DTYPE.itemsize

    @torch.no_grad()
    def quantize(self, states: Tensor) -> Tensor:
        """Return the pages [batch, blocks, page_bytes] of whole blocks of tokens [batch, heads, tokens, columns].

        The offset is rounded down and the scale up, so no entry lies outside the codes, and none is off by more than
        half a scale. Where an entry is not finite, no entry that shares its scale will be.
        """
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        # Repeating a column leaves the range of its group as it is.
        missing = self.groups * self.width - self.columns if self.per_token else 0
        if missing:
            states = torch.cat((states, states[..., -1:].expand(*states.shape[:-1], missing)), -1)
        blocks = states.unflatten(2, (-1, BLOCK)).unflatten(-1, (self.groups, -1))
        shared = -1 if self.per_token else 3  # [batch, heads, blocks, BLOCK, groups, width]
        low = _rounded(blocks.amin(shared, keepdim=True), -torch.inf)
        scale = _rounded((blocks.amax(shared, keepdim=True) - low) / (2**self.bits - 1), torch.inf)
        codes = (blocks - low).div_(torch.where(scale > 0, scale, 1))
        # What a conversion to integers makes of NaN is undefined.
        codes = codes.round_().nan_to_num_(0).to(torch.uint8).flatten(-2)[..., : self.columns]
        parts = [self._packed(codes), *(part.flatten(3) for part in (scale, low))]
        return torch.cat([part.transpose(1, 2).flatten(2).contiguous().view(torch.uint8) for part in parts], -1)

    @torch.no_grad()
    def dequantize(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens of pages [..., blocks, page_bytes] as [..., heads, tokens, columns] in that precision."""
        sizes = [self.code_bytes, *[prod(self.scales) * SCALE_DTYPE.itemsize] * 2]
        packed, *rest = pages.split(sizes, -1)
        codes = self._unpacked(packed).transpose(-4, -3)  # [..., heads, blocks, BLOCK, columns]
        scale, low = (self._by_column(part.contiguous().view(SCALE_DTYPE)) for part in rest)
        states = codes.to(torch.promote_types(dtype, torch.float32)).mul_(scale).add_(low)
        if dtype == torch.float16:  # of which the largest entries are less than half a scale from infinity
            limit = torch.finfo(dtype).max
            states = states.clamp_(-limit, limit)
        return states.to(dtype).flatten(-3, -2)

    def _packed(self, codes: Tensor) -> Tensor:
        """Codes [..., BLOCK, columns] to bytes [..., numbers]."""
        if not self.per_token:
            codes = F.pad(codes.transpose(-1, -2), (0, 0, 0, self.depth - self.columns))
        by_place = codes.unflatten(-2, (-1, 8 // self.bits, 4))  # [..., depth / 4 / places, places, 4, lanes]
        packed = by_place.select(-3, 0)
        for place in range(1, 8 // self.bits):
            packed = packed | by_place.select(-3, place) << (self.bits * place)
        return packed.transpose(-1, -2).flatten(-3)

    def _unpacked(self, packed: Tensor) -> Tensor:
        """Bytes [..., heads * numbers] to codes [..., heads, BLOCK, columns]."""
        packed = packed.unflatten(-1, (self.heads, -1, self.lanes, 4)).transpose(-1, -2)
        places = [packed >> (self.bits * place) & (2**self.bits - 1) for place in range(8 // self.bits)]
        codes = torch.stack(places, -3).flatten(-4, -2)  # [..., heads, depth, lanes]
        return codes if self.per_token else codes[..., : self.columns, :].transpose(-1, -2)

    def _by_column(self, scales: Tensor) -> Tensor:
        """Scales of pages [..., blocks, numbers] to [..., heads, blocks, BLOCK or 1, columns]."""
        scales = scales.unflatten(-1, self.scales).transpose(-1 - len(self.scales), -len(self.scales))
        if not self.per_token:
            return scales.unsqueeze(-2)
        return scales.repeat_interleave(self.width, -1)[..., : self.columns]


def page_layout(name: str, key_bits: int, value_bits: int, heads: int, columns: int) -> PageLayout:
    """Return the layout of a cached tensor by its name in the plan. MLA's latent, which holds keys too, is treated as
    keys are."""
    per_token = name == "values"
    return PageLayout(value_bits if per_token else key_bits, heads, columns, per_token)


class Paged:
    """One cached tensor of every row (sequence) of a batch: pages of whole blocks, and the newest tokens as they are.

    Attributes:
        layout: of the pages.
        pages: of every row, oldest first, each [page_bytes]. They never change, so rows may share them.
        newest: [batch, heads, places, columns].
        quantize_blocks: makes the pages.
    """

    quantize_blocks: Callable[[PageLayout, Tensor], Tensor] = staticmethod(PageLayout.quantize)

    def __init__(self, layout: PageLayout, like: Tensor):
        """like: [batch, heads, any, columns]."""
        self.layout = layout
        self.pages: list[list[Tensor]] = [[] for _ in range(len(like))]
        self.newest = like[:, :, :0]

    def quantize(self, rows: Sequence[int], tokens: int) -> None:
        """Make pages of the first `tokens`, whole blocks, of the newest ones of these rows."""
        if not self.newest.numel():  # a tensor without heads takes no memory, and has no largest entry
            return
        every = list(rows) == list(range(len(self.newest)))  # which need not be copied
        newest = self.newest if every else self.newest[list(rows)]
        for row, made in zip(rows, self.quantize_blocks(self.layout, newest[:, :, :tokens]), strict=True):
            self.pages[row] += [page.clone() for page in made.unbind(0)]  # each with a memory of its own

    def history(self, row: int, newest: int) -> Tensor:
        """Return what is kept of a row [heads, tokens, columns], the last `newest` of them as they are."""
        states = self.newest[row, :, :newest]
        if not self.pages[row]:
            return states
        return torch.cat((self.layout.dequantize(torch.stack(self.pages[row]), states.dtype), states), 1)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.pages = [list(self.pages[row]) for row in rows]
        self.newest = self.newest[list(rows)]

    @property
    def tensors(self) -> list[Tensor]:
        """All that takes memory."""
        return [*(page for pages in self.pages for page in pages), self.newest]


class KiviLayer(DynamicLayer):
    """One layer's keys and values. `update` returns them whole, dequantized in the model's precision.

    A block is quantized at the end of the call that fills it: the tokens of that call still see it unquantized.

    Args:
        key_bits, value_bits: 2, 4 or 8.
        cached: the names of the tensors that `update` is given, in their order. Where it is one name, the second
            tensor has no heads.
        window: positions that a query sees, its own included: a page behind them is dropped. None: all.

    Attributes:
        paged: the two tensors.

    Raises:
        ValueError: other bits.
    """

    is_croppable = False
    paged_class = Paged

    def __init__(
        self,
        key_bits: int = 8,
        value_bits: int = 4,
        cached: Sequence[str] = ("keys", "values"),
        window: int | None = None,
    ):
        super().__init__()
        check_bits(key_bits, value_bits)
        self.key_bits, self.value_bits, self.cached, self.window = key_bits, value_bits, tuple(cached), window
        self.is_sliding = window is not None
        self.cumulative_length = 0
        self.paged: tuple[Paged, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take heads, columns, precision and device of the first tokens."""
        super().lazy_initialization(key_states, value_states)
        names = (*self.cached, *self.cached)[:2]
        bits = self.key_bits, self.value_bits
        self.paged = tuple(
            self.paged_class(page_layout(name, *bits, states.shape[1], states.shape[-1]), states)
            for name, states in zip(names, (key_states, value_states), strict=True)
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Any, Any]:
        """Append tokens, and return all that a query sees: [batch, heads, tokens, columns]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for paged, new in zip(self.paged, (key_states, value_states), strict=True):
            paged.newest = torch.cat((paged.newest, new), 2)
        newest, (seen, _) = self.paged[0].newest.shape[2], self.get_mask_sizes(key_states.shape[2])
        histories = [self._whole(paged, [newest] * len(paged.pages), seen) for paged in self.paged]
        self.cumulative_length += key_states.shape[2]
        whole = newest // BLOCK * BLOCK
        for paged in self.paged:
            if whole:
                paged.quantize(range(len(paged.pages)), whole)
            paged.newest = paged.newest[:, :, whole:].clone()  # a view would keep the whole prompt
            self._drop(paged, newest - whole)
        return histories[0], histories[1]

    def _whole(self, paged: Paged, newest: Sequence[int], seen: int) -> Tensor:
        """The last `seen` tokens of all rows; shorter rows are padded on the left."""
        rows = [paged.history(row, count)[:, -seen:] for row, count in enumerate(newest)]
        longest = max(row.shape[1] for row in rows)
        rows = [F.pad(row, (0, 0, longest - row.shape[1], 0)) if row.shape[1] < longest else row for row in rows]
        return torch.stack(rows) if len(rows) > 1 else rows[0][None]

    def _drop(self, paged: Paged, newest: int) -> None:
        """Drop the pages that no later query sees."""
        if self.window is not None:
            needed = max(ceil((self.window - 1 - newest) / BLOCK), 0)
            for pages in paged.pages:
                del pages[: max(len(pages) - needed, 0)]

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens `update` returns with so many new ones, and the position of the first."""
        kept = self.cumulative_length if self.window is None else min(self.cumulative_length, self.window - 1)
        return kept + query_length, self.cumulative_length - kept

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take out quantized tokens, as speculative decoding does."""
        raise ValueError("a quantized cache cannot be cropped, as assisted decoding does; use the default cache")

    def reset(self) -> None:
        """Forget all tokens."""
        self.is_initialized, self.cumulative_length, self.paged = False, 0, ()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        if self.is_initialized:
            batch = torch.arange(len(self.paged[0].pages))
            for paged in self.paged:
                paged.select(batch[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(len(self.paged[0].pages)).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the rows of the batch in this order, as beam search does."""
        self.batch_select_indices(beam_idx)


def kivi_layers(plan, key_bits: int = 8, value_bits: int = 4, kind: type[KiviLayer] = KiviLayer) -> list[KiviLayer]:
    """Return a cache layer, of a kind, for every layer of the plan."""
    return [kind(key_bits, value_bits, [one.name for one in layer.cached], layer.window) for layer in plan.layers]


def quantized_bytes_per_token(plan, key_bits: int = 8, value_bits: int = 4) -> float:
    """Return the bytes of a KIVI cache for one token of one sequence, over all layers, in whole blocks of tokens.

    Scales and offsets are included. The newest tokens, up to BLOCK - 1, take the bytes of the model's precision.

    Raises:
        ValueError: other bits.
    """
    check_bits(key_bits, value_bits)
    # Of a whole block no token is left in the dtype that is given.
    return quantized_bytes(plan, BLOCK, SCALE_DTYPE, key_bits, value_bits) / BLOCK


def quantized_bytes(plan, tokens: int, dtype: torch.dtype, key_bits: int = 8, value_bits: int = 4) -> int:
    """Return the bytes of a KIVI cache for `tokens` of one sequence; the newest ones, fewer than a block, are of
    `dtype`. A layer with a window keeps the pages that the next token sees."""
    pages, newest = divmod(tokens, BLOCK)
    size = 0
    for layer in plan.layers:
        seen = pages if layer.window is None else min(pages, max(ceil((layer.window - 1 - newest) / BLOCK), 0))
        layouts = [page_layout(one.name, key_bits, value_bits, one.num_heads, one.head_dim) for one in layer.cached]
        size += seen * sum(layout.page_bytes for layout in layouts)
        size += newest * dtype.itemsize * sum(tensor.elements for tensor in layer.cached)
    return size


def check_bits(key_bits: Any, value_bits: Any) -> None:
    """Refuse numbers of bits that whole bytes are not made of."""
    for name, bits in (("key_bits", key_bits), ("value_bits", value_bits)):
        if type(bits) is not int or bits not in BITS:
            raise ValueError(f"{name} must be 2, 4 or 8, found {bits!r}")


def _rounded(exact: Tensor, direction: float) -> Tensor:
    """Round to SCALE_DTYPE, towards plus or minus infinity."""
    near = exact.to(SCALE_DTYPE)
    passed = near >= exact if direction > 0 else near <= exact
    return torch.where(passed | exact.isnan(), near, near.nextafter(near.new_tensor(direction)))
