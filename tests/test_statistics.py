"""Paired differences and curves against numbers worked out by hand."""

import math

import pytest

from leanqkv.compare.statistics import Band, average, difference_curve, paired_difference, standard_deviation
from leanqkv.compare.trend import trend


def test_two_seeds() -> None:
    # Differences -0.02 and -0.04: standard error 0.01, t(0.975, 1) = 12.7062.
    result = paired_difference({0: 3.98, 1: 4.06}, {0: 4.0, 1: 4.1})
    assert result is not None
    assert result.by_seed == pytest.approx({0: -0.02, 1: -0.04})
    assert result.mean == pytest.approx(-0.03)
    assert result.half_width == pytest.approx(0.127062, abs=1e-6)
    assert result.interval == pytest.approx((-0.157062, 0.097062), abs=1e-6)
    assert not result.clear


def test_three_seeds_clear_of_zero() -> None:
    # Differences 0.9, 1.0, 1.1: standard error 0.1 / sqrt(3), t(0.975, 2) = 4.302653.
    result = paired_difference({0: 2.9, 1: 3.0, 2: 3.1}, {0: 2.0, 1: 2.0, 2: 2.0})
    assert result is not None
    assert result.half_width == pytest.approx(0.248414, abs=1e-6)
    assert result.clear


def test_clear_is_the_interval_without_zero() -> None:
    # Of seeds -1 and -1 +- x, zero leaves the interval where |mean| > 12.7062 |x| / 2.
    for other, clear in ((-1.16, True), (-1.18, False)):
        result = paired_difference({0: -1.0, 1: other}, {0: 0.0, 1: 0.0})
        assert result is not None and result.interval is not None
        assert result.clear is clear is (result.interval[1] < 0)


def test_pairs_are_made_by_seed() -> None:
    result = paired_difference({1: 5.0, 7: 3.0, 2: 1.0}, {2: 2.0, 1: 4.0, 9: 0.0})
    assert result is not None
    assert result.by_seed == {1: 1.0, 2: -1.0}
    assert result.mean == 0


def test_one_seed_has_no_interval() -> None:
    result = paired_difference({0: 3.0, 1: 9.0}, {0: 3.5})
    assert result is not None
    assert (result.mean, result.half_width, result.interval, result.clear) == (-0.5, None, None, False)


def test_no_common_seed() -> None:
    assert paired_difference({0: 3.0}, {1: 3.0}) is None


@pytest.mark.parametrize(("shift", "clear"), [(0.5, True), (0.0, False)])
def test_seeds_that_agree_exactly(shift: float, clear: bool) -> None:
    result = paired_difference({0: 1 + shift, 1: 2 + shift}, {0: 1.0, 1: 2.0})
    assert result is not None
    assert (result.half_width, result.clear) == (0, clear)


def test_standard_deviation_is_the_samples() -> None:
    assert standard_deviation([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert standard_deviation([1.0]) is None


def test_average_keeps_the_steps_every_seed_has() -> None:
    assert average({0: {0: 8.0, 50: 6.0, 100: 5.0}, 1: {50: 4.0, 0: 9.0}}) == [
        Band(0, 8.5, 8.0, 9.0),
        Band(50, 5, 4, 6),
    ]
    assert average({}) == []


def test_difference_curve_is_the_paired_interval_at_every_common_step() -> None:
    # Step 100: differences -1 and 0.5, mean -0.25, standard error 0.75, t(0.975, 1) = 12.7062. Seed 2 has no baseline.
    curves = {0: {0: 8.0, 100: 3.0}, 1: {0: 8.0, 100: 5.5, 200: 1.0}, 2: {100: 0.0}}
    result = difference_curve(curves, {0: {0: 8.0, 100: 4.0}, 1: {0: 8.0, 100: 5.0}})
    assert [band.step for band in result] == [0, 100]
    assert result[0] == Band(0, 0.0, 0.0, 0.0)
    reach = 12.706205 * 0.75
    assert (result[1].mean, result[1].low, result[1].high) == pytest.approx((-0.25, -0.25 - reach, -0.25 + reach))
    assert difference_curve(curves, {}) == []


def test_a_difference_curve_of_one_seed_has_no_width() -> None:
    assert difference_curve({0: {50: 3.0}}, {0: {50: 4.0}, 1: {50: 9.0}}) == [Band(50, -1.0, -1.0, -1.0)]


def test_the_trend_is_a_line_of_each_seed_by_hand() -> None:
    """Slope and prediction by the sums of least squares, intervals by Student's t of two independent seeds."""
    steps = (100, 200, 400, 800)
    gaps = {0: (-0.10, -0.07, -0.06, -0.02), 1: (-0.08, -0.08, -0.03, -0.03)}
    baseline = {seed: {step: 4.0 + seed / step for step in (*steps, 300)} for seed in (0, 1, 2)}
    curves = {
        seed: {step: baseline[seed][step] + gap for step, gap in zip(steps, of, strict=True)}
        for seed, of in gaps.items()
    }
    found = trend(curves, baseline)
    slopes, predictions = [], []
    for of in gaps.values():
        mean = sum(of) / 4
        slope = sum((x - 1.5) * (y - mean) for x, y in enumerate(of)) / sum((x - 1.5) ** 2 for x in range(4))
        slopes.append(slope)
        predictions.append(mean + slope * (3 + math.log2(10) - 1.5))
    t = 12.706204736432095  # of one degree of freedom
    for result, values in ((found.per_doubling, slopes), (found.further, predictions)):
        assert list(result.by_seed.values()) == pytest.approx(values, abs=1e-12)
        assert result.mean == pytest.approx(sum(values) / 2, abs=1e-12)
        assert result.half_width == pytest.approx(t * abs(values[0] - values[1]) / 2, rel=1e-9)
    assert [at.mean for at in found.differences] == pytest.approx([-0.09, -0.075, -0.045, -0.025], abs=1e-12)


def test_there_is_no_trend_without_the_fractions() -> None:
    whole = {0: {100: 4.0, 200: 4.0, 400: 4.0, 800: 4.0}}
    assert trend(whole, whole) is not None
    assert trend({0: {100: 4.0, 200: 4.0, 800: 4.0}}, whole) is None
    assert trend(whole, {1: whole[0]}) is None
    assert trend({0: {}}, {0: {}}) is None
    # Half as many steps of twice the batch: a step is another fraction of the training.
    assert trend({0: {50: 4.0, 100: 4.0, 200: 4.0, 400: 4.0}}, whole) is None
