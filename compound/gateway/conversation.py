"""Messages, tools and images of an agent's request, for engines that do not forward requests as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from pydantic import ValidationError

from compound.engine import Message, Role, ToolCall, ToolChoice, ToolSpec
from compound.gateway.documents import ROLES, is_text
from compound.gateway.exchange import Document, Route
from compound.gateway.validation import malformed, unsupported
from compound.image import Image


def read_messages(route: Route, document: Document, lm: str) -> tuple[Message, ...]:
    """Return the messages of a request: texts, images, tool calls and their results.

    Raises:
        CallError: the request has other content.
    """
    if document.get("previous_response_id") or document.get("conversation"):
        raise unsupported(lm, "a reference to an earlier response, which is not stored")
    messages: list[Message] = []
    instructions = document.get("instructions")
    if isinstance(instructions, str) and instructions:
        messages.append(Message("system", instructions))
    given = document.get("messages" if route == "chat/completions" else "input")
    if isinstance(given, str):
        return (*messages, Message("user", given))
    if not isinstance(given, list) or not given:
        raise malformed("the request has no messages")
    for item in given:
        message = _message(item, lm)
        earlier = messages[-1] if messages else None
        if item.get("type") == "function_call" and earlier is not None and earlier.role == "assistant":
            messages[-1] = replace(earlier, tool_calls=(*earlier.tool_calls, *message.tool_calls))
        else:
            messages.append(message)
    return tuple(messages)


def read_tools(document: Document, lm: str) -> tuple[tuple[ToolSpec, ...], ToolChoice]:
    """Return the functions that a request declares, and whether the model may call them.

    Raises:
        CallError: the request has tools of a provider, or demands a call.

    >>> read_tools({"tools": [{"type": "function", "name": "now"}], "tool_choice": "none"}, "lm")
    ((ToolSpec(name='now', description='', parameters='{"type": "object", "properties": {}}'),), 'none')
    """
    if document.get("functions"):
        raise unsupported(lm, "functions, which tools have replaced")
    tools = _list(document, "tools")
    choice = document.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):  # a demanded function is an object
        raise unsupported(lm, f"the tool_choice {json.dumps(choice):.80}; possible are auto and none")
    return tuple(_tool(tool, lm) for tool in tools), "none" if choice == "none" else "auto"


def _list(document: Document, name: str) -> list[object]:
    """Return a list of a request; empty if it is absent."""
    found = document.get(name) or []
    if not isinstance(found, list):
        raise malformed(f"{name} of the request is not a list")
    return found


def _tool(tool: object, lm: str) -> ToolSpec:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind != "function":
        raise unsupported(lm, f"a tool of kind {kind!r}")
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise malformed("a tool of the request has no name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise malformed(f"the parameters of the tool {name!r:.100} are not a JSON schema")
    return ToolSpec(name, str(function.get("description") or ""), json.dumps(parameters))


def _message(item: object, lm: str) -> Message:
    if not isinstance(item, dict):
        raise unsupported(lm, f"a message of kind {type(item).__name__!r}")
    if item.get("type") == "function_call":
        return Message("assistant", "", (_call(item.get("call_id"), item),))
    if item.get("type") == "function_call_output":
        return Message("tool", _plain(item.get("output"), lm), tool_call_id=str(item.get("call_id", "")))
    role = str(item.get("role"))
    if role == "tool":
        return Message(
            "tool", _plain(item.get("content"), lm), tool_call_id=str(item.get("tool_call_id", ""))
        )
    if role not in ROLES:
        raise unsupported(lm, f"a message of kind {item.get('type') or item.get('role')!r}")
    calls = [
        _call(call.get("id"), call.get("function"))
        for call in _list(item, "tool_calls")
        if isinstance(call, dict)
    ]
    if item.get("content") is None and calls:
        return Message("assistant", "", tuple(calls))
    return Message(ROLES[role], _content(item.get("content"), ROLES[role], lm), tuple(calls))


def _call(known: object, function: object) -> ToolCall:
    found: Mapping[str, object] = function if isinstance(function, dict) else {}
    return ToolCall(str(known), str(found.get("name")), str(found.get("arguments", "{}")))


def _plain(content: object, lm: str) -> str:
    found = _content(content, "tool", lm)
    if not isinstance(found, str):
        raise unsupported(lm, "an image as the result of a tool")
    return found


def _content(content: object, role: Role, lm: str) -> str | tuple[str | Image, ...]:
    """Return the content of a message: a text, or texts and images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise unsupported(lm, f"a message of the {role} without text")
    parts = [_part(part, lm) for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else tuple(parts)


def _part(part: object, lm: str) -> str | Image:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and is_text(part):
        return str(part.get("text", ""))
    if not isinstance(part, dict) or kind not in ("image_url", "input_image"):
        raise unsupported(lm, f"content of kind {kind!r}")
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str) or not url.startswith("data:"):
        raise unsupported(lm, "an image that is not a data URL")
    try:
        return Image.model_validate(url)
    except ValidationError as error:
        raise malformed(f"an image of the request cannot be read: {error.errors()[0]['msg']}") from None
