"""Comparing losses seed by seed: runs of one seed see the same batches, so their difference has far less noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95

Curve = Mapping[int, float]  # step -> value


@dataclass(frozen=True)
class PairedDifference:
    """Loss minus the baseline's, per seed, and what the seeds together say about its mean.

    `half_width` and `p` come from Student's t over the seeds; with one seed they are None.
    """

    by_seed: Mapping[int, float]
    mean: float
    half_width: float | None
    p: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The two-sided 95% interval of the mean."""
        return None if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.half_width is not None and abs(self.mean) > self.half_width


@dataclass(frozen=True)
class Band:
    """A value at one step: its mean over seeds and the lowest and highest seed."""

    step: float
    mean: float
    low: float
    high: float


def standard_deviation(values: Sequence[float]) -> float | None:
    """Return the sample's standard deviation (n - 1); None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def paired_difference(losses: Mapping[int, float], baseline: Mapping[int, float]) -> PairedDifference | None:
    """Return losses minus the baseline's, by seed, over the seeds that both have; None where there is no such seed."""
    by_seed = {seed: losses[seed] - baseline[seed] for seed in sorted(losses.keys() & baseline.keys())}
    if not by_seed:
        return None
    differences = list(by_seed.values())
    mean = float(np.mean(differences))
    if len(differences) == 1:
        return PairedDifference(by_seed, mean, None, None)
    if len(set(differences)) == 1:  # seeds that agree to the last digit leave no error to divide by
        return PairedDifference(by_seed, mean, 0.0, float(mean == 0))
    _, half_width = stats.t.interval(CONFIDENCE, len(differences) - 1, scale=stats.sem(differences))
    p = stats.ttest_1samp(differences, 0.0).pvalue
    return PairedDifference(by_seed, mean, float(half_width), float(p))


def average(curves: Mapping[int, Curve]) -> list[Band]:
    """Return mean and range over seeds at every step that all curves have."""
    if not curves:
        return []
    steps = sorted(set.intersection(*(set(curve) for curve in curves.values())))
    values = {step: [curve[step] for curve in curves.values()] for step in steps}
    return [Band(step, float(np.mean(at)), min(at), max(at)) for step, at in values.items()]


def relative_improvement(curves: Mapping[int, Curve], baseline: Mapping[int, Curve]) -> list[Band]:
    """Return `(L_baseline - L) / L_baseline`, per seed at each common step, then over seeds; above zero is better."""
    relative = {}
    for seed, curve in curves.items():
        if seed in baseline:
            common = {step: (baseline[seed][step], loss) for step, loss in curve.items() if step in baseline[seed]}
            relative[seed] = {step: (reference - loss) / reference for step, (reference, loss) in common.items()}
    return average(relative)
