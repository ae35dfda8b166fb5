"""Event loops: run async code from synchronous code, share connections between loops, and a lock.

Async code runs even if an event loop is already running, as in a notebook. An interrupt (Ctrl-C, or
a notebook's stop button) cancels the coroutine, which then closes its files; a second interrupt
does not wait for that. Connections live on a background loop, so that owners with different event
loops can use them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
)
from concurrent.futures import Future, wait
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

from compound.core.errors import first_leaf, raise_missing_extra

Result = TypeVar("Result")


def run_blocking(coroutine: Coroutine[object, None, Result], *, interrupted: str = "") -> Result:
    """Run a coroutine to completion and return its result.

    Args:
        coroutine: the coroutine; runs on a new event loop, in another thread if this one has a
            running loop.
        interrupted: message of the `KeyboardInterrupt`, such as where the state is and how to
            continue.

    Raises:
        KeyboardInterrupt: the user interrupted the coroutine, which has been cancelled.
        MissingExtra: a required optional library is not installed.
    """
    try:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(coroutine)
        found: Result = _Elsewhere(coroutine).result()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(interrupted or "interrupted") from None
    except ImportError as error:
        raise_missing_extra(error)
        raise
    return found


class _Elsewhere(Generic[Result]):
    """Runs a coroutine on an event loop in a new thread, which an interrupt of this one cancels."""

    def __init__(self, coroutine: Coroutine[object, None, Result]) -> None:
        self._coroutine, self._loop = coroutine, asyncio.new_event_loop()
        self._task: asyncio.Task[Result] | None = None
        self._waiting = self._early = False  # an interrupt is early before this thread waits
        self._result: Future[Result] = Future()

    def result(self) -> Result:
        run = contextvars.copy_context().run  # notebooks route printed output by context
        # A daemon, so that work that cannot be cancelled does not block the exit of the process.
        thread = threading.Thread(
            target=run, args=(self._work,), name="compound-blocking", daemon=True
        )
        with self._handled():
            thread.start()
            try:
                self._waiting = True
                if self._early:
                    signal.raise_signal(signal.SIGINT)
                return self._result.result()
            except KeyboardInterrupt:
                if not self._result.done():
                    print("stopping; interrupt again to stop at once", file=sys.stderr, flush=True)
                    # the loop is closed: the coroutine has just finished
                    with contextlib.suppress(RuntimeError):
                        self._loop.call_soon_threadsafe(self._cancel)
                    wait([self._result])
                raise

    @contextlib.contextmanager
    def _handled(self) -> Iterator[None]:
        """Raise on Ctrl-C here: the running loop's own handler would wait for the code that blocks it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_interrupt(self, _signal: int, _frame: object) -> None:
        if self._waiting:
            raise KeyboardInterrupt
        self._early = True

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            self._task = runner.get_loop().create_task(self._coroutine)
            try:
                value = self._loop.run_until_complete(self._task)
            except BaseException as error:  # noqa: BLE001 - reraised in the waiting thread
                # before closing the loop, which waits for its threads
                self._result.set_exception(error)
                return
        self._result.set_result(value)


Value = TypeVar("Value")
P = ParamSpec("P")
_LOCK = threading.Lock()


async def run_in_background(work: Coroutine[object, None, Value]) -> Value:
    """Run a coroutine on the process-wide loop and await it on the caller's; cancellation is propagated."""
    with _LOCK:
        loop = _loop()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def in_background(
    method: Callable[P, Coroutine[Any, Any, Value]],
) -> Callable[P, Coroutine[Any, Any, Value]]:
    """Decorate a coroutine function that runs on the process-wide loop; see `run_in_background`."""

    @functools.wraps(method)
    async def run(*given: P.args, **named: P.kwargs) -> Value:
        return await run_in_background(method(*given, **named))

    return run


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
os.register_at_fork(after_in_child=_loop.cache_clear)


class Closable(Protocol):
    """A connection."""

    async def aclose(self) -> None:
        """Close it; called on the background loop."""
        ...


Connection = TypeVar("Connection", bound=Closable)


class Sessions:
    """Open connections by key."""

    def __init__(self) -> None:
        self._opened: dict[Hashable, asyncio.Task[Closable]] = {}

    async def get(self, key: Hashable, opener: Callable[[], Awaitable[Connection]]) -> Connection:
        """Return the connection of a key; concurrent callers share one that is being opened."""
        return cast("Connection", await run_in_background(self._get(key, opener)))

    async def _get(self, key: Hashable, opener: Callable[[], Awaitable[Closable]]) -> Closable:
        task = self._opened.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):

            async def opened() -> Closable:
                return await opener()

            task = self._opened[key] = asyncio.get_running_loop().create_task(opened())
        return await asyncio.shield(task)

    async def discard(self, key: Hashable, connection: Closable) -> None:
        """Close a connection that failed; the next `get` opens another one."""
        await run_in_background(self._discard(key, connection))

    async def _discard(self, key: Hashable, connection: Closable) -> None:
        task = self._opened.get(key)
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            if task.result() is not connection:  # another caller has replaced it already
                return
            del self._opened[key]
        await _close(connection)

    async def aclose(self) -> None:
        """Close all connections; later calls of `get` open new ones."""
        if self._opened:
            await run_in_background(self._close_all())

    async def _close_all(self) -> None:
        tasks, self._opened = [*self._opened.values()], {}
        for task in tasks:
            if not task.done():
                task.cancel()
            found = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(found[0], BaseException):
                await _close(found[0])


async def _close(connection: Closable) -> None:
    try:
        await connection.aclose()
    except Exception:
        logging.getLogger("compound").warning("closing %r failed", connection, exc_info=True)


T = TypeVar("T")


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order; cancel the others if one fails."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise first_leaf(errors) from None
    return [task.result() for task in tasks]


class RWLock:
    """A lock held by any number of readers, or by one writer.

    Readers and writers alternate: all readers waiting for a writer are admitted when it releases
    the lock, before the next writer, so that neither side can starve the other.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._closed = False
        self._turn = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        """Hold the lock together with other readers; wait while a writer holds or awaits it."""
        if self._closed:
            await self._wait_for_admission()
        else:
            self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[None]:
        """Hold the lock exclusively: block new readers, and wait until all readers have released it."""
        async with self._turn:
            self._closed = True
            try:
                await self._empty.wait()
                yield
            finally:
                self._closed = False
                self._admit()

    async def _wait_for_admission(self) -> None:
        """Wait until the writer releases the lock; it counts this task as a reader."""
        admission = asyncio.get_running_loop().create_future()
        self._waiting.append(admission)
        try:
            await admission
        except asyncio.CancelledError:
            if admission.done() and not admission.cancelled():  # admitted and cancelled at once
                self._leave()
            raise

    def _admit(self) -> None:
        while self._waiting:
            admission = self._waiting.popleft()
            if not admission.done():
                self._enter()
                admission.set_result(None)

    def _enter(self) -> None:
        self._inside += 1
        self._empty.clear()

    def _leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()
