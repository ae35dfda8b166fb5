"""TextGrad and OPRO as methods: a prompt that criticism leads to the known best, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from compound.components.function import Function
from compound.components.llm import LLM
from compound.core.errors import CallError
from compound.core.example import Example, Score
from compound.evaluation.metrics.custom import custom
from compound.graph.component import Input
from compound.graph.space import Demos, Text
from compound.graph.system import System
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.baselines.textgrad import (
    TextGrad,
    TextGradSettings,
)
from compound.optimizers.methods import method
from compound.testing import ScriptedLM

pytestmark = pytest.mark.usefixtures("without_reports")

RIGHT = {
    0: 1,
    1: 2,
    2: 4,
    3: 6,
    4: 9,
    5: 5,
}  # of ten questions, by the level in the prompt; else none


def level_of(text: str) -> int:
    return int(re.findall(r"Level (\d+)", text)[-1])


def answer(message: str) -> str:
    (number,) = re.findall(r"Question: number (\d+)", message)
    return "right" if int(number) % 10 < RIGHT.get(level_of(message), 0) else "wrong"


def script(message: str) -> str:
    """Answer; criticise an output or the prompt; or raise the level by one, as the criticism asks."""
    if "What is wrong with the output" in message:
        return "The level of the instruction is too low."
    if "What is wrong with the instruction" in message:
        return f"Level {level_of(message)} is too low."
    if "Criticism of the instruction" in message:
        return f"Here it is:\n<prompt>\nLevel {level_of(message) + 1}.\nBe exact.\n</prompt>"
    return answer(message)


async def graded(outputs: Any, example: Example) -> Score:
    right = outputs["answer"] == "right"
    return Score(float(right), "" if right else f"{example.id} should be right")


METRIC = custom(graded)


def system(prompt: str | Text = "Level 0.", **more: Any) -> System:
    text = Text(prompt) if isinstance(prompt, str) else prompt
    step = LLM("answerer", prompt=text, **more)(question=Input("question", str))
    return System("levels", outputs={"answer": step}, lm="lm")


def rows(n: int, kind: str = "e") -> list[Example]:
    return [Example(f"{kind}{i}", {"question": f"number {i}"}) for i in range(n)]


def scripted(reply: Callable[[str], str] = script) -> Callable[[], ScriptedLM]:
    return lambda: ScriptedLM(reply)


def asked(lm: ScriptedLM, mark: str) -> list[str]:
    return [r.messages[-1].text for r in lm.requests if mark in r.messages[-1].text]


class TestTextGrad:
    def test_criticism_leads_to_the_best_prompt_and_what_is_worse_is_reverted(
        self, job: Any
    ) -> None:
        states, proposal = job(system(), METRIC, rows(120), scripted()).run(TextGrad())
        assert proposal.values == {"answerer.prompt": "Level 4.\nBe exact."}
        levels = [level_of(state["values"].get("answerer.prompt", "Level 0.")) for state in states]
        assert levels == [0, 1, 2, 3, 4] + [4] * 8
        assert proposal.tried == 12
        assert proposal.before == pytest.approx(0.1, abs=0.08)
        assert proposal.after == pytest.approx(0.9, abs=0.08)

    def test_what_is_criticised_is_never_what_is_validated_on(self, job: Any) -> None:
        assignment = job(system(), METRIC, rows(60), scripted())
        states, _ = assignment.run(TextGrad())
        (held_out,) = {state["held"] for state in states}
        criticised = {n for text in criticisms(assignment) for n in numbers(text)}
        assert len(criticised) <= 60 - held_out
        validated = {
            n
            for text in asked(assignment.lm, "Question:")
            if "Level 5" in text
            for n in numbers(text)
        }
        assert len(validated) == held_out == 30
        assert not validated & criticised

    def test_where_repeats_are_paid_for_so_is_the_incumbent(self, job: Any) -> None:
        """As above, but each validation takes 16: 8 and three times 19 of 83 runs."""

        def answered(question: str, prompt: str) -> str:
            return answer(f"{prompt} Question: {question}")

        node = Function("answerer", answered, prompt=Text("Level 0."))(
            question=Input("question", str)
        )
        target = System("functions", outputs={"answer": node}, lm="lm")
        assignment = job(target, METRIC, rows(120), scripted(), 83, minibatch=8)
        states, _ = assignment.run(TextGrad())
        assert (states[-1]["step"], assignment.spent) == (3, 65)

    def test_before_and_after_are_means_over_the_same_held_out_examples(self, job: Any) -> None:
        assignment = job(system(), METRIC, rows(120), scripted())
        states, proposal = assignment.run(TextGrad(TextGradSettings(held_out=30)))
        shown = [numbers(text) for text in asked(assignment.lm, "Question:") if "Level 4" in text]
        held = {n for (n,) in shown} - {n for text in criticisms(assignment) for n in numbers(text)}
        assert states[0]["held"] == len(held) == 30
        assert proposal.before == sum(n % 10 < 1 for n in held) / 30
        assert proposal.after == sum(n % 10 < 9 for n in held) / 30


def criticisms(assignment: Any) -> list[str]:
    return asked(assignment.lm, "What is wrong with the instruction")


def numbers(text: str) -> list[int]:
    return [
        int(n) for n in re.findall(r"(?:(?:system|It) read question|Question): number (\d+)", text)
    ]


class TestRequests:
    def test_momentum_shows_the_versions_that_were_written(self, job: Any) -> None:
        """Also those that were reverted; the current one is not among them."""

        def falling(message: str) -> str:
            if "Criticism of the instruction" in message:
                past = re.findall(r"<past>Level (\d+)", message)
                return f"<prompt>Level {10 + len(past)}.</prompt>"
            return script(message)

        assignment = job(system("Level 4."), METRIC, rows(60), scripted(falling))
        assignment.run(TextGrad(TextGradSettings(steps=5, momentum=3)))
        texts = asked(assignment.lm, "Criticism of the instruction")
        assert [re.findall(r"<past>Level (\d+)", text) for text in texts] == [
            [],
            ["10"],
            ["10", "11"],
            ["10", "11", "12"],
            ["11", "12", "13"],
        ]


class TestFailures:
    @pytest.mark.parametrize(
        "silent",
        ["What is wrong with the output", "What is wrong with the instruction", "Criticism of the"],
    )
    def test_a_model_that_gives_no_answer_costs_a_step(self, job: Any, silent: str) -> None:
        """Every other request fails; the steps between them go on."""
        count = 0

        def moody(message: str) -> str:
            nonlocal count
            if silent in message:
                count += 1
                if count % 2:
                    raise CallError("content filter")
            return script(message)

        states, proposal = job(system(), METRIC, rows(80), scripted(moody)).run(TextGrad())
        assert states[-1]["step"] == 12
        assert level_of(str(proposal.values)) == 4

    def test_a_prompt_that_breaks_the_runs_is_given_up(self, job: Any) -> None:
        """From level 3 on every run fails: that ends neither the run nor the search."""

        def fragile(message: str) -> str:
            if "Question:" in message and level_of(message) >= 3:
                raise CallError("refused")
            return script(message)

        states, proposal = job(system(), METRIC, rows(80), scripted(fragile)).run(TextGrad())
        assert level_of(str(proposal.values)) == 2
        assert states[-1]["step"] == 12


class TestMethods:
    @pytest.mark.parametrize("name", ["opro", "textgrad"])
    def test_every_component_with_a_text_has_a_job_of_its_own(self, name: str) -> None:
        first = LLM("one", prompt=Text("x"), demos=Demos(max=2))(question=Input("question", str))
        second = LLM("two", prompt="fixed")(text=first)
        third = LLM("three", prompt=Text("x"))(text=second)
        made = method(name, System("three", outputs={"answer": third}), OptimizeSettings())
        assert [(job.optimizer, job.keys) for job in made.jobs] == [
            (name, ("one.prompt",)),
            (name, ("three.prompt",)),
        ]
