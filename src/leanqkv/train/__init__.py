"""One training run: precision, optimizer and schedule, checkpoints, the run's record."""

from .precision import Precision, choose_precision, parse_precision
from .spec import RunSpec
from .training import train

__all__ = ["Precision", "RunSpec", "choose_precision", "parse_precision", "train"]
