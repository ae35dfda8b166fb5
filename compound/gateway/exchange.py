"""One request of an agent: its body, its answer, and the pieces of the answer as they arrive."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

Route = Literal["chat/completions", "responses"]
Document = dict[str, object]


@dataclass(slots=True)
class GatewayExchange:
    """A request of an agent in progress.

    Attributes:
        route: the route that the agent called.
        document: the body, without the fields of streams.
        number: number of the request within the run, starting at 0.
        stream: whether the agent asked for a stream.
        include_usage: whether a stream of a chat must end with the usage.
        pieces: the pieces of a stream as they arrive; ``None`` ends it.
        raw: whether the pieces are server-sent events of the upstream; else they are text.
        kind: kind of the failure, if the request failed.
        message: message of the failure.
        begun: whether a piece was sent, so that another attempt would repeat it.
    """

    route: Route
    document: Document
    number: int
    stream: bool = False
    include_usage: bool = False
    pieces: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    raw: bool = False
    kind: str = ""
    message: str = ""
    begun: bool = False

    def put(self, piece: str) -> None:
        """Add a piece."""
        self.begun = True
        self.pieces.put_nowait(piece)


CURRENT: ContextVar[GatewayExchange | None] = ContextVar("gateway_exchange", default=None)
"""The exchange that the running task answers; a call outside of a gateway has none."""
