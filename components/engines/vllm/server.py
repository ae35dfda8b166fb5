"""A ``vllm serve`` process of our own: started on a free port, watched, and ended with whatever it started.

It runs under `compound.components.engines.vllm.guard`, so that it ends also when this process
ends in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from compound.components.engines.vllm import guard
from compound.errors import CompoundError
from compound.security.sanitize import safe
from compound.storage.paths import cache_folder

VARIABLE = "COMPOUND_VLLM"
ACCELERATORS = ("nvidia[0-9]*", "kfd", "accel*", "davinci[0-9]*")  # in /dev: NVIDIA, AMD, TPU, Ascend
SHOWN = 20  # lines of the log in an error
KEPT = 16  # logs of earlier servers
POLL = 0.1  # seconds between two looks at a process


class VLLMServer:
    """One server process.

    Args:
        model: the folder or hub id to serve.
        name: the name to serve it under.
        command: how vLLM is called, as a shell would split it; ``$COMPOUND_VLLM`` or ``vllm`` by default.
        arguments: further arguments of ``vllm serve``.

    Attributes:
        address: where its API is.
        key: the API key that requests must carry. It keeps other users of the machine out, and tells this
            server from another one that took the port in the meantime.
        log: the file of everything it prints.

    Raises:
        CompoundError: there is no such command.
    """

    def __init__(
        self, model: str, name: str, *, command: str | None = None, arguments: Sequence[str] = ()
    ) -> None:
        self.key = secrets.token_hex(16)
        port = _free_port()
        self.address = f"http://127.0.0.1:{port}/v1"
        self.log = _log(port)
        program = _program(command)
        served = ["serve", model, "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            **os.environ,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_API_KEY": self.key,
        }
        self._started = time.monotonic()
        with self.log.open("wb") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, *program, *served, *_careful(arguments), *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us; we end the server when we are done
                env=environment,
            )

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._guard.poll()

    async def ended(self, within: float) -> bool:
        """Return whether it ends within some seconds."""
        for _ in range(math.ceil(within / POLL)):
            if self.exit_code is not None:
                break
            await asyncio.sleep(POLL)
        return self.exit_code is not None

    async def stop(self) -> None:
        """End it, and wait until nothing of it is left."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        if self.exit_code is None:
            self._guard.terminate()  # a fork of ours may hold the pipe open, too
        if not await self.ended(guard.GRACE + 5.0):
            self._guard.kill()
        await asyncio.to_thread(self._guard.wait)

    def failure(self, what: str) -> CompoundError:
        """Return the error of a server that does not start, with the end of its log."""
        lines = self.log.read_text("utf-8", "replace").splitlines()[-SHOWN:]
        said = "\n".join(f"    {safe(line)[:300]}" for line in lines) or "    (it printed nothing)"
        seconds = time.monotonic() - self._started
        return CompoundError(
            f"the vLLM server {what} after {seconds:.0f} s. The end of its log:\n{said}\n",
            hint=f"all of it is in {self.log}",
        )


def _careful(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that a server is given unless it is told otherwise.

    Weights are read from safetensors: other formats can run code. Without an accelerator, prompts are not
    read in chunks: there vLLM turns back its random generator for a request with a seed, which those of a
    CPU cannot (0.32), and the whole server ends.
    """
    given = []
    if not any("load-format" in argument.replace("_", "-") for argument in arguments):
        given += ["--load-format", "safetensors"]
    if not any("chunked-prefill" in argument for argument in arguments) and not _accelerators():
        given += ["--no-enable-chunked-prefill"]
    return given


def _accelerators() -> list[Path]:
    return [path for kind in ACCELERATORS for path in Path("/dev").glob(kind)]


def _program(command: str | None) -> list[str]:
    """Return how vLLM is called."""
    words = shlex.split(command or os.environ.get(VARIABLE) or "vllm")
    if not words or shutil.which(words[0]) is None:
        raise CompoundError(
            f"there is no command {words[0] if words else ''!r} to start vLLM with",
            hint=f"install vLLM in an environment of its own and set {VARIABLE}=ENVIRONMENT/bin/vllm",
        )
    return words


def _free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port: int = door.getsockname()[1]
        return port


def _log(port: int) -> Path:
    """Return a new log's path, and remove logs of long ago."""
    folder = cache_folder() / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    logs = sorted(folder.glob("*.log"), key=lambda path: path.name)
    for old in logs[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{port}.log"
