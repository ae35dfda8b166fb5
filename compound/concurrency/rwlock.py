"""A readers-writer lock for tasks of one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class RWLock:
    """A lock held by any number of readers, or by one writer.

    Readers and writers alternate: all readers waiting for a writer are admitted when it releases the lock,
    before the next writer, so that neither side can starve the other.

    >>> async def passing(lock: RWLock, name: str, seen: list[str]) -> None:
    ...     async with lock.read():
    ...         await asyncio.sleep(0)
    ...         seen.append(name)
    >>> async def main() -> list[str]:
    ...     lock, seen = RWLock(), []
    ...     first = asyncio.create_task(passing(lock, "first", seen))
    ...     await asyncio.sleep(0)
    ...     async with lock.write():
    ...         second = asyncio.create_task(passing(lock, "second", seen))
    ...         await asyncio.sleep(0.01)
    ...         seen.append("alone")
    ...     await second
    ...     return seen
    >>> asyncio.run(main())
    ['first', 'alone', 'second']
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
        """Admit all waiting tasks."""
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
