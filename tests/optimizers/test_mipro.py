"""MIPROv2: joint choices that are found, sizes worked out by hand, and a larger set that decides."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compound.api.optimize import optimize
from compound.components.function import Function
from compound.components.llm import LLM
from compound.errors import CallError, DeclarationError
from compound.evaluation.dataset import Dataset
from compound.evaluation.metrics import custom
from compound.example import Example, Score
from compound.graph.component import Input
from compound.graph.space import Choice, Demos, Text
from compound.graph.system import System
from compound.optimizers.baselines.mipro import Mipro, MIPROSettings
from compound.optimizers.methods import method
from compound.optimizers.search.tpe import next_point
from compound.optimizers.search.trials import JointSearch, Trial, promising, sizes, trials_for
from compound.settings.common import BudgetSettings
from compound.settings.optimize import OptimizeSettings
from compound.testing import ScriptedLM


def style_of(message: str, name: str) -> str:
    return str((re.findall(rf"{name} style (\w)", message) or ["none"])[-1])


def script(message: str, rng: np.random.Generator) -> str:
    """Write a style when asked for an instruction; else say in which style this was asked, or be wrong."""
    if "new instruction" in message:
        (step,) = re.findall(r"The step: (\w+)", message)
        return f"<prompt>{step} style {'abcd'[rng.integers(4)]}.\nBe exact.</prompt>"
    if "first style" in message or "Think" in message:
        return f"plan {style_of(message, 'first')}"
    chance = 0.15 + 0.7 * ("plan c" in message and style_of(message, "second") == "b")
    return "right" if rng.random() < chance + 0.1 * (message.count("Plan:") - 1) else "wrong"


async def graded(outputs: Any, example: Example) -> Score:
    return Score(float(outputs["answer"] == "right"))


METRIC = custom(graded)
OPRO = Mipro(("opro",))


def two_steps(**second: Any) -> System:
    """Right with style c of the first step and style b of the second; either alone does nothing."""
    question = Input("question", str)
    plan = LLM("first", prompt=Text("Think."))(question=question)
    step = LLM("second", prompt=Text("Answer."), temperature=1.0, **second)(plan=plan, question=question)
    return System("joint", outputs={"answer": step}, lm="lm")


def rows(n: int, kind: str = "e") -> list[Example]:
    return [Example(f"{kind}{i}", {"question": f"what is {kind} {i}"}) for i in range(n)]


def scripted(reply: Callable[..., Any] = script) -> Callable[[], ScriptedLM]:
    return lambda: ScriptedLM(reply)


BEST = {"first.prompt": "first style c.\nBe exact.", "second.prompt": "second style b.\nBe exact."}


class TestSearch:
    def test_the_best_pair_is_found_though_neither_change_helps_alone(self, job: Any) -> None:
        """Of 25 pairs, one is right; every one of three searches of 40 trials finds it."""
        for seed in range(3):
            assignment = job(two_steps(), METRIC, rows(150), scripted(), seed=seed)
            states, proposal = assignment.run(Patient(("opro",)))
            assert proposal.values == BEST, seed
            assert proposal.before == states[-1]["scored"][0]["mean"] < 0.4
            assert (proposal.after or 0.0) > 0.7

    def test_one_parameter_is_searched_as_a_whole(self, job: Any) -> None:
        target = two_steps().bind({"first.prompt": BEST["first.prompt"]})
        _, proposal = job(target, METRIC, rows(150), scripted(), keys=("second.prompt",)).run(OPRO)
        assert proposal.values == {"second.prompt": BEST["second.prompt"]}

    def test_values_are_few_distinct_and_not_the_incumbents(self, job: Any) -> None:
        target = two_steps(demos=Demos(max=2)).bind({"first.prompt": BEST["first.prompt"]})
        (first, *_), _ = job(target, METRIC, rows(150), scripted()).run(Mipro(("edits", "opro"), values=4))
        assert {key: len(values) for key, values in first["values"].items()} == dict.fromkeys(
            target.parameters, 3
        )
        for key, values in first["values"].items():
            assert target.configuration[key] not in values
            assert all(values.count(value) == 1 for value in values)
            assert all(target.parameters[key].problem(value) == "" for value in values)
        texts = [text for key in ("first.prompt", "second.prompt") for text in first["values"][key]]
        assert any("style" in text and "Be exact" in text for text in texts)
        assert any("Be exact" not in text for text in texts)

    def test_demonstrations_come_from_runs_that_were_right_and_are_never_scored_on(self, job: Any) -> None:
        target = two_steps(demos=Demos(max=3)).bind(BEST)
        assignment = job(target, METRIC, rows(100), scripted(), keys=("second.demos",))
        seen: dict[str, set[str]] = {"shown": set(), "scored": set()}
        watched(assignment, seen)
        (first, *_), proposal = assignment.run(Mipro(()))
        for demos in first["values"]["second.demos"]:
            assert {demo["outputs"]["output"] for demo in demos} == {"right"}
        assert seen["shown"]
        assert seen["scored"]
        assert not seen["shown"] & seen["scored"]
        assert set(proposal.values) <= {"second.demos"}

    def test_scores_are_those_of_the_larger_set(self, job: Any) -> None:
        """Every point there has the mean that it has on just these examples."""
        assignment = job(two_steps(), METRIC, rows(150), scripted())
        batches: list[list[Example]] = []
        watched(assignment, {"shown": set(), "scored": set()}, batches)
        states, proposal = assignment.run(OPRO)
        larger = batches[0]
        assert len(larger) == states[0]["larger"] == 105
        assert all({e.id for e in batch} <= {e.id for e in larger} for batch in batches)
        small = [batch for batch in batches if len(batch) == 35]
        assert len({tuple(e.id for e in batch) for batch in small}) == len(small) == states[-1]["round"] == 3
        last = states[-1]
        for trial in last["scored"]:
            values = {k: last["values"][k][i - 1] for k, i in trial["point"].items() if i}
            (evaluation,) = run(assignment.scorer.score([values], larger))
            assert evaluation.mean == trial["mean"]
        means = [trial["mean"] for trial in last["scored"]]
        assert (proposal.before, proposal.after) == (means[0], max(means))

    def test_after_every_round_one_more_point_meets_the_larger_set(self, job: Any) -> None:
        states, _ = job(two_steps(), METRIC, rows(150), scripted()).run(OPRO)
        assert [len(s["trials"]) for s in states] == [0, 0, 4, 8, 10]
        assert [len(s["scored"]) for s in states] == [0, 1, 2, 3, 4]
        points = [trial["point"] for trial in states[-1]["scored"]]
        assert all(point not in points[:i] for i, point in enumerate(points))

    def test_a_start_that_is_best_stays(self, job: Any) -> None:
        _, proposal = job(two_steps().bind(BEST), METRIC, rows(150), scripted()).run(OPRO)
        assert proposal.values == {}
        assert proposal.before == proposal.after
        assert proposal.tried > 3
        assert proposal.note

    @pytest.mark.parametrize("share", [math.inf, 400, 120])
    def test_it_resumes_from_every_round(self, job: Any, share: float) -> None:
        target = two_steps(demos=Demos(max=2)).bind({"first.prompt": BEST["first.prompt"]})
        job(target, METRIC, rows(90), scripted(), share).check_resume(lambda: Mipro(("edits", "opro")))

    @settings(max_examples=60)
    @given(
        share=st.integers(0, 300),
        n=st.integers(1, 80),
        minibatch=st.integers(1, 10),
        target=st.sampled_from([two_steps(), two_steps(demos=Demos(max=2))]),
        free=st.booleans(),
    )
    def test_it_never_spends_more_than_its_share(
        self, job: Any, share: int, n: int, minibatch: int, target: System, free: bool
    ) -> None:
        """A job gets two minibatches at least."""
        share = max(share, 2 * minibatch)
        target = target if free else functions()
        assignment = job(target, METRIC, rows(n), scripted(), share, minibatch=minibatch)
        assignment.run(Mipro(("edits",)))
        assert assignment.spent <= share

    def test_a_share_too_small_for_one_trial_is_not_spent(self, job: Any) -> None:
        """The incumbent, a trial and the better one on eight examples each: 24 runs."""
        assignment = job(two_steps(), METRIC, rows(80), scripted(), 23, minibatch=8)
        _, proposal = assignment.run(Mipro())
        assert (assignment.spent, dict(proposal.values), proposal.tried) == (0, {}, 0)
        assert job(two_steps(), METRIC, rows(80), scripted(), 24, minibatch=8).run(Mipro())[1].tried == 1

    def test_a_model_that_does_not_answer_costs_a_value(self, job: Any) -> None:
        def silent(message: str, rng: np.random.Generator) -> str:
            if "new instruction" in message:
                raise CallError("content filter")
            return script(message, rng)

        (first, *_), proposal = job(two_steps(), METRIC, rows(80), scripted(silent)).run(
            Mipro(("opro", "edits"))
        )
        assert all(3 <= len(values) <= 5 for values in first["values"].values())
        assert proposal.tried
        states, proposal = job(two_steps(), METRIC, rows(80), scripted(silent)).run(OPRO)
        assert (len(states), dict(proposal.values)) == (1, {})

    def test_values_that_break_the_runs_only_lose(self, job: Any) -> None:
        def fragile(message: str, rng: np.random.Generator) -> str:
            if "second style" in message and "new instruction" not in message:
                raise CallError("refused")
            return script(message, rng)

        states, proposal = job(
            two_steps(), METRIC, rows(80), scripted(fragile), keys=("second.prompt",)
        ).run(OPRO)  # fmt: skip
        assert proposal.values == {}
        assert states[-1]["trials"]

    def test_a_text_longer_than_allowed_is_no_value(self, job: Any) -> None:
        step = LLM("second", prompt=Text("Answer. Think.", max_length=20))(question=Input("question", str))
        target = System("tight", outputs={"answer": step}, lm="lm")
        (first, *_), _ = job(target, METRIC, rows(80), scripted()).run(Mipro(("opro", "edits")))
        assert first["values"]
        assert all(len(text) <= 20 for text in first["values"]["second.prompt"])

    def test_jobs_meet_other_minibatches(self, job: Any) -> None:
        firsts = set()
        for seed in range(5):
            batches: list[list[Example]] = []
            assignment = job(two_steps(), METRIC, rows(90), scripted(), seed=seed)
            watched(assignment, {"shown": set(), "scored": set()}, batches)
            assignment.run(Mipro(minibatch=8))
            firsts.add(frozenset(e.id for e in batches[1]))
        assert len(firsts) == 5


class Patient(Mipro):
    """Makes more trials than the paper's code would."""

    def _start(self, task: Any, values: Any, examples: int) -> JointSearch:
        started = super()._start(task, values, examples)
        started.wanted = 40
        return started


