"""Requests of agents: their bodies, converted from and to the requests and completions of engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from compound.core.engine import AnswerFormat, Completion, Message, Role
from compound.core.errors import CallError
from compound.execution.tool_text import is_call

Route = Literal["chat/completions", "responses"]
Document = dict[str, object]


@dataclass(slots=True)
class GatewayExchange:
    """A request of an agent in progress.

    Attributes:
        route: the route that the agent called.
        document: the body, without the fields of streams.
        number: number of the request within the run, starting at 0.
        stream: whether the agent asked for a stream.
        include_usage: whether a stream of a chat must end with the usage.
        pieces: the pieces of a stream as they arrive; ``None`` ends it.
        raw: whether the pieces are server-sent events of the upstream; else they are text.
        kind: kind of the failure, if the request failed.
        message: message of the failure.
        begun: whether a piece was sent, so that another attempt would repeat it.
    """

    route: Route
    document: Document
    number: int
    stream: bool = False
    include_usage: bool = False
    pieces: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    raw: bool = False
    kind: str = ""
    message: str = ""
    begun: bool = False

    def put(self, piece: str) -> None:
        """Add a piece."""
        self.begun = True
        self.pieces.put_nowait(piece)


CURRENT: ContextVar[GatewayExchange | None] = ContextVar("gateway_exchange", default=None)
"""The exchange that the running task answers; a call outside of a gateway has none."""


ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass
class TextSlot:
    """A text in a request that a prompt may match and replace."""

    role: str
    text: str
    holder: Document
    name: str

    def replace(self, text: str) -> None:
        """Replace the text in the body."""
        self.holder[self.name] = text


def text_slots(route: Route, document: Document) -> Iterator[TextSlot]:
    """Yield the texts of the system, developer and user messages of a request, in order.

    >>> body = {"messages": [{"role": "developer", "content": "Be brief."}]}
    >>> [(slot.role, slot.text) for slot in text_slots("chat/completions", body)]
    [('system', 'Be brief.')]
    """
    if route == "responses" and isinstance(document.get("instructions"), str):
        yield TextSlot("system", cast("str", document["instructions"]), document, "instructions")
    name = "messages" if route == "chat/completions" else "input"
    messages = document.get(name)
    if isinstance(messages, str):
        yield TextSlot("user", messages, document, name)
        return
    for message in messages if isinstance(messages, list) else []:
        role = ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
        if role in {"system", "user"}:
            slot = _slot(role, message)
            if slot is not None:
                yield slot


def _slot(role: str, message: Document) -> TextSlot | None:
    """Return the text of a message; the only text among its parts, if it has parts."""
    content = message.get("content")
    if isinstance(content, str):
        return TextSlot(role, content, message, "content")
    parts = [part for part in content or [] if is_text(part)] if isinstance(content, list) else []
    if len(parts) != 1:
        return None
    return TextSlot(role, str(parts[0].get("text", "")), parts[0], "text")


def is_text(part: object) -> bool:
    """Return whether a part of a message's content is a text."""
    return isinstance(part, dict) and part.get("type") in TEXT_PARTS


def readable_messages(route: Route, document: Document) -> tuple[Message, ...]:
    """Return the messages of a request for the record of a call; content other than text becomes JSON."""
    given = document.get("messages" if route == "chat/completions" else "input")
    items: list[object] = given if isinstance(given, list) else [{"role": "user", "content": given}]
    if document.get("instructions"):
        items = [{"role": "system", "content": document["instructions"]}, *items]
    found = []
    for item in items:
        content = item.get("content") if isinstance(item, dict) else None
        is_plain = isinstance(content, str) and len(cast("Document", item)) == 2
        text = str(content) if is_plain else json.dumps(item)
        role = str(item.get("role")) if isinstance(item, dict) else "user"
        found.append(Message(ROLES.get(role, "user"), text))
    return tuple(found)


def format_kind(route: Route, document: Document) -> object:
    """Return the kind of answer that a request demands: ``text`` unless it names another."""
    found = demanded_format(route, document)
    return "text" if found is None else found.get("type")


