"""Triton compiles its attention over pages for a GPU that need not be there; test_triton.py starts it."""

import sys

import triton
import triton.language as tl
import vllm.triton_utils

vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl

from leanqkv_vllm.attention_triton import _attend, launch
from leanqkv_vllm.pages_triton import Source
from triton.backends.compiler import GPUTarget

from leanqkv.model.cache_quantized import page_layout

SOURCE = Source(*("*i64" if name in ("pages", "tails") else "i32" for name in Source._fields))
POINTERS = dict.fromkeys(("mask", "output", "highest", "totals"), "*fp32")
POINTERS |= dict.fromkeys(("lengths", "firsts", "paged"), "*i64")
SHARED = {"cuda": 99 * 1024, "hip": 64 * 1024}  # bytes that every GPU has from Ampere and from MI200 on


def compiled(target: GPUTarget, dtype: str, columns: int, width: int, **options: object) -> None:
    sizes = [max(16, triton.next_power_of_2(number)) for number in (columns, width)]
    constants = {"key_width": sizes[0], "value_width": sizes[1], "page": 64, "same": False, **options}
    given = launch(max(sizes), 4 if dtype == "fp32" else 2)
    constants["count"] = given.pop("count")
    kinds = dict.fromkeys(_attend.arg_names, "i32") | POINTERS | {"query": f"*{dtype}", "scaling": "fp32"}
    kinds |= {"keys": SOURCE, "values": SOURCE} | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(_attend, kinds, constexprs=constants)
    made = triton.compile(source, target=target, options=given)
    assert made.metadata.shared <= SHARED[target.backend], (dtype, columns, made.metadata.shared)


if __name__ == "__main__":
    backend, name = sys.argv[1:]
    target = GPUTarget(backend, int(name), 32) if backend == "cuda" else GPUTarget(backend, name, 64)
    heads = {"of_keys": page_layout("keys", 4, 2, 8, 128), "of_values": page_layout("values", 4, 2, 8, 128)}
    compiled(target, "bf16", 128, 128, **heads)
    compiled(target, "fp16", 576, 512, **dict.fromkeys(heads, page_layout("latent", 8, 8, 1, 576)))
    compiled(target, "fp32", 256, 256, **dict.fromkeys(heads, None), mask=None)
    print("RIGHT")
