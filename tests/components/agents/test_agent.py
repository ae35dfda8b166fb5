"""Agents: turns and tool calls as calls of the trace; forks, budgets, bounds, structured output, tuned tools."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import compound as cp
from benchmarks.agents.arithmetic import calculate
from compound.core.engine import Completion, Message, ToolCall
from compound.core.errors import DeclarationError, RunFailed
from compound.execution.trace import from_json, to_json
from compound.graph.call_counts import count_calls
from compound.testing import ScriptedLM


@cp.tool(reproducible=True)
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first summand
        b: second summand
    """
    return a + b


@cp.tool
def look_up(city: str) -> str:
    """Return the country of a city."""
    return {"Lima": "Peru", "Oslo": "Norway"}[city]


def act(tool: str, **arguments: object) -> str:
    return json.dumps({"tool": tool, "arguments": arguments})


def final(answer: object) -> str:
    return json.dumps({"answer": answer})


def system_of(agent: cp.Agent, **inputs: Any) -> cp.System:
    wired = inputs or {"question": cp.Input("question")}
    return cp.System("s", {"answer": agent(**wired)}, lm="m")


def run(agent: cp.Agent, lm: ScriptedLM, **options: Any) -> cp.Trace:
    return cp.run(system_of(agent), {"question": "What?"}, engines={"m": lm}, **options)


def native(*calls: tuple[str, str], text: str = "") -> Completion:
    made = tuple(
        ToolCall(f"id{number}", name, arguments) for number, (name, arguments) in enumerate(calls)
    )
    return Completion(
        text, cp.ext.Usage(1, 5, 5), "tool_calls" if made else "stop", tool_calls=made
    )


class TestTurns:
    def test_turns_and_tool_calls_are_calls_of_the_trace(self) -> None:
        lm = ScriptedLM([act("add", a=1, b=2), act("add", a=3, b=4), final("7")])
        trace = run(cp.Agent("agent", [add]), lm)
        assert trace.outputs == {"answer": "7"}
        assert [(call.address, call.component) for call in trace.calls] == [
            ("agent[0]/turn", "agent_turn"),
            ("agent[0]/tools[0]/call", "agent_call"),
            ("agent[1]/turn", "agent_turn"),
            ("agent[1]/tools[0]/call", "agent_call"),
            ("agent[2]/turn", "agent_turn"),
        ]
        assert trace.call("agent[1]/turn").parents == ("agent[0]/turn", "agent[0]/tools[0]/call")
        assert trace.call("agent[2]/turn").parents == tuple(
            call.address for call in trace.calls[:4]
        )
        assert trace.ends == ("agent[2]/turn",)

    def test_the_model_reads_the_results(self) -> None:
        lm = ScriptedLM([act("look_up", city="Lima"), final("Peru")])
        run(cp.Agent("agent", [look_up], prompt="Be brief.", system="You are a clerk."), lm)
        first, second = lm.requests
        assert first.messages[0] == second.messages[0]
        assert "look_up: Return the country of a city." in first.messages[0].text
        assert [m.role for m in second.messages] == ["system", "user", "assistant", "user"]
        assert second.messages[1].text == "Be brief.\n\nQuestion: What?"
        assert second.messages[3].text == "Result of look_up:\nPeru"

    def test_errors_of_calls_are_results(self) -> None:
        lm = ScriptedLM(
            [
                act("look_up", city="Rome"),
                act("look_up", town="Lima"),
                act("fly"),
                final("I give up"),
            ]
        )
        trace = run(cp.Agent("agent", [look_up]), lm)
        results = [call.outputs["result"] for call in trace.calls_of("agent_call")]
        assert results[0] == "error: KeyError: 'Rome'"
        assert "'city' is a required property" in str(results[1])
        assert results[2] == "error: there is no tool 'fly'; tools: look_up"
        assert trace.outputs == {"answer": "I give up"}

    def test_the_last_turn_must_answer(self) -> None:
        lm = ScriptedLM([act("add", a=1, b=2), act("add", a=1, b=2)])
        with pytest.raises(RunFailed, match="parse"):
            run(cp.Agent("agent", [add], max_turns=2, output=int, reasks=0), lm)
        assert lm.requests[1].messages[-1].text.endswith("Give the final answer now.")
        assert lm.requests[1].format is not None
        assert json.loads(lm.requests[1].format.schema)["required"] == ["answer"]

    def test_a_tool_call_in_the_last_turn_is_no_answer(self) -> None:
        lm = ScriptedLM([act("add", a=1, b=2)] * 3)
        with pytest.raises(RunFailed, match="last turn called the tool 'add'.* raise max_turns"):
            run(cp.Agent("agent", [add], max_turns=2), lm)

    def test_results_are_cut(self) -> None:
        @cp.tool
        def long() -> str:
            return "x" * 10_000

        trace = run(
            cp.Agent("agent", [long], max_result=100), ScriptedLM([act("long"), final("done")])
        )
        assert trace.calls_of("agent_call")[0].outputs["result"] == "x" * 100 + "\n[cut]"

    @given(st.lists(st.sampled_from(["add", "fly", "text"]), max_size=6), st.integers(1, 5))
    @settings(deadline=None, max_examples=30)
    def test_the_number_of_turns_is_bounded(self, script: list[str], turns: int) -> None:
        replies = [act(step, a=1, b=1) if step != "text" else final("done") for step in script]
        lm = ScriptedLM([*replies, *[final("end")] * 6])
        trace = run(cp.Agent("agent", [add], max_turns=turns), lm, check=False)
        assert 1 <= len(trace.calls_of("agent_turn")) <= turns
        assert (
            0 <= len(lm.requests) - len(trace.calls_of("agent_turn")) <= 1
        )  # one call in the last turn

    def test_without_tools_it_is_one_call(self) -> None:
        trace = run(cp.Agent("agent", []), ScriptedLM([final("Lima")]))
        assert [call.address for call in trace.calls] == ["agent[0]/turn"]

    def test_a_transient_error_of_a_tool_is_retried(self) -> None:
        tried: list[int] = []

        @cp.tool(reproducible=True)
        def flaky() -> str:
            tried.append(1)
            if len(tried) < 3:
                raise ConnectionError("gone")
            return "fine"

        trace = run(cp.Agent("agent", [flaky]), ScriptedLM([act("flaky"), final("done")]))
        (call,) = trace.calls_of("agent_call")
        assert (call.outputs["result"], call.attempts) == ("fine", 3)


