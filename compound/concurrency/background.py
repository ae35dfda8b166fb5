"""One event loop for the whole process, in a thread of its own.

For a library that keeps its connections and queues once per process and binds them to an event loop: our own
callers each bring one (every `System.run` starts a loop, and servers and notebooks run several at once).
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
from collections.abc import Coroutine
from typing import TypeVar

Value = TypeVar("Value")
_LOCK = threading.Lock()


async def in_background(work: Coroutine[object, None, Value]) -> Value:
    """Run a coroutine on the process's own loop and wait for it on the caller's; cancelling reaches it.

    >>> async def where() -> str:
    ...     return threading.current_thread().name
    >>> asyncio.run(in_background(where()))
    'compound-background'
    """
    with _LOCK:
        loop = _loop()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run, args=(loop,), name="compound-background", daemon=True)
    thread.start()
    atexit.register(_stop, loop, thread, os.getpid())
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then end what is left on it."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for task in (left := asyncio.all_tasks(loop)):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, owner: int) -> None:
    if os.getpid() == owner:  # a fork has no such thread
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=5)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_loop.cache_clear)
