"""Intervals and tests: hand-computed numbers, and validity checked by simulation with an exact bound."""

from __future__ import annotations

import itertools
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from compound.statistics import (
    Interval,
    binomial_upper,
    cluster_mean_interval,
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


def test_one_value_says_nothing_about_spread() -> None:
    assert mean_interval([0.4]) == Interval(0.4, -math.inf, math.inf, 1)


@pytest.mark.parametrize("method", ["t", "bootstrap"])
def test_equal_values_give_an_interval_without_width(method: str) -> None:
    assert mean_interval([0.1, 0.1, 0.1], method=method, seed=0) == Interval(0.1, 0.1, 0.1, 3)  # type: ignore[arg-type]


def test_the_bootstrap_follows_its_seed_and_resembles_t_on_symmetric_values() -> None:
    values = np.linspace(0, 1, 60)
    first, again, other = (mean_interval(values, method="bootstrap", seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    t = mean_interval(values)
    assert (first.low, first.high) == pytest.approx((t.low, t.high), abs=0.01)


def test_the_bootstrap_leans_towards_the_long_tail() -> None:
    values = [0.0] * 20 + [1.0, 2.0, 8.0]
    interval = mean_interval(values, method="bootstrap", seed=0)
    assert interval.high - interval.mean > 1.5 * (interval.mean - interval.low)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=2, max_size=4))
def test_the_bootstrap_is_finite_for_a_handful_of_values(values: list[float]) -> None:
    interval = mean_interval(values, method="bootstrap", seed=1)
    assert min(values) <= interval.low <= interval.high <= max(values)


def test_the_bootstrap_without_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a seed"):
        mean_interval([1.0, 2.0], method="bootstrap")


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf], [[1.0], [2.0]]])
def test_values_that_have_no_mean_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one value and only finite ones"):
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
    with pytest.raises(ValueError, match="same examples, got 2 and 1"):
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
