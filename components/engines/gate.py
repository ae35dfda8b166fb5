"""A gate that many may pass together, and that one may close to be alone behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Gate:
    """Belongs to one event loop.

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
        self._turn = asyncio.Lock()
        self._opened, self._empty = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._empty.set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Be inside while the block runs, with others; waits while the gate is closed."""
        while not self._opened.is_set():
            await self._opened.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Close the gate, wait until nobody is inside, and open it when the block ends."""
        async with self._turn:
            self._opened.clear()
            try:
                await self._empty.wait()
                yield
            finally:
                self._opened.set()
