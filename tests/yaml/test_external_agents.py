"""The kind ``external_agent`` of YAML files: reading, writing, errors at their lines, and consent."""

from __future__ import annotations

from pathlib import Path

import pytest

import compound as cp
from compound.components.external_agent import ExternalAgent
from compound.core.errors import SpecError
from compound.yaml import load, loads

HEAD = "system: qa\nlm: smollm2\ninputs: {question: str}\ncomponents:\n  geo:\n"
TAIL = "\n    in: {question: $question}\noutputs: {answer: $geo}\n"


def text_of(agent: str) -> str:
    return f"{HEAD}    external_agent: {agent}{TAIL}"


def agent_of(system: cp.System) -> ExternalAgent:
    found = system.components["geo"]
    assert isinstance(found, ExternalAgent)
    return found


def test_a_file_declares_an_agent_and_its_prompts(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("raise SystemExit('it is not imported to read the file')\n")
    (tmp_path / "prompts.yaml").write_text("planner: {system: {tune: 'You plan {{what}}.'}}\n")
    path = tmp_path / "system.yaml"
    path.write_text(
        text_of(
            "{call: 'agent:answer', prompts_file: prompts.yaml, timeout: 9, env: [MY_SETTING], prompts: "
            "{writer: {match: {user: 'Write: {{x}}'}, prompt: {tune: 'Compose {{x}}'}, lm: {choice: [a/b, c/d]}}}}"
        )
    )
    system = load(path).system
    assert sorted(system.parameters) == ["planner.system", "writer.lm", "writer.prompt"]
    agent = agent_of(system)
    assert agent.folder == tmp_path
    assert agent.run_timeout == 9
    assert agent.env == ("MY_SETTING",)
    assert agent.prompts[0].templates["user"].text == "Write: {{x}}"


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("{}", "exactly one of call and command"),
        ("{call: 'no_such_module_here:f'}", "no module 'no_such_module_here'"),
        ("{call: 'json:loads', command: [x]}", "exactly one of call and command"),
        ("{command: [x], prompts: {p: {}}}", "needs the text of a system or user message"),
        ("{command: [x], prompts: {p: {system: '{{a}}{{b}}'}}}", "without text between"),
        ("{command: [x], prompts: {p: {match: {system: a}, prompt: b}}}", "match does not name it"),
        ("{command: [x], prompts: {geo: {system: a}}}", "a second component is named 'geo'"),
        ("{command: [x], prompts: {p: {system: a, lm: nonsense}}}", "no engine for the model"),
        ("{command: [x], prompts_file: missing.yaml}", "cannot be read"),
        ("{command: [x], isolation: thread, timeout: -1}", "must be > 0.0"),
    ],
)
def test_mistakes_are_reported(agent: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        loads(text_of(agent))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "text", ["planner: 5", "p: {system: {tun: x}}", "p: {system: x, typo: 1}", ": ["]
)
def test_mistakes_in_a_file_of_prompts_are_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "prompts.yaml").write_text(text)
    path = tmp_path / "system.yaml"
    path.write_text(text_of("{command: [x], prompts_file: prompts.yaml}"))
    with pytest.raises(SpecError, match="prompts_file"):
        load(path)


@pytest.mark.parametrize("agent", ["{command: [x]}", "{call: 'json:loads'}"])
def test_a_file_without_imports_may_not_run_an_agent(agent: str) -> None:
    with pytest.raises(SpecError, match="imports are not allowed"):
        loads(text_of(agent), allow_import=False)


def test_an_agent_without_a_model_is_reported() -> None:
    with pytest.raises(SpecError, match="no model for"):
        loads(text_of("{command: [x]}").replace("lm: smollm2\n", ""))


def test_the_key_of_an_upstream_needs_consent() -> None:
    engines = "engines: {up: {openai: {model: m, api_base: 'https://llm.example.com/v1', api_key_env: MY_KEY}}}\n"
    text = engines + text_of("{command: [x], lm: up}")
    with pytest.raises(SpecError, match="--trust MY_KEY@llm.example.com"):
        loads(text)
    program = loads(text, trust=["MY_KEY@llm.example.com"])
    assert vars(program.find_engine)["engines"]["up"][0] == "openai"


def test_a_file_of_prompts_is_read_through_no_link_and_whole(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "outside.yaml").write_text("planner: {system: You plan.}")
    (tmp_path / "link.yaml").symlink_to("outside.yaml")
    for name, message in (
        ("../link.yaml", "cannot be read.*symbolic link"),
        ("large.yaml", "larger than 1 MiB"),
    ):
        (tmp_path / "inner" / "large.yaml").write_text("p: {system: x}\n" + "#" * 2**20)
        (tmp_path / "inner" / "system.yaml").write_text(
            "system: s\nlm: smollm2\ninputs: {question: str}\ncomponents:\n"
            f"  helper: {{external_agent: {{command: [x], prompts_file: {name}}}, in: {{question: $question}}}}\n"
            "outputs: {answer: $helper}\n"
        )
        with pytest.raises(SpecError, match=message):
            cp.load_system(tmp_path / "inner" / "system.yaml")
