"""The amazon benchmark: its file, its functions, and whole runs with a scripted model."""

from __future__ import annotations

from typing import Any

import pytest

import compound as cp
from benchmark_systems import BENCHMARKS, evaluated
from benchmarks.amazon import decide, recent
from compound.testing import ScriptedLM
from compound.yaml import load
from compound.yaml.program import Program

ROWS: list[dict[str, Any]] = [
    {
        "id": "a",
        "product_sequence": "Steel travel mug\nGlass travel mug\nSteel travel mug",
        "choices": ["Wool socks", "Phone case", "Warm mug", "Desk lamp"],
        "answer": 2,
    },
    {
        "id": "b",
        "product_sequence": "Red candle\nBlue candle",
        "choices": ["Candle holder", "Garden hose", "USB cable", "Water bottle"],
        "answer": 0,
    },
]


@pytest.fixture(scope="module")
def program() -> Program:
    return load(BENCHMARKS / "amazon.yaml")


def replies(message: str) -> str:
    """Answer like a model: with the interest, or with the product in other words."""
    if message.startswith("Say in a few words what the user"):
        return "a mug for travelling" if "mug" in message else "a candle"
    assert message.startswith("Describe the product")
    return "This is a " + message.rsplit("Product: ", 1)[1].split("\n", maxsplit=1)[0].lower()


def run(program: Program, row: dict[str, Any], lm: ScriptedLM) -> cp.Trace:
    inputs = {name: row[name] for name in ("product_sequence", "choices")}
    return cp.run(program.system, inputs, engines={"smollm2": lm})


def test_both_examples_are_decided_right(program: Program) -> None:
    assert evaluated(program, ROWS, ScriptedLM(replies)).mean == 1.0


def test_a_run_asks_once_for_the_session_and_once_for_each_candidate(program: Program) -> None:
    lm = ScriptedLM(replies)
    trace = run(program, ROWS[0], lm)
    asked = [request.cued[-1].content for request in lm.requests]
    assert len(asked) == 5
    assert sum("Steel travel mug; Glass travel mug" in message for message in asked) == 1
    assert dict(trace.outputs) == {"answer": 2}


@pytest.mark.parametrize(
    ("session", "last", "wanted"),
    [
        ("a\nb\nc", 2, "c; b"),
        ("a\nb\na", 5, "a; b"),
        ("a x\n\n  \nb y", 5, "b y; a x"),
        ("one two three\none two four", 5, "one two"),
        ("", 3, ""),
    ],
)
def test_the_titles_viewed_last_come_first_and_once(session: str, last: int, wanted: str) -> None:
    assert recent(session, last, words=2) == wanted


@pytest.mark.parametrize(
    ("interest", "title_weight", "wanted"),
    [
        ("a travel mug", 0.0, 1),
        ("a travel mug", 1.0, 2),
        ("USB", 0.5, 0),
        ("", 0.5, 0),
        ("SOCKS!", 0.0, 2),
    ],
)
def test_the_candidate_with_most_shared_words_is_chosen(
    interest: str, title_weight: float, wanted: int
) -> None:
    profiles = ["a lamp", "a mug", "warm socks"]
    titles = ["Desk Lamp", "Kitchenware", "Travel"]
    assert decide(interest, profiles, titles, title_weight) == wanted
