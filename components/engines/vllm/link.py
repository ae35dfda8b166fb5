"""Connect an engine to a server: one that is running, or one that is started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compound.components.engines import models
from compound.components.engines.model_folder import check_model_folder
from compound.components.engines.probe import CHECKS
from compound.components.engines.vllm.adapters import ServedAdapters
from compound.components.engines.vllm.api import API
from compound.components.engines.vllm.server import VLLMServer
from compound.errors import CompoundError, TransientError
from compound.security.sanitize import remember_secret

LOOK = 5.0  # seconds for asking whether a server is ready
SEVERAL = (
    "data-parallel",
    "data_parallel",
    "-dp",
    "api-server-count",
    "-asc",
)  # arguments: several processes
DYING = 10.0  # seconds that a server may need to end after its last answer: 2, on an idle machine


@dataclass(slots=True, eq=False)
class Link:
    """A server that is ready, and what is known of it.

    Attributes:
        api: how to talk to it.
        adapters: those it serves.
        server: its process, if it is ours.
        tempered: whether its log-probabilities are those after temperature; None until asked.
    """

    api: API
    adapters: ServedAdapters
    server: VLLMServer | None
    tempered: bool | None = None

    @property
    def ended(self) -> bool:
        """Whether the server was ours and has ended."""
        return self.server is not None and self.server.exit_code is not None

    async def is_ending(self, within: float = DYING) -> bool:
        """Return whether the server is ours and ends within some seconds."""
        return self.server is not None and await self.server.ended(within)

    async def close(self) -> None:
        """Leave the server; end it if it is ours."""
        await self.adapters.aclose()
        await self.api.aclose()
        if self.server is not None:
            await self.server.stop()


def key_of(model: str, key_env: str | None) -> str | None:
    """Return the value of a key's environment variable, if one is named.

    Raises:
        CompoundError: it is not set.
    """
    key = os.environ.get(key_env) if key_env else None
    if key_env and not key:
        raise CompoundError(f"the key of {model!r} is not set", hint=f"export {key_env}=…")
    remember_secret(key)
    return key


async def find(
    address: str, model: str, *, key_env: str | None, connections: int, adapters: int, seconds: float
) -> Link:
    """Connect to a server that runs already.

    Raises:
        CompoundError: it does not serve the model, or its key is not set.
        TransientError: it does not answer.
    """
    key = key_of(model, key_env)
    api = API(address, model, key=key, key_name=key_env or "api_key_env", connections=connections)
    link = Link(api, ServedAdapters(api, adapters, seconds), None)
    try:
        said = await api.ask("models", None, seconds)
    except BaseException:
        await link.close()
        raise
    served = said.get("data")
    names = [str(entry.get("id")) for entry in (served if isinstance(served, list) else [])]
    if model not in names:
        await link.close()
        raise CompoundError(
            f"the server at {address} does not serve {model!r}",
            hint=f"it serves {', '.join(names) or 'nothing'}",
        )
    return link


async def start(
    model: str,
    *,
    command: str | None,
    arguments: Sequence[str],
    connections: int,
    adapters: int,
    seconds: float,
    start_seconds: float,
) -> Link:
    """Start a server and wait until it is ready.

    Raises:
        CompoundError: it ends, or is not ready in time; the message holds the end of its log.
    """
    folder = model
    if model == models.NAME:
        folder = str(await asyncio.to_thread(models.resolve, model))
    await asyncio.to_thread(check_model_folder, Path(folder))
    server = VLLMServer(folder, model, command=command, arguments=arguments)
    api = API(server.address, model, key=server.key, connections=connections, own=True)
    several = any(name in argument for argument in arguments for name in SEVERAL)
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
            if (await link.api.send("models", None, LOOK)).status == 200:
                return
        if server.exit_code is not None:
            raise server.failure(f"ended with exit code {server.exit_code} instead of getting ready")
        if time.monotonic() > until:
            raise server.failure("was not ready")
        await asyncio.sleep(0.2)
