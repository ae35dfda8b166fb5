"""Describe a system as plain data: its graph, prompts and settings, with the values of a configuration."""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin

from compound.components.agents.agent import Agent
from compound.components.answers.answer_types import (
    is_plain,
    json_forms,
    labels_of,
    takes_any_text,
    without_annotation,
)
from compound.components.engines.litellm import LiteLLMEngine
from compound.components.engines.openai.engine import OpenAIEngine
from compound.components.engines.response_format import is_wrapped, response_format
from compound.components.engines.unsupported import Unsupported
from compound.components.fields import answer_cue, render
from compound.components.flow import Loop, Map
from compound.components.function import FirstOf, Function
from compound.components.hyperparameter import Hyperparameter
from compound.components.imports.dspy_predictor import DSPyPredictor
from compound.components.llm import LLM
from compound.components.selector import Selector
from compound.errors import CompoundError, ExportError
from compound.execution.schedule import setting_values
from compound.graph.component import Component, Input, Node, Source
from compound.graph.configuration import to_readable_json
from compound.graph.space import as_demos
from compound.graph.system import System
from compound.graph.types import format_type
from compound.image import Image
from compound.registry.code import place_of
from compound.registry.engines import find_engine
from compound.security.sanitize import redact_secrets, remember_environment

Data = dict[str, Any]
RENDERED = ("prompt", "demos", "weights")  # settings that an edge cannot feed in an exported program


def describe_program(system: System) -> Data:
    """Return a system as JSON types, for `compound.exports.runtime`.

    Raises:
        ExportError: a component has no counterpart outside of this package; the message names all of them.
    """
    inside = {id(inner) for node in system.all_nodes() for inner in _hidden_nodes(node)}
    nodes = [node for node in system.all_nodes() if id(node) not in inside]
    problems = [problem for node in nodes if (problem := problem_of(node))]
    if problems:
        prompts = any(isinstance(node.component, LLM | Agent) for node in system.all_nodes())
        raise ExportError(
            f"system {system.name!r} cannot be exported as a program: {'; '.join(dict.fromkeys(problems))}",
            hint=f"{'export its prompts with --to messages, or ' if prompts else ''}"
            "serve it with compound serve",
        )
    return _graph(system, system)


def _hidden_nodes(node: Node) -> Iterable[Node]:
    """Return the nodes of a body that belongs to a component, and not to the user."""
    return node.component.body.all_nodes() if isinstance(node.component, Agent) else ()


def problem_of(node: Node) -> str:
    """Return why a node cannot be part of an exported program, or ``""``."""
    component = node.component
    own = f"{component.kind} {component.name!r}"
    if isinstance(component, DSPyPredictor) or not isinstance(
        component, LLM | Function | Hyperparameter | Selector | FirstOf | Loop | Map
    ):
        return f"{own} runs only in this package"
    if isinstance(component, Function):
        if component.stochastic:
            return f"{own} needs a random generator"
        if place_of(component.function) is None:
            return f"{own} is not a function at the top of a module"
    if isinstance(component, LLM):
        wired = [name for name in node.wires if name in RENDERED]
        if wired:
            return f"the setting {wired[0]!r} of {own} comes from another component"
        if any(port.type is Image for port in node.inputs.values()):
            return f"{own} reads an image"
    return ""


def model_settings(component: LLM, node: Node, values: Mapping[str, object], system: System) -> Data:
    """Return the settings of a request to a model, as JSON types."""
    if values.get("weights"):
        raise ExportError(
            f"{component.name!r} uses a trained adapter, which an exported program cannot load",
            hint="serve it with compound serve, or export another configuration",
        )
    if not values.get("lm") and "lm" not in node.wires:
        raise ExportError(f"{component.name!r} has no model", hint="set lm on the system")
    sent = sent_by(system, values["lm"])
    return {"lm": sent.model, **{name: values[name] for name in ("temperature", "max_tokens")}}


@dataclass(frozen=True)
class Sent:
    """What the engine of a model sends.

    Attributes:
        model: the model as ``provider/name``, or its name in the system.
        options: sampling and reasoning options of each request.
        takes_format: whether it receives the format of answers.
        takes_tools: whether it receives declarations of tools, and not a description in the prompt.
        unsupported: fields of requests that are left out or sent otherwise.
    """

    model: object
    options: Data = field(default_factory=dict)
    takes_format: bool = True
    takes_tools: bool = True
    unsupported: frozenset[str] = frozenset()

    def with_stop(self, component: LLM) -> Data:
        """Return the options with a component's stop strings."""
        return {**({"stop": list(component.stop)} if component.stop else {}), **self.options}

    def adapt(self, document: Data) -> Data:
        """Return a request in the form in which it is sent."""
        return Unsupported(self.unsupported, "").adapt(document)


def sent_by(system: System, lm: object) -> Sent:
    """Return what the engine of a model sends; of an unknown engine, what one with all capabilities would."""
    try:
        engine = (system.engines or find_engine)(str(lm))
        unsupported = frozenset(getattr(engine, "unsupported", ()))
        takes_format = getattr(engine, "takes_format", True) and "response_format" not in unsupported
        takes_tools = bool(getattr(engine, "native_tools", False))
    except (CompoundError, ImportError, OSError):
        return Sent(lm)
    if isinstance(engine, LiteLLMEngine):
        return Sent(engine.model, engine.extra, takes_format, takes_tools, unsupported)
    name = engine.model if isinstance(engine, OpenAIEngine) else ""
    return Sent(f"openai/{name}" if name else lm, {}, takes_format, takes_tools, unsupported)


