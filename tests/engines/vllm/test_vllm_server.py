"""The vLLM server that the engine starts: start, supervision and end, in any order of failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import compound as cp
import fake_vllm as fake
from compound.core.engine import Adapter
from compound.core.errors import CallError, CompoundError, DeclarationError, TransientError
from compound.core.storage.artifacts import folder_digest
from compound.engines.vllm import guard
from compound.engines.vllm import server as vllm_server
from compound.engines.vllm.engine import VLLMEngine
from vllm_requests import ask, is_running, request, started, until

pytest.importorskip("httpx")


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 120
    while any(map(is_running, pids)):
        assert time.monotonic() < until, "still running"
        time.sleep(0.02)


def test_a_server_is_started_as_training_needs_it_and_ended(told: Path) -> None:
    lm = VLLMEngine("m", args=["--dtype", "bfloat16"], max_lora_rank=8, max_loras=2)
    first, second = ask(lm, request("a"), request("b"))
    assert first.text == second.text == "four"
    (row,) = started(told)
    argv = row["argv"]
    assert argv[:2] == ["serve", "m"]
    assert argv[argv.index("--max-lora-rank") + 1] == "8"
    assert argv[argv.index("--max-loras") + 1] == "2"
    assert argv[argv.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert {"--enable-lora", "--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(
        argv
    )
    assert argv[-2:] == ["--dtype", "bfloat16"]
    assert row["env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert len(row["env"]["VLLM_API_KEY"]) == 32
    assert not any(map(is_running, row["pids"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_memory": 0.0}, "gpu_memory: Input should be greater than 0"),
        ({"gpu_memory": 1.1}, "gpu_memory: Input should be less than or equal to 1"),
        ({"gpu_memory": 0.5, "args": ["--gpu_memory_util=0.5"]}, "both limit the memory"),
        ({"gpu_memory": 0.5, "args": ["--kv-cache-memory-bytes", "9"]}, "both limit the memory"),
        ({"gpu_memory": 0.5, "api_base": "http://127.0.0.1:8000/v1"}, "gpu_memory is a setting of"),
        ({"sleep": True, "api_base": "http://127.0.0.1:8000/v1"}, "sleep is a setting of servers"),
        ({"args": ["--enable-sleep-mode"]}, "args must not set '--enable-sleep-mode'"),
    ],
)
def test_inconsistent_memory_settings_are_refused(settings: dict[str, Any], message: str) -> None:
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
    told: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    left: dict[str, float],
    wanted: list[str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lm = VLLMEngine("m", **settings)
    lm.limit_gpu_memory(left)
    ask(lm)
    argv = started(told)[0]["argv"]
    found = [argv[i + 1] for i, name in enumerate(argv) if name == "--gpu-memory-utilization"]
    assert found == wanted


@pytest.mark.parametrize(
    ("device", "args", "wanted"),
    [
        ("", [], ["--no-enable-chunked-prefill"]),
        ("nvidia0", [], []),
        ("kfd", [], []),
        ("", ["--enable-chunked-prefill"], ["--enable-chunked-prefill"]),
    ],
)
def test_without_an_accelerator_prompts_are_not_read_in_chunks(
    told: Path, monkeypatch: pytest.MonkeyPatch, device: str, args: list[str], wanted: list[str]
) -> None:
    monkeypatch.setattr(vllm_server, "_accelerators", lambda: [device] if device else [])
    ask(VLLMEngine("m", args=args))
    assert [a for a in started(told)[0]["argv"] if "chunked" in a] == wanted


@pytest.mark.parametrize(
    ("args", "wanted"),
    [([], "safetensors"), (["--load-format", "gguf"], "gguf"), (["--load_format", "pt"], "")],
)
def test_weights_are_read_from_safetensors_unless_the_arguments_say_otherwise(
    told: Path, args: list[str], wanted: str
) -> None:
    ask(VLLMEngine("m", args=args))
    argv = started(told)[0]["argv"]
    assert argv.count("--load-format") == bool(wanted)
    assert not wanted or argv[argv.index("--load-format") + 1] == wanted


@pytest.mark.parametrize(
    ("rank", "settings", "wanted"),
    [
        (64, {}, "64"),
        (20, {}, "32"),
        (4, {}, "16"),
        (4, {"max_lora_rank": 128}, "128"),
        (4, {"max_lora_rank": 12}, "16"),
    ],
)
def test_a_server_is_started_with_the_rank_that_the_system_needs(
    told: Path, rank: int, settings: dict[str, int], wanted: str
) -> None:
    agent = cp.LLM("agent", prompt="Answer.", weights=cp.LoRA(rank))
    system = cp.System("s", outputs={"answer": agent(question=cp.Input("question", str))}, lm="lm")
    lm = VLLMEngine("m", **settings)  # type: ignore[arg-type]
    cp.run(system, {"question": "?"}, engines={"lm": lm})
    argv = started(told)[0]["argv"]
    assert argv[argv.index("--max-lora-rank") + 1] == wanted
    assert len(started(told)) == 1


def test_a_closed_engine_can_be_used_again(told: Path) -> None:
    lm = VLLMEngine("m", restarts=0)
    ask(lm)
    ask(lm)
    assert len(started(told)) == 2


async def test_calls_made_together_start_one_server(told: Path) -> None:
    lm = VLLMEngine("m")

    async with contextlib.aclosing(lm):
        await asyncio.gather(*(lm.generate(request()) for _ in range(8)))
    assert len(started(told)) == 1


async def test_a_server_that_dies_in_a_call_is_started_again(told: Path, tmp_path: Path) -> None:
    fake.write_adapter(tmp_path / "adapter", 0.5)
    adapter = Adapter(str(tmp_path / "adapter"), folder_digest(tmp_path / "adapter"))
    tuned = request(adapter=adapter, want_tokens=True, temperature=1.0)
    lm = VLLMEngine("m")
    logs: list[str] = []

    async with contextlib.aclosing(lm):
        await lm.generate(tuned)
        with pytest.raises(TransientError, match=r"ended during .*exit code 137") as caught:
            await lm.generate(request("die"))
        logs.append(str(caught.value).rpartition("its log is ")[2])
        completion = await lm.generate(tuned)  # which is loaded and checked again
        assert completion.tokens is not None
        assert completion.tokens.logprobs[0] == -1.0
    assert Path(logs[0]).parent == tmp_path / "told" / "cache" / "vllm"
    assert Path(logs[0]).is_file()  # noqa: ASYNC240
    rows = started(told)
    assert len(rows) == 2
    wait_until_gone([pid for row in rows for pid in row["pids"]])


async def test_a_server_that_dies_between_calls_is_started_again(told: Path) -> None:
    lm = VLLMEngine("m")

    async with contextlib.aclosing(lm):
        await lm.generate(request())
        os.kill(started(told)[0]["pids"][0], signal.SIGKILL)
        wait_until_gone(started(told)[0]["pids"])  # what it had started, too
        await until(lambda: lm._link is not None and lm._link.ended)  # the guard has to say so
        assert (await lm.generate(request())).text == "four"
    assert len(started(told)) == 2


async def test_restarts_are_bounded(told: Path) -> None:
    lm = VLLMEngine("m", restarts=1)

    async with contextlib.aclosing(lm):
        for _ in range(2):
            with pytest.raises(TransientError):
                await lm.generate(request("die"))
        with pytest.raises(CompoundError, match=r"2 vLLM servers of 'm' ended .*\.log") as caught:
            await lm.generate(request())
        assert not isinstance(caught.value, CallError)
    assert len(started(told)) == 2


def test_a_failed_start_shows_the_end_of_the_log(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"line {i}" for i in range(50)] + ["ValueError: no such model"]
    monkeypatch.setenv("FAKE_VLLM", json.dumps({"file": str(told), "print": lines, "exit": 3}))
    with pytest.raises(CompoundError) as caught:
        ask(VLLMEngine("m"))
    assert not isinstance(caught.value, CallError)
    said = str(caught.value)
    assert "exit code 3" in said
    assert "ValueError: no such model" in said
    assert "line 31" in said
    assert "line 30" not in said
    assert Path(said.rpartition("the full log is ")[2]).read_text().startswith("line 0\n")
    wait_until_gone(started(told)[0]["pids"])  # the child that it left behind, too


def test_a_server_that_is_never_ready_is_ended(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "FAKE_VLLM", json.dumps({"file": str(told), "idle": True, "print": ["loading"]})
    )
    with pytest.raises(CompoundError, match="was not ready(.|\n)*loading"):
        ask(VLLMEngine("m", start_timeout=0.5))
    wait_until_gone([pid for row in started(told) for pid in row["pids"]])


async def test_closing_an_engine_ends_a_server_that_is_still_starting(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", json.dumps({"file": str(told), "idle": True}))
    lm = VLLMEngine("m")

    async with contextlib.aclosing(lm):
        call = asyncio.create_task(lm.generate(request()))
        await until(lambda: bool(started(told)))
        call.cancel()
        await asyncio.wait([call])
        assert is_running(started(told)[0]["pids"][0]), "another call may be waiting for it"
    assert not any(map(is_running, started(told)[0]["pids"]))


def test_a_missing_command_says_how_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CompoundError,
        match="the command 'no-such-vllm' to start vLLM does not exist.*COMPOUND_VLLM=ENVIRONMENT/bin/vllm",
    ):
        ask(VLLMEngine("m", command="no-such-vllm"))


def test_a_foreign_server_is_recognized(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = fake.FakeVLLM("m", key="theirs").serve()
    monkeypatch.setattr(vllm_server, "_free_port", lambda: foreign.http.server_port)
    with pytest.raises(CompoundError, match="before it was ready(.|\n)*Address already in use"):
        ask(VLLMEngine("m"))
    foreign.stop()


def test_old_logs_are_deleted(told: Path) -> None:
    folder = told.parent / "cache" / "vllm"
    folder.mkdir(parents=True)
    for i in range(30):
        (folder / f"20200101-{i:06}-1-1.log").touch()
    ask(VLLMEngine("m"))
    assert sorted(path.name for path in folder.iterdir())[0] == "20200101-000014-1-1.log"
    assert len(list(folder.iterdir())) == 17


PARENT = """
import asyncio, sys, time
from compound.engines.vllm.engine import VLLMEngine
from compound.core.engine import Message, Request
lm = VLLMEngine("m")
asyncio.run(lm.generate(Request((Message("user", "hi"),))))
print("ready", flush=True)
{then}
"""


@pytest.mark.parametrize("way", ["kill -9", "exit"])
def test_a4_a_server_does_not_outlive_its_process(told: Path, way: str) -> None:
    then = "time.sleep(60)" if way == "kill -9" else ""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-W", "ignore", "-c", PARENT.format(then=then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        if way == "kill -9":
            assert all(map(is_running, started(told)[0]["pids"]))
            parent.kill()
    wait_until_gone(started(told)[0]["pids"])


def test_a_command_that_does_not_end_when_asked_is_killed(tmp_path: Path) -> None:
    deaf = (
        "import os, signal, time, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()) + '.'); time.sleep(60)"
    )
    run = f"import runpy, sys; m = runpy.run_path({guard.__file__!r}); m['main'].__globals__['GRACE'] = 0.2; "
    command = [
        sys.executable,
        "-c",
        run + "sys.exit(-m['main'](sys.argv[1:]))",
        sys.executable,
        "-c",
        deaf,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guarded:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        guarded.terminate()
        assert guarded.wait() == signal.SIGKILL
    wait_until_gone([int((tmp_path / "pid").read_text().rstrip("."))])
