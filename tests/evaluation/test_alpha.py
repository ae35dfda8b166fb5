"""Levels of decisions: their sum, and what skipped decisions return."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.evaluation.alpha import decision_level

COURSES = st.lists(st.tuples(st.booleans(), st.floats(0.01, 100)), min_size=1, max_size=12)


def levels(alpha: float, tested: list[bool], shares: list[float] | None = None) -> list[float]:
    """Return the level of every decision of a run, tested or not."""
    return [decision_level(alpha, len(tested), tested[:i], shares=shares) for i in range(len(tested))]


@given(COURSES, st.floats(1e-6, 0.5))
def test_the_levels_of_all_tests_never_exceed_alpha(course: list[tuple[bool, float]], alpha: float) -> None:
    tested, shares = [test for test, _ in course], [share for _, share in course]
    for weights in (None, shares):
        found = levels(alpha, tested, weights)
        spent = sum(level for level, was_tested in zip(found, tested, strict=True) if was_tested)
        assert spent <= alpha * (1 + 1e-12)
        if tested[-1]:  # nothing is left over
            assert spent == pytest.approx(alpha)


@given(COURSES, st.floats(1e-6, 0.5))
def test_no_level_is_below_the_part_of_its_decision(course: list[tuple[bool, float]], alpha: float) -> None:
    tested, shares = [test for test, _ in course], [share for _, share in course]
    for level, share in zip(levels(alpha, tested, shares), shares, strict=True):
        assert level >= alpha * share / sum(shares) * (1 - 1e-12)


@given(st.integers(1, 50), st.floats(1e-6, 0.5))
def test_without_a_skipped_decision_the_parts_are_equal(planned: int, alpha: float) -> None:
    assert set(levels(alpha, [True] * planned)) == {alpha / planned}


def test_a_skipped_decision_leaves_its_level_to_all_later_ones() -> None:
    # 0.01 each; the first returns 0.01 to four, the third returns 0.0125 to two.
    found = levels(0.05, [False, True, False, True, True])
    assert found == pytest.approx([0.01, 0.0125, 0.0125, 0.01875, 0.01875])
    assert found[1] + found[3] + found[4] == pytest.approx(0.05)


def test_a_level_depends_on_the_past_only() -> None:
    for future in ([True, True], [False, False]):
        assert levels(0.05, [False, True, *future])[:3] == pytest.approx([0.0125, 0.05 / 3, 0.05 / 3])


@pytest.mark.parametrize(
    ("planned", "tested", "shares", "message"),
    [
        (2, [True, False], None, "all 2 planned decisions are made"),
        (2, [], [1.0], "shares must be 2 positive numbers"),
        (2, [], [1.0, 0.0], "shares must be 2 positive numbers"),
    ],
)
def test_impossible_plans_are_refused(
    planned: int, tested: list[bool], shares: list[float] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decision_level(0.05, planned, tested, shares=shares)
