"""TextGrad and OPRO as methods: a prompt that criticism leads to the known best, and nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compound.api.optimize import optimize
from compound.components.function import Function
from compound.components.llm import LLM
from compound.errors import CallError, TooManyFailures
from compound.evaluation.dataset import Dataset
from compound.evaluation.metrics import custom
from compound.example import Example, Score
from compound.execution.trace import Call, Failure, Trace
from compound.graph.component import Input
from compound.graph.space import Demos, Text
from compound.graph.system import System
from compound.narrowing import entry
from compound.optimizers.baselines.criticism import criticism_request, rewrite_request
from compound.optimizers.baselines.textgrad import TextGrad, held_out_size
from compound.optimizers.methods import method
from compound.optimizers.search.prompts import PromptSearch
from compound.settings.common import BudgetSettings
from compound.settings.optimize import OptimizeSettings
from compound.testing import ScriptedLM

RIGHT = {0: 1, 1: 2, 2: 4, 3: 6, 4: 9, 5: 5}  # of ten questions, by the level in the prompt; else none


def level_of(text: str) -> int:
    return int(re.findall(r"Level (\d+)", text)[-1])


def answer(message: str) -> str:
    (number,) = re.findall(r"Question: number (\d+)", message)
    return "right" if int(number) % 10 < RIGHT.get(level_of(message), 0) else "wrong"


def script(message: str) -> str:
    """Answer; criticise; or raise the level by one, as the criticism asks."""
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
    return [r.messages[-1].content for r in lm.requests if mark in r.messages[-1].content]


class TestTextGrad:
    def test_criticism_leads_to_the_best_prompt_and_what_is_worse_is_given_up(self, job: Any) -> None:
        states, proposal = job(system(), METRIC, rows(120), scripted()).run(TextGrad())
        assert proposal.values == {"answerer.prompt": "Level 4.\nBe exact."}
        levels = [level_of(state["values"].get("answerer.prompt", "Level 0.")) for state in states]
        # levels 2 and 4 are validated and kept; level 6 is not, and each time the search goes back to 4
        assert levels == [0, 1, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5, 4]
        assert proposal.tried == 6
        assert proposal.before == pytest.approx(0.1, abs=0.08)
        assert proposal.after == pytest.approx(0.9, abs=0.08)

    def test_before_and_after_are_means_over_the_same_held_out_examples(self, job: Any) -> None:
        assignment = job(system(), METRIC, rows(120), scripted())
        states, proposal = assignment.run(TextGrad(held_out=30))
        shown = [numbers(text) for text in asked(assignment.lm, "Question:") if "Level 4" in text]
        held = {n for (n,) in shown} - {n for text in criticisms(assignment) for n in numbers(text)}
        assert states[0]["held"] == len(held) == 30
        assert proposal.before == sum(n % 10 < 1 for n in held) / 30
        assert proposal.after == sum(n % 10 < 9 for n in held) / 30

    def test_what_is_criticised_is_never_what_is_validated_on(self, job: Any) -> None:
        assignment = job(system(), METRIC, rows(60), scripted())
        states, _ = assignment.run(TextGrad())
        (held_out,) = {state["held"] for state in states}
        criticised = {n for text in criticisms(assignment) for n in numbers(text)}
        assert len(criticised) <= 60 - held_out
        validated = {
            n for text in asked(assignment.lm, "Question:") if "Level 6" in text for n in numbers(text)
        }
        assert len(validated) == held_out == 30
        assert not validated & criticised

    def test_each_criticism_reads_four_other_traces(self, job: Any) -> None:
        assignment = job(system(), METRIC, rows(120), scripted())
        assignment.run(TextGrad())
        batches = [tuple(sorted(numbers(text))) for text in criticisms(assignment)]
        assert len(batches) == 12
        assert all(len(set(batch)) == 4 for batch in batches)
        assert len(set(batches)) == 12

    def test_a_start_that_is_best_stays(self, job: Any) -> None:
        _, proposal = job(system("Level 4."), METRIC, rows(60), scripted()).run(TextGrad())
        assert proposal.values == {}
        assert proposal.before == proposal.after
        assert proposal.note

    def test_several_prompts_take_turns(self, job: Any) -> None:
        first = LLM("one", prompt=Text("Level 1."))(question=Input("question", str))
        second = LLM("two", prompt=Text("Level 1."))(answer=first, question=Input("question", str))
        target = System("two", outputs={"answer": second}, lm="lm")
        assignment = job(target, METRIC, rows(60), scripted())
        assignment.run(TextGrad(steps=8))
        steps = [re.findall(r"The step: (\w+)", text)[0] for text in criticisms(assignment)]
        assert steps == ["one", "one", "two", "two"] * 2

    @pytest.mark.parametrize("share", [math.inf, 120, 40])
    def test_it_resumes_from_every_step(self, job: Any, share: float) -> None:
        job(system(), METRIC, rows(80), scripted(), share).check_resume(TextGrad)

    @settings(max_examples=40)
    @given(st.integers(0, 200), st.integers(0, 60), st.integers(1, 10), st.integers(1, 7))
    def test_it_never_spends_more_than_its_share(
        self, job: Any, share: int, n: int, minibatch: int, steps: int
    ) -> None:
        assignment = job(system(), METRIC, rows(n), scripted(), share, minibatch=minibatch)
        assignment.run(TextGrad(steps=steps))
        assert assignment.spent <= share

    def test_all_steps_are_made_where_the_share_allows(self, job: Any) -> None:
        # 12 · 4 runs to criticise, and the incumbent and six prompts on ten examples
        states, _ = job(system(), METRIC, rows(120), scripted(), 48 + 70).run(TextGrad())
        assert states[0]["held"] == 10
        assert states[-1]["step"] == 12

    def test_no_step_is_begun_that_cannot_be_validated(self, job: Any) -> None:
        """The incumbent on 8 examples, and three times two batches of 4 and a validation: 56 of 66 runs."""
        assignment = job(system(), METRIC, rows(120), scripted(), 66, minibatch=8)
        states, _ = assignment.run(TextGrad())
        assert (states[-1]["step"], assignment.spent) == (6, 56)

    def test_where_repeats_are_paid_for_so_is_the_incumbent(self, job: Any) -> None:
        """As above, but each validation takes 16: 8 and twice 24 of 76 runs."""

        def answered(question: str, prompt: str) -> str:
            return answer(f"{prompt} Question: {question}")

        node = Function("answerer", answered, prompt=Text("Level 0."))(question=Input("question", str))
        target = System("functions", outputs={"answer": node}, lm="lm")
        assignment = job(target, METRIC, rows(120), scripted(), 76, minibatch=8)
        states, _ = assignment.run(TextGrad())
        assert (states[-1]["step"], assignment.spent) == (4, 56)

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ((50, 8, 12, 4, math.inf), 50),
            ((50, 8, 12, 4, 48 + 7 * 20), 20),
            ((50, 8, 12, 4, 48 + 7 * 20 - 1), 19),
            ((50, 8, 12, 4, 60), 8),  # a minibatch at least, though not all steps will fit
            ((50, 8, 12, 4, 8 + 2 * 5), 5),  # the first two steps and their validation
            ((50, 8, 12, 4, 9), 0),
            ((50, 8, 12, 4, 0), 0),
            ((0, 8, 12, 4, 100), 0),
            ((50, 8, 3, 4, 12 + 3 * 11), 11),  # an odd number of steps is validated twice
            ((50, 8, 12, 4, 48 + 13 * 10, False), 10),  # the incumbent is paid for beside each candidate
        ],
    )
    def test_sizes_are_those_worked_out_by_hand(self, arguments: Any, expected: int) -> None:
        assert held_out_size(*arguments) == expected


def criticisms(assignment: Any) -> list[str]:
    return asked(assignment.lm, "What is wrong with the instruction")


def numbers(text: str) -> list[int]:
    """Which examples a text shows."""
    return [int(n) for n in re.findall(r"(?:system read question|Question): number (\d+)", text)]


class TestRequests:
    def test_a_criticism_sees_the_prompt_and_each_run(self) -> None:
        component = LLM("answerer", prompt=Text("Answer."))
        right = Call("a", "a", "answerer", (), {"question": "q0"}, {"output": "yes"})
        failed = Call("a", "a", "answerer", (), {"question": "q1"}, {}, Failure("parse", "no field"))
        other = Call("b", "b", "other", (), {"question": "hidden"}, {"output": "hidden"})
        traces = [
            Trace(
                "e0", "", 0, 0, {"question": "q0"}, (right, other), {"answer": "yes"}, None, 0.5, "no: maybe"
            ),
            Trace("e1", "", 0, 0, {"question": "q1"}, (failed,), {}, Failure("parse", "no field"), 0.0),
        ]
        request = criticism_request(component, "Answer.", traces, seed=7)
        text = request.messages[0].content
        assert "<prompt>Answer.</prompt>" in text
        assert (
            "Run 1: the system read question: q0\nIt read question: q0\nIt wrote output: yes\n"
            "The result: answer: yes\nIts score: 0.500 (no: maybe)" in text
        )
        assert (
            "It wrote nothing (failed: no field)\nThe result: the run failed: no field\nIts score: 0.000\n"
            in text
        )
        assert "hidden" not in text
        assert request.seed == 7

    def test_the_rewriting_sees_the_prompt_and_the_criticism(self) -> None:
        request = rewrite_request(LLM("answerer", prompt=Text("x")), "Answer.", "Too\nshort.", seed=8)
        text = request.messages[0].content
        assert "answerer writes output" in text
        assert "<prompt>Answer.</prompt>\n\nCriticism of the instruction:\nToo\nshort.\n" in text
        assert request.seed == 8

    def test_a_long_value_is_shortened(self) -> None:
        trace = Trace("e", "", 0, 0, {"question": "x" * 5000}, (), {"answer": "yes"}, None, 0.5)
        text = (
            criticism_request(LLM("answerer", prompt=Text("x")), "Answer.", [trace], seed=0)
            .messages[0]
            .content
        )
        assert "x" * 600 + " …" in text
        assert len(text) < 2000

    def test_the_model_that_writes_is_the_one_that_was_named(self, job: Any) -> None:
        assignment = job(system(), METRIC, rows(40), scripted())
        assignment.run(TextGrad(lm="big"))
        assert [lm for lm, _ in assignment.proposal_requests] == ["big"] * 24

    def test_requests_of_one_job_differ_and_depend_on_the_seed(self, job: Any) -> None:
        def seeds(seed: int) -> list[int]:
            assignment = job(system(), METRIC, rows(40), scripted(), seed=seed)
            assignment.run(TextGrad())
            return [r.seed for r in assignment.lm.requests if "instruction" in r.messages[0].content]

        assert seeds(1) == seeds(1)
        assert len(set(seeds(1))) == len(seeds(1)) == 24
        assert not set(seeds(1)) & set(seeds(2))


class TestFailures:
    @pytest.mark.parametrize("silent", ["What is wrong with the instruction", "Criticism of the instruction"])
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

    @pytest.mark.parametrize(
        "reply", ["", "no prompt here", "<prompt> </prompt>", f"<prompt>{'x' * 31}</prompt>"]
    )
    def test_a_reply_that_holds_no_usable_prompt_costs_a_step(self, job: Any, reply: str) -> None:
        def mute(message: str) -> str:
            return reply if "Criticism of" in message else script(message)

        assignment = job(system(Text("Level 0.", max_length=30)), METRIC, rows(80), scripted(mute))
        states, proposal = assignment.run(TextGrad())
        assert (states[-1]["step"], dict(proposal.values), proposal.tried) == (12, {}, 0)

    def test_an_empty_criticism_is_not_rewritten_from(self, job: Any) -> None:
        def content(message: str) -> str:
            return " " if "What is wrong" in message else script(message)

        assignment = job(system(), METRIC, rows(80), scripted(content))
        assert assignment.run(TextGrad())[1].values == {}
        assert not asked(assignment.lm, "Criticism of")

    def test_a_prompt_that_breaks_the_runs_is_given_up(self, job: Any) -> None:
        """From level 3 on every run fails: that ends neither the run nor the search."""

        def fragile(message: str) -> str:
            if "Question:" in message and level_of(message) >= 3:
                raise CallError("refused")
            return script(message)

        states, proposal = job(system(), METRIC, rows(80), scripted(fragile)).run(TextGrad())
        assert level_of(str(proposal.values)) == 2
        assert states[-1]["step"] == 12

    def test_a_system_that_is_broken_is_an_error(self, job: Any) -> None:
        def down(message: str) -> str:
            raise CallError("no key")

        with pytest.raises(TooManyFailures, match="no key"):
            job(system(), METRIC, rows(80), scripted(down)).run(TextGrad())


# --- as methods ----------------------------------------------------------------------------------------


def writer(message: str) -> str:
    """For OPRO: one level more than the best prompt it is shown."""
    return (
        f"<prompt>Level {level_of(message) + 1}.</prompt>"
        if "new instruction" in message
        else script(message)
    )


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

    def test_opro_writes_and_does_nothing_else(self) -> None:
        made = method("opro", system(), OptimizeSettings())
        assert dict(made.optimizers) == {"opro": PromptSearch(("opro",))}

    @pytest.mark.parametrize(("name", "reply"), [("opro", writer), ("textgrad", script)])
    def test_they_improve_a_system(self, tmp_path: Path, name: str, reply: Callable[[str], str]) -> None:
        def data(kind: str, n: int) -> list[dict[str, Any]]:
            return [{"id": f"{kind}{i}", "question": f"number {i}"} for i in range(n)]

        result = optimize(
            system(),
            Dataset.of(train=data("a", 120), valid=data("b", 40), test=data("c", 40)),
            METRIC,
            OptimizeSettings(method=name, budget=BudgetSettings(system_runs=1200)),
            run_dir=tmp_path / "run",
            engines={"lm": ScriptedLM(reply)},
        )
        assert result.accepted >= 1
        assert result.test_after is not None
        assert result.test_after.mean == 0.9
        assert level_of(entry(result.best, "answerer.prompt", str)) == 4
