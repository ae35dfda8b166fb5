"""Typed state: what is stored comes back equal, and everything else is refused by name."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from compound.core.engine import Usage
from compound.core.storage.records import Damaged
from compound.core.storage.state import State, StateError
from compound.evaluation.evaluate import Evaluation, ScoredRun
from compound.execution.budget import MeterState
from compound.execution.trace import Failure
from compound.optimization.budget_plan import BudgetPlan
from compound.optimization.method import JobRecord, ScoredCandidate
from compound.optimization.proposals import LedgerState, Tally
from compound.optimization.runs.directory import APPENDED
from compound.optimization.runs.state import (
    FinalEvaluation,
    JobState,
    OptimizationState,
    SearchState,
    read_checkpoint,
)


class Annealing(State):
    """A state such as an optimizer has."""

    step: int = 0
    temperature: float = 1.0
    best: dict[str, object] = Field(default_factory=dict)
    seen: list[tuple[dict[str, int], float]] = Field(default_factory=list)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
EVALUATION = Evaluation(
    "digest",
    (ScoredRun("a", 0, 0.5), ScoredRun("b", 1, 0.0, Failure("parse", "?"))),
    Usage(2, 10, 4, 0.5),
    1.5,
    (0.0, 1.0),
)
WHOLE = OptimizationState(
    announced=2,
    before=EVALUATION,
    search=SearchState(
        plan=BudgetPlan(3, 2, 40.0, 0.05 / 3),
        free_runs=None,
        best={"a.prompt": "Go.", "a.demos": [{"inputs": {"x": 1}, "outputs": {"y": None}}]},
        incumbent=EVALUATION,
        ledger=LedgerState(
            models={"lm": Tally(2, 1, reasons={"401": 1}, stopped="401")}, usage=Usage(2), left=7
        ),
        working={"a.k": 3},
        jobs_in_round=1,
        decisions=1,
        job=JobState(
            optimizer="numbers",
            keys=("a.k",),
            reason={"gap": 0.5},
            share=math.inf,
            spent_before=3.5,
            proposal_limits={"cost": 0.1},
            ledger_before=LedgerState(),
            progress={"format": 1, "step": 2},
            scored=[ScoredCandidate({"a.k": 2}, 0.5, 8)],
        ),
        history=[
            JobRecord(
                job=0, optimizer="prompts", keys=("a.prompt",), values={"a.prompt": "Go."}, runs=3.5
            )
        ],
        tried=[ScoredCandidate({"a.prompt": "Go."}, 0.25, 8)],
    ),
    test_before=FinalEvaluation(evaluation=EVALUATION),
    test_after=FinalEvaluation(skipped="no budget"),
    meters=[
        MeterState(usage=Usage(2, 10), system_runs=3.5, runs=9, seconds=0.25, incidents={"429": 2})
    ],
    memory={"served": [["digest", {"x": 1.5}]]},
)


def through_json(state: State) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(state.to_json()))
    return found


def changed(value: dict[str, Any], path: str | tuple[Any, ...], to: object) -> dict[str, Any]:
    """Return a copy of JSON with one place changed."""
    copy: dict[str, Any] = json.loads(json.dumps(value))
    inner: Any = copy
    *parents, last = path.split(".") if isinstance(path, str) else path
    for parent in parents:
        inner = inner[int(parent)] if isinstance(inner, list) else inner[parent]
    inner[int(last) if isinstance(inner, list) else last] = to
    return copy


class TestState:
    @given(st.integers(), st.floats(allow_nan=False), st.dictionaries(st.text(), JSON, max_size=3))
    def test_what_is_stored_is_equal(self, step: int, heat: float, best: dict[str, object]) -> None:
        state = Annealing(step=step, temperature=heat, best=best, seen=[({"a": 1}, heat)])
        assert Annealing.from_json(through_json(state)) == state

    def test_half_a_character_comes_back_equal(self) -> None:
        state = Annealing(best={"prompt": "a \ud800 b"})
        assert Annealing.from_json(through_json(state)) == state

    def test_a_snapshot_does_not_follow_later_changes(self) -> None:
        state = Annealing(best={"k": [1]})
        stored = state.to_json()
        state.best["k"] = 2
        state.step += 1
        assert stored == {
            "format": 1,
            "step": 0,
            "temperature": 1.0,
            "best": {"k": [1]},
            "seen": [],
        }

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (
                {"format": 1, "stepp": 3},
                "Annealing cannot be read: stepp: Extra inputs are not permitted",
            ),
            ({"format": 1, "step": "three"}, "Annealing cannot be read: step: "),
            ({"format": 1, "seen": [[{"a": 1}]]}, r"Annealing cannot be read: seen\.0\.1: "),
            ({"format": 2}, "Annealing has format 2, but this version reads format 1"),
            ({"step": 3}, "Annealing has format None, but this version reads format 1"),
        ],
    )
    def test_what_is_no_such_state_is_refused(self, value: dict[str, object], message: str) -> None:
        with pytest.raises(StateError, match=message):
            Annealing.from_json(value)

    def test_a_value_that_is_not_json_is_refused_when_it_is_stored(self) -> None:
        with pytest.raises(StateError, match="Annealing holds a value that is not JSON"):
            Annealing(best={"model": object()}).to_json()

    def test_an_attribute_that_is_no_field_is_refused(self) -> None:
        with pytest.raises(ValueError, match="stepp"):
            Annealing().stepp = 3  # type: ignore[attr-defined]


class TestRunState:
    def test_what_is_stored_is_equal(self) -> None:
        assert OptimizationState.from_json(through_json(WHOLE)) == WHOLE
        assert OptimizationState.from_json(through_json(OptimizationState())) == OptimizationState()

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("before.rows.0.2", "high"),
            ("before.usage.calls", -1),
            ("search.plan.jobs", "two"),
            ("search.job.keys", 3),
            ("search.job.scored.0.score", None),
            ("search.history.0.runs", "many"),
            ("search.ledger.models.lm.asked", "many"),
            ("test_before.evaluation", {"rows": []}),
            ("meters.0.seconds", -1.0),
            ("meters.0.usage.cost", math.inf),
            ("memory", []),
            ("done", "perhaps"),
        ],
    )
    def test_a_wrong_value_is_named(self, path: str, value: object) -> None:
        with pytest.raises(StateError, match=r"OptimizationState cannot be read: \w+") as refused:
            OptimizationState.from_json(changed(through_json(WHOLE), path, value))
        assert refused.value.message.split(": ")[1].split(".")[0] == path.split(".", maxsplit=1)[0]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a JSON value; of long lists only the first items."""
    if path:
        yield path
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2])
        if isinstance(value, list)
        else ()
    )
    for key, part in parts:
        yield from places(part, (*path, key))


WRONG: tuple[object, ...] = (
    None,
    3,
    -1,
    "x",
    True,
    [1],
    [[]],
    {"a": 1},
    math.inf,
    math.nan,
    10**400,
)


def test_any_wrong_value_anywhere_is_read_or_refused() -> None:
    """A state may come from someone else: it never ends in another error."""
    stored = through_json(WHOLE)
    for path in places(stored):
        for wrong in WRONG:
            with contextlib.suppress(StateError):
                OptimizationState.from_json(changed(stored, path, wrong))


def test_another_format_is_refused_by_name() -> None:
    with pytest.raises(Damaged, match="has format 2, but .* version reads format 3"):
        read_checkpoint({"format": 2, "step": 1, "lengths": {}, "state": {}}, APPENDED)
