"""MIPROv2: requests counted and read, joint choices that are found, and sizes worked out by hand."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compound.components.llm import LLM
from compound.core.errors import CallError
from compound.core.example import Example, Score
from compound.evaluation.metrics.built_in import exact_match
from compound.evaluation.metrics.custom import custom
from compound.graph.component import Input
from compound.graph.space import Choice, Demos, Text
from compound.graph.system import System
from compound.optimization.method import ScoredCandidate
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.baselines.mipro import (
    SIZES,
    Mipro,
    MIPROSettings,
    Trial,
    plan_trials,
    promising,
)
from compound.optimizers.baselines.mipro_proposer import TIPS
from compound.optimizers.methods import method
from compound.optimizers.search.proposers.demos import labelled_demos
from compound.testing import ScriptedLM


def style_of(message: str, name: str) -> str:
    return str((re.findall(rf"{name} style (\w)", message) or ["none"])[-1])


def kind_of(message: str) -> str:
    """Return the kind of a proposer's request; "" for a call of the system."""
    asks = {
        "Write a new instruction": "instruction",
        "Describe the task": "system",
        "Describe the role": "component",
        "Condense": "summary",
        "have in common": "observation",
    }
    return next((kind for words, kind in asks.items() if words in message), "")


def script(message: str, rng: np.random.Generator) -> str:
    """Write another style when asked for an instruction; else say in which style this was asked, or be wrong."""
    kind = kind_of(message)
    if kind == "instruction":
        (step,) = re.findall(r"One of its steps: (\w+)", message)
        left = [style for style in "abcd" if f"{step} style {style}" not in message] or ["e"]
        return f"<prompt>{step} style {left[rng.integers(len(left))]}.\nBe exact.</prompt>"
    if kind:
        return f"A {kind} that was written."
    if "first style" in message or "Think" in message:
        return f"plan {style_of(message, 'first')}"
    chance = 0.15 + 0.7 * ("plan c" in message and style_of(message, "second") == "b")
    return "right" if rng.random() < chance + 0.1 * (message.count("Plan:") - 1) else "wrong"


async def graded(outputs: Any, example: Example) -> Score:
    return Score(float(outputs["answer"] == "right"))


METRIC = custom(graded)


def two_steps(**second: Any) -> System:
    """Right with style c of the first step and style b of the second; either alone does nothing."""
    question = Input("question", str)
    plan = LLM("first", prompt=Text("Think."))(question=question)
    step = LLM("second", prompt=Text("Answer."), temperature=1.0, **second)(
        plan=plan, question=question
    )
    return System("joint", outputs={"answer": step}, lm="lm")


def rows(n: int, kind: str = "e") -> list[Example]:
    return [
        Example(f"{kind}{i}", {"question": f"what is {kind} {i}"}, {"answer": "right"})
        for i in range(n)
    ]


def scripted(reply: Callable[..., Any] = script) -> Callable[[], ScriptedLM]:
    return lambda: ScriptedLM(reply)


def requests(assignment: Any) -> list[tuple[str, str]]:
    texts = [request.messages[-1].content for _, request in assignment.proposal_requests]
    return [(kind_of(text), text) for text in texts]


def watched(assignment: Any) -> tuple[list[list[str]], list[tuple[list[Any], list[str]]]]:
    """Note the examples of each trace run, and the candidates and examples of each evaluation."""
    traced: list[list[str]] = []
    scored: list[tuple[list[Any], list[str]]] = []
    traces, score = assignment.scorer.traces, assignment.scorer.score

    async def watch_traces(values: Any, examples: Any) -> Any:
        traced.append([example.id for example in examples])
        return await traces(values, examples)

    async def watch_score(candidates: Any, examples: Any) -> Any:
        scored.append((list(candidates), [example.id for example in examples]))
        return await score(candidates, examples)

    assignment.scorer.traces, assignment.scorer.score = watch_traces, watch_score
    return traced, scored


BEST = {"first.prompt": "first style c.\nBe exact.", "second.prompt": "second style b.\nBe exact."}