def _graph(system: System, bound: System) -> Data:
    return {
        "name": system.name,
        "inputs": {name: format_type(kind) for name, kind in system.inputs.items()},
        "nodes": [_node(node, bound) for node in system.nodes.values()],
        "outputs": {name: _source(source) for name, source in system.outputs.items()},
    }


def _node(node: Node, bound: System) -> Data:
    when = node.when
    return {
        "name": node.name,
        **_component(node, setting_values(node.component, bound), bound),
        "wires": {port: _source(source) for port, source in node.wires.items()},
        "when": None if when is None else {"source": _source(when.source), "equals": plain(when.value)},
        "optional": {
            name: plain(port.default) for name, port in (node.component.inputs or {}).items() if port.optional
        },
        "outputs": list(node.component.outputs),
    }


def _source(source: Source) -> list[str]:
    if isinstance(source, Input):
        return ["input", source.name]
    return ["node", source.node.name, source.field, *source.path]


def _component(node: Node, values: Mapping[str, object], bound: System) -> Data:
    component = node.component
    if isinstance(component, LLM):
        return {"kind": "llm", **_llm(component, node, values, bound)}
    if isinstance(component, Function):
        call, settings = place_of(component.function), {name: plain(value) for name, value in values.items()}
        return {"kind": "function", "call": call, "settings": settings, "single": component.single}
    if isinstance(component, Hyperparameter | Selector):
        setting = next(iter(component.settings))
        value = values[setting]
        if isinstance(value, Mapping):
            raise ExportError(f"selector {component.name!r} uses a learned reward, which needs this package")
        return {"kind": "value", "setting": setting, "value": plain(value)}
    if isinstance(component, FirstOf):
        return {"kind": "first_of", "ports": list(component.inputs)}
    return _composite(component, values, bound)


def _composite(component: Component, values: Mapping[str, object], bound: System) -> Data:
    if isinstance(component, Loop):
        return {
            "kind": "loop", "body": _graph(component.body, bound), "carry": dict(component.carry),
            "until": component.until, "max_turns": values["max_turns"],
        }  # fmt: skip
    assert isinstance(component, Map)  # `problem_of` rejects others
    return {"kind": "map", "body": _graph(component.body, bound), "over": component.over}


def _llm(component: LLM, node: Node, values: Mapping[str, object], bound: System) -> Data:
    shown = {name: None for name in node.wires if name not in component.settings}
    demos = as_demos(values["demos"] or ())
    head = render(str(values["prompt"] or ""), demos, shown, component.outputs, component.layout)
    blocks = head.removesuffix("\n\n")  # of the inputs, which are empty here
    answer, engine = component.answer_format, sent_by(bound, values["lm"])
    apart = "system" not in engine.unsupported
    sent = response_format(answer) if answer and engine.takes_format else None
    return {
        "system": component.system if apart else "",
        "blocks": [text for text in ("" if apart else component.system, blocks) if text],
        "cue": answer_cue(component.outputs, component.layout),
        "layout": component.layout,
        "fields": {name: describe_type(port.type) for name, port in component.outputs.items()},
        "settings": model_settings(component, node, values, bound),
        "options": engine.with_stop(component),
        "unsupported": sorted(engine.unsupported - {"system"}),
        "reasks": component.most_reasks,
        "corrected": "the corrected JSON" if answer and answer.schema else "the corrected answer",
        "response_format": sent,
        "wrapped": answer is not None and sent is not None and is_wrapped(answer),
    }


def describe_type(kind: object) -> Data:
    """Return the type of an answer for `compound.exports.runtime.parse_value`.

    >>> from typing import Literal
    >>> describe_type(list[int]), describe_type(Literal["yes", "no"])
    ({'type': 'list', 'item': {'type': 'int'}}, {'type': 'labels', 'options': ['yes', 'no']})
    """
    kind = without_annotation(kind)
    if kind is Any or kind is str:
        return {"type": "any" if kind is Any else "str"}
    if labels := labels_of(kind):
        return {"type": "labels", "options": list(labels), **_member_names(kind)}
    if kind in (int, float, bool):
        return {"type": format_type(kind)}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        options = tuple(argument for argument in arguments if argument is not type(None))
        if len(options) < len(arguments):
            return {"type": "optional", "item": describe_type(Union[options])}  # noqa: UP007
        if is_plain(kind) or takes_any_text(kind):
            return {"type": "union", "items": [describe_type(option) for option in options]}
    if (origin is list or kind is list) and is_plain(kind):
        return {"type": "list", "item": describe_type((arguments or (Any,))[0])}
    return {"type": "json", "forms": sorted(json_forms(kind))}


def _member_names(kind: object) -> Data:
    """Return the names of an Enum's members whose values are no texts: an answer may name them."""
    members = kind if isinstance(kind, type) and issubclass(kind, enum.Enum) else ()
    names = {member.name: member.value for member in members if not isinstance(member.value, str)}
    return {"names": names} if names else {}


def plain(value: object) -> Any:  # noqa: ANN401 - JSON types
    """Return a value as JSON types without keys of the environment.

    Raises:
        ExportError: it has no JSON form.
    """
    found = to_readable_json(value)
    if isinstance(found, float) and not math.isfinite(found):
        raise ExportError(f"{value!r} cannot be exported: it is not a finite number")
    return found


def without_secrets(value: Any) -> Any:  # noqa: ANN401 - JSON types
    """Return a value with the registered keys, and those in the environment, removed from its texts."""
    remember_environment()
    return _redacted(value)


def _redacted(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        return redact_secrets(value)
    if isinstance(value, Mapping):
        return {_redacted(key): _redacted(item) for key, item in value.items()}
    return [_redacted(item) for item in value] if isinstance(value, list | tuple) else value
