"""The progressive threshold of MyGO and the choice of trajectories under it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.errors import DeclarationError
from compound.optimizers.weights.credit.threshold import RULES, Selection, raise_threshold, select

REWARDS = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("previous", "first_pass", "supremum", "expected"),
    [
        (0.5, [0.2, 0.6], 1.0, 0.7),  # (.4 + 1) / 2
        (0.8, [0.2, 0.6], 1.0, 0.8),  # never decreasing
        (0.5, [1.0, 1.0], 1.0, 1.0),  # a policy that is always right
        (0.5, [0.0, 0.0], 1.0, 0.5),
        (0.0, [1.0, 2.0], 4.0, 2.75),  # (1.5 + 4) / 2
        (-1.0, [-1.0, 0.0], 1.0, 0.25),  # (-.5 + 1) / 2
    ],
)
def test_the_threshold_by_hand(
    previous: float, first_pass: list[float], supremum: float, expected: float
) -> None:
    assert raise_threshold(previous, first_pass, supremum=supremum) == pytest.approx(expected, rel=1e-12)


@given(st.floats(0, 1), st.lists(REWARDS, min_size=1, max_size=5))
def test_it_never_decreases_and_a_perfect_trajectory_always_passes(
    start: float, batches: list[list[float]]
) -> None:
    threshold = start
    for rewards in batches:
        before, threshold = threshold, raise_threshold(threshold, rewards)
        assert before <= threshold <= 1.0
        assert select({"q": [1.0]}, threshold).kept == {"q": (0,)}


def test_rounding_does_not_lift_it_above_the_best_reward() -> None:
    assert math.fsum([0.005] * 57) / 57 > 0.005
    assert raise_threshold(0.0, [0.005] * 57, supremum=0.005) == 0.005


def test_rewards_are_compared_up_to_rounding_errors() -> None:
    below, above = 0.7 + 0.2 + 0.1, math.nextafter(1.0, 2.0)
    assert below < 1.0
    assert select({"q": [below, 0.999, above]}, 1.0).kept == {"q": (0, 2)}
    assert raise_threshold(0.5, [above, above]) == 1.0


@given(st.floats(0, 1), REWARDS)
def test_the_printed_formula_selects_nothing(previous: float, rewards: list[float]) -> None:
    threshold = raise_threshold(previous, rewards, rule="paper")
    assert threshold >= 1.0
    assert select({"q": [*rewards, 1.0]}, threshold, rule="paper").kept == {"q": ()}


def test_the_printed_formula_by_hand() -> None:
    assert raise_threshold(0.5, [1.0, 2.0], supremum=4.0, rule="paper") == 5.5  # (1.5 / 4 + 1) * 4
    assert raise_threshold(5.5, [1.0], supremum=4.0, rule="paper") == 5.5  # it feeds on its own excess
    assert select({"q": [0.9, 1.1]}, 0.9, rule="paper").kept == {"q": (1,)}


def test_a_fixed_threshold_stays() -> None:
    assert raise_threshold(0.3, [1.0, 1.0], rule="fixed") == 0.3
    assert select({"q": [0.3, 0.2]}, 0.3, rule="fixed").kept == {"q": (0,)}
    assert set(RULES) == {"halved", "fixed", "paper"}


def test_a_reward_at_the_threshold_is_accepted() -> None:
    assert select({"q": [0.7, 0.6999, 1.0]}, 0.7) == Selection({"q": (0, 2)}, ("q",))


def test_the_first_good_attempts_are_kept() -> None:
    assert select({"q": [1.0, 0.0, 0.8, 0.9, 1.0]}, 0.8) == Selection({"q": (0, 2, 3)}, ())
    assert select({"q": [1.0, 0.0, 0.8]}, 0.8, keep=1) == Selection({"q": (0,)}, ())


def test_a_question_is_tried_until_it_has_enough_or_has_used_up_its_attempts() -> None:
    attempts = {"none": [], "hard": [0.0] * 16, "last": [0.0] * 15, "two": [1.0, 1.0], "done": [1.0] * 3}
    found = select(attempts, 0.5)
    assert found.unfinished == ("none", "last", "two")
    assert found.kept == {"none": (), "hard": (), "last": (), "two": (0, 1), "done": (0, 1, 2)}
    assert select({"q": [0.0, 0.0]}, 0.5, most=2).unfinished == ()


@given(REWARDS, st.floats(0, 1), st.integers(1, 4))
def test_attempts_one_by_one_end_like_all_at_once(rewards: list[float], threshold: float, keep: int) -> None:
    made: list[float] = []
    while select({"q": made}, threshold, keep=keep, most=len(rewards)).unfinished:
        made.append(rewards[len(made)])
    one_by_one = select({"q": made}, threshold, keep=keep, most=len(rewards))
    at_once = select({"q": rewards}, threshold, keep=keep, most=len(rewards))
    assert one_by_one.kept == at_once.kept
    assert at_once.unfinished == ()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(DeclarationError, match="unknown threshold rule 'halve'; did you mean 'halved'"):
        raise_threshold(0.5, [0.1], rule="halve")
    with pytest.raises(DeclarationError, match="unknown threshold rule 'fix'; did you mean 'fixed'"):
        select({}, 0.5, rule="fix")
    for previous, rewards, shown in [
        (1.5, [0.1], "1.5"),
        (0.5, [1.1], "1.1"),
        (0.5, [math.nan], "nan"),
        (0.5, [-math.inf], "-inf"),
    ]:
        with pytest.raises(DeclarationError, match=f"are at most 1.0, but one is {shown}"):
            raise_threshold(previous, rewards)
    with pytest.raises(DeclarationError, match="but there are none"):
        raise_threshold(0.5, [])
    with pytest.raises(DeclarationError, match="must be above 0, but is 0.0"):
        raise_threshold(0.5, [0.1], supremum=0.0)
    with pytest.raises(DeclarationError, match="was attempted 3 times, but most is 2"):
        select({"q": [0.0] * 3}, 0.5, most=2)
    with pytest.raises(DeclarationError, match="keep and most must be >= 1, but are 0 and 16"):
        select({}, 0.5, keep=0)
