"""A fleet of vLLM processes that the engine starts: their GPUs, their deaths, and their end."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import fake_vllm as fake
from compound.components.engines.fleet.engine import FleetEngine
from compound.engine import Completion
from compound.errors import CallError, CompoundError
from vllm_requests import new_adapter, request, until

pytest.importorskip("httpx")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the command ``vllm`` by the fake; the file lists the started processes."""
    path = tmp_path / "told" / "started.jsonl"
    path.parent.mkdir()
    monkeypatch.setenv("COMPOUND_VLLM", shlex.join([sys.executable, str(Path(fake.__file__))]))
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path / "told"))
    monkeypatch.setenv("FAKE_VLLM", json.dumps({"file": str(path)}))
    return path


def started(told: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_process_is_started_for_each_group_of_gpus_and_ended(told: Path) -> None:
    lm = FleetEngine(devices=[[0, 1], [2, 3]], vllm={"model": "m", "max_lora_rank": 8})
    assert (lm.name, lm.remote, lm.max_lora_rank) == ("fleet:vllm:m", False, 8)

    async def run() -> None:
        assert (await lm.generate(request())).text == "four"
        await lm.aclose()

    asyncio.run(run())
    rows = started(told)
    assert sorted(row["env"]["CUDA_VISIBLE_DEVICES"] for row in rows) == ["0,1", "2,3"]
    assert len({row["env"]["VLLM_API_KEY"] for row in rows}) == 2
    assert not any(is_running(pid) for row in rows for pid in row["pids"])
    assert [stats.name for stats in lm.replicas] == ["process 0", "process 1"]


def test_processes_without_devices_inherit_the_environment(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    lm = FleetEngine(replicas=2, vllm={"model": "m"})
    lm.prepare(64)

    async def run() -> None:
        await lm.warm_up()
        await lm.aclose()

    asyncio.run(run())
    assert [row["env"]["CUDA_VISIBLE_DEVICES"] for row in started(told)] == ["5", "5"]
    assert all(row["argv"][row["argv"].index("--max-lora-rank") + 1] == "64" for row in started(told))


def test_a_process_that_is_killed_in_mid_step_loses_nothing_and_is_started_again(
    told: Path, tmp_path: Path
) -> None:
    adapter = new_adapter(tmp_path, 0.5)
    lm = FleetEngine(replicas=2, vllm={"model": "m"})

    async def step() -> list[Completion]:
        asked = (request(str(i), adapter=adapter, want_tokens=True, temperature=1.0) for i in range(24))
        return await asyncio.gather(*map(lm.generate, asked))

    async def run() -> list[Completion]:
        found = await step()
        os.kill(started(told)[0]["pids"][0], signal.SIGKILL)
        found += await step()
        await until(lambda: len(started(told)) == 3 and all(stats.up for stats in lm.replicas))
        found += await step()
        await lm.aclose()
        return found

    completions = asyncio.run(run())
    assert [completion.text for completion in completions] == ["four"] * 72
    assert {c.tokens.logprobs[0] for c in completions if c.tokens} == {-1.0}  # those of the adapter
    assert all(stats.requests > 0 for stats in lm.replicas)
    assert not any(is_running(pid) for row in started(told) for pid in row["pids"])


def test_a_process_that_is_not_started_again_leaves_the_others(
    told: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lm = FleetEngine(replicas=2, vllm={"model": "m", "restarts": 0})

    async def run() -> None:
        await lm.warm_up()
        os.kill(started(told)[0]["pids"][0], signal.SIGKILL)
        for i in range(12):
            assert (await lm.generate(request(str(i)))).text == "four"
        await until(lambda: "is not used again" in caplog.text)
        os.kill(started(told)[1]["pids"][0], signal.SIGKILL)
        with pytest.raises(CompoundError, match=r"no replica can be used: .*ended by themselves") as caught:
            await lm.generate(request())
        assert not isinstance(caught.value, CallError)
        await lm.aclose()

    asyncio.run(run())
    assert len(started(told)) == 2


def test_a_process_that_cannot_start_is_reported_with_its_log(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaviour = {"file": str(told), "print": ["ValueError: no such model"], "exit": 3}
    monkeypatch.setenv("FAKE_VLLM", json.dumps(behaviour))
    lm = FleetEngine(replicas=2, vllm={"model": "m"})

    async def run() -> None:
        try:
            await lm.generate(request())
        finally:
            await lm.aclose()

    with pytest.raises(CompoundError, match=r"exit code 3(.|\n)*no such model"):
        asyncio.run(run())
    assert not any(is_running(pid) for row in started(told) for pid in row["pids"])
