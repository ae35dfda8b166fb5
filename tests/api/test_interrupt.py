"""Interrupting a call: it stops, keeps what was done, and says how to continue; in scripts and in notebooks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
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

def evaluate():
    return cp.evaluate(system, rows, "exact_match", engines={"lm": ScriptedLM(reply, concurrency=1, stable_name=True)})

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


class Kernel:
    """A real notebook kernel."""

    def __init__(self, folder: Path) -> None:
        manager: Any = importlib.import_module("jupyter_client.manager")
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COMPOUND_CACHE": str(folder / "cache"),
        }
        self._manager, self._client = manager.start_new_kernel(
            startup_timeout=GUARD, kernel_name="python3", cwd=str(folder), env=environment
        )

    def execute(
        self, code: str, *, interrupt_at: tuple[str, ...] = ()
    ) -> tuple[dict[str, Any], str]:
        """Run a cell, interrupting it as each text is printed; returns its reply and what it printed."""
        waiting, printed = list(interrupt_at), ""
        number = self._client.execute(code)
        while True:
            message = self._client.get_iopub_msg(timeout=GUARD)
            if message["parent_header"].get("msg_id") != number:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
            while waiting and waiting[0] in printed:
                waiting.pop(0)
                self._manager.interrupt_kernel()
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        while (reply := self._client.get_shell_msg(timeout=GUARD))["parent_header"][
            "msg_id"
        ] != number:
            pass
        return reply["content"], printed

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["optimize", "evaluate"])
def test_an_interrupted_cell_stops_and_the_same_cell_continues(kernel: Kernel, what: str) -> None:
    assert kernel.execute(COMMON)[0]["status"] == "ok"
    reply, printed = kernel.execute(f"{what}()", interrupt_at=("STUCK",))
    assert reply["ename"] == "KeyboardInterrupt"
    assert "stopping; interrupt again to stop at once" in printed
    told = {"optimize": "progress is saved in run;", "evaluate": "cached calls are reused"}
    assert told[what] in reply["evalue"]
    code = f"stuck_after = 10**6; found = {what}(); print(len(answered), len(set(answered)))"
    reply, printed = kernel.execute(code)
    assert reply["status"] == "ok"
    answers, different = map(int, printed.split())
    assert answers > 9
    assert answers == different  # no call was made twice


@pytest.mark.slow
def test_a_second_interrupt_of_a_cell_is_immediate(kernel: Kernel) -> None:
    code = (
        "import time\nimport compound as cp\n"
        "def slow(q: str) -> str:\n    print('STUCK', flush=True)\n    time.sleep(3600)\n    return q\n"
        "system = cp.System('s', outputs={'y': cp.Function('slow', slow)(cp.Input('q'))})\n"
        "cp.run(system, {'q': '?'})"
    )
    reply, _ = kernel.execute(code, interrupt_at=("STUCK", "interrupt again"))
    assert reply["ename"] == "KeyboardInterrupt"
    assert "the run of 's' was interrupted" in reply["evalue"]
    assert kernel.execute("print(6 * 7)")[1] == "42\n"
