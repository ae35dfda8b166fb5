"""Penalties for agents: what costs something, what does not, and what a model may try."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.optimizers.weights.credit.shaping import BadIds, TooLong, TooMany

SHOWN = {"candidates": ["a", "b", "c", "d", "e"], "question": "?"}


# --- too many queries ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "wanted"), [(0, 0.0), (1, 0.0), (4, 0.0), (5, -0.5), (50, -0.5)])
def test_more_than_four_queries_cost_a_half(n: int, wanted: float) -> None:
    assert TooMany("queries")({}, {"queries": ["q"] * n}) == wanted


def test_repeated_and_empty_queries_count_too() -> None:
    assert TooMany("queries")({}, {"queries": ["", "", "", "", ""]}) == -0.5


def test_the_numbers_are_parameters() -> None:
    assert TooMany("queries", max_items=1, penalty=-2.0)({}, {"queries": ["a", "b"]}) == -2.0
    assert BadIds("ids", "candidates", penalty=-0.1)(SHOWN, {"ids": "x"}) == -0.1
    assert TooLong("answer", words=1, penalty=-3.0)({}, {"answer": "a b"}) == -3.0


# --- ids -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "1",
        " 5 ",
        "2, 5",
        "2,5",
        "2 5",
        "[2] [5]",
        "[2], [5]",
        "[2, 5]",
        "[1, 2, 3, 4, 5]",
        "1, 2.",
        "3\n4",
    ],
)
def test_well_formed_ids_cost_nothing(text: str) -> None:
    assert BadIds("ids", "candidates")(SHOWN, {"ids": text}) == 0.0


def test_ids_are_read_in_linear_time() -> None:
    assert BadIds("ids", "candidates")(SHOWN, {"ids": f"1{' ' * 1_000_000}x"}) < 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "passages 1 and 2",
        "1, 2 because they fit",
        "1; 2",
        "1,,2",
        ", 1",
        "1,",
        "[1",
        "1]",
        "[1 2]",
        "[]",
        "-1",
        "1.5",
        "1 - 3",
        "٣",  # a digit, but none of ours
        "9" * 5000,
    ],
)
def test_malformed_ids_cost_one(text: str) -> None:
    assert BadIds("ids", "candidates")(SHOWN, {"ids": text}) == -1.0


@pytest.mark.parametrize("text", ["0", "6", "1, 6", "[0, 1]", "999999999"])
def test_unknown_ids_cost_one(text: str) -> None:
    assert BadIds("ids", "candidates")(SHOWN, {"ids": text}) == -1.0


@pytest.mark.parametrize("text", ["1, 1", "[2] [3] [2]", "1 01", "1, 2, 3, 4, 5, 1"])
def test_repeated_ids_cost_one_however_they_are_written(text: str) -> None:
    assert BadIds("ids", "candidates")(SHOWN, {"ids": text}) == -1.0


def test_several_errors_cost_no_more_than_one() -> None:
    assert BadIds("ids", "candidates")(SHOWN, {"ids": "9, 9, x"}) == -1.0


def test_ids_as_numbers_are_judged_alike() -> None:
    rule = BadIds("ids", "candidates")
    assert [rule(SHOWN, {"ids": ids}) for ids in ([2, 5], [], [2, 2], [6])] == [
        0.0,
        -1.0,
        -1.0,
        -1.0,
    ]


def test_without_candidates_no_id_is_right() -> None:
    assert BadIds("ids", "candidates")({"candidates": []}, {"ids": "1"}) == -1.0


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.sampled_from([", ", " ", ","]))
def test_lists_of_ids_are_right_exactly_if_none_is_repeated(ids: list[int], between: str) -> None:
    found = BadIds("ids", "candidates")(SHOWN, {"ids": between.join(map(str, ids))})
    assert (found == 0.0) == (len(set(ids)) == len(ids))


# --- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", 0.0),
        (" ".join(["word"] * 30), 0.0),
        (" ".join(["word"] * 31), -1.0),
        ("-".join(["word"] * 31), -1.0),
        ("_".join(["word"] * 31), -1.0),
        ("\n".join(["word"] * 31), -1.0),
        ("\u00a0".join(["word"] * 31), -1.0),
        (" ".join(["don't"] * 30), 0.0),
        (" . , ! " * 40, 0.0),
    ],
)
def test_more_than_thirty_words_cost_one(text: str, wanted: float) -> None:
    assert TooLong("answer")({}, {"answer": text}) == wanted


# --- failed calls ----------------------------------------------------------------------------------------------


def test_a_call_without_outputs_is_malformed_but_neither_long_nor_many() -> None:
    nothing: dict[str, Any] = {}
    assert TooMany("queries")({}, nothing) == 0.0
    assert BadIds("ids", "candidates")(SHOWN, nothing) == -1.0
    assert TooLong("answer")({}, nothing) == 0.0


def test_nothing_is_changed() -> None:
    inputs, outputs = {"candidates": ["a"]}, {"ids": [1, 1]}
    BadIds("ids", "candidates")(inputs, outputs)
    assert (inputs, outputs) == ({"candidates": ["a"]}, {"ids": [1, 1]})
