"""Exported prompts give the same requests and outputs as the system, from the same scripted server."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, Literal

import dspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import compound as cp
from benchmarks.measure.interchange.chat_server import ChatServer
from compound.core.errors import ExportError
from compound.interchange import export
from compound.interchange.exports import TARGETS
from compound.testing import ScriptedLM

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:.*ReadOnly"
)
DEMO = {"inputs": {"question": "1+1"}, "outputs": {"output": "2"}}
SHOWN = {"inputs": {"x": "1+1 {is} 2?"}, "outputs": {"output": "yes"}}


HOSTILE = ["'''", '"""', "\\", "{}", "{question}", "\n", "\r\n", "\x00", "é🙂\u2028", "# "]


@given(
    st.lists(
        st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    ).map("".join)
)
def test_any_prompt_survives_every_export(text: str) -> None:
    from langchain_core.prompts import ChatPromptTemplate

    node = cp.LLM("a", prompt=cp.Text(text or "x"), system=text)(question=cp.Input("question"))
    system = cp.System("s", {"answer": node}, lm="m")
    shown = cp.run(system, {"question": "Q"}, engines={"m": ScriptedLM(lambda _: "x")}, check=False)
    messages = [message.content for message in shown.calls[0].exchanges[0].messages]
    document = json.loads(export(system, "messages"))["prompts"][0]["messages"]
    assert [m["content"].format(question="Q") for m in document] == messages
    bodies = json.loads(export(system, "openai"))["a"]["messages"]
    assert [m["content"].format(question="Q") for m in bodies] == messages
    in_langchain = ChatPromptTemplate.from_messages(document).format_messages(question="Q")
    assert [message.content for message in in_langchain] == messages


def single() -> cp.System:
    answer = cp.LLM(
        "answer", prompt=cp.Text("Answer {well}."), demos=cp.Demos((DEMO,)), system="Be brief."
    )
    return cp.System(
        "single", {"answer": answer(question=cp.Input("question"))}, lm="openai/gpt-4o-mini"
    )


SERVERS: dict[str, Any] = {
    "openai": lambda url: cp.engines.OpenAI("small-1", api_base=url),
    "litellm": lambda url: cp.engines.LiteLLM("openai/gpt-4o-mini", api_base=url),
    "unknown model": lambda url: cp.engines.LiteLLM(
        "openai/small-1", api_base=url, extra={"top_p": 0.5}
    ),
    "listed fields": lambda url: cp.engines.LiteLLM("openai/gpt-5-mini", api_base=url),
    "named fields": lambda url: cp.engines.OpenAI(
        "small-1", api_base=url, unsupported=("max_tokens", "temperature", "stop", "system")
    ),
    "with formats": lambda url: cp.engines.LiteLLM(
        "openai/small-1", api_base=url, response_schema=True
    ),
}


@pytest.mark.parametrize("kind", SERVERS)
def test_requests_are_those_that_the_engine_sent(kind: str) -> None:
    """The name of the model, its options, the format of answers and the place of tools depend on the engine."""
    choice = cp.LLM(
        "choice",
        system="Be brief.",
        output=Literal["yes", "no"],
        demos=cp.Demos((SHOWN,)),
        stop=("END",),
        lm="small",
    )
    made = cp.Agent("made", [population], output=int, max_turns=2, lm="small")
    for component in (choice, made):
        system = cp.System("s", {"y": component(x=cp.Input("x"))})
        with ChatServer(lambda _: '{"answer": 4}') as server:
            engines = {"small": SERVERS[kind](server.url)}
            cp.run(system, {"x": "Rome?"}, engines=engines, check=False)
            measured = {key: value for key, value in server.requests[0].items() if key != "seed"}
            server.requests.clear()
            document = json.loads(export(system, "openai", engines=engines))[component.name]
            document["messages"] = [
                {**m, "content": m["content"].format(x="Rome?")} for m in document["messages"]
            ]
            measured.pop("tool_choice", None)
            assert document == measured


@cp.tool
def population(city: str) -> int:
    """Return the population of a city."""
    return len(city)


