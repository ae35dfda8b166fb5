"""The loop: it finds what there is to find, claims nothing else, and keeps its plan, budget and seed."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated.relays import Relay
from compound.api.optimize import make_problem, run_optimization
from compound.api.result import Result
from compound.components.flow import Loop, Map
from compound.components.function import Function
from compound.components.hyperparameter import Hyperparameter
from compound.components.llm import LLM
from compound.core.errors import (
    BudgetExhausted,
    DeclarationError,
    RunDirectoryError,
)
from compound.core.narrowing import entry
from compound.evaluation.dataset import Dataset
from compound.evaluation.evaluate import Evaluation
from compound.evaluation.metrics.built_in import exact_match
from compound.evaluation.metrics.custom import custom
from compound.execution.budget import Meter
from compound.graph.component import Input
from compound.graph.configuration import load
from compound.graph.space import Choice, Demos, Float, Int, Text
from compound.graph.system import System
from compound.optimization.budget_plan import BudgetPlan, decision_cost, make_plan, stochastic
from compound.optimization.loop.loop import OptimizationLoop
from compound.optimization.method import Job, Method, Problem, Progress, Proposal, Task
from compound.optimization.prices import Prices, estimate_prices
from compound.optimization.runs.changes import FORMAT, list_changes
from compound.optimization.runs.directory import RunDirectory, read_json, read_records
from compound.optimization.runs.recorder import Interrupted, Recorder
from compound.optimization.runs.state import OptimizationState
from compound.optimization.settings.base import BudgetSettings
from compound.optimization.settings.optimize import OptimizeSettings, make_settings
from compound.optimizers.baselines.random import RandomSearch
from compound.optimizers.scheduling import Uniform
from compound.report import write as write_report
from compound.testing import ScriptedLM
from optimas_settings import proposals

pytestmark = pytest.mark.usefixtures("without_reports")

ROOT = Path(__file__).parents[3]
METRIC = exact_match("answer")


def asked_for(message: str) -> str:
    found: list[str] = re.findall(r"Question: \w+ \w+ \w+ (\d+)", message)
    return found[-1]


def student(message: str, rng: np.random.Generator) -> str:
    """Right 20 % of the time; asked for the answer alone 60 %; and 10 % more for each demonstration."""
    chance = 0.2 + 0.4 * ("nothing else" in message or "few words" in message)
    chance += 0.1 * (message.count("Question:") - 1)
    return asked_for(message) if rng.random() < chance else "dunno"


def teacher(message: str, rng: np.random.Generator) -> str:
    """Answer as a student, and write prompts when asked for one."""
    if "<prompt>" not in message:
        return student(message, rng)
    return f"<prompt>Version {rng.integers(100)}:\ngive the answer in few words.</prompt>"


def spoil(answer: str, w: float) -> str:
    """Anything below 0.7 keeps the answer."""
    return answer if w < 0.7 else f"about {answer}"


def demo(w: float = 0.5, lm: str = "lm", **settings: Any) -> System:
    given = {
        "prompt": Text("Answer the question."),
        "demos": Demos(max=3),
        "temperature": 1.0,
        **settings,
    }
    answer = LLM("answerer", **given)(question=Input("question", str))
    return System(
        "demo",
        outputs={"answer": Function("spoil", spoil, w=Float(0, 1, value=w))(answer=answer)},
        lm=lm,
    )


def rows(n: int, kind: str) -> list[dict[str, Any]]:
    return [{"question": f"what is {kind} {i}", "answer": f"{i}"} for i in range(n)]


def data(train: int = 60, valid: int = 20, test: int = 20) -> Dataset:
    return Dataset.of(train=rows(train, "tr"), valid=rows(valid, "va"), test=rows(test, "te"))


SMALL = OptimizeSettings(
    minibatch=4, candidates=4, iterations=3, budget=BudgetSettings(system_runs=400), valid_size=None
)


def run(
    folder: Path,
    options: OptimizeSettings = SMALL,
    lm: ScriptedLM | None = None,
    system: System | None = None,
    splits: Dataset | None = None,
    **more: Any,
) -> Result:
    return run_optimization(
        system or demo(),
        splits or data(),
        METRIC,
        options,
        run_dir=folder,
        engines={"lm": lm or ScriptedLM(student)},
        **more,
    )


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    every = list(read_records(folder, "events.jsonl"))
    return [event for event in every if not kinds or event["event"] in kinds]


def without_clocks(folder: Path) -> str:
    stripped = []
    for event in events(folder):
        del event["at"], event["spent"]["seconds"]
        stripped.append(json.dumps(event))
    return "\n".join(stripped)


class TestFinding:
    def test_what_a_written_prompt_gains_is_found(self, tmp_path: Path) -> None:
        options = OptimizeSettings(
            valid_size=50, budget=BudgetSettings(system_runs=800), search={"sources": ["reflect"]}
        )
        plain = demo(demos=())
        result = run(tmp_path / "run", options, ScriptedLM(teacher), plain, data(150, 50, 50))
        assert result.accepted >= 1
        assert "few words" in entry(result.best, "answerer.prompt", str)
        assert "\n" in entry(result.best, "answerer.prompt", str)

    @pytest.mark.slow
    def test_with_nothing_to_gain_nothing_is_accepted_and_it_is_said(self, tmp_path: Path) -> None:
        lm = ScriptedLM(lambda message, rng: asked_for(message) if rng.random() < 0.5 else "dunno")
        result = run(tmp_path / "run", lm=lm)
        assert result.accepted == 0
        assert result.best == demo().configuration
        assert not any(e["accepted"] for e in events(tmp_path / "run", "decision"))
        write_report(tmp_path / "run")
        assert "No change was accepted" in result.report
        assert result.test_after == result.test_before
        assert load(tmp_path / "run" / "best.json") == demo().configuration


def words_of(text: str) -> list[str]:
    return text.split()


def problem(system: System | None = None, valid: int = 20, **changes: Any) -> Problem:
    options = SMALL.model_copy(update=changes)
    return make_problem(system or demo(), data(60, valid, 5), METRIC, options, {})


WHOLE = Prices()  # every change takes whole runs


def problem_of(world: Relay, names: Sequence[str] = (), valid: int = 20, **changes: Any) -> Problem:
    """A deterministic chain with a job for each of some components."""
    options = SMALL.model_copy(update={"valid_size": valid, **changes})
    system = world.system()
    jobs = [Job("numbers", (f"{name}.option",)) for name in names or world.names[: world.tuned]]
    method = Method("each", {"numbers": RandomSearch()}, jobs, Uniform())
    return Problem(
        system, world.examples(60), world.examples(valid, "valid"), [], world, options, method, {}
    )


class TestPlan:
    def test_the_plan_is_the_one_worked_out_by_hand(self) -> None:
        # A decision runs both configurations on 20 examples: 40. A sweep has two jobs of six
        # minibatches of four if all runs are whole: 48. So one of them needs 2·40 + 48 = 128 runs.
        sampled = problem(iterations=10, method="random")
        assert make_plan(sampled, 400, 2, WHOLE) == BudgetPlan(3, 2, 40, 0.05 / 3)
        assert make_plan(sampled, 384, 2, WHOLE) == BudgetPlan(3, 2, 40, 0.05 / 3)
        assert make_plan(sampled, 383, 2, WHOLE) == BudgetPlan(2, 2, 40, 0.05 / 2)
        assert make_plan(sampled, 0, 2, WHOLE) == BudgetPlan(1, 2, 40, 0.05)
        assert make_plan(sampled, math.inf, 2, WHOLE) == BudgetPlan(10, 2, 40, 0.005)
        assert make_plan(problem(iterations=2, method="random"), 4000, 2, WHOLE) == BudgetPlan(
            2, 2, 40, 0.025
        )

    def test_repeats_are_paid_for_and_a_certain_incumbent_is_not(self) -> None:
        assert make_plan(problem(repeats=3), math.inf, 2, WHOLE).cost == 120
        greedy = demo(temperature=0.0)
        assert make_plan(problem(greedy, repeats=3), math.inf, 2, WHOLE).cost == 20

    @given(st.integers(1, 10), st.floats(0.001, 0.5), st.floats(0, 5000), st.integers(1, 6))
    def test_levels_sum_to_alpha_and_decisions_take_at_most_half(
        self, iterations: int, alpha: float, left: float, jobs: int
    ) -> None:
        plan = make_plan(problem(iterations=iterations, alpha=alpha), left, jobs, WHOLE)
        assert 1 <= plan.decisions <= iterations
        assert plan.level * plan.decisions == pytest.approx(alpha)
        assert plan.jobs == jobs
        if plan.decisions > 1:
            rest = left - plan.decisions * plan.cost
            assert plan.decisions * plan.cost <= left / 2 + 1e-9
            assert rest / (plan.decisions * jobs) >= Method.least * SMALL.minibatch

    def test_a_decision_is_reserved_at_the_price_of_its_change(self) -> None:
        """Of three calls of a deterministic chain, a change of the last executes one, and reruns no incumbent."""
        world = Relay(3, 3)
        made = problem_of(world, valid=20)
        prices = estimate_prices(made.system)
        costs = [decision_cost(made, [f"{name}.option"], prices) for name in "abc"]
        # the last of 20 runs is reserved as a whole one until it has ended
        assert costs == pytest.approx([20, 20 * 2 / 3 + 1 / 3, 20 / 3 + 2 / 3])
        assert decision_cost(made, ["b.option", "c.option"], prices) == pytest.approx(
            20 * 2 / 3 + 1 / 3
        )
        assert decision_cost(made, [], prices) == pytest.approx(1)
        assert make_plan(made, 400, 3, prices).cost == pytest.approx(20)
        assert make_plan(problem_of(world, ("c",)), 400, 1, prices).cost == pytest.approx(
            20 / 3 + 2 / 3
        )

    def test_a_random_incumbent_is_rerun_on_the_samples_of_the_candidate(self) -> None:
        sampled = problem()
        prices = estimate_prices(sampled.system)
        assert decision_cost(sampled, ["answerer.prompt"], prices) == 40
        assert decision_cost(sampled, ["spoil.w"], prices) == 21  # nothing counted follows

    def test_whole_runs_are_reserved_where_a_change_may_make_more_calls(self) -> None:
        """Those of a loop, and of what a changed condition or list of items lets run."""

        def greedy(name: str, **inputs: Any) -> Any:
            return LLM(name, prompt=Text("Answer."), temperature=0.0)(**inputs)

        step = Function("step", spoil, w=Float(0, 1))(answer=Input("answer", str))
        body = System("turn", outputs={"answer": step})
        looped_ = Loop("loop", body, carry={"answer": "answer"}, max_turns=3)(
            answer=greedy("first", question=Input("question", str))
        )
        system = System("looped", outputs={"answer": looped_}, lm="lm")
        assert decision_cost(problem(system), ["step.w"], estimate_prices(system)) == 20

        words = Function("words", words_of)(text=greedy("first", q=Input("question", str)))
        item = System("item", outputs={"note": greedy("noter", word=Input("word", str))})
        last = greedy("last", notes=Map("notes", item, over="word")(word=words))
        extra = greedy("extra", a=last, when=last.equals("yes"))
        system = System("mapped", outputs={"answer": last, "extra": extra}, lm="lm")
        made, prices = problem(system), estimate_prices(system)
        keys = [f"{name}.prompt" for name in ("first", "noter", "last", "extra")]
        assert [decision_cost(made, [key], prices) for key in keys] == [20, 20, 20, 5.75]

    def test_a_change_that_a_map_does_not_depend_on_is_reserved_at_its_price(self) -> None:
        question = Input("question", str)
        noter = LLM("noter", prompt=Text("Note."), temperature=0.0)(word=Input("word", str))
        notes = Map("notes", System("item", outputs={"note": noter}), over="word")(
            word=Function("words", words_of)(text=question)
        )
        topic = LLM("topic", prompt=Text("Name it."), temperature=0.0)(question=question)
        answer = LLM("answerer", prompt=Text("Answer."), temperature=0.0)(notes=notes, topic=topic)
        system = System("beside", outputs={"answer": answer}, lm="lm")
        made, prices = problem(system), estimate_prices(system)
        keys = [f"{name}.prompt" for name in ("noter", "topic", "answerer")]
        costs = [decision_cost(made, [key], prices) for key in keys]
        assert costs == pytest.approx([20 * 2 / 3 + 1 / 3] * 2 + [20 / 3 + 2 / 3])

    def test_chance_that_a_parameter_can_bring_in_counts_from_the_beginning(self) -> None:
        """A greedy start may become a sampling candidate: decisions then need fresh samples."""
        assert not stochastic(demo(temperature=0.0))
        assert stochastic(demo(temperature=1.0))
        assert stochastic(demo(temperature=Float(0.0, 1.0, value=0.0)))
        assert stochastic(
            demo(temperature=Float(0.0, 1.0, value=0.0)).bind({"answerer.temperature": 0.0})
        )
        wired = LLM("answerer", prompt="Answer.", temperature=0.0)(
            question=Input("question"), temperature=Hyperparameter("warmth", Float(0.0, 1.0))()
        )
        assert stochastic(System("s", outputs={"answer": wired}, lm="lm"))

    def test_a_candidate_with_chance_gets_fresh_samples_per_decision(self, tmp_path: Path) -> None:
        warm = demo(demos=(), prompt="Answer.", temperature=Float(0.0, 1.0, value=0.0))
        method = Method(
            "warm",
            {"warm": Propose("answerer.temperature", 0.5)},
            [Job("warm", ("answerer.temperature",))],
            Uniform(),
        )
        looped(tmp_path / "run", replace(problem(warm), method=method, engines=engines()))
        samples = [t["sample"] for t in read_records(tmp_path / "run", "traces.jsonl")]
        valid = [samples[i] for i in range(0, len(samples), 20)]
        assert valid[:3] == [0, 1, 1]

    @pytest.mark.slow
    @settings(max_examples=12)
    @given(st.integers(32, 300), st.sampled_from([0.0, 1.0]), st.integers(1, 4), st.integers(1, 4))
    def test_the_search_never_starves_a_planned_decision(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        runs: int,
        temperature: float,
        iterations: int,
        minibatch: int,
    ) -> None:
        folder = tmp_path_factory.mktemp("starve") / "run"
        options = SMALL.model_copy(
            update={
                "budget": BudgetSettings(system_runs=12 + runs),
                "iterations": iterations,
                "minibatch": minibatch,
                "candidates": 16,
            }
        )
        system = demo(temperature=temperature, w=0.9)
        run(folder, options, lm=ScriptedLM(eager), system=system, splits=data(40, 12, 4))
        for decision in events(folder, "decision"):
            assert "note" not in decision
            assert "p" in decision


def eager(message: str, rng: np.random.Generator) -> str:
    """Whatever is changed helps, so that every sweep ends in a decision."""
    start = message.startswith("Answer the question.\n\nQuestion")
    return asked_for(message) if rng.random() < (0.3 if start else 0.8) else "dunno"


@dataclass(frozen=True)
class Propose:
    """An optimizer that makes one proposal without evaluating it."""

    key: str
    value: Any

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        yield Proposal({self.key: self.value})


def engines(script: Callable[..., Any] = student) -> dict[str, ScriptedLM]:
    return {"lm": ScriptedLM(script)}


def looped(folder: Path, task: Problem) -> OptimizationState:
    import asyncio

    recorder = Recorder(RunDirectory.create(folder, "", {}))
    try:
        asyncio.run(OptimizationLoop(task, recorder).run())
    finally:
        recorder.close()
    return recorder.state


@dataclass(frozen=True)
class Step:
    """An optimizer that runs sixteen examples, and counts up as far as it may."""

    most: int

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        (key,) = task.keys
        value = entry(task.system.configuration, key, int) + 1
        await task.scorer.score([{key: value}], task.train[:16])
        yield Proposal({key: value} if value <= self.most else {})


def stepping(system: System, settings: OptimizeSettings) -> Method:
    """A method of one job, which counts up to ``candidates``."""
    step = Step(settings.candidates)
    return Method("step", {"step": step}, [Job("step", ("answerer.max_tokens",))], Uniform())


def striding(system: System, settings: OptimizeSettings) -> Method:
    """The same with two jobs."""
    step, keys = Step(settings.candidates), ("answerer.max_tokens",)
    return Method(
        "stride", {"left": step, "right": step}, [Job("left", keys), Job("right", keys)], Uniform()
    )


class TestRounds:
    """Where a plan has one decision, jobs go on before it."""

    SYSTEM = demo(demos=(), prompt="Answer.", temperature=1.0, max_tokens=Int(10, 200, value=10))

    def options(self, runs: float, most: int = 99, iterations: int = 10) -> OptimizeSettings:
        """One job a sweep, of 24 runs at least; a decision costs 40, after a baseline of 20."""
        return SMALL.model_copy(
            update={
                "method": "tests.optimization.loop.test_loop:stepping",
                "candidates": most,
                "iterations": iterations,
                "budget": BudgetSettings(system_runs=60 + runs),
            }
        )

    def values(self, folder: Path, **options: Any) -> list[Any]:
        """Return what each job before the decision proposed."""
        run(folder, self.options(**options), system=self.SYSTEM)
        made = events(folder, "job", "decision")
        before = made[: [e["event"] for e in made].index("decision")]
        assert len(events(folder, "decision")) == 1
        return [next(iter(e["values"].values()), None) for e in before]

    def test_they_go_on_while_the_rest_of_the_budget_holds_a_sweep(self, tmp_path: Path) -> None:
        """Each job takes 16, until 24 are not left."""
        assert self.values(tmp_path / "run", runs=72) == [11, 12, 13, 14]
        assert self.values(tmp_path / "less", runs=39) == [11]

    def test_where_it_holds_no_whole_round_it_serves_the_jobs_it_can(self, tmp_path: Path) -> None:
        """Two jobs take 32 of 72; of the 40 left one more may have 24, and then another."""
        options = self.options(runs=72).model_copy(
            update={"method": "tests.optimization.loop.test_loop:striding"}
        )
        run(tmp_path / "run", options, system=self.SYSTEM)
        names = [event["optimizer"] for event in events(tmp_path / "run", "job")]
        assert len(names) == 4
        assert set(names[:2]) == set(names[2:]) == {"left", "right"}


class TestTestSplit:
    def test_it_is_read_once_per_configuration_after_the_search(self, tmp_path: Path) -> None:
        lm = ScriptedLM(eager)
        result = run(tmp_path / "run", lm=lm)
        assert result.accepted >= 1
        questions = [
            re.findall(r"what is (\w+) (\d+)", r.messages[-1].text)[-1] for r in lm.requests
        ]
        test = [i for i, (split, _) in enumerate(questions) if split == "te"]
        search = [i for i, (split, _) in enumerate(questions) if split != "te"]
        assert min(test) > max(search)
        assert sorted(questions[i] for i in test) == sorted(2 * [("te", str(i)) for i in range(20)])

    @pytest.mark.slow
    def test_it_is_read_once_where_nothing_changed(self, tmp_path: Path) -> None:
        lm = ScriptedLM(lambda message: asked_for(message))
        result = run(tmp_path / "run", lm=lm)
        assert result.accepted == 0
        asked = [r for r in lm.requests if "what is te" in r.messages[-1].text]
        assert len(asked) == 20
        assert result.test_before == result.test_after

    @pytest.mark.slow
    def test_its_samples_are_no_others(self, tmp_path: Path) -> None:
        run(tmp_path / "run", lm=ScriptedLM(eager))
        traces = list(read_records(tmp_path / "run", "traces.jsonl"))
        of = {s: {t["sample"] for t in traces if t["split"] == s} for s in ("valid", "test")}
        assert not of["valid"] & of["test"]
        assert {t["split"] for t in traces} == {"valid", "test"}

    @pytest.mark.slow
    def test_a_reserve_that_is_too_small_is_said_and_the_result_kept(self, tmp_path: Path) -> None:
        budget = BudgetSettings(calls=400, test_share=0.02)
        result = run(tmp_path / "run", SMALL.model_copy(update={"budget": budget}))
        assert result.test_before is None
        (skipped,) = events(tmp_path / "run", "test_before")
        assert "the calls to 9, above the limit of 8" in skipped["skipped"]
        assert result.spent["calls"] <= 400


class TestBudgets:
    @pytest.mark.slow
    @settings(max_examples=25)
    @given(
        st.none() | st.integers(0, 200),
        st.none() | st.integers(0, 300),
        st.none() | st.integers(0, 6000),
        st.sampled_from(["search", "random"]),
        st.sampled_from([1, 7, 64]),
    )
    def test_no_limit_is_exceeded_and_every_run_ends_with_a_result_or_a_clear_error(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        runs: int | None,
        calls: int | None,
        tokens: int | None,
        method: str,
        concurrency: int,
    ) -> None:
        if runs is calls is tokens is None:
            runs = 50
        folder = tmp_path_factory.mktemp("budget") / "run"
        budget = BudgetSettings(system_runs=runs, calls=calls, tokens=tokens)
        options = make_settings(
            {
                **SMALL.given,
                "budget": budget,
                "method": method,
                "concurrency": concurrency,
                **proposals("demos", "edits", "opro"),
            }
        )
        lm = ScriptedLM(teacher, latency=any_time)
        system = demo(max_tokens=8)
        try:
            result = run(folder, options, lm, system=system, splits=data(20, 6, 4))
        except BudgetExhausted as error:
            assert str(error).startswith("budget: ")  # noqa: PT017
            assert not events(folder, "start")
            return
        except DeclarationError as error:
            assert "is too small to try anything" in str(error)  # noqa: PT017
            assert not lm.requests
            assert not folder.exists()
            return
        spent = result.spent
        used = spent["prompt_tokens"] + spent["completion_tokens"]
        assert runs is None or spent["system_runs"] <= runs + 1e-6
        assert calls is None or len(lm.requests) <= spent["calls"] <= calls
        assert tokens is None or used <= tokens
        assert events(folder)[-1]["event"] == "done"

    @pytest.mark.slow
    def test_a_budget_too_small_for_the_baseline_can_be_raised(self, tmp_path: Path) -> None:
        def limited(**budget: int) -> OptimizeSettings:
            return SMALL.model_copy(update={"budget": BudgetSettings(**budget)})

        lm = ScriptedLM(student)
        with pytest.raises(
            BudgetExhausted,
            match="the next call would raise the calls to 11, above the limit of 10",
        ):
            run(tmp_path / "run", limited(calls=13), lm)
        assert len(lm.requests) == 10
        result = run(tmp_path / "run", limited(system_runs=300), lm)
        whole = run(tmp_path / "whole", limited(system_runs=300))
        assert result.best == whole.best
        lines = [without_clocks(tmp_path / name).splitlines() for name in ("run", "whole")]
        both = [[line for line in some if '"event": "outlook"' not in line] for some in lines]
        assert both[0] == both[1]  # the outlook is that of the budget at the beginning

    def test_a_budget_that_ends_in_the_search_leaves_what_was_accepted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As when candidates take far more than the runs that the plan was made from."""
        monkeypatch.setattr("compound.optimization.loop.context.runs_left", lambda *_: math.inf)
        monkeypatch.setattr(Meter, "remaining_runs", lambda _: math.inf)
        budget = BudgetSettings(calls=320)
        result = run(
            tmp_path / "run", SMALL.model_copy(update={"budget": budget}), ScriptedLM(eager)
        )
        stopped = read_json(tmp_path / "run", "checkpoint.json")["state"]["search"]["stopped"]
        assert stopped.startswith(
            "budget: the next call would raise the calls to 257, above the limit of 256"
        )
        assert result.accepted == sum(e["accepted"] for e in events(tmp_path / "run", "decision"))
        assert result.spent["calls"] <= 320

    def test_why_a_run_ended_is_part_of_its_state(self, tmp_path: Path) -> None:
        lm = ScriptedLM(asked_for)
        run(tmp_path / "run", SMALL.model_copy(update={"method": "random"}), lm)
        state = read_json(tmp_path / "run", "checkpoint.json")["state"]["search"]
        assert state["stopped"] == "3 consecutive rounds proposed nothing"


