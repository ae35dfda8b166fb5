"""Convert between the bodies of OpenAI's API and the requests and completions of engines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from compound.engine import AnswerFormat, Completion, Message, Role
from compound.errors import CallError
from compound.gateway.exchange import Document, Route

ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
}  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text")
UNKNOWN = "the engine {lm!r} answers plain texts only, but the request of the agent has {what}"
HINT = "use an engine of kind openai for tools, images and other fields: it forwards requests as they are"


@dataclass
class TextSlot:
    """A text in a request that a prompt may match and replace.

    Attributes:
        role: ``system`` or ``user``.
        text: the text.
        holder: the object of the body that holds the text.
        name: the key in it.
    """

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
    parts = [part for part in content or [] if _is_text(part)] if isinstance(content, list) else []
    if len(parts) != 1:
        return None
    return TextSlot(role, str(parts[0].get("text", "")), parts[0], "text")


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in TEXT_PARTS


def plain_messages(route: Route, document: Document, lm: str) -> tuple[Message, ...]:
    """Return the messages of a request for an engine that takes texts only.

    Raises:
        CallError: the request has tools, images or other content.
    """
    if document.get("tools") or document.get("functions"):
        raise _unknown(lm, "tools")
    if document.get("n", 1) != 1:
        raise _unknown(lm, "several answers (n)")
    if document.get("previous_response_id") or document.get("conversation"):
        raise _unknown(lm, "a reference to an earlier response, which is not stored")
    messages: list[Message] = []
    instructions = document.get("instructions")
    if isinstance(instructions, str) and instructions:
        messages.append(Message("system", instructions))
    given = document.get("messages" if route == "chat/completions" else "input")
    if isinstance(given, str):
        return (*messages, Message("user", given))
    if not isinstance(given, list) or not given:
        raise CallError("the request has no messages")
    messages += [_message(item, lm) for item in given]
    return tuple(messages)


def readable_messages(route: Route, document: Document) -> tuple[Message, ...]:
    """Return the messages of a request for the record of a call; content other than text becomes JSON."""
    given = document.get("messages" if route == "chat/completions" else "input")
    items: list[object] = given if isinstance(given, list) else [{"role": "user", "content": given}]
    if document.get("instructions"):
        items = [{"role": "system", "content": document["instructions"]}, *items]
    found = []
    for item in items:
        content = item.get("content") if isinstance(item, dict) else None
        text = content if isinstance(content, str) and len(cast("Document", item)) == 2 else json.dumps(item)
        role = str(item.get("role")) if isinstance(item, dict) else "user"
        found.append(Message(ROLES.get(role, "user"), text))
    return tuple(found)


def _message(item: object, lm: str) -> Message:
    if not isinstance(item, dict) or str(item.get("role")) not in ROLES:
        kind = item.get("type") or item.get("role") if isinstance(item, dict) else type(item).__name__
        raise _unknown(lm, f"a message of kind {kind!r}")
    content = item.get("content")
    if isinstance(content, list):
        other = next((part for part in content if not _is_text(part)), None)
        if other is not None:
            kind = other.get("type") if isinstance(other, dict) else other
            raise _unknown(lm, f"content of kind {kind!r}")
        content = "".join(str(part.get("text", "")) for part in content)
    if item.get("tool_calls") or not isinstance(content, str):
        raise _unknown(lm, "a message without text")
    return Message(ROLES[str(item["role"])], content)


def _unknown(lm: str, what: str) -> CallError:
    return CallError(UNKNOWN.format(lm=lm, what=what), hint=HINT, kind="unsupported")


def answer_format(route: Route, document: Document) -> AnswerFormat | None:
    """Return the JSON schema that a request demands of the answer.

    >>> given = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    >>> answer_format("chat/completions", {"response_format": given})
    AnswerFormat(schema='{"type": "object"}', choices=())
    """
    text = document.get("text")
    found = document.get("response_format") if route == "chat/completions" else (
        text.get("format") if isinstance(text, dict) else None
    )  # fmt: skip
    if not isinstance(found, dict) or found.get("type") != "json_schema":
        return None
    holder = found.get("json_schema") if route == "chat/completions" else found
    schema = holder.get("schema") if isinstance(holder, dict) else None
    return AnswerFormat(json.dumps(schema)) if isinstance(schema, dict) else None


def stop_strings(document: Document) -> tuple[str, ...]:
    """Return the strings that end the answer."""
    stop = document.get("stop")
    return (stop,) if isinstance(stop, str) else tuple(map(str, stop)) if isinstance(stop, list) else ()


def number(document: Document, *names: str) -> float | None:
    """Return the first of several fields that holds a number, or ``None``.

    >>> number({"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens")
    5
    """
    found = (document.get(name) for name in names)
    return next((v for v in found if isinstance(v, int | float) and not isinstance(v, bool)), None)


def as_document(route: Route, model: str, completion: Completion, number_: int) -> Document:
    """Return a completion in the format of a route; it holds nothing that differs between equal runs."""
    usage = completion.usage
    if route == "chat/completions":
        choice = {
            "index": 0, "message": {"role": "assistant", "content": completion.text},
            "finish_reason": completion.finish_reason,
        }  # fmt: skip
        counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        return {
            "id": f"chatcmpl-gateway-{number_}", "object": "chat.completion", "created": 0, "model": model,
            "choices": [choice], "usage": {**counts, "total_tokens": usage.tokens},
        }  # fmt: skip
    part = {"type": "output_text", "text": completion.text, "annotations": [], "logprobs": []}
    item = {
        "id": f"msg-gateway-{number_}", "type": "message", "role": "assistant", "status": "completed",
        "content": [part],
    }  # fmt: skip
    cut = completion.finish_reason == "length"
    return {
        "id": f"resp-gateway-{number_}", "object": "response", "created_at": 0, "model": model,
        "status": "incomplete" if cut else "completed", "output": [item], "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": None,
        "tool_choice": "auto", "tools": [], "top_p": None,
        "usage": {
            "input_tokens": usage.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.tokens,
        },
    }  # fmt: skip


def text_of(document: Document) -> str:
    """Return the text of an answer, with its tool calls as JSON, for readers of traces.

    >>> text_of({"choices": [{"message": {"content": "Lima"}}]})
    'Lima'
    """
    texts: list[str] = []
    for choice in cast("list[Document]", document.get("choices") or []):
        message = cast("Document", choice.get("message") or {})
        texts.append(str(message.get("content") or ""))
        texts += [_tool_text(call) for call in cast("list[Document]", message.get("tool_calls") or [])]
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
