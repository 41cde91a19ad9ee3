"""Prefill, decoding and memory of several models, measured in turns in one process (P3 section 6.3, Fig. 6 and 7)."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from typing import Any

import torch

from ..model.cache import cache_bytes
from ..model.causal_lm import LeanForCausalLM
from . import Decoder
from .memory import PeakMemory, weight_bytes

# A model, a context and a batch are being measured: name, done, all.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Row:
    """One model at one context and batch.

    Attributes:
        context: tokens of the prompt of every sequence.
        cache: bytes that the cache holds for the context, by its storages; `cache_formula` what the plan says.
        weights: bytes of the parameters and buffers.
        activations: the most bytes that a prefill holds at one time beside weights and cache.
        prefill: milliseconds per 100 tokens of a sequence, every round.
        decode: new tokens per second over the batch, every round.
    """

    model: str
    context: int
    batch: int
    cache: int
    cache_formula: int
    weights: int
    activations: int
    prefill: tuple[float, ...]
    decode: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for what in ("prefill", "decode"):
            values = found[what]
            found[what] = {"median": median(values), "min": min(values), "max": max(values), "rounds": list(values)}
        return found


def measure(
    models: Mapping[str, LeanForCausalLM],
    contexts: Sequence[int],
    batches: Sequence[int],
    *,
    new_tokens: int = 32,
    rounds: int = 3,
    progress: Progress = lambda name, done, total: None,
) -> list[Row]:
    """Measures every model at every context and batch; models take turns in every round, so that what slows the
    machine down slows all of them.

    Args:
        new_tokens: decoded after the context in every round.

    Raises:
        ValueError: a context with its new tokens is longer than a model's positions.
    """
    decoders = {name: Decoder(model) for name, model in models.items()}
    weights = {name: weight_bytes(model) for name, model in models.items()}
    vocabulary = min(model.config.vocab_size for model in models.values())
    cells = list(product(batches, contexts))
    found = []
    for number, (batch, context) in enumerate(cells):
        generator = torch.Generator().manual_seed(context)
        prompt = torch.randint(vocabulary, (batch, context), generator=generator)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
        memory: dict[str, tuple[int, int]] = {}
        for name, decoder in decoders.items():
            progress(name, number * len(models) + len(memory), len(cells) * len(models))
            memory[name] = _memory(decoder, prompt)
            _time(decoder, prompt, 2)  # what is compiled for these sizes is, before anything is timed
        for _, (name, decoder) in product(range(rounds), decoders.items()):
            times[name].append(_time(decoder, prompt, new_tokens))
        for name, model in models.items():
            held, activations = memory[name]
            prefill, decode = zip(*times[name], strict=True)
            formula = batch * model.config.plan.kv_bytes(context, next(model.parameters()).dtype)
            found.append(
                Row(
                    *(name, context, batch, held, formula, weights[name], activations),
                    prefill=tuple(1e5 * seconds / context for seconds in prefill),
                    decode=tuple(batch * new_tokens / seconds for seconds in decode),
                )
            )
        for decoder in decoders.values():
            decoder.cache = None
    return found


def _memory(decoder: Decoder, prompt: torch.Tensor) -> tuple[int, int]:
    """Bytes of the cache after the prompt, and the most that was held beside it and the weights."""
    device = next(decoder.model.parameters()).device
    with ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        else:
            counted = stack.enter_context(PeakMemory())
        decoder.prefill(prompt.to(device), room=0)
    assert decoder.cache is not None
    held = cache_bytes(decoder.cache)
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else counted.peak
    return held, peak - held


def _time(decoder: Decoder, prompt: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Seconds of the prefill and of all decoding steps."""
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
        getattr(torch, device.type).synchronize()
    return time.perf_counter()
