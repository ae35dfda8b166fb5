"""Exported programs and prompts give the same outputs as the system, from the same scripted server."""

from __future__ import annotations

import ast
import contextlib
import datetime
import enum
import errno
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import dspy
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import compound as cp
from compound.components.answers.answer_values import parse_value
from compound.components.answers.type_notes import field_label
from compound.components.fields import format_value, parse
from compound.errors import ExportError, ParseError
from compound.exports import runtime
from compound.exports.export import TARGETS
from compound.exports.literal import python_literal
from compound.exports.program import describe_type
from compound.graph.types import Port
from compound.testing import ScriptedLM
from compound.testing.chat_server import ChatServer
from export_parts import is_question, is_short, search, shorten

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:.*ReadOnly"
)
SUPPORT = Path(__file__).parents[1] / "support"
DEMO = {"inputs": {"question": "1+1"}, "outputs": {"output": "2"}}


class Person(pydantic.BaseModel):
    name: str
    age: int


def qa() -> cp.System:
    """Return a system with a search, demonstrations, a label and a structured output."""
    question = cp.Input("question")
    query = cp.LLM(
        "rewrite", prompt=cp.Text("Write a {query}."), demos=cp.Demos((DEMO,)), system="Be brief."
    )(question=question)
    passages = cp.Function("search", search, k=cp.Choice(1, 3, value=3))(query=query)
    answer = cp.LLM("answer", prompt=cp.Text("Answer."), max_tokens=32)(question=question, passages=passages)
    sure = cp.LLM("sure", prompt="Sure?", output=Literal["yes", "no"])(question=question, proposal=answer)
    person = cp.LLM("person", prompt="Extract.", output=Person)(text=answer)
    both = cp.LLM("both", prompt="Rate.", output={"score": float, "tags": list[str]}, stop=("END",))(
        text=answer
    )
    return cp.System(
        "qa",
        {"answer": answer, "sure": sure, "age": person.age, "score": both.score, "tags": both.tags},
        lm="openai/gpt-4o-mini",
    )


def flow() -> cp.System:
    """Return a system with a loop, a map, a condition and a choice of models."""
    text = cp.Input("text")
    short = cp.Function("shorten", shorten)(text=text)
    body = cp.System("turn", {"text": short, "done": cp.Function("is_short", is_short)(text=short)})
    loop = cp.Loop("shrink", body, carry={"text": "text"}, until="done", max_turns=9)(text=text)
    lm = cp.Selector("model", "openai/small", "openai/large")()
    one = cp.System(
        "one", {"found": cp.LLM("label", prompt="Label.", lm="openai/small")(item=cp.Input("item"))}
    )
    k = cp.Hyperparameter("k", cp.Int(1, 4, value=2))()
    parts = cp.Function("search", search)(query=loop.text, k=k)
    found = cp.Map("each", one, over="item")(item=parts)
    asked = cp.Function("is_question", is_question)(text=text)
    reply = cp.LLM("reply", prompt="Reply.")(text=text, lm=lm, when=asked)
    joined = cp.FirstOf("joined", str)(a=reply, b=text)
    return cp.System("flow", {"found": found, "reply": joined, "left": loop.text})


def script(messages: Any) -> str:
    """Answer by the content of the last message, whatever the format of the prompt."""
    text = messages[0]["content"] + messages[-1]["content"]
    if "Extract." in text:
        return 'Here: {"name": "Ada", "age": 36}'
    if "Rate." in text:
        return "score: 0.5\ntags: [a, b]" if "[[ ##" not in text else _fields(score="0.5", tags='["a", "b"]')
    if "Sure?" in text:
        return "Yes." if "[[ ##" not in text else _fields(output="yes")
    answer = f"Lima {len(text) % 7}" if "[[ ##" not in text else "Lima"
    return answer if "[[ ##" not in text else _fields(output=answer)


def _fields(**values: str) -> str:
    return (
        "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in values.items())
        + "\n\n[[ ## completed ## ]]"
    )


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer(script) as running:
        yield running


def engines(server: ChatServer) -> dict[str, Any]:
    names = ("openai/gpt-4o-mini", "openai/small", "openai/large")
    return {name: cp.LiteLLM(name, api_base=server.url, price=(0, 0)) for name in names}