class TestNative:
    def test_several_calls_run_side_by_side_in_order(self) -> None:
        started: list[int] = []
        together = asyncio.Event()

        @cp.tool
        async def wait(number: int) -> int:
            started.append(number)
            if len(started) == 3:
                together.set()
            await together.wait()
            return number

        replies: list[Any] = [
            native(*[("wait", json.dumps({"number": n})) for n in range(3)], text="So:"),
            "done",
        ]
        lm = ScriptedLM(replies, native_tools=True)
        trace = run(cp.Agent("agent", [wait]), lm)
        results = [(c.address, c.outputs["result"]) for c in trace.calls_of("agent_call")]
        assert results == [(f"agent[0]/tools[{n}]/call", str(n)) for n in range(3)]
        assert [tool.name for tool in lm.requests[0].tools] == ["wait"]
        _, said, *heard = lm.requests[1].messages
        assert (said.text, len(said.tool_calls)) == ("So:", 3)
        assert heard == [Message("tool", str(n), tool_call_id=f"id{n}") for n in range(3)]

    def test_further_calls_are_dropped_and_identifiers_are_unique(self) -> None:
        many = native(*[("add", '{"a": 1, "b": 1}')] * 5)
        lm = ScriptedLM([many, many, "2"], native_tools=True)
        trace = run(cp.Agent("agent", [add], max_calls=2), lm)
        assert len(trace.calls_of("agent_call")) == 4
        ids = [m.tool_call_id for m in lm.requests[2].messages if m.role == "tool"]
        assert len(set(ids)) == 4

    def test_the_format_is_sent_when_the_model_must_answer(self) -> None:
        lm = ScriptedLM([native(("add", '{"a": 1, "b": 1}')), "2"], native_tools=True)
        run(cp.Agent("agent", [add], output=int, max_turns=2), lm)
        assert [request.format is None for request in lm.requests] == [True, False]

    def test_the_last_turn_declares_tools_but_allows_none(self) -> None:
        call = native(("add", '{"a": 1, "b": 1}'))
        lm = ScriptedLM([call, native(("add", "{}"), text="2")], native_tools=True)
        trace = run(cp.Agent("agent", [add], max_turns=2), lm)
        assert [request.tool_choice for request in lm.requests] == ["auto", "none"]
        assert all(request.tools for request in lm.requests)
        assert trace.outputs == {"answer": "2"}


