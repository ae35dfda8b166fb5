"""OPRO: what a request shows, generations that learn from scores, and sizes worked out by hand."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from compound import LLM, Example, Input, System, Text, Trace
from compound.core.errors import CallError
from compound.execution.trace import Call
from compound.ext import Request
from compound.metrics import custom, exact_match
from compound.optimization.method import ScoredCandidate
from compound.optimizers.baselines.opro import (
    OPRO,
    SHOWN,
    exemplars,
    prompt_request,
)
from compound.testing import ScriptedLM

START = "Level 0."


def level(text: str) -> int:
    return int((re.findall(r"Level (\d+)", text) or ["0"])[-1])


def climbing(message: str, rng: np.random.Generator) -> str:
    """Write a level at most one above the best one shown; answer right the more often the higher it is."""
    if "<prompt>" in message:
        best = max(map(int, re.findall(r"<prompt>Level (\d+)", message)))
        return f"<prompt>Level {max(0, best + int(rng.integers(-1, 2)))}.</prompt>"
    return "right" if rng.random() < 0.1 + 0.15 * min(level(message), 5) else "wrong"


def one_step(**settings: Any) -> System:
    step = LLM("answerer", prompt=Text(START), temperature=1.0, **settings)(
        question=Input("question", str)
    )
    return System("one", outputs={"answer": step}, lm="lm")


def rows(n: int) -> list[Example]:
    return [Example(f"e{i}", {"question": f"q{i}"}, {"answer": "right"}) for i in range(n)]


METRIC = exact_match("answer")


def shown(request: Request) -> list[tuple[str, str]]:
    return re.findall(r"<prompt>(.+?)</prompt> (.+)", request.messages[-1].text)


class TestGenerations:
    def test_later_generations_build_on_earlier_scores(self, job: Any) -> None:
        """A reply is at most one level above what the request shows, so five levels take five generations."""
        states, proposal = job(one_step(), METRIC, rows(60), lambda: ScriptedLM(climbing)).run(
            OPRO()
        )
        assert level(proposal.values["answerer.prompt"]) >= 5
        assert proposal.before is not None
        assert proposal.after is not None
        assert proposal.after > proposal.before + 0.4
        assert states[-1]["done"] == 20

    def test_requests_show_the_scored_incumbent_all_earlier_prompts_and_exemplars(
        self, job: Any
    ) -> None:
        assignment = job(one_step(), METRIC, rows(60), lambda: ScriptedLM(climbing), candidates=4)
        states, _ = assignment.run(OPRO(rows=20))
        requests = [request for _, request in assignment.proposal_requests]
        assert len(requests) == 20 * 4
        assert len({request.seed for request in requests}) == len(requests)
        first = requests[0].messages[-1].text
        assert shown(requests[0]) == [(START, f"score {states[0]['before']:.3f}")]
        assert len(re.findall(r"Input: question: q\d+\nRight answer: right", first)) == 3
        for number in range(1, 20):
            history = states[number]["history"]["answerer.prompt"]
            expected = {scored["text"]: f"score {scored['mean']:.3f}" for scored in history}
            for request in requests[4 * number : 4 * number + 4]:
                assert dict(shown(request)) == expected or len(expected) > SHOWN
        exemplars = {r.messages[-1].text.partition("Examples")[2] for r in requests}
        assert len(exemplars) > 10  # drawn anew for each generation

    def test_every_prompt_is_scored_once_on_the_examples_of_the_incumbent(self, job: Any) -> None:
        assignment = job(one_step(), METRIC, rows(60), lambda: ScriptedLM(climbing))
        scored: list[tuple[list[Any], list[str]]] = []
        score = assignment.scorer.score

        async def watch(candidates: Any, examples: Any) -> Any:
            scored.append((list(candidates), [example.id for example in examples]))
            return await score(candidates, examples)

        assignment.scorer.score = watch
        _, proposal = assignment.run(OPRO(rows=12))
        assert {tuple(names) for _, names in scored} == {tuple(scored[0][1])}
        texts = [
            candidate["answerer.prompt"] for candidates, _ in scored for candidate in candidates
        ]
        assert len(texts) == len(set(texts)) == proposal.tried
        assert START not in texts
        assert assignment.spent == 12 * (1 + proposal.tried)

    def test_prompts_of_earlier_jobs_are_shown_and_not_tried_again(self, job: Any) -> None:
        tried = [ScoredCandidate({"answerer.prompt": f"Level {i}."}, i / 10, 8) for i in (1, 2)]
        assignment = job(one_step(), METRIC, rows(60), lambda: ScriptedLM(climbing), tried=tried)
        states, _ = assignment.run(OPRO(rows=12))
        first = assignment.proposal_requests[0][1]
        assert {("Level 1.", "score 0.100"), ("Level 2.", "score 0.200")} < {*shown(first)}
        texts = [scored["text"] for scored in states[-1]["history"]["answerer.prompt"]]
        assert not {"Level 1.", "Level 2."} & {*texts}

    def test_several_texts_take_turns(self, job: Any) -> None:
        question = Input("question", str)
        first = LLM("first", prompt=Text(START))(question=question)
        two = System(
            "two", outputs={"answer": LLM("second", prompt=Text(START))(plan=first)}, lm="lm"
        )
        states, _ = job(two, METRIC, rows(40), lambda: ScriptedLM(climbing), candidates=3).run(
            OPRO(rows=8)
        )
        counts = {key: len(found) for key, found in states[4]["history"].items()}
        assert len(states[4]["history"]) == 2
        assert all(count > 1 for count in counts.values())

    def test_prompts_that_break_the_runs_only_lose(self, job: Any) -> None:
        def fragile(message: str, rng: np.random.Generator) -> str:
            if "<prompt>" not in message and level(message):
                raise CallError("refused")
            return climbing(message, rng)

        _, proposal = job(one_step(), METRIC, rows(60), lambda: ScriptedLM(fragile)).run(
            OPRO(rows=12)
        )
        assert proposal.values == {}
        assert proposal.tried

    def test_unusable_replies_are_counted_and_end_the_job(self, job: Any) -> None:
        mute = lambda message, rng: "No." if "<prompt>" in message else "right"  # noqa: E731
        assignment = job(one_step(), METRIC, rows(60), lambda: ScriptedLM(mute))
        _, proposal = assignment.run(OPRO(rows=12))
        assert (dict(proposal.values), proposal.tried) == ({}, 0)
        assert assignment._proposals.state.models["lm"].counts["unusable"] == 20


class TestExemplars:
    def trace(self, example: Example, **changes: Any) -> Trace:
        first = Call("first", "first", "first", (), {"question": "q"}, {"output": "a plan"})
        last = Call("second", "second", "second", (), {"plan": "a plan"}, {"output": "wrong"})
        given = {"score": 0.25, **changes}
        return Trace(example.id, "digest", 0, 0, example.inputs, (first, last), **given)

    def system(self) -> System:
        first = LLM("first", prompt=Text(START))(question=Input("question", str))
        return System(
            "two", outputs={"answer": LLM("second", prompt=Text(START))(plan=first)}, lm="lm"
        )

    def found(self, component: str, metric: Any, **changes: Any) -> list[str]:
        target, (example,) = self.system(), rows(1)
        known = {example.id: example}
        return exemplars(
            target.components[component], [self.trace(example, **changes)], target, metric, known
        )

    def test_the_expected_answer_is_shown_where_the_metric_compares_it(self) -> None:
        assert self.found("second", METRIC) == ["Input: plan: a plan\nRight answer: right"]

    def test_other_components_are_shown_at_work(self) -> None:
        assert self.found("first", METRIC) == [
            "Input: question: q\nOutput: output: a plan\nScore of the run: 0.250\n"
            "Right result of the whole system: right"
        ]
        assert self.found("second", custom(lambda outputs, example: 0.0)) == [
            "Input: plan: a plan\nOutput: output: wrong\nScore of the run: 0.250"
        ]


def test_the_best_of_many_are_shown() -> None:
    history = [(f"Prompt {i}.", i / 100) for i in range(50)]
    assert [text for text, _ in shown(prompt_request("step", history, 0))] == [
        f"Prompt {i}." for i in range(30, 50)
    ]
