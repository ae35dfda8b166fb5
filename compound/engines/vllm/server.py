"""Child process that runs ``vllm serve`` on a free port, and is ended with all its child processes.

It runs under `compound.engines.vllm.guard`, so that it also ends when this process ends for any
reason.

At level 1 of sleep mode, vLLM copies the weights of the model and of its adapters to the memory of
the host, and discards the cache of keys and values, and with it the prefix cache. Adapters stay
loaded. The context of CUDA, CUDA graphs and some buffers stay on the GPU. vLLM 0.32 supports this
on CUDA, ROCm and XPU, not on the CPU. A server whose state is unknown, since a request to sleep
failed or was cancelled, is ended and started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compound.core.errors import CallError, CompoundError, TransientError
from compound.core.security.sanitize import sanitize_text
from compound.core.storage.paths import cache_folder
from compound.engines.remote import first_line
from compound.engines.vllm import guard
from compound.engines.vllm.adapters import ServedAdapters
from compound.engines.vllm.api import VLLMAPI

VARIABLE = "COMPOUND_VLLM"
# in /dev: NVIDIA, AMD, TPU, Ascend
ACCELERATORS = ("nvidia[0-9]*", "kfd", "accel*", "davinci[0-9]*")
SHOWN = 20  # log lines in an error message
KEPT = 16  # number of logs of earlier servers
POLL = 0.1  # seconds between checks of a process
# Seconds that a server may need to end after its last answer; measured 2 when idle.
EXIT_TIMEOUT = 10.0
READY_TIMEOUT = 5.0  # seconds for a request that asks whether a server is ready
SLEEP_ARGUMENTS = ("--enable-sleep-mode",)
MIDDLEWARE = "compound_key_required"  # the module's name in vLLM's process
SLEEP, WAKE, STATE = "sleep?level=1", "wake_up", "is_sleeping"  # routes of the development mode
_LOG = logging.getLogger("compound")


class VLLMServer:
    """One server process, started by the constructor.

    With ``sleeps``, it has sleep mode, and all its routes require the key.

    Raises:
        CompoundError: the command does not exist.
    """

    def __init__(
        self,
        model: str,
        name: str,
        *,
        command: str | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        sleeps: bool = False,
    ) -> None:
        self.key = secrets.token_hex(16)
        port = _free_port()
        self.address = f"http://127.0.0.1:{port}/v1"
        self.log = _log(port)
        program, defaults = _program(command), _safe_defaults(arguments)
        address = ["--host", "127.0.0.1", "--port", str(port)]
        served = ["serve", model, "--served-model-name", name, *address]
        variables = {
            "VLLM_NO_USAGE_STATS": "1",
            **os.environ,
            **(environment or {}),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_API_KEY": self.key,
        }
        if sleeps:
            served += [*SLEEP_ARGUMENTS, "--middleware", f"{MIDDLEWARE}.KeyRequired"]
            paths = [_middleware_folder(), variables.get("PYTHONPATH")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            variables["VLLM_SERVER_DEV_MODE"] = "1"  # serves the routes of sleep mode
        self._started = time.monotonic()
        with self.log.open("wb") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, *program, *served, *defaults, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach the server, which `stop` ends
                env=variables,
            )

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs."""
        return self._guard.poll()

    async def ended(self, within: float) -> bool:
        """Wait at most the given seconds for the process to end; return whether it has ended."""
        for _ in range(math.ceil(within / POLL)):
            if self.exit_code is not None:
                break
            await asyncio.sleep(POLL)
        return self.exit_code is not None

    async def stop(self) -> None:
        """End the server, and wait until all its processes have ended."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        if self.exit_code is None:
            self._guard.terminate()  # closing the pipe is not enough if a fork of this process holds it open
        if not await self.ended(guard.GRACE + 5.0):
            self._guard.kill()
        await asyncio.to_thread(self._guard.wait)

    def failure(self, problem: str) -> CompoundError:
        """Return the error for a server that does not start, with the end of its log."""
        lines = self.log.read_text("utf-8", "replace").splitlines()[-SHOWN:]
        shown = [f"    {sanitize_text(line)[:300]}" for line in lines]
        output = "\n".join(shown or ["    (no output)"])
        seconds = time.monotonic() - self._started
        return CompoundError(
            f"the vLLM server {problem} after {seconds:.0f} s. The end of its log:\n{output}\n",
            hint=f"the full log is {self.log}",
        )


def _safe_defaults(arguments: Sequence[str]) -> list[str]:
    """Return default arguments that the user's arguments do not override.

    Weights are loaded from safetensors only, because other formats can run code. Without an
    accelerator, chunked prefill is disabled: for a request with a seed, vLLM 0.32 then rewinds its
    random generator, which CPU generators do not support, and the server crashes.
    """
    given = []
    if not any("load-format" in argument.replace("_", "-") for argument in arguments):
        given += ["--load-format", "safetensors"]
    if not any("chunked-prefill" in argument for argument in arguments) and not _accelerators():
        given += ["--no-enable-chunked-prefill"]
    return given


def _middleware_folder() -> str:
    """Return a folder from which the server can import the middleware, and nothing else."""
    folder = cache_folder() / "vllm" / "middleware"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    copy = folder / f".{secrets.token_hex(8)}.py"
    copy.write_bytes(Path(guard.__file__).read_bytes())
    # servers that start at the same time read a whole file
    copy.replace(folder / f"{MIDDLEWARE}.py")
    return str(folder)


def _accelerators() -> list[Path]:
    return [path for kind in ACCELERATORS for path in Path("/dev").glob(kind)]


def _program(command: str | None) -> list[str]:
    """Return the words of the vLLM command."""
    words = shlex.split(command or os.environ.get(VARIABLE) or "vllm")
    if not words or shutil.which(words[0]) is None:
        raise CompoundError(
            f"the command {words[0] if words else ''!r} to start vLLM does not exist",
            hint=f"install vLLM in a separate environment and set {VARIABLE}=ENVIRONMENT/bin/vllm",
        )
    return words


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _log(port: int) -> Path:
    """Return the path of a new log, and delete all but the latest earlier logs."""
    folder = cache_folder() / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    logs = sorted(folder.glob("*.log"), key=lambda path: path.name)
    for old in logs[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{port}.log"


class ServerEnded(TransientError):
    """The server that the engine started ended during a call."""


@dataclass(slots=True, eq=False)
class Link:
    """Connection to a server that is ready."""

    api: VLLMAPI
    adapters: ServedAdapters
    server: VLLMServer | None
    logprobs_are_tempered: bool | None = None
    state: Literal["awake", "asleep", "unknown"] = "awake"

    @property
    def ended(self) -> bool:
        """Whether the engine started the server and the server has ended."""
        return self.server is not None and self.server.exit_code is not None

    async def ready(self, seconds: float) -> None:
        """Wait until the server that the engine started is ready."""
        assert self.server is not None
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(TransientError):
                if (await self.api.send("models", None, READY_TIMEOUT)).status == 200:
                    return
            if self.server.exit_code is not None:
                code = self.server.exit_code
                raise self.server.failure(f"ended with exit code {code} before it was ready")
            if time.monotonic() > until:
                raise self.server.failure("was not ready")
            await asyncio.sleep(0.2)

    async def sleep(self, seconds: float) -> None:
        """Let the server release its memory, by its end if it does not fall asleep; no request is in flight.

        Raises:
            CompoundError: the server has no sleep mode.
        """
        if self.server is None or self.ended or self.state == "asleep":
            return
        self.state = "unknown"
        try:
            answer = await self.api.send(SLEEP, {}, seconds, root=True)
        except TransientError as error:
            problem = error.message
        else:
            if answer.status == 200:
                self.state = "asleep"
                return
            problem = first_line(answer.message)
            if answer.status < 500:
                self.state = "awake"
                raise CompoundError(
                    f"the vLLM server of {self.api.model!r} has no sleep mode: {problem}",
                    hint="sleep needs vLLM 0.32 or later; upgrade it, or set sleep of the engine to false",
                )
        self._warn_of_restart("fall asleep", problem)
        await self.server.stop()

    async def wake(self, seconds: float) -> bool:
        """Wake the server; return whether it is awake. If not, it must be started again."""
        if self.ended or self.state == "unknown":
            return False
        try:
            answer = await self.api.send(WAKE, {}, seconds, root=True)
            if answer.status != 200:
                raise self.api.error(answer)
            # answers to the first request differ between versions of vLLM
            found = self.api.read(await self.api.send(STATE, None, seconds, root=True))
            if found.get("is_sleeping") is not False:
                raise CallError("it is still asleep")
        except CompoundError as error:
            self._warn_of_restart("wake up", error.message)
            return False
        self.state = "awake"
        return True

    def _warn_of_restart(self, what: str, problem: str) -> None:
        told = "the vLLM server of %r did not %s, and is started again: %s"
        _LOG.warning(told, self.api.model, what, problem)

    async def close(self) -> None:
        """Close the connections; end the server if the engine started it."""
        await self.adapters.aclose()
        await self.api.aclose()
        if self.server is not None:
            await self.server.stop()
