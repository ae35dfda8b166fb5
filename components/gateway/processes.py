"""Run an agent: as a program without the user's secrets, which ends with its children, or in a thread.

A Python function that reads the address of its model from the environment cannot share a process
with another run, so each run has a worker of its own. Workers are kept: the import of a framework
can take seconds. A worker keeps its key; the gateway gives its requests to the run that it works
for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from compound.components.gateway import worker as worker_program
from compound.components.gateway.server import Gateway
from compound.components.gateway.sessions import AgentSession
from compound.core.errors import CallError, DeclarationError
from compound.core.security.sanitize import remember_environment, sanitize_text
from compound.core.threads import run_in_own_thread
from compound.graph.json_values import dumps

MAX_OUTPUT = 16 * 2**20  # bytes of stdout
MAX_ERRORS = 4_000  # characters of the end of stderr that a message quotes
END_SECONDS = 5.0  # to wait for the status of a process that closed its output
KEPT = (
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP VIRTUAL_ENV PYTHONPATH "
    "PYTHONHASHSEED PYTHONUTF8 NODE_PATH LD_LIBRARY_PATH SSL_CERT_FILE SYSTEMROOT HF_HUB_OFFLINE "
    "HF_HOME"
)


def environment(allowed: Sequence[str], base_url: str, key: str) -> dict[str, str]:
    """Return the environment of an agent's program: no variables except common ones and those allowed.

    The address and the key of the gateway have the names that clients of OpenAI's API read.

    >>> os.environ["SOME_SECRET"] = "s3cret"
    >>> "SOME_SECRET" in environment([], "", ""), environment(["SOME_SECRET"], "", "")["SOME_SECRET"]
    (False, 's3cret')
    """
    names = {*KEPT.split(), *(name for name in os.environ if name.startswith("LC_")), *allowed}
    kept = {name: os.environ[name] for name in names if name in os.environ}
    remember_environment(kept)  # the program may return a key
    return kept | {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,  # the name in earlier versions
        "OPENAI_API_KEY": key,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


class AgentProcess:
    """A running program in a process group of its own, the end of whose stderr is kept."""

    def __init__(self, process: asyncio.subprocess.Process, key: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.stdin, self.stdout, self.wait = process.stdin, process.stdout, process.wait
        self.key = key
        self.usable = True  # for another call
        self._process, self._written = process, bytearray()
        self._collecting = asyncio.create_task(self._collect(process.stderr))

    @classmethod
    async def start(
        cls, command: Sequence[str], env: Mapping[str, str], folder: Path
    ) -> AgentProcess:
        """Start a program.

        Raises:
            CallError: its arguments are too long, or contain a null character.
            DeclarationError: the program does not exist or cannot be executed.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(env),
                cwd=folder,
                start_new_session=True,
                limit=MAX_OUTPUT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except ValueError as error:
            message = f"the arguments of the agent's program cannot be passed: {error}"
            raise CallError(message) from None
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise CallError("the arguments of the agent's program are too long") from None
            raise DeclarationError(
                f"the agent's program {command[0]!r} cannot be started: {error.strerror or error}",
                hint="name a program on PATH, or a path relative to the file's folder",
            ) from None
        return cls(process, env["OPENAI_API_KEY"])

    @property
    def is_alive(self) -> bool:
        """Whether it can answer another call."""
        return self.usable and self._process.returncode is None and not self.stdout.at_eof()

    async def failure(self) -> CallError:
        """Return the error of a program that ended, or closed its output."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self.wait()
                await self._collecting
        shown = self._written.decode(errors="replace").replace(self.key, "[key removed]")
        written, status = sanitize_text(shown).strip()[-MAX_ERRORS:], self._process.returncode
        how = "closed its output" if status is None else f"exited with status {status}"
        if status is not None and status < 0:
            how = f"was ended by signal {-status}"
        said = f": {written}" if written else " and wrote nothing to stderr"
        return CallError(f"the agent's program {how}{said}")

    async def aclose(self) -> None:
        """End the program and all processes of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Process.kill() would poll, and compete for the exit status
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.wait()
        self._collecting.cancel()
        await asyncio.gather(self._collecting, return_exceptions=True)
        transport = getattr(self._process, "_transport", None)
        if transport is not None:  # closes the pipes also where a stray child holds them
            transport.close()

    async def _collect(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(2**16):
            self._written += chunk
            del self._written[: -4 * MAX_ERRORS]


async def run_program(
    command: Sequence[str], given: bytes, env: Mapping[str, str], folder: Path
) -> bytes:
    """Run a program with ``given`` on stdin, and return its stdout.

    Raises:
        CallError: the program failed, or wrote too much.
        DeclarationError: it cannot be started.
    """
    program = await AgentProcess.start(command, env, folder)
    feeding = asyncio.create_task(_feed(program.stdin, given))
    try:
        output = await _bounded(program.stdout)
        if await program.wait():
            raise await program.failure()
        return output
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        await asyncio.shield(program.aclose())


async def _feed(stdin: asyncio.StreamWriter, given: bytes) -> None:
    with contextlib.suppress(ConnectionError, OSError):  # a program need not read its input
        stdin.write(given)
        await stdin.drain()
    stdin.close()


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    parts, size = [], 0
    while chunk := await stream.read(2**16):
        size += len(chunk)
        if size > MAX_OUTPUT:
            raise CallError(f"the agent's program wrote more than {MAX_OUTPUT:,} bytes to stdout")
        parts.append(chunk)
    return b"".join(parts)


class AgentWorkers:
    """Processes that run a Python function, each for one run at a time.

    Args:
        gateway: the gateway that answers their requests.
        place: the function as ``module:name``.
        folder: the folder of its module.
        env: names of further environment variables.
    """

    def __init__(self, gateway: Gateway, place: str, folder: Path, env: tuple[str, ...]) -> None:
        self._gateway, self._place, self._folder, self._env = gateway, place, folder, env
        self._idle: list[AgentProcess] = []
        gateway.closing.append(self.aclose)

    @classmethod
    def of(cls, gateway: Gateway, place: str, folder: Path, env: tuple[str, ...]) -> AgentWorkers:
        """Return the workers of a function, which a gateway has once."""
        key = (place, folder, env)
        if key not in gateway.resources:
            gateway.resources[key] = cls(gateway, place, folder, env)
        found = gateway.resources[key]
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
            try:
                worker.stdin.write(given)
                await worker.stdin.drain()
                line = await worker.stdout.readline()
            except (ConnectionError, BrokenPipeError):
                line = b""
            except ValueError:
                worker.usable = False  # the rest of the line would be the next result
                raise CallError(f"the agent returned more than {MAX_OUTPUT:,} bytes") from None
            if not line:
                raise await worker.failure()
            answer = json.loads(line)
            if "error" in answer:
                place = f" ({answer['place']})" if answer["place"] else ""
                problem = f"{self._place}: {answer['error']}{place}"
                raise CallError(problem.replace(worker.key, "[key removed]"))
            return answer["result"]

    @asynccontextmanager
    async def _worker(self, session: AgentSession, *, keep: bool) -> AsyncIterator[AgentProcess]:
        """Lend a worker; one that was interrupted or has ended is not used again."""
        worker = await self._take() if keep else await self._start()
        self._gateway.sessions[worker.key] = session
        done = False
        try:
            yield worker
            done = True
        except CallError:  # the function failed, but its process may continue
            done = True
            raise
        finally:
            self._gateway.sessions[worker.key] = None
            if done and keep and worker.is_alive:
                self._idle.append(worker)
            else:
                await asyncio.shield(self._end(worker))

    async def _take(self) -> AgentProcess:
        """Return an idle worker, or a new one; idle ones that have ended are left out."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            await self._end(worker)
        return await self._start()

    async def _start(self) -> AgentProcess:
        path = [str(self._folder), *(entry or os.getcwd() for entry in sys.path)]
        program = [sys.executable, worker_program.__file__, self._place, json.dumps(path)]
        key = f"worker-{secrets.token_urlsafe(24)}"
        env = environment(self._env, self._gateway.base_url, key) | {"PYTHONUNBUFFERED": "1"}
        return await AgentProcess.start(program, env, self._folder)

    async def _end(self, worker: AgentProcess) -> None:
        self._gateway.sessions.pop(worker.key, None)
        await worker.aclose()

    async def aclose(self) -> None:
        """End the idle workers."""
        idle, self._idle = self._idle, []
        for worker in idle:
            await self._end(worker)


async def call_in_thread(
    function: Callable[..., object], inputs: Mapping[str, object], address: Mapping[str, str]
) -> object:
    """Call a function, sync or async, in a new thread, and return its result.

    It receives those parts of the address that are its parameters: ``base_url`` and ``api_key``. An
    async function runs on an event loop of its own, so that code that blocks does not block the
    gateway. A thread cannot be ended: one that is cancelled continues, but its requests are refused.
    """
    parameters = inspect.signature(function).parameters
    given = {name: value for name, value in address.items() if name in parameters}

    def work() -> object:
        value = function(**inputs, **given)
        return asyncio.run(_finish(value)) if inspect.isawaitable(value) else value

    return await run_in_own_thread(work, "compound-agent")


async def _finish(value: Awaitable[object]) -> object:
    return await value
