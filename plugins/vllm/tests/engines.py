"""vLLM engines in this process on tiny checkpoints, and what leanqkv's own `generate` says."""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

from leanqkv import LeanForCausalLM

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 64 * 2**20,
}


@contextmanager
def engine(path: Path, **options: Any) -> Iterator[LLM]:
    """An engine, and its memory again afterwards."""
    llm = LLM(str(path), **{**OPTIONS, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def core_of(llm: LLM) -> Any:
    """The engine's core, where scheduler and model runner are."""
    return llm.llm_engine.engine_core.engine_core


def generate(llm: LLM, prompts: Sequence[list[int]], new: int, **sampling: Any) -> list[list[int]]:
    """The engine's greedy tokens."""
    parameters = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **sampling)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def run(llm: LLM, prompts: Sequence[list[int]], number: int, new: int) -> dict[str, Any]:
    """Greedy tokens of all requests at once, and what the scheduler did.

    That is: how many requests were preempted, how many prompt tokens came from the cache, and how many requests decoded
    at once. Rounds of one engine have a `number` each.
    """
    parameters = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    for place, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"{number}-{place}", TokensPrompt(prompt_token_ids=prompt), parameters)
    scheduler = core_of(llm).scheduler
    tokens, preempted, cached, most = {}, set(), 0, 0
    started = time.perf_counter()
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                cached += output.num_cached_tokens or 0
        waiting = [*scheduler.running, *scheduler.waiting]
        preempted |= {request.request_id for request in waiting if request.num_preemptions}
        decoding = sum(request.num_computed_tokens >= request.num_prompt_tokens for request in scheduler.running)
        most = max(most, decoding)
    return {
        "tokens": [tokens[f"{number}-{place}"] for place in range(len(prompts))],
        "preempted": len(preempted),
        "cached": cached,
        "most_at_once": most,
        "seconds": time.perf_counter() - started,
    }


@torch.no_grad()
def expected(model: LeanForCausalLM, prompts: Sequence[list[int]], new: int) -> list[list[int]]:
    """The greedy tokens of `generate`, one prompt at a time."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        result = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=None)
        found.append(result[0, len(prompt) :].tolist())
    return found


def prompts_of_uneven_length(vocabulary: int, count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Half of them begin alike, with more than a page."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda size: torch.randint(1, vocabulary, (size,), generator=generator).tolist()  # noqa: E731
    head = draw(longest // 2)
    lengths = torch.randint(1, longest // 2, (count,), generator=generator).tolist()
    return [(head if number % 2 else []) + draw(length) for number, length in enumerate(lengths)]
