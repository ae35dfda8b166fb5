"""HTTP transports of engines: they bound bodies, prevent resending, record exchanges, and close completely.

Client libraries wrap failures in their own errors, and some resend requests themselves. The charge
of a request depends on whether it was sent and how much of the answer arrived, so the transport
records that in the `HTTPExchange` of the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import zlib
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import anyio
import httpx

from compound.engines.chat_format import plain_answer, streamed_refusal
from compound.engines.remote import charge_for_status, requested_wait

if TYPE_CHECKING:
    from collections.abc import Mapping

    Mounts = Mapping[str, httpx.AsyncBaseTransport | None]  # by URL pattern

ENCODINGS = {"gzip", "x-gzip", "deflate"}
ERROR_BODY = 2**16  # bytes of an error's body that are kept
END = 64  # bytes of the end of a body that are kept
UNSENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
    httpx.ProxyError,
)
KEEP_ALIVE = 4.0
"""Seconds until an idle connection is closed. uvicorn, and so vLLM, closes it after 5, maybe in a request."""
UNLIMITED = httpx.Limits(  # the throttle bounds the calls
    max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEP_ALIVE
)


@dataclass(slots=True)
class HTTPExchange:
    """Record of a request and its answer."""

    limit: int = 2**26  # maximum bytes of the answer's body, after decompression
    sent: bool = False  # whether the server may have received the request
    to: str = ""  # the method and URL of the request
    status: int = 0  # the status of the answer; 0 until its headers have arrived
    wait: float | None = None  # the seconds that the server asks to wait
    error: bytes = b""  # the start of the body of an error response
    complete: bool = False  # whether the whole body has arrived
    end: bytes = b""  # the last bytes of the body so far
    problem: str = ""  # a description of the transport error
    refusal: str = ""  # the text with which the model refuses to answer, in a stream

    def begin(self, to: str) -> None:
        """Record that a request is sent.

        Raises:
            IncompleteAnswer: the same request was sent before, and may have been answered and
                billed.
        """
        charged = not self.status or charge_for_status(self.status) is None
        if self.sent and to == self.to and charged:
            raise IncompleteAnswer(self.problem or "the request was already sent once")
        self.sent, self.to, self.status, self.wait = True, to, 0, None
        self.error, self.complete, self.end = b"", False, b""


_CURRENT: ContextVar[HTTPExchange | None] = ContextVar("exchange", default=None)


@contextlib.contextmanager
def record_exchange(limit: int) -> Iterator[HTTPExchange]:
    """Record the request that the current task sends inside the block; only one is expected."""
    noted = HTTPExchange(limit)
    token = _CURRENT.set(noted)
    try:
        yield noted
    finally:
        _CURRENT.reset(token)


class IncompleteAnswer(httpx.ReadError):
    """The answer is incomplete. Not a `ConnectError`, after which litellm would resend the request."""


class AnswerTooLarge(IncompleteAnswer):
    """The answer is longer than the limit."""


class Redirected(httpx.ReadError):
    """The server redirects the request, and with it the key, to another address."""


class GuardedTransport(httpx.AsyncBaseTransport):
    """Transport that bounds answers, records what was sent and received, and closes completely.

    httpx closes the connections that exist. A request that is still connecting continues, and its
    connection is never closed; this transport therefore cancels its requests first.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport, *, plain: bool = False) -> None:
        self.inner, self._plain = inner, plain
        self._in_flight: dict[anyio.CancelScope, anyio.Event] = {}
        self._closing: asyncio.Task[None] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return the answer when its headers have arrived.

        Raises:
            IncompleteAnswer: the request may have been received, but the answer is incomplete.
            Redirected: the server redirects to another address.
            httpx.NetworkError: the request was not sent.
        """
        noted = _CURRENT.get() or HTTPExchange()
        request.headers["accept-encoding"] = "identity"
        noted.begin(f"{request.method} {request.url}")
        try:
            response = await self._send(request)
        except UNSENT as error:
            noted.sent, noted.problem = False, _describe(error)
            raise
        except httpx.TransportError as error:
            noted.problem = _describe(error)
            raise IncompleteAnswer(noted.problem, request=request) from error
        noted.status, noted.wait = response.status_code, requested_wait(response.headers)
        if 300 <= response.status_code < 400:
            await response.aclose()
            noted.problem = "the server redirects to another address; use it if you trust it"
            raise Redirected(noted.problem, request=request)
        headers = [
            (k, v)
            for k, v in response.headers.raw
            if k.lower() not in (b"content-encoding", b"content-length")
        ]
        body = _Body(response, noted, plain=self._plain)
        return httpx.Response(
            response.status_code, headers=headers, stream=body, extensions=response.extensions
        )

    async def _send(self, request: httpx.Request) -> httpx.Response:
        with anyio.CancelScope() as scope:
            ended = self._in_flight[scope] = anyio.Event()
            try:
                return await self.inner.handle_async_request(request)
            finally:
                del self._in_flight[scope]
                ended.set()
        raise httpx.ReadError("the connections were closed during the request", request=request)

    async def aclose(self) -> None:
        """Cancel the requests in flight, and close the connections, also if the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        in_flight = dict(self._in_flight)
        for scope in in_flight:
            scope.cancel()
        for ended in in_flight.values():
            await ended.wait()
        await self.inner.aclose()