class City(BaseModel):
    name: str
    people: int


class Reply(BaseModel):
    answer: int
    why: str = ""


class Part(BaseModel):
    tool: str
    price: int


class TestOutputs:
    def test_structured_output(self) -> None:
        lm = ScriptedLM([act("look_up", city="Lima"), final({"name": "Lima", "people": 10})])
        agent = cp.Agent("agent", [look_up], output=City)
        trace = run(agent, lm)
        assert trace.outputs == {"answer": City(name="Lima", people=10)}
        assert "people" in lm.requests[0].messages[0].text

    def test_several_outputs(self) -> None:
        agent = cp.Agent("agent", [look_up], output={"city": str, "sure": Literal["yes", "no"]})
        lm = ScriptedLM([final({"city": "Lima", "sure": "yes"})])
        outputs = agent(question=cp.Input("question"))
        system = cp.System("s", {"city": outputs.city, "sure": outputs.sure}, lm="m")
        trace = cp.run(system, {"question": "?"}, engines={"m": lm})
        assert trace.outputs == {"city": "Lima", "sure": "yes"}
        assert "The final answer must be one JSON object" in lm.requests[0].messages[0].text

    @pytest.mark.parametrize(
        ("kind", "text", "answer"),
        [
            ({"answer": int, "why": str}, '{"answer": 3, "why": "x"}', 3),
            ({"answer": int, "why": str}, final({"answer": 3, "why": "x"}), 3),
            (Reply, '{"answer": 3}', Reply(answer=3)),
            (Reply, final({"answer": 3}), Reply(answer=3)),
            (Part, '{"tool": "saw", "price": 3}', Part(tool="saw", price=3)),
        ],
    )
    def test_an_answer_may_have_the_fields_of_the_text_protocol(
        self, kind: Any, text: str, answer: object
    ) -> None:
        outputs = cp.Agent("agent", [add], output=kind, reasks=0)(question=cp.Input("question"))
        system = cp.System(
            "s", {"y": outputs.answer if isinstance(kind, dict) else outputs}, lm="m"
        )
        trace = cp.run(system, {"question": "?"}, engines={"m": ScriptedLM([text])})
        assert trace.outputs == {"y": answer}

    def test_line_breaks_in_texts_need_no_escape(self) -> None:
        @cp.tool
        def write(text: str) -> str:
            """Write a text."""
            return text.upper()

        lm = ScriptedLM(
            ['{"tool": "write", "arguments": {"text": "a\nb"}}', '{"answer": "first\n\tsecond"}']
        )
        trace = run(cp.Agent("agent", [write]), lm)
        assert trace.calls_of("agent_call")[0].outputs["result"] == "A\nB"
        assert trace.outputs == {"answer": "first\n\tsecond"}
        calls: list[Any] = [native(("write", '{"text": "a\nb"}')), "done"]
        trace = run(cp.Agent("agent", [write]), ScriptedLM(calls, native_tools=True))
        assert trace.calls_of("agent_call")[0].outputs["result"] == "A\nB"

    def test_an_answer_that_cannot_be_parsed_is_asked_again(self) -> None:
        agent = cp.Agent("agent", [look_up], output=int, reasks=1)
        lm = ScriptedLM(["many", act("look_up", city="Lima"), final(3)])
        trace = run(agent, lm)
        assert trace.outputs == {"answer": 3}
        assert len(trace.calls_of("agent_turn")) == 2

    def test_reserved_and_wrong_declarations(self) -> None:
        for wrong, message in (
            ({"output": {"message": str, "x": str}}, "'message' cannot be the name of an output"),
            ({"max_turns": 0}, "max_turns must be >= 1"),
            ({"max_calls": 0}, "max_calls must be >= 1"),
            ({"reasks": 1, "weights": cp.LoRA()}, "with weights cannot ask again"),
        ):
            with pytest.raises(DeclarationError, match=message):
                cp.Agent("agent", [add], **wrong)
        with pytest.raises(DeclarationError, match="several tools named 'add'"):
            cp.Agent("agent", [add, add])

    def test_images_of_the_task_are_sent_and_survive_traces(self) -> None:
        dot = cp.Image.from_bytes(b"GIF89a-dot")
        lm = ScriptedLM(lambda _: final("a dot"), takes_images=True)
        system = system_of(cp.Agent("agent", [add]), photo=cp.Input("photo", cp.Image))
        trace = cp.run(system, {"photo": dot}, engines={"m": lm})
        stored = from_json(json.loads(json.dumps(to_json(trace))))
        asyncio.run(cp.Executor({"m": lm}).fork(system, stored, "agent[0]/turn", resample=1))
        assert [request.messages[0].images for request in lm.requests] == [(dot,), (dot,)]


