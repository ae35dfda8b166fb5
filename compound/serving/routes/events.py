"""Server-sent events: answers that are sent piece by piece, and end when the client does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from compound.serving.service import ClientGone, while_connected

HEARTBEAT = 15.0  # seconds between comments that keep an idle connection open
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies must not collect the events


def event(name: str, document: object) -> bytes:
    r"""Return a named event.

    >>> event("usage", {"calls": 1})
    b'event: usage\ndata: {"calls":1}\n\n'
    """
    return b"event: " + name.encode() + b"\ndata: " + to_json(document, inf_nan_mode="null") + b"\n\n"


def data(document: object) -> bytes:
    """Return an event without a name, as OpenAI's clients read it."""
    return b"data: " + to_json(document, inf_nan_mode="null") + b"\n\n"


class EventResponse(Response):
    """An answer of server-sent events; when the client disconnects, the generator is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], run: str) -> None:
        super().__init__(headers={**HEADERS, "X-Run-Id": run})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102
        with contextlib.suppress(ClientGone):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:
            async for chunk in _with_heartbeat(events):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_heartbeat(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield chunks, and a comment whenever none arrives for a while."""
    following = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait({following}, timeout=HEARTBEAT)
            if not following.done():
                yield b": waiting\n\n"
                continue
            chunk = following.result()
            if chunk is None:
                return
            yield chunk
            following = asyncio.ensure_future(anext(events, None))
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await following