def functions() -> System:
    """A system whose runs no cache keeps."""

    def echo(question: str, prompt: str) -> str:
        return "right" if len(prompt) % 2 else "wrong"

    node = Function("f", echo, prompt=Text("Answer the question."))(question=Input("question", str))
    return System("functions", outputs={"answer": node}, lm="lm")


def run(awaitable: Any) -> Any:
    return asyncio.run(awaitable)


def watched(assignment: Any, seen: dict[str, set[str]], batches: list[Any] | None = None) -> None:
    """Note which examples demonstrations are looked for on, and which candidates are scored on."""
    traces, score = assignment.scorer.traces, assignment.scorer.score

    async def watch_traces(values: Any, examples: Any) -> Any:
        seen["shown"] |= {e.id for e in examples}
        return await traces(values, examples)

    async def watch_score(candidates: Any, examples: Any) -> Any:
        seen["scored"] |= {e.id for e in examples}
        if batches is not None:
            batches.append(list(examples))
        return await score(candidates, examples)

    assignment.scorer.traces, assignment.scorer.score = watch_traces, watch_score


class TestSizes:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [([], 0), ([2], 3), ([6], 9), ([6, 6], 11), ([6, 6, 6, 6], 21), ([2, 6], 11), ([8], 12)],
    )
    def test_trials_are_those_of_the_formula(self, options: list[int], expected: int) -> None:
        assert trials_for(options) == expected

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            # 12 trials of 35, and four times 105: 840
            ((12, 8, 35, 200, math.inf), (35, 105)),
            ((12, 8, 35, 200, 840), (35, 105)),
            ((12, 8, 35, 200, 839), (34, 102)),
            # the larger set ends with the examples: 12 · 35 + 4 · 50
            ((12, 8, 35, 50, 620), (35, 50)),
            ((12, 8, 35, 50, 619), (34, 50)),
            # no batch is small enough: one trial of 8, the incumbent and one more on (60 - 8) / 2
            ((12, 8, 35, 200, 60), (8, 24)),
            ((12, 8, 35, 200, 40), (8, 16)),
            ((12, 8, 35, 200, 10), (8, 8)),
            # the incumbent is paid for beside every round and every larger set: (12 + 3) · 20 + 7 · 60
            ((12, 8, 35, 200, 720, False), (20, 60)),
            ((12, 8, 35, 200, 719, False), (19, 57)),
        ],
    )
    def test_sizes_are_those_worked_out_by_hand(self, arguments: Any, expected: tuple[int, int]) -> None:
        assert sizes(*arguments) == expected

    @pytest.mark.parametrize(("share", "batch"), [(840, 35), (math.inf, 35), (200, 8)])
    def test_a_small_share_makes_small_minibatches(self, job: Any, share: float, batch: int) -> None:
        target = two_steps()
        assignment = job(target, METRIC, rows(200), scripted(), share, keys=("second.prompt",))
        states, _ = assignment.run(Mipro(("edits",), values=8))
        assert (states[0]["wanted"], states[0]["batch"]) == (12, batch)


