"""What a model is worth: loss on held-out text."""

from .loss import sequence_losses

__all__ = ["sequence_losses"]
