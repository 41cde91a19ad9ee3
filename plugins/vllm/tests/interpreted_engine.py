"""vLLM for CPUs with the plugin's attention for GPUs, under Triton's interpreter; test_triton.py starts it."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3] / "tests")]

import test_codes  # vLLM, which turns Triton off on a CPU
import torch
import triton
import vllm.triton_utils

vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language

from engines import engine, generate
from leanqkv_vllm import attention_triton, model

if __name__ == "__main__":
    name, place, bits = sys.argv[1], Path(sys.argv[2]), "8/4"
    saved = test_codes.saved(name, place)
    calls, attention = [], attention_triton._attention

    def counted(*given):
        calls.append(given)
        return attention(*given)

    attention_triton._attention, model.kernel_in_place = counted, lambda: attention_triton
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, saved.config.vocab_size, (size,), generator=generator).tolist() for size in (59, 140)]
    with engine(place, **test_codes.coded(bits)) as llm:
        found = generate(llm, prompts, 10)
    assert calls, "the kernel attends"
    behind = test_codes.behind(saved, prompts, found, bits)
    assert behind < test_codes.NEAR, behind
    print("RIGHT")
