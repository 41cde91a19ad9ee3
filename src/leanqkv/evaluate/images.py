"""Loss and accuracy on held-out images."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import nn

from ..data import image_batch, scaled_pixels
from .loss import scoring


def image_outcomes(
    model: nn.Module,
    images: np.ndarray,
    classes: np.ndarray,
    indices: Sequence[int] | np.ndarray,
    size: int,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, with dropout off, each image's cross-entropy in nats, float64, and whether its class scored highest."""
    losses, hits = [], []
    with scoring(model) as device:
        for first in range(0, len(indices), batch_size):
            batch = image_batch(images, classes, indices[first : first + batch_size])
            pixels, labels = scaled_pixels(batch["pixel_values"].to(device), size), batch["labels"].to(device)
            with autocast():
                # `forward`, not `__call__`: a compiled model would be compiled once more for evaluation.
                logits = model.forward(pixels).logits
            losses.append(nn.functional.cross_entropy(logits.float(), labels, reduction="none").cpu().double())
            hits.append((logits.argmax(-1) == labels).cpu())
    return torch.cat(losses), torch.cat(hits)
