"""Middleware of a vLLM server that rejects every request without the server's key.

vLLM checks the key only below ``/v1`` and a few other prefixes. The routes of its development mode, which
sleep mode needs, include one that calls any method of a worker. Without the key, they are open to all
users of the machine.

A copy of this file is imported by vLLM, in an environment without `compound`: standard library only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class KeyRequired:
    """ASGI middleware that compares the header ``Authorization`` with the variable VLLM_API_KEY.

    Args:
        app: the application.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer 401 to a request without the key, and pass on all others."""
        if scope["type"] not in ("http", "websocket") or self._is_authorized(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _is_authorized(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
