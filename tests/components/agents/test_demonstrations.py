"""Demonstrations of agents: bootstrapped from turns that answered, and shown as earlier conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import compound as cp
from compound.core.errors import DeclarationError
from compound.optimizers.search.proposers.demos import bootstrap
from compound.testing import ScriptedLM
from compound.yaml import load

CALL = json.dumps({"tool": "double", "arguments": {"number": 4}})


@cp.tool
def double(number: int) -> int:
    """Double a number."""
    return 2 * number


def make(**settings: object) -> cp.System:
    agent = cp.Agent(
        "agent", [double], prompt=cp.Text("Be exact."), output=int, demos=cp.Demos(max=2)
    )
    return cp.System("s", {"answer": agent(question=cp.Input("question"))}, lm="m").bind(settings)


def demo() -> Mapping[str, Mapping[str, object]]:
    system = make()
    lm = ScriptedLM([CALL, '{"answer": 8}'])
    trace = cp.run(system, {"question": "Twice 4?"}, engines={"m": lm})
    pool = bootstrap([replace(trace, score=1.0)], system.components["agent_turn"])
    assert len(pool) == 1  # the turn that called the tool is part of the one that answered
    return pool[0].demo


class TestDemonstrations:
    def test_a_demonstration_is_shown_as_a_conversation_before_the_task(self) -> None:
        lm = ScriptedLM(['{"answer": 10}'])
        system = make(**{"agent_turn.demos": [demo()]})
        assert cp.run(system, {"question": "Twice 5?"}, engines={"m": lm}).outputs == {"answer": 10}
        first, *shown = lm.requests[0].messages
        assert first.text.endswith(
            "Be exact.\n\nThe answer must be a whole number.\n\nQuestion: Twice 4?"
        )
        assert [(message.role, message.text) for message in shown] == [
            ("assistant", CALL),
            ("user", "Result of double:\n8"),
            ("assistant", '{"answer": 8}'),
            ("user", "Question: Twice 5?"),
        ]

    def test_models_with_tools_of_their_own_read_calls(self) -> None:
        lm = ScriptedLM(["10"], native_tools=True)
        cp.run(make(**{"agent_turn.demos": [demo()]}), {"question": "Twice 5?"}, engines={"m": lm})
        messages = lm.requests[0].messages
        roles = " ".join(message.role for message in messages)
        assert roles == "user assistant tool assistant user"
        assert messages[1].tool_calls[0].name == "double"

    def test_without_demonstrations_there_is_no_parameter(self) -> None:
        agent = cp.Agent("agent", [double], prompt=cp.Text("Be exact."))
        system = cp.System("s", {"answer": agent(question=cp.Input("question"))}, lm="m")
        assert list(system.parameters) == ["agent_turn.prompt"]

    def test_other_demonstrations_are_rejected(self) -> None:
        wrong: Mapping[str, Mapping[str, object]] = {
            "inputs": {"question": "Twice 4?"},
            "outputs": {"output": 8},
        }
        with pytest.raises(DeclarationError, match="the inputs of a demonstration have no 'task'"):
            cp.Agent("agent", [double], demos=[wrong])

    def test_a_file_holds_demonstrations(self, tmp_path: Path) -> None:
        file = tmp_path / "system.yaml"
        tool = "benchmarks.agents.arithmetic:calculate"
        file.write_text(
            "system: s\nlm: smollm2\ninputs: {question: str}\ncomponents:\n  agent:\n    agent:\n"
            f"      tools: [{{function: '{tool}'}}]\n"
            f"      demos: {{tune: 3, value: [{json.dumps(demo())}]}}\n"
            "    in: {question: $question}\noutputs: {answer: $agent}\n",
            encoding="utf-8",
        )
        system = load(file).system
        assert isinstance(system.parameters["agent_turn.demos"], cp.Demos)
        bound = system.bind({"agent_turn.demos": [demo()]})
        assert system.configuration == bound.configuration