class TestPromising:
    @pytest.mark.parametrize(
        ("trials", "scored", "expected"),
        [
            ([], [], None),
            ([[{"a": 1}, 0.2], [{"a": 2}, 0.4]], [], {"a": 2}),
            ([[{"a": 1}, 0.2], [{"a": 2}, 0.4]], [{"a": 2}], {"a": 1}),
            ([[{"a": 1}, 0.2]], [{"a": 1}], None),
            # a mean of 0.55 against one of 0.6
            ([[{"a": 1}, 0.9], [{"a": 2}, 0.6], [{"a": 1}, 0.2]], [], {"a": 2}),
            # the first of equal ones
            ([[{"a": 3}, 0.5], [{"a": 1}, 0.5]], [], {"a": 3}),
            # the same point, its parts in another order
            (
                [[{"a": 1, "b": 2}, 0.9], [{"b": 2, "a": 1}, 0.1], [{"a": 0, "b": 0}, 0.6]],
                [],
                {"a": 0, "b": 0},
            ),
        ],
    )
    def test_the_best_mean_not_yet_scored(self, trials: Any, scored: Any, expected: Any) -> None:
        assert promising([Trial(point=point, mean=mean) for point, mean in trials], scored) == expected


class TestTPE:
    def test_points_follow_from_seed_and_trials_alone(self) -> None:
        spaces = {"a": Choice(*range(6)), "b": Choice(*range(6))}
        trials: list[Any] = []
        for i in range(8):
            point = next_point(spaces, trials, [], 5, "testing")
            assert point == next_point(spaces, trials, [], 5, "testing")
            trials.append((point, math.sin(i)))
        others = [next_point(spaces, trials, [], seed, "testing") for seed in range(20)]
        assert len({tuple(p.items()) for p in others}) > 1

    def test_a_round_is_spread_out(self) -> None:
        spaces = {"a": Choice(*range(6)), "b": Choice(*range(6))}
        trials = [({"a": i, "b": i}, i / 6) for i in range(6)]
        points: list[dict[str, Any]] = []
        for _ in range(4):
            points.append(next_point(spaces, trials, points, 5, "testing"))
        assert len({tuple(p.items()) for p in points}) >= 3


