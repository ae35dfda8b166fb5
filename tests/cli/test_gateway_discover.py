"""`compound init`: prompts are shown, confirmed, written, and then recognized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compound.cli import app
from compound.core.errors import DeclarationError
from compound.graph.registry import engines
from compound.optimizers.methods import method
from compound.testing import ScriptedLM
from compound.yaml import load

AGENT = """
import openai

client = openai.OpenAI(max_retries=0)


def answer(question: str) -> str:
    messages = [
        {"role": "system", "content": f"You are a trip planner. Today's topic: {question}"},
        {"role": "user", "content": question},
    ]
    return client.chat.completions.create(model="gpt-4o-mini", messages=messages).choices[0].message.content
"""
SYSTEM = """
system: qa
lm: smollm2
inputs: {question: str}
components:
  geo: {external_agent: {call: "trip_agent:answer"}, in: {question: $question}}
outputs: {answer: $geo}
data: {path: rows.jsonl, split_by: {train: 0.5, valid: 0.25, test: 0.25}}
metric: {exact_match: {output: answer}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "trip_agent.py").write_text(AGENT)
    (tmp_path / "system.yaml").write_text(SYSTEM)
    questions = ["Where is Lima?", "Can we swim there?", "Best food of Peru?", "Is it far?"] * 3
    rows = [
        {"id": str(i), "question": f"{q} ({i})", "answer": "yes"} for i, q in enumerate(questions)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(
        engines, "open_engine", lambda *_, **__: ScriptedLM(lambda message: "The topic is tea.")
    )
    return tmp_path


def run(folder: Path, *arguments: str) -> Any:
    found = CliRunner().invoke(app, ["init", str(folder / "system.yaml"), *arguments])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


@pytest.mark.slow
def test_prompts_are_written_and_recognized_afterwards(folder: Path) -> None:
    found = run(folder, "--yes", "--examples", "4")
    assert found.exit_code == 0
    assert "trip_planner: 4 requests in 4 runs" in found.stdout
    assert "You are a trip planner. Today's topic: {{" in found.stdout
    written = folder / "geo_prompts.yaml"
    assert f"wrote {written}" in found.stdout
    path = folder / "system.yaml"
    path.write_text(
        path.read_text().replace(':answer"', ':answer", prompts_file: geo_prompts.yaml')
    )
    system = load(path).system
    assert list(system.parameters) == ["trip_planner.system"]
    again = run(folder, "--examples", "3")
    assert "3 requests have the declared prompt trip_planner" in again.stdout
    assert "no further prompt was found" in again.stdout


def test_only_prompts_are_accepted_and_never_questions_or_answers(folder: Path) -> None:
    (folder / "trip_agent.py").write_text("""
import openai

client = openai.OpenAI(max_retries=0)


def ask(**texts):
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    return client.chat.completions.create(model="m", messages=messages).choices[0].message.content


def answer(question: str) -> str:
    topic = ask(system="Name the topic.", user=question)
    return ask(system="Lower case.", user=topic) + ask(user=topic) + ask(user=f"Shorten: {question}")
""")
    rows = [
        {"id": str(i), "question": f"What is the price of tea {i}?", "answer": "a"}
        for i in range(12)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(folder, "--yes", "--examples", "4").exit_code == 0
    path = folder / "system.yaml"
    path.write_text(
        path.read_text().replace(':answer"', ':answer", prompts_file: geo_prompts.yaml')
    )
    tuned = {str(text.value) for text in load(path).system.parameters.values()}
    assert tuned == {"Name the topic.", "Lower case.", "Shorten: {{shorten}}"}


def test_without_a_terminal_or_yes_nothing_is_written(folder: Path) -> None:
    found = run(folder, "--examples", "3")
    assert "trip_planner: 3 requests in 3 runs" in found.stdout
    assert found.exit_code == 1
    assert "nothing was written: without a terminal" in found.stderr
    assert "--yes" in found.stderr
    assert not (folder / "geo_prompts.yaml").exists()


@pytest.mark.parametrize("method", ["", "optimize: {method: search, budget: {system_runs: 100}}\n"])
def test_check_accepts_an_agent_whose_prompts_are_not_found_yet(folder: Path, method: str) -> None:
    path = folder / "system.yaml"
    path.write_text(path.read_text() + method)
    rows = [{"id": str(i), "question": f"Question {i}?", "answer": "yes"} for i in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = CliRunner().invoke(app, ["check", str(path)])
    assert found.exit_code == 0, found.output
    assert f"compound init {path}" in found.stdout


def test_an_optimization_without_prompts_refers_to_their_discovery(folder: Path) -> None:
    program = load(folder / "system.yaml")
    with pytest.raises(DeclarationError, match="prompts of agent 'geo' by `compound init"):
        method("search", program.system, program.optimize)


def test_an_existing_file_is_kept(folder: Path) -> None:
    (folder / "geo_prompts.yaml").write_text("kept: {}\n")
    with pytest.raises(Exception, match="exists; choose another name"):
        run(folder, "--yes", "--examples", "3")
    assert (folder / "geo_prompts.yaml").read_text() == "kept: {}\n"


def test_the_result_is_json_on_request(folder: Path) -> None:
    (found,) = json.loads(run(folder, "--json", "--examples", "3").stdout)
    assert found["agent"] == "geo"
    assert found["prompts"][0]["name"] == "trip_planner"
    assert found["usage"]["calls"] == 3


def test_a_system_without_an_agent_is_refused(folder: Path) -> None:
    path = folder / "system.yaml"
    path.write_text(
        path.read_text().replace('external_agent: {call: "trip_agent:answer"}', "llm: {}")
    )
    with pytest.raises(Exception, match="has no external agent"):
        run(folder)