class TestForks:
    @staticmethod
    def script(message: str) -> str:
        if "Result of" in message:
            return final(message.rsplit("\n", 1)[-1])
        return act("add", a=1, b=2)

    def test_a_fork_reruns_the_turns_after_it(self) -> None:
        lm = ScriptedLM(self.script)
        system = system_of(cp.Agent("agent", [add], temperature=1.0))
        executor = cp.Executor({"m": lm})

        async def forked() -> tuple[cp.Trace, cp.Trace, cp.Trace]:
            trace = await executor.run(system, {"question": "?"})
            changed = await executor.fork(
                system, trace, "agent[0]/tools[0]/call", outputs={"result": "99"}
            )
            outputs = {**trace.call("agent[0]/turn").outputs, "tool_calls": [], "output": "early"}
            ended = await executor.fork(system, trace, "agent[0]/turn", outputs=outputs)
            return trace, changed, ended

        trace, changed, ended = asyncio.run(forked())
        assert trace.outputs == {"answer": "3"}
        assert changed.outputs == {"answer": "99"}
        assert [call.reused for call in changed.calls] == [True, True, False]
        assert ended.outputs == {"answer": "early"}
        assert len(ended.calls) == 1


class TestTunedTools:
    agent = cp.Agent(
        "agent",
        [add, look_up],
        prompt=cp.Text("Answer."),
        tune_tools=True,
        max_turns=cp.Int(1, 4, value=2),
    )

    def test_the_texts_are_parameters(self) -> None:
        system = system_of(self.agent)
        assert list(system.parameters) == [
            "agent.max_turns",
            "agent_turn.prompt",
            "agent_turn.tool_add",
            "agent_turn.tool_look_up",
        ]
        assert (
            system.configuration["agent_turn.tool_add"]
            == "add: Add two numbers.\n- a: first summand\n- b: second summand"
        )

    def test_a_rewritten_tool_is_called_by_its_new_name(self) -> None:
        text = "plus: Sum up.\n- a: one\n- b: two"
        system = system_of(self.agent).bind({"agent_turn.tool_add": text})
        lm = ScriptedLM([act("plus", a=1, b=2), final("3")])
        trace = cp.run(system, {"question": "?"}, engines={"m": lm})
        shown = lm.requests[0].messages[0].text
        assert "- plus: Sum up." in shown
        assert '"description": "one"' in shown
        assert "look_up: Return the country" in shown
        assert trace.calls_of("agent_call")[0].outputs["result"] == "3"
        unknown = ScriptedLM([act("add", a=1, b=2), final("3")])
        trace = cp.run(system, {"question": "?"}, engines={"m": unknown})
        assert (
            trace.calls_of("agent_call")[0].outputs["result"]
            == "error: there is no tool 'add'; tools: plus, look_up"
        )

    def test_every_component_pickles(self) -> None:
        agent = cp.Agent("agent", [calculate], tune_tools=True)
        again = pickle.loads(pickle.dumps(system_of(agent)))
        assert again.signature == system_of(agent).signature


class TestLimits:
    def test_calls_are_counted_before_a_run(self) -> None:
        agent = cp.Agent("agent", [add], max_turns=5, max_calls=3)
        counts = {name: str(count) for name, count in count_calls(system_of(agent)).items()}
        assert counts == {"agent_turn": "at most 5", "agent_call": "at most 15"}
