"""One turn of an agent: the model calls tools, or gives its final answer.

A demonstration of an agent is the record of the turn that answered: its ``inputs`` are those of the
turn (the task and the earlier turns), its ``outputs`` those of `AgentTurn`. It is shown as the
conversation that it ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from compound.components.agents.tool_texts import declarations, setting_name
from compound.components.answers.asking import ask, noting_truncation
from compound.components.answers.type_notes import answer_note
from compound.components.fields import describe_images, format_inputs, parse, take_images
from compound.components.llm import LLM
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", self.model.timeout)
        object.__setattr__(self, "retries", self.model.retries)

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {TASK: Port(dict[str, Any]), HISTORY: Port(list[dict[str, Any]]), LAST: Port(bool)}

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

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"call": Port(Record)}

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"result": Port(str)}

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
