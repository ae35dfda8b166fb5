"""Run an agent: as a program without the user's secrets, which ends with its children, or in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from compound.core.errors import CallError, DeclarationError
from compound.core.security.sanitize import remember_environment, sanitize_text
from compound.core.threads import run_in_own_thread

MAX_OUTPUT = 16 * 2**20  # bytes of stdout
MAX_ERRORS = 4_000  # characters of the end of stderr that a message quotes
KEPT = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "TEMP",
    "TMP",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "PYTHONUTF8",
    "NODE_PATH",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SYSTEMROOT",
    "HF_HUB_OFFLINE",
    "HF_HOME",
)


@dataclass(frozen=True)
class Endpoint:
    """Address and key of the gateway for one run of an agent."""

    base_url: str
    api_key: str

    def environment(self) -> dict[str, str]:
        """Return the variables that clients of OpenAI's API read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,  # the name in earlier versions
            "OPENAI_API_KEY": self.api_key,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }


def environment(allowed: Sequence[str], endpoint: Endpoint | None = None) -> dict[str, str]:
    """Return the environment of an agent's program: no variables except common ones and those allowed.

    >>> os.environ["SOME_SECRET"] = "s3cret"
    >>> "SOME_SECRET" in environment([]), environment(["SOME_SECRET"])["SOME_SECRET"]
    (False, 's3cret')
    """
    names = {*KEPT, *(name for name in os.environ if name.startswith("LC_")), *allowed}
    kept = {name: os.environ[name] for name in names if name in os.environ}
    remember_environment(kept)  # the program may return a key
    return kept | (endpoint.environment() if endpoint else {})


@asynccontextmanager
async def started(
    command: Sequence[str], env: Mapping[str, str], folder: Path | None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a program in a process group of its own, and end the whole group after the block.

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
        raise CallError(f"the arguments of the agent's program cannot be passed: {error}") from None
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise CallError("the arguments of the agent's program are too long") from None
        raise DeclarationError(
            f"the agent's program {command[0]!r} cannot be started: {error.strerror or error}",
            hint="name a program on PATH, or a path relative to the file's folder",
        ) from None
    try:
        yield process
    finally:
        await asyncio.shield(end(process))


async def end(process: asyncio.subprocess.Process) -> None:
    """End a program and all processes of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(
            process.pid, signal.SIGKILL
        )  # Process.kill() would poll, and compete for the exit status
    await process.wait()
    transport = getattr(process, "_transport", None)
    if transport is not None:  # closes the pipes also where a stray child holds them
        transport.close()


async def run_program(
    command: Sequence[str], given: bytes, env: Mapping[str, str], folder: Path | None
) -> bytes:
    """Run a program with ``given`` on stdin, and return its stdout.

    Raises:
        CallError: the program failed, or wrote too much.
        DeclarationError: it cannot be started.
    """
    async with started(command, env, folder) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(_tail(process.stderr))
        feeding = asyncio.create_task(_feed(process.stdin, given))
        try:
            output = await _bounded(process.stdout)
            code = await process.wait()
            shown = sanitize_text((await errors).decode(errors="replace")).strip()[-MAX_ERRORS:]
        finally:
            for task in (errors, feeding):
                task.cancel()
            await asyncio.gather(errors, feeding, return_exceptions=True)
    if code:
        ended = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
        raise CallError(f"the agent's program {ended}{_quote(shown, env)}")
    return output


def _quote(errors: str, env: Mapping[str, str]) -> str:
    """Return the end of stderr for a message, without the key of the run."""
    key = env.get("OPENAI_API_KEY", "")
    shown = errors.replace(key, "[key removed]") if key else errors
    return f": {shown}" if shown else " and wrote nothing to stderr"


async def _feed(stdin: asyncio.StreamWriter, given: bytes) -> None:
    with contextlib.suppress(ConnectionError, OSError):  # a program need not read its input
        stdin.write(given)
        await stdin.drain()
    stdin.close()


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while chunk := await stream.read(2**16):
        kept = (kept + chunk)[-4 * MAX_ERRORS :]
    return kept


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    parts, size = [], 0
    while chunk := await stream.read(2**16):
        size += len(chunk)
        if size > MAX_OUTPUT:
            raise CallError(f"the agent's program wrote more than {MAX_OUTPUT:,} bytes to stdout")
        parts.append(chunk)
    return b"".join(parts)


PARAMETERS = ("base_url", "api_key")


def takes_address(function: Callable[..., object]) -> bool:
    """Return whether a function has a parameter for the address of its model.

    >>> def agent(question: str, base_url: str, api_key: str) -> str: ...
    >>> takes_address(agent), takes_address(print)
    (True, False)
    """
    try:
        return "base_url" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


async def call_in_thread(
    function: Callable[..., object], inputs: Mapping[str, object], endpoint: Endpoint
) -> object:
    """Call a function, sync or async, in a new thread, and return its result.

    Its parameters ``base_url`` and ``api_key`` receive the address and key of the run. An async
    function runs on an event loop of its own, so that code that blocks does not block the gateway.
    A thread cannot be ended: one that is cancelled continues, but its requests are refused.
    """
    parameters = inspect.signature(function).parameters
    given = {name: getattr(endpoint, name) for name in PARAMETERS if name in parameters}

    def work() -> object:
        value = function(**inputs, **given)
        return asyncio.run(_finish(value)) if inspect.isawaitable(value) else value

    return await run_in_own_thread(work, "compound-agent")


async def _finish(value: Awaitable[object]) -> object:
    return await value
