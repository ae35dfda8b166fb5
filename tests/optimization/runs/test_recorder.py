"""The recorder: a run stops where it was asked to, knows what it spent, and shares without cheating."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from compound import LLM, Budget, Example, Executor, Input, System, Trace
from compound.core.errors import BudgetExhausted, RunDirectoryError
from compound.evaluation.evaluate import Evaluation, EvaluationRules, ScoredRun, evaluate
from compound.evaluation.metrics.scoring import PassAt
from compound.execution.budget import Meter
from compound.ext import Usage
from compound.metrics import exact_match
from compound.optimization.runs.directory import RunDirectory, read_records
from compound.optimization.runs.recorder import Interrupted, Recorder
from compound.optimization.runs.state import OptimizationState
from compound.testing import ScriptedLM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def recorder(folder: Path) -> Iterator[Recorder]:
    made = Recorder(RunDirectory.create(folder, "", {}))
    yield made
    made.close()


def reopened(folder: Path, **options: Any) -> Recorder:
    return Recorder(RunDirectory.open(folder), **options)


def beside(recorder: Recorder) -> Recorder:
    """Return the recorder of another run, which uses the calls of a run."""
    made = Recorder(RunDirectory.create(recorder.run.path.with_name("other"), "", {}))
    made.use_calls_of(recorder.run.folder)
    return made


def names(folder: Path) -> list[str]:
    return [event["event"] for event in read_records(folder, "events.jsonl")]


def test_a_checkpoint_keeps_all_of_an_evaluation() -> None:
    """Regression test: a resumed run took means of repeats for pass@k, and lost what a judge spent."""
    rows = tuple(ScoredRun("e0", i, float(i < 1)) for i in range(3))
    made = Evaluation(
        "c", rows, bounds=(0, 1), metric_usage=Usage(2, 30, 4), pass_at=PassAt(2, 0.5)
    )
    before = OptimizationState.model_validate(
        OptimizationState(before=made).model_dump(mode="json")
    ).before
    assert before == made
    assert before is not None
    assert before.mean == pytest.approx(2 / 3)  # two of the three pairs of runs hold the first one


@pytest.mark.parametrize(
    ("name", "value", "ok"),
    [
        ("pass_at", [0, 0.5], False),
        ("pass_at", [2, float("nan")], False),
        ("pass_at", [2], False),
        ("metric_usage", {"calls": -1}, False),
        ("pass_at", None, True),
        ("metric_usage", None, True),
    ],
)
def test_a_stored_evaluation_is_validated(name: str, value: object, *, ok: bool) -> None:
    document = {**Evaluation("c", (ScoredRun("e0", 0, 1.0),)).to_json(), name: value}
    if ok:
        assert OptimizationState.model_validate({"before": document}).before is not None
    else:
        with pytest.raises(ValidationError):
            OptimizationState.model_validate({"before": document})


class TestEvents:
    def test_the_listener_hears_what_is_recorded(self, folder: Path) -> None:
        heard: list[Mapping[str, Any]] = []
        recorder = Recorder(RunDirectory.create(folder, "", {}), listener=heard.append)
        recorder.event("job", number=1)
        recorder.close()
        (stored,) = read_records(folder, "events.jsonl")
        assert stored == heard[0]

    def test_what_was_spent_is_restored_and_goes_on(self, recorder: Recorder, folder: Path) -> None:
        search, test = Meter(), Meter()
        recorder.attach_meters(search, test)
        search.usage += Usage(3, 10, 5, 0.5)
        search.charge_runs(2.5)
        test.usage += Usage(1, 1, 1)
        recorder.event("job")
        search.usage += Usage(100, 100, 100)
        recorder.close()
        again = reopened(folder)
        search, test = Meter(), Meter()
        again.attach_meters(search, test)
        assert (search.usage, search.system_runs) == (Usage(3, 10, 5, 0.5), 2.5)
        assert test.usage == Usage(1, 1, 1)
        again.close()


class TestStopping:
    def test_a_stop_file_ends_it_at_a_checkpoint(self, recorder: Recorder, folder: Path) -> None:
        recorder.event("one")
        (folder / "STOP").touch()
        recorder.state.announced = 7
        with pytest.raises(Interrupted, match="progress is saved"):
            recorder.event("two")
        recorder.close()
        again = reopened(folder)
        assert again.state.announced == 7
        assert names(folder) == ["one", "two"]
        again.event("three")  # the request was for the other attempt
        again.close()

    def test_stop_ends_the_run_at_a_checkpoint(self, recorder: Recorder, folder: Path) -> None:
        recorder.stop()
        with pytest.raises(Interrupted):
            recorder.event("one")
        assert names(folder) == ["one"]

    def test_a_finished_run_is_never_interrupted(self, recorder: Recorder, folder: Path) -> None:
        """Else it would have no report, and nothing could be resumed to write one."""
        (folder / "STOP").touch()
        recorder.stop()
        recorder.state.done = True
        recorder.event("done")
        assert names(folder) == ["done"]


class TestBroken:
    def test_a_run_not_restored_is_let_go_again(self, recorder: Recorder, folder: Path) -> None:
        recorder.event("one")
        recorder.close()
        (folder / "checkpoint.json").write_text("{", encoding="utf-8")
        for _ in range(2):  # the first attempt holds no lock afterwards
            with pytest.raises(RunDirectoryError, match=r"checkpoint\.json cannot be read"):
                reopened(folder)

    def test_a_cache_that_is_none_is_refused_and_the_run_let_go(self, folder: Path) -> None:
        RunDirectory.create(folder, "", {}).close()
        (folder / "cache.sqlite").write_text("not a database" * 100, encoding="utf-8")
        for _ in range(2):
            with pytest.raises(RunDirectoryError, match="not a usable cache"):
                reopened(folder)


class TestTraces:
    def test_traces_are_recorded_with_split_and_gold(self, recorder: Recorder) -> None:
        trace = Trace("e1", "digest", 0, 0, {"q": "?"}, (), {"answer": "x"}).with_score(
            1.0, "right"
        )
        gold = {"answer": "x", "n": 3, "long": "y" * 301, "list": [1]}
        recorder.trace("valid")(Example("e1", {"q": "?"}, gold), trace)
        (stored,) = recorder.run.read("traces.jsonl")
        assert stored["split"] == "valid"
        assert stored["gold"] == {"answer": "x", "n": 3}
        assert (stored["score"], stored["feedback"]) == (1.0, "right")
        assert json.loads(json.dumps(stored)) == stored


ASKED = LLM("a", prompt="Say", temperature=1.0)(x=Input("x", str))
SYSTEM = System("s", outputs={"answer": ASKED}, lm="lm")
ROWS = [Example(f"e{i}", {"x": f"word{i}"}, {"answer": "yes"}) for i in range(12)]


def measured(
    recorder: Recorder, lm: ScriptedLM, meter: Meter, rows: list[Example], concurrency: int = 4
) -> Evaluation:
    executor = Executor({"lm": lm}, cache=recorder.cache, meter=meter)
    return asyncio.run(
        evaluate(executor, SYSTEM, rows, exact_match("answer"), rules=EvaluationRules(concurrency))
    )


class TestSharing:
    """A run that uses the calls of another pays as if it had called: the comparison stays fair."""

    def lm(self) -> ScriptedLM:
        return ScriptedLM(lambda message, rng: "yes" if rng.random() < 0.5 else "no")

    def test_borrowed_calls_are_charged_but_not_made_again(self, recorder: Recorder) -> None:
        lm = self.lm()
        alone = Meter()
        own = measured(recorder, lm, alone, ROWS)
        other = beside(recorder)
        meter = Meter()
        borrowed = measured(other, lm, meter, ROWS)
        other.close()
        assert len(lm.requests) == len(ROWS)
        assert borrowed.to_json() == own.to_json()
        assert (meter.usage, meter.system_runs) == (alone.usage, alone.system_runs)
        assert meter.system_runs == len(ROWS)

    def test_borrowed_calls_above_a_limit_are_charged_when_it_is_raised(
        self, recorder: Recorder
    ) -> None:
        lm, meters = self.lm(), (Meter(Budget(calls=5)), Meter())
        measured(recorder, lm, Meter(), ROWS)
        other = beside(recorder)
        other.attach_meters(*meters)
        with pytest.raises(BudgetExhausted):
            measured(other, lm, meters[0], ROWS)
        other.event("stopped")
        other.close()
        again, meters = reopened(other.run.path), (Meter(Budget(calls=12)), Meter())
        again.use_calls_of(recorder.run.folder)
        again.attach_meters(*meters)
        assert meters[0].usage.calls == 5
        measured(again, lm, meters[0], ROWS)
        again.close()
        assert meters[0].usage.calls == len(lm.requests) == len(ROWS)

    def test_what_the_run_never_asked_is_called_and_kept_apart(self, recorder: Recorder) -> None:
        lm, meter = self.lm(), Meter()
        measured(recorder, lm, Meter(), ROWS[:5])
        other = beside(recorder)
        measured(other, lm, meter, ROWS)
        assert len(lm.requests) == len(ROWS)
        other.close()
        measured(recorder, lm, Meter(), ROWS)
        assert len(lm.requests) == len(ROWS) + len(ROWS) - 5
