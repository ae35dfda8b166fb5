"""The LLM component: its prompts, and the dependencies of its version."""

from __future__ import annotations

import asyncio
from typing import Any

import compound as cp
from compound.core.engine import Request
from compound.graph.configuration import digest
from compound.testing import ScriptedLM


def asked(reply: str, **settings: Any) -> tuple[Request, cp.Trace]:
    lm = ScriptedLM([reply])
    node = cp.LLM("judge", prompt="Is it so?", retries=0, **settings)(claim=cp.Input("claim"))
    system = cp.System("s", outputs={"y": node}, lm="lm")
    trace = asyncio.run(cp.Executor({"lm": lm}).run(system, {"claim": "It rains."}))
    return lm.requests[0], trace


def test_the_version_and_the_prompt_of_a_text_output_are_those_of_earlier_versions() -> None:
    """Caches and run directories from before the type notes of single outputs stay valid."""
    llm = cp.LLM("a", prompt="Is it so?")
    assert llm.version == "llm:" + digest([2, {"output": "str"}, "text", (), "", False])
    request, _ = asked("It is.")
    assert request.messages[-1].content == "Is it so?\n\nClaim: It rains."
    several = cp.LLM("a", output={"x": str, "n": int}, reasks=0)
    assert several.version == "llm:" + digest(
        [2, {"x": "str", "n": "int"}, "fields", (), "", False]
    )


def test_the_version_of_a_typed_output_changes_with_its_type_note() -> None:
    assert cp.LLM("a", output=int).version != "llm:" + digest(
        [2, {"output": "int"}, "text", (), "", False]
    )
    assert cp.LLM("a", output=int).version != cp.LLM("a", output=int | None).version
