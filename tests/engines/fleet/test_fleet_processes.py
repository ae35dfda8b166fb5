"""A fleet of vLLM processes that the engine starts: their GPUs, their deaths, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from compound.core.engine import Completion
from compound.core.errors import CallError, CompoundError, TransientError
from compound.engines.fleet import FleetEngine
from vllm_requests import is_running, new_adapter, request, started, until

pytest.importorskip("httpx")


async def test_a_process_is_started_for_each_group_of_gpus_and_ended(told: Path) -> None:
    lm = FleetEngine(
        devices=[[0, 1], [2, 3]], vllm={"model": "m", "max_lora_rank": 8, "args": ["-tp", "2"]}
    )
    assert (lm.name, lm.remote, lm.max_lora_rank) == ('fleet:vllm:m:["-tp", "2"]', False, 8)

    async with contextlib.aclosing(lm):
        assert (await lm.generate(request())).text == "four"
    rows = started(told)
    assert sorted(row["env"]["CUDA_VISIBLE_DEVICES"] for row in rows) == ["0,1", "2,3"]
    assert len({row["env"]["VLLM_API_KEY"] for row in rows}) == 2
    assert not any(is_running(pid) for row in rows for pid in row["pids"])
    assert [stats.name for stats in lm.replicas] == ["process 0", "process 1"]


async def test_processes_without_devices_inherit_the_environment(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    lm = FleetEngine(replicas=2, vllm={"model": "m"})
    lm.prepare(64)

    async with contextlib.aclosing(lm):
        await lm.warm_up()
    assert [row["env"]["CUDA_VISIBLE_DEVICES"] for row in started(told)] == ["5", "5"]
    assert all(
        row["argv"][row["argv"].index("--max-lora-rank") + 1] == "64" for row in started(told)
    )


async def test_a_process_killed_in_a_step_loses_nothing_and_restarts(
    told: Path, tmp_path: Path
) -> None:
    adapter = new_adapter(tmp_path, 0.5)
    lm = FleetEngine(replicas=2, vllm={"model": "m"})

    async def step() -> list[Completion]:
        asked = (
            request(str(i), adapter=adapter, want_tokens=True, temperature=1.0) for i in range(24)
        )
        return await asyncio.gather(*map(lm.generate, asked))

    async with contextlib.aclosing(lm):
        completions = await step()
        os.kill(started(told)[0]["pids"][0], signal.SIGKILL)
        completions += await step()
        await until(lambda: len(started(told)) == 3 and all(stats.up for stats in lm.replicas))
        completions += await step()
    assert [completion.text for completion in completions] == ["four"] * 72
    assert {c.tokens.logprobs[0] for c in completions if c.tokens} == {-1.0}  # those of the adapter
    assert all(stats.requests > 0 for stats in lm.replicas)
    assert not any(is_running(pid) for row in started(told) for pid in row["pids"])


async def test_a_fleet_that_is_closed_with_requests_in_flight_starts_no_process(told: Path) -> None:
    """The requests end with the fleet: those in flight, and those that wait for a place."""
    async with contextlib.aclosing(
        FleetEngine(replicas=2, vllm={"model": "m", "concurrency": 2})
    ) as lm:
        await lm.warm_up()
        for row in started(told):
            os.kill(row["pids"][0], signal.SIGSTOP)
        calls = [asyncio.create_task(lm.generate(request(str(i)))) for i in range(9)]
        await until(lambda: sum(replica.load for replica in lm.replicas) == 6)
        await asyncio.sleep(0.1)
        for row in started(told):
            os.kill(row["pids"][0], signal.SIGKILL)
    found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 120)
    assert all(isinstance(each, TransientError) for each in found)
    assert len([each for each in found if "the fleet was closed" in str(each)]) >= 3
    assert len(started(told)) == 2
    assert not any(is_running(pid) for row in started(told) for pid in row["pids"])


async def test_a_process_that_is_not_started_again_leaves_the_others(
    told: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lm = FleetEngine(replicas=2, vllm={"model": "m", "restarts": 0})

    async with contextlib.aclosing(lm):
        await lm.warm_up()
        os.kill(started(told)[0]["pids"][0], signal.SIGKILL)
        for i in range(12):
            assert (await lm.generate(request(str(i)))).text == "four"
        await until(lambda: "is not used again" in caplog.text)
        os.kill(started(told)[1]["pids"][0], signal.SIGKILL)
        with pytest.raises(CompoundError, match=r"no replica can .*ended by themselves") as caught:
            await lm.generate(request())
        assert not isinstance(caught.value, CallError)
    assert len(started(told)) == 2
