"""A vLLM server that the engine starts sleeps in a block and is woken by the next call, in any order of failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compound.core.errors import CallError, CompoundError, TransientError
from compound.engines.fleet import FleetEngine
from compound.engines.vllm.engine import VLLMEngine
from compound.engines.vllm.guard import KeyRequired
from compound.engines.vllm.server import Link
from vllm_requests import ask, is_running, new_adapter, replace_vllm, request, started, until

pytest.importorskip("httpx")

CHAT, SLEEP, WAKING = "chat/completions", "/sleep", ["/wake_up", "/is_sleeping"]


class Servers:
    """Processes that are started instead of vLLM, and the requests that they receive."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.told, self.log = replace_vllm(folder, monkeypatch), folder / "requests.log"
        self._monkeypatch = monkeypatch
        self.behave()

    def behave(self, **behaviour: Any) -> None:
        """Set the behaviour of processes that are started later."""
        given = {"file": str(self.told), "log": str(self.log), **behaviour}
        self._monkeypatch.setenv("FAKE_VLLM", json.dumps(given))

    @property
    def pids(self) -> list[int]:
        return [row["pids"][0] for row in started(self.told)]

    def requests(self, pid: int | None = None) -> list[str]:
        """Return the paths of chats and of sleep mode, of one process or of all."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        pairs = [line.split(maxsplit=1) for line in lines]
        chosen = [path for process, path in pairs if pid in (None, int(process))]
        return [path for path in chosen if path == CHAT or path[0] == "/"]


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(tmp_path / "told", monkeypatch)


@pytest.fixture
def lm(servers: Servers) -> Iterator[VLLMEngine]:
    engine = VLLMEngine("m", sleep=True, restarts=1)
    yield engine
    asyncio.run(engine.aclose())


@pytest.fixture
def fleet(servers: Servers) -> Iterator[FleetEngine]:
    settings = {"model": "m", "sleep": True, "args": ["-tp", "2"]}
    engine = FleetEngine(devices=[[0, 1], [2, 3]], vllm=settings)
    yield engine
    asyncio.run(engine.aclose())


async def text(lm: VLLMEngine) -> str:
    return (await lm.generate(request())).text


async def ask_all(lm: VLLMEngine | FleetEngine) -> None:
    await asyncio.gather(*(lm.generate(request(str(i))) for i in range(24)))


async def nap(lm: VLLMEngine | FleetEngine, then: Callable[[], Awaitable[object]]) -> None:
    async with lm.asleep(["0"]):
        await then()


async def nothing() -> None:
    pass


def waiting(*engines: VLLMEngine) -> int:
    """Return the number of calls that wait for the end of a block."""
    return sum(len(engine._awake._waiting) for engine in engines)


async def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_running(pid))


@pytest.mark.parametrize("sleep", [True, False])
def test_a_server_has_sleep_mode_only_if_it_is_set(servers: Servers, sleep: bool) -> None:
    ask(VLLMEngine("m", sleep=sleep))
    argv, environment = started(servers.told)[0]["argv"], started(servers.told)[0]["env"]
    assert ("--enable-sleep-mode" in argv) == ("--middleware" in argv) == sleep
    assert environment.get("VLLM_SERVER_DEV_MODE") == ("1" if sleep else None)
    if sleep:
        assert argv[argv.index("--middleware") + 1] == "compound_key_required.KeyRequired"
        first = environment["PYTHONPATH"].split(os.pathsep)[0]
        # nothing else can be imported by accident
        assert os.listdir(first) == ["compound_key_required.py"]


async def test_calls_in_flight_end_before_the_block_and_later_ones_wait_for_its_end(
    lm: VLLMEngine, servers: Servers, tmp_path: Path
) -> None:
    answer = tmp_path / "answer"
    first = asyncio.create_task(lm.generate(request(f"wait for {answer}")))
    await until(lambda: servers.requests() == [CHAT])

    async def sleep() -> None:
        async with lm.asleep(["0"]) as slept:
            assert slept
            assert first.done()
            later = asyncio.create_task(text(lm))
            await until(lambda: waiting(lm) == 1)
            assert servers.requests() == [CHAT, SLEEP]
        assert await later == "four"

    sleeping = asyncio.create_task(sleep())
    await until(lambda: lm._awake._closed)
    assert servers.requests() == [CHAT]
    answer.touch()
    await sleeping
    assert servers.requests() == [CHAT, SLEEP, *WAKING, CHAT]


async def test_a_server_stays_asleep_until_it_is_called(lm: VLLMEngine, servers: Servers) -> None:
    await text(lm)
    for _ in range(2):
        await nap(lm, nothing)
    assert servers.requests() == [CHAT, SLEEP]
    await asyncio.gather(*(text(lm) for _ in range(5)))
    assert servers.requests() == [CHAT, SLEEP, *WAKING, *[CHAT] * 5]  # woken once
    assert len(servers.pids) == 1


@pytest.mark.parametrize(("sleep", "gpus"), [(True, ["1"]), (True, []), (False, ["0"])])
async def test_a_server_on_other_gpus_keeps_its_memory(
    lm: VLLMEngine, servers: Servers, sleep: bool, gpus: list[str]
) -> None:
    lm.settings = replace(lm.settings, sleep=sleep)
    await text(lm)
    async with lm.asleep(gpus) as slept:
        assert not slept
        assert await text(lm) == "four"
    assert servers.requests() == [CHAT, CHAT]


async def test_no_server_is_started_in_the_block_and_one_that_is_being_started_is_put_to_sleep(
    lm: VLLMEngine, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, go, start = threading.Event(), threading.Event(), VLLMEngine._start

    async def held(engine: VLLMEngine, ended: Link | None) -> Link:
        starting.set()
        await asyncio.to_thread(go.wait, 60)
        return await start(engine, ended)

    async with lm.asleep(["0"]):
        call = asyncio.create_task(text(lm))
        await until(lambda: waiting(lm) == 1)
        assert not servers.pids
        call.cancel()
    monkeypatch.setattr(VLLMEngine, "_start", held)
    call = asyncio.create_task(text(lm))
    await asyncio.to_thread(starting.wait, 60)
    call.cancel()
    await asyncio.wait([call])
    go.set()
    await nap(lm, nothing)
    assert servers.requests() == [SLEEP]


@pytest.mark.slow
@pytest.mark.parametrize(("waking", "loads"), [("", 1), ("lost", 2)])
async def test_adapters_are_loaded_again_only_if_waking_lost_them(
    lm: VLLMEngine, servers: Servers, tmp_path: Path, waking: str, loads: int
) -> None:
    servers.behave(waking=waking)
    (tmp_path / "adapters").mkdir()
    adapter = new_adapter(tmp_path / "adapters", 0.5)
    tuned = request(adapter=adapter, want_tokens=True, temperature=1.0)
    await lm.generate(tuned)
    await nap(lm, nothing)
    if waking:
        with pytest.raises(TransientError, match="lost the adapter"):
            await lm.generate(tuned)
    completion = await lm.generate(tuned)
    assert completion.tokens is not None
    assert completion.tokens.logprobs[0] == -1.0
    assert servers.log.read_text().count(" load_lora_adapter") == loads


async def test_servers_without_sleep_mode_are_refused_and_stay_awake(
    lm: VLLMEngine, fleet: FleetEngine, servers: Servers
) -> None:
    servers.behave(fault={SLEEP: [404, "Not Found", {}]})
    for engine in (lm, fleet):
        await ask_all(engine)
        said = "server of 'm' has no sleep mode: Not Found.*upgrade"
        with pytest.raises(CompoundError, match=said) as caught:
            await nap(engine, nothing)
        assert not isinstance(caught.value, CallError)
        await ask_all(engine)
    assert len(servers.pids) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "failure"),
    [
        ({"fault": {SLEEP: [500, "boom", {}]}}, "fall asleep"),
        ({"deadly": SLEEP}, "fall asleep"),
        ({"fault": {"/wake_up": [500, "boom", {}]}}, "wake up"),
        ({"deadly": "/wake_up"}, "wake up"),
        ({"waking": "asleep"}, "wake up"),
    ],
)
async def test_a_server_that_does_not_fall_asleep_or_wake_up_is_started_again(
    lm: VLLMEngine,
    servers: Servers,
    caplog: pytest.LogCaptureFixture,
    behaviour: dict[str, Any],
    failure: str,
) -> None:
    servers.behave(**behaviour)
    for starts in (1, 2):
        assert set(await asyncio.gather(text(lm), text(lm))) == {"four"}
        assert len(servers.pids) == starts
        async with lm.asleep(["0"]):
            if failure == "fall asleep":  # its memory is free in the block
                await until(lambda: not is_running(servers.pids[-1]))
    with pytest.raises(CompoundError, match="2 vLLM servers of 'm' ended by themselves, or"):
        await text(lm)
    assert f"did not {failure}, and is started again" in caplog.text


async def test_after_a_cancelled_sleep_it_is_restarted(lm: VLLMEngine, servers: Servers) -> None:
    servers.behave(endless=SLEEP)
    await text(lm)
    sleeping = asyncio.create_task(nap(lm, nothing))
    await until(lambda: servers.requests() == [CHAT, SLEEP])
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert await text(lm) == "four"
    assert len(servers.pids) == 2


async def test_a_cancelled_wait_for_calls_in_flight_changes_nothing(
    lm: VLLMEngine, servers: Servers, tmp_path: Path
) -> None:
    answer = tmp_path / "answer"
    first = asyncio.create_task(lm.generate(request(f"wait for {answer}")))
    await until(lambda: servers.requests() == [CHAT])
    sleeping = asyncio.create_task(nap(lm, nothing))
    await until(lambda: lm._awake._closed)
    sleeping.cancel()
    await asyncio.wait([sleeping])
    assert await text(lm) == "four"  # while the first call is in flight
    answer.touch()
    await first
    assert servers.requests() == [CHAT, CHAT]


async def test_the_next_call_wakes_a_server_after_an_error_or_starts_one_after_its_end(
    lm: VLLMEngine, servers: Servers
) -> None:
    async def failing() -> None:
        raise ZeroDivisionError

    await text(lm)
    with pytest.raises(ZeroDivisionError):
        await nap(lm, failing)
    assert await text(lm) == "four"
    assert servers.requests() == [CHAT, SLEEP, *WAKING, CHAT]
    for end in (lm.aclose, lambda: kill(servers.pids[-1])):
        await nap(lm, end)
        assert await text(lm) == "four"
    assert len(servers.pids) == 3


async def test_replicas_on_the_gpus_sleep_and_wake(fleet: FleetEngine, servers: Servers) -> None:
    await ask_all(fleet)
    rows = {row["env"]["CUDA_VISIBLE_DEVICES"]: row for row in started(servers.told)}
    pids = [rows[devices]["pids"][0] for devices in ("0,1", "2,3")]
    async with fleet.asleep(["3"]) as slept:
        assert slept
        assert [servers.requests(pid)[-1] for pid in pids] == [CHAT, SLEEP]
    async with fleet.asleep(["0", "3"]):
        later = asyncio.create_task(ask_all(fleet))
        await until(lambda: waiting(*fleet.processes) == 24)
        assert [servers.requests(pid)[-1] for pid in pids] == [SLEEP, SLEEP]
    await later
    for pid in pids:
        paths = servers.requests(pid)
        at = paths.index(SLEEP)
        assert paths[at + 1 : at + 4] == [*WAKING, CHAT]
    await nap(fleet, lambda: kill(pids[0]))
    await ask_all(fleet)
    await until(lambda: len(servers.pids) == 3 and all(each.up for each in fleet.replicas))
    await ask_all(fleet)


@pytest.mark.parametrize(
    ("kind", "headers", "wanted"),
    [
        ("http", [], 401),
        ("http", [(b"authorization", b"Bearer other")], 401),
        ("http", [(b"authorization", b"Bearer secret"), (b"authorization", b"Bearer other")], 401),
        ("http", [(b"Authorization", b"Bearer secret")], "passed"),
        ("websocket", [], 1008),
        ("lifespan", None, "passed"),
    ],
)
def test_a_request_without_the_key_is_rejected_on_every_route(
    monkeypatch: pytest.MonkeyPatch, kind: str, headers: Any, wanted: int | str
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    seen: list[Any] = []

    async def app(*_: Any) -> None:
        seen.append("passed")

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        seen.extend(message[name] for name in ("status", "code") if name in message)

    scope = {"type": kind} if headers is None else {"type": kind, "headers": headers}
    asyncio.run(KeyRequired(app)(scope, receive, send))
    assert seen == [wanted]
