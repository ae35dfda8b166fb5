"""Run async code from synchronous code, even if an event loop is already running, as in a notebook.

An interrupt (Ctrl-C, or a notebook's stop button) cancels the coroutine, which then closes its files; a
second interrupt does not wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from compound.extras import raise_missing_extra

Result = TypeVar("Result")


def run_blocking(coroutine: Coroutine[object, None, Result], *, interrupted: str = "") -> Result:
    """Run a coroutine to completion and return its result.

    Args:
        coroutine: the coroutine; runs on a new event loop, in another thread if this one has a running
            loop.
        interrupted: message of the `KeyboardInterrupt`, such as where the state is and how to continue.

    Raises:
        KeyboardInterrupt: the user interrupted the coroutine, which has been cancelled.
        MissingExtra: a required optional library is not installed.

    >>> async def answer() -> int:
    ...     return 42
    >>> run_blocking(answer())
    42
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
    """Runs a coroutine on an event loop in a new thread."""

    def __init__(self, coroutine: Coroutine[object, None, Result]) -> None:
        self._coroutine = coroutine
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[object] | None = None
        self._cancel_requested = False
        self._waiting = False
        self._early = False  # whether an interrupt arrived before the thread was waiting
        self._result: Future[Result] = Future()

    def result(self) -> Result:
        """Run the coroutine and return its result; an interrupt of the waiting thread cancels it."""
        run = contextvars.copy_context().run  # notebooks route printed output by context
        # A daemon, so that work that cannot be cancelled does not block the exit of the process.
        thread = threading.Thread(target=run, args=(self._work,), name="compound-blocking", daemon=True)
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
                    self._cancel()
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
        self._cancel_requested = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the coroutine has just finished
            self._loop.call_soon_threadsafe(self._cancel_task)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _main(self) -> Result:
        self._task = asyncio.current_task()
        if self._cancel_requested:
            self._coroutine.close()
            raise asyncio.CancelledError
        return await self._coroutine

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                value = runner.run(self._main())
            except BaseException as error:  # noqa: BLE001 - reraised in the waiting thread
                self._result.set_exception(error)  # before closing the loop, which waits for its threads
                return
        self._result.set_result(value)
