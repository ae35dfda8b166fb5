"""HTTP client for MCP servers, whose answers are bounded: the client library reads JSON answers whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import httpx2

MAX_ANSWER = 16 * 2**20  # bytes of an answer; an event of a stream may have 1 MiB
EVENTS = "text/event-stream"  # may stay open for the whole session


def bounded_client(headers: Mapping[str, str], timeout: float) -> httpx2.AsyncClient:
    """Return a client that follows no redirect, ignores the environment, and reads bounded answers."""
    return httpx2.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(timeout),
        trust_env=False,
        follow_redirects=False,
        event_hooks={"response": [_bound]},
    )


async def _bound(response: httpx2.Response) -> None:
    """Bound the body of an answer.

    Raises:
        httpx2.RemoteProtocolError: it is compressed, which was not requested.
    """
    if response.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise httpx2.RemoteProtocolError("the answer is compressed, which was not requested")
    if not response.headers.get("content-type", "").lower().startswith(EVENTS):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream)


class _BoundedStream(httpx2.AsyncByteStream):  # type: ignore[misc]  # mypy does not see its base
    """A body of limited size."""

    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        total = 0
        async for chunk in self._inner:
            total += len(chunk)
            if total > MAX_ANSWER:
                raise httpx2.RemoteProtocolError(
                    f"the answer is larger than {MAX_ANSWER // 2**20} MiB"
                )
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()
