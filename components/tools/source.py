"""Implementations of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from compound.core.loops import Sessions

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
"""Names of tools that all providers accept."""
TIMEOUT = 60.0


def usable_name(name: str) -> str:
    """Return a name that all providers accept, made of another one.

    >>> usable_name("files.read"), usable_name("post pet!")
    ('files_read', 'post_pet')
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name).strip("_")[:64] if not NAME.match(name) else name


def unanswered(message: str) -> str:
    """Return the message for a call without an answer that must not be repeated."""
    return f"{message}; the call may have had an effect, so it was not repeated"


class ToolSource(Protocol):
    """Where a tool is implemented."""

    @property
    def reproducible(self) -> bool:
        """Whether equal arguments give equal results."""
        ...

    @property
    def sandboxed(self) -> bool:
        """Whether it isolates the code that it executes."""
        ...

    @property
    def version(self) -> str:
        """Everything that changes the results of calls; part of cache keys."""
        ...

    async def call(self, arguments: Mapping[str, Any], sessions: Sessions) -> str:
        """Return the result as text.

        Raises:
            TransientError: a server did not answer, and the call can be repeated without a second
                effect: it was not sent, or is idempotent. It is retried.
            Exception: any other error is shown to the model.
        """
        ...


@dataclass(frozen=True)
class ToolParts:
    """Arguments of a `compound.components.tools.tool.Tool`."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    source: ToolSource
    timeout: float | None = TIMEOUT
    executes_code: bool = False
