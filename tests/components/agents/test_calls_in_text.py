"""Tool calls that a model wrote as text, in the spellings that models are trained with."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

import compound as cp
from compound.core.engine import Completion, FinishReason, Usage
from compound.testing import ScriptedLM


class Person(BaseModel):
    name: str
    age: int


class Step(BaseModel):
    name: str
    arguments: dict[str, int]


def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


def answered(script: list[Any], output: Any, **settings: Any) -> tuple[object, ScriptedLM]:
    """Return the answer of an agent whose model takes no tools itself, and the model."""
    agent = cp.Agent("agent", prompt="P", tools=[add], output=output, **settings)
    lm = ScriptedLM([one if isinstance(one, Completion) else Completion(one) for one in script])
    trace = cp.run(
        cp.System("s", {"y": agent(q=cp.Input("q"))}, lm="m"),
        {"q": "1+2"},
        engines={"m": lm},
        check=False,
    )
    return trace.outputs.get("y") if trace.failure is None else trace.failure, lm


CALLS = [
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "add", "parameters": {"a": 1}}',
    '{"action": "add", "action_input": {"a": 1}}',
    '{"function": {"name": "add", "arguments": "{\\"a\\": 1}"}}',
    '{"tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]}',
    '```json\n{"function": "add", "args": {"a": 1}}\n```',
    '{"tool": "add", "a": 1}',
    '{"add": {"a": 1}}',
    "{'name': 'add', 'arguments': {'a': 1}}",
    '<tool_call>\n{"name": "add", "input": {"a": 1}}\n</tool_call>',
    '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    '[TOOL_CALLS]add[ARGS]{"a": 1}',
    'Thought: a sum.\nAction: add\nAction Input: {"a": 1}',
    '<function=add>{"a": 1}</function>',
    "<function=add><parameter=a>\n1\n</parameter></function>",
    '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
    '{"functionCall": {"name": "add", "args": {"a": 1}}}',
    '{"tool": {"name": "add", "arguments": {"a": 1}}}',
    '{"jsonrpc": "2.0", "method": "add", "params": {"a": 1}, "id": 1}',
    '{"thought": "A sum.", "action": {"name": "add", "arguments": {"a": 1}}}',
    '{"reason": "A sum.", "add": {"a": 1}}',
    '{"tool_uses": [{"recipient_name": "functions.add", "parameters": {"a": 1}}]}',
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
    "add(a=1)",
    "[add(a=1)]",
    "```python\nprint(add(a=1))\n```",
    '<think>Maybe {"tool": "add", "arguments": {"a": 9}}?</think>{"name": "add", "arguments": {"a": 1}}',
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_any_spelling_runs_the_tool(call: str) -> None:
    found, lm = answered([call, '{"answer": "5"}'], int)
    assert found == 5
    assert lm.requests[1].messages[-1].text == "Result of add:\n3"


@pytest.mark.parametrize("output", [int, str])
@pytest.mark.parametrize(
    "text",
    [
        '{"tool": "add", "arguments": {"a": 1}',
        'I call it: {"name": "add", "args": {"a": 1}',
        "{name: add, arguments: {a: 1}}",
        "add(1, 2)",
        "add(a=1",
        "Action: add\nAction Input: one",
        "<tool_call>add the numbers",
        '<tool>add</tool><args>{"a": 1}</args>',
        "<add><a>1</a></add>",
        '>>>add\n{"a": 1}',
        "result = add(a=1)",
        "add a=1",
        "name: add\narguments:\n  a: 1",
        "I will call add with a=1",
        "Calling add(a=1)...",
        "Action: add(a=1)",
        '<think>{"tool": "add", "arguments": {"a": 9}}',
    ],
)
def test_what_looks_like_a_call_is_asked_for_again_and_never_an_answer(
    text: str, output: Any
) -> None:
    found, lm = answered([text, '{"answer": "5"}'], output)
    assert found == output("5")
    assert lm.requests[1].messages[-1].text.startswith("The answer is invalid: ")
    failure, lm = answered([text] * 3, output)
    assert (failure.kind, len(lm.requests)) == ("parse", 2)  # type: ignore[attr-defined]
    assert "<think>" in text or '{"tool": <name>, "arguments": ' in failure.message  # type: ignore[attr-defined]


@pytest.mark.parametrize("enforce", [True, False])
def test_objects_of_the_output_type_are_answers(enforce: bool) -> None:
    assert answered(['{"name": "Ada", "age": 3}'], Person, enforce=enforce)[0] == Person(
        name="Ada", age=3
    )
    step = Step(name="Ada", arguments={"x": 1})
    assert answered(['{"name": "Ada", "arguments": {"x": 1}}'], Step, enforce=enforce)[0] == step
    for text in (
        "I used add(1, 2) and got 3.",
        "add(1, 2) gives 3.",
        "You can add 1 and 2 to get 3.",
        "<b>3</b> is what I add.",
        '{"steps": [{"tool": "add"}]}',
    ):
        assert answered([text], str, enforce=enforce)[0] == text


@pytest.mark.parametrize(
    ("text", "finish", "count"), [('{"answer": 12}', "length", 1), ('{"answer": 12', "length", 2)]
)
def test_a_closed_object_is_complete_wherever_the_text_was_cut(
    text: str, finish: FinishReason, count: int
) -> None:
    found, lm = answered([Completion(text, Usage(1, 5, 5), finish), '{"answer": 12}'], int)
    assert (found, len(lm.requests)) == (12, count)


def test_calls_that_a_server_left_in_the_text_run_the_tool() -> None:
    agent = cp.Agent("agent", prompt="P", tools=[add], output=int)
    lm = ScriptedLM(['<tool_call>{"name": "add", "arguments": {"a": 1}}', "3"], native_tools=True)
    system = cp.System("s", {"y": agent(q=cp.Input("q"))}, lm="m")
    assert cp.run(system, {"q": "?"}, engines={"m": lm}).outputs == {"y": 3}
    assert lm.requests[1].messages[-1].text == "3"
