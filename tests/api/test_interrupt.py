"""Interrupting a call: it stops, keeps what was done, and says how to continue."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.loops import run_blocking
from compound.testing import ScriptedLM
from processes import python

ROOT = Path(__file__).parents[2]
GUARD = 120  # seconds; only a defect takes so long
FOREVER = 3600.0

COMMON = '''
import asyncio, sys, time
import compound as cp
from compound.testing import ScriptedLM

answered = []

async def reply(message):
    """Answer the first calls; the next one never ends."""
    if len(answered) >= stuck_after:
        print("STUCK", flush=True)
        await asyncio.Event().wait()
    answered.append(message)
    return "x"

node = cp.LLM("a", prompt=cp.Text("Answer."), max_tokens=4)(q=cp.Input("q"))
system = cp.System("s", outputs={"y": node}, lm="lm")
rows = [{"id": str(i), "q": str(i), "y": "x"} for i in range(20)]
data = {"train": rows[:6], "valid": rows[6:]}

def optimize():
    return cp.optimize(
        system, data, "exact_match", budget=60, method="random", run_dir="run", progress=False,
        engines={"lm": ScriptedLM(reply, concurrency=1)},
    )

stuck_after = 9
'''


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Handle SIGINT as on a terminal, also where this process was started with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupting(after: list[str]) -> Callable[[str], Any]:
    """Return a script whose first answer interrupts this process and then waits to be cancelled."""

    async def reply(message: str) -> str:
        interrupt()
        try:
            await asyncio.sleep(FOREVER)
        finally:
            after.append("cancelled")
        return ""

    return reply


def system() -> cp.System:
    return cp.System("s", outputs={"y": cp.LLM("a", timeout=None)(q=cp.Input("q"))}, lm="lm")


def test_an_interrupt_cancels_a_run_of_ordinary_code() -> None:
    after: list[str] = []
    with pytest.raises(KeyboardInterrupt, match="the run of 's' was interrupted"):
        cp.run(system(), {"q": "?"}, engines={"lm": ScriptedLM(interrupting(after))})
    assert after == ["cancelled"]


def test_an_interrupt_cancels_a_run_inside_a_running_loop() -> None:
    after: list[str] = []
    before = signal.getsignal(signal.SIGINT)

    async def cell() -> None:
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="the run of 's' was interrupted"):
            cp.run(system(), {"q": "?"}, engines={"lm": ScriptedLM(interrupting(after))})
        assert signal.getsignal(signal.SIGINT) is handler

    asyncio.run(cell())
    assert after == ["cancelled"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_leaves_uncancellable_work(monkeypatch: pytest.MonkeyPatch) -> None:
    release, ended = threading.Event(), threading.Event()

    async def stubborn() -> None:
        interrupt()
        release.wait(GUARD)  # blocks the loop: no cancellation gets through
        ended.set()

    def interrupted_wait(outcomes: Any) -> None:
        interrupt()
        concurrent.futures.wait(outcomes)

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt, match="told"):
            run_blocking(stubborn(), interrupted="told")

    monkeypatch.setattr("compound.core.loops.wait", interrupted_wait)
    asyncio.run(cell())
    assert not ended.is_set()
    release.set()
    assert ended.wait(GUARD)


def test_what_a_coroutine_returns_and_raises_passes_a_running_loop() -> None:
    async def answer() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise ValueError("as it is")

    async def cell() -> str:
        with pytest.raises(ValueError, match="as it is"):
            run_blocking(fail())
        return run_blocking(answer())

    assert asyncio.run(cell()) == "compound-blocking"


def test_a_call_from_another_thread_of_a_running_loop_works() -> None:
    async def cell() -> Any:
        return await asyncio.to_thread(
            cp.run, system(), {"q": "?"}, engines={"lm": ScriptedLM(["yes"])}
        )

    assert asyncio.run(cell()).outputs == {"y": "yes"}


@pytest.mark.slow
def test_an_interrupted_script_continues_where_it_was(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COMMON + "optimize()"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "STUCK\n"
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=GUARD)
    assert (
        "KeyboardInterrupt: stopped; progress is saved in run; optimize with run_dir='run'" in told
    )
    code = COMMON + "stuck_after = 10**6\nprint(optimize().spent['calls'], len(answered))"
    ran = python("-c", code, cwd=tmp_path)
    calls, again = map(int, ran.stdout.split())
    assert calls - again == 9  # those of the first process
