"""Loss on held-out sequences."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..data.batches import IGNORED
from ..data.objectives import MaskedTokens, inputs, prefix_mask, targets
from .states import States

# Logits that are in memory at a time, in numbers: 128 MB in float32.
LOGITS_AT_A_TIME = 2**25


def window_prefix(model: Any, length: int, scored: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the `prefix_mask` of windows of `length` targets, for a model with prefixes; nothing for another one.

    What comes before the last `scored` targets of a window is its prefix, so that each target is predicted from all
    tokens before it and from none behind it. A prefix of one token changes nothing.
    """
    attends = getattr(getattr(model, "config", None), "mask_type", None) == "prefix"
    if not attends or all(count == length for count in scored):
        return {}
    return {"prefix_mask": prefix_mask([length - count + 1 for count in scored], length)}


@contextmanager
def scoring(model: nn.Module) -> Iterator[torch.device]:
    """Turn dropout and gradients off while the body runs; yields the model's device."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(training)


def uncompiled(model: nn.Module) -> Callable[..., Any]:
    """Return the call of a model that does not compile it once more for evaluation."""
    return model if isinstance(model, FSDPModule) else model.forward  # sharded weights are gathered in hooks of a call


def batch_losses(
    model: Any,
    batches: Iterable[dict[str, torch.Tensor]],
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    scored: int = 0,
    states: States | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy in nats of each target of batches of an objective, and whether it is one that is
    predicted, both [sequences, length], float64 and bool. The loss of a target that is not predicted is 0.

    Args:
        scored: so many last targets of every sequence; 0: all.
        states: what makes the last hidden states, of which the logits are made a piece at a time; None: the model makes
            its logits itself, all at once.
    """
    losses, predicted = [], []
    with scoring(model) as device:
        for batch in batches:
            wanted = targets(batch)[:, -scored:]
            causal = {"use_cache": False, "logits_to_keep": scored} if "shift_labels" in batch else {}
            with autocast():
                if states is None:
                    logits = uncompiled(model)(**inputs(batch, device), **causal).logits
                    loss = _cross_entropy(logits.flatten(0, 1), wanted.flatten().to(device)).view(wanted.shape)
                else:
                    given, there = wanted.to(device), (wanted != IGNORED).to(device)
                    hidden = states(model, **inputs(batch, device))[:, -scored:]
                    found, _ = target_scores(model, hidden[there], given[there])
                    loss = found.new_zeros(wanted.shape).masked_scatter(there, found)
            losses.append(loss.cpu().double())
            predicted.append(wanted != IGNORED)
    return torch.cat(losses), torch.cat(predicted)


def target_scores(model: Any, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy in nats of each target, and 1 where it is the likeliest token or else 0, [2, tokens].

    Of the logits a piece at a time is in memory.

    Args:
        hidden: last hidden states [tokens, hidden_size]; wanted: the targets [tokens].
    """
    rows = max(1, LOGITS_AT_A_TIME // model.config.vocab_size)
    scores = [torch.zeros(2, 0, device=hidden.device)]
    for states, tokens in zip(hidden.split(rows), wanted.split(rows), strict=True):
        logits = model.logits(states)
        loss = _cross_entropy(logits, tokens)
        scores.append(torch.stack((loss, (logits.argmax(-1) == tokens).to(loss))))
    return torch.cat(scores, dim=1)


def _cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(precise, wanted, reduction="none")


def masked_figures(losses: torch.Tensor) -> dict[str, float | int | None]:
    """Return the figures of masked tokens' losses: `loss`, the mean in nats, and their number, `masked_tokens`.

    No perplexity, for a token is predicted from what follows it too: the losses are not of a distribution over texts.
    """
    return {"loss": losses.mean().item(), MaskedTokens.counted: len(losses)}