def sent(server: ChatServer) -> list[tuple[str, str, str]]:
    """Return model, messages and format of the requests so far, in a comparable order, and forget them."""
    found = sorted(
        (request["model"], json.dumps(request["messages"]), json.dumps(request.get("response_format")))
        for request in server.requests
    )
    server.requests.clear()
    return found


def loaded(path: Path) -> dict[str, Any]:
    """Run a module and return its names."""
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(path.read_text("utf-8"), str(path), "exec"), names)
    return names


# -- the Python module ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (qa, {"question": "capital of Peru?"}),
        (qa, {"question": "two\nlines"}),
        (flow, {"text": "Which river?"}),
        (flow, {"text": "no question"}),
    ],
)
def test_the_python_module_sends_and_returns_the_same(
    build: Any, inputs: dict[str, str], server: ChatServer, tmp_path: Path
) -> None:
    system = build()
    expected = cp.run(system, inputs, engines=engines(server)).outputs
    requests = sent(server)
    path = tmp_path / "program.py"
    cp.export(system, "python", path)
    assert loaded(path)["run"](inputs, base_url=server.url, api_key="none") == expected
    assert sent(server) == requests


def test_the_python_module_needs_only_the_standard_library(server: ChatServer, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    system = cp.System("s", {"answer": cp.LLM("a", prompt="Answer.")(question=cp.Input("question"))}, lm="m")
    text = cp.export(system, "python", path)
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])] if isinstance(node, ast.Import) else [])
        if name
    }  # fmt: skip
    assert imported <= sys.stdlib_module_names
    environment = {"OPENAI_BASE_URL": server.url, "PATH": os.environ["PATH"]}
    ran = subprocess.run(
        [sys.executable, "-I", str(path), "question=capital?"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == cp.run(system, {"question": "capital?"}, engines={"m": cp.LiteLLM("openai/m", api_base=server.url, price=(0, 0))}).outputs  # fmt: skip


def test_an_answer_that_cannot_be_read_is_asked_for_again(tmp_path: Path) -> None:
    def stubborn(messages: Any) -> str:
        return '{"name": "Ada", "age": 3}' if len(messages) > 1 else "nonsense"

    system = cp.System(
        "s", {"p": cp.LLM("person", prompt="Extract.", output=Person)(text=cp.Input("text"))}, lm="m"
    )
    cp.export(system, "python", tmp_path / "p.py")
    with ChatServer(stubborn) as server:
        found = loaded(tmp_path / "p.py")["run"]({"text": "Ada"}, base_url=server.url)
    assert found == {"p": {"name": "Ada", "age": 3}}


def wrapping(messages: Any) -> str:
    """Answer as a server that enforces the format, in which it is wrapped in an object."""
    return '{"answer": "yes"}'


def test_a_format_is_sent_and_its_wrapper_is_removed(tmp_path: Path) -> None:
    system = cp.System(
        "s", {"y": cp.LLM("sure", output=Literal["yes", "no"])(x=cp.Input("x"))}, lm="openai/gpt-4o-mini"
    )
    cp.export(system, "python", tmp_path / "p.py")
    with ChatServer(wrapping) as server:
        assert loaded(tmp_path / "p.py")["run"]({"x": "?"}, base_url=server.url) == {"y": "yes"}
        assert server.requests[0]["response_format"]["json_schema"]["strict"] is True


class WithoutFormats(ChatServer):
    """A server that takes no response format."""

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, document = super()._answer(path, body)
        return (
            (400, {"error": {"message": "response_format"}})
            if "response_format" in body
            else (status, document)
        )


def test_a_server_without_response_formats_is_asked_without_one(tmp_path: Path) -> None:
    body = cp.System("body", {"y": cp.LLM("sure", output=bool, lm="m")(x=cp.Input("x"))})
    system = cp.System("s", {"all": cp.Map("each", body, over="x")(x=cp.Input("x", list[str]))})
    cp.export(system, "python", tmp_path / "p.py")
    with WithoutFormats(lambda _: "Yes.") as server:
        found = loaded(tmp_path / "p.py")["run"]({"x": ["a", "b"]}, base_url=server.url)
        assert ["response_format" in request for request in server.requests] == [True, False, False]
    assert found == {"all": [True, True]}


def test_errors_of_the_module_name_the_step(tmp_path: Path) -> None:
    system = cp.System(
        "s", {"y": cp.LLM("label", prompt="L.", output=Literal["a", "b"])(x=cp.Input("x"))}, lm="m"
    )
    cp.export(system, "python", tmp_path / "p.py")
    names = loaded(tmp_path / "p.py")
    with (
        ChatServer(lambda _: "neither") as server,
        pytest.raises(names["ExportedRunError"], match="label: ValueError: 'output'"),
    ):
        names["run"]({"x": "?"}, base_url=server.url)
    with pytest.raises(names["ExportedRunError"], match="inputs must be"):
        names["run"]({"z": "?"})
    with pytest.raises(names["ExportedRunError"], match="must start with http"):
        names["run"]({"x": "?"}, base_url="file:///etc")


# -- the copies of the runtime agree with the package -----------------------------------------------------------


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


TYPES = [
    str,
    int,
    float,
    bool,
    Literal["yes", "no"],
    Literal["one two", "3"],
    list[str],
    list[int],
    int | None,
    Size,
    int | Literal["a", "no"],
    str | int,
    datetime.date | str,
    dict[str, int] | str,
    list[Any] | str | None,
]


@given(
    st.text(max_size=60)
    | st.sampled_from(["Yes.", "not yes", "- a\n- b", "[1, 2]", "about 3.5 km", "1,000", "none", "“3”"])
    | st.lists(
        st.sampled_from(
            ["yes", "no", "or", "1", "2", ",", ".", "/", " ", "\n", "- ", "[", "]", "```", ":", "a", "'", "*"]
        ),
        max_size=12,
    ).map("".join)
)
@example("isn't a yes")
@example("LARGE")
@example("2024-01-02")
@example('So: {"a": 1}, as in [1].')
@example('{"a": [NaN]}')
@example('{"a": 1e999}')
@example('{"a"')
@example('"a\nb"')
@example('"a"')
@example("{}")
@example("Here:\n```json\n[1]\n```")
@example("Here:\n1. a\n   b\n\nThe end")
def test_values_are_read_as_by_the_package(text: str) -> None:
    for kind in TYPES:
        try:
            expected: object = parse_value(text, kind)
        except ValueError:
            expected = ValueError
        try:
            found: object = runtime.parse_value(text, describe_type(kind))
        except ValueError:
            found = ValueError
        if isinstance(expected, datetime.date):  # a text in exported programs
            expected = expected.isoformat()
        assert found == expected, kind


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [("text", {"n": int}), ("text", {"n": str}), ("json", {"n": int}), ("fields", {"n": int})],
)
@pytest.mark.parametrize("answer", ["<think>n: 1</think>n: 2", '{"n": 1}</think>{"n": 2}', "n: 1"])
def test_thoughts_are_read_as_by_the_package(layout: Any, kinds: dict[str, type], answer: str) -> None:
    try:
        expected: object = parse(answer, {name: Port(kind) for name, kind in kinds.items()}, layout)
    except ParseError:
        expected = ValueError
    try:
        fields = {name: describe_type(kind) for name, kind in kinds.items()}
        found: object = runtime.parse(answer, fields, layout)
    except ValueError:
        found = ValueError
    assert found == expected


@given(
    st.recursive(
        st.text(max_size=8) | st.integers() | st.booleans() | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    )
)
def test_values_are_written_as_by_the_package(value: Any) -> None:
    assert runtime.format_value(value) == format_value(value)
    assert runtime.field_label("search_query") == field_label("search_query")


# -- texts cannot leave their literals --------------------------------------------------------------------------

HOSTILE = [
    "'''",
    '"""',
    "\\",
    "{}",
    "{question}",
    "\n",
    "\r\n",
    "\x00",
    "é🙂\u2028",
    "# ",
    "'+__import__('os')+'",
    "\ud800",
]


@given(st.text() | st.lists(st.sampled_from(HOSTILE)).map("".join))
def test_any_text_survives_as_a_literal(text: str) -> None:
    source = python_literal({"a": [text, {text: 1}]})
    assert source.isascii()
    assert ast.literal_eval(source) == {"a": [text, {text: 1}]}


@given(
    st.lists(
        st.sampled_from(HOSTILE[:-1]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    ).map("".join)
)
def test_any_prompt_survives_every_export(text: str) -> None:
    node = cp.LLM("a", prompt=cp.Text(text or "x"), system=text)(question=cp.Input("question"))
    system = cp.System("s", {"answer": node}, lm="m")
    shown = cp.run(system, {"question": "Q"}, engines={"m": ScriptedLM(lambda _: "x")}, check=False)
    messages = [message.content for message in shown.calls[0].exchanges[0].messages]
    document = json.loads(cp.export(system, "messages"))["prompts"][0]["messages"]
    assert [m["content"].format(question="Q") for m in document] == messages
    bodies = json.loads(cp.export(system, "openai"))["a"]["messages"]
    assert [m["content"].format(question="Q") for m in bodies] == messages
    targets: tuple[Any, ...] = ("python", "langchain", "dspy")
    for target in targets:
        tree = ast.parse(cp.export(system, target))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "__import__"]
        assert calls == []
    names: dict[str, Any] = {"__name__": "exported"}
    exec(cp.export(system, "langchain"), names)
    found = names["PROMPTS"]["a"].format_messages(question="Q")
    assert [message.content for message in found] == messages


# -- messages, request bodies, LangChain and DSPy ---------------------------------------------------------------


def ask(url: str, body: Any) -> str:
    asked = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(asked) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
        return text


def single() -> cp.System:
    answer = cp.LLM("answer", prompt=cp.Text("Answer {well}."), demos=cp.Demos((DEMO,)), system="Be brief.")
    return cp.System("single", {"answer": answer(question=cp.Input("question"))}, lm="openai/gpt-4o-mini")


@pytest.mark.parametrize("target", ["messages", "openai"])
def test_documents_give_the_same_answers(target: Any, server: ChatServer) -> None:
    expected = cp.run(single(), {"question": "capital?"}, engines=engines(server)).outputs["answer"]
    requests = sent(server)
    document = json.loads(cp.export(single(), target))
    found = document["prompts"][0] if target == "messages" else document["answer"]
    body = {
        "model": "gpt-4o-mini",
        **{k: v for k, v in found.items() if k in ("model", "temperature", "max_tokens")},
    }
    body["messages"] = [{**m, "content": m["content"].format(question="capital?")} for m in found["messages"]]
    assert ask(server.url, body) == expected
    assert sent(server) == requests


SERVERS: dict[str, Any] = {
    "openai": lambda url: cp.OpenAI("small-1", api_base=url),
    "litellm": lambda url: cp.LiteLLM("openai/gpt-4o-mini", api_base=url),
    "unknown model": lambda url: cp.LiteLLM("openai/small-1", api_base=url, extra={"top_p": 0.5}),
    "listed fields": lambda url: cp.LiteLLM("openai/gpt-5-mini", api_base=url),
    "named fields": lambda url: cp.OpenAI(
        "small-1", api_base=url, unsupported=("max_tokens", "temperature", "stop", "system")
    ),
    "with formats": lambda url: cp.LiteLLM("openai/small-1", api_base=url, response_schema=True),
}


@pytest.mark.parametrize("kind", SERVERS)
def test_requests_are_those_that_the_engine_sent(kind: str, tmp_path: Path) -> None:
    """The name of the model, its options, the format of answers and the place of tools depend on the engine."""
    choice = cp.LLM("choice", system="Be brief.", output=Literal["yes", "no"], stop=("END",), lm="small")
    made = cp.Agent("made", [population], output=int, max_turns=2, lm="small")
    for component in (choice, made):
        system = cp.System("s", {"y": component(x=cp.Input("x"))})
        with ChatServer(lambda _: '{"answer": 4}') as server:
            engines = {"small": SERVERS[kind](server.url)}
            cp.run(system, {"x": "Rome?"}, engines=engines, check=False)
            measured = {key: value for key, value in server.requests[0].items() if key != "seed"}
            server.requests.clear()
            document = json.loads(cp.export(system, "openai", engines=engines))[component.name]
            document["messages"] = [
                {**m, "content": m["content"].format(x="Rome?")} for m in document["messages"]
            ]
            measured.pop("tool_choice", None)
            assert document == measured
            if component is choice:
                cp.export(system.with_engines(engines.__getitem__), "python", tmp_path / "p.py")
                with contextlib.suppress(Exception):  # the answer is that of an agent
                    loaded(tmp_path / "p.py")["run"]({"x": "Rome?"}, base_url=server.url)
                assert server.requests[0] == measured
                cp.export(system, "langchain", tmp_path / "l.py", engines=engines)
                model = loaded(tmp_path / "l.py")["MODELS"]["choice"]
                kept = measured.keys() - {"model", "messages", "response_format"}
                expected = {key: measured[key] for key in kept}
                assert model == {"model": f"openai/{measured['model']}", **expected}


@cp.tool
def population(city: str) -> int:
    """Return the population of a city."""
    return len(city)


def agent(**settings: Any) -> cp.System:
    """Return a system with an agent whose tool has a tuned name."""
    made = cp.Agent(
        "agent", [population], prompt=cp.Text("Answer {well}."), output=int, system="Be brief.", tune_tools=True,
        **settings,
    )  # fmt: skip
    system = cp.System("agents", {"n": made(question=cp.Input("question"))}, lm="openai/gpt-4o-mini")
    return system.bind({"agent_turn.tool_population": "people: Count the people.\n- city: its name"})


def conversation() -> dict[str, Any]:
    """Return the record of a turn, which a demonstration of an agent is."""
    call = {"id": "call_1", "name": "people", "arguments": '{"city": "Oslo"}'}
    history = [
        {"role": "assistant", "text": "", "calls": [call]},
        {"role": "tool", "id": "call_1", "text": "4"},
    ]
    inputs = {"task": {"question": "Oslo?"}, "history": history, "last_turn": False}
    return {"inputs": inputs, "outputs": {"message": "4", "tool_calls": [], "output": 4}}


@pytest.mark.parametrize("demos", [(), (conversation(),)])
def test_the_prompt_and_the_tools_of_an_agent_are_those_of_its_first_request(demos: Any) -> None:
    with ChatServer(lambda _: '{"answer": 4}') as server:
        lm = cp.LiteLLM("openai/gpt-4o-mini", api_base=server.url, price=(0, 0))
        assert lm.native_tools
        cp.run(agent(demos=demos), {"question": "Rome?"}, engines={"openai/gpt-4o-mini": lm})
        (request,) = server.requests
    body = json.loads(cp.export(agent(demos=demos), "openai"))["agent"]
    filled = [{**m, "content": m["content"].format(question="Rome?")} for m in body["messages"]]
    assert filled == request["messages"]
    for name in ("model", "tools", "response_format", "temperature", "max_tokens"):
        assert body.get(name) == request.get(name)
    (prompt,) = json.loads(cp.export(agent(demos=demos), "messages"))["prompts"]
    assert prompt["messages"] == body["messages"]
    assert prompt["tools"] == body["tools"]
    assert prompt["tool_names"] == {"people": "population"}
    assert (prompt["inputs"], prompt["outputs"]) == ({"question": "str"}, {"output": "int"})


def test_an_agent_is_exported_to_langchain_with_its_tools(tmp_path: Path) -> None:
    cp.export(agent(), "langchain", tmp_path / "agent.py")
    names = loaded(tmp_path / "agent.py")
    assert names["TOOLS"]["agent"][0]["function"]["name"] == "people"
    assert names["PROMPTS"]["agent"].format_messages(question="?")[0].content == "Be brief."
    with pytest.raises(ExportError, match=r"tools of 'agent'.*ends in \.py"):
        cp.export(agent(), "langchain", tmp_path / "agent.json")
    with pytest.raises(ExportError, match="its demonstrations call tools"):
        cp.export(agent(demos=(conversation(),)), "langchain")


def test_an_agent_inside_a_loop_is_exported() -> None:
    body = cp.System("body", {"n": cp.Agent("inner", [population], output=int, lm="m")(q=cp.Input("q"))})
    system = cp.System("s", {"all": cp.Map("each", body, over="q")(q=cp.Input("q", list[str]))})
    assert list(json.loads(cp.export(system, "openai"))) == ["inner"]


@pytest.mark.parametrize(
    ("build", "target", "advice"),
    [
        (agent, "python", "export its prompts with --to messages, or serve it"),
        (lambda: cp.System("s", {"y": cp.CodeRunner("c")(code=cp.Input("q")).stdout}), "python", "serve it with"),
    ],
)  # fmt: skip
def test_the_advice_after_a_refused_export_can_be_followed(build: Any, target: Any, advice: str) -> None:
    with pytest.raises(ExportError) as caught:
        cp.export(build(), target)
    assert caught.value.hint.startswith(advice)
    assert "turn" not in caught.value.message
    if "messages" in advice:
        assert cp.export(build(), "messages")


def test_request_bodies_hold_the_schema_and_the_stop_strings() -> None:
    bodies = json.loads(cp.export(qa(), "openai"))
    assert bodies["person"]["response_format"]["json_schema"]["schema"]["properties"].keys() == {
        "name",
        "age",
    }
    assert bodies["both"]["stop"] == ["END"]
    assert bodies["answer"]["max_tokens"] == 32


@pytest.mark.parametrize("name", ["prompts.json", "prompts.py"])
def test_langchain_prompts_give_the_same_answers(name: str, server: ChatServer, tmp_path: Path) -> None:
    from langchain_core.load import load

    expected = cp.run(single(), {"question": "capital?"}, engines=engines(server)).outputs["answer"]
    requests = sent(server)
    cp.export(single(), "langchain", tmp_path / name)
    if name.endswith(".json"):
        prompt = load(json.loads((tmp_path / name).read_text())["answer"], allowed_objects="core")
    else:
        prompt = loaded(tmp_path / name)["PROMPTS"]["answer"]
    roles = {"system": "system", "human": "user", "ai": "assistant"}
    messages = [
        {"role": roles[m.type], "content": m.content} for m in prompt.format_messages(question="capital?")
    ]
    assert ask(server.url, {"model": "gpt-4o-mini", "messages": messages}) == expected
    assert sent(server) == requests


def test_the_dspy_program_gives_the_same_outputs(server: ChatServer, tmp_path: Path) -> None:
    question = cp.Input("question")
    query = cp.LLM("rewrite", prompt=cp.Text("Write a query."), demos=cp.Demos((DEMO,)), output=str)(
        question=question
    )
    passages = cp.Function("search", search, k=2)(query=query)
    sure = cp.LLM("sure", prompt=cp.Text("Sure?"), output=Literal["yes", "no"])(passages=passages)
    system = cp.System("two", {"query": query, "sure": sure}, lm="openai/gpt-4o-mini")
    with ChatServer(lambda messages: script(messages).replace("Lima ", "Lima")) as fixed:
        cp.export(system, "dspy", tmp_path / "program.py")
        program = loaded(tmp_path / "program.py")["Program"]()
        with dspy.context(lm=dspy.LM("openai/gpt-4o-mini", api_base=fixed.url, api_key="none", cache=False)):
            found = program(question="capital?")
    assert (found.query, found.sure) == ("Lima", "yes")
    assert [len(p.demos) for p in program.predictors()] == [1, 0]
    program.save(tmp_path / "state.json")
    again = loaded(tmp_path / "program.py")["Program"]()
    again.load(tmp_path / "state.json")
    assert [p.signature.instructions for p in again.predictors()] == ["Write a query.", "Sure?"]


def test_an_imported_program_is_exported_as_its_state(server: ChatServer, tmp_path: Path) -> None:
    program = dspy.ChainOfThought("question -> output")
    system = cp.from_dspy(program, lm="openai/gpt-4o-mini").bind({"predict.prompt": "Be {brief}."})
    with ChatServer(lambda _: _fields(reasoning="r", output="Lima")) as fixed:
        expected = cp.run(system, {"question": "?"}, engines=engines(fixed)).outputs
        requests = sent(fixed)
        cp.export(system, "dspy", tmp_path / "state.json")
        loaded_program = dspy.ChainOfThought("question -> output")
        loaded_program.load(tmp_path / "state.json")
        with dspy.context(lm=dspy.LM("openai/gpt-4o-mini", api_base=fixed.url, api_key="none", cache=False)):
            assert loaded_program(question="?").output == expected["output"]
        assert sent(fixed) == requests
    document = json.loads(cp.export(system, "messages"))["prompts"][0]
    assert "Be {{brief}}." in document["messages"][0]["content"]


# -- files, keys and what cannot be exported --------------------------------------------------------------------


def test_a_configuration_is_exported(tmp_path: Path) -> None:
    system = qa()
    system.bind({"answer.prompt": "Best."}).configuration.save(tmp_path / "best.json")
    for configuration in (tmp_path / "best.json", {"answer.prompt": "Best."}):
        assert "Best." in cp.export(system, "messages", configuration=configuration)


def test_only_the_named_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "link.json").symlink_to(tmp_path / "precious")
    with pytest.raises(ExportError, match=r"link\.json cannot be written"):
        cp.export(single(), "messages", tmp_path / "link.json")
    assert (tmp_path / "precious").read_text() == "keep"
    cp.export(single(), "messages", tmp_path / "out" / "m.json")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["m.json"]
    with pytest.raises(ExportError, match="a folder that exists"):
        cp.export(single(), "messages", tmp_path / "none" / "m.json")


