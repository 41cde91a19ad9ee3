"""Many answers at once: rows of a batch that come and go, each with the tokens that it has alone.

Prompts are read a chunk at a time, and between two chunks every other row goes on. Rows of like lengths are decoded
together; a row that ends leaves its batch, and a new one joins.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from .cache import join_rows, keep_rows, let_grow
from .decoder import PIECE_TOKENS, PREFILL_TOKENS, Decoder

MAX_ROWS = 64
SCORES = 2**24  # logits that are looked at together: tokens times vocabulary


class Score(NamedTuple):
    """The logarithm of a token's probability, and the likeliest tokens in its place; a text's first token has none."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Row:
    """One answer that is generated.

    Attributes:
        prompt: token ids, [length].
        max_new_tokens: 0 only reads the prompt.
        warpers: of the logits, in float32.
        generator: samples from the logits; None: the likeliest token is taken.
        needs_tokens: the warpers are given the tokens before, prompt included; else None.
        ends: tokens that end the answer.
        top: for how many tokens of every position `scores` are kept, before the warpers; None: no scores.
        reads_scores: the prompt has scores too.
        cancelled: set to have the row dropped.
    """

    prompt: Tensor
    max_new_tokens: int
    warpers: LogitsProcessorList | None = None
    generator: torch.Generator | None = None
    needs_tokens: bool = False
    ends: Sequence[int] = ()
    top: int | None = None
    reads_scores: bool = False
    scores: list[Score] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # generated so far
    ended: bool = False  # by itself
    cancelled: bool = False

    @property
    def length(self) -> int:
        """How many of its tokens a cache holds: all but the last new one."""
        return len(self.prompt) + max(len(self.tokens) - 1, 0)

    @property
    def done(self) -> bool:
        return self.cancelled or self.ended or len(self.tokens) >= self.max_new_tokens

    def choose(self, logits: Tensor) -> int:
        """Return the next token, by its logits [1, vocab_size]."""
        before = None
        if self.needs_tokens:
            before = torch.cat((self.prompt, torch.tensor(self.tokens, dtype=torch.long)))[None].to(logits.device)
        scores = self.warpers(before, logits) if self.warpers else logits  # type: ignore[arg-type]
        if self.generator is None:
            return int(scores.argmax(-1))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))

    def score(self, tokens: list[int], logits: Tensor) -> None:
        """Keep the scores of tokens that were next, by the logits of their positions [tokens, vocab_size]."""
        assert self.top is not None
        logprobs = logits.float().log_softmax(-1)
        ids = torch.tensor(tokens, dtype=torch.long, device=logits.device)
        chosen = logprobs.gather(-1, ids[:, None])[:, 0].tolist()
        values, top = logprobs.topk(min(self.top, logits.shape[-1]))
        for token, logprob, *likeliest in zip(tokens, chosen, top.tolist(), values.tolist(), strict=True):
            self.scores.append(Score(token, logprob, list(zip(*likeliest, strict=True))))

    def score_prompt(self, start: int, logits: Tensor) -> None:
        """Keep the scores of the prompt's tokens behind `start`, by logits [1, positions, vocab_size]."""
        after = self.prompt[start + 1 : start + 1 + logits.shape[1]].tolist()
        self.score(after, logits[0, : len(after)])


# What happened to a row: a new token; None, its end; or an error, which ends it too.
Event = tuple[Row, int | Exception | None]


