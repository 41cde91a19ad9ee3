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
from ..model.attention import attend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Parts of a head shorter than this take less time than handing them to another thread.
CHUNK_TOKENS = 128


class _Call(ctypes.Structure):
    """The same, in the same order, as `Call` in attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "mask", "output")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "group", "length", "head_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("threads", "chunks")),
        *((name, ctypes.c_int64) for name in ("query_batch", "query_head", "key_batch", "key_head", "key_row")),
        *((name, ctypes.c_int64) for name in ("value_batch", "value_head", "value_row")),
        *((name, ctypes.c_int64) for name in ("mask_batch", "output_batch", "output_head")),
        ("scaling", ctypes.c_float),
    ]


def attend_one_query(
    attention: nn.Module,
    query: Tensor,
    key: Tensor,
    values: Sequence[Tensor],
    mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `model.attention.attend`, in whose place it is put: by the kernel where that applies."""
    output = one_query_attention(query, key, values, mask, scaling)
    if output is not None:
        return output, None
    return attend(attention, query, key, values, mask, scaling, **kwargs)


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
    tensors = (query, key, *values)
    if query.shape[2] != 1 or query.device.type != "cpu" or query.dtype not in DTYPES or torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    if any(tensor.stride(-1) != 1 or tensor.dtype != query.dtype for tensor in tensors):
        return None
    if not _fit(query, key, values, attention_mask):
        return None
    if attention_mask is not None:
        attention_mask = _additive(attention_mask)
    kernels = compiled_kernels()
    if kernels is None:
        return None
    batch, num_heads, _, head_dim = query.shape
    length, threads = key.shape[2], torch.get_num_threads()
    value_dim, group, size = values[0].shape[-1], num_heads // key.shape[1], query.element_size()
    output = query.new_empty(batch, 1, num_heads, value_dim)
    mask, mask_batch = None, 0
    if attention_mask is not None:
        mask, mask_batch = attention_mask.data_ptr(), attention_mask.stride(0) if len(attention_mask) > 1 else 0
    query_batch, query_head = query.stride()[:2]
    key_strides, start = key.stride()[:3], 0
    for value in values:
        call = _Call(
            query.data_ptr() + start * group * query_head * size,
            key.data_ptr() + start * key_strides[1] * size,
            value.data_ptr(),
            mask,
            output.data_ptr() + start * group * value_dim * size,
            *(batch, value.shape[1], group, length, head_dim, value_dim),
            *(threads, length_chunks(batch * value.shape[1], length, threads)),
            *(query_batch, query_head, *key_strides, *value.stride()[:3]),
            *(mask_batch, num_heads * value_dim, value_dim),
            scaling,
        )
        kernels[query.dtype](ctypes.byref(call))
        start += value.shape[1]
    return output


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
