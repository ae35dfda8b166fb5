"""What an agent sends can neither widen its budget nor damage the record, and no key is needed to be refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from typing import Any

import httpx
import pytest

import compound as cp
from compound.components.gateway.server import GatewaySettings, gateway
from compound.core.engine import Forward, Request
from compound.core.web.guard import BoundedProtocol
from compound.engines.openai import OpenAIEngine
from compound.execution.trace import Trace, to_json
from compound.testing import ScriptedLM

pytest.importorskip("fastapi")
HEAD = '{"model": "m", "messages": [{"role": "user", "content": "Hi"}]'


def sent(body: str, engine: Any = None) -> tuple[int, str, Trace]:
    """Return status and answer of a request that an agent sends, and the trace of its run."""

    def agent(question: str, base_url: str, api_key: str) -> str:
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        found = httpx.post(
            f"{base_url}/chat/completions",
            content=body,
            headers=headers,
            timeout=120,
            trust_env=False,
        )
        return json.dumps([found.status_code, found.text])

    helper = cp.components.ExternalAgent("helper", call=agent)
    system = cp.System("s", {"answer": helper(question=cp.Input("question"))}, lm="m")
    trace = cp.run(
        system, {"question": "?"}, engines={"m": engine or ScriptedLM(lambda message: "ok")}
    )
    status, text = json.loads(str(trace.outputs["answer"]))
    return status, text, trace


@pytest.mark.parametrize(
    "field",
    [
        '"max_tokens": -100000',
        '"max_tokens": 0',
        '"max_tokens": 0.5',
        '"max_tokens": true',
        '"max_tokens": NaN',
        '"max_tokens": 1e400',
        '"max_tokens": 99999999',
        '"max_completion_tokens": -1',
        '"n": -1',
        '"n": 1000',
        '"temperature": NaN',
        '"temperature": -1',
        '"temperature": "hot"',
        '"max_tokens": 1' + "0" * 400,
    ],
)
def test_a_number_out_of_range_is_refused_and_adds_nothing_to_the_budget(field: str) -> None:
    status, text, trace = sent(f"{HEAD}, {field}}}")
    assert status == 400, text
    assert trace.usage == cp.ext.Usage()


def test_a_body_that_cannot_be_stored_is_refused_or_converted() -> None:
    status, text, _ = sent(f'{HEAD}, "x": {"[" * 500}{"]" * 500}}}')
    assert (status, "nested" in text) == (400, True)
    status, _, trace = sent(
        '{"model": "m", "messages": [{"role": "user", "content": "Hi \\ud83d"}]}'
    )
    assert status == 200
    assert "\ufffd" in json.dumps(to_json(trace), ensure_ascii=False).encode().decode()


def test_a_stream_with_an_unencodable_model_name_is_answered() -> None:
    status, text, _ = sent(
        '{"model": "\\ud83d", "messages": [{"role": "user", "content": "Hi"}], "stream": true}'
    )
    assert (status, text.endswith("data: [DONE]\n\n")) == (200, True)


def test_several_answers_are_part_of_the_reservation() -> None:
    engine = OpenAIEngine("m", api_base="http://127.0.0.1:9/v1", price=(1.0, 2.0))
    one, four = (
        engine.worst_case(Request((), max_tokens=10, forward=Forward("chat/completions", body)))
        for body in ('{"messages": [], "n": 1}', '{"messages": [], "n": 4}')
    )
    assert (one.completion_tokens, four.completion_tokens) == (10, 40)
    assert four.cost - one.cost == pytest.approx(30 * 2.0 / 1_000_000)


def received(port: int, *parts: bytes) -> bytes:
    """Return what a server answers to raw bytes, until it closes the connection or has sent a status line."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as opened:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                opened.sendall(part)
        with contextlib.suppress(ConnectionError):
            return opened.recv(1000)
    return b""


def asked(*parts: bytes, settings: GatewaySettings | None = None) -> bytes:
    async def ask() -> bytes:
        async with gateway(settings) as server:
            port = int(server.base_url.split(":")[2].partition("/")[0])
            return await asyncio.to_thread(received, port, *parts)

    return asyncio.run(ask())


def test_a_request_without_a_key_is_refused_before_its_body_arrives() -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer wrong\r\nContent-Length: 1000\r\n\r\n"
    )
    assert asked(head, settings=GatewaySettings(body_timeout=3.0)).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("start", [b"X-Large: ", b"X", b"A: b\r\n" * 20_000])
def test_headers_without_an_end_are_refused(start: bytes) -> None:
    """Also when they come in pieces: uvicorn itself would collect them without a limit."""
    answer = asked(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + start, *[b"x" * 2**16] * 8)
    assert answer.startswith(b"HTTP/1.1 400 ") or answer == b""


def test_a_head_that_does_not_arrive_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_timeout", 0.2)
    assert asked(b"GET /v1/models HTT") == b""
    assert asked() == b""


def send_until_closed(*parts: bytes) -> None:
    """Send further parts of a request that a gateway has refused, and wait for the end of the connection."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )

    def send(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as opened:
            opened.sendall(head)
            assert opened.recv(1000).startswith(b"HTTP/1.1 401 ")
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    opened.sendall(part)
                while opened.recv(1000):
                    pass

    async def run() -> None:
        async with gateway() as server:
            await asyncio.to_thread(send, int(server.base_url.split(":")[2].partition("/")[0]))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("start", "more"),
    [(b"0\r\n", b"A: b\r\n" * 40_000), (b"0\r\nX: ", b"x" * 2**18), (b"1;", b"x" * 2**18)],
)
def test_trailers_without_an_end_are_refused(start: bytes, more: bytes) -> None:
    """They follow a body, or stand between its parts."""
    send_until_closed(start, more)


@pytest.mark.parametrize("part", [b"1\r\nx\r\n", b"1\r\nx\r\n0\r\n\r\n"])
def test_a_refused_request_does_not_keep_its_connection(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by a body without an end, nor after its end."""
    monkeypatch.setattr(BoundedProtocol, "head_timeout", 0.2)
    send_until_closed(part)


def test_a_key_that_a_program_receives_is_removed_from_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SEARCH_API_KEY", "key-of-a-search-engine-in-this-test")
    code = "import os, sys; sys.stdin.read(); sys.exit('denied: ' + os.environ['SEARCH_API_KEY'])"
    helper = cp.components.ExternalAgent(
        "helper", command=[sys.executable, "-c", code], env=["SEARCH_API_KEY"]
    )
    system = cp.System("s", {"answer": helper(question=cp.Input("question"))}, lm="m")
    engines = {"m": ScriptedLM(lambda message: "ok")}
    trace = cp.run(system, {"question": "?"}, engines=engines, check=False)
    assert trace.failure is not None
    assert "denied: [key removed]" in trace.failure.message
    assert "key-of-a-search-engine" not in json.dumps(to_json(trace))