class TestRequests:
    @pytest.mark.parametrize(("auto", "each"), [("light", 5), ("medium", 11)])
    def test_without_demonstrations_n_minus_one_instructions_are_written_for_each_text(
        self, job: Any, auto: Any, each: int
    ) -> None:
        """150 rows of which 100 are scored on: five batches of observations on the others."""
        assignment = job(two_steps(), METRIC, rows(150), scripted())
        assignment.run(Mipro(MIPROSettings(auto=auto, trials=1)))
        others = 150 - min(150, SIZES[auto][1])
        assert Counter(kind for kind, _ in requests(assignment)) == {
            "observation": (others or 100) // 10,
            "summary": 1,
            "system": 2 * each,
            "component": 2 * each,
            "instruction": 2 * each,
        }

    def test_a_request_for_an_instruction_contains_all_the_information(self, job: Any) -> None:
        target = two_steps(demos=Demos(max=2)).bind(BEST)
        tried = ScoredCandidate(
            {"first.prompt": "Old.", "second.prompt": "Older.", "second.demos": []}, 0.25, 8
        )
        assignment = job(target, METRIC, rows(150), scripted(), tried=[tried])
        assignment.run(Mipro(MIPROSettings(trials=1)))
        asked = [text for kind, text in requests(assignment) if kind == "instruction"]
        second = [text for text in asked if "One of its steps: second" in text]
        assert len(second) == 2
        for text in second:
            assert "A summary that was written." in text
            assert "first reads $question and writes output" in text
            assert "What it does: A system that was written." in text
            assert "Its role: A component that was written." in text
            assert "- read plan: plan c; question: what is e" in text
            assert "wrote output: right" in text
            assert f"<prompt>{BEST['second.prompt']}</prompt>" in text
            assert "<prompt>Older.</prompt> score 0.250" in text
        assert len({re.findall("- read .*", text)[0] for text in second}) == 2  # another set each
        assert {tip for tip in TIPS if tip and any(tip in text for text in asked)}

    def test_a_model_that_cannot_write_is_recorded_and_not_replaced(self, job: Any) -> None:
        def mute(message: str, rng: np.random.Generator) -> str:
            return (
                "I cannot do that." if kind_of(message) == "instruction" else script(message, rng)
            )

        target = two_steps(demos=Demos(max=2)).bind(BEST)
        assignment = job(target, METRIC, rows(100), scripted(mute))
        states, proposal = assignment.run(Mipro(MIPROSettings(trials=4)))
        assert {key: list(texts) for key, texts in states[-1]["texts"].items()} == {
            "first.prompt": [],
            "second.prompt": [],
        }
        assert list(states[-1]["search"]["values"]) == ["second.demos"]
        assert assignment._proposals.state.models["lm"].counts["unusable"] == 4
        assert set(proposal.values) <= {"second.demos"}

    def test_edits_are_an_option_that_needs_no_model(self, job: Any) -> None:
        assignment = job(two_steps(), METRIC, rows(100), scripted())
        states, _ = assignment.run(Mipro(MIPROSettings(proposers=("edits",))))
        assert not requests(assignment)
        assert all(len(texts) == 5 for texts in states[-1]["texts"].values())

    def test_with_demonstrations_half_as_many_are_written(self, job: Any) -> None:
        assignment = job(two_steps(demos=Demos(max=2)), METRIC, rows(150), scripted())
        assignment.run(Mipro(MIPROSettings(trials=1)))
        counts = Counter(kind for kind, _ in requests(assignment))
        assert counts["instruction"] == counts["system"] == counts["component"] == 2 * 2


