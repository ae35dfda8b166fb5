"""Jobs of a method are adapted to the train examples and the budget."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.api.optimize import make_problem, optimize
from compound.components.llm import LLM
from compound.engine import Request
from compound.errors import QuotaExhausted
from compound.evaluation.dataset import Dataset
from compound.evaluation.metrics.custom import custom
from compound.graph.component import Input
from compound.graph.space import Choice
from compound.graph.system import System
from compound.optimization.adaptation import with_method
from compound.optimization.method import Job
from compound.optimization.problem import Problem
from compound.optimization.prospects import JOINT, outlook, plan_by_runs
from compound.report import summarize
from compound.settings.optimize import OptimizeSettings, make_settings
from compound.testing import ScriptedLM

COMPONENTS = 6


def chain() -> System:
    """Six components in a row, each with a choice between three numbers of tokens."""
    value: Any = Input("question")
    for number in range(COMPONENTS):
        value = LLM(f"step{number}", prompt="Go on.", max_tokens=Choice(8, 16, 24, value=8))(text=value)
    return System("chain", {"answer": value}, lm="scripted")


def lengths(outputs: Any, example: Any) -> float:
    return min(1.0, len(outputs["answer"]) / 24)


METRIC = custom(lengths, bounds=(0, 1))


class Writer(ScriptedLM):
    """A model that writes as much as it may, and has no credit after ``most`` requests."""

    most: int | None = None

    def _reply(self, request: Request, number: int) -> str:
        if self.most is not None and number >= self.most:
            raise QuotaExhausted("no credit left")
        read = sha256(request.messages[-1].text.encode()).hexdigest()
        return read[: request.max_tokens]  # answers to different questions differ: nothing is cached


def engine(_: str) -> ScriptedLM:
    return Writer([])


def data() -> Dataset:
    rows = [{"id": f"t{n}", "question": f"q{n}"} for n in range(30)]
    return Dataset.of(train=rows, valid=[{"id": f"v{n}", "question": f"w{n}"} for n in range(40)])


def settings(runs: float | None, method: str = "optimas", minibatch: int = 8) -> OptimizeSettings:
    budget = {} if runs is None else {"system_runs": runs}
    return make_settings({
        "method": method, "minibatch": minibatch, "candidates": 4, "valid_size": 40, "budget": budget
    })  # fmt: skip


def problem(runs: float | None, method: str = "optimas", minibatch: int = 8) -> Problem:
    return make_problem(chain(), data(), METRIC, settings(runs, method, minibatch), engine, Path())


def test_a_budget_for_all_jobs_keeps_them_apart() -> None:
    for runs in (600, None):
        assert {job.optimizer for job in problem(runs).method.jobs} == {"local"}


@pytest.mark.parametrize("runs", [100, 120])
def test_a_budget_that_leaves_parameters_out_searches_all_of_them_together(runs: float) -> None:
    method = problem(runs).method
    (job,) = method.jobs
    assert (job.optimizer, set(job.keys)) == ("joint", {f"step{n}.max_tokens" for n in range(COMPONENTS)})
    told = outlook(problem(runs))["told"]
    assert JOINT in told


@pytest.mark.parametrize("runs", [90, 100, 120])
def test_it_then_has_the_plan_of_search(runs: float) -> None:
    found, searched = problem(runs), problem(runs, "search")
    assert found.method.optimizers["joint"] == searched.method.optimizers["joint"]
    assert plan_by_runs(found) == plan_by_runs(searched)


def test_jobs_of_other_parameters_keep_their_share() -> None:
    given = problem(100).method.separate
    assert given is not None
    other = Job("weights", ("step0.weights",), weight=2.0)
    adapted = with_method(problem(100), replace(given, jobs=[*given.jobs, other]))
    shares = {job.optimizer: job.weight for job in adapted.method.jobs}
    assert shares == {"joint": COMPONENTS, "weights": 2.0}


def test_a_budget_that_holds_no_joint_job_keeps_them_apart() -> None:
    """A joint candidate costs whole runs, and one of the last component a sixth of a run."""
    for runs in range(85, 100):
        method = problem(runs, minibatch=4).method
        if method.separate is None:
            assert {job.optimizer for job in method.jobs} == {"local"}
            return
    pytest.fail("every budget holds a joint job")


@pytest.mark.parametrize(("first", "then", "optimizer"), [(100, 240, "joint"), (200, 150, "local")])
def test_a_resumed_run_keeps_its_jobs_whatever_its_budget(
    first: float, then: float, optimizer: str, tmp_path: Path
) -> None:
    lm = Writer([])

    def run(runs: float) -> cp.Result:
        return optimize(
            chain(), data(), METRIC, settings(runs), run_dir=tmp_path / "run", engines={"scripted": lm}
        )

    lm.most = 40 * COMPONENTS + 20  # credit ends in the first job
    with pytest.raises(QuotaExhausted):
        run(first)
    lm.most = None
    result = run(then)
    assert {job["optimizer"] for job in summarize(result.path)["jobs"]} == {optimizer}
    assert result.accepted
