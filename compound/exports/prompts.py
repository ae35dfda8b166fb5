"""Prompts of a system as chat messages with placeholders for the inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from compound.components.agents.agent import Agent
from compound.components.agents.conversation import HISTORY, LAST, TASK
from compound.components.agents.turn import AgentTurn
from compound.components.engines.chat_format import messages_to_json, tools_to_json
from compound.components.engines.response_format import response_format
from compound.components.fields import answer_cue
from compound.components.imports.dspy_predictor import DSPyPredictor
from compound.components.llm import LLM
from compound.engine import AnswerFormat, Message, Request
from compound.errors import ExportError
from compound.execution.schedule import setting_values
from compound.execution.tool_text import to_text
from compound.exports.program import RENDERED, Data, Sent, model_settings, sent_by
from compound.graph.component import Node
from compound.graph.system import System
from compound.graph.types import format_type
from compound.image import Image

MARK = "\ue000{}\ue001"  # private characters around the number of an input; prompts hold none of them


@dataclass(frozen=True)
class Prompt:
    """The request of one LLM node, or of the first turn of an agent.

    Attributes:
        node: the name of the node.
        messages: the messages as JSON, with role and content; contents are format strings of Python, in which
            ``{question}`` is an input, and ``{{`` and ``}}`` are braces. Demonstrations of an agent have
            ``tool_calls`` and their results, too.
        inputs: types of the inputs by name.
        outputs: types of the output fields by name.
        lm: the model.
        tools: the declarations of an agent's tools as JSON; empty if the messages describe them.
        format: the format of answers, if the engine receives it.
        options: temperature, maximum number of tokens, stop strings, and options of the engine.
        tool_names: the names under which the tools were declared, by their tuned names.
    """

    node: str
    messages: tuple[Data, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    lm: object
    tools: list[Data] = field(default_factory=list)
    format: AnswerFormat | None = None
    options: Data = field(default_factory=dict)
    tool_names: Mapping[str, str] = field(default_factory=dict)


def prompts_of(system: System) -> list[Prompt]:
    """Return the prompts of all LLM nodes and agents, those inside loops and maps included.

    Raises:
        ExportError: the system has none, or a part of a prompt comes from another component.
    """
    found = [
        _prompt(node, system) if isinstance(node.component, LLM) else _agent_prompt(node, system)
        for node in system.all_nodes()
        if isinstance(node.component, LLM | Agent)
    ]
    if not found:
        raise ExportError(
            f"system {system.name!r} has no prompts to export: it has no LLM components and agents",
            hint="tuned texts of other components are the values of its configuration",
        )
    return found


def _prompt(node: Node, system: System) -> Prompt:
    component = node.component
    assert isinstance(component, LLM)
    _check(node)
    values = setting_values(component, system)
    shown = [name for name in node.wires if name not in component.settings]
    marks = {name: MARK.format(number) for number, name in enumerate(shown)}
    messages = _with_cue(component, component.messages(marks, values))
    settings = model_settings(component, node, values, system)
    found = _filled(node, component, messages, marks, settings, sent_by(system, values["lm"]))
    answer = None if isinstance(component, DSPyPredictor) else component.answer_format
    sent = sent_by(system, values["lm"])
    return replace(found, format=answer if sent.takes_format else None)


def _agent_prompt(node: Node, system: System) -> Prompt:
    agent = node.component
    assert isinstance(agent, Agent)
    _check(node)
    turn_node = agent.body.nodes["turn"]
    turn = turn_node.component
    assert isinstance(turn, AgentTurn)
    values = setting_values(turn, system)
    shown = [name for name in node.wires if name not in agent.settings]
    marks = {name: MARK.format(number) for number, name in enumerate(shown)}
    messages = turn.messages({TASK: marks, HISTORY: [], LAST: False}, values)
    declared, sent = turn.declared(values), sent_by(system, values["lm"])
    request = Request(
        messages, tools=tuple(spec for spec, _ in declared.values()), format=agent.model.answer_format
    )
    if not sent.takes_tools:  # it was measured with the tools described in the prompt
        request = to_text(request)
    settings = model_settings(agent.model, turn_node, values, system)
    return replace(
        _filled(node, agent.model, request.messages, marks, settings, sent),
        tools=tools_to_json(request.tools),
        tool_names={name: tool.name for name, (_, tool) in declared.items()} if request.tools else {},
        # a format would exclude calls of declared tools
        format=request.format if sent.takes_format and not request.tools else None,
    )


def _check(node: Node) -> None:
    """Reject a prompt that does not follow from the inputs of its node alone."""
    wired = [name for name in node.wires if name in RENDERED]
    if wired:
        raise ExportError(
            f"the prompt of {node.name!r} cannot be exported: its {wired[0]} comes from another component",
            hint="export with --to python, or connect the text as an input",
        )
    pictures = [name for name, port in node.inputs.items() if port.type is Image]
    if pictures:
        raise ExportError(
            f"the prompt of {node.name!r} cannot be exported: its input {pictures[0]!r} is an image"
        )


def _filled(
    node: Node,
    component: LLM,
    messages: tuple[Message, ...],
    marks: Mapping[str, str],
    settings: Data,
    sent: Sent,
) -> Prompt:
    contents = [_template(message.text, marks) for message in messages]
    shown = [
        {**document, "content": content}
        for document, content in zip(messages_to_json(messages), contents, strict=True)
    ]
    options = sent.adapt({"messages": shown, **settings, **sent.with_stop(component)})
    return Prompt(
        node.name,
        tuple(options.pop("messages")),
        {name: format_type(node.inputs[name].type) for name in marks},
        {name: format_type(port.type) for name, port in component.outputs.items()},
        options.pop("lm"),
        options=options,
    )


def _with_cue(component: LLM, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    cue = "" if isinstance(component, DSPyPredictor) else answer_cue(component.outputs, component.layout)
    if not cue:
        return messages
    *earlier, last = messages
    return (*earlier, Message(last.role, f"{last.text}\n{cue}"))


def _template(text: str, marks: Mapping[str, str]) -> str:
    """Escape braces, and replace marks by placeholders."""
    escaped = text.replace("{", "{{").replace("}", "}}")
    names = {mark: name for name, mark in marks.items()}
    pattern = "|".join(map(re.escape, names))
    return re.sub(pattern, lambda found: f"{{{names[found.group()]}}}", escaped) if names else escaped


def messages_document(system: System) -> Data:
    """Return the prompts as messages with placeholders."""
    return {
        "format": "compound-messages-1",
        "system": system.name,
        "placeholders": "contents are Python format strings: {name} is an input, {{ and }} are braces",
        "prompts": [
            {
                "name": prompt.node,
                "lm": prompt.lm,
                **prompt.options,
                "messages": list(prompt.messages),
                **({"tools": prompt.tools, "tool_names": prompt.tool_names} if prompt.tools else {}),
                "inputs": dict(prompt.inputs),
                "outputs": dict(prompt.outputs),
            }
            for prompt in prompts_of(system)
        ],
    }


def openai_document(system: System) -> Data:
    """Return the bodies of OpenAI's chat completions by node, with placeholders in the contents."""
    return {prompt.node: _body(prompt) for prompt in prompts_of(system)}


def _body(prompt: Prompt) -> Data:
    body: dict[str, Any] = {
        "model": str(prompt.lm).removeprefix("openai/"),
        "messages": list(prompt.messages),
    }
    if prompt.tools:
        body["tools"] = prompt.tools
    if prompt.format is not None:
        body["response_format"] = response_format(prompt.format)
    return body | prompt.options


def langchain_messages(prompt: Prompt) -> list[tuple[str, str]]:
    """Return the messages as pairs of role and content, which ``ChatPromptTemplate`` takes.

    Raises:
        ExportError: demonstrations of an agent contain tool calls, which a template cannot hold.
    """
    if any(message["role"] == "tool" or "tool_calls" in message for message in prompt.messages):
        raise ExportError(
            f"the prompt of {prompt.node!r} cannot be exported to langchain: its demonstrations call tools",
            hint="export it with --to openai, or bind a configuration without them",
        )
    return [(message["role"], message["content"]) for message in prompt.messages]
