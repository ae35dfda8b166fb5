"""Examples of second looks: validation examples beyond the size, and train examples set aside for them."""

from __future__ import annotations

from typing import Any

import pytest

import compound as cp
from compound.api.optimize import make_problem
from compound.evaluation.dataset import Dataset
from compound.evaluation.metrics.built_in import exact_match
from compound.optimization.method import Problem
from compound.optimization.settings.optimize import make_settings
from compound.testing import ScriptedLM


def rows(kind: str, n: int, *repeated: str) -> list[dict[str, Any]]:
    questions = [*repeated, *(f"{kind} {i}" for i in range(n - len(repeated)))]
    return [{"id": f"{kind}{i}", "question": q, "answer": "yes"} for i, q in enumerate(questions)]


def problem(train: list[dict[str, Any]], valid: list[dict[str, Any]], **settings: Any) -> Problem:
    answer = cp.LLM("answer", prompt=cp.Text("Answer."))(question=cp.Input("question"))
    system = cp.System("qa", outputs={"answer": answer}, lm="lm")
    given = make_settings({"valid_size": 10, **settings})
    data = Dataset.of(train=train, valid=valid, test=rows("test", 5))
    return make_problem(system, data, exact_match("answer"), given, {"lm": ScriptedLM(["no"])})


@pytest.mark.parametrize("accept", ["best", "supported"])
def test_unused_validation_examples_come_first(accept: str) -> None:
    made = problem(rows("train", 50), rows("valid", 30), accept=accept)
    assert len(made.further) == len(made.valid) == 10
    assert not {e.id for e in made.further} & {e.id for e in made.valid}
    assert {e.id[:5] for e in made.further} == {"valid"}
    assert len(made.train) == 50


def test_train_examples_are_set_aside_only_for_what_must_be_supported() -> None:
    assert problem(rows("train", 50), rows("valid", 10)).further == []
    made = problem(rows("train", 50), rows("valid", 10), accept="supported")
    assert len(made.further) == 10
    assert len(made.train) == 40
    assert {e.id for e in made.train} | {e.id for e in made.further} == {
        e["id"] for e in rows("train", 50)
    }
    few = problem(rows("train", 20), rows("valid", 10), accept="supported")
    assert (len(few.train), len(few.further)) == (16, 4)  # a fifth at most


def test_rows_that_occur_twice_are_not_set_aside() -> None:
    """The search would see them in the other place."""
    train = rows("train", 12, *["same"] * 6, "valid 1", "test 1")
    made = problem(train, rows("valid", 10), accept="supported", train_size=12)
    assert {e.inputs["question"] for e in made.further} <= {f"train {i}" for i in range(4)}
    assert len(made.further) == 2
