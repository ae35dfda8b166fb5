"""Tools in chat templates: messages for them, and the calls in an answer.

Supported are models that write a call as JSON between ``<tool_call>`` and ``</tool_call>``, the form of
Hermes, Qwen and SmolLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from compound.components.engines.chat_format import MAX_CALLS
from compound.engine import Message, ToolCall

START, END = "<tool_call>", "</tool_call>"
_TOOLS = re.compile(r"\btools\b")


def has_tools(template: str) -> bool:
    """Return whether a chat template declares tools, and asks for calls in the supported form.

    >>> has_tools("{% if tools %}Reply with <tool_call>…</tool_call>{% endif %}"), has_tools("{{ messages }}")
    (True, False)
    """
    return START in template and _TOOLS.search(template) is not None


def turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates take; arguments of calls are values, not JSON text."""
    found: list[dict[str, Any]] = []
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.tool_calls:
            turn["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
                for call in message.tool_calls
            ]
        if message.role == "tool":
            turn["name"] = names.get(message.tool_call_id, "")
        found.append(turn)
    return found


def write_calls(text: str, calls: Sequence[ToolCall]) -> str:
    """Return an answer with its calls, as `read_calls` reads it.

    >>> write_calls("Let me see.", [ToolCall("call_1", "add", '{"a": 1}')])
    'Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    """
    found = ({"name": call.name, "arguments": _arguments(call.arguments)} for call in calls)
    return text + "".join(f"{START}{json.dumps(call, ensure_ascii=False)}{END}" for call in found)


def read_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text of an answer without its calls, and the calls; one that is no JSON remains text.

    >>> read_calls('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', (ToolCall(id='call_1', name='add', arguments='{"a": 1}'),))
    """
    calls: list[ToolCall] = []
    rest, at = "", 0
    # a regular expression would take cubic time for an answer that does not end a call
    while (start := text.find(START, at)) >= 0 and (end := text.find(END, start)) >= 0:
        inside, after = text[start + len(START) : end].strip(), end + len(END)
        call = _call(inside, len(calls) + 1) if len(calls) < MAX_CALLS else None
        if call is None:
            rest += text[at:after]
        else:
            rest += text[at:start]
            calls.append(call)
        at = after
    rest += text[at:]
    return (rest.strip() if calls else text), tuple(calls)


def _call(text: str, number: int) -> ToolCall | None:
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{number}", found["name"], text)


def _arguments(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
