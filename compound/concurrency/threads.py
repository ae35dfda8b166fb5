"""Run CPU-bound work in one dedicated thread.

glibc keeps per-thread arenas, so running training steps on a thread pool would hold one step's peak memory
per worker.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_THREAD = ThreadPoolExecutor(1, "compute")


async def compute(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    """Run a function in the compute thread, one at a time, and await its result.

    >>> import threading
    >>> async def names() -> set[str]:
    ...     return {await compute(lambda: threading.current_thread().name) for _ in range(3)}
    >>> asyncio.run(names())
    {'compute_0'}
    """
    run = functools.partial(contextvars.copy_context().run, function, *arguments, **named)
    return await asyncio.get_running_loop().run_in_executor(_THREAD, run)
