"""One turn of an agent: the model calls tools, or gives its final answer.

A demonstration of an agent is the record of the turn that answered: its ``inputs`` are those of the
turn (the task and the earlier turns), its ``outputs`` those of `AgentTurn`. It is shown as the
conversation that it ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from compound.components.answers.type_notes import answer_note
from compound.components.fields import describe_images, format_inputs, parse, take_images
from compound.components.llm import LLM, ask, noting_truncation
from compound.components.tools.tool import Tool
from compound.core.engine import Completion, Message, Request, ToolCall, ToolSpec
from compound.core.errors import DeclarationError, ParseError
from compound.core.image import Image
from compound.core.narrowing import entry
from compound.core.security.sanitize import sanitize_text
from compound.execution.answer_text import read_calls, unknown_call
from compound.graph.component import CallContext, Operation
from compound.graph.configuration import digest
from compound.graph.space import Demo, Text, as_demos
from compound.graph.types import Port, as_declared, union

TASK, HISTORY, LAST = "task", "history", "last_turn"
MESSAGE, TOOL_CALLS = "message", "tool_calls"
AGENT_FORMAT = 1  # version of the messages; increment it when the same settings give other messages
LAST_TURN = "You cannot call further tools. Give the final answer now."
RESERVED = (MESSAGE, TOOL_CALLS)
Record = dict[str, str]
"""A tool call: its ``id``, the ``name`` that was called, the ``arguments`` as JSON text, and the name of the
``tool``, or the names that are ``known`` if there is none."""
CUT = "\n[cut]"
_FIRST = re.compile(r"\s*[*`]*(?P<name>[A-Za-z0-9_-]{1,64})[*`]*\s*:\s*(?P<text>.*)$")
_ARGUMENT = re.compile(r"\s*[-*]\s*[*`]*(?P<name>[\w-]+)[*`]*\s*:\s*(?P<text>.*)$")


def recorded_message(record: Mapping[str, Any]) -> Message:
    """Return a message of an earlier turn."""
    if record["role"] == "tool":
        return Message("tool", record["text"], tool_call_id=record["id"])
    return _spoken(record["text"], record["calls"])


def shown_task(demo: Demo) -> dict[str, Any]:
    """Return the inputs of the agent that a demonstration is about."""
    task: Any = demo["inputs"][TASK]
    return dict(task)


def shown_turns(demo: Demo) -> list[Message]:
    """Return the messages of a demonstration after its task.

    >>> calls = [{"id": "call_1", "name": "add", "arguments": "{}"}]
    >>> history = [
    ...     {"role": "assistant", "text": "", "calls": calls},
    ...     {"role": "tool", "id": "call_1", "text": "4"},
    ... ]
    >>> inputs = {"task": {"question": "2 + 2?"}, "history": history, "last_turn": False}
    >>> turns = shown_turns({"inputs": inputs, "outputs": {"message": "4", "tool_calls": []}})
    >>> [(message.role, message.text) for message in turns]
    [('assistant', ''), ('tool', '4'), ('assistant', '4')]
    """
    history: Any = demo["inputs"][HISTORY]
    text: Any = demo["outputs"][MESSAGE]
    calls: Any = demo["outputs"][TOOL_CALLS]
    return [*map(recorded_message, history), _spoken(text, calls)]


def problem_of(demos: Sequence[Demo]) -> str:
    """Return what is wrong with demonstrations that were given to an agent, or ``""``."""
    for demo in demos:
        for part, names in (("inputs", (TASK, HISTORY)), ("outputs", (MESSAGE, TOOL_CALLS))):
            missing = [name for name in names if name not in demo.get(part, {})]
            if missing:
                return f"the {part} of a demonstration have no {missing[0]!r}"
        try:
            shown_task(demo), shown_turns(demo)
        except (KeyError, TypeError, ValueError) as error:
            return f"a demonstration is not the record of a turn: {error!r}"
    return ""


def _spoken(text: str, calls: Sequence[Mapping[str, str]]) -> Message:
    return Message(
        "assistant",
        text,
        tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in calls),
    )


@dataclass(frozen=True, eq=False, repr=False)
class AgentTurn(Operation):
    """The model's part of a turn.

    Its inputs are the task, the earlier turns, and whether it is the last one. Its outputs are the
    text that the model wrote, the tools that it calls, and, if it calls none, the fields of the
    final answer.
    """

    name: str
    model: LLM
    tools: Sequence[Tool]
    texts: Mapping[str, str | Text] = field(default_factory=dict)
    takes: Mapping[str, object] = field(default_factory=dict)
    max_calls: int = 4

    kind = "agent_turn"
    cacheable = True
    inputs: ClassVar[Mapping[str, Port]] = {
        TASK: Port(dict[str, Any]),
        HISTORY: Port(list[dict[str, Any]]),
        LAST: Port(bool),
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", self.model.timeout)
        object.__setattr__(self, "retries", self.model.retries)

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        answer = {name: Port(union(port.type, None)) for name, port in self.model.outputs.items()}
        return {MESSAGE: Port(str), TOOL_CALLS: Port(list[Record]), **answer}

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        model = dict(self.model.settings)
        if not model["demos"]:
            del model["demos"]
        return {**model, **self.texts}

    def is_demonstration(self, outputs: Mapping[str, object]) -> bool:
        """Only the turn that answers: it shows the turns before it, too."""
        return not outputs[TOOL_CALLS]

    @cached_property
    def version(self) -> str:  # noqa: D102
        tools = [[tool.name, tool.description, tool.schema] for tool in self.tools]
        return f"agent_turn:{digest([AGENT_FORMAT, self.model.version, tools, self.max_calls])}"

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return not values["temperature"]

    def output_sizes(self, sizes: Mapping[str, float]) -> Mapping[str, float]:  # noqa: D102
        return {TOOL_CALLS: float(self.max_calls)}

    def declared(self, values: Mapping[str, object]) -> dict[str, tuple[ToolSpec, Tool]]:
        """Return the tools with the texts in ``values``, by the names that the model is told."""
        texts = {
            tool.name: entry(values, setting_name(tool), str)
            for tool in self.tools
            if setting_name(tool) in self.texts
        }
        return declarations(self.tools, texts)

    def messages(
        self, inputs: Mapping[str, object], values: Mapping[str, object]
    ) -> tuple[Message, ...]:
        """Return the messages of a request."""
        shown, images = take_images(self._task(inputs))
        prompt = entry(values, "prompt", str) if values["prompt"] else ""
        blocks = [prompt.strip(), answer_note(self.model.outputs, self.model.layout)]
        demos = as_demos(values.get("demos") or ())
        tasks = [
            *(format_inputs(describe_images(shown_task(demo))) for demo in demos),
            format_inputs(shown),
        ]
        *shots, text = ["\n\n".join(filter(None, [*blocks, tasks[0]])), *tasks[1:]]
        head = [Message("system", self.model.system)] if self.model.system else []
        for shot, demo in zip(shots, demos, strict=True):
            head += [Message("user", shot), *shown_turns(demo)]
        history = [recorded_message(record) for record in entry(inputs, HISTORY, list)]
        last = [Message("user", LAST_TURN)] if history and inputs[LAST] else []
        return (*head, Message("user", (text, *images) if images else text), *history, *last)

    def request(self, inputs: Mapping[str, object], values: Mapping[str, object]) -> Request:
        """Return the first request for inputs and values; its seed is 0."""
        return replace(
            self.model.build_request(self.messages(inputs, values), values),
            cue="",
            tools=tuple(spec for spec, _ in self.declared(values).values()),
            tool_choice="none" if inputs[LAST] else "auto",
        )

    def _task(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """Return the fields of the task; images of a stored trace are in their JSON form."""
        task = entry(inputs, TASK, dict)
        return {
            name: as_declared(self.takes.get(name, Image if _is_image(value) else Any), value)
            for name, value in task.items()
        }

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        if not values["lm"]:
            raise DeclarationError(
                f"agent component {self.name!r} has no model",
                hint="set lm, for example lm='smollm2', on the agent or on the system",
            )
        declared, last = self.declared(values), bool(inputs[LAST])
        request, lm = self.request(inputs, values), entry(values, "lm", str)

        def read(completion: Completion) -> Mapping[str, object]:
            with noting_truncation(completion, request.max_tokens):
                calls = self._calls(completion, declared)
                if calls and not last:
                    records = self._records(calls, declared, entry(inputs, HISTORY, list))
                    answer = dict.fromkeys(self.model.outputs)
                    return {MESSAGE: completion.text, TOOL_CALLS: records, **answer}
                found = self._answer(completion, () if completion.tool_calls else calls)
                return {MESSAGE: completion.text, TOOL_CALLS: [], **found}

        return await ask(call, lm, request, read, self.most_reasks)

    @property
    def most_reasks(self) -> int:
        """Maximum number of re-asks; an answer of any type may be a tool call that cannot be read."""
        if self.model.reasks is None and self.model.weights is None:
            return 1
        return self.model.most_reasks

    def _calls(self, completion: Completion, declared: Mapping[str, object]) -> Sequence[ToolCall]:
        """Return the tool calls of an answer, also those in its text.

        Raises:
            ParseError: the text starts like a call, but cannot be read as one.
        """
        if completion.tool_calls:
            return completion.tool_calls
        found = read_calls(completion.text, declared)
        if not found and (other := unknown_call(completion.text)):
            try:
                answer = self._answer(completion)
            except ParseError:
                answer = {}
            found = () if any(not isinstance(value, str) for value in answer.values()) else (other,)
        return [ToolCall(f"call_{i}", *one) for i, one in enumerate(found, 1)]

    def _answer(self, completion: Completion, calls: Sequence[ToolCall] = ()) -> dict[str, object]:
        """Return the fields of the final answer; ``calls`` are those in its text."""
        if calls:
            raise ParseError(
                f"the last turn called the tool {calls[0].name!r} instead of answering; raise max_turns"
            )
        is_cut = completion.finish_reason == "length"
        return parse(completion.text, self.model.outputs, self.model.layout, is_cut=is_cut)

    def _records(
        self,
        calls: Sequence[ToolCall],
        declared: Mapping[str, tuple[ToolSpec, Tool]],
        history: Sequence[Mapping[str, Any]],
    ) -> list[Record]:
        """Return the tool calls of an answer, with identifiers that no earlier turn has."""
        used = {call["id"] for record in history for call in record.get("calls", ())}
        records: list[Record] = []
        for call in calls[: self.max_calls]:
            known = call.id if call.id not in used else f"call_{len(used) + 1}"
            used.add(known)
            record = {"id": known, "name": call.name, "arguments": call.arguments}
            if call.name in declared:
                record["tool"] = declared[call.name][1].name
            else:
                record["known"] = ", ".join(declared)
            records.append(record)
        return records


def _is_image(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {"media_type", "data"}


@dataclass(frozen=True, eq=False, repr=False)
class ToolRunner(Operation):
    """Executes one call of a tool, and returns its result or an error as text."""

    name: str
    tools: Sequence[Tool]
    max_characters: int
    retries: int = 2

    kind = "tool"
    cacheable = True
    inputs: ClassVar[Mapping[str, Port]] = {"call": Port(Record)}
    outputs: ClassVar[Mapping[str, Port]] = {"result": Port(str)}

    @property
    def version(self) -> str:  # noqa: D102
        # texts may be tuned, and have no influence on results
        versions = {tool.name: [tool.schema, tool.source.version] for tool in self.tools}
        return f"tool:{digest([versions, self.max_characters])}"

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return all(tool.source.reproducible for tool in self.tools)

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        record = entry(inputs, "call", dict)
        tool = next((tool for tool in self.tools if tool.name == record.get("tool")), None)
        if tool is None:
            return {
                "result": f"error: there is no tool {record.get('name')!r}; tools: {record.get('known')}"
            }
        # servers may echo keys, and the text is recorded and sent to a model
        text = sanitize_text(await tool.answer(str(record.get("arguments", "")), call.sessions))
        cut = len(text) > self.max_characters
        return {"result": text[: self.max_characters] + CUT if cut else text}


def setting_name(tool: Tool) -> str:
    """Return the name of the setting with a tool's text.

    >>> from compound.components.tools.tool import tool
    >>> @tool(name="web-search")
    ... def search(query: str) -> str:
    ...     return query
    >>> setting_name(search)
    'tool_web_search'
    """
    return "tool_" + tool.name.replace("-", "_")


def tool_text(tool: Tool) -> str:
    """Return the text that declares a tool to a model: one, so that it can be rewritten as a whole.

    It has the name and the description, then a line for each argument with a description::

        search: Search Wikipedia.
        - query: what to search for
    """
    lines = [f"{tool.name}: {' '.join(tool.description.split())}".rstrip()]
    for name, schema in tool.parameters.get("properties", {}).items():
        description = schema.get("description") if isinstance(schema, Mapping) else None
        if description:
            lines.append(f"- {name}: {' '.join(str(description).split())}")
    return "\n".join(lines)


def tool_spec(tool: Tool, text: str) -> ToolSpec:
    """Return the declaration of a tool with the texts of a rewritten one.

    Whatever the text is, the tool can be called: a line that is neither a name nor an argument
    belongs to the description, one about an argument that the tool does not have is ignored, a name
    that providers would reject is not used, and the schema keeps its types.
    """
    lines = text.strip().splitlines() or [""]
    first = _FIRST.match(lines[0])
    name = first["name"] if first else tool.name
    description = [first["text"] if first else lines[0]]
    properties = tool.parameters.get("properties", {})
    arguments: dict[str, list[str]] = {}
    current = description
    for line in lines[1:]:
        found = _ARGUMENT.match(line)
        if found and found["name"] in properties:
            current = arguments[found["name"]] = [found["text"]]
        elif found and current is not description:
            current = []  # an argument that the tool does not have, with the lines that continue it
        else:
            current.append(line.strip())
    described = {key: " ".join(filter(None, parts)) for key, parts in arguments.items()}
    schema = {
        **tool.parameters,
        "properties": {
            key: _described(part, described.get(key, "")) for key, part in properties.items()
        },
    }
    return ToolSpec(name, "\n".join(description).strip(), json.dumps(schema))


def _described(schema: Any, description: str) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(schema, Mapping):
        return schema
    rest = {key: value for key, value in schema.items() if key != "description"}
    return {**rest, "description": description} if description else rest


def declarations(
    tools: Sequence[Tool], texts: Mapping[str, str]
) -> dict[str, tuple[ToolSpec, Tool]]:
    """Return the declaration of each tool by the name that the model is told.

    Args:
        tools: the tools.
        texts: rewritten texts by the name of the tool; others keep their own.

    Two tools that a rewriting gave one name keep their own names.
    """
    specs = [
        tool_spec(tool, texts[tool.name]) if tool.name in texts else tool.spec for tool in tools
    ]
    names = [spec.name for spec in specs]
    own = {tool.name for tool in tools}
    found: dict[str, tuple[ToolSpec, Tool]] = {}
    for spec, tool in zip(specs, tools, strict=True):
        taken = names.count(spec.name) > 1 or (spec.name != tool.name and spec.name in own)
        shown = ToolSpec(tool.name, spec.description, spec.parameters) if taken else spec
        found[shown.name] = (shown, tool)
    return found
