"""Engines that report text as it arrives: the pieces form the completion, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compound.core.engine import Completion, Message, Request
from compound.core.errors import TransientError
from compound.engines.litellm import LiteLLMEngine
from fake_openai import FakeOpenAI, events, fake_openai

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


USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
EVERY_END = ("finish", "usage", "done")


def body(pieces: Sequence[str], end: Sequence[str] = EVERY_END) -> bytes:
    """Return a stream of pieces of a text, and of the kinds of chunks after them."""
    head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "tiny"}

    def chunk(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    chunks = [chunk({"content": piece}) for piece in pieces]
    chunks += [chunk({}, "stop")] * ("finish" in end)
    chunks += [{**head, "choices": [], "usage": USAGE}] * ("usage" in end)
    found = events(*chunks)
    return found if "done" in end else found.removesuffix(b"data: [DONE]\n\n")


@contextmanager
def serving(*stream: Any) -> Iterator[tuple[FakeOpenAI, LiteLLMEngine]]:
    """Serve a stream; yields the server and an engine that calls it."""
    with fake_openai(lambda path, sent: (200, "text/event-stream", body(*stream))) as fake:
        settings: dict[str, Any] = {"api_base": fake.url, "api_key_env": "TINY_KEY"}
        yield fake, LiteLLMEngine("openai/tiny", **settings, price=(1.0, 10.0))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "secret-1")


def request(**settings: Any) -> Request:
    return Request((Message("user", "Which river crosses Lima?"),), **settings)


def test_a_remote_answer_is_reported_in_pieces_and_charged_as_a_whole() -> None:
    with serving(["The", " Rí", "mac", "."]) as (server, lm):
        pieces, completion = asyncio.run(streamed(lm, request()))
    assert pieces == ["The", " Rí", "mac", "."]
    assert completion.text == "The Rímac."
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (9, 4)
    assert completion.usage.cost == pytest.approx((9 + 40) / 1e6)
    assert server.requests[0]["stream_options"] == {"include_usage": True}


def test_text_after_a_stop_string_is_not_reported() -> None:
    with serving(["one", "\nQue", "stion: two"]) as (_, lm):
        pieces, completion = asyncio.run(streamed(lm, request(stop=("\nQuestion",))))
    assert "".join(pieces) == completion.text == "one"


@pytest.mark.parametrize("pieces", [["The", " Rí"], []])
def test_a_stream_that_a_proxy_ends_early_is_a_transient_failure(pieces: list[str]) -> None:
    with serving(pieces, ()) as (_, lm), pytest.raises(TransientError, match="before the end"):
        asyncio.run(streamed(lm, request()))


@pytest.mark.parametrize("end", [("finish",), ("done",)])
def test_a_stream_without_usage_is_charged_its_worst_case(end: tuple[str, ...]) -> None:
    with serving(["The", " Rí"], end) as (_, lm):
        _, completion = asyncio.run(streamed(lm, request()))
    assert completion.text == "The Rí"
    assert completion.usage == lm.worst_case(request())


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
