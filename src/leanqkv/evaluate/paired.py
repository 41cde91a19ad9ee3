"""Two models on the same tokens: what the second one loses, with an interval over windows of the text."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from ..data.batches import IGNORED
from ..data.evaluation import EvaluationText
from ..data.objectives import EVALUATION, MaskedTokens, NextToken, targets
from ..data.token_files import Tokens
from ..errors import LeanError
from .loss import LOGITS_AT_A_TIME, masked_figures, scoring, window_prefix
from .states import States, last_states
from .strided import NEXT_TOKEN, Windows, by_position, loss_figures

CONFIDENCE = 0.95
# Of the logits in memory, so many are compared at a time on a CPU, whose cache then holds what is made of them on the
# way.
COMPARED_AT_A_TIME = 2**19


@dataclass(frozen=True)
class PairedScores:
    """Scores of two models on each token of a text, float64 [tokens]; `before` is the first model's.

    Attributes:
        before, after: cross-entropy in nats.
        divergence: KL(before || after) of the distributions of the token, in nats.
        agreement: 1 where both models have the same likeliest token, else 0.
        window: int64, the number of the window that the token was scored in.
        position: int64, the position in this window that predicts the token.
    """

    before: Tensor
    after: Tensor
    divergence: Tensor
    agreement: Tensor
    window: Tensor
    position: Tensor


def spread_windows(tokens: int, length: int, count: int) -> list[tuple[int, int]]:
    """Return `count` windows of `length` targets, evenly spread over a text, as `paired_scores` takes them.

    They do not overlap if the text has `count * length + 1` tokens; otherwise fewer windows are returned.
    """
    length = min(length, tokens - 1)
    count = min(count, (tokens - 1) // length)
    return [(int(start), length) for start in np.linspace(0, tokens - 1 - length, count)]


def paired_scores(
    before: nn.Module,
    after: nn.Module,
    tokens: Tokens,
    windows: Windows,
    length: int,
    *,
    objective: NextToken = NEXT_TOKEN,
    states: tuple[States, Sequence[States]] = (last_states, [last_states]),
    batch_size: int = 1,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[PairedScores]:
    """Score the tokens of the windows with both models, dropout off; the second one in each of one or more ways.

    Tokens that only begin a text are left out, and every window begins as the tokenizer begins one: see `collate`.

    A forward pass of the first model, and one of the second for each way. Beside both models, the activations of
    `batch_size` windows and a piece of a window's logits are in memory.

    Args:
        before, after: language models of one vocabulary, on one device.
        tokens: [tokens], integers.
        windows: each window's first token, and the number of its last targets that are scored, as `strided_windows`
            and `spread_windows` return them.
        length: targets in a window.
        objective: which tokens are predicted; masks are the same for both models.
        states: how the hidden states of the first model are computed, and the ways of the second.
        progress: called with the number of tokens scored so far and of all.

    Raises:
        LeanError: a score that is not finite.
    """
    parts: list[Tensor] = []
    positions: list[Tensor] = []
    models: list[Any] = [before, *[after] * len(states[1])]
    done, total = 0, sum(scored for _, scored in windows)
    with scoring(before) as device, scoring(after):
        for at in range(0, len(windows), batch_size):
            part = windows[at : at + batch_size]
            streams = [(0, EVALUATION, number) for number in range(at, at + len(part))]
            batch = objective.batch(tokens, [start for start, _ in part], length, streams)
            ids, wanted_of = batch["input_ids"].to(device), targets(batch).to(device)
            with autocast():
                hidden = []
                for model, made in zip(models, (states[0], *states[1]), strict=True):
                    context = window_prefix(model, length, [scored for _, scored in part])
                    hidden.append(made(model, ids, **{name: mask.to(device) for name, mask in context.items()}))
                for row, (start, scored) in enumerate(part):
                    wanted = wanted_of[row, -scored:]
                    predicted = wanted != IGNORED
                    pieces = _score_pieces(models, [one[row, -scored:][predicted] for one in hidden], wanted[predicted])
                    parts.append(torch.cat(list(pieces), dim=2))
                    positions.append(torch.arange(length)[-scored:][predicted.cpu()])
                    if not parts[-1].isfinite().all():
                        raise LeanError(
                            f"the scores are not finite in the window at token {start + 1:,}: the logits of the source "
                            "or of the result are NaN or infinite there"
                        )
                    done += scored
                    progress(done, total)
    numbers = torch.repeat_interleave(torch.tensor([part.shape[2] for part in parts]))
    places = torch.cat(positions)
    return [PairedScores(one[0], one[1], one[2], one[3], numbers, places) for one in torch.cat(parts, dim=2)]


def _score_pieces(models: Sequence[Any], hidden: Sequence[Tensor], targets: Tensor) -> Iterator[Tensor]:
    """Yield the scores of the first model against each other one, [others, 4, tokens], piece by piece of a window."""
    vocabulary = models[0].config.vocab_size
    rows = max(1, LOGITS_AT_A_TIME // vocabulary)
    compared = max(1, COMPARED_AT_A_TIME // vocabulary) if targets.device.type == "cpu" else rows
    for at in range(0, len(targets), rows):
        before, *others = (model.logits(states[at : at + rows]) for model, states in zip(models, hidden, strict=True))
        for start in range(0, len(before), compared):
            here = slice(start, start + compared)
            wanted = targets[at : at + rows][here, None]
            first = _log_probabilities(before[here])
            yield torch.stack([_scores(first, _log_probabilities(other[here]), wanted) for other in others])


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _scores(first: Tensor, second: Tensor, targets: Tensor) -> Tensor:
    """Losses of both, divergence and agreement, [4, tokens], from log probabilities [tokens, vocabulary]."""
    losses = [-one.gather(1, targets)[:, 0] for one in (first, second)]
    agreement = first.argmax(-1) == second.argmax(-1)
    divergence = (first.exp() * (first - second)).sum(-1)
    return torch.stack([*losses, divergence, agreement.to(first.dtype)]).double().cpu()


def paired_figures(scores: PairedScores, text_bytes: float | None, masked: bool = False) -> dict[str, Any]:
    """Return what two models make of a text, and what the second one loses.

    `before` and `after`: as `loss_figures`, or of masked tokens `masked_figures`. `loss_difference` (nats per token,
    after minus before), `divergence` (nats per token) and `agreement` (share of the tokens) each have a `mean` and
    `half_width`, of the 95% interval of the mean by Student's t over windows; None for one window. `windows`: how many.
    `by_position`: the same of parts of long windows (see `by_position`).

    Args:
        text_bytes: of the scored tokens' text in UTF-8; None if unknown.
    """
    quantities = {
        "loss_difference": scores.after - scores.before,
        "divergence": scores.divergence,
        "agreement": scores.agreement,
    }
    figures = masked_figures if masked else partial(loss_figures, text_bytes=text_bytes)

    def of_part(here: Tensor) -> dict[str, Any]:
        means = {name: mean_over_windows(values[here], scores.window[here]) for name, values in quantities.items()}
        return {"before": scores.before[here].mean().item(), "after": scores.after[here].mean().item(), **means}

    parts = [] if masked else by_position(scores.position, of_part)
    return {
        **{which: figures(getattr(scores, which)) for which in ("before", "after")},
        **{name: mean_over_windows(values, scores.window) for name, values in quantities.items()},
        "windows": int(scores.window.max()) + 1,
        **({"by_position": parts} if parts else {}),
    }


def mean_over_windows(values: Tensor, window: Tensor) -> dict[str, float | None]:
    """Return the mean over tokens, and half of its 95% interval, with windows as the independent units.

    Windows can be of different lengths: the error is that of a ratio of sums over windows.
    """
    mean = values.mean()
    numbers, own = window.unique(return_inverse=True)
    residuals = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, own, values - mean)
    if (count := len(residuals)) < 2:
        return {"mean": mean.item(), "half_width": None}
    error = math.sqrt(residuals.square().sum().item() * count / (count - 1)) / len(values)
    return {"mean": mean.item(), "half_width": float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error}


def paired_records(
    before: nn.Module, after: nn.Module, text: EvaluationText, windows: Windows, length: int, **options: Any
) -> list[dict[str, Any]]:
    """Return a record's entries on what two models make of a text: the text, the window and `paired_figures`.

    One for each way to compute the second model's states. The bytes of the scored tokens are taken to be their share of
    the text's.

    Args:
        windows, length, options: as `paired_scores` takes them.
    """

    masked = isinstance(options.get("objective"), MaskedTokens)

    def record(scores: PairedScores) -> dict[str, Any]:
        scored_bytes = None if text.bytes is None else text.bytes * len(scores.before) / text.predicted
        return {"text": text.record(), "context_length": length, **paired_figures(scores, scored_bytes, masked)}

    return [record(scores) for scores in paired_scores(before, after, text.tokens, windows, length, **options)]


def paired_record(*arguments: Any, **options: Any) -> dict[str, Any]:
    """Return the one record of `paired_records`."""
    [record] = paired_records(*arguments, **options)
    return record
