"""TextGrad's requests beside those of the authors' library, recorded by benchmarks/measure/prompts/textgrad_parity.py."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure.prompts.textgrad_parity import OUTPUT, SYSTEMS, information, summarize
from compound import LLM, Example, Function, Input, Loop, Score, System, Text
from compound.core.errors import CallError
from compound.graph.component import Output
from compound.metrics import custom
from compound.optimization.budget_plan import plan_job
from compound.optimization.method import RequestCount
from compound.optimizers.baselines.textgrad import TextGrad, TextGradSettings
from compound.testing import ScriptedLM

RECORDED = json.loads(Path(OUTPUT).read_text(encoding="utf-8"))
EXAMPLES: int = RECORDED["examples"]
ONCE = TextGradSettings(steps=1, batch=EXAMPLES)


def tooled(a: str) -> str:
    return f"@TOOL {a}"


def built(steps: Mapping[str, Sequence[str]], fixed: Sequence[str] = ()) -> System:
    """Return a system with the given steps; the prompts of some are not parameters."""
    outputs: dict[str, Output] = {}
    for step, earlier in steps.items():
        sources: dict[str, Any] = {name: outputs[name] for name in earlier}
        if step == "tool":
            outputs[step] = Function("tool", tooled)(**sources)
            continue
        prompt = f"@PROMPT-{step}" if step in fixed else Text(f"@PROMPT-{step}")
        node = LLM(step, prompt=prompt)(**(sources or {"question": Input("question", str)}))
        outputs[step] = node
    return System("steps", outputs={"answer": [*outputs.values()][-1]}, lm="lm")


def script(message: str) -> str:
    kind = kind_of(message)
    number = re.findall(r"@[A-Z]+(?:-[a-z]+)*-(\d+)", message)[0]
    if kind.startswith("rewrite"):
        return f"<prompt>@PROMPT-{kind.split()[1]} better</prompt>"
    if kind.startswith("run"):
        return f"@OUTPUT-{kind.split()[1]}-{number}"
    what, step = kind.split()[:2]
    return f"@FEEDBACK-{what}-{step}-{number}"


def kind_of(message: str) -> str:
    """Return the kind of a request, as in the recorded ones."""
    steps = re.findall(r"step(?:: |, )(\w+) writes output", message)
    if "Criticism of the instruction" in message:
        return f"rewrite {steps[0]}"
    if "What is wrong with the instruction" in message:
        return f"prompt {steps[0]}"
    if "What is wrong with the output of the step" in message:
        return f"output {steps[0]} read by score"
    if "What is wrong with the output of the earlier step" in message:
        return f"output {steps[1]} read by {steps[0]}"
    return f"run {re.findall(r'@PROMPT-(.)', message)[0]}"


async def graded(outputs: Any, example: Example) -> Score:
    return Score(0.5, f"@SCORE-{example.id}")


def rows(n: int = 8) -> list[Example]:
    return [
        Example(f"{i}", {"question": f"@QUESTION-{i}"}, {"answer": f"@GOLD-{i}"}) for i in range(n)
    ]


def requests(assignment: Any) -> list[tuple[str, str]]:
    texts = [request.messages[0].content for _, request in assignment.proposal_requests]
    return [(kind_of(text), text) for text in texts]


def in_one_step(
    job: Any, target: System, reply: Any = script, batch: int = EXAMPLES, **more: Any
) -> Any:
    assignment = job(target, custom(graded), rows(), lambda: ScriptedLM(reply), **more)
    assignment.states, _ = assignment.run(TextGrad(TextGradSettings(steps=1, batch=batch)))
    return assignment


class TestLibrary:
    @pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "tool"])
    def test_requests_are_as_many_as_the_librarys_and_contain_as_much(
        self, job: Any, name: str
    ) -> None:
        found = summarize(requests(in_one_step(job, built(SYSTEMS[name]))))
        recorded = RECORDED["systems"][name]
        assert recorded["steps"] == {step: [*earlier] for step, earlier in SYSTEMS[name].items()}
        assert {kind: row["requests"] for kind, row in found.items()} == {
            kind: row["requests"] for kind, row in recorded["kinds"].items()
        }
        for kind, row in recorded["kinds"].items():
            # the criticism of the result also sees the input of the system
            more = {"QUESTION"} if kind.endswith("by score") else set()
            assert set(found[kind]["information"]) == set(row["information"]) | more, kind

    def test_feedback_passes_through_a_tool_without_a_request(self, job: Any) -> None:
        """The library asks for feedback on what a function read; here the model sees the output behind it."""
        found = summarize(requests(in_one_step(job, built(SYSTEMS["tool"]))))
        recorded = RECORDED["systems"]["tool"]["kinds"]
        expected = {kind: row["requests"] for kind, row in recorded.items() if "tool" not in kind}
        assert {kind: row["requests"] for kind, row in found.items()} == {
            **expected,
            "output a read by b": 2,
        }
        shown = set(found["output a read by b"]["information"])
        assert shown >= {"FEEDBACK-output-b", "OUTPUT-a", "OUTPUT-b", "PROMPT-b", "TOOL"}
        assert "FEEDBACK-output-a" in found["prompt a"]["information"]


class TestChain:
    def test_feedback_from_all_readers_reaches_an_output(self, job: Any) -> None:
        kinds = dict(requests(in_one_step(job, built(SYSTEMS["diamond"]))))
        (feedback,) = re.findall(r"<feedback>(.*)</feedback>", kinds["prompt a"], flags=re.DOTALL)
        assert len(feedback.split("\n")) == 2

    def test_only_what_leads_to_a_prompt_of_the_job_is_criticised(self, job: Any) -> None:
        chain = built(SYSTEMS["chain"])
        kinds = {kind for kind, _ in requests(in_one_step(job, chain, keys=["b.prompt"]))}
        assert kinds == {"output b read by score", "prompt b", "rewrite b"}
        kinds = {kind for kind, _ in requests(in_one_step(job, chain, keys=["a.prompt"]))}
        assert kinds == {"output b read by score", "output a read by b", "prompt a", "rewrite a"}

    def test_feedback_passes_through_a_step_with_a_fixed_prompt(self, job: Any) -> None:
        found = requests(in_one_step(job, built(SYSTEMS["chain"], fixed=["b"])))
        kinds = [kind for kind, _ in found]
        assert sorted(set(kinds)) == [
            "output a read by b",
            "output b read by score",
            "prompt a",
            "rewrite a",
        ]
        assert "PROMPT-b" in information(dict(found)["output a read by b"])

    def test_an_output_without_feedback_ends_the_chain(self, job: Any) -> None:
        def silent(message: str) -> str:
            if kind_of(message) == "output a read by b":
                raise CallError("content filter")
            return script(message)

        kinds = {kind for kind, _ in requests(in_one_step(job, built(SYSTEMS["chain"]), silent))}
        assert {"prompt b", "rewrite b"} < kinds
        assert not {"prompt a", "rewrite a"} & kinds

    def test_a_failed_run_is_criticised_from_the_call_that_failed(self, job: Any) -> None:
        def failing(message: str) -> str:
            if kind_of(message) == "run b" and re.search(r"OUTPUT-a-[13]", message):
                raise CallError("refused")
            return script(message)

        assignment = in_one_step(job, built(SYSTEMS["chain"]), failing, batch=4)
        losses = [text for kind, text in requests(assignment) if kind == "output b read by score"]
        failed = [text for text in losses if re.search("QUESTION-[13]", text)]
        assert len(losses) == 4
        assert 0 < len(failed) < 4
        for text in failed:
            assert (
                "The step wrote nothing\nThe result of the system: the run failed: refused\n"
                in text
            )
        assert all("the run failed" not in text for text in losses if text not in failed)

    def test_all_prompts_of_a_job_change_in_one_step(self, job: Any) -> None:
        assert in_one_step(job, built(SYSTEMS["chain"])).states[-1]["values"] == {
            "a.prompt": "@PROMPT-a better",
            "b.prompt": "@PROMPT-b better",
        }

    def test_each_turn_of_a_loop_reads_the_one_before(self, job: Any) -> None:
        assignment = in_one_step(job, looping(3))
        kinds = [kind for kind, _ in requests(assignment)]
        assert kinds.count("output a read by score") == 2
        assert kinds.count("output a read by a") == 2 * 2
        assert kinds.count("prompt a") == 2 * 3
        assert len(kinds) - 1 <= planned(assignment)[0].count == 2 * (3 + 3 + 3)

    @pytest.mark.parametrize("name", SYSTEMS)
    def test_the_declared_requests_are_those_made(self, job: Any, name: str) -> None:
        """The number of requests in a graph without composites is exact."""
        assignment = in_one_step(job, built(SYSTEMS[name]))
        criticism, rewriting = planned(assignment)
        made = requests(assignment)
        assert criticism.count == sum(not kind.startswith("rewrite") for kind, _ in made)
        assert rewriting.count == sum(kind.startswith("rewrite") for kind, _ in made)


def planned(assignment: Any) -> Sequence[RequestCount]:
    plan = plan_job(assignment.problem(TextGrad(ONCE)), assignment.job, 1000)
    assert plan is not None
    return plan.requests


def looping(turns: int) -> System:
    question = Input("question", str)
    step = LLM("a", prompt=Text("@PROMPT-a"))(question=question)
    body = System("body", outputs={"question": step})
    loop = Loop("loop", body, carry={"question": "question"}, max_turns=turns)(question=question)
    return System("looping", outputs={"answer": loop}, lm="lm")
