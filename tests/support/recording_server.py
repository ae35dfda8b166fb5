"""An HTTP server on loopback that records requests and returns prepared answers."""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self


class Received(NamedTuple):
    """A request; the names of headers are in lower case, and headers that occur twice are listed twice."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


class RecordingServer:
    """Records requests, and answers with a status, headers and a body."""

    def __init__(self) -> None:
        self.status, self.body = 200, b'{"ok": true}'
        self.headers: dict[str, str] = {}
        self.received: list[Received] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                sent = [(name.lower(), value) for name, value in self.headers.items()]
                received = Received(self.command, self.path, sent, self.rfile.read(size))
                outer.received.append(received)
                status, headers, body = outer.answer(received)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer  # noqa: N815 - names that the library calls

            def log_message(self, *_: Any) -> None:
                pass

        class Many(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, *request: Any) -> None:
                """Print errors, except for that of a client that has gone."""
                if not isinstance(sys.exception(), ConnectionError):
                    super().handle_error(*request)

        self._http = Many(("127.0.0.1", 0), Handler)
        serve = functools.partial(self._http.serve_forever, poll_interval=0.01)
        threading.Thread(target=serve, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, received: Received) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the body of the answer to a request."""
        body = self.respond()
        return self.status, self.headers, body

    def respond(self) -> bytes:
        """Return the body of the answer to the last request."""
        return self.body

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Self]:
        """Run a server for the duration of a block."""
        server = cls()
        try:
            yield server
        finally:
            server.close()


class ListingServer(RecordingServer):
    """An MCP server with one tool, ``go``, whose answers are invalid."""

    tool: Mapping[str, Any] = {}

    def respond(self) -> bytes:
        """Answer the last request."""
        asked = json.loads(self.received[-1].body or "{}")
        self.status = 200 if "id" in asked else 202
        self.headers = {"content-type": "application/json"}
        version = asked.get("params", {}).get("protocolVersion")
        info = {"name": "x", "version": "1"}
        results = {
            "initialize": {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": info,
            },
            "tools/list": {"tools": [{"name": "go", **self.tool}]},
            "tools/call": {"content": [{"type": "unknown"}]},
        }
        found = {
            "jsonrpc": "2.0",
            "id": asked.get("id"),
            "result": results.get(asked.get("method"), {}),
        }
        return json.dumps(found).encode()
