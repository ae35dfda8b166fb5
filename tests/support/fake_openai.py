"""A server with OpenAI's API that answers from a script, on loopback and a free port."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, dict[str, Any]], tuple[int, str, bytes]]


@dataclass
class FakeOpenAI:
    """The address, and the requests with their authorization."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)  # of each answer, beside the usual ones


def chat(message: dict[str, Any], finish: str = "stop", **more: Any) -> bytes:
    document = {
        "id": "up-1",
        "object": "chat.completion",
        "created": 7,
        "model": "up",
        "vendor_field": {"kept": 1},
        "choices": [
            {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
        **more,
    }
    return json.dumps(document).encode()


def events(*chunks: Any) -> bytes:
    return (
        b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks) + b"data: [DONE]\n\n"
    )


@contextmanager
def fake_openai(answer: Answer) -> Iterator[FakeOpenAI]:
    """Serve answers: ``answer(path, document)`` returns the status, the content type and the body."""
    fake = FakeOpenAI("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.requests.append(document)
            fake.keys.append(self.headers.get("Authorization", ""))
            status, kind, body = answer(self.path, document)
            self.send_response(status)
            for name, value in {"Content-Type": kind, **fake.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Many(ThreadingHTTPServer):
        request_queue_size = 128

    server = Many(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