def test_a_file_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    file = tmp_path / "m.json"
    cp.export(single(), "messages", file)
    file.chmod(0o600)
    before = file.read_text()
    wrong = cp.System("s", {"y": cp.LLM("a", prompt="lone \ud83d", lm="m")(x=cp.Input("x"))})
    for target in ("messages", "openai"):
        with pytest.raises(ExportError, match=r"ud83d'.* after '.*lone '; correct this text"):
            cp.export(wrong, target, file)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _full_disk)
        with pytest.raises(ExportError, match="No space left on device"):
            cp.export(single(), "openai", file)
    with pytest.raises(ExportError, match="cannot be written"):
        cp.export(single(), "openai", tmp_path)
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]
    cp.export(single(), "openai", file)
    assert (file.read_text() != before, file.stat().st_mode & 0o777) == (True, 0o600)


def _full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_with_a_server_of_this_machine_is_exported(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "system.yaml").write_text(
        "system: qa\nlm: small\ninputs: {question: str}\nengines:\n"
        "  small: {openai: {model: small-1, api_base: 'http://127.0.0.1:1/v1'}}\ncomponents:\n"
        "  a: {llm: {prompt: {tune: First.}}, out: 'one of bug, other', in: {question: $question}}\n"
        "outputs: {answer: $a}\n"
    )
    cp.load_system(tmp_path / "system.yaml").bind({"a.prompt": "Best."}).configuration.save(
        tmp_path / "best.json"
    )
    ran = cli("export", str(tmp_path / "best.json"), "--to", "openai")
    body = json.loads(ran.out)["a"]
    assert (body["model"], "response_format" in body, "Best." in str(body)) == ("small-1", False, True)
    text = (
        (tmp_path / "system.yaml")
        .read_text()
        .replace("openai: {model", "litellm: {api_key_env: X_KEY, model")
    )
    (tmp_path / "system.yaml").write_text(text.replace("small-1", "openai/small-1"))
    assert json.loads(cli("export", str(tmp_path / "best.json"), "--to", "openai").out)["a"] == body
    (tmp_path / "system.yaml").write_text(
        text.replace("outputs:", "  f: {function: {call: 'mine:f'}, in: {x: $a}}\noutputs:")
    )
    refused = cli("export", str(tmp_path / "best.json"), "--to", "openai")
    assert ("--no-import" in refused.err, "add --system" in refused.err) == (False, True)


