"""Evaluation: loss on held-out text, loss and accuracy on held-out images, accuracy on downstream tasks."""

from .loss import image_outcomes, sequence_losses
from .strided import loss_figures, strided_losses, strided_windows

__all__ = ["image_outcomes", "loss_figures", "sequence_losses", "strided_losses", "strided_windows"]
