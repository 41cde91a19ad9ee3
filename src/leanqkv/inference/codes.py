"""Codes of whole blocks of tokens, made by a kernel on a CPU: codes.cpp, compiled as attention.cpp is."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ..compat import compile_cpp
from ..model.cache_quantized import BLOCK, PageLayout
from .repeat import NUMBER, POINTER, fields
from .step import kernel_source


class _Quantize(ctypes.Structure):
    """The same, in the same order, as `Quantize` in codes.cpp."""

    _fields_ = [
        *fields(POINTER, "states pages"),
        *fields(NUMBER, "batch heads blocks columns state_batch state_head state_token page_bytes"),
        *fields(NUMBER, "code_bytes bits lanes depth per_token groups width head_scales threads"),
    ]


def quantize(layout: PageLayout, states: Tensor) -> Tensor:
    """As `PageLayout.quantize`, bit by bit; it also makes what the kernel is not made for."""
    known = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}.get(states.dtype)
    library = _library() if known and states.device.type == "cpu" and states.stride(-1) == 1 else None
    if library is None or not states.numel():
        return layout.quantize(states)
    batch, heads, tokens, columns = states.shape
    pages = torch.empty(batch, tokens // BLOCK, layout.page_bytes, dtype=torch.uint8)
    given = _Quantize(
        *(states.data_ptr(), pages.data_ptr(), batch, heads, tokens // BLOCK, columns, *states.stride()[:3]),
        *(layout.page_bytes, layout.code_bytes, layout.bits, layout.lanes, layout.depth),
        *(layout.per_token, layout.groups, layout.width, layout.head_scales, torch.get_num_threads()),
    )
    getattr(library, f"quantize_{known}")(ctypes.byref(given))
    return pages


@functools.cache
def _library() -> Any | None:
    return compile_cpp(kernel_source(__file__), "-w", "-ftree-loop-vectorize", "-fno-math-errno")
