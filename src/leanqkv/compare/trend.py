"""How a difference to the baseline changes with the tokens trained on: a straight line in their logarithm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .statistics import Curve, PairedDifference, over_seeds

# Of a run: where its difference is looked at.
FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 1.0)
# How far beyond the end of training the line is drawn.
FURTHER = 10


@dataclass(frozen=True)
class Trend:
    """The differences of several seeds at fractions of their training, and a line through each seed's.

    Attributes:
        differences: at each of FRACTIONS.
        per_doubling: what twice the tokens add.
        further: the line at FURTHER times the tokens of the whole training.
    """

    differences: Sequence[PairedDifference]
    per_doubling: PairedDifference
    further: PairedDifference


def trend(curves: Mapping[int, Curve], baseline: Mapping[int, Curve]) -> Trend | None:
    """Return the trend of curves less the baseline's, by seed; None where a fraction was not evaluated.

    None, too, for runs of different lengths: a step is not the same fraction of each.

    Each seed has a line of its own, so that intervals are those of independent runs: points of one run are not.
    """
    seeds = sorted(curves.keys() & baseline.keys())
    runs = [of[seed] for seed in seeds for of in (curves, baseline)]
    lengths = {max(run, default=0) for run in runs}
    steps = [fraction * length for length in lengths for fraction in FRACTIONS]
    if len(lengths) != 1 or any(step not in run for run in runs for step in steps):
        return None
    gaps = np.array([[curves[seed][int(step)] - baseline[seed][int(step)] for step in steps] for seed in seeds])
    return Trend([over_seeds(dict(zip(seeds, at, strict=True))) for at in gaps.T.tolist()], *line(steps, gaps.T, seeds))


def line(
    scales: Sequence[float], gaps: np.ndarray | Sequence[Sequence[float]], seeds: Sequence[int]
) -> tuple[PairedDifference, PairedDifference]:
    """Return what twice the scale adds to a gap, and the gap at FURTHER times the last scale.

    By the least-squares line of each seed over the logarithm of the scale.

    Args:
        gaps: [scales, seeds].
    """
    slopes, ends = np.polyfit(np.log2(np.divide(scales, scales[-1])), gaps, 1)
    further = ends + slopes * np.log2(FURTHER)
    first, second = (over_seeds(dict(zip(seeds, of.tolist(), strict=True))) for of in (slopes, further))
    return first, second
