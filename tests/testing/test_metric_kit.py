"""The kit of metrics catches each kind of wrong metric by the check that is meant for it."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Awaitable, Callable
from copy import deepcopy
from typing import Any

import pytest

from compound.core.errors import CallError
from compound.core.example import Example, Score
from compound.testing import MetricKit, run_kit

CASES = [
    ({"words": ["a", "b"]}, Example("e1", {}, {"wanted": ["b"]}), 0.5),
    ({"words": ["b"]}, Example("e2", {}, {"wanted": ["b"]})),
]


class Right:
    """The share of the words that are wanted."""

    name: Any = "share"
    bounds: Any = (0, 1)

    def score(self, outputs: Any, example: Any) -> Any:
        if "words" not in outputs:
            raise CallError(
                f"share needs the output 'words', but the outputs are {', '.join(outputs)}"
            )
        return self.of(outputs["words"], example.gold["wanted"])

    def of(self, words: list[str], wanted: list[str]) -> Any:
        found = [word for word in words if word in wanted]
        return Score(
            len(found) / len(words), f"{len(found)} of {len(words)}", {"found": float(len(found))}
        )


def failures(metric: Callable[[], Any], cases: Any = CASES) -> dict[str, str]:
    kit = type(
        "TestShare",
        (MetricKit,),
        {"make": lambda self: metric(), "cases": lambda self: deepcopy(cases)},
    )
    return run_kit(kit)


def changed(**attributes: Any) -> Callable[[], Any]:
    return type("Wrong", (Right,), attributes)


class Later(Right):
    def score(self, outputs: Any, example: Any) -> Awaitable[Score]:
        async def later() -> Score:
            found: Score = super(Later, self).score(outputs, example)
            return found

        return later()


Numbers = changed(of=lambda self, words, wanted: sum(word in wanted for word in words) / len(words))


@pytest.mark.parametrize("metric", [Right, Later, Numbers])
def test_a_right_metric_passes(metric: Callable[[], Any]) -> None:
    assert failures(metric) == {}


def test_a_function_is_a_metric() -> None:
    assert failures(lambda: lambda outputs, example: len(outputs["words"]) / 4, [CASES[0]]) == {}


def returning(score: Any) -> Callable[[], Any]:
    return changed(of=lambda self, words, wanted: score)


def damaging(change: Callable[[list[str], list[str]], object]) -> Callable[[], Any]:
    def of(self: Right, words: list[str], wanted: list[str]) -> Any:
        found = Right.of(self, words, wanted)
        change(words, wanted)
        return found

    return changed(of=of)


Sorts = damaging(lambda words, wanted: words.reverse())
Marks = damaging(lambda words, wanted: wanted.append("seen"))


def counting() -> Any:
    asked = itertools.count(1)
    return changed(of=lambda self, words, wanted: 1 / next(asked))()


Unlucky = changed(
    strictness=functools.cached_property(lambda self: random.random()),
    of=lambda self, words, wanted: self.strictness,
)

NAME = "test_it_has_a_name"
FINITE = "test_scores_are_finite"
BOUNDS = "test_scores_are_within_the_bounds"
EQUAL = "test_equal_arguments_give_equal_scores"
ARGUMENTS = "test_arguments_are_not_changed"
EXPECTED = "test_scores_are_the_expected_ones"
MISSING = "test_a_missing_output_is_reported"


@pytest.mark.parametrize(
    ("metric", "check", "message"),
    [
        (changed(name=None), NAME, "must be a string, but is None"),
        (changed(name=" "), NAME, "is empty"),
        (returning(math.nan), FINITE, "case 1 scores nan"),
        (returning("1"), FINITE, "case 1 scores '1'"),
        (returning(Score(math.inf)), FINITE, "case 1 scores inf"),
        (returning(Score(0.5, feedback=3)), FINITE, "the feedback on case 1 must be a string"),  # type: ignore[arg-type]
        (returning(Score(0.5, parts={"a": math.nan})), FINITE, "the parts {'a': nan}"),
        (changed(bounds=(0, 0.75)), BOUNDS, "case 2: metric 'share' returned 1 on example 'e2',"),
        (changed(bounds=(1, 0)), BOUNDS, "bounds must be the minimum and maximum score"),
        (returning(2.0), BOUNDS, "case 1: metric 'share' returned 2 on example 'e1', outside its"),
        (counting, EQUAL, "case 1 scores 1.0, then 0.5"),
        (Unlucky, EQUAL, "with a new metric"),
        (Sorts, ARGUMENTS, "modified the outputs or the example of case 1"),
        (Marks, ARGUMENTS, "modified the outputs or the example of case 1"),
        (returning(0.25), EXPECTED, "case 1 scores 0.25 instead of 0.5"),
        (returning("1"), EXPECTED, "case 1 scores '1', which is not a number"),
        (
            changed(score=lambda self, o, e: self.of(o["words"], e.gold["wanted"])),
            MISSING,
            "raises KeyError: 'words'",
        ),
    ],
)
def test_a_wrong_metric_is_caught(metric: Callable[[], Any], check: str, message: str) -> None:
    found = failures(metric)
    assert message in found.get(check, f"{check} passed; failed: {found}")


def test_a_kit_without_cases_fails() -> None:
    assert "cases() returned no case" in failures(Right, [])[FINITE]
    assert "override cases()" in run_kit(MetricKit)[FINITE]
    assert "override make()" in run_kit(MetricKit)[NAME]
