"""The engine of OpenAI's API: answers that are none, streams that end early, and bounds of what is billed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import Any

import pytest

from compound.core.engine import MAX_IMAGE_TOKENS, Completion, Forward, Message, Request
from compound.core.errors import TransientError
from compound.engines.credentials import isolated_client
from compound.engines.openai import OpenAIEngine, StreamedAnswer, _max_bytes
from compound.engines.server_api import ServerAPI
from fake_openai import chat, events, fake_openai

CHAT = "chat/completions"
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def delta(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


def forwarded(
    route: str = CHAT, *, stream: bool = False, max_tokens: int = 50, **body: object
) -> Request:
    forward = Forward(
        route, json.dumps({"messages": [{"role": "user", "content": "Hi"}], **body}), stream
    )
    return Request((Message("user", "Hi"),), max_tokens=max_tokens, forward=forward)


def ask(body: bytes, request: Request, *, stream: bool = False) -> tuple[list[str], Completion]:
    """Return the reported pieces and the completion of a request that a server answers with a body."""
    pieces: list[str] = []
    kind = "text/event-stream" if stream else "application/json"

    async def run(url: str) -> Completion:
        engine = OpenAIEngine("m", api_base=url, price=(1.0, 2.0))
        try:
            return await (
                engine.stream(request, pieces.append) if stream else engine.generate(request)
            )
        finally:
            await engine.aclose()

    with fake_openai(lambda path, document: (200, kind, body)) as fake:
        return pieces, asyncio.run(run(fake.url))


PLAIN = Request((Message("user", "Hi"),), max_tokens=50)


@pytest.mark.parametrize("stream", [False, True])
def test_the_message_of_an_error_is_bounded(stream: bool) -> None:
    """A server chooses it; records and the terminal show it."""
    error = {"error": {"message": "overloaded\n" + "x" * 10_000}}
    body = events(error) if stream else json.dumps(error).encode()
    with pytest.raises(TransientError) as caught:
        ask(body, Request((Message("user", "Hi"),), max_tokens=50), stream=stream)
    assert "overloaded" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_number_of_alternatives_in_the_bound_of_an_answer_is_limited() -> None:
    most = _max_bytes(forwarded(logprobs=True, top_logprobs=20))
    assert _max_bytes(forwarded(logprobs=True, top_logprobs=10**9)) == most


@pytest.mark.parametrize("request_", [PLAIN, forwarded()], ids=["own", "forwarded"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "upstream overloaded", "code": 503}}, "upstream overloaded"),
        ({"choices": [], "usage": USAGE}, "the answer has no choices"),
        ({"choices": None, "usage": USAGE}, "the answer has no choices"),
        (
            {"choices": [{"message": {"content": "Li"}, "finish_reason": "error"}]},
            "reports an error",
        ),
    ],
)
def test_an_answer_without_a_choice_is_a_transient_failure(
    body: dict[str, Any], message: str, request_: Request
) -> None:
    with pytest.raises(TransientError, match=message) as caught:
        ask(json.dumps(body).encode(), request_)
    worst = OpenAIEngine("m", price=(1.0, 2.0)).worst_case(request_)
    assert caught.value.charged is not None
    expected = 5 if "usage" in body else worst.prompt_tokens
    assert caught.value.charged.prompt_tokens == expected


@pytest.mark.parametrize("request_", [PLAIN, forwarded(stream=True)], ids=["own", "forwarded"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (events(delta("Li"), {"error": {"message": "engine died", "code": 500}}), "engine died"),
        (
            events(delta("Li"), delta("ma")).removesuffix(b"data: [DONE]\n\n"),
            "ended before the end",
        ),
        (b"", "ended before the end"),
    ],
)
def test_a_stream_with_an_error_or_without_an_end_is_a_transient_failure(
    body: bytes, message: str, request_: Request
) -> None:
    with pytest.raises(TransientError, match=message):
        ask(body, request_, stream=True)


@pytest.mark.parametrize(
    "body",
    [
        events(delta("Li"), delta("ma")),
        events(delta("Li"), delta("ma", "stop")).removesuffix(b"[DONE]\n\n"),
    ],
    ids=["done", "finish_reason"],
)
def test_a_stream_with_either_end_is_complete(body: bytes) -> None:
    pieces, completion = ask(body, PLAIN, stream=True)
    assert ("".join(pieces), completion.text) == ("Lima", "Lima")


def test_a_stream_of_responses_needs_its_last_event() -> None:
    created = {"type": "response.created", "response": {"status": "in_progress", "output": []}}
    part = {"type": "output_text", "text": "Lima"}
    response = {"status": "completed", "output": [{"type": "message", "content": [part]}]}
    last = {"type": "response.completed", "response": response}
    request = forwarded("responses", stream=True)
    plain = events(created, last).removesuffix(b"data: [DONE]\n\n")
    assert ask(plain, request, stream=True)[1].text == "Lima"
    with pytest.raises(TransientError, match="ended before the end"):
        ask(events(created).removesuffix(b"data: [DONE]\n\n"), request, stream=True)
    with pytest.raises(TransientError, match="try later"):
        ask(
            events(created, {"type": "error", "code": "x", "message": "try later"}),
            request,
            stream=True,
        )


def test_log_probabilities_of_a_stream_are_joined() -> None:
    answer = StreamedAnswer(CHAT)
    for token in ("Li", "ma"):
        choice = {
            "index": 0,
            "delta": {"content": token},
            "logprobs": {"content": [{"token": token}]},
        }
        answer.feed(f"data: {json.dumps({'choices': [choice]})}\n\n")
    (choice,) = answer.document()["choices"]  # type: ignore[misc]
    assert choice["logprobs"] == {"content": [{"token": "Li"}, {"token": "ma"}]}


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        {"prompt_tokens": None, "completion_tokens": None},
        {"prompt_tokens": 0, "completion_tokens": 0},
    ],
)
def test_missing_token_counts_are_charged_in_full(
    usage: dict[str, int | None] | None,
) -> None:
    choice = {"message": {"content": "Lima"}, "finish_reason": "stop"}
    _, completion = ask(json.dumps({"choices": [choice], "usage": usage}).encode(), PLAIN)
    assert completion.usage == OpenAIEngine("m", price=(1.0, 2.0)).worst_case(PLAIN)


def test_the_worst_case_of_images_is_that_of_the_most_expensive_provider() -> None:
    engine = OpenAIEngine("m", price=(1.0, 2.0))
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    plain, images = (
        engine.worst_case(forwarded(messages=[{"role": "user", "content": content}])).prompt_tokens
        for content in ([], [part, part])
    )
    assert 2 * MAX_IMAGE_TOKENS < images - plain < 2 * MAX_IMAGE_TOKENS + 1000


def test_several_answers_with_log_probabilities_are_not_too_large() -> None:
    tokens, n = 1000, 2
    alternative = {
        "token": " hello",
        "logprob": -12.345678710937,
        "bytes": [32, 104, 101, 108, 108, 111],
    }
    listed = [{**alternative, "top_logprobs": [alternative] * 20}] * tokens
    choice = {
        "message": {"content": "hello"},
        "finish_reason": "stop",
        "logprobs": {"content": listed},
    }
    body = json.dumps({"choices": [choice] * n, "usage": USAGE}).encode()
    request = forwarded(max_tokens=tokens, n=n, logprobs=True, top_logprobs=20)
    assert ask(body, request)[1].text == "hello"


def test_idle_connections_are_closed_before_servers_close_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvicorn, and so vLLM, closes them after 5 s; a request sent at that moment is lost and charged."""
    httpx, kept = pytest.importorskip("httpx"), list[float]()

    class Noted(httpx.AsyncClient):  # type: ignore[misc, name-defined]
        def __init__(self, **settings: Any) -> None:
            kept.append(settings["limits"].keepalive_expiry)
            super().__init__(**settings)

    monkeypatch.setattr(httpx, "AsyncClient", Noted)
    isolated_client("authorization", "Bearer x")
    ServerAPI("http://127.0.0.1:9/v1", "m")
    assert len(kept) == 2
    assert max(kept) < 5


async def test_the_time_limit_of_a_request_replaces_that_of_the_engine() -> None:
    answers = threading.Event()

    def slow(path: str, document: dict[str, Any]) -> tuple[int, str, bytes]:
        answers.wait(10)
        return 200, "application/json", chat({"content": "late"})

    with fake_openai(slow) as fake:
        engine = OpenAIEngine("m", api_base=fake.url, timeout=60.0)
        async with contextlib.aclosing(engine):
            with pytest.raises(TransientError, match=r"completely within 0\.05 s"):
                await engine.generate(Request((Message("user", "Hi"),), timeout=0.05))
            answers.set()
