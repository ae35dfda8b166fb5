"""HTTP protocol for uvicorn that bounds the head of a request, which uvicorn reads without a limit."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 2**16  # bytes of a request's line and headers
HEAD_TIMEOUT = 30.0  # seconds until they are complete


class BoundedProtocol(HttpToolsProtocol):
    """A connection that ends if the head of a request is too large, or does not arrive in time."""

    head_timeout = HEAD_TIMEOUT
    _in_head = True
    _size = 0
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
        """Read data, unless the head is too large."""
        if self._in_head:
            self._size += len(data)
            if self._timer is None:
                self._start_timer()
        super().data_received(data)
        if self._in_head and self._size > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The headers are too large.")

    def on_headers_complete(self) -> None:
        """Read the body from now on."""
        self._in_head, self._size = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the head of another request."""
        super().on_message_complete()
        self._in_head = True

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_timeout, self._end_late_request)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_late_request(self) -> None:
        self._timer = None
        if self._in_head and not self.transport.is_closing():
            self.transport.close()
