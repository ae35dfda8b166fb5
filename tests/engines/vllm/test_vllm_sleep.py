"""A vLLM server that the engine starts sleeps in a block and is woken by the next call, in any order of failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import fake_vllm as fake
from compound.core.errors import CallError, CompoundError, DeclarationError
from compound.engines.fleet import FleetEngine
from compound.engines.vllm.engine import VLLMEngine
from compound.engines.vllm.guard import KeyRequired
from compound.engines.vllm.link import Link
from vllm_requests import new_adapter, request, until

pytest.importorskip("httpx")

CHAT = "chat/completions"
WAKING = ["/wake_up", "/is_sleeping"]
Behave = Callable[..., None]


class Started:
    """Processes that were started instead of vLLM, and the requests that they received."""

    def __init__(self, folder: Path) -> None:
        self.file, self.log = folder / "started.jsonl", folder / "requests.log"

    @property
    def rows(self) -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in self.file.read_text().splitlines()]
            if self.file.exists()
            else []
        )

    @property
    def pids(self) -> list[int]:
        return [row["pids"][0] for row in self.rows]

    def requests(self, pid: int | None = None) -> list[str]:
        """Return the paths of chats and of sleep mode, of one process or of all."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        pairs = [line.split(maxsplit=1) for line in lines]
        return [
            path for p, path in pairs if (path == CHAT or path[0] == "/") and pid in (None, int(p))
        ]


@pytest.fixture
def started(tmp_path: Path) -> Started:
    folder = tmp_path / "started"
    folder.mkdir()
    return Started(folder)


@pytest.fixture
def behave(started: Started, monkeypatch: pytest.MonkeyPatch) -> Behave:
    """Return a function that sets the behaviour of servers that are started later."""
    monkeypatch.setenv("COMPOUND_VLLM", shlex.join([sys.executable, str(Path(fake.__file__))]))
    monkeypatch.setenv("COMPOUND_CACHE", str(started.file.parent))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def set_behaviour(**behaviour: Any) -> None:
        given = {"file": str(started.file), "log": str(started.log), **behaviour}
        monkeypatch.setenv("FAKE_VLLM", json.dumps(given))

    set_behaviour()
    return set_behaviour


def run(lm: VLLMEngine | FleetEngine, body: Coroutine[Any, Any, None]) -> None:
    async def closing() -> None:
        async with contextlib.aclosing(lm):
            await asyncio.wait_for(body, 60)

    asyncio.run(closing())


async def text(lm: VLLMEngine | FleetEngine) -> str:
    return (await lm.generate(request())).text


def waiting(*engines: VLLMEngine) -> int:
    """Return the number of calls that wait for the end of a block."""
    return sum(len(engine._awake._waiting) for engine in engines)


async def has_ended(pid: int) -> None:
    def ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    await until(ended)


def test_a_server_is_started_with_its_share_and_with_sleep_mode(
    behave: Behave, started: Started
) -> None:
    lm = VLLMEngine("m", gpu_memory=0.4, sleep=True)
    run(lm, _ignore(text(lm)))
    (row,) = started.rows
    argv, environment = row["argv"], row["env"]
    assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.4"
    assert "--enable-sleep-mode" in argv
    assert argv[argv.index("--middleware") + 1] == "compound_key_required.KeyRequired"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    first = environment["PYTHONPATH"].split(os.pathsep)[0]
    assert os.listdir(first) == [
        "compound_key_required.py"
    ]  # nothing else can be imported by accident


def test_by_default_a_server_has_neither(behave: Behave, started: Started) -> None:
    lm = VLLMEngine("m")
    run(lm, _ignore(text(lm)))
    argv, environment = started.rows[0]["argv"], started.rows[0]["env"]
    assert not {"--gpu-memory-utilization", "--enable-sleep-mode", "--middleware"} & set(argv)
    assert "VLLM_SERVER_DEV_MODE" not in environment


async def _ignore(made: Coroutine[Any, Any, object]) -> None:
    await made


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_memory": 0.0}, "gpu_memory: Input should be greater than 0"),
        ({"gpu_memory": 1.1}, "gpu_memory: Input should be less than or equal to 1"),
        ({"gpu_memory": 0.5, "args": ["--gpu-memory-utilization", "0.5"]}, "both limit the memory"),
        ({"gpu_memory": 0.5, "args": ["--gpu_memory_util=0.5"]}, "both limit the memory"),
        ({"gpu_memory": 0.5, "args": ["--kv-cache-memory-bytes", "9"]}, "both limit the memory"),
        (
            {"gpu_memory": 0.5, "api_base": "http://127.0.0.1:8000/v1"},
            "gpu_memory is a setting of servers that",
        ),
        (
            {"sleep": True, "api_base": "http://127.0.0.1:8000/v1"},
            "sleep is a setting of servers that",
        ),
        ({"args": ["--enable-sleep-mode"]}, "args must not set '--enable-sleep-mode'"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DeclarationError, match=message):
        VLLMEngine("m", **settings)


