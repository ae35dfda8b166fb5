"""Transports for tests of clusters: workers in this process or behind pipes, with deaths on schedule."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from compound.cluster.messages import WorkerConnection, WorkerLost
from compound.cluster.worker import serve

Edit = Callable[[str], str]


@dataclass(eq=False)
class _End:
    """One end of a connection between two tasks of this process."""

    arriving: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    other: _End | None = None
    lost: bool = False

    async def send(self, text: str) -> None:
        if self.lost:
            raise WorkerLost("killed")
        assert self.other is not None
        await asyncio.sleep(0)
        self.other.arriving.put_nowait(text)

    async def receive(self) -> str:
        if self.lost:
            raise WorkerLost("killed")
        text = await self.arriving.get()
        if text is None:
            self.lost = True
            raise WorkerLost("killed")
        return text

    async def aclose(self) -> None:
        self.lost = True


class _DriverEnd(_End):
    """The driver's end; the worker dies before its batch number ``dies`` arrives, or after it."""

    serving: asyncio.Task[None]
    sent: list[str]
    dies: int | None = None
    after: bool = False
    edit: Edit = staticmethod(lambda text: text)
    batches: int = 0

    async def send(self, text: str) -> None:
        self.sent.append(text)
        await super().send(text)

    async def receive(self) -> str:
        text = await super().receive()
        self.batches += 1
        if self.dies is not None and self.batches > self.dies:
            self.serving.cancel()
            if not self.after:
                self.lost = True
                raise WorkerLost("killed")
            self.arriving = asyncio.Queue()
            self.arriving.put_nowait(None)
        return self.edit(text)

    async def aclose(self) -> None:
        self.lost = True
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)


class LocalTransport:
    """Workers as tasks of this process.

    Args:
        deaths: for each started worker in turn, the number of batches after which it dies, and
            whether the last one still arrives; later workers live.
        edit: changes each text that a worker sends.
    """

    def __init__(
        self, deaths: Sequence[tuple[int, bool]] = (), edit: Edit = lambda text: text
    ) -> None:
        self._deaths = list(deaths)
        self._edit = edit
        self.started = 0
        self.sent: list[list[str]] = []  # texts of the driver, for each started worker

    async def machines(self) -> int:
        return 2

    async def connect(self, number: int) -> WorkerConnection:
        driver, worker = _DriverEnd(), _End()
        driver.other, worker.other = worker, driver
        driver.sent = []
        self.sent.append(driver.sent)
        if self.started < len(self._deaths):
            driver.dies, driver.after = self._deaths[self.started]
            driver.dies += 1  # the handshake
        self.started += 1
        driver.edit = self._edit
        driver.serving = asyncio.create_task(serve(worker))
        return driver

    def jobs(self) -> list[list[str]]:
        """Return the kinds of the jobs that each started worker was sent."""
        sent = [[m["type"] for text in texts for m in json.loads(text)] for texts in self.sent]
        return [[kind for kind in kinds if kind in ("run", "generate")] for kinds in sent]

    async def aclose(self) -> None:
        pass


class _Pipe:
    """A worker process behind pipes, a text a line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def send(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        try:
            await self.process.stdin.drain()
        except ConnectionError as error:
            raise WorkerLost("its pipe is closed") from error

    async def receive(self) -> str:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise WorkerLost("its pipe is closed")
        return line.decode()

    async def aclose(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class PipeTransport:
    """Workers as processes, which a test can kill."""

    def __init__(self) -> None:
        self.processes: list[asyncio.subprocess.Process] = []

    async def machines(self) -> int:
        return 2

    async def connect(self, number: int) -> WorkerConnection:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from clusters.transports import run_worker; run_worker()",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**26,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.processes.append(process)
        return _Pipe(process)

    async def aclose(self) -> None:
        pass


class _Standard:
    """The worker's end of its pipes."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._out = os.dup(1)
        os.dup2(2, 1)  # what code prints is no message

    async def send(self, text: str) -> None:
        data = memoryview(text.encode() + b"\n")
        while data:
            data = data[os.write(self._out, data) :]

    async def receive(self) -> str:
        line = await self._reader.readline()
        if not line:
            raise WorkerLost("the driver has ended")
        return line.decode()

    async def aclose(self) -> None:
        pass


def run_worker() -> None:
    """Serve the driver at the other end of the standard streams."""

    async def main() -> None:
        reader = asyncio.StreamReader(limit=2**26)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await serve(_Standard(reader))

    asyncio.run(main())
