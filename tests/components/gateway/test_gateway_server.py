"""What a gateway admits, answers and records; each limit has a test."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from compound.components.gateway.documents import GatewayExchange
from compound.components.gateway.server import Gateway, GatewaySettings, gateway
from compound.components.gateway.sessions import AgentSession
from compound.core.errors import BudgetExhausted
from compound.core.web.problems import HTTPProblem

pytest.importorskip("fastapi")
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
ANSWER = {
    "id": "x",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


async def hello(exchange: GatewayExchange) -> Any:
    return {**ANSWER, "number": exchange.number}


def during_run(
    test: Callable[[httpx.AsyncClient, AgentSession, Gateway], Any],
    dispatch: Any = hello,
    limits: GatewaySettings | None = None,
    **settings: Any,
) -> None:
    """Run a test while a session is open; the client has its key."""

    async def run() -> None:
        async with gateway(limits) as server:
            session = AgentSession(dispatch, **settings)
            server.sessions[session.key] = session
            headers = {"Authorization": f"Bearer {session.key}"}
            try:
                async with httpx.AsyncClient(
                    base_url=server.base_url, headers=headers, trust_env=False, timeout=120
                ) as client:
                    await test(client, session, server)
            finally:
                server.sessions.pop(session.key, None)
                await session.close()

    asyncio.run(run())


def error_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["type"])


def test_a_request_is_answered_during_its_run_and_refused_after_it() -> None:
    async def test(client: httpx.AsyncClient, session: AgentSession, server: Gateway) -> None:
        assert (await client.post("/chat/completions", json=BODY)).json() == {**ANSWER, "number": 0}
        await session.close()
        answer = await client.post("/chat/completions", json=BODY)
        assert (answer.status_code, error_of(answer)) == (401, "run_ended")
        server.sessions.pop(session.key, None)
        answer = await client.post("/chat/completions", json=BODY)
        assert (answer.status_code, error_of(answer)) == (401, "invalid_key")

    during_run(test)


def test_it_listens_on_loopback_only() -> None:
    async def test(client: httpx.AsyncClient, session: AgentSession, server: Gateway) -> None:
        assert server.base_url.startswith("http://127.0.0.1:")
        assert server._server is not None
        addresses = {
            sock.getsockname()[0] for each in server._server.servers for sock in each.sockets
        }
        assert addresses == {"127.0.0.1"}

    during_run(test)


async def undeclared() -> Any:
    """Yield a body whose length is not declared."""
    yield b" " * 3300


JSON = {"Content-Type": "application/json"}
FOREIGN_KEYS = ["", "Bearer wrong", "Basic abc", "Bearer run-", "Bearer \xff"]
FOREIGN_HOSTS = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""]
FOREIGN_ORIGINS = ["https://evil.example", "null", "http://localhost:1"]


@pytest.mark.parametrize(
    ("request_", "status", "kind"),
    [
        *(
            (
                {"json": BODY, "headers": [(b"Authorization", k.encode("latin-1"))]},
                401,
                "invalid_key",
            )
            for k in FOREIGN_KEYS
        ),
        # DNS rebinding, pages of foreign origins, and a form of a page
        *(({"json": BODY, "headers": {"Host": host}}, 421, None) for host in FOREIGN_HOSTS),
        *(({"json": BODY, "headers": {"Origin": origin}}, 403, None) for origin in FOREIGN_ORIGINS),
        ({"content": json.dumps(BODY), "headers": {"Content-Type": "text/plain"}}, 415, None),
        # too large, with and without a declared length
        ({"content": b" " * 3300, "headers": JSON}, 413, None),
        ({"content": undeclared, "headers": JSON}, 413, None),
        *(
            ({"content": body, "headers": JSON}, 400, "not_json")
            for body in (b"", b"[1]", b"{", b"[" * 1_900)
        ),
    ],
)
def test_a_request_that_no_agent_of_an_open_run_makes_is_refused(
    request_: Any, status: int, kind: str | None
) -> None:
    async def test(client: httpx.AsyncClient, session: AgentSession, server: Gateway) -> None:
        given = (
            {**request_, "content": undeclared()} if undeclared in request_.values() else request_
        )
        answer = await client.post("/chat/completions", **given)
        assert (answer.status_code, session.count) == (status, 0)
        assert kind is None or error_of(answer) == kind
        if status == 403:
            asked = await client.options("/chat/completions", headers=request_["headers"])
            assert asked.status_code == 403

    during_run(test, limits=GatewaySettings(max_body=2000))


def test_unknown_routes_are_named_and_models_are_listed() -> None:
    async def test(client: httpx.AsyncClient, session: AgentSession, server: Gateway) -> None:
        answer = await client.post("/embeddings", json={})
        assert answer.status_code == 404
        assert "/v1/responses" in answer.json()["error"]["message"]
        assert (await client.get("/chat/completions")).status_code == 405
        assert [model["id"] for model in (await client.get("/models")).json()["data"]] == [
            "smollm2"
        ]

    during_run(test, models=("smollm2",))


def test_the_number_of_requests_is_limited() -> None:
    async def test(client: httpx.AsyncClient, session: AgentSession, server: Gateway) -> None:
        codes = [(await client.post("/chat/completions", json=BODY)).status_code for _ in range(4)]
        assert codes == [200, 200, 429, 429]

    during_run(test, max_requests=2)


def test_an_exhausted_budget_is_told_to_the_agent_and_ends_the_run() -> None:
    async def exhausted(exchange: GatewayExchange) -> Any:
        raise BudgetExhausted("budget: 3 of 3 calls are used", hint="raise the limit")

    async def test(client: httpx.AsyncClient, session: AgentSession, server: Gateway) -> None:
        for _ in range(2):
            answer = await client.post("/chat/completions", json=BODY)
            assert (answer.status_code, error_of(answer)) == (429, "budget_exhausted")
            assert "3 of 3 calls" in answer.json()["error"]["message"]
            assert answer.headers["x-should-retry"] == "false"
        assert isinstance(session.fatal.result(), BudgetExhausted)
        assert session.count == 1  # the second one was refused

    during_run(test, exhausted)


def test_a_failed_request_has_a_status_and_a_reason() -> None:
    async def refused(exchange: GatewayExchange) -> None:
        exchange.kind, exchange.message = "rate_limit", "the provider limits the rate"

    async def test(client: httpx.AsyncClient, session: AgentSession, server: Gateway) -> None:
        for stream in (False, True):
            answer = await client.post("/chat/completions", json={**BODY, "stream": stream})
            assert (answer.status_code, error_of(answer)) == (429, "rate_limit")

    during_run(test, refused)


def test_pieces_arrive_before_the_answer_is_complete() -> None:
    release, found = asyncio.Event(), []

    async def dispatch(exchange: GatewayExchange) -> Any:
        exchange.put("Hel")
        await asyncio.wait_for(release.wait(), 120)
        exchange.put("lo")
        return ANSWER

    async def test(client: httpx.AsyncClient, session: AgentSession, server: Gateway) -> None:
        asked = client.stream("POST", "/chat/completions", json={**BODY, "stream": True})
        async with asked as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    found.append(json.loads(line[6:])["choices"][0]["delta"].get("content", ""))
                    if found[-1] == "Hel":
                        release.set()  # before this the answer cannot be complete

    during_run(test, dispatch)
    assert found == ["", "Hel", "lo", ""]


def test_the_gateway_of_a_loop_is_shared_and_ends_with_the_loop() -> None:
    async def run() -> str:
        async with gateway() as first, gateway() as second:
            assert first is second
            return first.base_url

    url = asyncio.run(run())
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/models", trust_env=False)


def test_small_segments_are_sent_at_once() -> None:
    """Nagle's algorithm and delayed acknowledgments together delay each answer by 40 ms."""

    async def test(client: httpx.AsyncClient, session: AgentSession, server: Gateway) -> None:
        assert server._server is not None
        (listening,) = [sock for each in server._server.servers for sock in each.sockets]
        assert listening.proto == socket.IPPROTO_TCP

    during_run(test)


def test_the_clock_of_a_run_stands_while_any_of_its_requests_is_answered() -> None:
    """Requests that are accepted together once stopped the clock never, but restarted it at zero."""
    busy: list[bool] = []

    async def slowly(exchange: GatewayExchange) -> Any:
        await asyncio.sleep(0)
        return await hello(exchange)

    async def test() -> None:
        session = AgentSession(slowly, on_busy=busy.append)
        await asyncio.gather(*(session.answer("chat/completions", dict(BODY)) for _ in range(3)))
        await session.answer("chat/completions", dict(BODY))
        await session.close()

    asyncio.run(test())
    assert busy == [True, False, True, False]


def test_a_request_whose_run_ends_is_refused() -> None:
    """Its handler was cancelled, which the server reported as an error of the application."""

    async def wait(exchange: GatewayExchange) -> Any:
        await asyncio.sleep(60)

    async def test() -> None:
        session = AgentSession(wait)
        request = asyncio.create_task(session.answer("chat/completions", dict(BODY)))
        await asyncio.sleep(0)
        await session.close()
        with pytest.raises(HTTPProblem, match="the run of this key has ended"):
            await request

    asyncio.run(asyncio.wait_for(test(), 30))
