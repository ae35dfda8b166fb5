"""GEPA: a phrase that only reflection on runs can find, within the budget, resumable, and off the disk."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from compound.components.function import FirstOf, Function
from compound.components.llm import LLM
from compound.core.errors import CallError
from compound.core.example import Example, Score
from compound.evaluation.metrics.custom import custom
from compound.graph.component import Input
from compound.graph.space import Demos, Text
from compound.graph.system import System
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.baselines.gepa import GEPA, GEPASettings
from compound.optimizers.methods import method
from compound.testing import ScriptedLM

pytestmark = pytest.mark.usefixtures("without_reports")

HIDDEN = "Answer in metres."
USELESS = ("Be brief.", "Be polite.")
REFLECTING = "write a new instruction for the assistant"


def right(message: str) -> bool:
    """Two of ten questions are answered right; with the hidden phrase eight are, but not the first two."""
    (number,) = re.findall(r"(?:Question|question): number (\d+)", message)
    return 1 <= int(number) % 10 <= 8 if HIDDEN in message else int(number) % 10 < 2


def script(message: str, rng: np.random.Generator) -> str:
    """Answer, or add a phrase to the instruction: the hidden one is as likely as each of the others."""
    if REFLECTING in message:
        instruction = message.split("```")[1].strip()
        phrase = (HIDDEN, *USELESS)[rng.integers(3)]
        return f"The unit is missing.\n```\n{instruction} {phrase}\n```"
    return "right" if right(message) else "wrong"


async def graded(outputs: Any, example: Example) -> Score:
    return Score(float(outputs["answer"] == "right"), f"{example.id} was graded")


METRIC = custom(graded)


def system(text: str | Text = "Answer.", **more: Any) -> System:
    prompt = Text(text) if isinstance(text, str) else text
    step = LLM("answerer", prompt=prompt, **more)(question=Input("question", str))
    return System("units", outputs={"answer": step}, lm="lm")


def functions() -> System:
    """The same without a model: nothing of it is cached."""

    def answered(question: str, prompt: str) -> str:
        return "right" if right(f"{prompt} Question: {question}") else "wrong"

    step = Function("answerer", answered, prompt=Text("Answer."))(question=Input("question", str))
    return System("functions", outputs={"answer": step}, lm="lm")


def rows(n: int) -> list[Example]:
    return [Example(f"e{i}", {"question": f"number {i}"}, {"answer": f"{i} m"}) for i in range(n)]


def scripted(reply: Callable[..., Any] = script) -> Callable[[], ScriptedLM]:
    return lambda: ScriptedLM(reply)


def asked(lm: ScriptedLM, mark: str) -> list[str]:
    return [r.messages[-1].text for r in lm.requests if mark in r.messages[-1].text]


def shown(text: str) -> list[str]:
    return re.findall(r"(?:question|Question): (number \d+)", text)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "gepa"] == []


class TestSearch:
    def test_what_is_reflected_on_is_never_what_candidates_are_compared_on(self, job: Any) -> None:
        assignment = job(system(), METRIC, rows(60), scripted(), 250)
        batches = watched(assignment)
        assignment.run(GEPA())
        _, pareto = batches[0]
        reflected = {
            question for text in asked(assignment.lm, REFLECTING) for question in shown(text)
        }
        assert len(reflected) > 9
        assert not reflected & set(pareto)
        assert [questions for _, questions in batches if len(questions) > 3].count(pareto) > 2
        assert {len(questions) for _, questions in batches} == {3, len(pareto)}


def watched(assignment: Any) -> list[tuple[dict[str, str], list[str]]]:
    batches: list[tuple[dict[str, str], list[str]]] = []
    original = assignment.scorer.traces

    async def traces(values: Mapping[str, str], examples: Any) -> Any:
        start = assignment.task.system.configuration
        changed = {key: text for key, text in values.items() if text != start[key]}
        batches.append((changed, [example.inputs["question"] for example in examples]))
        return await original(values, examples)

    assignment.scorer.traces = traces
    return batches


class TestReflection:
    def test_the_model_reads_what_the_component_did_and_what_came_of_it(self, job: Any) -> None:
        hidden = LLM("other", prompt="Prepare.")(question=Input("question", str))
        step = LLM("answerer", prompt=Text("Answer."))(hint=hidden, question=Input("question", str))
        target = System("two", outputs={"answer": step}, lm="lm")

        def hinting(message: str, rng: np.random.Generator) -> str:
            return "a hint" if "Prepare." in message else script(message, rng)

        assignment = job(target, METRIC, rows(60), scripted(hinting))
        assignment.run(GEPA(GEPASettings(iterations=1)))
        (text,) = asked(assignment.lm, REFLECTING)
        numbers = re.findall(r"It read hint: a hint; question: number (\d+)", text)
        assert len(numbers) == 3
        for number in numbers:
            answer, score = ("right", 1) if int(number) % 10 < 2 else ("wrong", 0)
            others = (
                f"## Other steps of the run\nother read question: number {number}\n"
                "other wrote output: a hint\n\n"
            )
            assert (
                f"## Inputs and outputs\nIt read hint: a hint; question: number {number}\n"
                f"It wrote output: {answer}\n\n{others}"
                f"## Result of the whole system\nanswer: {answer}\n\n"
                f"## Expected result\nanswer: {number} m\n\n## Score\n{score}.000 (e{number} was graded)\n"
            ) in text
        assert "```\nAnswer.\n```" in text
        assert "other wrote output: a hint" in text

    def test_a_component_that_was_not_called_is_not_reflected_on(self, job: Any) -> None:
        """It has every other turn, and nothing to show."""
        question = Input("question", str)
        never = LLM("never", prompt=Text("x"))(question=question, when=question.equals("y"))
        step = LLM("answerer", prompt=Text("Answer."))(question=question)
        answer = FirstOf("pick", str)(a=never, b=step)
        target = System("two", outputs={"answer": answer}, lm="lm")
        assignment = job(target, METRIC, rows(60), scripted())
        states, _ = assignment.run(GEPA(GEPASettings(iterations=12)))
        assert states[-1]["answers"].count(None) >= 2
        assert {text.split("```")[1].split()[0] for text in asked(assignment.lm, REFLECTING)} == {
            "Answer."
        }

    @pytest.mark.parametrize("reply", ["``` ```", "```\nAnswer.\n```", f"```\n{'x' * 31}\n```"])
    def test_a_text_that_is_of_no_use_is_never_run(self, job: Any, reply: str) -> None:
        """None, the same as before, or one that the parameter refuses."""

        def writing(message: str, rng: np.random.Generator) -> str:
            return reply if REFLECTING in message else script(message, rng)

        assignment = job(
            system(Text("Answer.", max_length=30)), METRIC, rows(60), scripted(writing)
        )
        batches = watched(assignment)
        states, proposal = assignment.run(GEPA(GEPASettings(iterations=6)))
        assert len(asked(assignment.lm, REFLECTING)) >= 3
        assert (len(states), dict(proposal.values), proposal.tried) == (7, {}, 0)
        assert all(values == {} for values, _ in batches)

    def test_a_request_that_fails_costs_an_iteration(self, job: Any) -> None:
        count = 0

        def moody(message: str, rng: np.random.Generator) -> str:
            nonlocal count
            if REFLECTING in message:
                count += 1
                if count % 2:
                    raise CallError("content filter")
            return script(message, rng)

        states, proposal = job(system(), METRIC, rows(80), scripted(moody)).run(
            GEPA(GEPASettings(iterations=20))
        )
        assert len(states) == 21
        assert HIDDEN in proposal.values["answerer.prompt"]

    def test_a_prompt_that_breaks_the_runs_only_loses(self, job: Any) -> None:
        def fragile(message: str, rng: np.random.Generator) -> str:
            if REFLECTING not in message and any(phrase in message for phrase in USELESS):
                raise CallError("refused")
            return script(message, rng)

        _, proposal = job(system(), METRIC, rows(80), scripted(fragile), 300).run(GEPA())
        assert proposal.values == {"answerer.prompt": f"Answer. {HIDDEN}"}


class TestBudget:
    def test_an_iteration_is_begun_only_if_the_share_holds_all_of_it(self, job: Any) -> None:
        """The incumbent on 8 examples; an iteration takes at most 3 + 3 + 8, and here 3 + 3."""
        useless = scripted(lambda m, rng: script(m, rng).replace(HIDDEN, "Be quick."))
        fixed = {"minibatch": 8, "seed": 4}
        for share, iterations in [(8 + 14, 1), (8 + 6 + 14 - 1, 1), (8 + 6 + 14, 2)]:
            assignment = job(functions(), METRIC, rows(60), useless, share, **fixed)
            states, _ = assignment.run(GEPA())
            assert len(asked(assignment.lm, REFLECTING)) == len(states) - 1 == iterations
            assert assignment.spent == 8 + 6 * iterations


class TestMethod:
    def test_one_job_has_the_texts_of_all_components(self) -> None:
        first = LLM("one", prompt=Text("x"), demos=Demos(max=2))(question=Input("question", str))
        second = LLM("two", prompt="fixed")(text=first)
        third = LLM("three", prompt=Text("x"))(text=second)
        settings = OptimizeSettings(gepa=GEPASettings(lm="big"))
        made = method("gepa", System("three", outputs={"answer": third}), settings)
        assert [(job.optimizer, job.keys) for job in made.jobs] == [
            ("gepa", ("one.prompt", "three.prompt"))
        ]
        assert dict(made.optimizers) == {"gepa": GEPA(GEPASettings(lm="big"))}