class TestSearch:
    @pytest.mark.slow
    def test_the_best_pair_is_found_though_neither_change_helps_alone(self, job: Any) -> None:
        """Of 36 pairs, one is right; every one of three searches of 40 trials finds it."""
        for seed in range(3):
            assignment = job(two_steps(), METRIC, rows(150), scripted(), seed=seed)
            states, proposal = assignment.run(Mipro(MIPROSettings(auto="medium", trials=40)))
            assert proposal.values == BEST, seed
            assert proposal.before == states[-1]["search"]["full"][0]["mean"] < 0.4
            assert (proposal.after or 0.0) > 0.7

    def test_demonstrations_come_from_runs_that_were_right_and_are_never_scored_on(
        self, job: Any
    ) -> None:
        target = two_steps(demos=Demos(max=3)).bind(BEST)
        assignment = job(target, METRIC, rows(100), scripted(), keys=("second.demos",))
        traced, scored = watched(assignment)
        (first, *_), proposal = assignment.run(Mipro())
        for demos in first["sets"]["second.demos"]:
            assert {demo["outputs"]["output"] for demo in demos} == {"right"}
        assert traced
        assert scored
        assert not {name for names in traced for name in names} & {
            name for _, names in scored for name in names
        }
        assert set(proposal.values) <= {"second.demos"}

    def test_the_incumbent_is_fully_evaluated_first_and_the_best_average_every_five_trials(
        self, job: Any
    ) -> None:
        assignment = job(two_steps(), METRIC, rows(150), scripted())
        _, scored = watched(assignment)
        states, proposal = assignment.run(Mipro(MIPROSettings(trials=12)))
        sizes = [len(names) for _, names in scored]
        assert sizes == [100, *[35] * 5, 100, *[35] * 5, 100, 35, 35, 100]
        assert scored[0][0] == [{}]
        full, last = scored[0][1], states[-1]["search"]
        assert all(set(names) <= set(full) for _, names in scored)
        small = [tuple(names) for _, names in scored if len(names) == 35]
        assert len(set(small)) == len(small)  # each trial has a minibatch of its own
        for size in (5, 10):
            before = [Trial(**trial) for trial in last["trials"][:size]]
            known = [trial["point"] for trial in last["full"][: size // 5]]
            assert last["full"][size // 5]["point"] == promising(before, known)
        means = [trial["mean"] for trial in last["full"]]
        assert len(means) == 4
        assert (proposal.before, proposal.after) == (means[0], max(means))

    def test_values_that_break_the_runs_only_lose(self, job: Any) -> None:
        def fragile(message: str, rng: np.random.Generator) -> str:
            if "second style" in message and not kind_of(message):
                raise CallError("refused")
            return script(message, rng)

        states, proposal = job(
            two_steps(), METRIC, rows(80), scripted(fragile), keys=("second.prompt",)
        ).run(Mipro())
        assert proposal.values == {}
        broken = [
            trial["mean"]
            for trial in states[-1]["search"]["trials"]
            if trial["point"]["second.prompt"]
        ]
        assert broken
        assert set(broken) == {0.0}


def demo(number: int) -> dict[str, dict[str, object]]:
    return {"inputs": {"question": f"q{number}"}, "outputs": {"output": f"a{number}"}}


class TestDemonstrations:
    def test_expected_answers_serve_where_the_inputs_are_those_of_the_system(self) -> None:
        question = Input("question", str)
        plain = System(
            "one",
            outputs={"answer": LLM("only", prompt=Text("Answer."))(question=question)},
            lm="lm",
        )
        found = labelled_demos(plain, exact_match("answer"), rows(2))
        assert found == {
            "only": [
                {"inputs": {"question": f"what is e {i}"}, "outputs": {"output": "right"}}
                for i in range(2)
            ]
        }
        assert labelled_demos(plain, METRIC, rows(2)) == {}
        assert (
            labelled_demos(two_steps(), exact_match("answer"), rows(2)) == {}
        )  # it also reads a plan


class TestSizes:
    def test_too_few_runs_are_no_search(self) -> None:
        assert plan_trials(20, 35, 300, least=8, examples=400, runs=15) is None
        assert plan_trials(20, 35, 300, least=8, examples=0, runs=math.inf) is None
        assert plan_trials(0, 35, 300, least=8, examples=400, runs=math.inf) is None


def test_prompts_and_demonstrations_are_one_job() -> None:
    target = two_steps(demos=Demos(max=2), max_tokens=Choice(8, 16))
    settings = MIPROSettings(auto="heavy", proposers=("llm", "edits"), lm="big", trials=9)
    made = method("mipro", target, OptimizeSettings(mipro=settings))
    keys = ["first.prompt", "second.demos", "second.prompt"]
    assert [sorted(job.keys) for job in made.jobs] == [keys]
    assert dict(made.optimizers) == {"mipro": Mipro(settings)}
