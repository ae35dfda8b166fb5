"""Answers as server-sent events, in the formats of chat completions and of the Responses API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import cast

from compound.gateway.exchange import Document, GatewayExchange
from compound.web.problems import Problem

DONE = "data: [DONE]\n\n"


async def stream_of(
    exchange: GatewayExchange,
    answer: Document | asyncio.Task[Document | None],
    pieces: AsyncIterator[str],
) -> AsyncIterator[str]:
    """Yield the events of a stream.

    Args:
        exchange: the request.
        answer: the complete answer, or the task that returns it.
        pieces: pieces of the answer as they arrive; an upstream's own events are passed on unchanged, without
            a usage that the agent has not asked for.
    """
    forwarded = _ForwardedEvents(exchange)
    encoder = (_ResponsesEvents if exchange.route == "responses" else _ChatEvents)(exchange)
    streamed = False
    async for piece in pieces:
        if not exchange.raw and not streamed:
            for event in encoder.start():
                yield event
        streamed = True
        text = forwarded.text(piece) if exchange.raw else encoder.text(piece)
        if text:
            yield text
    if rest := forwarded.rest():
        yield rest
    try:
        document = await answer if isinstance(answer, asyncio.Task) else answer
    except Problem as problem:  # it failed within the stream
        yield _data(problem.document())
        return
    if document is None:
        yield _data(Problem(502, exchange.kind or "failed", exchange.message).document())
        return
    if streamed and exchange.raw:
        return
    if not streamed:
        for event in encoder.start():
            yield event
    for event in encoder.end(document, text_sent=streamed):
        yield event


class _ForwardedEvents:
    """Events of an upstream, without the usage that only the engine has asked for.

    The chunk of the usage has no choices, and clients that did not ask for it often read the first choice.
    """

    def __init__(self, exchange: GatewayExchange) -> None:
        self._drops = exchange.route == "chat/completions" and not exchange.include_usage
        self._held = ""

    def text(self, piece: str) -> str:
        """Return the complete lines after another piece."""
        if not self._drops:
            return piece
        *lines, self._held = (self._held + piece).split("\n")
        return "".join(f"{line}\n" for line in lines if not _is_usage(line))

    def rest(self) -> str:
        """Return what is left: a last line without its end."""
        return "" if _is_usage(self._held) else self._held


def _is_usage(line: str) -> bool:
    """Return whether a line is the chunk with the usage of a chat completion.

    >>> _is_usage('data: {"choices": [], "usage": {"prompt_tokens": 4}}'), _is_usage("data: [DONE]")
    (True, False)
    """
    if not line.startswith("data:") or '"usage"' not in line:
        return False
    try:
        chunk = json.loads(line.removeprefix("data:"))
    except (ValueError, RecursionError):
        return False
    return isinstance(chunk, dict) and chunk.get("choices") == [] and bool(chunk.get("usage"))


class _ChatEvents:
    """Encodes an answer as chunks of a chat completion."""

    def __init__(self, exchange: GatewayExchange) -> None:
        self._exchange = exchange
        self._head: Document = {
            "id": f"chatcmpl-gateway-{exchange.number}",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": str(exchange.document.get("model", "")),
        }

    def start(self) -> Iterator[str]:
        yield self._chunk({"role": "assistant", "content": ""})

    def text(self, piece: str) -> str:
        return self._chunk({"content": piece})

    def end(self, document: Document, *, text_sent: bool) -> Iterator[str]:
        choices = cast("list[Document]", document.get("choices") or [])
        for choice in choices:
            message = dict(cast("Document", choice.get("message") or {}))
            message.pop("role", None)
            if text_sent:
                message.pop("content", None)
            calls = message.get("tool_calls")
            if isinstance(calls, list):
                message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
            index = cast("int", choice.get("index", 0))
            left = {name: value for name, value in message.items() if value is not None}
            if left:
                yield self._chunk(left, index=index)
            yield self._chunk({}, str(choice.get("finish_reason") or "stop"), index)
        if self._exchange.include_usage:
            yield _data({**self._head, "choices": [], "usage": document.get("usage")})
        yield DONE

    def _chunk(self, delta: Document, finish: str | None = None, index: int = 0) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": finish}
        return _data({**self._head, "choices": [choice]})


class _ResponsesEvents:
    """Encodes an answer as events of the Responses API."""

    def __init__(self, exchange: GatewayExchange) -> None:
        self._number = 0
        self._item = f"msg-gateway-{exchange.number}"
        self._response: Document = {
            "id": f"resp-gateway-{exchange.number}", "object": "response", "created_at": 0, "output": [],
            "model": str(exchange.document.get("model", "")), "status": "in_progress", "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": True,
        }  # fmt: skip
        self._text, self._is_open = "", False

    def start(self) -> Iterator[str]:
        yield self._event("response.created", response=self._response)

    def text(self, piece: str) -> str:
        opening = "" if self._is_open else "".join(self._open_item())
        self._text, self._is_open = self._text + piece, True
        return opening + self._event("response.output_text.delta", **self._place(), delta=piece, logprobs=[])

    def end(self, document: Document, *, text_sent: bool) -> Iterator[str]:
        output = cast("list[Document]", document.get("output") or [])
        for index, item in enumerate(output):
            is_text = item.get("type") == "message"
            if is_text and not text_sent:
                yield self.text(_text_of(item))
            if is_text:
                part = {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}
                yield self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[])
                yield self._event("response.content_part.done", **self._place(), part=part)
                done = {**item, "id": self._item}
            else:
                done = item
                opened = {**item, "status": "in_progress"}
                yield self._event("response.output_item.added", output_index=index, item=opened)
            yield self._event("response.output_item.done", output_index=index, item=done)
        ended = "incomplete" if document.get("status") == "incomplete" else "completed"
        yield self._event(f"response.{ended}", response=document)

    def _open_item(self) -> Iterator[str]:
        item = {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _place(self) -> Document:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> str:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\n{_data(data)}"


def _text_of(item: Document) -> str:
    parts = cast("list[Document]", item.get("content") or [])
    return "".join(str(part.get("text", "")) for part in parts)


def _data(document: object) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"
