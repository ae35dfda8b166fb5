"""Agents of LangGraph, the OpenAI Agents SDK and Node's OpenAI client are optimized without a change."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.api.discover import discover
from compound.components.external_agent import ExternalAgent
from compound.core.engine import Request
from compound.testing import ScriptedLM

AGENTS = Path(__file__).parents[3] / "docs" / "examples" / "external_agents"
GEOGRAPHER = "You are a geographer. Answer the question."
PLANNER = "You are a planner. Say in one sentence what the question asks for."
CAPITALS = {
    "Peru": "Lima",
    "Chile": "Santiago",
    "Ecuador": "Quito",
    "Bolivia": "Sucre",
    "Cuba": "Havana",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Kenya": "Nairobi",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Greece": "Athens",
}
EXACT = ("carefully", "Check every part", "Follow every instruction")


class Geographer(ScriptedLM):
    """A model that knows capitals, and answers with the name alone only if it is asked to be exact."""

    def __init__(self) -> None:
        super().__init__([], name="geographer")

    def _reply(self, request: Request, number: int) -> str:
        system = request.messages[0].text
        asked = " ".join(message.text for message in request.messages[1:])
        capital = next((city for country, city in CAPITALS.items() if country in asked), "unknown")
        if "planner" in system:
            return "It asks for a city."
        return (
            capital
            if any(clause in system for clause in EXACT)
            else f"The capital is the city of {capital}."
        )


def rows() -> dict[str, list[dict[str, str]]]:
    made = [
        {"question": f"What is the capital of {c}?", "answer": city} for c, city in CAPITALS.items()
    ]
    return {"train": made[:6], "valid": made[6:], "test": made[6:]}


def need(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


def node_folder(tmp_path: Path) -> Path:
    """Return a folder with the agent and the OpenAI package for Node."""
    modules = Path(os.environ.get("COMPOUND_TEST_NODE_MODULES", "node_modules")).absolute()
    if shutil.which("node") is None or not (modules / "openai").is_dir():
        pytest.skip("node, or its package openai (COMPOUND_TEST_NODE_MODULES), is not installed")
    shutil.copy(AGENTS / "node_agent.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(modules)
    return tmp_path


def agent(kind: str, tmp_path: Path, **settings: Any) -> ExternalAgent:
    if kind == "node":
        return ExternalAgent(
            "agent", command=["node", "node_agent.mjs"], folder=node_folder(tmp_path), **settings
        )
    module, libraries = {
        "langgraph": ("langgraph_agent", ("langgraph", "langchain_openai")),
        "agents_sdk": ("agents_sdk_agent", ("agents",)),
    }[kind]
    need(*libraries)
    return ExternalAgent("agent", call=f"{module}:answer", folder=AGENTS, **settings)


def system_of(found: ExternalAgent, lm: str = "lm") -> cp.System:
    return cp.System("capitals", {"answer": found(question=cp.Input("question"))}, lm=lm)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["langgraph", "agents_sdk", "node"])
def test_prompts_are_discovered_then_optimized_to_the_known_optimum(
    kind: str, tmp_path: Path
) -> None:
    lm = Geographer()
    plain = system_of(agent(kind, tmp_path))
    examples = [
        cp.Example(str(i), {"question": row["question"]}, {})
        for i, row in enumerate(rows()["train"][:3])
    ]
    (found,) = discover(plain, examples, lambda name: lm)
    assert not found.failed
    prompts = {prompt.match["system"]: prompt for prompt in found.prompts}
    assert set(prompts) == ({GEOGRAPHER, PLANNER} if kind == "langgraph" else {GEOGRAPHER})
    assert all(prompt.runs == 3 for prompt in prompts.values())

    tuned = [
        cp.components.AgentPrompt(p.name, system=cp.Text(p.match["system"])) for p in found.prompts
    ]
    own = agent_of(plain)
    made = ExternalAgent(
        "agent", call=own.call, command=own.command, folder=own.folder, prompts=tuned
    )
    result = cp.optimize(
        system_of(made),
        rows(),
        "exact_match",
        method="search",
        budget=80,
        engines={"lm": lm},
        run_dir=tmp_path / "run",
        progress=False,
    )
    name = prompts[GEOGRAPHER].name
    assert any(clause in str(result.best[f"{name}.system"]) for clause in EXACT)
    best = cp.evaluate(system_of(made).bind(result.best), rows(), "exact_match", engines={"lm": lm})
    assert best.mean == 1.0  # the start scores 0: it answers in sentences


def agent_of(system: cp.System) -> ExternalAgent:
    found = system.components["agent"]
    assert isinstance(found, ExternalAgent)
    return found
