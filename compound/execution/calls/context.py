"""Resources of a running component: requests within the budget, its random generator, its timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from compound.concurrency.sessions import Sessions
from compound.engine import NO_USAGE, Completion, Engine, OnText, Request, TokenRecord, Usage
from compound.example import CallValues
from compound.execution.exchange import Exchange, record_exchange
from compound.execution.observers.events import TextRelay
from compound.execution.tool_text import from_text
from compound.registry.policies import score
from compound.storage.artifacts import Reference

TokensOf = Callable[[Request, Completion], TokenRecord]


class RequestSender(Protocol):
    """Sends the requests of components; see `compound.execution.caller.Caller`.

    Attributes:
        sessions: connections that stay open until the executor is closed.
        folder: the folder that paths of adapters and rewards are relative to.
        tokens_of: returns the tokens of an answer to a request that wants them; ``None`` for the engine's.
    """

    sessions: Sessions
    folder: Path | None
    tokens_of: TokensOf | None

    def engine(self, lm: str) -> Engine:
        """Return the engine of a model."""
        ...

    async def adapt(self, lm: str, request: Request) -> Request:
        """Return a request in the form that the engine takes."""
        ...

    async def generate(
        self, lm: str, request: Request, context: Context | None = None, on_text: OnText | None = None
    ) -> Completion:
        """Send a request within rate limit and budget, and charge its usage to ``context``."""
        ...

    def reserve(self, worst: Usage) -> AbstractAsyncContextManager[list[Usage]]:
        """Reserve budget for requests that are not sent through an engine."""
        ...


@dataclass(slots=True)
class Context:
    """Resources of a running component; see `compound.graph.component.CallContext`."""

    address: str
    seed: int
    caller: RequestSender
    usage: Usage = NO_USAGE
    tokens: list[TokenRecord] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    last_attempt: bool = True
    timer: asyncio.Timeout | None = None
    relay: Callable[[], TextRelay] | None = None
    _rng: np.random.Generator | None = None
    _queued: int = 0
    _seconds_left: float = 0.0

    @property
    def rng(self) -> np.random.Generator:
        """Random generator of the call."""
        if self._rng is None:
            self._rng = np.random.Generator(np.random.Philox(self.seed))
        return self._rng

    @property
    def sessions(self) -> Sessions:
        """Connections that stay open until the executor is closed."""
        return self.caller.sessions

    async def generate(self, lm: str, request: Request, on_text: OnText | None = None) -> Completion:
        """Send a request to engine ``lm``, within the budget and the engine's concurrency."""
        sent = request if request.forward is not None else await self.caller.adapt(lm, request)
        relays = [TextRelay(on_text)] if on_text is not None else []
        if self.relay is not None and request.forward is None:  # forwarded streams hold events, not text
            relays.append(self.relay())
        answered = False
        try:
            completion = await self.caller.generate(lm, sent, self, _to_all(relays))
            answered = True
        finally:
            for relay in relays:
                relay.close(complete=answered)
        tokens = completion.tokens
        if request.want_tokens and self.caller.tokens_of is not None:
            tokens = self.caller.tokens_of(sent, completion)
        if tokens is not None:
            self.tokens.append(tokens)
        self.exchanges += record_exchange(lm, sent, completion)
        return from_text(request, completion) if request.uses_tools and not sent.uses_tools else completion

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[list[Usage]]:
        """Reserve budget for requests that the component sends itself; append their usage to the list."""
        used: list[Usage] = []
        try:
            async with self.caller.reserve(worst) as charged:
                try:
                    yield used
                finally:
                    charged.extend(used)
        finally:
            for item in used or [worst]:
                self.usage += item

    def forwards(self, lm: str) -> bool:
        """Return whether engine ``lm`` sends requests in OpenAI's format as they are."""
        return bool(getattr(self.caller.engine(lm), "forwards", False))

    async def scores(self, reward: Reference, component: str, calls: Sequence[CallValues]) -> Sequence[float]:
        """Score (inputs, outputs) pairs of a component by a stored reward."""
        return await score(reward, self.caller.folder, component, calls)

    def pause(self) -> None:
        """Stop the timeout's clock while a request is queued."""
        if self.timer is not None:
            if not self._queued:
                # concurrent requests of one component share the clock: the first one to wait stops it
                self._seconds_left = (self.timer.when() or 0.0) - asyncio.get_running_loop().time()
                self.timer.reschedule(None)
            self._queued += 1

    def resume(self) -> None:
        """Restart the timeout's clock when the request is sent."""
        if self.timer is not None:
            self._queued -= 1
            if not self._queued:
                self.timer.reschedule(asyncio.get_running_loop().time() + self._seconds_left)


def _to_all(relays: Sequence[TextRelay]) -> OnText | None:
    """Return a function that gives each piece to all relays; ``None`` without any."""
    if len(relays) < 2:
        return relays[0] if relays else None

    def pass_on(piece: str) -> None:
        for relay in relays:
            relay(piece)

    return pass_on
