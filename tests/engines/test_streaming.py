"""Engines that report text as it arrives: the pieces form the completion, and nothing else changes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from compound.core.engine import Completion, Engine, Message, Request, StreamingEngine
from compound.core.errors import TransientError
from compound.engines.litellm import LiteLLMEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Accessing the 'model_:DeprecationWarning"
    ),  # litellm's, of pydantic
]


async def streamed(lm: Any, request: Request) -> tuple[list[str], Completion]:
    pieces: list[str] = []
    try:
        completion = await lm.stream(request, pieces.append)
        await asyncio.sleep(0)
        return pieces, completion
    finally:
        await lm.aclose()


class SseServer:
    """An OpenAI-compatible server that streams chunks.

    Args:
        pieces: the pieces of the text.
        cut: whether it ends the connection after them.
        end: the kinds of chunks that it sends after them.
    """

    def __init__(
        self,
        pieces: list[str],
        *,
        cut: bool = False,
        end: tuple[str, ...] = ("finish", "usage", "done"),
    ) -> None:
        self.received: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.received.append(
                    json.loads(self.rfile.read(int(self.headers["content-length"])))
                )
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for piece in pieces:
                    self.send({"content": piece}, None)
                if cut:
                    self.close_connection = True
                    return
                if "finish" in end:
                    self.send({}, "stop")
                if "usage" in end:
                    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
                    self.send(None, None, usage=usage)
                if "done" in end:
                    self.chunk(b"data: [DONE]\n\n")
                self.chunk(b"")

            def send(self, delta: Any, finish: str | None, **more: Any) -> None:
                choices = (
                    [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
                )
                body = {
                    "id": "1",
                    "object": "chat.completion.chunk",
                    "created": 0,
                    "model": "tiny",
                    "choices": choices,
                    **more,
                }
                self.chunk(f"data: {json.dumps(body)}\n\n".encode())

            def chunk(self, data: bytes) -> None:
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

            def log_message(self, *_: Any) -> None:
                pass

            protocol_version = "HTTP/1.1"

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self) -> SseServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def engine(self) -> LiteLLMEngine:
        return LiteLLMEngine(
            "openai/tiny",
            api_base=f"http://127.0.0.1:{self.http.server_port}/v1",
            api_key_env="TINY_KEY",
            price=(1.0, 10.0),
        )


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "secret-1")


def request(**settings: Any) -> Request:
    return Request((Message("user", "Which river crosses Lima?"),), **settings)


def test_a_remote_answer_is_reported_in_pieces_and_charged_as_a_whole() -> None:
    with SseServer(["The", " Rí", "mac", "."]) as server:
        pieces, completion = asyncio.run(streamed(server.engine(), request()))
    assert pieces == ["The", " Rí", "mac", "."]
    assert completion.text == "The Rímac."
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (9, 4)
    assert completion.usage.cost == pytest.approx((9 + 40) / 1e6)
    assert server.received[0]["stream_options"] == {"include_usage": True}


def test_text_after_a_stop_string_is_not_reported() -> None:
    with SseServer(["one", "\nQue", "stion: two"]) as server:
        pieces, completion = asyncio.run(streamed(server.engine(), request(stop=("\nQuestion",))))
    assert "".join(pieces) == completion.text == "one"


def test_a_stream_that_ends_early_is_a_transient_failure() -> None:
    with SseServer(["The", " Rí"], cut=True) as server, pytest.raises(TransientError):
        asyncio.run(streamed(server.engine(), request()))


@pytest.mark.parametrize("pieces", [["The", " Rí"], []])
def test_a_stream_that_a_proxy_ends_early_is_a_transient_failure(pieces: list[str]) -> None:
    with (
        SseServer(pieces, end=()) as server,
        pytest.raises(TransientError, match="ended before the end"),
    ):
        asyncio.run(streamed(server.engine(), request()))


@pytest.mark.parametrize("end", [("finish",), ("done",)])
def test_a_stream_without_usage_is_charged_its_worst_case(end: tuple[str, ...]) -> None:
    with SseServer(["The", " Rí"], end=end) as server:
        lm = server.engine()
        _, completion = asyncio.run(streamed(lm, request()))
    assert completion.text == "The Rí"
    assert completion.usage == lm.worst_case(request())


def test_engines_say_by_their_methods_whether_they_stream(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    with SseServer([]) as server:
        lm = server.engine()
        assert isinstance(lm, Engine)
        assert isinstance(lm, StreamingEngine)


@pytest.mark.parametrize("settings", [{}, {"stop": ("e", "th")}, {"temperature": 1.0, "seed": 3}])
def test_the_pieces_of_a_local_answer_form_the_completion(
    make_model: Callable[..., Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    pytest.importorskip("torch")
    from compound.engines.local.engine import TransformersEngine

    folder = str(make_model(tmp_path / "model"))
    lm = TransformersEngine(folder, dtype="float32", max_wait_ms=1.0)
    asked = request(max_tokens=16, **settings)
    pieces, completion = asyncio.run(streamed(lm, asked))
    assert "".join(pieces) == completion.text
    assert len(pieces) > 1 or len(completion.text) < 3

    async def whole() -> Completion:
        try:
            return await lm.generate(asked)
        finally:
            await lm.aclose()

    assert asyncio.run(whole()).text == completion.text
