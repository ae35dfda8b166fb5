"""Processes that run an agent's Python function, each for one run at a time.

A function that reads the address of its model from the environment cannot share a process with
another run, so each run has a process of its own. The processes are kept: the import of a framework
can take seconds. A process keeps its key; the gateway gives its requests to the run that it works
for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from compound.components.gateway import worker as worker_program
from compound.components.gateway.processes import MAX_OUTPUT, Endpoint, environment, started
from compound.components.gateway.server import Gateway
from compound.components.gateway.sessions import AgentSession
from compound.core.errors import CallError
from compound.core.security.sanitize import sanitize_text
from compound.graph.json_values import dumps

END_SECONDS = 5.0  # to wait for the status of a process that closed its output


@dataclass(frozen=True)
class WorkerCommand:
    """What a worker runs: the function, the folder of its module, and further environment variables."""

    place: str
    folder: Path
    env: tuple[str, ...] = ()

    def program(self) -> list[str]:
        """Return the command of the process."""
        path = [str(self.folder), *(entry or os.getcwd() for entry in sys.path)]
        file = worker_program.__file__
        return [sys.executable, file, self.place, json.dumps(path)]


@dataclass(eq=False)
class _Worker:
    process: asyncio.subprocess.Process
    key: str
    closing: AsyncExitStack
    errors: asyncio.Task[None]
    written: bytearray = field(default_factory=bytearray)
    usable: bool = True


class AgentWorkers:
    """The idle workers of one function."""

    def __init__(self, gateway: Gateway, command: WorkerCommand) -> None:
        self._gateway, self._command = gateway, command
        self._idle: list[_Worker] = []
        gateway.closing.append(self.aclose)

    @classmethod
    def of(cls, gateway: Gateway, command: WorkerCommand) -> AgentWorkers:
        """Return the pool of a command, one per gateway."""
        found = gateway.resources.setdefault(command, None) or cls(gateway, command)
        gateway.resources[command] = found
        assert isinstance(found, AgentWorkers)
        return found

    async def call(
        self, session: AgentSession, inputs: Mapping[str, object], *, fresh: bool = False
    ) -> object:
        """Call the function in a worker whose requests belong to a session.

        Raises:
            CallError: the function failed, or its process ended.
        """
        try:
            given = dumps(inputs).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise CallError(f"an input of the agent cannot be written as JSON: {error}") from None
        async with self._worker(session, keep=not fresh) as worker:
            process = worker.process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(given)
                await process.stdin.drain()
                line = await process.stdout.readline()
            except (ConnectionError, BrokenPipeError):
                line = b""
            except ValueError:
                worker.usable = False  # the rest of the line would be the next result
                raise CallError(f"the agent returned more than {MAX_OUTPUT:,} bytes") from None
            if not line:
                raise await self._ended(worker)
            return self._result(line, worker)

    async def _ended(self, worker: _Worker) -> CallError:
        """Return the error of a process that ended, or closed its output, during a call."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await worker.process.wait()
        shown = worker.written.decode(errors="replace").replace(worker.key, "[key removed]").strip()
        written, status = sanitize_text(shown)[-2000:], worker.process.returncode
        how = "closed its output" if status is None else f"exited with status {status}"
        if status is not None and status < 0:
            how = f"was ended by signal {-status}"
        return CallError(f"the agent's process {how}{f': {written}' if written else ''}")

    def _result(self, line: bytes, worker: _Worker) -> object:
        answer = json.loads(line)
        if "error" in answer:
            place = f" ({answer['place']})" if answer["place"] else ""
            raise CallError(
                f"{self._command.place}: {answer['error']}{place}".replace(
                    worker.key, "[key removed]"
                )
            )
        return answer["result"]

    @asynccontextmanager
    async def _worker(self, session: AgentSession, *, keep: bool) -> AsyncIterator[_Worker]:
        """Lend a worker; one that was interrupted or has ended is not used again."""
        worker = await self._take() if keep else await self._start()
        self._gateway.sessions.assign(worker.key, session)
        done = False
        try:
            yield worker
            done = True
        except CallError:  # the function failed, but its process may continue
            done = True
            raise
        finally:
            self._gateway.sessions.assign(worker.key, None)
            if done and keep and worker.usable and _is_alive(worker.process):
                self._idle.append(worker)
            else:
                await asyncio.shield(self._end(worker))

    async def _take(self) -> _Worker:
        """Return an idle worker, or a new one; idle ones that have ended are left out."""
        while self._idle:
            worker = self._idle.pop()
            if _is_alive(worker.process):
                return worker
            await self._end(worker)
        return await self._start()

    async def _start(self) -> _Worker:
        key = f"worker-{secrets.token_urlsafe(24)}"
        endpoint = Endpoint(self._gateway.base_url, key)
        env = environment(self._command.env, endpoint) | {"PYTHONUNBUFFERED": "1"}
        stack = AsyncExitStack()
        process = await stack.enter_async_context(
            started(self._command.program(), env, self._command.folder)
        )
        written = bytearray()
        errors = asyncio.create_task(_collect(process, written))
        return _Worker(process, key, stack, errors, written)

    async def _end(self, worker: _Worker) -> None:
        self._gateway.sessions.remove(worker.key)
        worker.errors.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker.errors
        await worker.closing.aclose()

    async def aclose(self) -> None:
        """End the idle workers."""
        idle, self._idle = self._idle, []
        for worker in idle:
            await self._end(worker)


def _is_alive(process: asyncio.subprocess.Process) -> bool:
    return process.returncode is None and process.stdout is not None and not process.stdout.at_eof()


async def _collect(process: asyncio.subprocess.Process, written: bytearray) -> None:
    """Keep the end of what a worker prints."""
    assert process.stderr is not None
    while chunk := await process.stderr.read(2**16):
        written += chunk
        del written[:-8000]
