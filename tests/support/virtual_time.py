"""Event loop in virtual time: its clock jumps to the next timer, so that waits take no time."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self._loop.now += timeout
        if not ready and timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time.

    Attributes:
        now: the time of its clock in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that uses no threads or sockets in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine in virtual time."""

    @functools.wraps(test)
    def run_test(**given: Any) -> None:
        run(test(**given))

    return run_test
