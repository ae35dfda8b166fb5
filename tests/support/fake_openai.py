"""A server with OpenAI's API that answers from a script, on loopback and a free port."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from recording_server import Received, RecordingServer

Answer = Callable[[str, dict[str, Any]], tuple[int, str, bytes]]


class FakeOpenAI(RecordingServer):
    """Keeps the requests and their keys; `headers` are those of each answer, beside the usual ones."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.url += "/v1"
        self._script = answer
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []

    def answer(self, received: Received) -> tuple[int, dict[str, str], bytes]:
        document = json.loads(received.body)
        self.requests.append(document)
        self.keys.append(dict(received.headers).get("authorization", ""))
        status, kind, body = self._script(received.path, document)
        return status, {"Content-Type": kind, **self.headers}, body


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
    server = FakeOpenAI(answer)
    try:
        yield server
    finally:
        server.close()
