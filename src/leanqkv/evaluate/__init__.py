"""Evaluation: loss on text, of one model or of two compared; on images; accuracy on images and downstream tasks."""

from .loss import masked_figures, masked_losses, sequence_losses
from .paired import PairedScores, paired_figures, paired_record, paired_records, paired_scores, spread_windows
from .states import cached_states, last_states, obstacle
from .strided import by_position, loss_figures, strided_losses, strided_scores, strided_windows

__all__ = [
    "PairedScores",
    "by_position",
    "cached_states",
    "last_states",
    "loss_figures",
    "masked_figures",
    "masked_losses",
    "obstacle",
    "paired_figures",
    "paired_record",
    "paired_records",
    "paired_scores",
    "sequence_losses",
    "spread_windows",
    "strided_losses",
    "strided_scores",
    "strided_windows",
]
