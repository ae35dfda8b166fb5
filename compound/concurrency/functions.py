"""Run synchronous functions of users so that they do not block the event loop for long.

A function that takes microseconds runs on the event loop, since a thread costs more than its work. One that
blocked the loop once, and every function while a server runs, is called in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, TypeVar, get_args

from compound.concurrency.own_thread import exit_as_error, run_in_own_thread
from compound.errors import DeclarationError

T = TypeVar("T")

ThreadUse = Literal["auto", "always", "never"]
"""Where a synchronous function runs: on the event loop until a call was slow; always or never in a thread."""
SLOW = 0.01  # seconds on the event loop, after which a function with "auto" is called in threads
MAX_THREADS = 64  # per event loop; further calls wait
_ALL_IN_THREADS: ContextVar[bool] = ContextVar("_ALL_IN_THREADS", default=False)
_PLACES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


class FunctionRunner:
    """Calls a function, sync or async, on the event loop or in a thread.

    Args:
        name: the function's name, for threads and messages.
        function: the function.
        thread: where it runs if it is synchronous; a coroutine function always runs on the event loop.

    Raises:
        DeclarationError: ``thread`` has another value.

    Example:
        >>> runner = FunctionRunner("double", lambda x: 2 * x)
        >>> asyncio.run(runner.call(x=2))
        4
    """

    def __init__(self, name: str, function: Callable[..., object], thread: ThreadUse = "auto") -> None:
        if thread not in get_args(ThreadUse):
            raise DeclarationError(
                f"function {name!r}: thread must be one of {list(get_args(ThreadUse))}, but is {thread!r}"
            )
        self._name, self._function, self._thread = name, function, thread
        self._slow = False  # whether a call has blocked the event loop
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(type(function), "__call__", None)  # noqa: B004 - the method, to see whether it is async
        )

    async def call(self, /, *positional: object, **named: object) -> object:
        """Call the function and return its result, awaited if necessary.

        Raises:
            CallError: the function tried to end the program.
        """
        with exit_as_error(self._name):
            call = functools.partial(self._function, *positional, **named)
            result = self._timed(call) if self._runs_inline() else await run_in_thread(call, self._name)
            return await result if inspect.isawaitable(result) else result

    def _runs_inline(self) -> bool:
        if self._async or self._thread == "never":
            return True
        return self._thread == "auto" and not self._slow and not _ALL_IN_THREADS.get()

    def _timed(self, call: Callable[[], object]) -> object:
        started = time.perf_counter()
        try:
            return call()
        finally:
            if time.perf_counter() - started > SLOW:
                self._slow = True


async def run_in_thread(function: Callable[[], T], name: str) -> T:
    """Run a blocking function in a thread, at most `MAX_THREADS` at a time, and await its result.

    If the awaiting task is cancelled, the function continues, and keeps its place until it returns.
    """
    loop = asyncio.get_running_loop()
    places = _PLACES.setdefault(loop, asyncio.Semaphore(MAX_THREADS))
    await places.acquire()

    def work() -> T:
        try:
            return function()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no call waits for a place
                loop.call_soon_threadsafe(places.release)

    return await run_in_own_thread(work, name)


@contextlib.contextmanager
def all_in_threads() -> Iterator[None]:
    """Call all functions of ``thread="auto"`` in threads, for servers, which must answer meanwhile."""
    token = _ALL_IN_THREADS.set(True)
    try:
        yield
    finally:
        _ALL_IN_THREADS.reset(token)
