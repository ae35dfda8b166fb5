"""A process-wide event loop in a background thread.

For libraries that keep connections and queues once per process and bind them to an event loop, whereas our
callers each bring their own (every `System.run` starts a loop, and servers and notebooks run several).
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


async def run_in_background(work: Coroutine[object, None, Value]) -> Value:
    """Run a coroutine on the process-wide loop and await it on the caller's; cancellation is propagated.

    >>> async def where() -> str:
    ...     return threading.current_thread().name
    >>> asyncio.run(run_in_background(where()))
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
    """Run the loop until it is stopped, then cancel its remaining tasks."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for task in (left := asyncio.all_tasks(loop)):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, owner: int) -> None:
    if os.getpid() == owner:  # the thread does not exist in a forked process
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=5)  # a stuck task must not block the exit


# the loop's thread does not survive a fork: the child starts its own on demand
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_loop.cache_clear)