def any_time(_: np.random.Generator) -> float:
    """Another latency at every call, whatever is asked: what must not matter."""
    return random.random() * 0.001


EVERYTHING = make_settings({**SMALL.given, **proposals("demos", "edits", "opro")})


class TestSeed:
    @pytest.mark.slow
    def test_timing_and_concurrency_leave_no_mark(self, tmp_path: Path) -> None:
        written = set()
        for concurrency, latency in ((1, None), (64, any_time), (5, any_time)):
            folder = tmp_path / str(concurrency)
            lm = ScriptedLM(teacher, latency=latency or 0.0, price=0.0001)
            run(folder, EVERYTHING.model_copy(update={"concurrency": concurrency}), lm, demo(w=0.9))
            best = (folder / "best.json").read_text(encoding="utf-8")
            written.add((without_clocks(folder), best))
        assert len(written) == 1

    @pytest.mark.slow
    def test_hash_order_leaves_no_mark(self, tmp_path: Path) -> None:
        """Four processes with four string hashes, one call at a time or many, write the same events."""
        program = (
            "import os, sys, importlib.util\n"
            "from pathlib import Path\n"
            "import compound.report\n"
            "spec = importlib.util.spec_from_file_location('loop_tests', sys.argv[1])\n"
            "tests = importlib.util.module_from_spec(spec)\n"
            "sys.modules['loop_tests'] = tests\n"
            "spec.loader.exec_module(tests)\n"
            "os.fsync = compound.report.write = lambda _: None\n"
            "lm = tests.ScriptedLM(tests.teacher, latency=tests.any_time)\n"
            "budget = tests.BudgetSettings(system_runs=200)\n"
            "many = 64 if int(os.environ['PYTHONHASHSEED']) % 2 else 1\n"
            "options = tests.EVERYTHING.model_copy(update={'budget': budget, 'concurrency': many})\n"
            "tests.run(Path(sys.argv[2]), options, lm, tests.demo(w=0.9))\n"
        )
        folders = [tmp_path / str(seed) for seed in range(4)]
        for pair in (folders[i : i + 2] for i in range(0, 4, 2)):
            processes = [
                subprocess.Popen(
                    [sys.executable, "-c", program, __file__, str(folder)],
                    env={
                        **os.environ,
                        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}",
                        "PYTHONHASHSEED": folder.name,
                    },
                )
                for folder in pair
            ]
            assert [process.wait() for process in processes] == [0, 0]
        assert len({without_clocks(folder) for folder in folders}) == 1
        assert len({(folder / "best.json").read_bytes() for folder in folders}) == 1

    def test_d2_jobs_are_not_scored_on_the_same_batch_again_and_again(self, tmp_path: Path) -> None:
        lm = ScriptedLM(lambda message, rng: asked_for(message) if rng.random() < 0.5 else "dunno")
        seen: list[frozenset[str]] = []

        def listen(event: Mapping[str, Any]) -> None:
            if event["event"] == "job":
                messages = [request.messages[-1].text for request in lm.requests[len(past) :]]
                past.extend(lm.requests[len(past) :])
                seen.append(
                    frozenset(n for m in messages for n in re.findall(r"what is tr (\d+)", m))
                )

        past: list[Any] = []
        options = SMALL.model_copy(
            update={"budget": BudgetSettings(system_runs=900), "iterations": 6, "method": "random"}
        )
        run(tmp_path / "run", options, lm, demo(demos=()), data(200, 20, 5), listener=listen)
        batches = [batch for batch in seen if batch]
        assert len(batches) >= 3
        assert len(set(batches)) == len(batches)


