"""Attention of one query per sequence, as a decoding step has it, on a CPU.

`scaled_dot_product_attention` is slow there in bfloat16 if there is one query, and reaches less than the memory's
bandwidth in float32. The kernel is attention.cpp; PyTorch's own toolchain compiles it at its first use, with the
instructions that this processor has, and keeps it among what `torch.compile` keeps. Where nothing can be compiled,
and for all that the kernel is not made for, attention is PyTorch's.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat import compile_cpp
from ..model.attention_latent import attend_to_latent
from ..model.cache_quantized import SCALE_DTYPE
from ..model.latent import frequencies_of
from ..model.latent_heads import LatentAndKeys, attend_to_inputs, attend_turned
from ..model.position import Rotation
from .history import History
from .repeat import NUMBER, POINTER, REAL, Arguments, call, fields, made_of
from .step import DTYPES, KeyMaps, kernel_source, makes_keys

Heads = Tensor | History
# Parts of a head shorter than this take less time than handing them to another thread.
CHUNK_TOKENS = 128
# Positions that rows of a batch read in turns; the same as Turn::kSegment in attention.cpp.
SHARED_TOKENS = 512
# The most pieces that a head lies in; the same as kPieces in attention.cpp.
PIECES = 3


class _Source(ctypes.Structure):
    """The same, in the same order, as `Source` in attention.cpp."""

    _fields_ = [
        *fields(POINTER, "rows pages"),
        *fields(NUMBER, "columns skipped batch head row page_batch page_start page_head page_row bits"),
        *fields(NUMBER, "scales offsets scale_head groups width lanes"),
        ("tails", POINTER),
        *fields(NUMBER, "tail_batch tail_start tail_head tail_row row_count page_count tail_count"),
    ]


class _Call(Arguments):
    """The same, in the same order, as `Call` in attention.cpp."""

    mask_batch: int
    held: Tensor  # what the mask names
    _fields_ = [
        *((name, _Source * PIECES) for name in ("keys", "values")),
        ("plain", _Source),
        *fields(POINTER, "query mask cos sin frequency output up norm lengths firsts paged"),
        *fields(NUMBER, "page tail batch heads group length threads chunks key_pieces value_pieces key_heads made"),
        *fields(NUMBER, "plain_heads turned frequencies query_batch query_head table_batch table_row mask_batch"),
        *fields(NUMBER, "output_batch output_head padded_right queries query_row output_row"),
        *fields(REAL, "scaling epsilon"),
    ]

    given = "query", "mask", "cos", "sin"

    @property
    def lasting(self) -> int:  # type: ignore[override]
        """The parts of a head change where a new one begins."""
        return CHUNK_TOKENS - 1 - self.length % CHUNK_TOKENS

    def growing(self) -> list[ctypes.c_int64]:
        sources = *self.keys[: self.key_pieces], *self.values[: self.value_pieces], self.plain
        return [
            *(self.number(name) for name in (("length", "mask_batch") if self.mask_batch else ("length",))),
            *(
                ctypes.c_int64.from_address(ctypes.addressof(source) + _Source.row_count.offset)
                for source in sources
                if source.rows and not source.pages
            ),
        ]

    def fit(self, rows: int, length: int) -> None:
        super().fit(rows, length)
        self.length = length
        self.mask_batch = min(self.mask_batch, 1) * length  # 0: all rows have one
        self.chunks = length_chunks(rows * self.heads, length, self.threads)
        if self.plain_heads and rows > 1:  # rows take turns, part by part, and share what turns keys back
            self.chunks = max(self.chunks, length // SHARED_TOKENS)


def _in_place_of(plain: Callable[..., Any], kernel: Callable[..., Tensor | None]) -> Callable[..., Any]:
    """Return what is put in the place of an attention: the kernel where it applies, with the same arguments."""

    @functools.wraps(plain)
    def attend(attention: Any, *given: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output = kernel(attention, *given, **kwargs)
        return plain(attention, *given, **kwargs) if output is None else (output, None)

    return attend


def _to_inputs(attention: Any, query: Tensor, key: Tensor, values: Any, *given: Any, **kwargs: Any) -> Tensor | None:
    by = one_query_attention_to_both if isinstance(values, LatentAndKeys) else one_query_attention
    return by(query, key, values, *given)


def _to_made(
    attention: Any, query: Tensor, latent: Any, values: Any, mask: Tensor | None, scaling: float, *, rotation: Rotation
) -> Tensor | None:
    maps = attention.key_maps
    if maps is None or not makes_keys(attention):  # which may have been given a hook since
        return None
    return one_query_attention_to_made(query, latent, maps, values, mask, scaling, rotation)


attend_one_query = _in_place_of(attend_to_inputs, _to_inputs)
attend_one_query_turned = _in_place_of(attend_turned, _to_made)
attend_one_query_to_latent = _in_place_of(
    attend_to_latent, lambda attention, *given, **kwargs: one_query_attention_to_pieces(*given)
)


def length_chunks(heads: int, length: int, threads: int) -> int:
    """Return into how many parts the positions of every head are cut, so that all threads have the same work.

    heads: of keys, of all sequences together. One part where there are heads enough, or too few positions.
    """
    if heads >= threads:
        return 1
    return max(1, min(threads // math.gcd(heads, threads), length // CHUNK_TOKENS))


def one_query_attention(
    query: Tensor, key: Tensor, values: Sequence[Tensor], attention_mask: Tensor | None, scaling: float
) -> Tensor | None:
    """Attention by the kernel, [batch, positions, heads, width of the values], or None where it does not apply.

    query: [batch, heads, 1, head_dim]; key: [batch, heads / group size, key positions, head_dim].
    values: of consecutive key heads, each [batch, its heads, key positions, width]: a layer's own values
    lie in one tensor and borrowed ones in another. Of a causal history in codes there may be several queries, and the
    mask is not read.
    """
    batch, num_heads, queries, _ = query.shape
    several = queries > 1 and _take_several(key, values)
    kernel, mask = _kernel(query, (query, key, *values), several), None if several else attention_mask
    if kernel is None or not _fit(query, key, values, mask):
        return None
    group, start = num_heads // key.shape[1], 0
    output = query.new_empty(batch, queries, num_heads, values[0].shape[-1])
    for value in values:
        stop, first = start + value.shape[1], start * group
        part = query[:, first : stop * group], key[:, start:stop], value, output[:, 0, first:]
        made = _call(part[0], [part[1]], [part[2]], part[3], mask, scaling)
        if several:
            made.queries, made.query_row, made.output_row = queries, query.stride(2), output.stride(1)
        kernel(made)
        start = stop
    return output


def _take_several(key: Heads, values: Sequence[Heads]) -> bool:
    """Whether the kernel reads a history for several queries: whole heads in codes, with numbers behind them."""
    read: list[Any] = [one for one in (key, *values) if isinstance(one, History) and one.places.causal]
    known = [(one.layout.per_token, one.layout.columns, False) for one in read if one.layout and one.newest is not None]
    kinds = [(place > 0, one.shape[3], one.expanded) for place, one in enumerate(read)]  # keys, and then values
    return known == kinds and len(read) == 1 + len(values)


def one_query_attention_to_pieces(
    queries: Sequence[Tensor], keys: Sequence[Heads], values: Sequence[Heads], mask: Tensor | None, scaling: float
) -> Tensor | None:
    """The same for keys and values whose columns lie in pieces, each [batch, heads, key positions, columns].

    queries: the columns of every piece of keys, [batch, heads, 1, columns].
    """
    query, keys = _side_by_side(queries, keys)
    kernel = _kernel(query, (query, *keys, *values))
    columns = sum(key.shape[-1] for key in keys)
    alike = len({(isinstance(piece, Tensor), *piece.shape[:3]) for piece in (*keys, *values)}) == 1
    if kernel is None or not alike or query.shape[-1] != columns or max(len(keys), len(values)) > PIECES:
        return None
    if not _fit(query[..., : keys[0].shape[-1]], keys[0], values[:1], mask):
        return None
    output = query.new_empty(len(query), 1, query.shape[1], sum(value.shape[-1] for value in values))
    kernel(_call(query, keys, values, output[:, 0], mask, scaling))
    return output


def _side_by_side(queries: Sequence[Tensor], keys: Sequence[Heads]) -> tuple[Tensor, list[Heads]]:
    """Put together the pieces that lie side by side; return the query of all, and what is left of the pieces."""
    parts: list[list[Tensor]] = []
    pieces: list[Heads] = []
    for query, key in zip(queries, keys, strict=True):
        for place, piece in enumerate(pieces):
            if (both := _beside(piece, key)) is not None:
                pieces[place] = both
                parts[place].append(query)
                break
        else:
            pieces.append(key)
            parts.append([query])
    return torch.cat([part for own in parts for part in own], dim=-1), pieces


def _beside(one: Heads, other: Heads) -> Heads | None:
    """Return these columns and, behind them, those of `other`, if they lie side by side; None: they do not."""
    if isinstance(one, History) or isinstance(other, History):
        return one.beside(other) if isinstance(one, History) and isinstance(other, History) else None
    end = one.data_ptr() + one.shape[-1] * one.itemsize
    if other.data_ptr() != end or one.shape[:-1] != other.shape[:-1] or one.stride() != other.stride():
        return None
    return one.as_strided((*one.shape[:-1], one.shape[-1] + other.shape[-1]), one.stride())


def one_query_attention_to_both(
    query: Tensor, key: Tensor, both: LatentAndKeys, attention_mask: Tensor | None, scaling: float
) -> Tensor | None:
    """The same for a latent and keys in the place of values, [batch, positions, heads, both.columns]."""
    if both.keys.shape[2] == both.new.shape[1]:  # those of a first token alone
        return None
    tables = both.back or ()
    kernel = _kernel(query, (query, key, both.latent, both.keys, *tables))
    values = [both.latent.expand(-1, key.shape[1], -1, -1)]
    if kernel is None or not _fit(query, key, values, attention_mask):
        return None
    length, width = key.shape[2], tables[0].shape[-1] if tables else 0
    expected = [(rows, length, width) for rows in (1, len(query))]
    if both.keys.shape[:3:2] != (len(query), length) or any(tuple(table.shape) not in expected for table in tables):
        return None
    output = query.new_empty(len(query), 1, query.shape[1], both.columns)
    kernel(_call(query, [key], values, output[:, 0], attention_mask, scaling, both))
    return output


def one_query_attention_to_made(
    query: Tensor,
    latent: Heads,
    maps: KeyMaps,
    values: Sequence[Heads] | LatentAndKeys,
    attention_mask: Tensor | None,
    scaling: float,
    rotation: Rotation,
) -> Tensor | None:
    """The same for keys that are made of a latent [batch, 1, key positions, columns], normed and turned.

    values: heads, a latent that all heads share, or one and the keys' own behind it.
    """
    both = values if isinstance(values, LatentAndKeys) else None
    # Not for those of a first token alone.
    if both is not None and (both.keys is not latent or both.keys.shape[2] == both.new.shape[1]):
        return None
    key_heads, columns, _ = maps.up.shape
    parts = [both.latent.expand(-1, key_heads, -1, -1)] if both is not None else [*values]
    kernel = _kernel(query, (query, latent, *parts, *rotation))
    batch, heads, _, head_dim = query.shape
    length, turned = latent.shape[2], rotation[0].shape[-1]
    tables, masks = ([(rows, *shape) for rows in (1, batch)] for shape in ((length, turned), (1, 1, length)))
    if (
        kernel is None
        or not length
        or heads % key_heads
        or tuple(latent.shape) != (batch, 1, length, columns)
        or [tuple(part.shape[:3]) for part in parts] != [(batch, key_heads, length)]
        or isinstance(latent, Tensor) != isinstance(parts[0], Tensor)
        or turned > head_dim
        or any(tuple(table.shape) not in tables for table in rotation)
        or (attention_mask is not None and tuple(attention_mask.shape) not in masks)
    ):
        return None
    output = query.new_empty(batch, 1, heads, parts[0].shape[-1] if both is None else both.columns)
    kernel(_call(query, [latent], parts, output[:, 0], attention_mask, scaling, both, maps, rotation))
    return output


def _kernel(query: Tensor, tensors: Sequence[Any], several: bool = False) -> Callable[[_Call], None] | None:
    """Return the kernel for these tensors; None where there is none."""
    if query.device.type != "cpu" or query.dtype not in DTYPES or torch.compiler.is_compiling():
        return None
    if (query.shape[2] != 1 and not several) or (torch.is_grad_enabled() and any(one.requires_grad for one in tensors)):
        return None
    lying = [tensor.newest if isinstance(tensor, History) else tensor for tensor in tensors]
    if any(tensor.dtype != query.dtype for tensor in tensors):
        return None
    if any(tensor is not None and tensor.stride(-1) != 1 for tensor in lying):
        return None
    kernels = compiled_kernels()
    return None if kernels is None else functools.partial(_run, kernels[query.dtype])


def _run(kernel: Callable[[Any], bool], arguments: _Call) -> None:
    """Raise ValueError where more positions are to be read than lie there."""
    if not call(kernel, arguments):
        raise ValueError(f"a cache of {arguments.batch} sequences holds fewer positions than attention is to read")


def _call(
    query: Tensor,
    keys: Sequence[Heads],
    values: Sequence[Heads],
    output: Tensor,
    mask: Tensor | None,
    scaling: float,
    both: LatentAndKeys | None = None,
    maps: KeyMaps | None = None,
    rotation: Rotation | None = None,
) -> _Call:
    """The kernel's arguments, which name the memory of these tensors.

    keys, values: the pieces that they lie in, each with some of the columns.
    mask: [batch or 1, 1, 1, key positions]; output: [batch, heads, width].
    """
    key, value = keys[0], values[0]
    batch, num_heads, length = len(query), query.shape[1], key.shape[2]
    heads, key_heads = value.shape[1], 1
    if _is_shared(value):  # one head of values for all keys
        heads, key_heads = 1, 1 if _is_shared(key) else heads
    made = _Call(query=query.data_ptr(), output=output.data_ptr(), key_pieces=len(keys), value_pieces=len(values))
    for sources, pieces in ((made.keys, keys), (made.values, values)):
        sources[: len(pieces)] = [_source(piece) for piece in pieces]
    if isinstance(key, History):
        places = key.places
        made.lengths, made.paged, made.page = places.lengths.data_ptr(), places.paged.data_ptr(), places.page
        made.tail, made.padded_right = places.tail, places.padded_right
        made.firsts = None if places.firsts is None else places.firsts.data_ptr()
    if mask is not None:
        made.held = added = additive(mask)
        made.mask, made.mask_batch = added.data_ptr(), 0 if len(added) == 1 else length
    if both is not None:
        made.plain, made.plain_heads = _source(both.keys), both.keys.shape[1]
    if maps is not None:
        key_heads = len(maps.up) // heads
        made.up, made.made = maps.up.data_ptr(), query.shape[-1]
        made.norm, made.epsilon = None if maps.norm is None else maps.norm.data_ptr(), maps.epsilon
    if (tables := rotation or (both and both.back)) is not None:
        cos, sin = tables
        made.cos, made.sin = cos.data_ptr(), sin.data_ptr()
        made.turned, made.frequencies = cos.shape[-1], cos.shape[-1] // 2
        if both is not None and both.frequencies is not None:
            index = frequencies_of(both.frequencies, cos.device)  # which is kept
            made.frequency, made.turned = index.data_ptr(), 2 * len(index)
        made.table_batch, made.table_row = cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)
    made.heads, made.group, made.key_heads = heads, num_heads // heads, key_heads
    made.threads, made.scaling = torch.get_num_threads(), scaling
    made.fit(batch, length)
    made.query_batch, made.query_head = query.stride()[:2]
    made.output_batch, made.output_head = output.stride()[:2]
    return made


def _is_shared(heads: Heads) -> bool:
    """Whether several heads are one."""
    return heads.expanded if isinstance(heads, History) else heads.stride(1) == 0


def _source(heads: Heads) -> _Source:
    """Where heads [batch, heads, positions, columns] lie."""
    columns = heads.shape[-1]
    if isinstance(heads, Tensor):
        return _Source(heads.data_ptr(), None, columns, 0, *heads.stride()[:3], row_count=heads.shape[2])
    table, newest, layout, first = heads.table, heads.newest, heads.layout, heads.first_head
    if known := heads.sources.get(key := (first, heads.expanded, heads.first_column, columns)):
        return known
    source = _Source(columns=columns, pages=table.data_ptr(), page_batch=table.stride(0), page_count=table.shape[1])
    start_column = 0
    if layout is not None:  # whose columns are read from the first of four bytes on
        source.skipped = heads.first_column % (32 // layout.bits)
        source.columns, start_column = columns + source.skipped, heads.first_column - source.skipped
    if newest is not None:
        source.row_count = newest.shape[2]
        source.rows = newest[:, first:, :, start_column:].data_ptr()
        source.batch, source.head, source.row = newest.stride()[:3]
    start, source.page_head, source.page_row = heads.strides
    if layout is not None:
        source.bits, source.width, source.lanes = layout.bits, layout.width, layout.lanes
        source.page_head = layout.code_bytes // layout.heads
        source.scale_head, source.groups = layout.head_scales, layout.groups if layout.per_token else 0
        source.scales = start + layout.code_bytes + first * layout.head_scales * SCALE_DTYPE.itemsize
        source.scales += start_column * SCALE_DTYPE.itemsize
        source.offsets = source.scales + layout.heads * layout.head_scales * SCALE_DTYPE.itemsize
        start += start_column * layout.lanes * layout.bits // 8
    source.page_start = start + first * source.page_head
    if heads.tails is not None:
        tails, (start, source.tail_head, source.tail_row) = heads.tails
        source.tails, source.tail_batch, source.tail_count = tails.data_ptr(), tails.stride(0), tails.shape[1]
        source.tail_start = start + first * source.tail_head + start_column * heads.dtype.itemsize
    if heads.expanded:
        source.head = source.page_head = source.scale_head = source.tail_head = 0
    if layout is not None:
        heads.sources[key] = source
    return source


def _fit(query: Tensor, key: Heads, values: Sequence[Heads], mask: Tensor | None) -> bool:
    """Whether the kernel takes these shapes; others go to PyTorch, which reports errors."""
    batch, heads, length, head_dim = key.shape
    own = [(batch, value.shape[1], length, values[0].shape[-1]) for value in values]
    tensors = [isinstance(heads, Tensor) for heads in (key, *values)]
    return (
        length > 0
        and all(tensors) == any(tensors)
        and query.shape[0] == batch
        and query.shape[-1] == head_dim
        and query.shape[1] % heads == 0
        and sum(value.shape[1] for value in values) == heads
        and [tuple(value.shape) for value in values] == own
        and (mask is None or tuple(mask.shape) in ((1, 1, 1, length), (batch, 1, 1, length)))
    )


def additive(mask: Tensor) -> Tensor:
    """Return a mask as the kernel takes it, contiguous, in float32; what is not to be seen is -inf."""
    if (made := made_of(mask)) is not None:
        return made
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
    return mask.float().contiguous()


@functools.cache
def compiled_kernels() -> dict[torch.dtype, Callable[[Any], bool]] | None:
    """Return the functions of attention.cpp by dtype, each of which returns whether what is to be read lies there; None
    where nothing can be compiled."""
    library = compile_cpp(kernel_source(__file__), "-w", "-ffp-contract=fast")
    if library is None:
        return None
    kernels = {}
    for dtype in DTYPES:
        kernel = kernels[dtype] = getattr(library, f"attend_{str(dtype).removeprefix('torch.')}")
        kernel.argtypes, kernel.restype = [ctypes.c_void_p], ctypes.c_bool
    return kernels
