"""The kind ``agent``: a model that calls tools in turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field

from compound.components.agents.agent import MAX_CALLS, MAX_RESULT, MAX_TURNS, Agent
from compound.components.agents.tool_texts import setting_name
from compound.graph.space import Choice, Text, Weights
from compound.spec.kinds.kind import DumpContext, Kind, MakeContext, is_same, make_settings
from compound.spec.kinds.tools import TAGS, ToolEntry, dump_tools, make_tools
from compound.spec.schema.settings import (
    CountSetting,
    DemosSetting,
    FloatSetting,
    IntSetting,
    LabelSetting,
    TextSetting,
    WeightsSetting,
)
from compound.spec.schema.types import Model, Name, Type
from compound.spec.schema.wiring import Out, Wiring
from compound.spec.spelling import Tree
from compound.spec.yaml.text import Flow


class AgentSettings(Model):
    """A model that calls tools in turns until it answers."""

    tools: list[ToolEntry]
    """The tools: each a function, an operation of an HTTP interface, an MCP server, or the sandbox."""
    prompt: TextSetting = ""
    """The instruction."""
    demos: DemosSetting = Field(default=[])
    """Demonstrations, shown as earlier conversations: records of turns that answered."""
    lm: LabelSetting | None = None
    """The model; the file's `lm` by default."""
    temperature: FloatSetting = 0.0
    """Sampling temperature; 0 is greedy decoding."""
    max_tokens: CountSetting = 512
    """Maximum length of the model's text in one turn in tokens."""
    max_turns: IntSetting = MAX_TURNS
    """Maximum number of turns; in the last one the model must answer."""
    max_calls: int = Field(default=MAX_CALLS, ge=1)
    """Maximum number of tool calls in one turn."""
    max_result: int = Field(default=MAX_RESULT, ge=1)
    """Number of characters after which the result of a tool is cut."""
    tune_tools: bool = False
    """Whether the names and descriptions of the tools may be tuned."""
    texts: dict[str, str] = Field(default={})
    """Texts that replace those of tools, by the tool's name; see the guide on agents."""
    weights: WeightsSetting | None = None
    """A LoRA adapter to train."""
    takes: dict[Name, Type] | None = None
    """Names and types of the inputs; by default those that are connected."""
    system: str = ""
    """The system message."""
    stop: list[str] = Field(default=[])
    """Stop sequences."""
    enforce: bool = True
    """Restrict the final answer to its type where the engine can."""
    reasks: int | None = Field(default=None, ge=0)
    """Maximum number of requests after a final answer that cannot be parsed; 1 for JSON by default."""
    timeout: float | None = Field(default=120.0, gt=0)
    """Timeout of one attempt of a remote model in seconds."""
    retries: int = Field(default=3, ge=0)
    """Maximum number of retries after transient errors of the model or of a tool's server."""


class AgentEntry(Wiring):
    """A model with tools, as a typed component."""

    agent: AgentSettings
    """The model's settings and its tools."""
    out: Out = Field(default="str", validate_default=True)
    """The type of the final answer, or the types of the output fields."""


def _make(entry: AgentEntry, context: MakeContext) -> Agent | None:
    file, inside = context.file, (*context.address, "agent")
    tools = make_tools(entry.agent.tools, file, (*inside, "tools"))
    given = make_settings({key: value for key, value in entry.agent.given.items() if key != "tools"})
    if isinstance(entry.agent.demos, list):
        given["demos"] = tuple(demo.model_dump() for demo in entry.agent.demos)
    lm = given.get("lm")
    if lm is not None:
        file.check_models(lm.options if isinstance(lm, Choice) else [lm], (*inside, "lm"))
    if isinstance(weights := given.get("weights"), Weights) and weights.value is not None:
        stored = file.resolve_stored(weights.value, (*inside, "weights", "value"))
        given["weights"] = replace(weights, value=stored)
    if tools is None:
        return None
    return file.attempt(inside, lambda: Agent(context.name, tools, output=entry.out, **given))


def _dump(agent: Agent, context: DumpContext) -> Tree:
    turn = replace(context, name=agent.model.name)
    model, plain = agent.model, AgentSettings(tools=[])
    given: Tree = {"tools": dump_tools(agent)}
    for name in ("prompt", "demos", "lm", "temperature", "max_tokens", "weights"):
        value = getattr(model, name)
        if not is_same(value, getattr(plain, name)):
            given[name] = turn.setting(name, value)
    given["max_turns"] = context.setting("max_turns", agent.max_turns)
    settings: dict[str, Any] = {
        "max_calls": agent.max_calls, "max_result": agent.max_result, "tune_tools": agent.tune_tools,
        "system": model.system, "stop": list(model.stop), "enforce": model.enforce, "reasks": model.reasks,
        "timeout": model.timeout, "retries": model.retries,
    }  # fmt: skip
    given |= {name: value for name, value in settings.items() if not is_same(value, getattr(plain, name))}
    if texts := _texts(agent, context):
        given["texts"] = texts
    if agent.takes is not None:
        given["takes"] = context.types(agent.takes)
    outputs = context.output_types(agent)
    if outputs == {"output": "str"}:
        return {"agent": given}
    return {"agent": given, "out": outputs["output"] if list(outputs) == ["output"] else Flow(outputs)}


def _texts(agent: Agent, context: DumpContext) -> dict[str, str]:
    """Return the texts that replace those of tools, with the values that the system is bound to."""
    found = dict(agent.texts)
    for tool in agent.tools:
        declared = agent.tool_texts.get(setting_name(tool))
        if isinstance(declared, Text):
            value = str(context.values.get(f"{agent.model.name}.{setting_name(tool)}", declared.value))
            if value != declared.value or tool.name in agent.texts:
                found[tool.name] = value
    return found


AGENT_KIND = Kind("agent", AgentEntry, _make, (Agent,), _dump, tags=TAGS)