@pytest.mark.parametrize("target", TARGETS)
def test_keys_of_the_environment_are_removed(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-a-key-of-the-environment"
    monkeypatch.setenv("SOME_API_KEY", key)
    node = cp.LLM("a", prompt=cp.Text(f"Use {key}."))(question=cp.Input("question"))
    text = cp.export(cp.System("s", {"answer": node}, lm="m"), target)
    assert key not in text
    assert "[key removed]" in text


@pytest.mark.parametrize(
    ("build", "target", "message"),
    [
        (lambda q: cp.Function("f", _local())(x=q), "python", "function 'f' is not a function at the top of a module"),
        (lambda q: cp.CodeRunner("c")(code=q).stdout, "python", "code 'c' runs only in this package; serve it"),
        (lambda q: cp.LLM("a")(q=q, prompt=cp.LLM("w")(q=q)), "messages", "its prompt comes from another component"),
        (lambda q: cp.LLM("a")(q=q, prompt=cp.LLM("w")(q=q)), "python", "the setting 'prompt' of llm 'a' comes from"),
        (lambda q: cp.Function("f", is_short)(text=q), "messages", "it has no LLM components"),
        (lambda q: cp.LLM("a", prompt="x", output={"q": str})(q=q), "dspy", "an input and an output named 'q'"),
        (lambda q: cp.LLM("a", prompt="x")(q=cp.Input("photo", cp.Image)), "python", "llm 'a' reads an image"),
        (lambda q: cp.LLM("a", prompt="x")(q=cp.Input("photo", cp.Image)), "messages", "its input 'q' is an image"),
        (lambda q: cp.Agent("a", tools=[cp.Tool.python()])(q=q), "python", "agent 'a' runs only in this package"),
        (lambda q: cp.ExternalAgent("a", command=["x"])(q=q), "dspy", "external_agent 'a' runs only in this"),
        (lambda q: cp.LLM("a", prompt="x")(q=q), "nothing", "cannot export to 'nothing'; possible: dspy, langchain"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_named(build: Any, target: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        cp.export(cp.System("s", {"y": build(cp.Input("q"))}, lm="m"), target)


def _local() -> Any:
    def inner(x: str) -> str:
        return x

    return inner


def test_a_state_file_needs_an_imported_program(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"was not imported from DSPy.*ends in \.py"):
        cp.export(single(), "dspy", tmp_path / "state.json")
    assert not (tmp_path / "state.json").exists()


def test_an_exported_program_takes_its_key_to_no_other_server(tmp_path: Path) -> None:
    received: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            received.append((self.path, self.headers.get("authorization")))
            self.send_response(302)
            self.send_header("location", f"http://localhost:{self.server.server_port}/elsewhere")  # type: ignore[attr-defined]
            self.end_headers()

        do_GET = do_POST  # noqa: N815 - a name that the library calls

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(runtime.ExportedRunError, match="answered 302"):
            runtime.send({}, f"http://127.0.0.1:{server.server_port}", "key-of-this-test", 10.0)
    finally:
        server.shutdown()
        server.server_close()
    assert received == [("/chat/completions", "Bearer key-of-this-test")]


def test_the_command_exports_a_run(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "system.yaml").write_text(
        "system: qa\nlm: openai/gpt-4o-mini\ninputs: {question: str}\ncomponents:\n"
        "  a: {llm: {prompt: {tune: First.}}, in: {question: $question}}\noutputs: {answer: $a}\n"
    )
    cp.load_system(tmp_path / "system.yaml").bind({"a.prompt": "Best."}).configuration.save(
        tmp_path / "best.json"
    )
    ran = cli("export", str(tmp_path / "best.json"), "--to", "messages")
    assert "Best." in json.loads(ran.out)["prompts"][0]["messages"][0]["content"]
    ran = cli("export", str(tmp_path / "system.yaml"), "--to", "python", "--output", str(tmp_path / "p.py"))
    assert (ran.code, ran.out) == (0, "")
    assert "First." in (tmp_path / "p.py").read_text()
    ran = cli("export", str(tmp_path / "best.json"), "--to", "tensorflow")
    assert ran.code == 2
    assert "possible: dspy, langchain, messages, openai, python" in ran.err
    ran = cli("export", str(tmp_path), "--to", "messages")
    assert (ran.code, f"the configuration of a run directory is {tmp_path / 'best.json'}" in ran.err) == (
        2,
        True,
    )
    (tmp_path / "alone").mkdir()
    (tmp_path / "best.json").rename(tmp_path / "alone" / "best.json")
    ran = cli("export", str(tmp_path / "alone" / "best.json"), "--to", "python")
    assert (ran.code, "give --system system.yaml" in ran.err) == (2, True)
    ran = cli(
        "export",
        str(tmp_path / "alone" / "best.json"),
        "--system",
        str(tmp_path / "system.yaml"),
        "--to",
        "openai",
    )
    assert "Best." in ran.out


def test_a_field_of_a_dspy_program_may_be_named_like_a_method_of_predictions(tmp_path: Path) -> None:
    dspy = pytest.importorskip("dspy")
    cp.export(single(), "dspy", tmp_path / "program.py")
    run = loaded(tmp_path / "program.py")["run_predictor"]
    node = {"component": "a", "outputs": ["items"]}
    assert run(node, {}, lambda _: dspy.Prediction(items=["x"])) == {"items": ["x"]}