@pytest.mark.parametrize(
    ("settings", "left", "wanted"),
    [
        ({}, {"0": 0.3}, ["0.3"]),
        ({}, {"1": 0.3}, []),
        ({"args": ["-tp", "2"]}, {"0": 0.3, "1": 0.2}, ["0.2"]),
        ({"gpu_memory": 0.5}, {"0": 0.3}, ["0.5"]),
        ({"args": ["--gpu-memory-utilization", "0.6"]}, {"0": 0.3}, ["0.6"]),
    ],
)
def test_settings_take_precedence_over_the_share_that_a_trainer_leaves(
    behave: Behave,
    started: Started,
    settings: dict[str, Any],
    left: dict[str, float],
    wanted: list[str],
) -> None:
    lm = VLLMEngine("m", **settings)
    lm.limit_gpu_memory(left)
    run(lm, _ignore(text(lm)))
    argv = started.rows[0]["argv"]
    assert [
        argv[i + 1] for i, found in enumerate(argv) if found == "--gpu-memory-utilization"
    ] == wanted


def test_calls_in_flight_end_before_the_sleep_and_later_ones_wait_for_the_end_of_the_block(
    behave: Behave, started: Started, tmp_path: Path
) -> None:
    lm, answer = VLLMEngine("m", sleep=True), tmp_path / "answer"

    async def body() -> None:
        first = asyncio.create_task(lm.generate(request(f"wait for {answer}")))
        await until(lambda: started.requests() == [CHAT])
        begun = asyncio.Event()

        async def sleep() -> None:
            async with lm.asleep(["0"]) as slept:
                assert slept
                assert first.done()
                assert started.requests() == [CHAT, "/sleep"]
                begun.set()
                later = asyncio.create_task(text(lm))
                await until(lambda: waiting(lm) == 1)
                assert started.requests() == [CHAT, "/sleep"]
            assert await later == "four"

        sleeping = asyncio.create_task(sleep())
        await until(lambda: lm._awake._closed)
        assert not begun.is_set()
        answer.touch()
        await sleeping
        assert started.requests() == [CHAT, "/sleep", *WAKING, CHAT]

    run(lm, body())


def test_a_server_stays_asleep_until_it_is_called(behave: Behave, started: Started) -> None:
    lm = VLLMEngine("m", sleep=True)

    async def body() -> None:
        await text(lm)
        for _ in range(2):
            async with lm.asleep(["0"]):
                pass
        assert started.requests() == [CHAT, "/sleep"]
        await asyncio.gather(*(text(lm) for _ in range(5)))
        assert started.requests() == [CHAT, "/sleep", *WAKING, *[CHAT] * 5]  # woken once

    run(lm, body())
    assert len(started.rows) == 1


@pytest.mark.parametrize(("sleep", "gpus"), [(True, ["1"]), (True, []), (False, ["0"])])
def test_a_server_on_other_gpus_keeps_its_memory(
    behave: Behave, started: Started, sleep: bool, gpus: list[str]
) -> None:
    lm = VLLMEngine("m", sleep=sleep)

    async def body() -> None:
        await text(lm)
        async with lm.asleep(gpus) as slept:
            assert not slept
            assert await text(lm) == "four"

    run(lm, body())
    assert started.requests() == [CHAT, CHAT]


def test_no_server_is_started_in_the_block(behave: Behave, started: Started) -> None:
    lm = VLLMEngine("m", sleep=True)

    async def body() -> None:
        async with lm.asleep(["0"]):
            call = asyncio.create_task(text(lm))
            await until(lambda: waiting(lm) == 1)
            assert not started.rows
        assert await call == "four"

    run(lm, body())
    assert started.requests() == [CHAT]


