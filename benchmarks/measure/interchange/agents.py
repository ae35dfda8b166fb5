"""Agents of other frameworks and languages, optimized behind the gateway with real models.

The agents are those of ``docs/examples/external_agents``. Tuned are the text of the prompt that
answers, and the model that answers it. The optimized text is then written into the code of a copy
of the agent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import compound as cp
from benchmarks.measure.interchange.tasks import countries
from benchmarks.measure.interchange.trial import optimize, outputs, result_row
from compound.components.external_agent import ExternalAgent
from compound.evaluation.metrics.custom import custom
from compound.graph.space import Text

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples" / "external_agents"
MODELS = ("smollm2", "gemma3-270m")
GEOGRAPHER = "You are a geographer. Answer the question."
PLANNER = "You are a planner. Say in one sentence what the question asks for."
BUDGET = 240


@dataclass(frozen=True)
class FrameworkAgent:
    """An agent of another framework.

    Attributes:
        library: its library, as the package index of its language calls it.
        file: its file in the folder of the examples.
        module: the Python module that it needs; empty for a program of Node.
    """

    library: str
    file: str
    module: str = ""

    @property
    def runs_here(self) -> bool:
        """Whether its library is installed."""
        if self.module:
            return importlib.util.find_spec(self.module) is not None
        return shutil.which("node") is not None and (_node_modules() / "openai").is_dir()

    @property
    def name(self) -> str:
        """Its library with the installed version."""
        if self.module:
            return f"{self.library} {version(self.library)}"
        package = json.loads((_node_modules() / self.library / "package.json").read_text("utf-8"))
        return f"{self.library} {package['version']} (Node)"

    def component(self, folder: Path, geographer: cp.components.AgentPrompt) -> ExternalAgent:
        """Return the agent of a folder as a component."""
        planner = cp.components.AgentPrompt(
            "planner", system=PLANNER, temperature=0.0, max_tokens=24
        )
        if not self.module:
            return ExternalAgent(
                "agent", command=["node", self.file], folder=folder, prompts=[geographer]
            )
        call = f"{Path(self.file).stem}:answer"
        return ExternalAgent("agent", call=call, folder=folder, prompts=[geographer, planner])


AGENTS = (
    FrameworkAgent("langgraph", "langgraph_agent.py", "langgraph"),
    FrameworkAgent("openai-agents", "agents_sdk_agent.py", "agents"),
    FrameworkAgent("openai", "node_agent.mjs"),
)


def measure_agent(agent: FrameworkAgent, folder: Path) -> dict[str, Any] | None:
    """Optimize the text and the model of an agent's prompt; return None if its library is not installed."""
    if not agent.runs_here:
        return None
    task = countries()

    def system_of(text: str | Text, lm: str | cp.Choice, place: Path) -> cp.System:
        prompt = cp.components.AgentPrompt(
            "geographer", system=text, lm=lm, temperature=0.0, max_tokens=task.max_tokens
        )
        component = agent.component(place, prompt)
        return cp.System(
            "capitals", {"answer": component(question=cp.Input("question"))}, lm=MODELS[0]
        )

    engines = {lm: cp.engines.Transformers(lm, deterministic=True) for lm in MODELS}
    place = _copy(agent, folder / f"{agent.file}-before")
    tuned = system_of(cp.Text(GEOGRAPHER), cp.Choice(*MODELS, value=MODELS[0]), place)
    metric = custom(_named, "names the capital", bounds=(0, 1))
    result = optimize(tuned, task.rows, metric, BUDGET, folder / f"{agent.file}-run", engines)
    expected = outputs(tuned.bind(result.best), task.rows, engines)
    text, lm = str(result.best["geographer.system"]), str(result.best["geographer.lm"])
    place = _copy(agent, folder / f"{agent.file}-after", text)
    found = outputs(system_of(text, lm, place), task.rows, engines)
    same = {"the text in its code": sum(a == b for a, b in zip(found, expected, strict=True))}
    row = result_row(agent.name, "ExternalAgent", " or ".join(MODELS), result)
    return {**row, "same_outputs": same, "best": {"text": text, "lm": lm}}


def _named(outputs: Mapping[str, object], example: cp.Example) -> float:
    """Return 1 if the answer contains the capital."""
    return float(str(example.gold["answer"]).lower() in str(outputs["answer"]).lower())


def _copy(agent: FrameworkAgent, folder: Path, text: str = GEOGRAPHER) -> Path:
    """Write a copy of an agent with another text of its prompt into a new folder."""
    folder.mkdir(parents=True)
    code = (EXAMPLES / agent.file).read_text("utf-8")
    literal = json.dumps(text, ensure_ascii=False)[1:-1]
    (folder / agent.file).write_text(code.replace(GEOGRAPHER, literal), encoding="utf-8")
    if not agent.module:
        (folder / "node_modules").symlink_to(_node_modules())
    return folder


def _node_modules() -> Path:
    return Path(os.environ.get("COMPOUND_TEST_NODE_MODULES", "node_modules")).absolute()
