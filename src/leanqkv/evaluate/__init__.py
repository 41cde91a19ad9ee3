"""What a model is worth: loss on held-out text, loss and accuracy on held-out images."""

from .images import image_outcomes
from .loss import sequence_losses

__all__ = ["image_outcomes", "sequence_losses"]