def agent(**settings: Any) -> cp.System:
    """Return a system with an agent whose tool has a tuned name."""
    made = cp.Agent(
        "agent",
        [population],
        prompt=cp.Text("Answer {well}."),
        output=int,
        system="Be brief.",
        tune_tools=True,
        **settings,
    )
    system = cp.System(
        "agents", {"n": made(question=cp.Input("question"))}, lm="openai/gpt-4o-mini"
    )
    return system.bind(
        {"agent_turn.tool_population": "people: Count the people.\n- city: its name"}
    )


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
        lm = cp.engines.LiteLLM("openai/gpt-4o-mini", api_base=server.url, price=(0, 0))
        assert lm.native_tools
        cp.run(agent(demos=demos), {"question": "Rome?"}, engines={"openai/gpt-4o-mini": lm})
        (request,) = server.requests
    body = json.loads(export(agent(demos=demos), "openai"))["agent"]
    filled = [{**m, "content": m["content"].format(question="Rome?")} for m in body["messages"]]
    assert filled == request["messages"]
    for name in ("model", "tools", "response_format", "temperature", "max_tokens"):
        assert body.get(name) == request.get(name)
    (prompt,) = json.loads(export(agent(demos=demos), "messages"))["prompts"]
    assert prompt["messages"] == body["messages"]
    assert prompt["tools"] == body["tools"]
    assert prompt["tool_names"] == {"people": "population"}
    assert (prompt["inputs"], prompt["outputs"]) == ({"question": "str"}, {"output": "int"})


def test_an_imported_program_is_exported_as_its_state_and_as_its_requests(tmp_path: Path) -> None:
    program, lm = dspy.ChainOfThought("question -> output"), "openai/gpt-4o-mini"
    system = cp.interchange.from_dspy(program, lm=lm).bind({"predict.prompt": "Be {brief}."})
    answer = "[[ ## reasoning ## ]]\nr\n\n[[ ## output ## ]]\nLima\n\n[[ ## completed ## ]]"
    with ChatServer(lambda _: answer) as server:
        cp.run(system, {"question": "?"}, engines={lm: cp.engines.LiteLLM(lm, api_base=server.url)})
        export(system, "dspy", tmp_path / "state.json")
        loaded_program = dspy.ChainOfThought("question -> output")
        loaded_program.load(tmp_path / "state.json")
        with dspy.context(lm=dspy.LM(lm, api_base=server.url, api_key="none", cache=False)):
            assert loaded_program(question="?").output == "Lima"
        measured, in_dspy = server.requests
    assert measured["messages"] == in_dspy["messages"]
    (body,) = json.loads(export(system, "openai")).values()
    body["messages"] = [
        {**m, "content": m["content"].format(question="?")} for m in body["messages"]
    ]
    assert body == {key: value for key, value in measured.items() if key != "seed"}


def test_a_file_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    file = tmp_path / "m.json"
    export(single(), "messages", file)
    file.chmod(0o600)
    before = file.read_text()
    wrong = cp.System("s", {"y": cp.LLM("a", prompt="lone \ud83d", lm="m")(x=cp.Input("x"))})
    for target in ("messages", "openai"):
        with pytest.raises(ExportError, match=r"ud83d'.* after '.*lone '; correct this text"):
            export(wrong, target, file)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _full_disk)
        with pytest.raises(ExportError, match="No space left on device"):
            export(single(), "openai", file)
    with pytest.raises(ExportError, match="cannot be written"):
        export(single(), "openai", tmp_path)
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]
    export(single(), "openai", file)
    assert (file.read_text() != before, file.stat().st_mode & 0o777) == (True, 0o600)


def _full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


SYSTEM = """
system: qa
lm: small
inputs: {question: str}
engines: {small: {openai: {model: small-1, api_base: 'http://127.0.0.1:1/v1'}}}
components:
  a: {llm: {prompt: {tune: First.}}, out: 'one of bug, other', in: {question: $question}}
outputs: {answer: $a}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a system whose engine is a server of this machine."""
    (tmp_path / "system.yaml").write_text(SYSTEM)
    best = cp.load_system(tmp_path / "system.yaml").bind({"a.prompt": "Best."})
    best.configuration.save(tmp_path / "best.json")
    return tmp_path


