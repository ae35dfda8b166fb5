"""Sessions: the requests of one run of an agent, identified by a random key.

A session counts the requests, hands each to the run's executor, and turns what happened into an answer in
OpenAI's format. When the budget is exhausted, the agent is told so, and the run ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from compound.errors import BudgetExhausted, CompoundError
from compound.gateway.exchange import CURRENT, Document, GatewayExchange, Route
from compound.gateway.streams import stream_of
from compound.web.problems import Problem

Dispatch = Callable[[GatewayExchange], Awaitable[Document | None]]
STATUS_OF_KIND = {"unsupported": 400, "invalid_request": 400, "rate_limit": 429, "transient": 503}
"""Statuses by kind of failure; all others are 502."""
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients obey; the executor has retried already


@dataclass(eq=False)
class Session:
    """The requests of one run of an agent.

    Attributes:
        dispatch: executes a request as a call of the run, and returns its answer; ``None`` if it failed.
        models: names of models to list.
        max_requests: maximum number of requests of the run.
        on_busy: called when the first request in flight starts, and, with ``False``, when the last one ends.
        key: the bearer key of the run.
        count: number of requests so far.
        fatal: the error that ends the run, such as an exhausted budget.
    """

    dispatch: Dispatch
    models: tuple[str, ...] = ()
    max_requests: int = 100
    on_busy: Callable[[bool], None] = lambda busy: None
    key: str = field(default_factory=lambda: f"run-{secrets.token_urlsafe(24)}", repr=False)
    count: int = 0
    fatal: asyncio.Future[CompoundError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future(), repr=False
    )
    _context: contextvars.Context = field(default_factory=contextvars.copy_context, repr=False)
    _tasks: set[asyncio.Task[Document | None]] = field(default_factory=set, repr=False)
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
            document = self._document(exchange, await task)
            return stream_of(exchange, document, _nothing())
        return stream_of(exchange, task, _rest(exchange, first))

    async def close(self) -> None:
        """Refuse further requests, and cancel those in flight."""
        self._closed = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self.fatal.done():
            self.fatal.cancel()

    def _accept(self, route: Route, body: Document) -> GatewayExchange:
        if self._closed:
            raise Problem(401, "run_ended", "the run of this key has ended")
        if self.fatal.done() and not self.fatal.cancelled():
            raise _ended(self.fatal.result())
        if self.count >= self.max_requests:
            raise Problem(
                429, "too_many_requests",
                f"the run has made {self.count} requests, its limit; raise max_requests of the agent",
                headers=NO_RETRY,
            )  # fmt: skip
        document = dict(body)
        stream, options = document.pop("stream", False) is True, document.pop("stream_options", None)
        usage = isinstance(options, dict) and options.get("include_usage") is True
        exchange = GatewayExchange(route, document, self.count, stream, usage)
        self.count += 1
        return exchange

    async def _execute(self, exchange: GatewayExchange) -> Document | None:
        CURRENT.set(exchange)
        if len(self._tasks) <= 1:
            self.on_busy(True)
        try:
            return await self.dispatch(exchange)
        except Problem as problem:
            exchange.kind, exchange.message = problem.kind, problem.message
            raise
        except CompoundError as error:
            if not self.fatal.done():
                self.fatal.set_result(error)
            raise _ended(error) from error
        finally:
            exchange.pieces.put_nowait(None)
            if len(self._tasks) <= 1:
                self.on_busy(False)

    @staticmethod
    def _document(exchange: GatewayExchange, document: Document | None) -> Document:
        if document is None:
            raise failed(exchange)
        return document


def failed(exchange: GatewayExchange) -> Problem:
    """Return the problem of a request whose call failed."""
    kind = exchange.kind or "failed"
    message = exchange.message or "the request failed; the trace of the run has the reason"
    return Problem(STATUS_OF_KIND.get(kind, 502), kind, message, headers=NO_RETRY)


def _ended(error: CompoundError) -> Problem:
    """Return the problem of a run that ends with an error."""
    if isinstance(error, BudgetExhausted):
        return Problem(429, "budget_exhausted", f"{error}. The run ends.", headers=NO_RETRY)
    return Problem(500, "run_failed", str(error), headers=NO_RETRY)


async def _nothing() -> AsyncIterator[str]:
    for piece in list[str]():
        yield piece


async def _rest(exchange: GatewayExchange, first: str) -> AsyncIterator[str]:
    piece: str | None = first
    while piece is not None:
        yield piece
        piece = await exchange.pieces.get()


class Sessions:
    """The open sessions by key."""

    def __init__(self) -> None:
        self._open: dict[str, Session | None] = {}

    def open(self, session: Session) -> None:
        """Accept the requests of a session."""
        self._open[session.key] = session

    def assign(self, key: str, session: Session | None) -> None:
        """Give the requests with a lasting key to a session; ``None`` refuses them until the next one."""
        self._open[key] = session

    def remove(self, key: str) -> None:
        """Refuse requests with a key."""
        self._open.pop(key, None)

    def find(self, authorization: bytes) -> Session:
        """Return the session of a request.

        Raises:
            Problem: the key is missing, or it belongs to no open run.
        """
        scheme, _, given = authorization.partition(b" ")
        found, known = None, False
        for key, session in self._open.items():
            if hmac.compare_digest(given.strip(), key.encode()):
                found, known = session, True
        if scheme.lower() != b"bearer" or not known:
            raise Problem(
                401, "invalid_key",
                "the key belongs to no open run; an agent uses the OPENAI_API_KEY or api_key of its run",
                headers={"WWW-Authenticate": "Bearer", **NO_RETRY},
            )  # fmt: skip
        if found is None:
            raise Problem(
                409, "no_open_run", "no run of the agent is open; requests are accepted during a run only",
                headers=NO_RETRY,
            )  # fmt: skip
        return found
