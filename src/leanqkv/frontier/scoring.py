"""Losses of a candidate against the source: on texts, on the source's own continuation, in tasks, and in speed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..cache_bits import PLAIN, CacheBits
from ..data.evaluation import EvaluationText
from ..evaluate.harness import TaskScores, check_cache, task_scores, tasks_hash
from ..evaluate.loss import scoring
from ..evaluate.paired import paired_records
from ..evaluate.states import cached_states
from ..evaluate.strided import Windows
from ..inference import Decoder
from ..inference.cache import allocate_cache
from ..model.config import LeanConfig

# Tokens of the prompt, and of the continuation on which the likeliest tokens are compared; fewer with few positions.
PROMPT, CONTINUATION = 64, 256
# Windows that are scored at a time, and the tokens that fewer of them have together.
BATCH, BATCH_TOKENS = 8, 4096
# Tokens that are generated with and without a cache, which have to be the same.
CHECKED = 16


@dataclass(frozen=True)
class Questions:
    """Tasks of which all candidates answer the same questions.

    Attributes:
        tasks: of `load_tasks`; limit: questions of each; None: all.
        precisions: of the cache, through which they are asked.

    Raises:
        LeanError: a task that one of the precisions cannot be used for.
    """

    tokenizer: Any
    tasks: Mapping[str, Mapping[str, Any]]
    limit: int | None
    precisions: Sequence[CacheBits]

    def __post_init__(self) -> None:
        for precision in self.precisions:
            check_cache(self.tasks, precision)

    def record(self) -> dict[str, Any]:
        """Return which questions they are."""
        return {"tasks": [*self.tasks["tasks"]], "sha256": tasks_hash(self.tasks), "limit": self.limit}

    def ask(self, model: Any, precision: CacheBits) -> TaskScores:
        """Return what a model answers."""
        return task_scores(model, self.tokenizer, self.tasks, limit=self.limit, cache_bits=precision)


class Scorer:
    """The source, and the texts on which candidates are compared with it. Its hidden states are computed once.

    Args:
        texts: each with the windows to score; length: of a window.
    """

    def __init__(self, source: Any, texts: Sequence[tuple[EvaluationText, Windows]], length: int):
        self.source, self.texts, self.length = source, texts, length
        positions = source.config.cached_positions or PROMPT + CONTINUATION
        self.prompt = min(PROMPT, positions // 4)
        self.continuation = min(CONTINUATION, positions - self.prompt)
        self._states: dict[bytes, Tensor] = {}

    def compare(
        self, model: Any, precisions: Sequence[CacheBits], progress: Callable[[int, int], None]
    ) -> list[list[dict[str, Any]]]:
        """Return the comparison with the source for every precision, on every text (see `paired_record`)."""
        ways = [self._states_of(model, precision) for precision in precisions]
        by_text = [
            paired_records(
                self.source,
                model,
                text,
                windows,
                min(self.length, len(text.tokens) - 1),
                states=(self._source_states, ways),
                batch_size=max(1, min(BATCH, BATCH_TOKENS // self.length)),
                progress=progress,
            )
            for text, windows in self.texts
        ]
        return [list(scores) for scores in zip(*by_text, strict=True)]

    def _states_of(self, model: Any, precision: CacheBits) -> Callable[[Any, Tensor], Tensor]:
        # Of a source whose cache is its own nothing is lost, and nothing need be computed.
        alike = model is self.source and not precision.quantized
        return self._source_states if alike else cached_states(precision)

    def _source_states(self, model: Any, ids: Tensor) -> Tensor:
        key = ids.cpu().numpy().tobytes()
        if key not in self._states:
            self._states[key] = cached_states(PLAIN)(model, ids)
        return self._states[key]

    def agreement(self, model: Any, precision: CacheBits) -> float:
        """Return the share of the source's greedy continuation that is the candidate's likeliest token too."""
        ids = self._greedy
        with scoring(model):
            logits = model.logits(cached_states(precision)(model, ids[:, :-1])[0, self.prompt - 1 :])
        return float((logits.argmax(-1) == ids[0, self.prompt :]).double().mean())

    @cached_property
    def _greedy(self) -> Tensor:
        return self._generate(self.source, self.continuation, min_new_tokens=self.continuation)

    def same_without_cache(self, model: Any) -> bool:
        """Whether greedy tokens are the same with a cache and without."""
        count = min(CHECKED, self.continuation)
        cached, whole = (self._generate(model, count, use_cache=cached) for cached in (True, False))
        return torch.equal(cached, whole)

    def _generate(self, model: Any, count: int, **options: Any) -> Tensor:
        """The start of the first text and so many greedy tokens, [1, length]."""
        prompt = torch.from_numpy(self.texts[0][0].tokens[: self.prompt].astype("int64"))[None].to(model.device)
        model.generation_config = GenerationConfig(pad_token_id=0)  # without what the checkpoint asks for
        return model.generate(prompt, max_new_tokens=count, do_sample=False, **options)


@torch.no_grad()
def decode_speeds(
    ways: Sequence[tuple[Any, CacheBits]], context: int, *, new_tokens: int = 8, rounds: int = 5
) -> list[list[float]]:
    """Return the tokens per second that each model decodes after `context` tokens, by round, in which they take turns.

    What these tokens were makes no difference, so random numbers stand in the cache and no prompt is read.
    """
    decoders = []
    for model, precision in ways:
        decoder = Decoder(model, cache_bits=precision)
        decoder.cache = allocate_cache(model.config, context + (rounds + 1) * new_tokens, precision)
        _fill(decoder.cache, model.config, context, next(model.parameters()))
        decoders.append(decoder)
    turns = [[new_tokens / _seconds(decoder, new_tokens) for decoder in decoders] for _ in range(rounds + 1)]
    return [list(speeds) for speeds in zip(*turns[1:], strict=True)]  # the first round compiles what is compiled


def _seconds(decoder: Decoder, steps: int) -> float:
    """Return the seconds that so many steps of one sequence take."""
    token = torch.zeros(1, dtype=torch.long, device=decoder.model.device)
    started = time.perf_counter()
    for _ in range(steps):
        token = decoder.step(token).argmax(-1)
    if token.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def _fill(cache: Any, config: LeanConfig, tokens: int, like: Tensor) -> None:
    """Put random tokens of one sequence into an empty cache."""
    for layer in (one for one in config.plan.layers if one.cached):
        sizes = [(1, tensor.num_heads, tokens, tensor.head_dim) for tensor in layer.cached]
        first, *others = (torch.randn(size, dtype=like.dtype, device=like.device) for size in sizes)
        cache.update(first, others[0] if others else first[:, :0], layer.layer)
