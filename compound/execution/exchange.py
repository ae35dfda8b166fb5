"""Messages of model calls, as recorded in traces and caches.

Long texts are truncated to keep traces readable, and known keys are removed.
``COMPOUND_RECORD_MESSAGES`` limits the recording: with ``memory``, messages are in the traces that
functions return, but not in files; with ``0`` or ``false``, they are recorded nowhere. The inputs
and outputs of components are always recorded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

from compound.core.engine import Completion, Message, Request, Role, ToolCall
from compound.core.errors import DeclarationError
from compound.core.security.sanitize import redact_secrets

MAX_CHARACTERS = 20_000  # maximum characters per text
SWITCH = "COMPOUND_RECORD_MESSAGES"
Recording = Literal["files", "memory", "nowhere"]
_RECORDINGS: dict[str, Recording] = {
    **dict.fromkeys(("", "1", "true", "yes", "on"), "files"),
    "memory": "memory",
    **dict.fromkeys(("0", "false", "no", "off"), "nowhere"),
}


class ToolCallDocument(TypedDict):
    """A `ToolCall` as JSON types."""

    id: str
    name: str
    arguments: str


class MessageDocument(TypedDict):
    """A message as JSON types; a text message has a role and a content only."""

    role: Role
    content: str
    tool_calls: NotRequired[list[ToolCallDocument]]
    tool_call_id: NotRequired[str]


class ExchangeDocument(TypedDict):
    """An `Exchange` as JSON types."""

    model: str
    messages: list[MessageDocument]
    completion: str
    finish_reason: str
    tool_calls: NotRequired[list[ToolCallDocument]]
    tools: NotRequired[list[str]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request to a model, and its answer.

    Attributes:
        model: name of the model in the configuration.
        messages: messages as sent, with descriptions of images instead of their data; a requested
            start of the answer ends the last message.
        completion: the raw answer, before parsing.
        finish_reason: ``stop``, ``tool_calls``, or ``length`` if the answer was cut at
            ``max_tokens``.
        tool_calls: tools that the answer calls.
        tools: names of the tools that were declared to the model.
    """

    model: str
    messages: tuple[Message, ...]
    completion: str
    finish_reason: str
    tool_calls: tuple[ToolCall, ...] = ()
    tools: tuple[str, ...] = ()

    def to_json(self) -> ExchangeDocument:
        """Return the exchange as JSON types."""
        found: ExchangeDocument = {
            "model": self.model,
            "messages": [_message_to_json(message) for message in self.messages],
            "completion": self.completion,
            "finish_reason": self.finish_reason,
        }
        if self.tool_calls:
            found["tool_calls"] = [_call_to_json(call) for call in self.tool_calls]
        if self.tools:
            found["tools"] = list(self.tools)
        return found

    @staticmethod
    def from_json(data: ExchangeDocument) -> Exchange:
        """Parse the output of `to_json`."""
        return Exchange(
            data["model"],
            tuple(map(_message_from_json, data["messages"])),
            data["completion"],
            data["finish_reason"],
            tuple(ToolCall(**call) for call in data.get("tool_calls", ())),
            tuple(data.get("tools", ())),
        )

    def __str__(self) -> str:
        sent = "\n".join(
            "\n".join([f"[{message.role}]", *_lines(message.text, message.tool_calls)])
            for message in self.messages
        )
        answer = "\n".join(_lines(self.completion, self.tool_calls))
        return f"{sent}\n[{self.model}: {self.finish_reason}]\n{answer}"


def recording() -> Recording:
    """Return where messages are recorded; with ``files``, they are in memory, too.

    Raises:
        DeclarationError: the variable has another value, which may have been meant to disable the
            recording.
    """
    value = os.environ.get(SWITCH, "")
    found = _RECORDINGS.get(value.strip().lower())
    if found is None:
        raise DeclarationError(f"{SWITCH}={value} is not supported", hint="possible: 1, memory, 0")
    return found


def record_exchange(model: str, request: Request, completion: Completion) -> tuple[Exchange, ...]:
    """Return the exchange to record; empty if recording is disabled."""
    if recording() == "nowhere":
        return ()
    messages = tuple(
        Message(m.role, truncate_text(m.text), _recorded(m.tool_calls), m.tool_call_id)
        for m in request.cued
    )
    tools = tuple(tool.name for tool in request.tools)
    answer = truncate_text(completion.text)
    calls = _recorded(completion.tool_calls)
    return (Exchange(model, messages, answer, completion.finish_reason, calls, tools),)


def is_stored() -> bool:
    """Return whether messages may be written to files."""
    return recording() == "files"


def truncate_text(text: str) -> str:
    """Return an encodable text without known keys, with the middle omitted if it is too long."""
    whole = redact_secrets(text.encode(errors="replace").decode())
    if len(whole) <= MAX_CHARACTERS:
        return whole
    half = MAX_CHARACTERS // 2
    return f"{whole[:half]}\n… {len(whole) - 2 * half} characters omitted …\n{whole[-half:]}"


def _recorded(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(truncate_text(call.id), truncate_text(call.name), truncate_text(call.arguments))
        for call in calls
    )


def _lines(text: str, calls: tuple[ToolCall, ...]) -> list[str]:
    """Return a text and tool calls as lines."""
    return [
        *([text] if text or not calls else []),
        *(f"{call.name}({call.arguments})" for call in calls),
    ]


def _call_to_json(call: ToolCall) -> ToolCallDocument:
    return {"id": call.id, "name": call.name, "arguments": call.arguments}


def _message_to_json(message: Message) -> MessageDocument:
    found: MessageDocument = {"role": message.role, "content": message.text}
    if message.tool_calls:
        found["tool_calls"] = [_call_to_json(call) for call in message.tool_calls]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _message_from_json(data: MessageDocument) -> Message:
    calls = tuple(ToolCall(**call) for call in data.get("tool_calls", ()))
    return Message(data["role"], data["content"], calls, data.get("tool_call_id", ""))
