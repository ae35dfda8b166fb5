"""What the acceptance test can detect, against enumeration by hand and simulation of the test itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from compound.evaluation.paired_tests import paired_test
from compound.evaluation.power import (
    detectable,
    examples_needed,
    least_improved,
    least_p,
    most_decisions,
    power,
)
from compound.evaluation.statistics import UNIT


def enumerated(n: int, level: float, better: float, worse: float) -> float:
    """Return the power by going through every outcome of every example."""
    total = 0.0
    chances = {1: better, -1: worse, 0: 1 - better - worse}
    for outcome in itertools.product((1, -1, 0), repeat=n):
        after = [max(0, change) for change in outcome]
        before = [max(0, -change) for change in outcome]
        if paired_test(before, after, bounds=UNIT, rng=np.random.default_rng(0)) <= level:
            total += float(np.prod([chances[change] for change in outcome]))
    return total


@pytest.mark.parametrize(("better", "worse"), [(0.5, 0.0), (0.4, 0.1), (0.9, 0.1), (0.2, 0.2)])
@pytest.mark.parametrize("level", [0.05, 0.1])
def test_power_is_that_of_the_test_itself(better: float, worse: float, level: float) -> None:
    assert power(7, level, better, worse) == pytest.approx(enumerated(7, level, better, worse))


def test_power_without_any_difference_is_below_the_level() -> None:
    assert all(power(n, 0.05, 0.2, 0.2) <= 0.05 for n in range(1, 60))


def test_the_smallest_p_is_that_of_a_gain_on_every_example() -> None:
    rng = np.random.default_rng(0)
    for n in (3, 10, 14, 40, 200):
        zeros, ones = [0.0] * n, [1.0] * n
        assert paired_test(zeros, ones, bounds=UNIT, rng=rng) == pytest.approx(least_p(n), rel=1e-9)
        assert paired_test(zeros, ones, bounds=None, rng=rng) == pytest.approx(least_p(n, bounded=False))


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("n", [1, 4, 5, 14, 15, 40, 5_000])
def test_so_many_decisions_can_be_planned_that_each_could_accept(n: int, bounded: bool) -> None:
    decisions = most_decisions(n, 0.05, bounded=bounded)
    assert (decisions == 0) == (least_p(n, bounded=bounded) > 0.05)
    if decisions:
        assert least_p(n, bounded=bounded) <= 0.05 / decisions
        assert n > 1_000 or least_p(n, bounded=bounded) > 0.05 / (decisions + 1)


@pytest.mark.parametrize("level", [0.05, 0.025, 0.05 / 6, 1 / 32])
def test_as_many_examples_must_improve_as_the_test_needs(level: float) -> None:
    least = least_improved(level)

    def accepted(improved: int) -> bool:
        after = [1.0] * improved + [0.0] * (12 - improved)
        return paired_test([0.0] * 12, after, bounds=UNIT, rng=np.random.default_rng(0)) <= level

    assert accepted(least)
    assert not accepted(least - 1)


def test_the_detectable_gain_is_the_smallest_with_the_power_wanted() -> None:
    gain = detectable(40, 0.05, worse=0.05)
    assert gain is not None
    assert power(40, 0.05, gain + 0.05, 0.05) >= 0.8
    assert power(40, 0.05, gain + 0.04, 0.05) < 0.8
    assert detectable(4, 0.05) is None


def test_the_examples_needed_detect_the_gain() -> None:
    n = examples_needed(0.1, 0.05 / 6)
    assert n is not None
    assert power(n, 0.05 / 6, 0.1) >= 0.8
    assert power(n // 2, 0.05 / 6, 0.1) < 0.8
