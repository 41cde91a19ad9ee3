"""One training run: precision, optimizer and schedule, checkpoints, the run's record."""

from .precision import Precision, choose_precision, parse_precision
from .run import train
from .spec import RunSpec

__all__ = ["Precision", "RunSpec", "choose_precision", "parse_precision", "train"]
