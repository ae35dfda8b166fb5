"""Penalties for agents: what costs something, what does not, and what a model may try."""

from __future__ import annotations

from typing import Any

import pytest

from compound.optimizers.weights.credit.shaping import BadIds, TooLong, TooMany

SHOWN = {"candidates": ["a", "b", "c", "d", "e"], "question": "?"}


@pytest.mark.parametrize(("n", "wanted"), [(0, 0.0), (4, 0.0), (5, -0.5), (50, -0.5)])
def test_more_than_four_queries_cost_a_half(n: int, wanted: float) -> None:
    assert TooMany("queries")({}, {"queries": [""] * n}) == wanted


@pytest.mark.parametrize(
    "ids",
    ["1", " 5 ", "2, 5", "2 5", "[2] [5]", "[2], [5]", "[1, 2, 3, 4, 5]", "1, 2.", "3\n4", [2, 5]],
)
def test_well_formed_ids_cost_nothing(ids: Any) -> None:
    assert BadIds("ids", "candidates")(SHOWN, {"ids": ids}) == 0.0


MALFORMED = ["", "none", "passages 1 and 2", "1, 2 because they fit", "1; 2", "1,,2", ", 1", "1,"]
MALFORMED += ["[1", "1]", "[1 2]", "[]", "-1", "1.5", "1 - 3", "٣", "9" * 5000]
UNKNOWN = ["0", "6", "1, 6", "[0, 1]", "999999999", [6]]
REPEATED = ["1, 1", "[2] [3] [2]", "1 01", "1, 2, 3, 4, 5, 1", [2, 2]]
SEVERAL = ["9, 9, x", []]


@pytest.mark.parametrize("ids", [*MALFORMED, *UNKNOWN, *REPEATED, *SEVERAL])
def test_malformed_unknown_and_repeated_ids_cost_one(ids: Any) -> None:
    assert BadIds("ids", "candidates")(SHOWN, {"ids": ids}) == -1.0


def test_ids_are_read_in_linear_time() -> None:
    assert BadIds("ids", "candidates")(SHOWN, {"ids": f"1{' ' * 1_000_000}x"}) < 0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", 0.0),
        (" ".join(["word"] * 30), 0.0),
        *((between.join(["word"] * 31), -1.0) for between in (" ", "-", "_", "\n", "\u00a0")),
        (" ".join(["don't"] * 30), 0.0),
        (" . , ! " * 40, 0.0),
    ],
)
def test_more_than_thirty_words_cost_one(text: str, wanted: float) -> None:
    assert TooLong("answer")({}, {"answer": text}) == wanted


def test_a_call_without_outputs_is_malformed_but_neither_long_nor_many() -> None:
    nothing: dict[str, Any] = {}
    assert TooMany("queries")({}, nothing) == 0.0
    assert BadIds("ids", "candidates")(SHOWN, nothing) == -1.0
    assert TooLong("answer")({}, nothing) == 0.0
