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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import compile_cpp
from ..model.latent import frequencies_of
from ..model.latent_heads import LatentAndKeys, attend_to_inputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Parts of a head shorter than this take less time than handing them to another thread.
CHUNK_TOKENS = 128


class _Call(ctypes.Structure):
    """The same, in the same order, as `Call` in attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "mask", "plain", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("frequency", "output")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "group", "length", "head_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("threads", "chunks")),
        *((name, ctypes.c_int64) for name in ("key_heads", "plain_heads", "plain_dim", "turned", "frequencies")),
        *((name, ctypes.c_int64) for name in ("query_batch", "query_head", "key_batch", "key_head", "key_row")),
        *((name, ctypes.c_int64) for name in ("value_batch", "value_head", "value_row")),
        *((name, ctypes.c_int64) for name in ("plain_batch", "plain_head", "plain_row", "table_batch", "table_row")),
        *((name, ctypes.c_int64) for name in ("mask_batch", "output_batch", "output_head")),
        ("scaling", ctypes.c_float),
    ]


def attend_one_query(
    attention: nn.Module,
    query: Tensor,
    key: Tensor,
    values: Sequence[Tensor] | LatentAndKeys,
    mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `model.attention.attend`, in whose place it is put: by the kernel where that applies."""
    if isinstance(values, LatentAndKeys):
        output = one_query_attention_to_both(query, key, values, mask, scaling)
    else:
        output = one_query_attention(query, key, values, mask, scaling)
    if output is not None:
        return output, None
    return attend_to_inputs(attention, query, key, values, mask, scaling, **kwargs)


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
    lie in one tensor and borrowed ones in another.
    """
    kernel = _kernel(query, (query, key, *values))
    if kernel is None or not _fit(query, key, values, attention_mask):
        return None
    mask = None if attention_mask is None else _additive(attention_mask)
    num_heads, group, start = query.shape[1], query.shape[1] // key.shape[1], 0
    output = query.new_empty(len(query), 1, num_heads, values[0].shape[-1])
    for value in values:
        stop, first = start + value.shape[1], start * group
        part = query[:, first : stop * group], key[:, start:stop], value, output[:, 0, first:]
        kernel(_call(*part, mask, scaling))
        start = stop
    return output


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
    mask = None if attention_mask is None else _additive(attention_mask)
    kernel(_call(query, key, values[0], output[:, 0], mask, scaling, both))
    return output


def _kernel(query: Tensor, tensors: Sequence[Tensor]) -> Callable[[_Call], None] | None:
    """Return the kernel for these tensors; None where there is none."""
    if query.shape[2] != 1 or query.device.type != "cpu" or query.dtype not in DTYPES or torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    if any(tensor.stride(-1) != 1 or tensor.dtype != query.dtype for tensor in tensors):
        return None
    kernels = compiled_kernels()
    return None if kernels is None else lambda call: kernels[query.dtype](ctypes.byref(call))


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    mask: Tensor | None,
    scaling: float,
    both: LatentAndKeys | None = None,
) -> _Call:
    """The kernel's arguments, which name the memory of these tensors.

    mask: [batch or 1, 1, 1, key positions], added to the scores; output: [batch, heads, width].
    """
    batch, num_heads, _, head_dim = query.shape
    heads, length, threads = value.shape[1], key.shape[2], torch.get_num_threads()
    key_heads = 1
    if value.stride(1) == 0:  # one head of values for all keys
        key_heads = 1 if key.stride(1) == 0 else heads
        heads = 1
    # Where the keys behind a latent and the tables that turn them back lie, their sizes and strides.
    plain: list[int | None] = [None, None, None, None]
    sizes, strides = [0, 0, 0, 0], [0, 0, 0, 0, 0]
    if both is not None:
        plain[0], sizes[:2], strides[:3] = both.keys.data_ptr(), both.keys.shape[1::2], both.keys.stride()[:3]
    if both is not None and both.back is not None:
        cos, sin = both.back
        plain[1:3], sizes[2:] = [cos.data_ptr(), sin.data_ptr()], (cos.shape[-1], cos.shape[-1] // 2)
        if both.frequencies is not None:
            index = frequencies_of(both.frequencies, cos.device)  # which is kept
            plain[3], sizes[2] = index.data_ptr(), 2 * len(index)
        strides[3:] = cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)
    return _Call(
        *(query.data_ptr(), key.data_ptr(), value.data_ptr()),
        *(None if mask is None else mask.data_ptr(), *plain, output.data_ptr()),
        *(batch, heads, num_heads // heads, length, head_dim, value.shape[-1]),
        *(threads, length_chunks(batch * heads, length, threads)),
        *(key_heads, *sizes),
        *(*query.stride()[:2], *key.stride()[:3], *value.stride()[:3], *strides),
        *(0 if mask is None or len(mask) == 1 else mask.stride(0), *output.stride()[:2]),
        scaling,
    )


def _fit(query: Tensor, key: Tensor, values: Sequence[Tensor], mask: Tensor | None) -> bool:
    """Whether the kernel takes these shapes. It checks no bounds; others go to PyTorch, which reports errors."""
    batch, heads, length, head_dim = key.shape
    own = [(batch, value.shape[1], length, values[0].shape[-1]) for value in values]
    return (
        length > 0
        and query.shape[0] == batch
        and query.shape[-1] == head_dim
        and query.shape[1] % heads == 0
        and sum(value.shape[1] for value in values) == heads
        and [tuple(value.shape) for value in values] == own
        and (mask is None or tuple(mask.shape) in ((1, 1, 1, length), (batch, 1, 1, length)))
    )


def _additive(mask: Tensor) -> Tensor:
    """[batch or 1, 1, 1, key positions] in float32; what is not to be seen is -inf."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
    return mask.float().contiguous()


@functools.cache
def compiled_kernels() -> dict[torch.dtype, Callable[[Any], None]] | None:
    """Return the functions of attention.cpp by dtype, or None where nothing can be compiled."""
    library = compile_cpp(Path(__file__).with_suffix(".cpp").read_text(), "-w", "-ffp-contract=fast")
    if library is None:
        return None
    kernels = {}
    for dtype in DTYPES:
        kernel = getattr(library, f"attend_{str(dtype).removeprefix('torch.')}")
        kernel.argtypes, kernel.restype = [ctypes.c_void_p], None
        kernels[dtype] = kernel
    return kernels
