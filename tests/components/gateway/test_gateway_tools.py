"""Tools and images of external agents that engines without OpenAI's API answer, such as the embedded one."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

import compound as cp
from compound.core.engine import AnswerFormat, Completion, ToolCall
from compound.execution.trace import Trace
from compound.testing import ScriptedLM

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "double", "description": "Double a number.", "parameters": PARAMETERS}
CALL = '{"tool": "double", "arguments": {"a": 4}}'
DOT = "data:image/gif;base64," + base64.b64encode(b"GIF89a-and-so-on").decode()


def run(agent: Callable[[Any], str], lm: Any, *, check: bool = True) -> Trace:
    """Run a system of one agent, which receives a client of the gateway."""

    def call(question: str, base_url: str, api_key: str) -> str:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            return agent(client)

    helper = cp.components.ExternalAgent("helper", call=call)
    system = cp.System("s", {"answer": helper(question=cp.Input("question"))}, lm="m")
    return cp.run(system, {"question": "Twice 4?"}, engines={"m": lm}, check=check)


def chat_agent(client: Any) -> str:
    """Call tools by chat completions until the model answers."""
    messages: list[Any] = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "Twice 4?"},
    ]
    for _ in range(3):
        made = client.chat.completions.create(
            model="x",
            messages=messages,
            max_tokens=40,
            temperature=0,
            tools=[{"type": "function", "function": FUNCTION}],
        )
        choice = made.choices[0]
        if choice.finish_reason != "tool_calls":
            return str(choice.message.content)
        assert choice.message.content is None
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls:
            result = str(2 * json.loads(call.function.arguments)["a"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "no answer"


def responses_agent(client: Any) -> str:
    """Call tools by the Responses API until the model answers."""
    items: list[Any] = [{"role": "user", "content": "Twice 4?"}]
    for _ in range(3):
        made = client.responses.create(
            model="x",
            instructions="Be exact.",
            input=items,
            tools=[{"type": "function", **FUNCTION}],
        )
        calls = [item for item in made.output if item.type == "function_call"]
        if not calls:
            return str(made.output_text)
        for call in calls:
            items.append(call.model_dump(exclude_none=True))
            result = str(2 * json.loads(call.arguments)["a"])
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
    return "no answer"


TOOLS = [{"type": "function", "function": FUNCTION}]


def complete(client: Any, **more: Any) -> Any:
    """Ask once by chat completions."""
    messages = [{"role": "user", "content": "?"}]
    return client.chat.completions.create(model="x", **{"messages": messages, **more})


@pytest.mark.parametrize("agent", [chat_agent, responses_agent])
def test_an_agent_calls_its_tools_by_the_text_protocol(agent: Callable[[Any], str]) -> None:
    lm = ScriptedLM([CALL, '{"answer": "It is 8."}'])
    trace = run(agent, lm)
    assert trace.outputs == {"answer": "It is 8."}
    first, second = lm.requests
    assert "- double: Double a number." in first.messages[0].text
    assert first.format is not None
    assert [(message.role, message.text) for message in second.messages[1:]] == [
        ("user", "Twice 4?"),
        ("assistant", CALL),
        ("user", "Result of double:\n8"),
    ]
    assert [call.outputs["text"] for call in trace.calls] == ['double({"a": 4})', "It is 8."]


@pytest.mark.parametrize("agent", [chat_agent, responses_agent])
def test_an_engine_with_tools_of_its_own_receives_them(agent: Callable[[Any], str]) -> None:
    usage = cp.ext.Usage(1, 5, 5)
    call = Completion("", usage, "tool_calls", tool_calls=(ToolCall("c1", "double", '{"a": 4}'),))
    lm = ScriptedLM([call, Completion("8", usage)], native_tools=True)
    assert run(agent, lm).outputs == {"answer": "8"}
    assert [tool.name for tool in lm.requests[0].tools] == ["double"]
    roles = " ".join(message.role for message in lm.requests[1].messages)
    assert roles == "system user assistant tool"
    assert lm.requests[1].messages[3].tool_call_id == lm.requests[1].messages[2].tool_calls[0].id


def test_a_stream_has_the_call_and_not_its_text() -> None:
    def agent(client: Any) -> str:
        stream = complete(client, stream=True, tools=TOOLS)
        deltas = [chunk.choices[0].delta for chunk in stream]
        texts = "".join(delta.content or "" for delta in deltas)
        (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
        return json.dumps([texts, call.function.name, call.function.arguments])

    assert json.loads(str(run(agent, ScriptedLM([CALL])).outputs["answer"])) == [
        "",
        "double",
        '{"a": 4}',
    ]


@pytest.mark.parametrize(
    ("text", "limit", "ended"),
    [("8", 9, "completed"), ("It is 8.", 9, "completed"), ("It is 8.", 2, "incomplete")],
)
def test_a_stream_of_responses_has_one_message(text: str, limit: int, ended: str) -> None:
    def agent(client: Any) -> str:
        stream = client.responses.create(model="x", input="?", stream=True, max_output_tokens=limit)
        events = [event.type.removeprefix("response.") for event in stream]
        return " ".join(dict.fromkeys(events)) + f" {events.count('output_item.added')}"

    assert run(agent, ScriptedLM([text])).outputs["answer"] == (
        "created output_item.added content_part.added output_text.delta output_text.done content_part.done "
        f"output_item.done {ended} 1"
    )


def ask_about_image(client: Any, url: str = DOT) -> str:
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    try:
        made = complete(client, messages=[{"role": "user", "content": parts}])
    except openai.APIStatusError as error:
        return f"{error.status_code} {error.body}"
    return str(made.choices[0].message.content)


def test_images_reach_a_model_that_takes_them() -> None:
    lm = ScriptedLM(["A dot."], takes_images=True)
    assert run(ask_about_image, lm).outputs == {"answer": "A dot."}
    assert [image.data_url for image in lm.requests[0].messages[0].images] == [DOT]


@pytest.mark.parametrize(
    ("lm", "url", "why"),
    [
        (ScriptedLM(["?"]), DOT, "does not take images"),
        (ScriptedLM(["?"], takes_images=True), "https://example.com/a.png", "not a data URL"),
        (ScriptedLM(["?"], takes_images=True), "data:image/png;base64,AAAA", "cannot be read"),
    ],
)
def test_other_images_are_refused_with_the_reason(lm: ScriptedLM, url: str, why: str) -> None:
    trace = run(lambda client: ask_about_image(client, url), lm, check=False)
    assert str(trace.outputs["answer"]).startswith("400")
    assert why in str(trace.outputs["answer"])
    assert not lm.requests


def answer_to(more: dict[str, object]) -> str:
    """Return what an agent gets for a request with further fields: the status and body of an error."""

    def agent(client: Any) -> str:
        try:
            complete(client, extra_body=more)
        except openai.APIStatusError as error:
            return f"{error.status_code} {error.body}"
        return "answered"

    return str(run(agent, ScriptedLM(["?"]), check=False).outputs["answer"])


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tools": [{"type": "web_search"}]}, "a tool of kind 'web_search'"),
        (
            {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
            "tool_choice",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "double"}}}, "tool_choice"),
        ({"functions": [FUNCTION]}, "functions"),
        ({"n": 2}, "the field n: 2"),
        ({"top_p": 0.1}, "the field top_p: 0.1"),
        ({"frequency_penalty": 1.5}, "the field frequency_penalty: 1.5"),
        ({"logprobs": True, "top_logprobs": 3}, "the field logprobs: true"),
        ({"logit_bias": {"5": 100}}, "the field logit_bias"),
        ({"reasoning_effort": "high"}, "the field reasoning_effort"),
        ({"guided_regex": "[0-9]+"}, "the field guided_regex"),
        ({"response_format": {"type": "grammar"}}, "the format 'grammar'"),
        ({"text": {"verbosity": "low"}}, "the field text.verbosity"),
        ({"previous_response_id": "resp-1"}, "an earlier response"),
        # malformed requests
        ({"tools": 5}, "tools of the request is not a list"),
        ({"response_format": "json"}, "must be an object"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "not a JSON schema",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls of the request is no"),
        ({"messages": [{"role": "user", "content": [{"type": {"a": 1}}]}]}, "content of kind"),
        ({"messages": [{"role": "user", "content": [5]}]}, "content of kind 'int'"),
    ],
)
def test_what_an_engine_cannot_take_is_named(more: dict[str, object], why: str) -> None:
    answer = answer_to(more)
    assert answer.startswith("400")
    assert why in answer
    assert "kind openai" in answer or "invalid_request" in answer


def test_fields_with_their_defaults_and_without_influence_are_accepted() -> None:
    more = {
        "n": 1,
        "top_p": 1.0,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logprobs": False,
        "logit_bias": {},
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "seed": 3,
        "top_logprobs": None,
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
    }
    assert answer_to(more) == "answered"


def test_a_demanded_object_is_a_format_of_the_answer() -> None:
    def agent(client: Any) -> str:
        made = complete(client, response_format={"type": "json_object"})
        return str(made.choices[0].message.content)

    lm = ScriptedLM(["{}"])
    assert run(agent, lm).outputs == {"answer": "{}"}
    assert lm.requests[0].format == AnswerFormat('{"type": "object"}')


def test_an_agent_that_takes_one_call_at_a_time_gets_one() -> None:
    def agent(client: Any) -> str:
        made = complete(client, parallel_tool_calls=False, tools=TOOLS)
        return str([call.function.arguments for call in made.choices[0].message.tool_calls])

    calls = (ToolCall("c1", "double", '{"a": 4}'), ToolCall("c2", "double", '{"a": 5}'))
    lm = ScriptedLM(
        [Completion("", cp.ext.Usage(1, 5, 5), "tool_calls", tool_calls=calls)], native_tools=True
    )
    assert run(agent, lm).outputs == {"answer": "['{\"a\": 4}']"}


@pytest.mark.slow
@pytest.mark.user_cache
def test_the_embedded_model_makes_valid_calls_only(smollm2: str) -> None:
    pytest.importorskip("llguidance")
    seen: list[Any] = []

    def agent(client: Any) -> str:
        messages = [{"role": "user", "content": "Double 4 with the tool."}]
        made = complete(client, messages=messages, max_tokens=40, temperature=0, tools=TOOLS)
        seen.extend(made.choices[0].message.tool_calls or ())
        return str(made.choices[0].message.content)

    helper = cp.components.ExternalAgent(
        "helper",
        call=lambda question, base_url, api_key: agent(
            openai.OpenAI(base_url=base_url, api_key=api_key)
        ),
    )
    system = cp.System("s", {"answer": helper(question=cp.Input("question"))}, lm=smollm2)
    trace = cp.run(system, {"question": "?"})
    assert trace.failure is None
    answer = str(trace.outputs["answer"])
    assert (
        len(seen) + (answer != "None") == 1
    )  # which of the two depends on the processor's number format
    for call in seen:
        assert call.function.name == "double"
        assert [type(value) for value in json.loads(call.function.arguments).values()] == [int]
    assert "{" not in answer  # an answer is no JSON of the protocol
