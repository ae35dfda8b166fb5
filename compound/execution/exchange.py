"""Messages of model calls, as recorded in traces and caches.

Long texts are truncated to keep traces readable, and known keys are removed.
``COMPOUND_RECORD_MESSAGES`` limits the recording: with ``memory``, messages are in the traces that
functions return, but not in files; with ``0`` or ``false``, they are recorded nowhere. The inputs
and outputs of components are always recorded.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from compound.core.engine import Completion, Message, Request, ToolCall
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


ExchangeDocument = dict[str, Any]
"""An exchange, or a part of one, as JSON types."""
OPTIONAL = ("tool_calls", "tool_call_id", "tools")  # left out if they are empty


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
        messages = [_document(message, content=message.text) for message in self.messages]
        return _document(self, messages=messages)

    @staticmethod
    def from_json(data: ExchangeDocument) -> Exchange:
        """Parse the output of `to_json`."""
        messages = (Message(**{**m, "tool_calls": _calls(m)}) for m in data["messages"])
        tools = tuple(data.get("tools", ()))
        return Exchange(
            **{**data, "messages": tuple(messages), "tool_calls": _calls(data), "tools": tools}
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


def _document(value: Exchange | Message, **changed: object) -> ExchangeDocument:
    """Return the fields of an exchange or a message as JSON types."""
    found = {field.name: getattr(value, field.name) for field in fields(value)} | changed
    found["tool_calls"] = [asdict(call) for call in value.tool_calls]
    if "tools" in found:
        found["tools"] = list(found["tools"])
    return {name: item for name, item in found.items() if item or name not in OPTIONAL}


def _calls(data: ExchangeDocument) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(**call) for call in data.get("tool_calls", ()))