def test_a_server_that_is_being_started_is_put_to_sleep_when_it_is_ready(
    behave: Behave, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = VLLMEngine("m", sleep=True)
    starting, go, start = threading.Event(), threading.Event(), VLLMEngine._start

    async def held(engine: VLLMEngine, ended: Link | None) -> Link:
        starting.set()
        await asyncio.to_thread(go.wait, 60)
        return await start(engine, ended)

    async def body() -> None:
        call = asyncio.create_task(text(lm))
        await asyncio.to_thread(starting.wait, 60)
        call.cancel()
        await asyncio.wait([call])
        go.set()
        async with lm.asleep(["0"]):
            assert started.requests() == ["/sleep"]

    monkeypatch.setattr(VLLMEngine, "_start", held)
    run(lm, body())


def test_adapters_are_not_loaded_again(behave: Behave, started: Started, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    lm, adapter = VLLMEngine("m", sleep=True), new_adapter(tmp_path / "adapters", 0.5)

    async def body() -> None:
        for _ in range(2):
            tuned = request(adapter=adapter, want_tokens=True, temperature=1.0)
            completion = await lm.generate(tuned)
            assert completion.tokens is not None
            assert completion.tokens.logprobs[0] == -1.0
            async with lm.asleep(["0"]):
                pass

    run(lm, body())
    assert (
        sum(line.endswith("load_lora_adapter") for line in started.log.read_text().splitlines())
        == 1
    )


def test_a_server_without_sleep_mode_is_refused_and_stays_awake(
    behave: Behave, started: Started
) -> None:
    behave(fault={"/sleep": [404, "Not Found", {}]})
    lm = VLLMEngine("m", sleep=True)

    async def body() -> None:
        await text(lm)
        with pytest.raises(
            CompoundError, match="server of 'm' has no sleep mode: Not Found.*upgrade"
        ) as caught:
            async with lm.asleep(["0"]):
                pytest.fail("the memory was not released")
        assert not isinstance(caught.value, CallError)
        assert await text(lm) == "four"

    run(lm, body())
    assert started.requests() == [CHAT, "/sleep", CHAT]
    assert len(started.rows) == 1


@pytest.mark.parametrize(
    "behaviour", [{"fault": {"/sleep": [500, "boom", {}]}}, {"deadly": "/sleep"}]
)
def test_a_server_that_does_not_fall_asleep_is_ended_in_the_block_and_started_again(
    behave: Behave, started: Started, caplog: pytest.LogCaptureFixture, behaviour: dict[str, Any]
) -> None:
    behave(**behaviour)
    lm = VLLMEngine("m", sleep=True)

    async def body() -> None:
        await text(lm)
        async with lm.asleep(["0"]):
            await has_ended(started.pids[0])
        assert await text(lm) == "four"

    run(lm, body())
    assert len(started.rows) == 2
    assert "did not fall asleep" in caplog.text


@pytest.mark.parametrize(
    "behaviour",
    [{"fault": {"/wake_up": [500, "boom", {}]}}, {"deadly": "/wake_up"}, {"stubborn": True}],
    ids=["error", "death", "still asleep"],
)
def test_a_server_that_does_not_wake_up_is_started_again(
    behave: Behave, started: Started, caplog: pytest.LogCaptureFixture, behaviour: dict[str, Any]
) -> None:
    behave(**behaviour)
    lm = VLLMEngine("m", sleep=True)

    async def body() -> None:
        await text(lm)
        async with lm.asleep(["0"]):
            pass
        assert set(await asyncio.gather(text(lm), text(lm))) == {"four"}

    run(lm, body())
    assert len(started.rows) == 2
    assert started.requests(started.pids[1]) == [CHAT, CHAT]
    assert "did not wake up" in caplog.text


def test_servers_that_do_not_wake_up_are_restarted_a_bounded_number_of_times(
    behave: Behave, started: Started
) -> None:
    behave(stubborn=True)
    lm = VLLMEngine("m", sleep=True, restarts=1)

    async def body() -> None:
        for _ in range(2):
            await text(lm)
            async with lm.asleep(["0"]):
                pass
        with pytest.raises(
            CompoundError, match="2 vLLM servers of 'm' ended by themselves, or did not"
        ):
            await text(lm)

    run(lm, body())
    assert len(started.rows) == 2


def test_a_server_that_dies_asleep_is_started_again(behave: Behave, started: Started) -> None:
    lm = VLLMEngine("m", sleep=True)

    async def body() -> None:
        await text(lm)
        async with lm.asleep(["0"]):
            call = asyncio.create_task(text(lm))
            await until(lambda: waiting(lm) == 1)
            os.kill(started.pids[0], signal.SIGKILL)
            await has_ended(started.pids[0])
            assert len(started.rows) == 1
        assert await call == "four"

    run(lm, body())
    assert len(started.rows) == 2


def test_a_server_whose_sleep_was_cancelled_is_started_again(
    behave: Behave, started: Started
) -> None:
    behave(endless="/sleep")
    lm = VLLMEngine("m", sleep=True)

    async def sleep() -> None:
        async with lm.asleep(["0"]):
            pytest.fail("it was cancelled")

    async def body() -> None:
        await text(lm)
        sleeping = asyncio.create_task(sleep())
        await until(lambda: started.requests() == [CHAT, "/sleep"])
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        assert await text(lm) == "four"

    run(lm, body())
    assert len(started.rows) == 2


def test_a_cancelled_wait_for_calls_in_flight_changes_nothing(
    behave: Behave, started: Started, tmp_path: Path
) -> None:
    lm, answer = VLLMEngine("m", sleep=True), tmp_path / "answer"

    async def sleep() -> None:
        async with lm.asleep(["0"]):
            pytest.fail("it was cancelled")

    async def body() -> None:
        first = asyncio.create_task(lm.generate(request(f"wait for {answer}")))
        await until(lambda: started.requests() == [CHAT])
        sleeping = asyncio.create_task(sleep())
        await until(lambda: lm._awake._closed)
        sleeping.cancel()
        await asyncio.wait([sleeping])
        assert await text(lm) == "four"  # while the first call is in flight
        answer.touch()
        await first

    run(lm, body())
    assert started.requests() == [CHAT, CHAT]


def test_the_next_call_wakes_a_server_after_an_error_in_the_block(
    behave: Behave, started: Started
) -> None:
    lm = VLLMEngine("m", sleep=True)

    async def body() -> None:
        await text(lm)
        with pytest.raises(ZeroDivisionError):
            async with lm.asleep(["0"]):
                raise ZeroDivisionError
        assert await text(lm) == "four"

    run(lm, body())
    assert started.requests() == [CHAT, "/sleep", *WAKING, CHAT]


def test_an_engine_that_is_closed_in_the_block_can_be_used_again(
    behave: Behave, started: Started
) -> None:
    lm = VLLMEngine("m", sleep=True)

    async def body() -> None:
        await text(lm)
        async with lm.asleep(["0"]):
            await lm.aclose()
        assert await text(lm) == "four"

    run(lm, body())
    assert len(started.rows) == 2


# -- fleets --------------------------------------------------------------------------------------------------


async def ask_all(lm: FleetEngine) -> None:
    await asyncio.gather(*(lm.generate(request(str(i))) for i in range(24)))


def test_every_replica_sleeps_and_wakes(behave: Behave, started: Started) -> None:
    lm = FleetEngine(replicas=2, vllm={"model": "m", "sleep": True})

    async def body() -> None:
        await ask_all(lm)
        async with lm.asleep(["0"]) as slept:
            assert slept
            assert [started.requests(pid)[-1] for pid in started.pids] == ["/sleep", "/sleep"]
            later = asyncio.create_task(ask_all(lm))
            await until(lambda: waiting(*lm.processes) == 24)
            assert [started.requests(pid)[-1] for pid in started.pids] == ["/sleep", "/sleep"]
        await later
        for pid in started.pids:
            paths = started.requests(pid)
            at = paths.index("/sleep")
            assert paths[at + 1 : at + 4] == [*WAKING, CHAT]

    run(lm, body())
    assert len(started.rows) == 2


def test_only_replicas_on_the_gpus_of_the_trainer_sleep(behave: Behave, started: Started) -> None:
    lm = FleetEngine(
        devices=[[0, 1], [2, 3]], vllm={"model": "m", "sleep": True, "args": ["-tp", "2"]}
    )
    assert [engine.gpus for engine in lm.processes] == [("0", "1"), ("2", "3")]
    lm.limit_gpu_memory({"3": 0.25})

    async def body() -> None:
        await ask_all(lm)
        async with lm.asleep(["3"]) as slept:
            assert slept

    run(lm, body())
    slept = {
        row["env"]["CUDA_VISIBLE_DEVICES"]: started.requests(row["pids"][0])[-1]
        for row in started.rows
    }
    assert slept == {"0,1": CHAT, "2,3": "/sleep"}
    limited = {row["env"]["CUDA_VISIBLE_DEVICES"]: "0.25" in row["argv"] for row in started.rows}
    assert limited == {"0,1": False, "2,3": True}


def test_a_replica_that_dies_asleep_is_started_again(behave: Behave, started: Started) -> None:
    lm = FleetEngine(replicas=2, vllm={"model": "m", "sleep": True})

    async def body() -> None:
        await ask_all(lm)
        async with lm.asleep(["0"]):
            os.kill(started.pids[0], signal.SIGKILL)
            await has_ended(started.pids[0])
        await ask_all(lm)
        await until(lambda: len(started.rows) == 3 and all(stats.up for stats in lm.replicas))
        await ask_all(lm)

    run(lm, body())


def test_replicas_are_awake_after_another_one_refused_to_sleep(
    behave: Behave, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave(fault={"/sleep": [404, "Not Found", {}]})
    lm = FleetEngine(replicas=2, vllm={"model": "m", "sleep": True})

    async def body() -> None:
        await ask_all(lm)
        with pytest.raises(CompoundError, match="no sleep mode"):
            async with lm.asleep(["0"]):
                pytest.fail("the memory was not released")
        await ask_all(lm)

    run(lm, body())
    assert len(started.rows) == 2


# -- the key of all routes -----------------------------------------------------------------------------------


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

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append("passed")

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        seen.extend(message[name] for name in ("status", "code") if name in message)

    scope = {
        "type": kind,
        "path": "/collective_rpc",
        **({} if headers is None else {"headers": headers}),
    }
    asyncio.run(KeyRequired(app)(scope, receive, send))
    assert seen == [wanted]
