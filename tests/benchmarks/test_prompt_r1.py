"""The Prompt-R1 conversation: its file, its turns, and whole runs with scripted models."""

from __future__ import annotations

from typing import Any

import pytest

import compound as cp
from benchmark_systems import BENCHMARKS
from compound.core.example import Example
from compound.core.narrowing import entry
from compound.testing import ScriptedLM
from compound.yaml import load
from compound.yaml.program import Program

FILE = BENCHMARKS / "prompt_r1.yaml"
ENVIRONMENT = "components.talk.loop.body.components.environment.llm"
ROW = {
    "id": "a",
    "question": "Where was the author of Emma born?",
    "answers": ["Steventon", "Hampshire"],
}
EXAMPLE = Example("a", {"question": ROW["question"]}, ROW)
ASK = "<think>Who?</think><interaction_prompt>Who wrote Emma?</interaction_prompt>"
AGAIN = "<think>Where?</think><interaction_prompt>Where was she born?</interaction_prompt>"
END = "<think>Good.</think><answer>Steventon</answer>"


@pytest.fixture(scope="module")
def program() -> Program:
    return load(FILE, overrides=[(f"{ENVIRONMENT}.lm", "openai/big")])


def turns(*texts: str) -> ScriptedLM:
    return ScriptedLM(list(texts))


def outcome(program: Program, agent: ScriptedLM, big: ScriptedLM) -> tuple[cp.Trace, float | None]:
    trace = cp.run(
        program.system, EXAMPLE.inputs, engines={"smollm2": agent, "openai/big": big}, check=False
    )
    if trace.failure is not None:
        return trace, None
    assert program.metric is not None
    score: Any = program.metric.score(trace.outputs, EXAMPLE)
    return trace, score.value


def echo(said: str = "Jane Austen.") -> ScriptedLM:
    return ScriptedLM(lambda message: said)


def test_only_the_agent_is_trained_and_both_models_are_swappable(program: Program) -> None:
    assert set(program.system.parameters) == {"agent.weights"}
    assert program.optimize.failure_score == -1.0
    plain = load(FILE)
    own = turns(ASK, "Jane Austen.", END)
    trace = cp.run(plain.system, EXAMPLE.inputs, engines={"smollm2": own}, check=False)
    assert [call.component for call in trace.calls if call.counted] == [
        "agent",
        "environment",
        "agent",
    ]


def test_the_agent_sees_the_whole_history_and_the_environment_only_what_it_was_asked(
    program: Program,
) -> None:
    agent, big = turns(ASK, AGAIN, END), ScriptedLM(["Jane Austen.", "In Steventon."])
    outcome(program, agent, big)
    replied = [
        f"<interaction_response>{said}</interaction_response>"
        for said in ("Jane Austen.", "In Steventon.")
    ]
    assert "\n".join([ASK, replied[0], AGAIN, replied[1]]) in agent.requests[2].messages[-1].content
    asked = [request.messages[-1].content for request in big.requests]
    assert "Request: Who wrote Emma?" in asked[0]
    assert "Asked: Who wrote Emma?\nReplied: Jane Austen." in asked[1]
    assert "Request: Where was she born?" in asked[1]
    assert all("author of Emma" not in text for text in asked)


@pytest.mark.parametrize(
    ("texts", "asked", "reward"),
    [
        ([END], 0, -0.4),  # however right, a direct answer stays behind the gate
        (["I think it is Steventon"], 0, -1.0),
        ([ASK, "so it is Steventon"], 1, -0.6),
        ([ASK, "<answer>Steventon</answer>"], 1, -0.1),
        ([ASK, "<think>?</think><answer>Paris</answer>"], 1, 0.0),
        ([ASK] * 5, 5, -0.6),  # out of turns: the environment has the last word
        (["<interaction_prompt>Who?</interaction_prompt>", END], 1, -0.4),
        ([f"{ASK}{END}", END], 1, -0.4),  # asking and answering at once: the question is asked
    ],
)
def test_every_way_to_end_is_scored(
    program: Program, texts: list[str], asked: int, reward: float
) -> None:
    big = echo()
    trace, found = outcome(program, turns(*texts), big)
    assert trace.failure is None
    assert found == pytest.approx(reward)
    assert len(big.requests) == asked
    assert len(entry(trace.outputs, "turns", list)) == len(texts)
