"""Connections of engines that are closed, and requests that are cancelled, while a connection is made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from compound.core.engine import NO_USAGE, Message, Request
from compound.core.errors import TransientError
from compound.engines.litellm import LiteLLMEngine
from compound.engines.openai import OpenAIEngine
from compound.engines.server_api import ServerAPI
from fake_openai import FakeOpenAI, chat, fake_openai
from vllm_requests import until

anyio = pytest.importorskip("anyio")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Accessing the 'model_:DeprecationWarning"
    ),  # litellm's, of pydantic
]
REQUEST = Request((Message("user", "Hi"),), max_tokens=50)
Close = Callable[[], Awaitable[None]]


@dataclass
class Connecting:
    """Connections that are made while the test runs.

    Attributes:
        streams: the connections.
        begun: number of connections begun.
        may_connect: cleared to hold back new connections.
        cancel: whether to cancel the task that has made a connection.
    """

    streams: list[Any] = field(default_factory=list)
    begun: int = 0
    may_connect: asyncio.Event = field(default_factory=asyncio.Event)
    cancel: bool = False

    @property
    def left_open(self) -> int:
        return sum(not stream._transport.is_closing() for stream in self.streams)


@pytest.fixture
def connecting(monkeypatch: pytest.MonkeyPatch) -> Connecting:
    connect, made = anyio.connect_tcp, Connecting()
    made.may_connect.set()

    async def connect_tcp(*args: Any, **settings: Any) -> Any:
        made.begun += 1
        await made.may_connect.wait()
        stream = await connect(*args, **settings)
        made.streams.append(stream)
        if made.cancel:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        return stream

    monkeypatch.setattr(anyio, "connect_tcp", connect_tcp)
    return made


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    """A server that keeps connections open."""
    answer = chat({"content": "four"})
    with fake_openai(lambda path, document: (200, "application/json", answer)) as fake:
        yield fake


def send(kind: str, server: FakeOpenAI) -> tuple[Callable[[], Awaitable[object]], Close]:
    """Return what sends one request by an engine, and what closes the engine."""
    if kind == "vllm":
        api = ServerAPI(server.url, "m")
        return lambda: api.ask("chat/completions", {"messages": []}, 5.0), api.aclose
    if kind == "openai":
        openai = OpenAIEngine("m", api_base=server.url)
        return lambda: openai.generate(REQUEST), openai.aclose
    lm = LiteLLMEngine("openai/m", api_base=server.url, price=(0.0, 0.0))
    return lambda: lm.generate(REQUEST), lm.aclose


@pytest.mark.parametrize("kind", ["vllm", "openai", "litellm"])
async def test_no_connection_is_left_open_if_the_engine_is_closed_while_it_connects(
    kind: str, server: FakeOpenAI, connecting: Connecting
) -> None:
    """httpx closes only connections that exist, and a request that is connecting goes on."""
    generate, close = send(kind, server)
    connecting.may_connect.clear()
    calls = [asyncio.ensure_future(generate()) for _ in range(3)]
    await until(lambda: connecting.begun == 3)
    closing = asyncio.ensure_future(close())
    await asyncio.sleep(0.05)
    connecting.may_connect.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    await closing
    assert connecting.left_open == 0
    assert [type(each) for each in found] == [TransientError] * 3
    assert server.requests == []


@pytest.mark.parametrize("kind", ["vllm", "openai", "litellm"])
async def test_connections_are_closed_also_if_closing_is_cancelled(
    kind: str, server: FakeOpenAI, connecting: Connecting
) -> None:
    generate, close = send(kind, server)
    await asyncio.gather(*(generate() for _ in range(3)))
    assert connecting.left_open == len(connecting.streams) > 0
    closing = asyncio.ensure_future(close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await until(lambda: connecting.left_open == 0)


async def test_requests_that_are_cancelled_as_they_connect_take_no_place(
    server: FakeOpenAI, connecting: Connecting
) -> None:
    """httpcore neither uses the connection of such a request again nor removes it."""

    api = ServerAPI(server.url, "m", connections=1)
    connecting.cancel = True
    calls = [api.ask("chat/completions", {"messages": []}, 5.0) for _ in range(10)]
    found = await asyncio.gather(*map(asyncio.ensure_future, calls), return_exceptions=True)
    assert {type(each) for each in found} == {asyncio.CancelledError}
    connecting.cancel = False
    try:
        assert await api.ask("chat/completions", {"messages": []}, 5.0) == json.loads(
            chat({"content": "four"})
        )
    finally:
        await api.aclose()
    assert connecting.left_open == 0


async def test_a_request_that_waits_too_long_for_a_place_is_not_charged(
    server: FakeOpenAI, connecting: Connecting
) -> None:
    api = ServerAPI(server.url, "m", connections=3)
    connecting.may_connect.clear()
    places = 3
    others = [
        asyncio.ensure_future(api.ask("chat/completions", {"messages": []}, 5.0))
        for _ in range(places)
    ]
    await until(lambda: connecting.begun == places)
    late = asyncio.ensure_future(api.ask("chat/completions", {"messages": []}, 0.05))
    await asyncio.wait([late])
    connecting.may_connect.set()
    await asyncio.gather(*others)
    await api.aclose()
    error = late.exception()
    assert isinstance(error, TransientError)
    assert "had no free place for a request within 0.05 s" in error.message
    assert error.charged == NO_USAGE
    assert len(server.requests) == 3