def interrupted(folder: Path, after: int) -> None:
    """Stop a run after some events."""
    recorders: list[Recorder] = []

    def count(event: Mapping[str, Any]) -> None:
        if event["event"] != "call":
            heard.append(event)
        if len(heard) >= after:
            recorders[-1].stop()

    heard: list[Any] = []
    with pytest.raises(Interrupted):
        run(folder, listener=count, on_start=recorders.append)


class TestGoingOn:
    def test_another_configuration_is_refused_and_its_keys_are_named(self, tmp_path: Path) -> None:
        interrupted(tmp_path / "run", 2)
        list_changes = SMALL.model_copy(update={"seed": 5, "alpha": 0.1})
        with pytest.raises(RunDirectoryError, match=r"optimize\.alpha: .*; optimize\.seed: .* →"):
            run(tmp_path / "run", list_changes)
        with pytest.raises(RunDirectoryError, match=r"changed: .*spoil\.w: .* → "):
            run(tmp_path / "run", system=demo(w=0.6))
        with pytest.raises(RunDirectoryError, match=r"data\.train: different .*\d+ → \d+\);"):
            run(tmp_path / "run", splits=data(train=61))
        with pytest.raises(RunDirectoryError, match=r"changed: lm: .* → "):
            run(tmp_path / "run", system=demo(lm="other"))
        with pytest.raises(RunDirectoryError, match="changed: metric: "):
            run_optimization(
                demo(), data(), exact_match("answer", "question"), SMALL, run_dir=tmp_path / "run"
            )

    def test_a_stored_folder_may_move_but_not_change(self, tmp_path: Path) -> None:
        start = {"a.weights": {"path": "/here/adapter", "sha256": "9f"}, "b.path": "x"}
        (tmp_path / "config.json").write_text(json.dumps({"format": FORMAT, "start": start}))
        moved = {**start, "a.weights": {"path": "/there/adapter", "sha256": "9f"}}
        assert list_changes(tmp_path, {"format": FORMAT, "start": moved}, ()) == []
        other = {**start, "a.weights": {"path": "/here/adapter", "sha256": "a0"}, "b.path": "y"}
        assert list_changes(tmp_path, {"format": FORMAT, "start": other}, ()) == [
            "a.weights.sha256: 9f → a0",
            "b.path: x → y",
        ]

    @pytest.mark.slow
    def test_budget_and_concurrency_may_change(self, tmp_path: Path) -> None:
        interrupted(tmp_path / "run", 2)
        changed = {"budget": BudgetSettings(system_runs=500), "concurrency": 3}
        assert run(tmp_path / "run", SMALL.model_copy(update=changed)).spent["system_runs"] > 50


