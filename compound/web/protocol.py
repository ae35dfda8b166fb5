"""HTTP protocol for uvicorn with limits where uvicorn has none: on heads, trailers and refused bodies."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 2**16
"""Maximum bytes of a request's line and headers, and of what is between or after parts of its body."""
HEAD_TIMEOUT = 30.0
"""Seconds until the head is complete, or until the rest of a body that is not read has arrived."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection that ends if a request is too large outside of its body, or does not arrive in time.

    The application limits the body while it reads it. The rest of a body that it has answered already, such
    as one without a key, is ignored, but not for ever.
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
        if (
            self.cycle.response_complete
        ):  # the rest of the body has ended the time limit of an idle connection
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