class TestMethod:
    def test_prompts_and_demonstrations_are_one_job(self) -> None:
        target = two_steps(demos=Demos(max=2), max_tokens=Choice(8, 16))
        settings = MIPROSettings(proposers=("opro", "edits"), lm="big", edits_per_candidate=3)
        made = method("mipro", target, OptimizeSettings(mipro=settings))
        assert [sorted(job.keys) for job in made.jobs] == [["first.prompt", "second.demos", "second.prompt"]]
        assert dict(made.optimizers) == {"mipro": Mipro(("opro", "edits"), 3, "big")}

    def test_a_system_without_prompts_is_refused(self) -> None:
        node = LLM("second", prompt="fixed", max_tokens=Choice(8, 16))(question=Input("question", str))
        with pytest.raises(DeclarationError, match="no parameter that method 'mipro' can change"):
            method("mipro", System("fixed", outputs={"answer": node}), OptimizeSettings())

    def test_it_improves_a_system(self, tmp_path: Path) -> None:
        def data(kind: str, n: int) -> list[dict[str, Any]]:
            return [{"id": f"{kind}{i}", "question": f"what is {kind} {i}"} for i in range(n)]

        target = two_steps().bind({"first.prompt": BEST["first.prompt"]})
        result = optimize(
            target,
            Dataset.of(train=data("a", 150), valid=data("b", 40), test=data("c", 60)),
            METRIC,
            OptimizeSettings(
                method="mipro",
                budget=BudgetSettings(system_runs=1500),
                mipro=MIPROSettings(proposers=("opro",)),
            ),
            run_dir=tmp_path / "run",
            engines={"lm": ScriptedLM(script)},
        )
        assert result.accepted >= 1
        assert dict(result.best) == BEST
        assert result.test_after is not None
        assert result.test_after.mean > 0.7
