"""Workers as actors of a Ray cluster.

The driver sends each actor text only. Ray transmits the actor class by its name, so that a worker runs the
code that is installed on its machine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Protocol

from compound.cluster.ray_cluster import RayCluster, losses
from compound.cluster.transport import WorkerConnection
from compound.cluster.worker import serve

GRACE = 0.001  # seconds that a reply of the driver may take before the worker is asked for more texts


class _InOrder:
    """Restores the order of texts; Ray does not guarantee that of calls to an asynchronous actor."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, str] = {}

    def add(self, number: int, text: str) -> list[str]:
        """Add the text with a number, from 0; return the texts that are next."""
        self._early[number] = text
        found = []
        while self._next in self._early:
            found.append(self._early.pop(self._next))
            self._next += 1
        return found


class _Inbox:
    """The worker's end of its connection: texts that the actor's method puts in and takes out."""

    def __init__(self) -> None:
        self.arriving: asyncio.Queue[str] = asyncio.Queue()
        self.leaving: list[tuple[int, str]] = []
        self._numbers = itertools.count()
        self._waiting: asyncio.Future[None] | None = None

    async def send(self, text: str) -> None:
        self.leaving.append((next(self._numbers), text))
        self.wake()

    async def some(self) -> None:
        """Return when there are texts that leave, or when `wake` is called."""
        if not self.leaving:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def wake(self) -> None:
        """Let the call that waits for texts return."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def receive(self) -> str:
        return await self.arriving.get()

    async def aclose(self) -> None:
        """Do nothing; the driver ends the actor."""


class WorkerActor:
    """A worker in a Ray actor. Its methods run in one event loop with the examples."""

    def __init__(self) -> None:
        self._inbox, self._in_order = _Inbox(), _InOrder()
        self._serving: asyncio.Task[None] | None = None

    async def exchange(self, number: int, text: str) -> list[tuple[int, str]]:
        """Deliver a text of the driver, unless it is empty, and wait for texts to the driver.

        The call returns them with their numbers as soon as there are any, or when the next call arrives.
        """
        if self._serving is None:
            self._serving = asyncio.create_task(serve(self._inbox))
            self._serving.add_done_callback(lambda _: self._inbox.wake())
        self._inbox.wake()
        for each in self._in_order.add(number, text) if text else ():
            self._inbox.arriving.put_nowait(each)
        if not self._serving.done():
            await self._inbox.some()
        if self._serving.done():
            self._serving.result()  # raises what ended the worker
        texts, self._inbox.leaving = self._inbox.leaving, []
        return texts


class _Handle(Protocol):
    """An actor as its driver sees it; Ray has no types for it."""

    exchange: Any


class _RayConnection:
    """The driver's end of the connection to an actor.

    A call delivers a text and returns what the worker sends next, so that an exchange is one call instead
    of two. If there is nothing to deliver for `GRACE` seconds and no call is open, an empty text is sent.
    At most two calls are open: the second makes the first one return.
    """

    def __init__(self, actor: _Handle) -> None:
        self._actor = actor
        self._exchange = actor.exchange
        self._texts: deque[str] = deque()
        self._calls: deque[Awaitable[list[tuple[int, str]]]] = deque()
        self._in_order, self._numbers = _InOrder(), itertools.count()
        self._changed = asyncio.Event()

    async def send(self, text: str) -> None:
        while len(self._calls) > 1:
            await self._wait()
        self._call(next(self._numbers), text)

    async def receive(self) -> str:
        while not self._texts:
            if not self._calls:
                await self._wait(GRACE)
            if not self._calls:
                self._call(-1, "")
            with losses():
                found = await self._calls[0]
            self._calls.popleft()
            for number, text in found:
                self._texts.extend(self._in_order.add(number, text))
            self._changed.set()
        return self._texts.popleft()

    async def aclose(self) -> None:
        import ray

        with suppress(Exception):  # the cluster may be gone
            await asyncio.to_thread(ray.kill, self._actor)

    async def _wait(self, seconds: float | None = None) -> None:
        """Wait until a call is opened or has returned, at most for a time."""
        self._changed.clear()
        if seconds is None:
            await self._changed.wait()
            return
        timer = asyncio.get_running_loop().call_later(seconds, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    def _call(self, number: int, text: str) -> None:
        with losses():
            self._calls.append(self._exchange.remote(number, text))
        self._changed.set()


class RayTransport:
    """Starts workers on a Ray cluster.

    Args:
        address: address of the cluster; see `RayCluster`.
        cpus: processors that each worker reserves.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(self, address: str = "auto", cpus: float = 1.0) -> None:
        self._cluster, self._cpus = RayCluster(address), cpus

    async def machines(self) -> int:
        """Return the number of machines with the processors that a worker reserves."""
        return len(await self._cluster.machines(self._cpus))

    async def connect(self, number: int) -> WorkerConnection:
        """Start a worker; Ray spreads them over machines. See `Transport.connect`."""
        await self._cluster.connect()
        worker = self._cluster.ray.remote(WorkerActor)
        actor = worker.options(
            num_cpus=self._cpus, max_restarts=0, max_concurrency=10, scheduling_strategy="SPREAD"
        )
        return _RayConnection(actor.remote())

    async def aclose(self) -> None:
        """Disconnect from the cluster, unless the caller was connected before."""
        await self._cluster.aclose()
