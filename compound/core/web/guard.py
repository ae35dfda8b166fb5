"""ASGI middleware that admits requests: host, origin, key, content type, and the size of the body.

The body is read completely, within limits, before the application sees the request: a slow client
does not occupy a place for runs.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Callable, Collection, MutableMapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from compound.core.web.problems import HTTPProblem

OPEN_PATHS = ("/health", "/ready")  # probes have no key
Count = Callable[[Scope, int], None]
EXPOSED_HEADERS = b"X-Run-Id, Retry-After"
CORS_HEADERS = re.compile(
    rb"[\w!#$%&'*+.^`|~-]{1,64}(?: *, *[\w!#$%&'*+.^`|~-]{1,64}){0,63}", re.ASCII
)


class _Disconnected(Exception):
    """The client ended the connection while it sent the body."""


class Guard:
    """Middleware that rejects requests before they reach the application.

    Args:
        inner: the application.
        host_names: names that the ``Host`` header may have; ``None`` allows any.
        allow_origins: web origins whose pages may call the server.
        key: the bearer key that requests must carry; ``None`` if the application checks keys itself.
        max_body: maximum bytes of a body.
        body_timeout: time limit in seconds for receiving a body.
        count: receives the scope and the status of each answer.
        admit: checks the ``Authorization`` header before the body is read, if the application has
            keys of its own; raises `HTTPProblem`.
    """

    def __init__(
        self,
        inner: ASGIApp,
        *,
        host_names: Collection[str] | None,
        allow_origins: Sequence[str] = (),
        key: str | None = None,
        max_body: int,
        body_timeout: float,
        count: Count = lambda scope, status: None,
        admit: Callable[[bytes], object] = lambda authorization: None,
    ) -> None:
        self._inner, self._count, self._admit = inner, count, admit
        self._names = host_names
        self._origins = {origin.lower().encode() for origin in allow_origins}
        self._bearer = key.encode() if key is not None else None
        self._max_body, self._body_timeout = max_body, body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        origin = headers.get(b"origin", b"").lower()
        sent = self._sending(scope, send, origin)
        try:
            self._check(scope, headers, origin)
            if scope["method"] == "OPTIONS" and origin:
                await _preflight(headers, sent)
                return
            await self._inner(scope, await self._with_body(scope, headers, receive), sent)
        except HTTPProblem as problem:
            await problem.response()(scope, receive, sent)
        except _Disconnected:
            return

    def _check(self, scope: Scope, headers: MutableMapping[bytes, bytes], origin: bytes) -> None:
        """Reject a request that did not come to this server, from an allowed place, with its key."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._names is not None and _name(host) not in self._names:
            raise HTTPProblem(
                421,
                "unknown_host",
                f"this server is not known as {host!r:.100}; allow it with --allow-host",
            )
        own = f"{scope.get('scheme', 'http')}://{host}".encode("latin-1")
        if origin and origin != own and origin not in self._origins:
            raise HTTPProblem(
                403,
                "foreign_origin",
                "pages of this origin may not call the server; see --allow-origin",
            )
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        if self._bearer is not None:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._bearer):
                raise HTTPProblem(
                    401,
                    "invalid_key",
                    "a valid key is required: Authorization: Bearer …",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        self._admit(headers.get(b"authorization", b""))
        if scope["method"] == "POST":
            content = headers.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
            if content != b"application/json":
                raise HTTPProblem(
                    415, "not_json", "the body must be JSON; send Content-Type: application/json"
                )

    async def _with_body(
        self, scope: Scope, headers: MutableMapping[bytes, bytes], receive: Receive
    ) -> Receive:
        """Read the body within the limits, and return a function that replays it."""
        if scope["method"] != "POST":
            return receive
        most = self._max_body
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > most:
            raise _too_large(most)
        body = await self._read(receive, most)
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    async def _read(self, receive: Receive, most: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Disconnected
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise _too_large(most)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise HTTPProblem(
                408,
                "slow_body",
                f"the body did not arrive within {self._body_timeout:g} s",
                headers={"Connection": "close"},
            ) from None

    def _sending(self, scope: Scope, send: Send, origin: bytes) -> Send:
        """Return a function that counts the answer, and lets an allowed page read it."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
                if origin in self._origins:
                    extra = [
                        (b"access-control-allow-origin", origin),
                        (b"access-control-expose-headers", EXPOSED_HEADERS),
                        (b"vary", b"Origin"),
                    ]
                    message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        return sent


async def _preflight(asked: MutableMapping[bytes, bytes], send: Send) -> None:
    """Answer a browser that asks whether a page may call the server, with the headers of its library."""
    names = asked.get(b"access-control-request-headers", b"").strip()
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (
            b"access-control-allow-headers",
            names if CORS_HEADERS.fullmatch(names) else b"authorization, content-type",
        ),
        (b"access-control-max-age", b"600"),
        (b"content-length", b"0"),
        (b"vary", b"Access-Control-Request-Headers"),
    ]
    if asked.get(b"access-control-request-private-network") == b"true":
        headers.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _too_large(most: int) -> HTTPProblem:
    return HTTPProblem(
        413,
        "body_too_large",
        f"the body is larger than {most:,} bytes",
        headers={"Connection": "close"},
    )


def _name(host: str) -> str:
    """Return the name in a ``Host`` header, without the port.

    >>> _name("localhost:8000"), _name("[::1]:8000"), _name("::1")
    ('localhost', '::1', '::1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return name if name and port.isdigit() and ":" not in name else host


MAX_HEAD = 2**16
"""Maximum bytes of a request's line and headers, and of what is between or after parts of its body."""
HEAD_TIMEOUT = 30.0
"""Seconds until the head is complete, or until the rest of a body that is not read has arrived."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection that ends if a request is too large outside of its body, or does not arrive in time.

    The application limits the body while it reads it. The rest of a body that it has answered
    already, such as one without a key, is ignored, but not for ever.
    """

    head_timeout = HEAD_TIMEOUT
    _in_head = True
    _size = 0  # bytes since the start of the head, or since the last part of the body
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read data, unless the head or the trailers are too large."""
        self._size += len(data)
        if self._in_head and self._timer is None:
            self._start_timer()
        super().data_received(data)
        if self._size > MAX_HEAD and not self.transport.is_closing():
            if self._in_head or not self.cycle.response_started:
                self.send_400_response("The headers are too large.")
            else:
                self.transport.close()

    def on_headers_complete(self) -> None:
        """Read the body from now on."""
        self._in_head, self._size = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header of the head; trailers are ignored."""
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Read a part of the body."""
        self._size = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect the head of another request."""
        super().on_message_complete()
        self._in_head, self._size = True, 0
        self._stop_timer()  # of the rest of a body
        # the rest of the body has ended the time limit of an idle connection
        if self.cycle.response_complete:
            self._start_timer()

    def on_response_complete(self) -> None:
        """Limit the time in which the rest of the body may arrive."""
        super().on_response_complete()
        if not self._in_head and self._timer is None and not self.transport.is_closing():
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_timeout, self._end_late_request)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_late_request(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
