"""Settings of a server: its address, key, limits and folders."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from compound.errors import DeclarationError
from compound.web.addresses import LOCAL_NAMES, is_loopback

MIN_KEY = 16  # characters; shorter keys can be guessed


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        host: the address to listen on; other addresses than loopback require a key.
        port: the port; 0 chooses a free one.
        key: the bearer key that requests must carry. Without one, only requests to names of this machine are
            accepted.
        allow_hosts: further names by which clients may call the server (the ``Host`` header).
        allow_origins: web origins, such as ``https://app.example.com``, whose pages may call the server.
        concurrency: maximum number of runs at a time.
        queue: maximum number of runs that wait; further requests are rejected with status 429.
        timeout: time limit of a run in seconds, including its wait.
        max_body: maximum bytes of a request's body.
        body_timeout: time limit in seconds for receiving a body.
        batch: maximum number of runs in a batch.
        drain: maximum seconds that runs in flight may take after a signal to stop.
        drain_delay: seconds between the signal and the closing of the socket, while ``/ready`` reports 503,
            for a load balancer to notice.
        reload: seconds between checks for a new configuration file; 0 disables them.
        feedback: the folder to record runs and feedback in; ``None`` records nothing.
        max_feedback: maximum bytes of that folder; nothing is recorded beyond them.

    Raises:
        DeclarationError: a value is out of range, or the key is missing or too short.

    Example:
        >>> ServerSettings(host="0.0.0.0")
        Traceback (most recent call last):
        compound.errors.DeclarationError: listening on 0.0.0.0 requires a key; set COMPOUND_SERVE_KEY to ...
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
            "concurrency": 1, "queue": 0, "batch": 1, "max_body": 1, "port": 0, "drain": 0, "drain_delay": 0,
            "reload": 0, "max_feedback": 1,
        }  # fmt: skip
        for name, minimum in least.items():
            if not minimum <= getattr(self, name) < math.inf:  # also refuses nan
                raise DeclarationError(f"{name} must be at least {minimum}, but is {getattr(self, name)}")
        for name in ("timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise DeclarationError(f"{name} must be above 0, but is {getattr(self, name)}")
        for origin in self.allow_origins:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
                raise DeclarationError(
                    f"{origin!r} is not a web origin", hint="such as https://app.example.com, without a path"
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
    def host_names(self) -> frozenset[str] | None:
        """Names that the ``Host`` header may have; ``None`` allows any, which requires a key."""
        if self.key is not None and not self.allow_hosts and not is_loopback(self.host):
            return None
        return frozenset(name.lower() for name in (*LOCAL_NAMES, self.host, *self.allow_hosts))
