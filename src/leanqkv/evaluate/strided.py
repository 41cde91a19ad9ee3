"""Loss over every token of a text, in overlapping windows."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import collate
from ..data.token_files import Tokens
from ..errors import LeanError
from .loss import batch_losses, window_prefix
from .states import States, own_states

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
    length = done = min(context_length, targets)
    windows = [(0, length)]
    while done < targets:
        scored = min(stride, targets - done)
        done += scored
        windows.append((done - length, scored))
    return windows


def strided_losses(model: nn.Module, tokens: Tokens, **how: Any) -> Tensor:
    """Return the losses of `strided_scores` alone."""
    return strided_scores(model, tokens, **how)[0]


def strided_scores(
    model: nn.Module,
    tokens: Tokens,
    *,
    context_length: int,
    stride: int,
    batch_size: int = 8,
    states: States | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy in nats of every token but the first, float64 [len(tokens) - 1], with dropout off, and
    the position in its window that predicts it, int64 of the same shape.

    Left out are tokens that only begin a text, and every window begins as the tokenizer begins one: see `collate`. The
    context of a window is the prefix of a model with prefixes.

    Args:
        tokens: [tokens], integers; at least two.
        context_length, stride: see `strided_windows`.
        batch_size: windows at a time.
        states: what makes the last hidden states; None: the model, without a cache.
        progress: called with the number of tokens scored so far and of all.

    Raises:
        LeanError: a stride that does not fit; a loss that is not finite, with the first such token.
    """
    windows = strided_windows(len(tokens), context_length, stride)
    length = min(context_length, len(tokens) - 1)
    losses: list[Tensor] = []
    positions: list[Tensor] = []
    done = 0
    # The first window alone, since it scores more than the others.
    for batch in windows[:1], *(windows[i : i + batch_size] for i in range(1, len(windows), batch_size)):
        scored, starts = max(count for _, count in batch), [start for start, _ in batch]
        made = {**collate(tokens, starts, length), **window_prefix(model, length, [count for _, count in batch])}
        rows = batch_losses(model, [made], autocast, scored, states or own_states(model))
        for row, predicted, (_, count) in zip(*rows, batch, strict=True):
            losses.append(row[-count:][predicted[-count:]])
            positions.append(torch.arange(length)[-count:][predicted[-count:]])
            if not (finite := row[-count:].isfinite()).all():
                token = done + int((~finite).int().argmax()) + 2
                raise LeanError(
                    f"the loss is not finite at token {token:,} of {len(tokens):,}: the model's logits are NaN or "
                    "infinite there"
                )
            done += count
        progress(done, len(tokens) - 1)
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
