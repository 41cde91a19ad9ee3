"""One training run: micro-batch, precision, optimizer and schedule, checkpoints, the run's record."""

from ..environment import free_memory
from .micro_batch import Step, choose_micro_batch
from .precision import Precision, choose_precision, parse_precision
from .spec import RunSpec
from .training import train

__all__ = [
    "Precision",
    "RunSpec",
    "Step",
    "choose_micro_batch",
    "choose_precision",
    "free_memory",
    "parse_precision",
    "train",
]
