"""Loss on held-out sequences."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..data import IGNORED, Tokens, collate


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


def sequence_losses(
    model: nn.Module,
    tokens: Tokens,
    starts: Sequence[int] | np.ndarray,
    context_length: int,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> torch.Tensor:
    """Return the mean cross-entropy in nats of each sequence, float64 [len(starts)], with dropout off.

    Every sequence is `context_length` targets, less those that only begin a text.
    """
    losses, predicted = token_losses(model, tokens, starts, context_length, batch_size, autocast)
    return losses.sum(1) / predicted.sum(1)


def token_losses(
    model: nn.Module,
    tokens: Tokens,
    starts: Sequence[int] | np.ndarray,
    context_length: int,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy in nats of each target, with dropout off, and whether it is one that is predicted.

    Both are [len(starts), context_length], float64 and bool. The loss of a target that is not predicted is 0.
    """
    losses, predicted = [], []
    with scoring(model) as device:
        for first in range(0, len(starts), batch_size):
            batch = collate(tokens, starts[first : first + batch_size], context_length)
            targets = batch["shift_labels"].to(device)
            with autocast():
                logits = uncompiled(model)(input_ids=batch["input_ids"].to(device), use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
            losses.append(loss.view_as(targets).cpu().double())
            predicted.append(batch["shift_labels"] != IGNORED)
    return torch.cat(losses), torch.cat(predicted)
