"""Interfaces to send texts between driver and worker: by Ray, and in tests by pipes or in one process."""

from __future__ import annotations

import asyncio
from typing import Protocol

from compound.cluster.messages import WorkerMessage, encode


class WorkerLost(Exception):
    """The other end of a connection is gone: the worker died, or its machine cannot be reached."""


class WorkerConnection(Protocol):
    """One end of a connection. Texts arrive once and in order, or the connection is lost."""

    async def send(self, text: str) -> None:
        """Send a text.

        Raises:
            WorkerLost: the other end is gone.
        """
        ...

    async def receive(self) -> str:
        """Wait for the next text.

        Raises:
            WorkerLost: the other end is gone.
        """
        ...

    async def aclose(self) -> None:
        """Close the connection; at the driver's end, end the worker."""
        ...


class Transport(Protocol):
    """Starts workers."""

    async def machines(self) -> int:
        """Return the number of machines that can run workers.

        Raises:
            CompoundError: there is none.
        """
        ...

    async def connect(self, number: int) -> WorkerConnection:
        """Start a worker and return the driver's end of its connection.

        Raises:
            CompoundError: no worker can be started; the message says why.
        """
        ...

    async def aclose(self) -> None:
        """Release what was opened to start workers."""
        ...


class Outbox:
    """Sends messages in order, those that wait together as one text.

    Args:
        connection: where to send them.
    """

    def __init__(self, connection: WorkerConnection) -> None:
        self._connection = connection
        self._waiting: list[WorkerMessage] = []
        self._some = asyncio.Event()

    def post(self, message: WorkerMessage) -> None:
        """Queue a message."""
        self._waiting.append(message)
        self._some.set()

    async def run(self) -> None:
        """Send queued messages.

        Raises:
            WorkerLost: the other end is gone.
        """
        while True:
            await self._some.wait()
            batch, self._waiting = self._waiting, []
            self._some.clear()
            await self._connection.send(encode(batch))
