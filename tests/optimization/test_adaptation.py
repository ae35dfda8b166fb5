"""Jobs of a method are adapted to the train examples and the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compound.api.optimize import make_problem, optimize
from compound.components.llm import LLM
from compound.engine import Request
from compound.errors import QuotaExhausted
from compound.evaluation.dataset import Dataset
from compound.evaluation.metrics.custom import custom
from compound.graph.component import Input
from compound.graph.space import Choice
from compound.graph.system import System
from compound.optimization.adaptation import JOINT_NOTE, with_method
from compound.optimization.method import Job
from compound.optimization.problem import Problem
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
        return "x" * request.max_tokens


def engine(_: str) -> ScriptedLM:
    return Writer([])


def data() -> Dataset:
    rows = [{"id": f"t{n}", "question": f"q{n}"} for n in range(30)]
    return Dataset.of(train=rows, valid=[{"id": f"v{n}", "question": f"w{n}"} for n in range(40)])


def settings(runs: float | None, method: str = "optimas") -> OptimizeSettings:
    budget = {} if runs is None else {"system_runs": runs}
    return make_settings({"method": method, "minibatch": 8, "candidates": 4, "budget": budget})


def problem(runs: float | None, method: str = "optimas") -> Problem:
    return make_problem(chain(), data(), METRIC, settings(runs, method), engine, Path())


def test_a_budget_for_all_jobs_keeps_them_apart() -> None:
    for runs in (600, None):
        assert {job.optimizer for job in problem(runs).method.jobs} == {"local"}


@pytest.mark.parametrize("runs", [100, 120])
def test_a_budget_that_leaves_parameters_out_searches_all_of_them_together(runs: float) -> None:
    method = problem(runs).method
    (job,) = method.jobs
    assert (job.optimizer, set(job.keys)) == ("joint", {f"step{n}.max_tokens" for n in range(COMPONENTS)})
    assert JOINT_NOTE in method.notes


def test_it_then_proposes_what_search_proposes() -> None:
    found, searched = problem(100), problem(100, "search")
    assert [job.keys for job in found.method.jobs] == [job.keys for job in searched.method.jobs]
    joint = found.method.optimizers["joint"]
    assert joint == searched.method.optimizers["joint"]


def test_jobs_of_other_parameters_remain() -> None:
    given = problem(100)
    local = [Job("local", (key,)) for key in given.method.jobs[0].keys]
    other = Job("weights", ("step0.weights",))
    adapted = with_method(given, replace(given.method, jobs=[*local, other], notes=()))
    assert [job.optimizer for job in adapted.method.jobs] == ["joint", "weights"]


def test_a_run_is_resumed_with_a_budget_for_all_jobs(tmp_path: Path) -> None:
    """The history then has a job that the method no longer has."""
    lm = Writer([])

    def run(runs: float) -> set[str]:
        result = optimize(
            chain(), data(), METRIC, settings(runs), run_dir=tmp_path / "run", engines={"scripted": lm}
        )
        return {job["optimizer"] for job in summarize(result.path)["jobs"]}

    lm.most = 40 + COMPONENTS  # equal later calls come from the cache: credit ends in the joint job
    with pytest.raises(QuotaExhausted):
        run(100)
    lm.most = None
    assert run(900) == {"joint", "local"}
