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
    """Greedy tokens of all requests at once, and what the scheduler did: see `Round`."""
    return run_in_turns([llm], prompts, number, new)[0]


def run_in_turns(llms: Sequence[LLM], prompts: Sequence[list[int]], number: int, new: int) -> list[dict[str, Any]]:
    """The same requests to several engines, which take a step in turn; what `Round.result` says of each."""
    rounds = [Round(llm, prompts, number, new) for llm in llms]
    while sum(one.step() for one in rounds):
        pass
    return [one.result() for one in rounds]


class Round:
    """Requests that an engine answers step by step. Rounds of one engine have a `number` each."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], number: int, new: int):
        self.engine, self.scheduler = llm.llm_engine, core_of(llm).scheduler
        self.names = [f"{number}-{place}" for place in range(len(prompts))]
        self.tokens: dict[str, list[int]] = {}
        self.preempted: set[str] = set()
        self.cached = self.most = self.steps = 0
        self.seconds = 0.0
        parameters = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for name, prompt in zip(self.names, prompts, strict=True):
            self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), parameters)

    def step(self) -> bool:
        """Take a step; return whether there was one to take."""
        if not self.engine.has_unfinished_requests():
            return False
        started = time.perf_counter()
        outputs = self.engine.step()
        self.seconds += time.perf_counter() - started
        self.steps += 1
        for output in outputs:
            if output.finished:
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)
                self.cached += output.num_cached_tokens or 0
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.preempted |= {request.request_id for request in [*running, *waiting] if request.num_preemptions}
        decoding = sum(request.num_computed_tokens >= request.num_prompt_tokens for request in running)
        self.most = max(self.most, decoding)
        return True

    def result(self) -> dict[str, Any]:
        """Tokens; requests preempted; prompt tokens from the cache; most requests decoding at once; steps and time."""
        return {
            "tokens": [self.tokens[name] for name in self.names],
            "preempted": len(self.preempted),
            "cached": self.cached,
            "most_at_once": self.most,
            "steps": self.steps,
            "seconds": self.seconds,
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
