"""Structured output, agents and native tool calls on a real vLLM server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pydantic
import pytest

import compound as cp
from benchmarks.agents.arithmetic import calculate
from compound.core.engine import AnswerFormat, Completion, Message, Request, ToolSpec
from compound.engines.vllm.engine import VLLMEngine
from compound.execution.executor import Executor
from compound.execution.trace import Call, Failure

SUMS = ("2 + 3", "7 * 8", "40 - 15", "81 / 9")
SPEC = ToolSpec("calculate", "Evaluate an expression.", calculate.schema)
# Declares the tools and shows calls in the form of Hermes, which SmolLM2's own template does not.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}\nTo call one, write "
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Part(pydantic.BaseModel):
    """One part of an order."""

    product: str = pydantic.Field(max_length=20)
    count: int = pydantic.Field(ge=1, le=9)


class Order(pydantic.BaseModel):
    """A nested answer."""

    kind: Literal["gift", "own use"]
    parts: list[Part] = pydantic.Field(min_length=1, max_length=2)
    urgent: bool


def run_all(
    system: cp.System, inputs: Sequence[Mapping[str, object]], engine: Any, seed: int = 0
) -> list[cp.Trace]:
    """Run a system on inputs together, on an engine that stays open."""

    async def run() -> list[cp.Trace]:
        executor = Executor({"lm": engine}, seed=seed)
        runs = (executor.run(system, each, example=str(n)) for n, each in enumerate(inputs))
        return await asyncio.gather(*runs)

    return asyncio.run(run())


def test_nested_answers_are_valid(lm: VLLMEngine) -> None:
    reader = cp.LLM("reader", prompt=cp.Text("Read the order."), output=Order, max_tokens=160)
    system = cp.System("orders", {"order": reader(text=cp.Input("text"))}, lm="lm")
    texts = ("Two lamps for my aunt, soon please.", "A chair.", "3 oak tables and 1 bench", "?")
    traces = run_all(system, [{"text": text} for text in texts], lm)
    for trace in traces:
        assert trace.failure is None
        assert Order.model_validate(trace.outputs["order"]) == trace.outputs["order"]
    assert sum(trace.usage.calls for trace in traces) == len(texts)  # none was asked again


def _was_cut(failure: Failure) -> bool:
    return "was cut at max_tokens" in failure.message


def test_an_agent_calls_a_tool_in_the_enforced_form(lm: VLLMEngine) -> None:
    history: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "text": '{"tool": "calculate", "arguments": {"expression": "31 * 47"}}',
            "calls": [
                {
                    "id": "call_1",
                    "name": "calculate",
                    "tool": "calculate",
                    "arguments": '{"expression": "31 * 47"}',
                }
            ],
        },
        {"role": "tool", "id": "call_1", "text": "1457"},
    ]
    demo = {
        "inputs": {
            "task": {"question": "What is 31 * 47?"},
            "history": history,
            "last_turn": False,
        },
        "outputs": {"message": "1457", "tool_calls": [], "output": 1457},
    }
    agent = cp.Agent(
        "agent",
        [calculate],
        prompt=cp.Text("Use the tool, then answer with a number."),
        output=int,
        max_turns=3,
        max_tokens=60,
        temperature=1.0,
        demos=cp.Demos(max=1, value=(demo,)),
    )
    system = cp.System("sums", {"answer": agent(question=cp.Input("question"))}, lm="lm")
    questions = [{"question": f"What is {each}?"} for each in SUMS * 6]
    called: list[Call] = []
    for seed in range(10):  # few samples of a model of this size call the tool
        traces = run_all(system, questions, lm, seed)
        for trace in traces:  # an enforced form can only be cut
            cut = trace.failure
            assert isinstance(trace.outputs["answer"], int) if cut is None else _was_cut(cut)
        called = [c for trace in traces for c in trace.calls if c.component == "agent_call"]
        if called:
            break
    assert called
    assert all(isinstance(call.outputs, Mapping) for call in called)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """An engine whose server declares tools to the model, and parses its calls."""
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    tools = (
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        "--chat-template",
        str(template),
    )
    memory = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.3", "--max-model-len", "2048")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPOUND_VLLM", os.environ["REAL_VLLM"])
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        engine = VLLMEngine("smollm2", args=(*memory, *tools), native_tools=True)
        yield engine
        asyncio.run(engine.aclose())


def ask_alone(engine: VLLMEngine, *requests: Request) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(together())


def worked(number: int, expression: str, value: str) -> tuple[Message, ...]:
    """Return an earlier conversation in which the tool is called."""
    call = cp.ext.ToolCall(f"c{number}", "calculate", json.dumps({"expression": expression}))
    return (
        Message("user", f"What is {expression}?"),
        Message("assistant", "", (call,)),
        Message("tool", value, tool_call_id=call.id),
        Message("assistant", value),
    )


def test_native_calls_are_read_and_their_results_are_shown(native: VLLMEngine) -> None:
    shots = (
        *worked(1, "31 * 47", "1457"),
        *worked(2, "90 - 17", "73"),
        *worked(3, "12 + 55", "67"),
    )
    asked = Request(
        (*shots, Message("user", "What is 7 * 8?")),
        max_tokens=60,
        tools=(SPEC,),
        format=AnswerFormat(schema='{"type": "integer"}'),
    )
    (called,) = ask_alone(native, asked)
    assert [each.name for each in called.tool_calls] == ["calculate"], called.text
    assert json.loads(called.tool_calls[0].arguments).keys() == {"expression"}
    assert called.finish_reason == "tool_calls"

    (answered,) = ask_alone(native, replace(asked, tool_choice="none"))
    assert not answered.tool_calls
    assert isinstance(
        json.loads(answered.text), int
    )  # the format is enforced where no tool may be called
