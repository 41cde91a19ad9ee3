"""Prefill, decoding and memory of several models, measured in turns in one process (P3 section 6.3, Fig. 6 and 7)."""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..cache_bits import PLAIN, CacheBits
from ..checkpoints.gguf_format import is_gguf
from ..checkpoints.open import load_model, open_checkpoint
from ..environment import made_on
from ..errors import LeanError
from ..files import RECORD_FORMAT, is_directory
from ..memory import PeakMemory, check_cache
from ..model.cache import cache_bytes
from ..model.causal_lm import LeanForCausalLM
from ..model.shapes import count_parameters
from ..presets import preset
from . import Decoder
from .decoder import last_position, position_limit

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Called before every measurement with the model's name, how many are done and how many there are.
Progress = Callable[[str, int, int], None]


def bench_record(
    names: Sequence[str],
    contexts: Sequence[int],
    batches: Sequence[int],
    *,
    precisions: Sequence[CacheBits] = (PLAIN,),
    new_tokens: int,
    rounds: int,
    dtype: str,
    device: str,
    progress: Progress,
) -> dict[str, Any]:
    """Return the record of a benchmark: models, measurements, hardware and versions.

    Args:
        names: directories, or configurations by name, whose weights are random.
        precisions: of the cache; every model is measured in each.
        dtype: of DTYPES.

    Raises:
        LeanError: a name of neither, or a model that cannot decode so many tokens, or a cache beyond the memory.
    """
    models: dict[str, Any] = {name: build_model(name, contexts, new_tokens) for name in names}
    for model in models.values():
        model.to(device, DTYPES[dtype]).eval()
        for bits in precisions:
            check_cache(model, max(batches), max(contexts) + new_tokens, "`context`, `batch` or `new_tokens`", bits)
    sizes: dict[str, Any] = {"new_tokens": new_tokens, "rounds": rounds}
    rows = measure(models, contexts, batches, precisions=precisions, **sizes, progress=progress)
    return {
        "record": RECORD_FORMAT,
        "models": {
            name: {
                "parameters": count_parameters(model.config).total,
                "kv_bytes_per_token": model.config.plan.kv_bytes_per_token(DTYPES[dtype]),
                "quantized_bytes_per_token": {
                    str(bits): bits.bytes_per_token(model.config.plan, DTYPES[dtype])
                    for bits in precisions
                    if bits.quantized
                },
                "weights": model.get_memory_footprint(),
                "config": model.config.as_overrides(),
            }
            for name, model in models.items()
        },
        "dtype": dtype,
        **sizes,
        "threads": torch.get_num_threads(),
        "rows": rows,
        **made_on(torch.device(device).type),
    }


def build_model(name: str, contexts: Sequence[int], new_tokens: int) -> LeanForCausalLM:
    """Return the model in a directory or a GGUF file, or of a configuration's name with random weights.

    Raises:
        LeanError: neither, or a model that cannot decode `new_tokens` tokens behind each of the `contexts`.
    """
    checkpoint = open_checkpoint(Path(name)) if is_gguf(name) or is_directory(Path(name)) else None
    config = preset(name) if checkpoint is None else checkpoint.config
    if config.task != "causal_lm":
        raise LeanError(f"{name} is a model for {config.task}, which has no cache and decodes nothing")
    for context in contexts:
        limit = last_position(config, context)
        if limit is not None and context + new_tokens > limit:
            found = f"`context={context}` and `new_tokens={new_tokens}`"
            raise LeanError(f"{name} cannot decode {found}: more than {position_limit(config, limit)}")
    return LeanForCausalLM(config) if checkpoint is None else load_model(checkpoint, torch.float32)


def measure(
    models: Mapping[str, LeanForCausalLM],
    contexts: Sequence[int],
    batches: Sequence[int],
    *,
    precisions: Sequence[CacheBits] = (PLAIN,),
    new_tokens: int = 32,
    rounds: int = 3,
    progress: Progress = lambda name, done, total: None,
) -> list[dict[str, Any]]:
    """Measure every model with every precision of its cache, at every context and batch.

    They take turns in every round, so that whatever slows the machine down slows all of them.

    Args:
        precisions: of the cache.
        new_tokens: decoded after the context in every round.

    Returns:
        For each batch, context, model and `cache_bits`, in bytes: `cache` after the prompt, measured on its storages,
        and `cache_formula` by the plan; `weights`, parameters and buffers; `activations`, the peak of a prefill beside
        these two. `prefill` is milliseconds per 100 tokens of a sequence, `decode` new tokens per second over the
        batch; of both the median, the range and every round.

    Raises:
        ValueError: a context with its new tokens is longer than a model's positions.
    """
    decoders: dict[tuple[str, CacheBits], Decoder] = {}
    for name, model in models.items():
        shared = Decoder(model)  # with the packed weights, of which there may be room for one copy
        for bits in precisions:
            decoder = decoders[name, bits] = copy(shared)
            decoder.cache_bits = bits
    vocabulary = min(model.config.vocab_size for model in models.values())
    cells = list(product(batches, contexts))
    rows = []
    for number, (batch, context) in enumerate(cells):
        prompt = torch.randint(vocabulary, (batch, context), generator=torch.Generator().manual_seed(context))
        times: dict[Any, list[tuple[float, float]]] = {entry: [] for entry in decoders}
        memory: dict[Any, tuple[int, int]] = {}
        for entry, decoder in decoders.items():
            progress(entry[0], number * len(decoders) + len(memory), len(cells) * len(decoders))
            memory[entry] = _memory(decoder, prompt)
            _time(decoder, prompt, 2)  # compiles what depends on the sizes before anything is timed
        for _, (entry, decoder) in product(range(rounds), decoders.items()):
            times[entry].append(_time(decoder, prompt, new_tokens))
        for (name, bits), decoder in decoders.items():
            (cache, activations), model = memory[name, bits], models[name]
            prefill, decode = zip(*times[name, bits], strict=True)
            dtype = next(model.parameters()).dtype
            rows.append(
                {
                    "model": name,
                    "cache_bits": str(bits),
                    "context": context,
                    "batch": batch,
                    "cache": cache,
                    "cache_formula": batch * bits.kv_bytes(model.config.plan, context, dtype),
                    "weights": model.get_memory_footprint(),
                    "activations": activations,
                    "prefill": _spread([1e5 * seconds / context for seconds in prefill]),
                    "decode": _spread([batch * new_tokens / seconds for seconds in decode]),
                }
            )
            decoder.cache = None
    return rows


def _spread(values: list[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "rounds": values}


def _memory(decoder: Decoder, prompt: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of the cache after the prompt, and the most that was held beside it and the weights."""
    device = next(decoder.model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        decoder.prefill(prompt.to(device), room=0)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with PeakMemory() as counted:
            decoder.prefill(prompt.to(device), room=0)
        peak = counted.peak
    assert decoder.cache is not None
    cache = cache_bytes(decoder.cache)
    return cache, peak - cache


def _time(decoder: Decoder, prompt: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Return the seconds of the prefill and of all decoding steps."""
    device = next(decoder.model.parameters()).device
    tokens = prompt.to(device)
    started = _now(device)
    logits = decoder.prefill(tokens, room=new_tokens)
    filled = _now(device)
    for _ in range(new_tokens):
        logits = decoder.step(logits.argmax(-1))
    return filled - started, _now(device) - filled


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
