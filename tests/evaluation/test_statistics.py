"""Intervals and tests: hand-computed numbers, and validity checked by simulation with an exact bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from compound.evaluation.statistics import (
    UNIT,
    Bounds,
    Interval,
    binomial_upper,
    cluster_mean_interval,
    interval_of_means,
    mean_interval,
    paired_interval,
    paired_test,
)

SCORES = st.lists(st.integers(-4, 4).map(lambda n: n / 4), min_size=1, max_size=9)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_t_interval_equals_the_one_computed_by_hand() -> None:
    # mean 2, s = 1, half width = t(0.975, 2) / sqrt(3) = 4.302653 / 1.732051
    interval = mean_interval([1, 2, 3])
    assert (interval.mean, interval.n) == (2.0, 3)
    assert (interval.low, interval.high) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-6)


@pytest.mark.parametrize("values", [[0.4], [0.1, 0.1, 0.1]])
def test_values_without_spread_have_no_limits_where_the_range_is_unknown(values: list[float]) -> None:
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
def test_randomly_weighted_means_fall_beyond_each_limit_one_time_in_forty(values: list[float]) -> None:
    """The definition of the bound, by simulation: an imaginary value at the end, and flat Dirichlet weights."""
    found = mean_interval(values, bounds=UNIT)
    for end, limit, beyond in ((0.0, found.low, np.less), (1.0, found.high, np.greater)):
        weights = rng(7).dirichlet(np.ones(len(values) + 1), size=40_000)
        count = int(beyond(weights @ np.append(values, end), limit).sum())
        assert stats.binomtest(count, 40_000, 0.025).pvalue > 1e-4


SHARES = st.lists(st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1)), min_size=1, max_size=12)
LEVELS = st.sampled_from([0.5, 0.8, 0.95, 0.99])


@settings(deadline=None)
@given(SHARES, LEVELS)
def test_a_bounded_interval_lies_in_the_range_holds_the_mean_and_has_width(
    values: list[float], level: float
) -> None:
    found = mean_interval(values, level, bounds=UNIT)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert found.high - found.low > 0.001
    assert (found.low > 0) == (max(values) > 0) or max(values) < 1e-9


@settings(deadline=None, max_examples=50)
@given(SHARES)
@example([6.329433525254405e-261, 2.276322494326455e-263])  # an overflow, once
def test_a_bounded_interval_shrinks_with_more_of_the_same_values(values: list[float]) -> None:
    widths = [i.high - i.low for i in (mean_interval(values * times, bounds=UNIT) for times in (1, 2, 4))]
    assert widths[0] > widths[1] > widths[2]


@settings(deadline=None, max_examples=50)
@given(SHARES, st.sampled_from([-3.0, -1.0, 0.25, 8.0]), st.sampled_from([-2.0, 0.0, 0.5]))
def test_a_bounded_interval_follows_a_change_of_scale(
    values: list[float], factor: float, shift: float
) -> None:
    plain = mean_interval(values, bounds=UNIT)
    ends = sorted((shift, shift + factor))
    found = mean_interval([shift + factor * value for value in values], bounds=(ends[0], ends[1]))
    limits = sorted((shift + factor * plain.low, shift + factor * plain.high))
    assert (found.low, found.high) == pytest.approx(limits, abs=1e-7)


@settings(deadline=None, max_examples=50)
@given(SHARES, st.randoms())
def test_a_bounded_interval_does_not_depend_on_the_order(values: list[float], random: Random) -> None:
    shuffled = random.sample(values, len(values))
    one, other = mean_interval(values, bounds=UNIT), mean_interval(shuffled, bounds=UNIT)
    assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=1e-9)


def test_of_many_values_the_interval_is_close_to_that_of_the_normal_distribution() -> None:
    values = rng(5).beta(2, 5, size=5_000)
    found, t = mean_interval(values, bounds=UNIT), mean_interval(values)
    assert (found.low, found.high) == pytest.approx((t.low, t.high), abs=5e-4)


DRAWS: list[Callable[[np.random.Generator, int], NDArray[np.float64]]] = [
    lambda rng, n: (rng.random(n) < 0.9).astype(float),
    lambda rng, n: rng.choice([0.0, 0.5, 1.0], n, p=[0.02, 0.03, 0.95]),
    lambda rng, n: np.where(rng.random(n) < 0.1, rng.random(n), 0.0),
]


@pytest.mark.parametrize(
    ("draw", "mean"), list(zip(DRAWS, (0.9, 0.965, 0.05), strict=True)), ids=["right", "ties", "rare"]
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
def test_bounds_that_the_values_do_not_keep_are_refused(
    values: list[float], bounds: Bounds, message: str
) -> None:
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


def test_t_intervals_hold_the_mean_as_often_as_they_say() -> None:
    draws = rng(1).normal(3.0, 2.0, size=(2000, 8))
    missed = sum(not (i.low <= 3.0 <= i.high) for i in map(mean_interval, draws))
    assert stats.binomtest(missed, 2000, 0.05).pvalue > 1e-4


def test_repeats_of_one_example_count_as_one_example() -> None:
    repeated = cluster_mean_interval([[1.0, 0.0], [1.0] * 50, [0.0]])
    assert repeated == mean_interval([0.5, 1.0, 0.0])
    assert repeated.n == 3


def test_the_paired_interval_is_the_interval_of_the_differences() -> None:
    assert paired_interval([0.0, 0.5, 1.0], [1.0, 1.0, 1.0]) == mean_interval([1.0, 0.5, 0.0])
    bounded = paired_interval([0.0, 0.5, 1.0], [1.0, 1.0, 1.0], bounds=UNIT)
    assert bounded == mean_interval([1.0, 0.5, 0.0], bounds=(-1.0, 1.0))


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1, 1, 1, 1], 1 / 16),
        ([1, 2, 3, -1], 2 / 16 + 1 / 16),  # sums >= 5: 7 (one way), 5 (two ways: either 1 is negative)
        ([1], 1 / 2),
        ([-1], 1.0),
        ([0, 0, 0], 1.0),
        ([0, 0, 1, 0], 1 / 2),
    ],
)
def test_the_exact_p_value_counts_sign_patterns(differences: list[float], p: float) -> None:
    assert paired_test([0] * len(differences), differences, rng=rng()) == p


@given(SCORES)
def test_the_exact_test_agrees_with_counting_every_pattern(differences: list[float]) -> None:
    nonzero = [d for d in differences if d]
    sums = [
        math.fsum(s * d for s, d in zip(signs, nonzero, strict=True)) for signs in _patterns(len(nonzero))
    ]
    expected = sum(total >= sum(nonzero) for total in sums) / len(sums)
    assert paired_test(np.zeros(len(differences)), differences, rng=rng()) == expected


def _patterns(n: int) -> list[tuple[int, ...]]:
    return list(itertools.product([1, -1], repeat=n))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9), st.randoms())
def test_the_order_of_examples_does_not_matter(pairs: list[tuple[float, float]], random: Random) -> None:
    shuffled = random.sample(pairs, len(pairs))
    before, after = zip(*pairs, strict=True)
    shuffled_before, shuffled_after = zip(*shuffled, strict=True)
    assert paired_test(before, after, rng=rng()) == paired_test(shuffled_before, shuffled_after, rng=rng())


@given(SCORES)
def test_swapping_before_and_after_counts_the_other_tail(differences: list[float]) -> None:
    zeros = [0.0] * len(differences)
    better, worse = (paired_test(*pair, rng=rng()) for pair in ((zeros, differences), (differences, zeros)))
    # Both tails include the observed sum, so together they exceed 1 by its probability.
    assert better + worse > 1
    assert (better < worse) == (sum(differences) > 0)


def test_many_differences_are_tested_by_seeded_flips_near_the_exact_value() -> None:
    # Twenty differences of 1, of which 15 are up: P(X >= 15) for X ~ Binomial(20, 1/2) is 0.020695.
    after = [1.0] * 15 + [-1.0] * 5
    p, again = (paired_test([0.0] * 20, after, rng=rng(5)) for _ in range(2))
    assert p == again
    assert p == pytest.approx(0.020695, abs=4 * math.sqrt(0.0207 / 20_000))


def test_no_p_value_of_random_flips_is_zero() -> None:
    assert paired_test([0.0] * 60, [1.0] * 60, rng=rng()) == 1 / 20_001


@pytest.mark.parametrize(("size", "runs"), [(8, 2000), (16, 300)])
def test_without_a_difference_small_p_values_are_rarer_than_they_say(size: int, runs: int) -> None:
    random = rng(11)
    p = np.array([_null_p(random, size) for _ in range(runs)])
    for level in (0.01, 0.05, 0.2, 0.5):
        # Fails for a valid test once in 10,000 seeds; the seed is fixed.
        assert stats.binomtest(int((p <= level).sum()), runs, level, alternative="greater").pvalue > 1e-4
    assert (p <= 0.5).mean() > 0.3  # not valid by never rejecting


def _null_p(random: np.random.Generator, size: int) -> float:
    before, after = random.exponential(1.0, size=(2, size))
    return paired_test(before, after, rng=random)


def test_a_real_difference_is_found() -> None:
    before = rng(2).normal(0, 1, 100)
    assert paired_test(before, before + rng(3).normal(0.5, 1, 100), rng=rng(4)) < 0.001


def test_scores_of_different_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="equal lengths, got 2 and 1"):
        paired_test([0, 1], [1], rng=rng())


@pytest.mark.parametrize(
    ("successes", "n", "upper"),
    [(0, 10, 1 - 0.05 ** (1 / 10)), (0, 1, 0.95), (9, 10, 0.95 ** (1 / 10)), (10, 10, 1.0), (0, 0, 1.0)],
)
def test_the_binomial_limit_equals_the_closed_form(successes: int, n: int, upper: float) -> None:
    assert binomial_upper(successes, n) == pytest.approx(upper)


@given(st.integers(0, 30), st.integers(1, 30), st.floats(0.5, 0.99))
def test_at_the_binomial_limit_so_few_successes_are_just_credible(s: int, more: int, level: float) -> None:
    n = s + more
    assert stats.binom.cdf(s, n, binomial_upper(s, n, level)) == pytest.approx(1 - level, rel=1e-6)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="successes=3, n=2"):
        binomial_upper(3, 2)
