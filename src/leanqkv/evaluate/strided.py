"""Loss over the tokens of a text, in windows."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..data.objectives import EVALUATION, NextToken
from ..data.token_files import Tokens
from ..errors import LeanError
from .loss import batch_losses, window_prefix
from .states import States, own_states

NEXT_TOKEN = NextToken()
# Each window's first token, and the number of its last targets that are scored.
Windows = Sequence[tuple[int, int]]
# Positions of the first part of `by_position`.
FIRST_POSITIONS = 512


def strided_windows(tokens: int, context_length: int, stride: int) -> list[tuple[int, int]]:
    """Return each window's first token, and the number of its last targets that it scores.

    Every window is `context_length` tokens, each of which has the next one as its target (a shorter text is one
    window). The first window scores all its targets, each later one the next `stride`, the last one the rest. So every
    token except the first is scored exactly once, with at least `context_length - stride + 1` tokens before it unless
    it is among the first `context_length`.

    Raises:
        LeanError: a stride beyond the window, which would leave tokens out, or below 1.
    """
    if not 1 <= stride <= context_length:
        raise LeanError(
            f"a stride of {stride} does not fit windows of {context_length} tokens; give one from 1 to {context_length}"
        )
    targets = tokens - 1
    length = min(context_length, targets)
    ends = pairwise([*range(length, targets, stride), targets])
    return [(0, length), *((end - length, end - before) for before, end in ends)]


def window_losses(
    model: nn.Module,
    tokens: Tokens,
    windows: Windows,
    length: int,
    *,
    objective: NextToken = NEXT_TOKEN,
    batch_size: int = 8,
    states: States | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy in nats of every token to predict, float64 [targets], with dropout off, and the position
    in its window that predicts it, int64 of the same shape.

    Left out are tokens that only begin a text, and every window begins as the tokenizer begins one: see `collate`. The
    context of a window is the prefix of a model with prefixes.

    Args:
        tokens: [tokens], integers; at least two.
        windows, length: as `strided_windows` returns them, or `spread_windows`, and the targets in a window.
        objective: which tokens are predicted; each window has masks of its own, always the same ones.
        batch_size: windows at a time.
        states: what makes the last hidden states; None: the model, without a cache.
        progress: called with the number of tokens scored so far and of all.

    Raises:
        LeanError: a loss that is not finite, with the first such token.
    """
    losses: list[Tensor] = []
    positions: list[Tensor] = []
    done, total = 0, sum(count for _, count in windows)
    # The first window alone, since it scores more than the others.
    for at in 0, *range(1, len(windows), batch_size):
        batch = windows[at : at + batch_size if at else 1]
        scored, starts = max(count for _, count in batch), [start for start, _ in batch]
        made = objective.batch(tokens, starts, length, [(0, EVALUATION, at + row) for row in range(len(batch))])
        made |= window_prefix(model, length, [count for _, count in batch])
        rows = batch_losses(model, [made], autocast, scored, states or own_states(model))
        for row, predicted, (start, count) in zip(*rows, batch, strict=True):
            losses.append(row[-count:][predicted[-count:]])
            positions.append(torch.arange(length)[-count:][predicted[-count:]])
            if not (finite := row[-count:].isfinite()).all():
                token = start + length - count + int((~finite).int().argmax()) + 2
                raise LeanError(
                    f"the loss is not finite at token {token:,} of {len(tokens):,}: the model's logits are NaN or "
                    "infinite there"
                )
            done += count
        progress(done, total)
    return torch.cat(losses), torch.cat(positions)


def by_position(positions: Tensor, measure: Callable[[Tensor], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return figures of the tokens at positions 0 to 512 of their windows, 512 to 1,024, 1,024 to 2,048, and so on.

    Args:
        positions: [tokens].
        measure: returns the figures of the tokens where a mask [tokens] is true.

    Returns:
        `from`, `to`, the number of `tokens`, and what was measured, of each part; nothing where all are in the first.
    """
    parts, start, stop, longest = [], 0, FIRST_POSITIONS, int(positions.max()) + 1
    while start < longest > FIRST_POSITIONS:
        here = (positions >= start) & (positions < stop)
        if count := int(here.sum()):
            parts.append({"from": start, "to": min(stop, longest), "tokens": count, **measure(here)})
        start, stop = stop, 2 * stop
    return parts


def loss_figures(losses: Tensor, text_bytes: float | None) -> dict[str, float | int | None]:
    """Return the figures of a text's losses.

    `loss`: mean in nats per token. `perplexity`: its exponential. `bits_per_byte`: the sum in bits over the bytes of
    the text in UTF-8, comparable between tokenizers; None if the number of bytes is unknown. `tokens`: the number of
    scored tokens.
    """
    mean = losses.mean().item()
    return {
        "loss": mean,
        "perplexity": math.exp(min(mean, 700)),
        "bits_per_byte": None if text_bytes is None else losses.sum().item() / math.log(2) / text_bytes,
        "tokens": len(losses),
    }
