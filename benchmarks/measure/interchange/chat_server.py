"""A server of chat completions on loopback, whose answers are a function of the messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

ChatScript = Callable[[Sequence[Mapping[str, str]]], str]


class ChatServer:
    """Server of ``POST /v1/chat/completions`` whose answers are a function of the messages.

    Usage counts words as tokens. Use it as a context manager.

    Args:
        script: returns the answer to a list of messages with ``role`` and ``content``.
        model: name of the model that the answers state.

    Attributes:
        requests: the bodies of the requests, in order of arrival.
        keys: the key of each request, or an empty text.

    Example:
        >>> import urllib.request
        >>> with ChatServer(lambda messages: messages[-1]["content"].upper()) as server:
        ...     body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
        ...     asked = urllib.request.Request(f"{server.url}/chat/completions", body)
        ...     with urllib.request.urlopen(asked) as answer:
        ...         json.load(answer)["choices"][0]["message"]["content"]
        'HI'
    """

    def __init__(self, script: ChatScript, *, model: str = "scripted") -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        answer, keys = self._answer, self.keys

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                """Answer one request."""
                keys.append(self.headers.get("Authorization", "").removeprefix("Bearer "))
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, document = answer(self.path, body)
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Keep the terminal quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._script, self._model = script, model
        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )

    @property
    def url(self) -> str:
        """Base URL for clients, ending in ``/v1``."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.requests.append(body)
        if path.rstrip("/") != "/v1/chat/completions":
            return 404, {"error": {"message": f"no route {path}"}}
        try:
            text = self._script(body["messages"])
        except Exception as error:  # noqa: BLE001 - a mistake in the script is shown to the client
            return 500, {
                "error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}
            }
        asked = sum(len(str(message["content"]).split()) for message in body["messages"])
        answered = len(text.split())
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        usage = {
            "prompt_tokens": asked,
            "completion_tokens": answered,
            "total_tokens": asked + answered,
        }
        return 200, {
            "id": f"chatcmpl-{len(self.requests)}",
            "object": "chat.completion",
            "created": 0,
            "model": self._model,
            "choices": [choice],
            "usage": usage,
        }
