"""Messages, tools and tool calls in the JSON of OpenAI's chat API, which most providers and servers take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from compound.engine import FinishReason, Message, ToolCall, ToolSpec

MAX_CALLS = 64  # tool calls of an answer that are read


def messages_to_json(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as JSON.

    >>> from compound.engine import ToolCall
    >>> calls = (ToolCall("call_1", "add", '{"a": 1}'),)
    >>> messages_to_json([Message("user", "Hi"), Message("assistant", "", calls)])[1]["tool_calls"][0]["id"]
    'call_1'
    """
    return [_message_to_json(message) for message in messages]


def _message_to_json(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
    return found


def _content(message: Message) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.data_url}}
        for part in message.content
    ]


def tools_to_json(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the declarations of tools as JSON.

    >>> tools_to_json([ToolSpec("now", "Return the time.", '{"type": "object", "properties": {}}')])
    [{'type': 'function', 'function': {'name': 'now', 'description': 'Return the time.', \
'parameters': {'type': 'object', 'properties': {}}}}]
    """
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters),
            },
        }
        for tool in tools
    ]


def calls_from_json(found: object) -> tuple[ToolCall, ...]:
    """Return the tool calls of an answer; entries that are no call of a function are left out.

    Args:
        found: a list of objects with ``id`` and ``function``, as mappings or with attributes.
    """
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        return ()
    calls = []
    for number, entry in enumerate(found[:MAX_CALLS], 1):
        function = _field(entry, "function")
        name, arguments = _field(function, "name"), _field(function, "arguments")
        if isinstance(name, str) and name:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
            given = _field(entry, "id")
            known = given if isinstance(given, str) and given else f"call_{number}"
            calls.append(ToolCall(known, name, text))
    return tuple(calls)


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def finish_reason(reason: object, calls: Sequence[ToolCall]) -> FinishReason:
    """Return why an answer ended."""
    if reason == "length":
        return "length"
    return "tool_calls" if calls else "stop"
