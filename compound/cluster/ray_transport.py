"""Workers as actors of a Ray cluster.

The driver sends each actor text only. Ray transmits the actor class by its name, so that a worker runs the
code that is installed on its machine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

from compound.cluster.transport import WorkerConnection, WorkerLost
from compound.cluster.worker import serve
from compound.errors import CompoundError
from compound.extras import explain_missing

HINT = "start one with `ray start --head`, correct optimize.runner.ray.address, or use address: local"


class ClusterUnavailable(CompoundError):
    """There is no Ray cluster at the address, or it cannot start workers."""


class _Inbox:
    """The worker's end of its connection: texts that the actor's methods put in and take out."""

    def __init__(self) -> None:
        self.arriving: asyncio.Queue[str] = asyncio.Queue()
        self.leaving: list[str] = []
        self.some = asyncio.Event()

    async def send(self, text: str) -> None:
        self.leaving.append(text)
        self.some.set()

    async def receive(self) -> str:
        return await self.arriving.get()

    async def aclose(self) -> None:
        """Do nothing; the driver ends the actor."""


class WorkerActor:
    """A worker in a Ray actor. Its methods run in one event loop with the examples."""

    def __init__(self) -> None:
        self._inbox = _Inbox()
        self._serving: asyncio.Task[None] | None = None

    async def put(self, text: str) -> None:
        """Deliver a text of the driver."""
        if self._serving is None:
            self._serving = asyncio.create_task(serve(self._inbox))
        self._inbox.arriving.put_nowait(text)

    async def take(self) -> list[str]:
        """Wait for texts to the driver and return all that there are."""
        waiting = asyncio.create_task(self._inbox.some.wait())
        await asyncio.wait(
            {waiting, *([self._serving] if self._serving is not None else [])},
            return_when=asyncio.FIRST_COMPLETED,
        )
        waiting.cancel()
        if self._serving is not None and self._serving.done():
            self._serving.result()  # raises what ended the worker
        texts, self._inbox.leaving = self._inbox.leaving, []
        self._inbox.some.clear()
        return texts


class _Handle(Protocol):
    """An actor as its driver sees it; Ray has no types for it."""

    put: Any
    take: Any


class _RayConnection:
    """The driver's end of the connection to an actor."""

    def __init__(self, actor: _Handle) -> None:
        self._actor = actor
        self._texts: deque[str] = deque()

    async def send(self, text: str) -> None:
        await self._call(self._actor.put, text)

    async def receive(self) -> str:
        while not self._texts:
            self._texts.extend(await self._call(self._actor.take))
        return self._texts.popleft()

    async def aclose(self) -> None:
        import ray

        with suppress(Exception):  # the cluster may be gone
            await asyncio.to_thread(ray.kill, self._actor)

    @staticmethod
    async def _call(method: Any, *arguments: str) -> Any:  # noqa: ANN401 - Ray has no types
        from ray.exceptions import RayError

        try:
            return await method.remote(*arguments)
        except RayError as error:
            raise WorkerLost(_line(error, -1)) from error


class RayTransport:
    """Starts workers on a Ray cluster.

    Args:
        address: address of the cluster: ``auto``, ``local`` to start one on this machine, or ``host:port``.
        cpus: processors that each worker reserves.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(self, address: str = "auto", cpus: float = 1.0) -> None:
        with explain_missing("optimize.runner.ray"):
            import ray
        self._ray = ray
        self._address, self._cpus = address, cpus
        self._opening = asyncio.Lock()
        self._own = False

    async def connect(self, number: int) -> WorkerConnection:
        """Start a worker; see `Transport.connect`."""
        async with self._opening:
            if not self._ray.is_initialized():
                await self._open()
        actor = self._ray.remote(WorkerActor).options(
            num_cpus=self._cpus, max_restarts=0, max_concurrency=1000
        )
        return _RayConnection(actor.remote())

    async def aclose(self) -> None:
        """Disconnect from the cluster, unless the caller was connected before."""
        if self._own:
            self._own = False
            await asyncio.to_thread(self._ray.shutdown)

    async def _open(self) -> None:
        try:
            await asyncio.to_thread(
                self._ray.init, address=self._address, namespace="compound", log_to_driver=False,
                include_dashboard=None, logging_level="ERROR",
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            raise ClusterUnavailable(
                f"no Ray cluster at address {self._address!r}: {_line(error, 0)}", hint=HINT
            ) from error
        self._own = True


def _line(error: Exception, at: int) -> str:
    """Return a line of an error's text, or its class if it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[at][:300]