class Batch:
    """Rows that are decoded together, padded on the left."""

    def __init__(self, decoder: Decoder, rows: list[Row]):
        self.rows = rows
        self._decoder = copy(decoder)  # with a cache of its own
        # Small pieces, between which the other rows go on.
        chunk = decoder.chunk or (PREFILL_TOKENS if decoder.makes_heads else PIECE_TOKENS)
        # Rows of a quantized cache are read in chunks that do not depend on the others.
        if decoder.config.mask_type != "prefix" and not decoder.cache_bits.quantized:
            chunk = min(chunk, max(1, PREFILL_TOKENS // len(rows)))
        if rows[0].reads_scores:  # such a row is read alone
            chunk = min(chunk, max(1, SCORES // decoder.config.vocab_size))
        self._decoder.chunk = chunk
        self._device = decoder.model.device
        self._chunks: Iterator[Tensor | None] | None = self._read_prompts()

    @property
    def reading(self) -> bool:
        """Whether the prompts are not read yet."""
        return self._chunks is not None

    def advance(self) -> list[Event]:
        """Read a chunk of the prompts, or generate one token for every row; rows that end are dropped."""
        if all(row.cancelled for row in self.rows):
            self.rows = []
            return []
        if self._chunks is not None:
            logits = next(self._chunks)
            if logits is None:
                return []
            self._chunks, self._decoder.given = None, {}  # a prefix matters to its own tokens only
            let_grow(self._decoder.cache)  # type: ignore[arg-type]
        else:
            logits = self._decoder.step(torch.tensor([row.tokens[-1] for row in self.rows], device=self._device))
        events = self._choose(logits)
        kept = [number for number, row in enumerate(self.rows) if not row.done]
        events += [(row, None) for row in self.rows if row.done]
        if len(kept) < len(self.rows):
            self._keep(kept)
        return events

    def join(self, other: "Batch") -> None:
        """Take over the rows of `other`, which must not be used after that."""
        join_rows(self._decoder.cache, other._decoder.cache)  # type: ignore[arg-type]
        self.rows += other.rows
        self._decoder.mask = self._mask()

    def _read_prompts(self) -> Iterator[Tensor | None]:
        longest = max(row.length for row in self.rows)
        ids = torch.zeros(len(self.rows), longest, dtype=torch.long)
        for line, row in zip(ids, self.rows, strict=True):
            line[longest - row.length :] = row.prompt
        observe = None
        if (row := self.rows[0]).reads_scores:
            row.scores.append(Score(int(row.prompt[0]), None, []))
            observe = row.score_prompt
        return self._decoder.prefill_chunks(ids.to(self._device), self._mask(), room=0, observe=observe)

    def _choose(self, logits: Tensor) -> list[Event]:
        """Return the next token of every row that has one, after adding it to the row."""
        events: list[Event] = []
        for row, own in zip(self.rows, logits.float().split(1), strict=True):
            if not row.max_new_tokens:
                continue
            try:
                if not own.amax().isfinite():  # the likeliest of such logits is none, silently
                    raise RuntimeError("the model's logits are NaN or infinite; its weights are too large")
                token = row.choose(own)
            except RuntimeError as error:  # or scores that are not finite, at a temperature next to 0
                row.cancelled = True
                events.append((row, error))
                continue
            row.tokens.append(token)
            row.ended = token in row.ends
            if row.top is not None:
                row.score([token], own)
            events.append((row, token))
        return events

    def _keep(self, numbers: list[int]) -> None:
        self.rows = [self.rows[number] for number in numbers]
        if self.rows:
            longest = max(row.length for row in self.rows)
            keep_rows(self._decoder.cache, torch.tensor(numbers, device=self._device), longest)  # type: ignore[arg-type]
            self._decoder.mask = self._mask()

    def _mask(self) -> Tensor | None:
        lengths = torch.tensor([row.length for row in self.rows], device=self._device)
        longest = int(lengths.max())
        if int(lengths.min()) == longest:
            return None
        return (torch.arange(longest, device=self._device) >= longest - lengths[:, None]).long()


class Scheduler:
    """Takes rows in the order in which they come, and generates for all that there is room for."""

    def __init__(self, decoder: Decoder, max_tokens: int):
        """max_tokens: of all prompts and answers that are worked on at once; a single one may have more."""
        self.waiting: deque[Row] = deque()
        self._decoder, self._max_tokens = decoder, max_tokens
        self._batches: list[Batch] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._batches)

    @torch.inference_mode()
    def advance(self) -> list[Event]:
        """Generate one token for every row whose prompt is read, and read a chunk of one batch of prompts."""
        events = self._admit()
        reading = [batch for batch in self._batches if batch.reading][:1]
        for batch in [*reading, *(batch for batch in self._batches if not batch.reading)]:
            try:
                events += batch.advance()
            except Exception as error:  # such as missing memory: the other batches go on
                events += [(row, error) for row in batch.rows]
                batch.rows = []
        # Prompts take turns, too.
        self._batches = [*(b for b in self._batches if b not in reading), *reading]
        return events + self._merge()

    def drop(self) -> None:
        """Forget all rows."""
        self.waiting.clear()
        self._batches = []

    def _admit(self) -> list[Event]:
        events: list[Event] = []
        rows = [row for batch in self._batches for row in batch.rows]
        used = sum(len(row.prompt) + row.max_new_tokens for row in rows)
        new: list[Row] = []
        while self.waiting and len(rows) + len(new) < MAX_ROWS:
            row = self.waiting[0]
            used += len(row.prompt) + row.max_new_tokens
            if used > self._max_tokens and (rows or new) and not row.cancelled:
                break
            self.waiting.popleft()
            if row.cancelled:
                used -= len(row.prompt) + row.max_new_tokens
            else:
                new.append(row)
        while new:
            group = [new.pop(0)]
            while new and self._alike([*group, new[0]]) and not any(row.reads_scores for row in (group[0], new[0])):
                group.append(new.pop(0))
            try:
                self._batches.append(Batch(self._decoder, group))
            except Exception as error:
                events += [(row, error) for row in group]
        return events

    def _merge(self) -> list[Event]:
        kept: list[Batch] = []
        events: list[Event] = []
        for batch in self._batches:
            if not batch.rows:
                continue
            joinable = [] if batch.reading else [b for b in kept if not b.reading]
            into = next((b for b in joinable if self._alike([*b.rows, *batch.rows])), None)
            if into is None:
                kept.append(batch)
                continue
            rows = [*into.rows, *batch.rows]
            try:
                into.join(batch)
            except Exception as error:  # two copies of a cache are in memory
                events += [(row, error) for row in rows]
                kept.remove(into)
        self._batches = kept
        return events

    def _alike(self, rows: Sequence[Row]) -> bool:
        """Whether rows may be one batch: at most half of its cache is padding, or it is small; the same positions."""
        lengths = [row.length for row in rows]
        limit = self._decoder.config.cached_positions or 0
        if min(lengths) <= limit < max(lengths):  # "longrope" turns the keys of long prompts by other frequencies
            return False
        if self._decoder.cache_bits.quantized:  # whose rows are not padded
            return True
        return len(rows) * max(lengths) <= max(2 * sum(lengths), PREFILL_TOKENS)
