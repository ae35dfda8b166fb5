"""Connections that are opened at their first use and closed with their owner, such as those to tool servers.

All connections live on the background loop, so that owners with different event loops can use them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Protocol, TypeVar, cast

from compound.concurrency.background import run_in_background


class Closable(Protocol):
    """A connection."""

    async def aclose(self) -> None:
        """Close it; called on the background loop."""
        ...


Connection = TypeVar("Connection", bound=Closable)


class Sessions:
    """Open connections by key.

    Example:
        >>> class Opened:
        ...     async def aclose(self) -> None:
        ...         print("closed")
        >>> async def open_it() -> Opened:
        ...     return Opened()
        >>> async def main() -> bool:
        ...     sessions = Sessions()
        ...     one, other = [await sessions.get("server", open_it) for _ in range(2)]
        ...     await sessions.aclose()
        ...     return one is other
        >>> asyncio.run(main())
        closed
        True
    """

    def __init__(self) -> None:
        self._opened: dict[Hashable, asyncio.Task[Closable]] = {}

    async def get(self, key: Hashable, opener: Callable[[], Awaitable[Connection]]) -> Connection:
        """Return the connection of a key; concurrent callers share one that is being opened.

        Args:
            key: identifies the connection.
            opener: opens it; called on the background loop.
        """
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
