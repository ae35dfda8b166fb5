"""Small budgets: what can be tried is tried, what cannot is said before anything is spent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compound.api.optimize import run_optimization
from compound.api.result import Result
from compound.components.function import Function
from compound.components.llm import LLM
from compound.components.selector import Selector
from compound.core.errors import DataError, DeclarationError
from compound.core.example import Metric
from compound.evaluation.dataset import Dataset
from compound.evaluation.metrics.built_in import exact_match
from compound.evaluation.metrics.custom import custom
from compound.graph.component import Input
from compound.graph.space import Choice, Float, Int, Text
from compound.graph.system import System
from compound.optimization.budget_plan import job_minibatch
from compound.optimization.method import Job
from compound.optimization.runs.recorder import Interrupted, Recorder
from compound.optimization.settings.optimize import make_settings
from compound.report import summarize, terminal_summary
from compound.testing import ScriptedLM


def rows(name: str, n: int) -> list[dict[str, str]]:
    return [{"id": f"{name}{i}", "question": f"{name} {i}?", "answer": "yes"} for i in range(n)]


def selecting(right: str = "9") -> System:
    """A selector with more options than candidates, and a large number space beside it."""

    def answer(question: str, pick: str, weight: float, count: int) -> str:
        return "yes" if right in ("", pick) else "no"

    pick = Selector("pick", *map(str, range(12)))(question=Input("question"))
    step = Function("step", answer, weight=Float(0.0, 1.0, value=0.5), count=Int(1, 90, value=5))
    return System("selecting", {"answer": step(question=Input("question"), pick=pick)})


def two_options() -> System:
    """A selector of which the second option is right."""
    pick = Selector("pick", "no", "yes")(question=Input("question"))

    def answer(question: str, pick: str) -> str:
        return pick

    step = Function("step", answer)(question=Input("question"), pick=pick)
    return System("two", {"answer": step})


def run(
    folder: Path,
    system: System,
    runs: float,
    valid: int = 10,
    lm: ScriptedLM | None = None,
    metric: Metric | None = None,
    **settings: Any,
) -> Result:
    resolved = make_settings({"valid_size": valid, "budget": {"system_runs": runs}, **settings})
    data = Dataset.of(train=rows("t", 40), valid=rows("v", valid), test=rows("x", 5))
    engines = {"lm": lm or ScriptedLM(lambda _: "no")}
    chosen = metric or exact_match("answer")
    return run_optimization(system, data, chosen, resolved, run_dir=folder / "run", engines=engines)


def events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.path / "events.jsonl").read_text().splitlines()]


def test_a_job_whose_share_is_too_small_takes_what_is_free(tmp_path: Path) -> None:
    """Two jobs with a share below two minibatches each: both used to be passed over."""
    answer = LLM("answerer", prompt=Text("Answer."), max_tokens=Choice(8, 16))(
        question=Input("question")
    )
    system = System("two", {"answer": answer}, lm="lm")
    result = run(tmp_path, system, 10 + 10 + 20, lm=ScriptedLM(lambda _: "no"))
    jobs = summarize(result.path)["jobs"]
    assert any(job["tried"] and job["runs"] for job in jobs)


def test_a_budget_that_holds_nothing_is_refused_with_what_would_be_enough(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="system_runs=13 is too small to try") as refused:
        run(tmp_path, selecting(), 13)
    assert (
        "the initial evaluation takes 10 system runs, a decision 20, and the smallest job 8"
        in str(refused.value)
    )
    assert "set at least 38" in refused.value.hint
    assert not (tmp_path / "run").exists()
    assert run(tmp_path, selecting(), 38).spent["system_runs"] > 10


def test_a_smaller_validation_split_is_named_where_it_would_do(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError) as refused:
        run(tmp_path, selecting(), 30)
    assert refused.value.hint == "set at least 38, or lower optimize.valid_size to 7"
    assert run(tmp_path, selecting(), 30, valid=7).spent["system_runs"] > 7


def test_failed_runs_must_not_score_as_well_as_the_best_ones(tmp_path: Path) -> None:
    """Regression test: with scores of -1 to 0, a change that failed was accepted for its failure score of 0."""
    loss = custom(lambda outputs, example: -0.5, "loss", bounds=(-1, 0))
    with pytest.raises(DeclarationError, match="maximum score of metric 'loss' is 0") as refused:
        run(tmp_path, selecting(), 100, metric=loss)
    assert refused.value.hint == "set optimize.failure_score to its minimum score, -1"
    assert not (tmp_path / "run").exists()
    assert run(tmp_path, selecting(), 100, metric=loss, failure_score=-1).spent["system_runs"] > 10


class TestTooFewExamples:
    def test_too_few_for_any_decision_are_told_the_number_needed(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="4 validation examples cannot show an") as refused:
            run(tmp_path, selecting(), 200, valid=4)
        assert "at alpha=0.05: the smallest p-value is 0.0625" in refused.value.message
        assert refused.value.hint == "provide at least 5; 40 is a good default"
        assert not (tmp_path / "run").exists()

    def test_too_few_for_all_decisions_are_told_the_number_needed(self, tmp_path: Path) -> None:
        """Six examples have a smallest p of 1/64: 0.05 holds three such levels."""
        result = run(tmp_path, selecting("none"), 400, valid=6, iterations=5, method="random")
        (outlook,) = (event for event in events(result) if event["event"] == "outlook")
        assert (
            "6 validation examples can show an improvement in at most 3 decisions at alpha=0.05: 5 need at "
            "least 7 (optimize.valid_size)"
        ) in outlook["told"]
        assert outlook["detection"]["level"] == pytest.approx(0.05 / 3)
        assert outlook["detection"]["least_p"] == 1 / 64

    def test_a_metric_without_bounds_is_named(self, tmp_path: Path) -> None:
        metric = custom(lambda outputs, example: float(outputs["answer"] == "yes"), "own")
        result = run(tmp_path, two_options(), 100, metric=metric)
        (outlook,) = (event for event in events(result) if event["event"] == "outlook")
        (line,) = (
            li for li in outlook["told"] if li.startswith("metric 'own' declares no bounds: ")
        )
        assert line.endswith("declare them: cp.metrics.custom(…, bounds=(0, 1))")
        assert not outlook["detection"]["bounded"]
        assert "The range of the scores is unknown: p is the larger one" in result.report

    def test_an_alpha_below_every_p_is_refused(self, tmp_path: Path) -> None:
        metric = custom(lambda outputs, example: 1.0, "own")
        with pytest.raises(DeclarationError, match="without the bounds of metric 'own'") as refused:
            run(tmp_path, selecting(), 200, valid=40, alpha=1e-5, metric=metric)
        assert "declare the bounds of the metric" in refused.value.hint


def test_a_score_outside_the_bounds_is_a_warning_in_the_report(tmp_path: Path) -> None:
    metric = custom(
        lambda outputs, example: 1.5 * (outputs["answer"] == "yes"), "own", bounds=(0, 1)
    )
    result = run(tmp_path, two_options(), 100, metric=metric)
    assert "Warning: metric 'own' returned 1.5 on example " in result.report
    assert "Correct the metric, or the bounds it declares, and repeat the run." in result.report


class TestWords:
    def test_nothing_was_better_on_train(self, tmp_path: Path) -> None:
        told = terminal_summary(run(tmp_path, selecting("none"), 100).path)
        assert "tried on train examples, none better than the incumbent" in told

    def test_better_but_not_beyond_chance(self, tmp_path: Path) -> None:
        """One of twelve options answers the first three validation questions, and most of train."""

        def answer(question: str, pick: str) -> str:
            known = question.startswith("t") or question in ("v 0?", "v 1?", "v 2?")
            return "yes" if known and pick == "3" else "no"

        pick = Selector("pick", *map(str, range(4)))(question=Input("question"))
        step = Function("step", answer)(question=Input("question"), pick=pick)
        result = run(
            tmp_path,
            System("some", {"answer": step}),
            100,
            iterations=1,
            accept="supported",
            alpha=0.001,
        )
        told = terminal_summary(
            result.path
        )  # of two looks, with eight train examples, at 40 % of the level
        assert (
            "1 scored higher, but not significantly (smallest p = 0.000488, above the level 0.0004)"
            in told
        )

    def test_none_scored_higher(self, tmp_path: Path) -> None:
        def answer(question: str, pick: str) -> str:
            return "yes" if question.startswith("t") and pick == "3" else "no"

        pick = Selector("pick", *map(str, range(4)))(question=Input("question"))
        step = Function("step", answer)(question=Input("question"), pick=pick)
        told = terminal_summary(
            run(tmp_path, System("some", {"answer": step}), 100, iterations=1).path
        )
        assert "of 1 candidate tested on the validation split, none scored higher" in told


def test_the_start_and_the_report_say_what_can_be_detected(tmp_path: Path) -> None:
    result = run(tmp_path, selecting("none"), 100)
    first = next(event for event in events(result) if event["event"] == "outlook")
    assert first["detection"]["examples"] == 10
    assert first["jobs"][0]["candidates"] > 0
    assert "With 10 validation examples, a mean gain of " in result.report
    detectable = "or more is supported with a probability of 80%, in 1 decision"
    assert result.report.count(detectable) == 1
    assert detectable not in terminal_summary(result.path)  # the start said it
    assert "Detectable gains" in result.report


def test_parameters_that_cannot_be_tried_are_named_before(tmp_path: Path) -> None:
    plan = LLM("planner", prompt=Text("Plan."))(question=Input("question"))
    answer = LLM("answerer", prompt=Text("Answer."))(question=Input("question"), plan=plan)
    system = System("two", {"answer": answer}, lm="lm")
    result = run(tmp_path, system, 10 + 10 + 9, method="opro")
    event = events(result)[0]
    idle = [key for job in event["jobs"] if not job["candidates"] for key in job["keys"]]
    assert len(idle) == 1
    assert any(
        f"cannot be tried with optimize.budget.system_runs=29: {idle[0]}" in line
        for line in event["told"]
    )
    tried = {key for job in summarize(result.path)["jobs"] if job["runs"] for key in job["keys"]}
    assert not tried & set(idle)


class TestRuns:
    def test_cheap_candidates_leave_runs_for_larger_minibatches(self) -> None:
        """A job covers two minibatches at whole price, and two candidates: 2.5 minibatches at a quarter."""
        assert [job_minibatch(8, runs, price=0.25) for runs in (5, 13, 19.9, 20, 400)] == [
            2,
            5,
            7,
            8,
            8,
        ]
        assert job_minibatch(8, 16, price=0.0) == 8

    def test_a_job_needs_the_incumbent_and_a_candidate_on_a_minibatch(self) -> None:
        assert Job("any", ()).least(8) == 16
        assert Job("any", ()).least(8, price=0.25) == 10
        assert Job("any", ()).least(8, price=0.0) == 8
        assert Job("steps", (), step=20.0).least(8, price=0.25) == 20


@pytest.mark.usefixtures("without_reports")
class TestAutomaticSize:
    """``valid_size: auto`` leaves half of a small budget for the search."""

    @staticmethod
    def run(folder: Path, runs: float, *, stopped: bool = False, **settings: Any) -> Result:
        data = Dataset.of(train=rows("t", 40), valid=rows("v", 60), test=rows("x", 5))
        resolved = make_settings({"budget": {"system_runs": runs}, **settings})
        return run_optimization(
            two_options(),
            data,
            exact_match("answer"),
            resolved,
            run_dir=folder / "run",
            on_start=Recorder.stop if stopped else None,
        )

    @staticmethod
    def told(result: Result) -> str:
        (outlook,) = (event for event in events(result) if event["event"] == "outlook")
        return "\n".join(outlook["told"])

    @pytest.mark.parametrize(("runs", "size"), [(60, 15), (159, 39)])
    def test_a_small_budget_uses_a_quarter(self, tmp_path: Path, runs: float, size: int) -> None:
        result = self.run(tmp_path, runs)
        (decision,) = (event for event in events(result) if event["event"] == "decision")
        assert decision["before"]["n"] == size
        line = (
            f"{size} validation examples are used, so that half of the {runs} system runs is left"
        )
        assert line in self.told(result)
        assert result.accepted

    @pytest.mark.parametrize("given", [{}, {"valid_size": 40}])
    def test_a_larger_one_uses_forty(self, tmp_path: Path, given: dict[str, Any]) -> None:
        result = self.run(tmp_path, 200, **given)
        assert json.loads((result.path / "config.json").read_text())["data"]["valid"]["n"] == 40
        assert "system runs is left" not in self.told(result)

    def test_a_resumed_run_keeps_its_examples(self, tmp_path: Path) -> None:
        with pytest.raises(Interrupted):
            self.run(tmp_path, 60, stopped=True)
        result = self.run(tmp_path, 200)
        (decision,) = (event for event in events(result) if event["event"] == "decision")
        assert decision["before"]["n"] == 15
