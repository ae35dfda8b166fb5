"""Limits of a gateway."""

from __future__ import annotations

from dataclasses import dataclass

from compound.web.addresses import LOCAL_NAMES


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Limits of the requests that a gateway accepts; it listens on loopback only.

    Attributes:
        max_body: maximum bytes of a request's body; images are part of it.
        body_timeout: time limit in seconds for receiving a body.
    """

    max_body: int = 32 * 2**20
    body_timeout: float = 30.0
    key: None = None  # each run has its own, which the application checks
    allow_origins: tuple[str, ...] = ()

    @property
    def host_names(self) -> frozenset[str]:
        """Names that the ``Host`` header may have."""
        return frozenset(LOCAL_NAMES)
