"""Requests, servers and adapters of the tests of vLLM engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_vllm as fake
from compound.core.engine import Adapter, Completion, Message, Request
from compound.core.storage.artifacts import folder_digest
from compound.engines.vllm.engine import VLLMEngine


def request(text: str = "What is 2 + 2?", **settings: Any) -> Request:
    return Request((Message("user", text),), **settings)


def ask(lm: VLLMEngine, *requests: Request) -> list[Completion]:
    """Make requests sequentially, and close the engine."""

    async def run() -> list[Completion]:
        try:
            return [await lm.generate(each) for each in requests or (request(),)]
        finally:
            await lm.aclose()

    return asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the condition did not become true within 120 s")


@contextlib.contextmanager
def running(count: int) -> Iterator[list[fake.FakeVLLM]]:
    """Run servers of one model."""
    made = [fake.FakeVLLM().serve() for _ in range(count)]
    yield made
    for server in made:
        if not server.stopping.is_set():
            server.stop()


def new_adapter(folder: Path, bias: float, before: float | None = 0.0, **settings: Any) -> Adapter:
    """Write an adapter, as `fake_vllm.write_adapter` does, into a new folder below the given one."""
    made = folder / f"adapter-{len(list(folder.iterdir()))}"
    fake.write_adapter(made, bias, before, **settings)
    return Adapter(str(made), folder_digest(made))


def started(told: Path) -> list[dict[str, Any]]:
    """Return the processes that were started instead of vLLM."""
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


def replace_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the command ``vllm`` by the fake; return the file that lists the started processes."""
    folder.mkdir(exist_ok=True)
    path = folder / "started.jsonl"
    command = [sys.executable, str(Path(fake.__file__))]
    monkeypatch.setenv("COMPOUND_VLLM", shlex.join(command))
    monkeypatch.setenv("COMPOUND_CACHE", str(folder / "cache"))
    monkeypatch.setenv("FAKE_VLLM", json.dumps({"file": str(path)}))
    return path


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
