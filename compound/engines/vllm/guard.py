"""Script and middleware that vLLM's processes load, with the standard library only.

``python guard.py COMMAND …`` runs a command until its standard input is closed. The process that
starts a server through this script holds the other end. When that process ends for any reason, even
``kill -9``, the system closes the pipe, and the script ends the command with all its child
processes. It requires POSIX.

`KeyRequired` rejects every request without the server's key. vLLM checks the key only below ``/v1``
and a few other prefixes. The routes of its development mode, which sleep mode needs, include one
that calls any method of a worker; without the key they are open to all users of the machine. vLLM
imports a copy of this file.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

GRACE = 10.0  # seconds between SIGTERM and SIGKILL


def main(command: Sequence[str]) -> int:
    """Run the command in a new process group, and return its exit code."""
    # Signals write to a pipe, so that one `select` waits for them and for the standard input.
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # a handler is required for the byte to be written
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    stopping = False
    while child.poll() is None and not stopping:
        ready, _, _ = select.select([0, signals], [], [])
        stopping = 0 in ready or (
            signals in ready and bool(set(os.read(signals, 64)) - {signal.SIGCHLD})
        )
    if child.poll() is None:
        _signal(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    _signal(child.pid, signal.SIGKILL)  # the rest of the group, even if the command ended by itself
    return child.wait()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class KeyRequired:
    """ASGI middleware that compares the header ``Authorization`` with the variable VLLM_API_KEY."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer 401 to a request without the key, and pass on all others."""
        given = [
            value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"
        ]
        authorized = len(given) == 1 and hmac.compare_digest(given[0], self._expected)
        if scope["type"] not in ("http", "websocket") or authorized:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
