"""A gate that many tasks may pass together, and that one task may close to be alone behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class Gate:
    """A lock with many shared holders or one exclusive holder, for tasks of one event loop.

    Shared and exclusive phases alternate: tasks that waited while the gate was closed all pass when it opens,
    before it can be closed again. Neither side can starve the other.

    >>> async def passing(gate: Gate, name: str, seen: list[str]) -> None:
    ...     async with gate.open():
    ...         await asyncio.sleep(0)
    ...         seen.append(name)
    >>> async def main() -> list[str]:
    ...     gate, seen = Gate(), []
    ...     first = asyncio.create_task(passing(gate, "first", seen))
    ...     await asyncio.sleep(0)
    ...     async with gate.alone():
    ...         second = asyncio.create_task(passing(gate, "second", seen))
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
    async def open(self) -> AsyncIterator[None]:
        """Be inside while the block runs, with others; waits while the gate is closed."""
        if self._closed:
            await self._admitted()
        else:
            self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Close the gate, wait until all holders have left, and reopen it when the block ends."""
        async with self._turn:
            self._closed = True
            try:
                await self._empty.wait()
                yield
            finally:
                self._closed = False
                self._admit()

    async def _admitted(self) -> None:
        """Wait until the gate opens; whoever opens it counts this task as inside."""
        admission = asyncio.get_running_loop().create_future()
        self._waiting.append(admission)
        try:
            await admission
        except asyncio.CancelledError:
            if admission.done() and not admission.cancelled():  # admitted and cancelled at once
                self._leave()
            raise

    def _admit(self) -> None:
        """Let in all tasks that wait."""
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
