"""Intervals and tests: hand-computed numbers, and validity checked by simulation with an exact bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from compound.evaluation import statistics
from compound.evaluation.statistics import (
    UNIT,
    Bounds,
    Interval,
    binomial_lower,
    interval_of_means,
    mean_interval,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("values", [[0.4], [0.1, 0.1, 0.1]])
def test_values_without_spread_have_no_limits_in_an_unknown_range(values: list[float]) -> None:
    interval = mean_interval(values)
    assert interval == Interval(values[0], -math.inf, math.inf, len(values))
    assert interval.to_json() == {"mean": values[0], "low": None, "high": None, "n": len(values)}


@pytest.mark.parametrize(
    ("right", "n"), [(0, 1), (1, 1), (1, 2), (0, 10), (3, 10), (10, 10), (58, 60), (1, 400)]
)
def test_of_right_and_wrong_the_interval_is_that_of_clopper_and_pearson(right: int, n: int) -> None:
    found = mean_interval([1.0] * right + [0.0] * (n - right), bounds=UNIT)
    exact = stats.binomtest(right, n).proportion_ci(0.95, method="exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=1e-9)


@pytest.mark.parametrize(
    "values",
    [
        [0.5],
        [0.2, 0.9],
        [0.0, 0.5, 0.5, 1.0],
        [0.0] * 30 + [0.3, 1.0],
        [1 / rank for rank in range(1, 12)],
        list(np.linspace(0.69, 0.71, 25)),
    ],
    ids=len,
)
def test_random_means_fall_beyond_each_limit_one_time_in_forty(values: list[float]) -> None:
    """The definition of the bound, by simulation: an imaginary value at the end, and flat Dirichlet weights."""
    found = mean_interval(values, bounds=UNIT)
    for end, limit, beyond in ((0.0, found.low, np.less), (1.0, found.high, np.greater)):
        weights = rng(7).dirichlet(np.ones(len(values) + 1), size=40_000)
        count = int(beyond(weights @ np.append(values, end), limit).sum())
        assert stats.binomtest(count, 40_000, 0.025).pvalue > 1e-4


SHARES = st.lists(
    st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1)), min_size=1, max_size=12
)
LEVELS = st.sampled_from([0.5, 0.8, 0.95, 0.99])


@settings(deadline=None)
@given(SHARES, LEVELS)
@example([6.329433525254405e-261, 2.276322494326455e-263], 0.95)  # an overflow, once
def test_a_bounded_interval_is_in_range_around_the_mean(values: list[float], level: float) -> None:
    found = mean_interval(values, level, bounds=UNIT)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert found.high - found.low > 0.001
    assert (found.low > 0) == (max(values) > 0) or max(values) < 1e-9


@settings(deadline=None, max_examples=50)
@given(SHARES, st.sampled_from([-3.0, -1.0, 0.25, 8.0]), st.sampled_from([-2.0, 0.0, 0.5]))
def test_a_bounded_interval_is_scaled(values: list[float], factor: float, shift: float) -> None:
    plain = mean_interval(values, bounds=UNIT)
    ends = sorted((shift, shift + factor))
    found = mean_interval([shift + factor * value for value in values], bounds=(ends[0], ends[1]))
    limits = sorted((shift + factor * plain.low, shift + factor * plain.high))
    assert (found.low, found.high) == pytest.approx(limits, abs=1e-7)


DRAWS: list[Callable[[np.random.Generator, int], NDArray[np.float64]]] = [
    lambda rng, n: (rng.random(n) < 0.9).astype(float),
    lambda rng, n: rng.choice([0.0, 0.5, 1.0], n, p=[0.02, 0.03, 0.95]),
    lambda rng, n: np.where(rng.random(n) < 0.1, rng.random(n), 0.0),
]


@pytest.mark.parametrize(
    ("draw", "mean"),
    list(zip(DRAWS, (0.9, 0.965, 0.05), strict=True)),
    ids=["right", "ties", "rare"],
)
@pytest.mark.parametrize("n", [2, 5, 20])
def test_bounded_intervals_hold_the_mean_of_skewed_scores(
    draw: Callable[[np.random.Generator, int], NDArray[np.float64]], mean: float, n: int
) -> None:
    random = rng(3)
    found = [mean_interval(draw(random, n), bounds=UNIT) for _ in range(200)]
    missed = sum(not i.low <= mean <= i.high for i in found)
    assert stats.binomtest(missed, 200, 0.05, alternative="greater").pvalue > 1e-3


@pytest.mark.parametrize(
    ("values", "bounds", "message"),
    [
        ([0.5, 1.2], (0.0, 1.0), r"must lie in \(0.0, 1.0\), got 0.5 to 1.2"),
        ([-0.1], (0.0, 1.0), "must lie in"),
        ([0.5], (1.0, 1.0), "low < high"),
        ([0.5], (0.0, math.inf), "finite"),
    ],
)
def test_exceeded_bounds_are_refused(values: list[float], bounds: Bounds, message: str) -> None:
    for function in (mean_interval, interval_of_means):
        if len(values) > 1 or function is mean_interval:
            with pytest.raises(ValueError, match=message):
                function(values, bounds=bounds)


def test_means_of_seeds_have_students_interval_in_the_middle_of_the_range() -> None:
    values = [0.495, 0.5, 0.505]
    found, t = interval_of_means(values, bounds=UNIT), mean_interval(values)
    assert (found.low, found.high) == pytest.approx((t.low, t.high), abs=1e-5)
    assert interval_of_means(values) == t


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_the_interval_of_means_lies_in_the_range_and_holds_the_mean(values: list[float]) -> None:
    found = interval_of_means(values, bounds=UNIT)
    if max(values) > min(values):
        assert 0 <= found.low <= found.mean <= found.high <= 1


def test_one_seed_and_equal_seeds_say_nothing_about_others() -> None:
    for values in ([0.5], [0.5, 0.5]):
        found = interval_of_means(values, bounds=UNIT).to_json()
        assert found == {"mean": 0.5, "low": None, "high": None, "n": len(values)}


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf], [[1.0], [2.0]]])
def test_values_that_have_no_mean_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="values must be non-empty and finite"):
        mean_interval(values)


@pytest.mark.parametrize("level", [0, 1, -0.1, 95])
def test_a_level_outside_zero_and_one_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match=f"0 < level < 1 must hold, got level={level}"):
        mean_interval([1.0, 2.0], level)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="successes=3, n=2"):
        binomial_lower(3, 2)


def test_repeated_values_have_the_interval_of_nearly_equal_ones() -> None:
    values = np.random.default_rng(0).integers(0, 5, 400) / 4
    apart = np.clip(values + np.linspace(-1e-12, 1e-12, 400), 0, 1)
    found, expected = (mean_interval(each, bounds=(0.0, 1.0)) for each in (values, apart))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-10)


def test_the_interval_of_very_many_values_is_hardly_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random(5_000)
    coarse = mean_interval(values, bounds=(0.0, 1.0))
    monkeypatch.setattr(statistics, "_MANY", len(values))
    exact = mean_interval(values, bounds=(0.0, 1.0))
    assert exact.low - 1 / 2_048 <= coarse.low <= exact.low
    assert exact.high <= coarse.high <= exact.high + 1 / 2_048
