"""A fleet of running servers: what it refuses at the start, and what a dead replica costs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import pytest

import fake_vllm as fake
from compound import CompoundError
from compound.core.engine import NO_USAGE, Adapter, Capabilities, OnText, StreamingEngine
from compound.core.errors import CallError, DeclarationError, RateLimited, TransientError
from compound.engines import fleet as fleet_engine
from compound.engines.fleet import FleetEngine
from compound.engines.openai import OpenAIEngine
from compound.engines.replicas import Replica
from compound.ext import Completion, Engine, Request
from vllm_requests import request, until

pytest.importorskip("httpx")
Servers = list[fake.FakeVLLM]
Write = Callable[[float], Adapter]
Settings = dict[str, Any]
BOTH: list[Settings] = [{"vllm": {"model": "tiny"}}, {"openai": {"model": "tiny"}}]


def fleet(servers: Sequence[fake.FakeVLLM], **settings: Any) -> FleetEngine:
    given = settings or {"vllm": {"model": "tiny"}}
    return FleetEngine([server.address for server in servers], **given)


def run(lm: FleetEngine, work: Callable[[], Any]) -> Any:
    """Run a coroutine function, and close the engine."""

    async def all_of_it() -> Any:
        try:
            return await work()
        finally:
            await lm.aclose()

    return asyncio.run(all_of_it())


def answered(servers: Sequence[fake.FakeVLLM]) -> Counter[str]:
    """Return how often each prompt was answered."""
    return Counter(text for server in servers for text in server.answered)


def revived(dead: fake.FakeVLLM, **changes: Any) -> fake.FakeVLLM:
    """Start a server at the address of a dead one."""
    made = fake.FakeVLLM(port=dead.http.server_port)
    for name, value in changes.items():
        setattr(made, name, value)
    return made.serve()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_engine, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(fleet_engine, "LONGEST_WAIT", 0.05)


def test_the_name_has_no_address_and_tells_apart_what_changes_answers(servers: Servers) -> None:
    lm = fleet(servers)
    assert isinstance(lm, StreamingEngine)
    assert lm.name == fleet(servers[:2]).name == "fleet:vllm:tiny"
    others: list[Engine] = [
        lm,
        fleet(servers, vllm={"model": "tiny", "extra": {"top_p": 0.5}}),
        fleet(servers, vllm={"model": "small"}),
        fleet(servers, openai={"model": "tiny"}),
    ]
    assert len({each.name for each in others}) == 4
    assert not any("127.0.0.1" in each.name for each in others)


def test_what_a_caller_asks_of_an_engine_is_that_of_the_replicas(servers: Servers) -> None:
    vllm = fleet(
        servers,
        vllm={
            "model": "tiny",
            "concurrency": 5,
            "native_tools": True,
            "extra": {"top_p": 0.9},
            "max_lora_rank": 8,
        },
    )
    assert vllm.concurrency == 15
    found = Capabilities(vllm)
    assert (found.trainable, found.max_lora_rank, found.distribution_options) == (
        "tiny",
        8,
        ["top_p"],
    )
    assert (found.native_tools, found.forwards, vllm.priced, vllm.remote) == (
        True,
        False,
        True,
        True,
    )
    openai = fleet(servers, openai={"model": "tiny", "price": (1.0, 2.0), "max_wait": 7.0})
    found = Capabilities(openai)
    assert (found.trainable, found.forwards, openai.priced, found.max_wait) == (None, True, True, 7)
    assert openai.worst_case(request(max_tokens=10)).cost > 0


def test_the_model_of_addresses_alone_is_the_only_one_served(servers: Servers) -> None:
    lm = FleetEngine([server.address for server in servers])
    assert lm.name == "fleet:openai:tiny"
    assert run(lm, lambda: lm.generate(request())).text == "four"
    servers[0].models = lambda _: (200, {"data": [{"id": "a"}, {"id": "b"}]})  # type: ignore[method-assign]
    with pytest.raises(CompoundError, match="serves a, b; set the model of the fleet"):
        assert FleetEngine([servers[0].address]).name
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # refuses connections, as it does not listen
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(CompoundError, match=f"^fleet: {address}/models: "):
            assert FleetEngine([address]).name


@pytest.mark.parametrize(
    "name", ["\x1b[31mred", "half \ud83d", "two\nlines", "re\u202eversed", " ", "a\x00b"]
)
def test_a_served_name_that_cannot_be_recorded_is_refused(servers: Servers, name: str) -> None:
    servers[0].models = lambda _: (200, {"data": [{"id": name}]})  # type: ignore[method-assign]
    lm = FleetEngine([server.address for server in servers])
    with pytest.raises(CompoundError, match="serves a model named '") as caught:
        assert lm.model
    assert caught.value.message.isprintable()
    assert caught.value.message.isascii()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either urls, or the number of replicas, or devices"),
        ({"urls": ["http://a/v1"], "replicas": 2}, "either urls"),
        ({"replicas": 0}, "replicas"),
        ({"urls": ["http://a/v1"], "vllm": {}, "openai": {}}, "not both"),
        ({"urls": ["http://a/v1", "http://a/v1/"]}, "given twice"),
        ({"urls": ["http://me:pass@a/v1"]}, "is not the address of a server"),
        ({"urls": ["http://a/v1"], "vllm": {"api_base": "http://b/v1"}}, "remove api_base"),
        ({"urls": ["http://a/v1"], "vllm": {"modl": "m"}}, "vllm of a fleet: .*modl"),
        ({"urls": ["http://a/v1"], "openai": {"concurrency": 0}}, "concurrency"),
        ({"replicas": 2, "openai": {}}, "only vLLM servers can be started"),
        (
            {"replicas": 2, "vllm": {"api_key_env": "K"}},
            "each process of a fleet gets one of its own",
        ),
        (
            {"devices": [[0]], "vllm": {"api_key_env": "K"}},
            "each process of a fleet gets one of its own",
        ),
        ({"devices": [[0], [0]]}, "different GPUs"),
        ({"devices": [[0], []]}, "different GPUs"),
        ({"devices": [[0, 1]]}, "has 2 GPUs, but its vLLM process uses 1"),
        (
            {"devices": [[0, 1]], "vllm": {"args": ["-tp", "4"]}},
            "has 2 GPUs, but its vLLM process uses 4",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: Settings, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        FleetEngine(**settings)


@pytest.mark.parametrize("settings", BOTH)
def test_a_dead_address_is_refused_before_requests(servers: Servers, settings: Settings) -> None:
    servers[1].kill()
    lm = fleet(servers, **settings)
    with pytest.raises(CompoundError, match="1 of 3 replicas do not answer") as caught:
        run(lm, lambda: lm.generate(request()))
    assert servers[1].address in str(caught.value)
    assert servers[0].address not in str(caught.value)
    assert not isinstance(caught.value, CallError)
    assert not answered(servers)


async def test_a_server_that_starts_late_is_found_by_the_next_call(servers: Servers) -> None:
    servers[1].kill()
    async with contextlib.aclosing(fleet(servers)) as lm:
        with pytest.raises(CompoundError, match="do not answer"):
            await lm.generate(request())
        servers[1] = revived(servers[1])
        assert (await lm.generate(request())).text == "four"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.31"}, r"version '0.32' and '0.31'"),
        ({"base": 2.0}, r"log-probabilities of the same text that differ by 1\.\d nats per token"),
    ],
)
def test_replicas_that_serve_something_else_are_refused_with_their_addresses(
    servers: Servers, changes: Settings, message: str
) -> None:
    for name, value in changes.items():
        setattr(servers[2], name, value)
    lm = fleet(servers)
    with pytest.raises(CompoundError, match=message) as caught:
        run(lm, lambda: lm.generate(request()))
    assert all(server.address in str(caught.value) for server in (servers[0], servers[2]))
    assert not isinstance(caught.value, CallError)
    assert not answered(servers)


@pytest.mark.parametrize("settings", BOTH)
@pytest.mark.parametrize("field", ["root", "max_model_len", "meta"])
def test_replicas_whose_model_is_described_otherwise_are_refused(
    servers: Servers, settings: Settings, field: str
) -> None:
    for number, server in enumerate(servers):
        entry = {"id": "tiny", "created": number, field: number // 2}
        server.models = lambda _, entry=entry: (200, {"data": [entry]})  # type: ignore[method-assign, misc]
    lm = fleet(servers, **settings)
    with pytest.raises(CompoundError, match=f"{field} '0' and '1'"):
        run(lm, lambda: lm.generate(request()))


def test_a_replica_of_another_model_is_refused(servers: Servers) -> None:
    servers[1].model = "other"
    lm = fleet(servers)
    with pytest.raises(CompoundError, match=f"{servers[1].address} does not .*; it serves other"):
        run(lm, lambda: lm.generate(request()))


@pytest.mark.parametrize("settings", BOTH)
def test_each_server_is_sent_the_key_that_is_named(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    ((kind, given),) = settings.items()
    for server in servers:
        server.key = "secret-1"
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    monkeypatch.setenv("TINY_KEY", "secret-1")
    lm = fleet(servers, **{kind: given | {"api_key_env": "TINY_KEY"}})
    assert run(lm, lambda: lm.generate(request())).text == "four"
    assert {key for server in servers for key in server.keys} == {"Bearer secret-1"}
    for server in servers:
        server.key, server.keys = "", []
    plain = fleet(servers, **settings)
    run(plain, lambda: plain.generate(request()))
    assert {key for server in servers for key in server.keys} <= {"", "Bearer EMPTY"}
    monkeypatch.delenv("TINY_KEY")
    with pytest.raises(CompoundError, match="export TINY_KEY"):
        lm.require_key()


async def test_equal_prompts_go_to_one_replica_and_others_are_spread(
    servers: Servers,
) -> None:
    async with contextlib.aclosing(fleet(servers)) as lm:
        for i in range(30):
            for _ in range(2):
                await lm.generate(request(str(i)))
    for server in servers:
        assert set(Counter(server.answered).values()) == {2}
        assert len(set(server.answered)) >= 3
    assert sum(stats.requests for stats in lm.replicas) == 60
    assert [stats.requests for stats in lm.replicas] == [len(server.answered) for server in servers]
    assert all(stats.up for stats in lm.replicas)
    assert {stats.name for stats in lm.replicas} == {server.address for server in servers}
    assert lm.prefill.tokens == 60 * 5


async def test_no_replica_gets_more_than_a_quarter_above_the_concurrency(servers: Servers) -> None:
    """A fleet of two with 4 requests each has at most 5 at each, however many are asked for."""
    lm = fleet(servers[:2], vllm={"model": "tiny", "concurrency": 4})
    for server in servers:
        server.hang = True
    async with contextlib.aclosing(lm):
        calls = [asyncio.create_task(lm.generate(request(str(i)))) for i in range(14)]
        await until(lambda: sum(server.chatting for server in servers) == 10)
        await asyncio.sleep(0.1)
        assert [server.chatting for server in servers] == [5, 5, 0]
        calls[-1].cancel()
        for server in servers:
            server.stopping.set()
        await asyncio.gather(*calls[:-1])
    assert sum(answered(servers).values()) == 13


@pytest.mark.parametrize("settings", BOTH)
async def test_nothing_is_lost_or_answered_twice_if_a_server_is_killed_in_mid_step(
    servers: Servers, settings: Settings
) -> None:
    lm = fleet(servers, **settings)
    for server in servers:
        server.hang = True
    async with contextlib.aclosing(lm):
        calls = [asyncio.create_task(lm.generate(request(str(i)))) for i in range(24)]
        await until(lambda: sum(server.chatting for server in servers) == 24)
        await asyncio.to_thread(servers[0].kill)
        await asyncio.sleep(0.05)
        for server in servers[1:]:
            server.hang = False
            server.stopping.set()
        completions = await asyncio.gather(*calls)
    assert [completion.text for completion in completions] == ["four"] * 24
    assert all(completion.usage.calls == 1 for completion in completions)
    assert answered(servers) == {str(i): 1 for i in range(24)}
    assert not servers[0].answered
    assert lm.replicas[0].moved >= 1
    assert sum(stats.moved for stats in lm.replicas[1:]) == 0


async def test_a_lost_answer_of_a_live_server_is_an_attempt_of_its_own(
    servers: Servers,
) -> None:
    """It may have been computed, so the executor charges it, and its next attempt reserves again."""
    async with contextlib.aclosing(fleet(servers[:1])) as lm:
        await lm.generate(request("before"))
        servers[0].hang = True
        call = asyncio.create_task(lm.generate(request("lost")))
        await until(lambda: servers[0].chatting == 1)
        for connection in list(servers[0].open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(TransientError) as caught:
            await call
        assert caught.value.charged != NO_USAGE
        servers[0].hang = False
        servers[0].stopping.set()
        assert (await lm.generate(request("after"))).text == "four"
    assert lm.replicas[0].moved == 0


async def test_a_priced_server_that_dies_may_have_billed_the_request(servers: Servers) -> None:
    lm = fleet(servers[:2], openai={"model": "tiny", "price": (1.0, 1.0)})
    for server in servers:
        server.hang = True
    async with contextlib.aclosing(lm):
        calls = [asyncio.create_task(lm.generate(request(str(i)))) for i in range(8)]
        await until(lambda: sum(server.chatting for server in servers) == 8)
        await asyncio.to_thread(servers[0].kill)
        servers[1].stopping.set()
        found = await asyncio.gather(*calls, return_exceptions=True)
        error = next((each for each in found if isinstance(each, BaseException)), None)
    assert isinstance(error, TransientError)
    assert error.charged != NO_USAGE


@pytest.mark.parametrize(
    ("address", "price", "expected"),
    [
        ("http://127.0.0.1:8000/v1", None, False),
        ("http://localhost:8000/v1", None, False),
        ("https://llm.example.com/v1", None, True),
        ("https://llm.example.com/v1", (0.0, 0.0), False),
        ("http://127.0.0.1:8000/v1", (1.0, 0.0), True),
    ],
)
def test_a_server_elsewhere_may_bill_unless_it_is_free(
    address: str, price: tuple[float, float] | None, expected: bool
) -> None:
    engine = OpenAIEngine("m", api_base=address, price=price)
    assert Replica(address, engine, address).bills is expected


async def test_a_dead_replica_comes_back_when_it_answers(servers: Servers, write: Write) -> None:
    adapter = write(0.5)
    tuned = request(adapter=adapter, want_tokens=True, temperature=1.0)
    async with contextlib.aclosing(fleet(servers[:2])) as lm:
        for i in range(40):
            await lm.generate(Request(request(str(i)).messages, adapter=adapter))
        await asyncio.to_thread(servers[0].kill)
        for i in range(40):
            await lm.generate(request(str(i)))
        assert [stats.up for stats in lm.replicas] == [False, True]
        servers[0] = revived(servers[0])
        await until(lambda: lm.replicas[0].up)
        for i in range(40):
            found = await lm.generate(Request(request(str(i)).messages, adapter=adapter))
            assert found.text == "four"
        await lm.admit(adapter)
        assert (await lm.generate(tuned)).tokens is not None
    # it has lost the adapter, which is loaded again
    assert len(servers[0].sent("load_lora_adapter")) == 1
    assert servers[0].answered


@pytest.mark.parametrize("changes", [{"version": "0.33"}, {"base": 2.0}])
async def test_a_replica_that_comes_back_with_something_else_is_not_used(
    servers: Servers, changes: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async with contextlib.aclosing(fleet(servers[:2])) as lm:
        await lm.generate(request())
        await asyncio.to_thread(servers[0].kill)
        for i in range(40):
            await lm.generate(request(str(i)))
        servers[0] = revived(servers[0], **changes)
        await until(lambda: "is not used again" in caplog.text)
        for i in range(40):
            await lm.generate(request(str(i)))
    assert not servers[0].answered


async def test_the_failure_of_the_last_replica_is_transient_and_free(
    servers: Servers,
) -> None:
    async with contextlib.aclosing(fleet(servers[:2])) as lm:
        await lm.generate(request())
        for server in servers[:2]:
            await asyncio.to_thread(server.kill)
        with pytest.raises(TransientError, match="no replica answers") as caught:
            await lm.generate(request())
        assert caught.value.charged == NO_USAGE
        assert all(server.address in str(caught.value) for server in servers[:2])


def test_a_refused_request_is_not_sent_to_another_replica(servers: Servers) -> None:
    for server in servers:
        server.fault["chat/completions"] = (400, "no such field", {})
    lm = fleet(servers)
    with pytest.raises(CallError, match="no such field"):
        run(lm, lambda: lm.generate(request()))
    assert sum(len(server.sent("chat/completions")) for server in servers) == 1


async def test_a_rate_limit_of_one_replica_sends_the_request_to_another(servers: Servers) -> None:
    busy = (429, "busy", {"retry-after": "3"})
    servers[0].fault["chat/completions"] = servers[1].fault["chat/completions"] = busy
    async with contextlib.aclosing(fleet(servers)) as lm:
        for i in range(9):
            assert (await lm.generate(request(str(i)))).text == "four"
        assert len(servers[2].answered) == 9
        servers[2].fault["chat/completions"] = busy
        with pytest.raises(RateLimited) as caught:
            await lm.generate(request())
    assert caught.value.retry_after == 3.0


async def test_a_text_is_reported_in_the_callers_loop(servers: Servers) -> None:
    pieces: list[tuple[str, int]] = []
    async with contextlib.aclosing(fleet(servers)) as lm:
        answer = await lm.stream(request(), lambda text: pieces.append((text, get_ident())))
    assert answer.text == "four"
    assert pieces == [("four", get_ident())]


@pytest.mark.parametrize(("begun", "sent"), [(True, 1), (False, 2)])
def test_a_stream_is_sent_again_only_if_none_of_its_text_was_reported(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, begun: bool, sent: int
) -> None:
    lm = fleet(servers, openai={"model": "tiny"})
    pieces: list[str] = []
    count = 0

    async def stream(engine: OpenAIEngine, request: Request, on_text: OnText) -> Completion:
        nonlocal count
        count += 1
        if begun:
            on_text("fo")
        if count == 1:
            raise TransientError("the server is overloaded", charged=NO_USAGE)
        return Completion("four")

    monkeypatch.setattr(OpenAIEngine, "stream", stream)
    failed = (
        pytest.raises(TransientError, match="overloaded") if begun else contextlib.nullcontext()
    )
    with failed:
        run(lm, lambda: lm.stream(request(), pieces.append))
    assert (count, pieces) == (sent, ["fo"] if begun else [])
