"""Connections of an engine to a running server, or to a server that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compound.core.errors import CompoundError, TransientError
from compound.core.security.sanitize import sanitize_for_terminal
from compound.engines import models
from compound.engines.adapter_files import CHECKS
from compound.engines.credentials import read_key
from compound.engines.known_models import KNOWN
from compound.engines.model_folder import check_model_folder
from compound.engines.server_api import model_entries
from compound.engines.vllm.adapters import ServedAdapters
from compound.engines.vllm.api import FOR_ADAPTERS, VLLMAPI
from compound.engines.vllm.server import VLLMServer

READY_TIMEOUT = 5.0  # seconds for a request that asks whether a server is ready
# Arguments of `vllm serve` with which several processes answer.
MULTI_PROCESS_ARGUMENTS = ("data-parallel", "data_parallel", "-dp", "api-server-count", "-asc")
EXIT_TIMEOUT = (
    10.0  # seconds that a server may need to end after its last answer; measured 2 when idle
)


class ServerEnded(TransientError):
    """The server that the engine started ended during a call."""


@dataclass(slots=True, eq=False)
class Link:
    """Connection to a server that is ready."""

    api: VLLMAPI
    adapters: ServedAdapters
    server: VLLMServer | None
    logprobs_are_tempered: bool | None = None

    @property
    def ended(self) -> bool:
        """Whether the engine started the server and the server has ended."""
        return self.server is not None and self.server.exit_code is not None

    async def is_ending(self, within: float = EXIT_TIMEOUT) -> bool:
        """Return whether the engine started the server and it ends within the given seconds."""
        return self.server is not None and await self.server.ended(within)

    async def close(self) -> None:
        """Close the connections; end the server if the engine started it."""
        await self.adapters.aclose()
        await self.api.aclose()
        if self.server is not None:
            await self.server.stop()


async def connect_server(
    address: str,
    model: str,
    *,
    key_env: str | None,
    connections: int,
    adapters: int,
    seconds: float,
) -> Link:
    """Connect to a running server.

    Raises:
        CompoundError: the server does not serve the model, or the key is not set.
        TransientError: the server does not answer.
    """
    key = read_key(model, key_env)
    api = VLLMAPI(
        address,
        model,
        key=key,
        key_name=key_env or "api_key_env",
        connections=connections + FOR_ADAPTERS,
    )
    link = Link(api, ServedAdapters(api, adapters, seconds), None)
    try:
        listing = await api.ask("models", None, seconds)
    except BaseException:
        await link.close()
        raise
    names = [str(entry.get("id")) for entry in model_entries(listing)]
    if model not in names:
        await link.close()
        raise CompoundError(
            f"the server at {address} does not serve {model!r}",
            hint=f"it serves {', '.join(map(sanitize_for_terminal, names)) or 'nothing'}",
        )
    return link


async def start_server(
    model: str,
    *,
    command: str | None,
    arguments: Sequence[str],
    connections: int,
    adapters: int,
    seconds: float,
    start_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Link:
    """Start a server, and wait until it is ready.

    Raises:
        CompoundError: the server ends or is not ready in time; the message contains the end of its
            log.
    """
    folder = model
    if model in KNOWN:
        folder = str(await asyncio.to_thread(models.resolve, model))
    await asyncio.to_thread(check_model_folder, Path(folder))
    server = VLLMServer(
        folder, model, command=command, arguments=arguments, environment=environment
    )
    api = VLLMAPI(
        server.address,
        model,
        key=server.key,
        connections=connections + FOR_ADAPTERS,
        own=True,
    )
    several = any(name in argument for argument in arguments for name in MULTI_PROCESS_ARGUMENTS)
    checks = CHECKS if several else 1
    link = Link(api, ServedAdapters(api, adapters, seconds, checks), server)
    try:
        await _ready(link, server, start_seconds)
    except BaseException:
        await link.close()
        raise
    return link


async def _ready(link: Link, server: VLLMServer, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(TransientError):
            if (await link.api.send("models", None, READY_TIMEOUT)).status == 200:
                return
        if server.exit_code is not None:
            raise server.failure(f"ended with exit code {server.exit_code} before it was ready")
        if time.monotonic() > until:
            raise server.failure("was not ready")
        await asyncio.sleep(0.2)
