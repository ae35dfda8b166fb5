"""Settings of a server, and the configurations that it deploys."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compound.core.errors import DeclarationError
from compound.core.security.sanitize import sanitize_text
from compound.core.web.addresses import LOCAL_NAMES, is_loopback
from compound.graph.configuration import load
from compound.graph.system import System

MIN_KEY = 16  # characters; shorter keys can be guessed


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        host: the address to listen on; other addresses than loopback require a key.
        port: the port; 0 chooses a free one.
        key: the bearer key that requests must carry. Without one, only requests to names of this
            machine are accepted.
        allow_hosts: further names by which clients may call the server (the ``Host`` header).
        allow_origins: web origins, such as ``https://app.example.com``, whose pages may call the
            server.
        concurrency: maximum number of runs at a time.
        queue: maximum number of runs that wait; further requests are rejected with status 429.
        timeout: time limit of a run in seconds, including its wait.
        max_body: maximum bytes of a request's body.
        body_timeout: time limit in seconds for receiving a body.
        batch: maximum number of runs in a batch.
        drain: maximum seconds that runs in flight may take after a signal to stop.
        drain_delay: seconds between the signal and the closing of the socket, while ``/ready``
            reports 503, for a load balancer to notice.
        reload: seconds between checks for a new configuration file; 0 disables them.
        feedback: the folder to record runs and feedback in; ``None`` records nothing.
        max_feedback: maximum bytes of that folder; nothing is recorded beyond them.

    Raises:
        DeclarationError: a value is out of range, or the key is missing or too short.

    Example:
        >>> ServerSettings(host="0.0.0.0")
        Traceback (most recent call last):
        compound.core.errors.DeclarationError: listening on 0.0.0.0 requires a key; set ...
    """

    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = field(default=None, repr=False)
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    concurrency: int = 64
    queue: int = 256
    timeout: float = 120.0
    max_body: int = 2**20
    body_timeout: float = 15.0
    batch: int = 64
    drain: float = 30.0
    drain_delay: float = 0.0
    reload: float = 1.0
    feedback: Path | None = None
    max_feedback: int = 2**30

    def __post_init__(self) -> None:
        least = {
            "concurrency": 1,
            "queue": 0,
            "batch": 1,
            "max_body": 1,
            "port": 0,
            "drain": 0,
            "drain_delay": 0,
            "reload": 0,
            "max_feedback": 1,
        }
        for name, minimum in least.items():
            if not minimum <= getattr(self, name) < math.inf:  # also refuses nan
                raise DeclarationError(
                    f"{name} must be at least {minimum}, but is {getattr(self, name)}"
                )
        for name in ("timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise DeclarationError(f"{name} must be above 0, but is {getattr(self, name)}")
        for origin in self.allow_origins:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
                raise DeclarationError(
                    f"{origin!r} is not a web origin",
                    hint="such as https://app.example.com, without a path",
                )
        if self.key is not None and (len(self.key) < MIN_KEY or not self.key.isascii()):
            raise DeclarationError(
                f"the server's key must have at least {MIN_KEY} ASCII characters",
                hint="python -c 'import secrets; print(secrets.token_urlsafe(32))' prints a good one",
            )
        if self.key is None and not is_loopback(self.host):
            raise DeclarationError(
                f"listening on {self.host} requires a key",
                hint="set COMPOUND_SERVE_KEY to a secret of at least 16 characters, or listen on 127.0.0.1",
            )

    @property
    def admission(self) -> dict[str, Any]:
        """Arguments of `compound.core.web.guard.Guard`; any ``Host`` is allowed only with a key."""
        names = {name.lower() for name in (*LOCAL_NAMES, self.host, *self.allow_hosts)}
        is_open = self.key is not None and not self.allow_hosts and not is_loopback(self.host)
        own = ("allow_origins", "key", "max_body", "body_timeout")
        return {"host_names": None if is_open else names} | {n: getattr(self, n) for n in own}


LOG = logging.getLogger("compound.api.serving")
Signature = tuple[int, int, int]


@dataclass(frozen=True)
class Deployment:
    """A bound system."""

    system: System
    digest: str
    since: float

    @staticmethod
    def of(system: System) -> Deployment:
        """Return the deployment of a system."""
        return Deployment(system, system.configuration.digest, time.time())


class Deployments:
    """The current deployment, and the file that the next one is read from.

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
        self.problem = ""  # why the last file was rejected
        # called with the system of a new file; an error rejects the file
        self.prepare: Callable[[System], Awaitable[object]] | None = None
        self._reloading = (
            asyncio.Lock()
        )  # the later of two files must not be replaced by the earlier one

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
            self._seen = await asyncio.to_thread(self._signature)
            try:
                found = await asyncio.to_thread(self._load)
                if self.prepare is not None and found.digest != self.current.digest:
                    await self.prepare(found.system)
            except Exception as error:  # noqa: BLE001 - a damaged file must not end the server, or its watch
                self.problem = sanitize_text(str(error))
                used = self.current.digest[:12]
                LOG.warning("the configuration stays %s: %s", used, self.problem)
                self._on_reload(False)
                return False
            self.problem = ""
            if found.digest != self.current.digest:
                names = found.digest[:12], self.current.digest[:12]
                LOG.warning("configuration %s replaces %s", *names)
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
