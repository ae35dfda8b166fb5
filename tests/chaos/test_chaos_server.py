"""The fault-injecting server does what its faults say, and bills what it served."""

from __future__ import annotations

import gzip
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from chaos import server as chaos
from chaos.server import Fault, FaultyServer, Limiter


def post(
    url: str, text: str = "what is 3 plus 4", key: str = "k", **more: Any
) -> tuple[int, dict[str, str], bytes]:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
    body = json.dumps(
        {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": text}], **more}
    )
    try:
        connection.request(
            "POST", f"{place.path}/chat/completions", body, {"Authorization": f"Bearer {key}"}
        )
        got = connection.getresponse()
        return got.status, {name.lower(): value for name, value in got.getheaders()}, got.read()
    finally:
        connection.close()


def test_without_faults_it_answers_and_bills_what_it_says() -> None:
    with FaultyServer() as server:
        status, _, body = post(server.url, "say only the number 12")
    answer = json.loads(body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "12")
    used = answer["usage"]
    assert server.billed.prompt_tokens == used["prompt_tokens"] > 0
    assert server.billed.completion_tokens == used["completion_tokens"] == 1
    assert server.billed.cost == pytest.approx((used["prompt_tokens"] + 2) / 1e6)
    assert (server.requests, server.served[0].key, server.faults) == (1, "k", {})


@pytest.mark.parametrize(
    "fault", [f for f in Fault if f not in {Fault.STALL, Fault.DRIP, Fault.BOMB}]
)
def test_every_fault_can_be_provoked(fault: Fault) -> None:
    with FaultyServer(1.0, [fault]) as server:
        try:
            status, _, body = post(server.url)
        except (http.client.HTTPException, ConnectionError):
            status, body = 0, b""
        assert server.faults == {str(fault): 1}
        assert (server.billed.calls == 1) == (status in {0, 200})
    if fault in {*chaos.LOST, Fault.INVALID_JSON, Fault.WRONG_TYPE, Fault.BAD_GATEWAY}:
        with pytest.raises(ValueError, match="."):
            json.loads(body)


def test_a_bomb_is_small_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "BOMB_BYTES", 1_000_000)
    with FaultyServer(1.0, [Fault.BOMB]) as server:
        _, headers, body = post(server.url)
    assert headers["content-encoding"] == "gzip"
    assert len(body) < 10_000
    assert len(gzip.decompress(body)) == 1_000_000


def test_faults_depend_on_the_request_and_not_on_the_order_of_arrival() -> None:
    def faults(texts: list[str]) -> dict[str, Fault | None]:
        with FaultyServer(0.5, chaos.BROKEN, seed=4) as server:
            for text in texts:
                post(server.url, text)
            return {s.body["messages"][0]["content"]: s.fault for s in server.served}

    texts = [f"number {i}" for i in range(12)]
    assert faults(texts) == faults(texts[::-1])
    assert len(set(faults(texts).values())) > 2


def test_the_rate_limiter_admits_so_many_a_second() -> None:
    now = [0.0]
    limiter = Limiter(3, lambda: now[0])
    assert [limiter.admits() for _ in range(5)] == [True, True, True, False, False]
    now[0] = 0.4
    assert [limiter.admits() for _ in range(2)] == [True, False]
    with FaultyServer(per_second=1, retry_after="7") as server:
        answers = [post(server.url) for _ in range(2)]
    assert [status for status, _, _ in answers] == [200, 429]
    assert answers[1][1]["retry-after"] == "7"
    assert server.billed.calls == 1
