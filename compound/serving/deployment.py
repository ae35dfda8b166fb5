"""The system in use, bound to a configuration, and its replacement by a new configuration file.

A run takes the current deployment when it starts and keeps it, so that a reload affects no run in flight. A
file that cannot be used is reported once, and the previous configuration stays in use.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from compound.graph.configuration import load
from compound.graph.system import System
from compound.security.sanitize import sanitize_text

LOG = logging.getLogger("compound.serving")
Signature = tuple[int, int, int]


@dataclass(frozen=True)
class Deployment:
    """A bound system.

    Attributes:
        system: the system.
        digest: the digest of its configuration.
        since: when it was loaded, in seconds since the epoch.
    """

    system: System
    digest: str
    since: float

    @staticmethod
    def of(system: System) -> Deployment:
        """Return the deployment of a system."""
        return Deployment(system, system.configuration.digest, time.time())


class Deployments:
    """The current deployment, and the file that the next one is read from.

    Args:
        system: the system, bound to the values of parameters that the file does not contain.
        config: the configuration file; ``None`` serves the system as it is.
        on_reload: called after each attempt with whether it succeeded.

    Attributes:
        current: the deployment in use.
        problem: why the last file was rejected, or ``""``.
        prepare: called with a system bound to a new file before it is used; an error rejects the file.

    Raises:
        ConfigurationError: the file cannot be used.
    """

    def __init__(
        self,
        system: System,
        config: Path | None,
        on_reload: Callable[[bool], object] = lambda succeeded: None,
    ) -> None:
        self._base, self._config, self._on_reload = system, config, on_reload
        self._seen = self._signature()
        self.current = self._load()
        self.problem = ""
        self.prepare: Callable[[System], Awaitable[object]] | None = None
        self._reloading = asyncio.Lock()  # the later of two files must not be replaced by the earlier one

    def _load(self) -> Deployment:
        system = self._base if self._config is None else self._base.bind(load(self._config))
        return Deployment.of(system)

    def _signature(self) -> Signature | None:
        """Return what changes with the file; ``None`` if it is missing."""
        if self._config is None:
            return None
        try:
            found = os.stat(self._config)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    async def reload(self) -> bool:
        """Read the file again, and return whether it is in use now."""
        async with self._reloading:
            return await self._reload()

    async def _reload(self) -> bool:
        self._seen = await asyncio.to_thread(self._signature)
        try:
            found = await asyncio.to_thread(self._load)
            if self.prepare is not None and found.digest != self.current.digest:
                await self.prepare(found.system)
        except Exception as error:  # noqa: BLE001 - a damaged file must not end the server, or its watch
            self.problem = sanitize_text(str(error))
            LOG.warning("the configuration stays %s: %s", self.current.digest[:12], self.problem)
            self._on_reload(False)
            return False
        self.problem = ""
        if found.digest != self.current.digest:
            LOG.warning("configuration %s replaces %s", found.digest[:12], self.current.digest[:12])
            self.current = found
        self._on_reload(True)
        return True

    async def watch(self, seconds: float) -> None:
        """Reload the file whenever it changes; never returns."""
        while True:
            await asyncio.sleep(seconds)
            found = await asyncio.to_thread(self._signature)
            if found is not None and found != self._seen:
                await self.reload()
