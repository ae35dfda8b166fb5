"""Transports for tests of clusters: workers in this process or behind pipes, with deaths on schedule."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from compound.cluster.messages import WorkerConnection, WorkerLost
from compound.cluster.worker import CallWorker

Edit = Callable[[str], str]


class LocalConnection:
    """A connection to a worker of this process, which dies at its answer number ``dies``.

    With ``after``, that answer still arrives.
    """

    def __init__(self, dies: int | None, after: bool, edit: Edit) -> None:
        self._worker, self._dies, self._after, self._edit = CallWorker(), dies, after, edit
        self._running: set[asyncio.Task[str]] = set()
        self._answers, self._lost = 0, False
        self.sent: list[str] = []

    async def call(self, text: str) -> str:
        self.sent.append(text)
        if self._lost:
            raise WorkerLost("killed")
        task = asyncio.create_task(self._worker.call(text))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            answer = await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                task.cancel()
                raise
            raise WorkerLost("killed") from None
        self._answers += 1
        if self._dies is not None and self._answers > self._dies:
            await self.aclose()
            if not self._after:
                raise WorkerLost("killed")
        return self._edit(answer)

    async def aclose(self) -> None:
        self._lost = True
        for task in self._running:
            task.cancel()


class LocalTransport:
    """Workers as tasks of this process.

    Args:
        deaths: for each started worker in turn, the number of answers after which it dies, and
            whether the last one still arrives; later workers live.
        edit: changes each text that a worker sends.
    """

    def __init__(
        self, deaths: Sequence[tuple[int, bool]] = (), edit: Edit = lambda text: text
    ) -> None:
        self._deaths, self._edit = list(deaths), edit
        self.workers: list[LocalConnection] = []

    async def machines(self) -> int:
        return 2

    async def connect(self, number: int) -> WorkerConnection:
        dies, after = None, False
        if len(self.workers) < len(self._deaths):
            dies, after = self._deaths[len(self.workers)]
            dies += 1  # the handshake
        self.workers.append(LocalConnection(dies, after, self._edit))
        return self.workers[-1]

    def jobs(self) -> list[list[str]]:
        """Return the kinds of the jobs that each started worker was sent."""
        sent = [[json.loads(text)["type"] for text in worker.sent] for worker in self.workers]
        return [[kind for kind in kinds if kind != "Hello"] for kinds in sent]

    async def aclose(self) -> None:
        pass


class PipeConnection:
    """A worker process behind pipes, with a call or its answer in each line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._numbers = process, itertools.count()
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._reading = asyncio.create_task(self._read())

    async def call(self, text: str) -> str:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        try:
            if self._reading.done():
                raise WorkerLost("its pipe is closed")
            self._process.stdin.write(json.dumps([number, text]).encode() + b"\n")
            await self._process.stdin.drain()
            return await self._waiting[number]
        except ConnectionError as error:
            raise WorkerLost("its pipe is closed") from error
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            number, text = json.loads(line)
            if number in self._waiting:
                self._waiting[number].set_result(text)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerLost("its pipe is closed"))

    async def aclose(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading


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
        return PipeConnection(process)

    async def aclose(self) -> None:
        pass


def run_worker() -> None:
    """Answer the driver at the other end of the standard streams."""
    out = os.dup(1)
    os.dup2(2, 1)  # what code prints is no answer

    async def main() -> None:
        reader, worker = asyncio.StreamReader(limit=2**26), CallWorker()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

        async def answer(number: int, text: str) -> None:
            found = await worker.call(text)
            data = memoryview(json.dumps([number, found]).encode() + b"\n")
            while data:
                data = data[os.write(out, data) :]

        tasks = set[asyncio.Task[None]]()
        while line := await reader.readline():
            tasks.add(asyncio.create_task(answer(*json.loads(line))))

    asyncio.run(main())