def test_the_command_exports_a_run(cli: Any, run: Path) -> None:
    def command(*arguments: str, file: Path = run / "best.json", to: str = "openai") -> Any:
        return cli("export", str(file), "--to", to, *arguments)

    ran = command(to="messages")
    assert "Best." in json.loads(ran.out)["prompts"][0]["messages"][0]["content"]
    body = json.loads(command().out)["a"]
    assert (body["model"], "response_format" in body) == ("small-1", False)
    assert "Best." in str(body)
    ran = command("-o", str(run / "m.json"), file=run / "system.yaml", to="messages")
    assert (ran.code, ran.out) == (0, "")
    assert "First." in (run / "m.json").read_text()
    ran = command(to="tensorflow")
    assert ran.code == 2
    assert "possible: dspy, inspect, mermaid, messages, openai, optuna, svg, text" in ran.err
    ran = command(file=run, to="messages")
    expected = f"the configuration of a run directory is {run / 'best.json'}"
    assert (ran.code, expected in ran.err) == (2, True)
    (run / "alone").mkdir()
    (run / "best.json").rename(run / "alone" / "best.json")
    ran = command(file=run / "alone" / "best.json")
    assert (ran.code, "give --system system.yaml" in ran.err) == (2, True)
    ran = command("--system", str(run / "system.yaml"), file=run / "alone" / "best.json")
    assert "Best." in ran.out


def test_a_key_is_not_needed_and_code_beside_a_configuration_is_refused(
    cli: Any, run: Path
) -> None:
    body = json.loads(cli("export", str(run / "best.json"), "--to", "openai").out)["a"]
    text = SYSTEM.replace("openai: {model", "litellm: {api_key_env: X_KEY, model")
    (run / "system.yaml").write_text(text.replace("small-1", "openai/small-1"))
    assert json.loads(cli("export", str(run / "best.json"), "--to", "openai").out)["a"] == body
    code = "  f: {function: {call: 'mine:f'}, in: {x: $a}}\noutputs:"
    (run / "system.yaml").write_text(SYSTEM.replace("outputs:", code))
    refused = cli("export", str(run / "best.json"), "--to", "openai")
    assert ("--no-import" in refused.err, "add --system" in refused.err) == (False, True)


@pytest.mark.parametrize("target", TARGETS)
def test_keys_of_the_environment_are_removed(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-a-key-of-the-environment"
    monkeypatch.setenv("SOME_API_KEY", key)
    system = cp.interchange.from_dspy(dspy.Predict("question -> answer"), lm="m").bind(
        {"predict.prompt": f"Use {key}."}
    )
    text = export(system, target)
    assert key not in text
    assert "[key removed]" in text


def plain(q: Any) -> Any:
    return cp.LLM("a", prompt="x")(q=q)


@pytest.mark.parametrize(
    ("build", "target", "message"),
    [
        (lambda q: cp.LLM("a")(q=q, prompt=cp.LLM("w")(q=q)), "messages", "its prompt comes from"),
        (lambda q: cp.FirstOf("f", str)(a=q), "messages", "it has no LLM components"),
        (lambda _: plain(cp.Input("photo", cp.Image)), "messages", "its input 'q' is an image"),
        (plain, "dspy", "was not imported from DSPy.*; export with --to messages"),
        (plain, "nothing", "cannot export to 'nothing'; possible: dspy, messages"),
    ],
)
def test_what_cannot_be_exported_is_named(build: Any, target: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(cp.System("s", {"y": build(cp.Input("q"))}, lm="m"), target)


def test_an_agent_inside_a_loop_is_exported() -> None:
    body = cp.System(
        "body", {"n": cp.Agent("inner", [population], output=int, lm="m")(q=cp.Input("q"))}
    )
    system = cp.System("s", {"all": cp.Map("each", body, over="q")(q=cp.Input("q", list[str]))})
    assert list(json.loads(export(system, "openai"))) == ["inner"]
