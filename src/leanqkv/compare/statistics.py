"""Comparing losses seed by seed: runs of one seed see the same batches, so their difference has far less noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95

Curve = Mapping[int, float]  # step -> value


@dataclass(frozen=True)
class Band:
    """A value at one step: its mean over seeds, and the ends of a range around it."""

    step: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """Loss minus the baseline's, per seed, and what the seeds together say about its mean.

    `half_width`, of the 95% interval, comes from Student's t over the seeds; with one seed it is None.
    """

    by_seed: Mapping[int, float]
    mean: float
    half_width: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The two-sided 95% interval of the mean."""
        return None if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def at(self, step: float) -> Band:
        """Return the mean and its interval; where that is unknown, `low` and `high` are the mean."""
        return Band(step, self.mean, *(self.interval or 2 * (self.mean,)))


def standard_deviation(values: Sequence[float]) -> float | None:
    """Return the sample's standard deviation (n - 1); None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def half_width(values: Sequence[float]) -> float | None:
    """Return half of the 95% interval of the values' mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    if len(set(values)) == 1:  # values that agree to the last digit leave no error
        return 0.0
    return float(stats.t.interval(CONFIDENCE, len(values) - 1, scale=stats.sem(values))[1])


def paired_difference(losses: Mapping[int, float], baseline: Mapping[int, float]) -> PairedDifference | None:
    """Return losses minus the baseline's, by seed, over the seeds that both have; None where there is no such seed."""
    by_seed = {seed: losses[seed] - baseline[seed] for seed in sorted(losses.keys() & baseline.keys())}
    return over_seeds(by_seed) if by_seed else None


def over_seeds(by_seed: Mapping[int, float]) -> PairedDifference:
    """Return what differences of one seed or more say about their mean."""
    differences = list(by_seed.values())
    return PairedDifference(by_seed, float(np.mean(differences)), half_width(differences))


def average(curves: Mapping[int, Curve]) -> list[Band]:
    """Return the mean, the lowest and the highest seed at every step that all curves have."""
    steps = sorted(set.intersection(*map(set, curves.values()))) if curves else []
    values = {step: [curve[step] for curve in curves.values()] for step in steps}
    return [Band(step, float(np.mean(at)), min(at), max(at)) for step, at in values.items()]


def difference_curve(curves: Mapping[int, Curve], baseline: Mapping[int, Curve]) -> list[Band]:
    """Return the paired difference to the baseline and its 95% interval, at every step that all pairs of curves have.

    With one pair the interval is unknown, and `low` and `high` are the mean.
    """
    seeds = sorted(curves.keys() & baseline.keys())
    evaluated = [curves[seed].keys() & baseline[seed].keys() for seed in seeds]
    steps = sorted(set.intersection(*evaluated)) if evaluated else []
    return [over_seeds({seed: curves[seed][step] - baseline[seed][step] for seed in seeds}).at(step) for step in steps]