def guard_litellm(handlers: ModuleType) -> None:
    """Make the clients of litellm, which has no setting for this, use `GuardedTransport`."""
    handler = handlers.AsyncHTTPHandler
    mounted = getattr(handler, "create_httpx_proxy_mounts", None)

    def transport(
        ssl_context: ssl.SSLContext | str | bool | None = None,
        ssl_verify: bool | None = None,
        **_: object,
    ) -> GuardedTransport:
        verify = ssl_context if ssl_context is not None else ssl_verify is not False
        return GuardedTransport(
            httpx.AsyncHTTPTransport(verify=verify, limits=UNLIMITED), plain=True
        )

    def mounts(transport: httpx.AsyncBaseTransport, **settings: object) -> Mounts | None:
        found: Mounts | None = (
            mounted(getattr(transport, "inner", transport), **settings) if mounted else None
        )
        return found and {
            pattern: inner and GuardedTransport(inner, plain=True)
            for pattern, inner in found.items()
        }

    handler.create_async_transport = staticmethod(transport)
    handler.create_httpx_proxy_mounts = staticmethod(mounts)


def guarded(client: httpx.AsyncClient, *, plain: bool = False) -> httpx.AsyncClient:
    """Wrap every transport of a client in a `GuardedTransport`, and return the client.

    httpx creates the transports of the user's proxies itself and has no setting to wrap them.
    """
    client._transport = GuardedTransport(client._transport, plain=plain)
    mounts = client._mounts.items()
    client._mounts = {
        pattern: inner and GuardedTransport(inner, plain=plain) for pattern, inner in mounts
    }
    return client


class _Body(httpx.AsyncByteStream):
    """Body of an answer, decompressed and bounded."""

    def __init__(self, response: httpx.Response, noted: HTTPExchange, *, plain: bool) -> None:
        self._response, self._noted = response, noted
        self._plain = plain and noted.status < 300

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._edited() if self._plain else self._received()

    async def _edited(self) -> AsyncIterator[bytes]:
        """Yield the body with its JSON document, or those of its events, in the expected form."""
        is_stream = "event-stream" in self._response.headers.get("content-type", "")
        held = b""
        async for chunk in self._received():
            held += chunk
            if is_stream:
                *lines, held = held.split(b"\n")
                for line in lines:
                    yield self._edited_line(line) + b"\n"
        if held:
            yield self._edited_line(held)

    def _edited_line(self, line: bytes) -> bytes:
        name, data = (b"data: ", line[5:]) if line.startswith(b"data:") else (b"", line)
        try:
            document = plain_answer(json.loads(data))
            self._noted.refusal += streamed_refusal(document)
            return name + json.dumps(document).encode()
        except (ValueError, RecursionError):
            return line

    async def _received(self) -> AsyncIterator[bytes]:
        noted = self._noted
        try:
            async for chunk in bounded(self._response.stream, self._response.headers, noted.limit):  # type: ignore[arg-type]
                if noted.status >= 400 and len(noted.error) < ERROR_BODY:
                    noted.error += chunk[:ERROR_BODY]
                noted.end = (noted.end + chunk)[-END:]
                yield chunk
        except httpx.TransportError as error:
            noted.problem = _describe(error)
            raise IncompleteAnswer(noted.problem) from error
        noted.complete = True

    async def aclose(self) -> None:
        await self._response.aclose()


async def bounded(
    chunks: AsyncIterator[bytes], headers: Mapping[str, str], limit: int
) -> AsyncIterator[bytes]:
    """Decompress a body, and yield at most ``limit`` bytes of it.

    Raises:
        AnswerTooLarge: the body is longer.
        IncompleteAnswer: its compression is unknown or invalid.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in {*ENCODINGS, "identity", ""}:
        raise IncompleteAnswer(
            f"the answer has the encoding {encoding[:40]!r}, which was not requested"
        )
    unpack = zlib.decompressobj(47) if encoding in ENCODINGS else None
    total = 0
    async for chunk in chunks:
        try:
            piece = chunk if unpack is None else unpack.decompress(chunk, limit - total + 1)
        except zlib.error as error:
            raise IncompleteAnswer(f"the answer is not valid {encoding}: {error}") from None
        total += len(piece)
        if total > limit:
            raise AnswerTooLarge(
                f"the answer is longer than {limit:,} bytes, the maximum that max_tokens allows"
            )
        yield piece


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
