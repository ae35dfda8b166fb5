"""LLMSelector: votes worked out by hand, known best allocations, and a diagnoser that reads."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compound.api.optimize import run_optimization
from compound.components.function import Function
from compound.core.errors import TooManyFailures
from compound.core.example import Example, Score
from compound.evaluation.dataset import Dataset
from compound.evaluation.metrics.custom import custom
from compound.execution.trace import Call, Failure, Trace
from compound.graph.component import Input
from compound.graph.space import Choice
from compound.graph.system import System
from compound.optimization.settings.base import BudgetSettings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.baselines.llm_selector import (
    LLMSelector,
    blame,
    plurality,
    verdict_request,
)
from compound.testing import ScriptedLM

pytestmark = pytest.mark.usefixtures("without_reports")

MODELS = ("small", "medium", "large")


def locate(n: int, model: str) -> str:
    """Where it looks; only ``medium`` finds what is there."""
    return f"row {n}" if model == "medium" else "row ?"


def solve(place: str, model: str) -> str:
    """Only ``large`` can use a place that was found."""
    return f"{place} done" if model == "large" else f"{place} guessed"


async def graded(outputs: Any, example: Example) -> Score:
    """One point for a place that was found and one for a solution."""
    text = outputs["answer"]
    return Score(0.5 * ("?" not in text) + 0.5 * ("done" in text))


def two_steps() -> System:
    place = Function("locator", locate, model=Choice(*MODELS))(n=Input("n", int))
    return System(
        "table",
        outputs={"answer": Function("solver", solve, model=Choice(*MODELS))(place=place)},
        lm="lm",
    )


def rows(n: int) -> list[Example]:
    return [Example(f"e{i}", {"n": i}, {"answer": f"row {i} done"}) for i in range(n)]


METRIC = custom(graded)
BEST = {"locator.model": "medium", "solver.model": "large"}


class TestPlurality:
    @pytest.mark.parametrize(
        ("scores", "current", "chosen", "votes"),
        [
            # every row has one best
            ([[1, 0, 0], [0, 1, 1]], 0, 1, [1, 2]),
            # the second row is tied: both get its vote
            ([[1, 1, 0], [0, 1, 1]], 0, 0, [2, 2]),
            ([[1, 1, 0], [0, 1, 1]], 1, 1, [2, 2]),
            # the current one is not among the best: the first of them
            ([[0, 0], [1, 0], [0, 1]], 0, 1, [0, 1, 1]),
            # all rows tied: nothing changes
            ([[0, 0], [0, 0]], 1, 1, [2, 2]),
            # a mean of 0.64 against one of 0.6, but three rows of five prefer the second
            ([[1, 1, 0.4, 0.4, 0.4], [0.5, 0.5, 0.6, 0.6, 0.6]], 0, 1, [2, 3]),
            # an option that often ties has most votes, though the others are better where they
            # differ
            ([[1, 1, 1, 0], [1, 1, 0, 1], [1, 1, 0, 0]], 2, 0, [3, 3, 2]),
            # a broken option has no vote
            ([[-math.inf, -math.inf], [0, 0]], 0, 1, [0, 2]),
        ],
    )
    def test_votes_are_those_counted_by_hand(
        self, scores: list[list[float]], current: int, chosen: int, votes: list[int]
    ) -> None:
        assert plurality(scores, current) == (chosen, votes)


class TestSelection:
    def test_votes_decide_even_against_the_mean(self, job: Any) -> None:
        """Three rows of five are a little better with ``b``, two much worse."""

        def worth(n: int, kind: str) -> str:
            return {"a": "1" if n < 2 else "0.4", "b": "0.5" if n < 2 else "0.6"}[kind]

        async def read(outputs: Any, example: Example) -> Score:
            return Score(float(outputs["answer"]))

        node = Function("worth", worth, kind=Choice("a", "b"))(n=Input("n", int))
        system = System("votes", outputs={"answer": node})
        _, proposal = job(system, custom(read), rows(5), minibatch=5).run(LLMSelector())
        assert proposal.values == {"worth.kind": "b"}
        assert proposal.before == pytest.approx(0.64)
        assert proposal.after == pytest.approx(0.56)

    def test_the_known_best_allocation_is_found(self, job: Any) -> None:
        assignment = job(two_steps(), METRIC, rows(20))
        states, proposal = assignment.run(LLMSelector())
        assert proposal.values == BEST
        assert (proposal.before, proposal.after) == (0.0, 1.0)
        # small/small, then medium by all votes, then large, then a whole round without a change
        assert [tuple(a.values()) for a in states[-1]["allocations"]] == [
            ("small", "small"),
            ("medium", "small"),
            ("medium", "large"),
            ("medium", "large"),
            ("medium", "large"),
        ]
        assert proposal.tried == len(states[-1]["means"]) == 3 + 2 + 2


class TestAgainstTheReference:
    """The published optimizer, written down from its description, on tables of scores."""

    @settings(max_examples=60)
    @given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=45, max_size=45))
    def test_allocations_and_runs_are_the_same(self, job: Any, table: list[float]) -> None:
        def left(n: int, model: str) -> str:
            return f"{n} {model}"

        def right(text: str, model: str) -> str:
            return f"{text} {model}"

        def worth(row: int, one: str, other: str) -> float:
            return table[9 * row + 3 * MODELS.index(one) + MODELS.index(other)]

        async def read(outputs: Any, example: Example) -> Score:
            row, one, other = outputs["answer"].split()
            return Score(worth(int(row), one, other))

        first = Function("a", left, model=Choice(*MODELS))(n=Input("n", int))
        system = System(
            "t", outputs={"answer": Function("b", right, model=Choice(*MODELS))(text=first)}
        )
        assignment = job(system, custom(read), rows(5), minibatch=5)
        states, _ = assignment.run(LLMSelector())
        expected = [("small", "small")]
        while len(expected) < 9 and (len(expected) < 3 or len(set(expected[-3:])) > 1):
            slot, current = (len(expected) - 1) % 2, expected[-1]
            arms = [(model, current[1]) if slot == 0 else (current[0], model) for model in MODELS]
            scores = [[worth(int(str(e.inputs["n"])), *arm) for arm in arms] for e in rows(5)]
            votes = [sum(row[i] == max(row) for row in scores) for i in range(3)]
            tied = [arm for arm, count in zip(arms, votes, strict=True) if count == max(votes)]
            expected.append(current if current in tied else tied[0])
        found = states[-1]["allocations"]
        assert [tuple(allocation.values()) for allocation in found] == expected
        assert assignment.spent == 5 * 3 * (
            len(expected) - 1
        )  # rows, models and steps: nothing is cached

    def test_the_diagnoser_reads_every_run_of_every_option(self, job: Any) -> None:
        assignment = job(two_steps(), METRIC, rows(20), lambda: ScriptedLM(accuser))
        states, _ = assignment.run(LLMSelector(alpha=1.0))
        steps = len(states[-1]["allocations"]) - 1
        assert len(assignment.proposal_requests) == assignment.spent == 20 * 3 * steps


def accuser(message: str) -> str:
    """Blames the step that did not do its part."""
    (step,) = re.findall(r"Is the step (\w+) responsible", message)
    (result,) = re.findall(r"The result: answer: (.*)", message)
    guilty = ("?" in result) if step == "locator" else ("done" not in result)
    if not guilty and "?" not in result and "done" in result:
        return "All is well. [correct answer]"
    return f"I looked. [final answer: {'Yes' if guilty else 'No'}]"


async def strict(outputs: Any, example: Example) -> Score:
    """All or nothing, so that one right step alone earns nothing."""
    return Score(float("?" not in outputs["answer"] and "done" in outputs["answer"]))


class TestDiagnoser:
    @pytest.mark.parametrize(
        ("reply", "expected"),
        [
            ("Because of it. [final answer: Yes]", 1.0),
            ("Not it. [final answer: No]", 0.0),
            ("Fine. [correct answer]", 0.0),
            ("[FINAL ANSWER:yes]", 1.0),
            ("[ Final  Answer : NO ]", 0.0),
            ("First I thought [final answer: No], but [final answer: Yes]", 1.0),
            ("[final answer: Yes] or rather [correct answer]", 0.0),
            ("[final answer: maybe]", None),
            ("final answer: Yes", None),
            ("yes", None),
            ("[final answer: Yes", None),
            ("", None),
        ],
    )
    def test_verdicts(self, reply: str, expected: float | None) -> None:
        assert blame(reply) == expected

    def test_the_judge_sees_the_steps_the_result_and_what_was_expected(self) -> None:
        calls = (
            Call("locator", "locator", "locator", (), {"n": 3}, {"output": "row 3"}),
            Call(
                "solver",
                "solver",
                "solver",
                ("locator",),
                {"place": "row 3"},
                {},
                Failure("error", "asleep"),
            ),
        )
        trace = Trace(
            "e3", "", 0, 0, {"n": 3}, calls, failure=Failure("error", "asleep"), score=0.0
        )
        text = verdict_request(two_steps(), trace, rows(4)[3], "solver").messages[0].content
        assert "locator reads $n and writes output\nsolver reads $locator and writes output" in text
        assert (
            "One run of it read n: 3\nlocator wrote output: row 3\nsolver wrote nothing (failed: asleep)"
            in text
        )
        assert "The result: the run failed: asleep\nThe expected result: answer: row 3 done" in text
        assert "Is the step solver responsible" in text

    def test_it_finds_what_the_score_alone_cannot_see(self, job: Any) -> None:
        """With all-or-nothing scores no single change helps; the verdicts see each step's own part."""
        _, blind = job(two_steps(), custom(strict), rows(10)).run(LLMSelector())
        assert blind.values == {}
        _, seeing = job(two_steps(), custom(strict), rows(10), lambda: ScriptedLM(accuser)).run(
            LLMSelector(1.0)
        )
        assert seeing.values == BEST
        assert (seeing.before, seeing.after) == (0.0, 1.0)

    @pytest.mark.parametrize("alpha", [0.0, 1.0])
    def test_an_option_that_fails_only_loses(self, job: Any, alpha: float) -> None:
        def fragile(n: int, model: str) -> str:
            if model == "large":
                raise ValueError("no such model")
            return locate(n, model)

        def judge(message: str) -> str:
            return "[final answer: No]"

        node = Function("f", fragile, model=Choice(*MODELS))(n=Input("n", int))
        system = System("fragile", outputs={"answer": node}, lm="lm")
        for start in MODELS:
            target = system.bind({"f.model": start})
            _, proposal = job(target, METRIC, rows(8), lambda: ScriptedLM(judge)).run(
                LLMSelector(alpha)
            )
            assert {**target.configuration, **proposal.values} == {"f.model": "medium"}

    @pytest.mark.parametrize("alpha", [0.0, 1.0])
    def test_when_all_options_fail_something_is_broken(self, job: Any, alpha: float) -> None:
        def broken(n: int, model: str) -> str:
            raise ValueError("no key")

        node = Function("f", broken, model=Choice(*MODELS))(n=Input("n", int))
        with pytest.raises(TooManyFailures, match="no key"):
            job(System("broken", outputs={"answer": node}), METRIC, rows(8)).run(LLMSelector(alpha))


@pytest.mark.parametrize("method", ["llm_selector", "llm_selector_diagnoser"])
def test_the_methods_optimize_a_system(tmp_path: Path, method: str) -> None:
    def data(kind: str) -> list[dict[str, Any]]:
        return [{"id": f"{kind}{i}", "n": i} for i in range(30)]

    result = run_optimization(
        two_steps(),
        Dataset.of(train=data("a"), valid=data("b"), test=data("c")),
        METRIC,
        OptimizeSettings(method=method, budget=BudgetSettings(system_runs=600)),
        run_dir=tmp_path / "run",
        engines={"lm": ScriptedLM(accuser)},
    )
    assert dict(result.best) == BEST
    assert result.test_after is not None
    assert result.test_after.mean == 1.0