def demanded_format(route: Route, document: Document) -> Document | None:
    """Return the format of the answer that a request demands, if any.

    Raises:
        CallError: it is not an object.
    """
    text = document.get("text")
    inside = text.get("format") if isinstance(text, dict) else None
    found = document.get("response_format") if route == "chat/completions" else inside
    if found is not None and not isinstance(found, dict):
        problem = f"the format of the answer must be an object, but is {json.dumps(found):.80}"
        raise CallError(problem, kind="invalid_request")
    return found


def answer_format(route: Route, document: Document) -> AnswerFormat | None:
    """Return the JSON schema that a request demands of the answer; any object for ``json_object``.

    >>> given = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    >>> answer_format("chat/completions", {"response_format": given})
    AnswerFormat(schema='{"type": "object"}', choices=())
    """
    found, kind = demanded_format(route, document), format_kind(route, document)
    if kind == "json_object":
        return AnswerFormat('{"type": "object"}')
    if found is None or kind != "json_schema":
        return None
    holder = found.get("json_schema") if route == "chat/completions" else found
    schema = holder.get("schema") if isinstance(holder, dict) else None
    return AnswerFormat(json.dumps(schema)) if isinstance(schema, dict) else None


def stop_strings(document: Document) -> tuple[str, ...]:
    """Return the strings that end the answer."""
    stop = document.get("stop")
    if isinstance(stop, str):
        return (stop,)
    return tuple(map(str, stop)) if isinstance(stop, list) else ()


def number(document: Document, *names: str) -> float | None:
    """Return the first of several fields that holds a number, or ``None``.

    >>> number({"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens")
    5
    """
    found = (document.get(name) for name in names)
    return next((v for v in found if isinstance(v, int | float) and not isinstance(v, bool)), None)


def as_document(route: Route, model: str, completion: Completion, number_: int) -> Document:
    """Return a completion in the format of a route; it holds nothing that differs between equal runs."""
    # with identifiers that no other request of the run has
    calls = [replace(call, id=f"{call.id}_{number_}") for call in completion.tool_calls]
    usage = completion.usage
    # a call of the text protocol is the whole text
    text = "" if is_call(completion.text) and calls else completion.text
    if route == "chat/completions":
        message: Document = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            message["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": c.arguments},
                }
                for c in calls
            ]
        choice = {"index": 0, "message": message, "finish_reason": completion.finish_reason}
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        }
        return {
            "id": f"chatcmpl-gateway-{number_}",
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": [choice],
            "usage": {**counts, "total_tokens": usage.tokens},
        }
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item: Document = {
        "id": f"msg-gateway-{number_}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    called: list[Document] = [
        {
            "id": f"fc-{c.id}",
            "type": "function_call",
            "call_id": c.id,
            "name": c.name,
            "arguments": c.arguments,
            "status": "completed",
        }
        for c in calls
    ]
    output = [item, *called] if text or not calls else called
    cut = completion.finish_reason == "length"
    return {
        "id": f"resp-gateway-{number_}",
        "object": "response",
        "created_at": 0,
        "model": model,
        "status": "incomplete" if cut else "completed",
        "output": output,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.tokens,
        },
    }


def text_of(document: Document) -> str:
    """Return the text of an answer, with its tool calls as JSON, for readers of traces.

    >>> text_of({"choices": [{"message": {"content": "Lima"}}]})
    'Lima'
    """
    texts: list[str] = []
    for choice in cast("list[Document]", document.get("choices") or []):
        message = cast("Document", choice.get("message") or {})
        texts.append(str(message.get("content") or ""))
        texts += [
            _tool_text(call) for call in cast("list[Document]", message.get("tool_calls") or [])
        ]
    for item in cast("list[Document]", document.get("output") or []):
        if item.get("type") == "message":
            parts = cast("list[Document]", item.get("content") or [])
            texts.append("".join(str(part.get("text", "")) for part in parts))
        elif item.get("type") == "function_call":
            texts.append(_tool_text({"function": item}))
    return "\n".join(filter(None, texts))


def _tool_text(call: Document) -> str:
    function = cast("Document", call.get("function") or {})
    return f"{function.get('name')}({function.get('arguments')})"
