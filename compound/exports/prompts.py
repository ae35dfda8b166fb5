"""Prompts of a system as chat messages with placeholders for the inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compound.components.engines.response_format import response_format
from compound.components.fields import answer_cue
from compound.components.imports.dspy_predictor import DSPyPredictor
from compound.components.llm import LLM
from compound.engine import Message
from compound.errors import ExportError
from compound.execution.schedule import setting_values
from compound.exports.program import RENDERED, Data, model_settings
from compound.graph.component import Node
from compound.graph.system import System
from compound.graph.types import format_type
from compound.image import Image

MARK = "\ue000{}\ue001"  # private characters around the number of an input; prompts hold none of them


@dataclass(frozen=True)
class Prompt:
    """The request of one LLM node.

    Attributes:
        node: the name of the node.
        messages: role and content of each message; contents are format strings of Python, in which
            ``{question}`` is an input, and ``{{`` and ``}}`` are braces.
        inputs: types of the inputs by name.
        outputs: types of the output fields by name.
        settings: model, temperature and maximum number of tokens.
        component: the component.
    """

    node: str
    messages: tuple[tuple[str, str], ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    settings: Data
    component: LLM


def prompts_of(system: System) -> list[Prompt]:
    """Return the prompts of all LLM nodes, those inside loops and maps included.

    Raises:
        ExportError: the system has none, or a part of a prompt comes from another component.
    """
    found = [_prompt(node, system) for node in system.all_nodes() if isinstance(node.component, LLM)]
    if not found:
        raise ExportError(f"system {system.name!r} has no prompts to export: it has no LLM components")
    return found


def _prompt(node: Node, system: System) -> Prompt:
    component = node.component
    assert isinstance(component, LLM)
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
    values = setting_values(component, system)
    shown = [name for name in node.wires if name not in component.settings]
    marks = {name: MARK.format(number) for number, name in enumerate(shown)}
    messages = _with_cue(component, component.messages(marks, values))
    return Prompt(
        node.name,
        tuple((message.role, _template(message.text, marks)) for message in messages),
        {name: format_type(node.inputs[name].type) for name in shown},
        {name: format_type(port.type) for name, port in component.outputs.items()},
        model_settings(component, node, values),
        component,
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
                **prompt.settings,
                "messages": [{"role": role, "content": content} for role, content in prompt.messages],
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
    component, settings = prompt.component, prompt.settings
    body: dict[str, Any] = {
        "model": str(settings["lm"]).removeprefix("openai/"),
        "messages": [{"role": role, "content": content} for role, content in prompt.messages],
        "temperature": settings["temperature"],
        "max_tokens": settings["max_tokens"],
    }
    if component.stop:
        body["stop"] = list(component.stop)
    if not isinstance(component, DSPyPredictor) and component.answer_format is not None:
        body["response_format"] = response_format(component.answer_format)
    return body
