"""The progressive threshold of MyGO."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.optimizers.weights.recipes.mygo import raised_threshold


@pytest.mark.parametrize(
    ("previous", "mean", "most", "expected"),
    [
        (0.5, 0.4, 1.0, 0.7),  # (.4 + 1) / 2
        (0.8, 0.4, 1.0, 0.8),  # never decreasing
        (0.5, 1.0, 1.0, 1.0),  # a policy that is always right
        (0.5, 0.0, 1.0, 0.5),
        (0.0, 1.5, 4.0, 2.75),  # (1.5 + 4) / 2
        (-1.0, -0.5, 1.0, 0.25),  # (-.5 + 1) / 2
    ],
)
def test_the_threshold_by_hand(previous: float, mean: float, most: float, expected: float) -> None:
    assert raised_threshold(previous, mean, most) == pytest.approx(expected, rel=1e-12)


@given(st.floats(0, 1), st.lists(st.floats(0, 1), max_size=5))
def test_it_never_decreases_and_a_perfect_trajectory_always_passes(
    start: float, means: list[float]
) -> None:
    threshold = start
    for mean in means:
        before, threshold = threshold, raised_threshold(threshold, mean)
        assert before <= threshold <= 1.0


def test_rounding_does_not_lift_it_above_the_best_reward() -> None:
    mean = math.fsum([0.005] * 57) / 57
    assert mean > 0.005
    assert raised_threshold(0.0, mean, 0.005) == 0.005
