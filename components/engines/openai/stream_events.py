"""Assemble the answer of a stream of OpenAI's API from its server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from compound.components.engines.chat_format import plain_message

Document = dict[str, object]
MAX_CALLS = 128  # tool calls of one answer
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")  # of the Responses API


class StreamedAnswer:
    r"""Reads the events of a stream, and builds the answer that the same request would have without a stream.

    Args:
        route: ``chat/completions`` or ``responses``.

    Attributes:
        complete: whether the end of the answer has arrived; a proxy may end a stream before it.
        error: the message of an error that the server reported within the stream, or ``""``.

    Example:
        >>> answer = StreamedAnswer("chat/completions")
        >>> piece = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Li"}}]}
        >>> answer.feed(f"data: {json.dumps(piece)}\n\ndata: {{")
        'Li'
        >>> answer.document()["choices"]
        [{'index': 0, 'message': {'role': 'assistant', 'content': 'Li'}, 'finish_reason': None}]
    """

    def __init__(self, route: str) -> None:
        self.complete, self.error = False, ""
        self._chat = route != "responses"
        self._held = ""
        self._document: Document = {}
        self._choices: dict[int, Document] = {}

    def feed(self, piece: str) -> str:
        """Read another piece of the stream; return the text that it adds to the answer."""
        *lines, self._held = (self._held + piece).split("\n")
        return "".join(self._line(line.rstrip("\r")) for line in lines)

    def document(self) -> Document:
        """Return the answer so far."""
        if not self._chat:
            return self._document
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {**self._document, "object": "chat.completion", "choices": choices}

    def _line(self, line: str) -> str:
        name, _, data = line.partition(":")
        if name != "data" or not data.strip():
            return ""
        if data.strip() == "[DONE]":
            self.complete = True
            return ""
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            return ""
        if not isinstance(event, Mapping):
            return ""
        if event.get("error") or event.get("type") == "error":
            self.error = error_message(event)
        return self._chunk(event) if self._chat else self._event(event)

    def _event(self, event: Mapping[str, object]) -> str:
        """Read an event of the Responses API; the last one has the whole answer."""
        if isinstance(event.get("response"), Mapping):
            self._document = dict(cast("Document", event["response"]))
        self.complete = self.complete or event.get("type") in LAST_EVENTS
        is_text = event.get("type") == "response.output_text.delta"
        return str(event.get("delta", "")) if is_text else ""

    def _chunk(self, chunk: Mapping[str, object]) -> str:
        """Read a chunk of a chat completion."""
        own = {name: value for name, value in chunk.items() if name not in {"choices", "usage"}}
        self._document |= own
        if chunk.get("usage") is not None:
            self._document["usage"] = chunk["usage"]
        added = ""
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            index = choice.get("index", 0)
            known = self._choices.setdefault(
                index,
                {"index": index, "message": {"role": "assistant", "content": None}, "finish_reason": None},
            )
            message = cast("Document", known["message"])
            delta = plain_message(choice.get("delta") or {})
            _extend(message, delta)
            if choice.get("finish_reason") is not None:
                known["finish_reason"] = choice["finish_reason"]
                self.complete = True
            if isinstance(choice.get("logprobs"), Mapping):
                _extend_logprobs(cast("Document", known.setdefault("logprobs", {})), choice["logprobs"])
            added += delta.get("content") or "" if index == 0 else ""
        return added


def _extend(message: Document, delta: Mapping[str, object]) -> None:
    """Add a delta to a message: texts are joined, tool calls are merged by their index."""
    for name, value in delta.items():
        if name == "tool_calls" and isinstance(value, list):
            calls = cast("list[Document]", message.setdefault("tool_calls", []))
            for part in value:
                _extend_tool(calls, part)
        elif isinstance(value, str) and isinstance(message.get(name), str) and name != "role":
            message[name] = f"{message[name]}{value}"
        elif value is not None:
            message[name] = value


def _extend_logprobs(known: Document, more: Mapping[str, object]) -> None:
    """Add the log-probabilities of further tokens, which are lists by kind of token."""
    for name, value in more.items():
        earlier = known.get(name)
        known[name] = [*earlier, *value] if isinstance(earlier, list) and isinstance(value, list) else value


def error_message(document: Mapping[str, object]) -> str:
    """Return the message of an error that a server reports in an answer with status 200.

    >>> error_message({"error": {"message": "overloaded", "code": 503}}), error_message({"error": "full"})
    ('overloaded', 'full')
    """
    error = document.get("error") or document
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message or "an error without a message")


def _extend_tool(calls: list[Document], part: Mapping[str, object]) -> None:
    index = part.get("index", len(calls))
    if type(index) is not int or not 0 <= index < MAX_CALLS:
        raise ValueError(f"a tool call of the stream has the index {index!r:.40}")
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[index]
    for name, value in part.items():
        if name == "function" and isinstance(value, Mapping):
            function = cast("Document", call["function"])
            for key, text in value.items():
                function[key] = f"{function.get(key) or ''}{text or ''}"
        elif name != "index" and value:
            call[name] = value
