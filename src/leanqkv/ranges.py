"""The numbers that settings can have: one table for the options of the command line and for dataclasses of settings."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from .errors import LeanError


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`, both included.

    Attributes:
        whole: whole numbers alone.
        or_zero: 0 is allowed too, below `low`.
        words: the numbers in words, for `must be ...`; by default the bounds.
    """

    low: float
    high: float = math.inf
    whole: bool = False
    or_zero: bool = False
    words: str = ""

    def __str__(self) -> str:
        if self.words:
            return self.words
        kind = "a whole number" if self.whole else "a number"
        low, high = (f"{int(x):,}" if float(x).is_integer() else f"{x:g}" for x in (self.low, min(self.high, 1e300)))
        bounds = f"of at least {low}" if self.high == math.inf else f"from {low} to {high}"
        return f"{kind} {'that is 0 or ' if self.or_zero else ''}{bounds}"

    def __contains__(self, value: Any) -> bool:
        numeric = isinstance(value, Integral if self.whole else Real) and not isinstance(value, bool)
        if not numeric or not (isinstance(value, Integral) or math.isfinite(value)):  # whole ones may exceed a float
            return False
        return self.low <= value <= self.high or (self.or_zero and value == 0)

    def check(self, what: str, value: Any) -> None:
        """Refuse `value` unless it is one of these numbers; `what` names it.

        Raises:
            LeanError: it is not.
        """
        if value in self:
            return
        found = f"{value:,}" if isinstance(value, Integral) and not isinstance(value, bool) else repr(value)
        raise LeanError(f"{what} must be {self}, found {found}")


LARGEST = 2**31 - 1
COUNT = Range(1, LARGEST, whole=True)
# A batch is held as a list, and its divisors are tried.
BATCH = Range(1, 2**20, whole=True)
# A comparison takes the seed after its last one too; NumPy takes 32 bits.
SEED = Range(0, 2**32 - 2, whole=True)
POSITIVE = Range(math.ulp(0.0), words="a positive number")
SHARE = Range(0, 1)
# Logits that are divided by less overflow float32; by more, all tokens are equally likely.
TEMPERATURE = Range(1e-4, 1e4, or_zero=True)

RANGES: dict[str, Range] = {
    **dict.fromkeys(
        ("steps", "grid_steps", "schedule_steps", "evaluate_every", "evaluation_sequences", "log_every"), COUNT
    ),
    **dict.fromkeys(
        ("max_documents", "documents", "tokens", "evaluate_tokens", "calibration_tokens", "limit", "sweeps"), COUNT
    ),
    **dict.fromkeys(("context_length", "at_context", "stride", "max_new_tokens", "new_tokens", "top_k"), COUNT),
    **dict.fromkeys(("warmup_steps", "probe_steps"), Range(0, LARGEST, whole=True)),
    **dict.fromkeys(("batch_size", "micro_batch_size", "probe_batch_size"), BATCH),
    "seed": SEED,
    **dict.fromkeys(("learning_rate", "min_learning_rate", "max_grad_norm", "distillation_temperature"), POSITIVE),
    **dict.fromkeys(("flops", "memory"), Range(1e-3, 1e24, words="a number from 0.001 to 1e24")),
    **dict.fromkeys(("weight_decay", "tolerance", "ridge"), Range(0)),
    **dict.fromkeys(("ratio", "distillation"), SHARE),
    **dict.fromkeys(("beta1", "beta2"), Range(0, math.nextafter(1, 0), words="a number from 0 up to, but not, 1")),
    **dict.fromkeys(("sequence_length", "samples"), Range(2, LARGEST, whole=True)),
    "devices": COUNT,
    "utilization": Range(1e-4, 1),
    **dict.fromkeys(("seeds", "calibrations", "jobs", "workers"), Range(1, 1000, whole=True)),
    "gpus_per_run": Range(0, 1024, whole=True),
    "cpus_per_run": Range(1, 10_000, whole=True),
    **dict.fromkeys(("max_hours", "hours_per_run", "memory_per_run"), POSITIVE),
    "rounds": Range(1, 1_000_000, whole=True),
    "max_condition": Range(1),
    "temperature": TEMPERATURE,
    "port": Range(0, 65535, whole=True),
}


def check_options(values: dict[str, Any]) -> None:
    """Check every number among the values of a command line's options, by the names of their parameters.

    Raises:
        LeanError: one outside of its range.
    """
    for name, value in values.items():
        if name in RANGES and value is not None:
            RANGES[name].check(f"`{name}`", value)


def check_fields(settings: Any) -> None:
    """Check every number of a dataclass of settings, by the names of its fields.

    Raises:
        LeanError: one outside of its range.
    """
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name in RANGES and not isinstance(value, tuple) and not (value is None and "None" in str(field.type)):
            RANGES[field.name].check(field.name, value)


def check_each(what: str, values: Iterable[Any], allowed: Range) -> None:
    """Check every one of several numbers.

    Raises:
        LeanError: one outside of the range.
    """
    for value in values:
        allowed.check(what, value)