def traces(folder: Path) -> list[Any]:
    found = list(read_records(folder, "traces.jsonl"))
    for trace in found:
        for call in trace["calls"]:
            del call["seconds"], call["attempts"]
    return found


@pytest.mark.slow
def test_an_evaluation_in_the_result_is_what_the_events_say(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    (baseline,) = events(tmp_path / "run", "start")
    assert isinstance(result.before, Evaluation)
    assert {
        k: baseline[k] for k in ("mean", "low", "high", "n", "failed")
    } == result.before.summary()
    as_json = result.to_json()
    assert json.loads(json.dumps(as_json)) == as_json
    assert as_json["calls"] == events(tmp_path / "run")[-1]["spent"]["calls"]


def chosen(lm: str = "bad", **settings: Any) -> System:
    """A system whose one number is the model, and one model is much better."""
    asked = LLM(
        "answerer",
        prompt="Answer.",
        lm=Choice("bad", "good", value=lm),
        temperature=1.0,
        **settings,
    )
    return System("chosen", outputs={"answer": asked(question=Input("question", str))})


def models() -> dict[str, ScriptedLM]:
    def never(message: str) -> str:
        return "dunno"

    return {"bad": ScriptedLM(never, name="bad"), "good": ScriptedLM(asked_for, name="good")}


class TestReviewed:
    def test_a_limit_of_calls_leaves_room_for_decisions(self, tmp_path: Path) -> None:
        options = SMALL.model_copy(update={"budget": BudgetSettings(calls=250)})
        result = run_optimization(
            chosen(), data(valid=10), METRIC, options, run_dir=tmp_path / "run", engines=models()
        )
        assert result.accepted == 1
        assert result.best["answerer.lm"] == "good"
        assert result.spent["calls"] <= 250

    def test_another_metric_function_of_the_same_name_is_noticed(self, tmp_path: Path) -> None:
        def metric(bonus: float) -> Any:
            return custom(
                lambda outputs, example: bonus + (outputs["answer"] == example.gold["answer"]),
                "mine",
            )

        def stopped(folder: Path, bonus: float) -> None:
            recorders: list[Recorder] = []
            run_optimization(
                demo(),
                data(),
                metric(bonus),
                SMALL,
                run_dir=folder,
                engines={"lm": ScriptedLM(student)},
                on_start=recorders.append,
                listener=lambda _: recorders[-1].stop(),
            )

        for _ in range(2):
            with pytest.raises(Interrupted):
                stopped(tmp_path / "run", 0.25)
        with pytest.raises(RunDirectoryError, match="changed: metric: "):
            stopped(tmp_path / "run", 0.5)
