"""HTTP as engines need it: bodies are bounded, nothing is sent twice, and what happened on the wire is known.

A client library turns every failure into errors of its own, and some send a request again by themselves.
Whether a request was sent at all, and how far its answer came, decides what it is charged: so the transport
itself notes it in the `Exchange` of the call.
"""

from __future__ import annotations

import contextlib
import ssl
import zlib
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import httpx

from compound.components.engines.remote import charged_for, wanted_wait

if TYPE_CHECKING:
    from collections.abc import Mapping

    Mounts = Mapping[str, httpx.AsyncBaseTransport | None]  # by pattern of addresses

ENCODINGS = {"gzip", "x-gzip", "deflate"}
ERROR_BODY = 2**16  # bytes of an error's body that are kept
UNSENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
    httpx.ProxyError,
)
UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=256)  # the throttle limits them


@dataclass(slots=True)
class Exchange:
    """A request and its answer.

    Attributes:
        limit: the most bytes of the answer's body, after decompression.
        sent: whether the server may have the request.
        to: the method and address of the request.
        status: of the answer; 0 until its headers have come.
        wait: the seconds that the server asks to wait.
        error: the beginning of the body of an answer that is an error.
        complete: whether the whole body has come.
        problem: what went wrong on the wire, in words.
    """

    limit: int = 2**26
    sent: bool = False
    to: str = ""
    status: int = 0
    wait: float | None = None
    error: bytes = b""
    complete: bool = False
    problem: str = ""

    def begin(self, to: str) -> None:
        """Note that a request is sent.

        Raises:
            Cut: the same one was sent before, and may have been answered and billed.
        """
        if self.sent and to == self.to and (not self.status or charged_for(self.status) is None):
            raise Cut(self.problem or "a request is not sent twice")
        self.sent, self.to, self.status, self.wait, self.error, self.complete = True, to, 0, None, b"", False


_CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


@contextlib.contextmanager
def exchange(limit: int) -> Iterator[Exchange]:
    """Note the requests that are sent in a block, in this task; only one is expected."""
    noted = Exchange(limit)
    token = _CURRENT.set(noted)
    try:
        yield noted
    finally:
        _CURRENT.reset(token)


class Cut(httpx.ReadError):
    """An answer did not come whole. After a `ConnectError`, litellm would send the request again."""


class Redirected(httpx.ReadError):
    """A server sent the request, and with it a key, to another place."""


class Wire(httpx.AsyncBaseTransport):
    """A transport that bounds answers and notes what happened.

    Args:
        inner: the transport beneath it.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request.

        Raises:
            Cut: it may have been received, but there is no whole answer.
            Redirected: the server names another place.
            httpx.NetworkError: it was not sent.
        """
        noted = _CURRENT.get() or Exchange()
        request.headers["accept-encoding"] = "identity"
        noted.begin(f"{request.method} {request.url}")
        try:
            response = await self.inner.handle_async_request(request)
        except UNSENT as error:
            noted.sent, noted.problem = False, _told(error)
            raise
        except httpx.TransportError as error:
            noted.problem = _told(error)
            raise Cut(noted.problem, request=request) from error
        noted.status, noted.wait = response.status_code, wanted_wait(response.headers)
        if 300 <= response.status_code < 400:
            await response.aclose()
            noted.problem = "the server redirects to another address; give that one, if you trust it"
            raise Redirected(noted.problem, request=request)
        headers = [
            (k, v)
            for k, v in response.headers.raw
            if k.lower() not in (b"content-encoding", b"content-length")
        ]
        body = _Body(response, noted)
        return httpx.Response(
            response.status_code, headers=headers, stream=body, extensions=response.extensions
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self.inner.aclose()


def guard_litellm(handlers: ModuleType) -> None:
    """Make the clients of litellm, which has no setting for this, use `Wire`.

    Args:
        handlers: its module ``litellm.llms.custom_httpx.http_handler``.
    """
    handler = handlers.AsyncHTTPHandler
    mounted = getattr(handler, "create_httpx_proxy_mounts", None)

    def transport(
        ssl_context: ssl.SSLContext | str | bool | None = None, ssl_verify: bool | None = None, **_: object
    ) -> Wire:
        verify = ssl_context if ssl_context is not None else ssl_verify is not False
        return Wire(httpx.AsyncHTTPTransport(verify=verify, limits=UNLIMITED))

    def mounts(transport: httpx.AsyncBaseTransport, **settings: object) -> Mounts | None:
        found: Mounts | None = (
            mounted(getattr(transport, "inner", transport), **settings) if mounted else None
        )
        return found and {pattern: inner and Wire(inner) for pattern, inner in found.items()}

    handler.create_async_transport = staticmethod(transport)
    handler.create_httpx_proxy_mounts = staticmethod(mounts)


def guarded(client: httpx.AsyncClient) -> httpx.AsyncClient:
    """Put `Wire` above every transport of a client, and return the client.

    httpx makes the transports of the user's proxies itself and has no setting to wrap them.
    """
    client._transport = Wire(client._transport)
    client._mounts = {pattern: inner and Wire(inner) for pattern, inner in client._mounts.items()}
    return client


class _Body(httpx.AsyncByteStream):
    """The body of an answer, decompressed, up to its limit."""

    def __init__(self, response: httpx.Response, noted: Exchange) -> None:
        self._response, self._noted = response, noted

    async def __aiter__(self) -> AsyncIterator[bytes]:
        noted = self._noted
        try:
            async for chunk in bounded(self._response.stream, self._response.headers, noted.limit):  # type: ignore[arg-type]
                if noted.status >= 400 and len(noted.error) < ERROR_BODY:
                    noted.error += chunk[:ERROR_BODY]
                yield chunk
        except httpx.TransportError as error:
            noted.problem = _told(error)
            raise Cut(noted.problem) from error
        noted.complete = True

    async def aclose(self) -> None:
        await self._response.aclose()


async def bounded(
    chunks: AsyncIterator[bytes], headers: Mapping[str, str], limit: int
) -> AsyncIterator[bytes]:
    """Yield a body decompressed, and never more than ``limit`` bytes of it.

    Raises:
        Cut: it is longer, or is compressed in an unknown or broken way.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in {*ENCODINGS, "identity", ""}:
        raise Cut(f"the answer is compressed by {encoding[:40]!r}, which was not asked for")
    unpack = zlib.decompressobj(47) if encoding in ENCODINGS else None
    total = 0
    async for chunk in chunks:
        try:
            piece = chunk if unpack is None else unpack.decompress(chunk, limit - total + 1)
        except zlib.error as error:
            raise Cut(f"the answer is not {encoding}: {error}") from None
        total += len(piece)
        if total > limit:
            raise Cut(f"the answer is longer than {limit:,} bytes, the most that max_tokens allows")
        yield piece


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
