"""The process's own event loop: what runs there, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from compound.core.loops import run_in_background
from processes import python


async def here() -> tuple[int, asyncio.AbstractEventLoop]:
    return threading.get_ident(), asyncio.get_running_loop()


def test_callers_in_all_threads_and_loops_share_one() -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: asyncio.run(run_in_background(here())), range(8)))
    assert len(found) == 1
    assert threading.get_ident() not in {thread for thread, _ in found}


async def test_what_it_raises_is_raised() -> None:
    async def broken() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_in_background(broken())


async def test_cancelling_reaches_it() -> None:
    ended = threading.Event()

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await run_in_background(long())
    assert ended.wait(120)


@pytest.mark.parametrize("left", ["", "asyncio.create_task(asyncio.sleep(60))"])
def test_a_process_ends_in_silence_with_nothing_or_something_left(left: str) -> None:
    code = f"""
import asyncio
from compound.core.loops import run_in_background

async def work():
    {left or "pass"}

asyncio.run(run_in_background(work()))
"""
    done = python("-W", "error", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
