"""Answers as server-sent events, in the formats of chat completions and of the Responses API."""

from __future__ import annotations

import asyncio
import contextvars
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

from compound.components.gateway.documents import CURRENT, Document, GatewayExchange, Route
from compound.core.errors import BudgetExhausted, CompoundError
from compound.core.web.problems import HTTPProblem

DONE = "data: [DONE]\n\n"


async def stream_of(
    exchange: GatewayExchange, answer: asyncio.Task[Document | None], first: str | None
) -> AsyncIterator[str]:
    """Yield the events of a stream.

    Args:
        exchange: the request, whose further pieces are waited for; an upstream's own events are
            passed on unchanged, without a usage that the agent has not asked for.
        answer: the task that returns the complete answer.
        first: the first piece; ``None`` if the answer has come as a whole.
    """
    forwarded = _ForwardedEvents(exchange)
    encoder = (_ResponsesEvents if exchange.route == "responses" else _ChatEvents)(exchange)
    is_raw = exchange.raw and first is not None
    for event in () if is_raw else encoder.start():
        yield event
    piece = first
    while piece is not None:
        if text := forwarded.text(piece) if is_raw else encoder.text(piece):
            yield text
        piece = await exchange.pieces.get()
    if rest := forwarded.rest():
        yield rest
    try:
        document = await answer
    except HTTPProblem as problem:  # it failed within the stream
        yield _data(problem.document())
        return
    if document is None:
        yield _data(HTTPProblem(502, exchange.kind or "failed", exchange.message).document())
    elif not is_raw:
        for event in encoder.end(document, text_sent=first is not None):
            yield event


class _ForwardedEvents:
    """Events of an upstream, without the usage that only the engine has asked for.

    The chunk of the usage has no choices, and clients that did not ask for it often read the first
    choice.
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
                message["tool_calls"] = [
                    {"index": index, **call} for index, call in enumerate(calls)
                ]
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
            "id": f"resp-gateway-{exchange.number}",
            "object": "response",
            "created_at": 0,
            "output": [],
            "model": str(exchange.document.get("model", "")),
            "status": "in_progress",
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        }
        self._text, self._is_open = "", False

    def start(self) -> Iterator[str]:
        yield self._event("response.created", response=self._response)

    def text(self, piece: str) -> str:
        opening = "" if self._is_open else "".join(self._open_item())
        self._text, self._is_open = self._text + piece, True
        return opening + self._event(
            "response.output_text.delta", **self._place(), delta=piece, logprobs=[]
        )

    def end(self, document: Document, *, text_sent: bool) -> Iterator[str]:
        output = cast("list[Document]", document.get("output") or [])
        for index, item in enumerate(output):
            is_text = item.get("type") == "message"
            if is_text and not text_sent:
                yield self.text(_text_of(item))
            if is_text:
                part = {
                    "type": "output_text",
                    "text": self._text,
                    "annotations": [],
                    "logprobs": [],
                }
                yield self._event(
                    "response.output_text.done", **self._place(), text=self._text, logprobs=[]
                )
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


Dispatch = Callable[[GatewayExchange], Awaitable[Document | None]]
STATUS_OF_KIND = {"unsupported": 400, "invalid_request": 400, "rate_limit": 429, "transient": 503}
"""Statuses by kind of failure; all others are 502."""
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients obey; the executor has retried already


@dataclass(eq=False)
class AgentSession:
    """The requests of one run of an agent.

    Attributes:
        dispatch: executes a request as a call of the run, and returns its answer; ``None`` if it
            failed.
        models: names of models to list.
        max_requests: maximum number of requests of the run.
        on_busy: called when the first request in flight starts, and, with ``False``, when the last
            one ends.
        key: the bearer key of the run.
        count: number of requests so far.
        last: text of the last answer.
        fatal: the error that ends the run, such as an exhausted budget.
    """

    dispatch: Dispatch
    models: tuple[str, ...] = ()
    max_requests: int = 100
    on_busy: Callable[[bool], None] = lambda busy: None
    key: str = field(default_factory=lambda: f"run-{secrets.token_urlsafe(24)}", repr=False)
    count: int = 0
    last: str = ""
    fatal: asyncio.Future[CompoundError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future(), repr=False
    )
    _context: contextvars.Context = field(default_factory=contextvars.copy_context, repr=False)
    _tasks: set[asyncio.Task[Document | None]] = field(default_factory=set, repr=False)
    _in_flight: int = 0  # requests that are being answered
    _closed: bool = False

    async def answer(self, route: Route, body: Document) -> Document | AsyncIterator[str]:
        """Answer a request: with a document, or with the events of a stream.

        Raises:
            Problem: the request is refused, or it failed before the first event.
        """
        exchange = self._accept(route, body)
        # in the context of the run, so that spans and context variables are those of the run
        task = self._context.copy().run(asyncio.ensure_future, self._execute(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not exchange.stream:
            return self._document(exchange, await task)
        first = await exchange.pieces.get()
        if first is None:  # nothing was streamed: the answer is complete, or it failed
            self._document(exchange, await task)
        return stream_of(exchange, task, first)

    async def close(self) -> None:
        """Refuse further requests, and cancel those in flight."""
        self._closed = True
        tasks = [*self._tasks]
        if tasks:
            await asyncio.sleep(0)  # one that has not begun could not answer its request
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self.fatal.done():
            self.fatal.cancel()

    def _accept(self, route: Route, body: Document) -> GatewayExchange:
        if self._closed:
            raise _run_ended()
        if self.fatal.done() and not self.fatal.cancelled():
            raise _ended(self.fatal.result())
        if self.count >= self.max_requests:
            raise HTTPProblem(
                429,
                "too_many_requests",
                f"the run has made {self.count} requests, its limit; raise max_requests of the agent",
                headers=NO_RETRY,
            )
        document = dict(body)
        stream, options = (
            document.pop("stream", False) is True,
            document.pop("stream_options", None),
        )
        usage = isinstance(options, dict) and options.get("include_usage") is True
        exchange = GatewayExchange(route, document, self.count, stream, usage)
        self.count += 1
        return exchange

    async def _execute(self, exchange: GatewayExchange) -> Document | None:
        CURRENT.set(exchange)
        self._in_flight += 1
        if self._in_flight == 1:
            self.on_busy(True)
        try:
            return await self.dispatch(exchange)
        except HTTPProblem as problem:
            exchange.kind, exchange.message = problem.kind, problem.message
            raise
        except CompoundError as error:
            if not self.fatal.done():
                self.fatal.set_result(error)
            raise _ended(error) from error
        except asyncio.CancelledError:
            if self._closed:  # the agent may still wait for the answer
                raise _run_ended() from None
            raise
        finally:
            exchange.pieces.put_nowait(None)
            self._in_flight -= 1
            if not self._in_flight:
                self.on_busy(False)

    @staticmethod
    def _document(exchange: GatewayExchange, document: Document | None) -> Document:
        if document is not None:
            return document
        kind = exchange.kind or "failed"
        message = exchange.message or "the request failed; the trace of the run has the reason"
        raise HTTPProblem(STATUS_OF_KIND.get(kind, 502), kind, message, headers=NO_RETRY)


def _run_ended() -> HTTPProblem:
    return HTTPProblem(401, "run_ended", "the run of this key has ended")


def _ended(error: CompoundError) -> HTTPProblem:
    """Return the problem of a run that ends with an error."""
    if isinstance(error, BudgetExhausted):
        return HTTPProblem(429, "budget_exhausted", f"{error}. The run ends.", headers=NO_RETRY)
    return HTTPProblem(500, "run_failed", str(error), headers=NO_RETRY)
