"""Admission to one engine: how many requests are in flight, and when nobody may send any.

A server that refuses a request because of its rate limit makes all callers of its engine wait, and halves how
many are in flight; each answer lets that number grow again (additive increase, multiplicative decrease).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds, where the server does not say how long
JITTER = 0.25  # the most that is added to a wait, as a share of it


class NeverAdmitted(Exception):
    """A server has refused everything for longer than a request may wait."""


@dataclass(slots=True)
class Turn:
    """Permission to send one request.

    Attributes:
        round: how often the engine had been slowed down when the request was sent.
        waited: the seconds that its sender waited for the rate limit.
    """

    round: int = 0
    waited: float = 0.0


class Throttle:
    """Limits the requests that are in flight to one engine, in one event loop.

    Args:
        most: how many may be in flight when the server refuses none.
        sleep: how to wait.

    Attributes:
        limit: how many may be in flight now.
        sent: how many are.
        round: how often it was slowed down.

    Example:
        >>> async def scenario() -> tuple[int, float]:
        ...     throttle = Throttle(8)
        ...     async with throttle.turn() as turn:
        ...         seconds = throttle.slow_down(turn, retry_after=2.0)
        ...     return int(throttle.limit), seconds
        >>> asyncio.run(scenario())
        (4, 2.0)
    """

    def __init__(self, most: int, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.most = most
        self.limit = float(most)
        self.sent = 0
        self._held = 0  # turns given: those that wait for the rate limit, too
        self._queue: deque[asyncio.Future[None]] = deque()
        self._sleep = sleep
        self.round = 0
        self._until = float("-inf")  # by the loop's clock
        self._refused = 0  # times in a row that it was slowed down
        self._refusing_since = float("inf")  # by the loop's clock: the first refusal after the last answer

    @asynccontextmanager
    async def turn(self, seed: int = 0, patience: float = float("inf")) -> AsyncIterator[Turn]:
        """Wait for a turn and hold it.

        Args:
            seed: names the jitter of the wait.
            patience: how many seconds the server may refuse everything until nobody waits for it any more.

        Raises:
            NeverAdmitted: it has, and the next request may not be sent yet.
        """
        turn = Turn()
        await self._enter()
        try:
            await self._wait(turn, seed, patience)
            turn.round = self.round
            self.sent += 1
            try:
                yield turn
            finally:
                self.sent -= 1
        finally:
            self._held -= 1
            self._admit()

    def speed_up(self) -> None:
        """Note an answer."""
        self._refused, self._refusing_since = 0, float("inf")
        if self.limit < self.most:
            self.limit = min(float(self.most), self.limit + 1 / self.limit)
            self._admit()

    def slow_down(self, turn: Turn, retry_after: float | None) -> float:
        """Note a refusal because of the rate limit; return the seconds that everybody waits.

        Requests that were in flight together and are all refused slow the engine down once.
        """
        now = asyncio.get_running_loop().time()
        self._refusing_since = min(self._refusing_since, now)
        if turn.round == self.round:
            self.round += 1
            self._refused += 1
            self.limit = max(1.0, self.limit / 2)
            if retry_after is None:
                retry_after = min(FIRST_WAIT * 2.0 ** (self._refused - 1), LONGEST_WAIT)
        if retry_after is not None:
            self._until = max(self._until, now + retry_after)
        return max(0.0, self._until - now)

    async def _enter(self) -> None:
        if self._held < int(self.limit) and not self._queue:
            self._held += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # a turn was given that nobody will use
                self._held -= 1
                self._admit()
            with contextlib.suppress(ValueError):
                self._queue.remove(waiter)
            raise

    def _admit(self) -> None:
        """Hand free turns to those who wait, in their order."""
        while self._queue and self._held < int(self.limit):
            waiter = self._queue.popleft()
            if not waiter.done():
                self._held += 1
                waiter.set_result(None)

    async def _wait(self, turn: Turn, seed: int, patience: float) -> None:
        """Wait until the rate limit is over, however often it is extended meanwhile."""
        clock, waited_for = asyncio.get_running_loop().time, float("-inf")
        while self._until > max(clock(), waited_for):
            if self._until - self._refusing_since > patience:
                raise NeverAdmitted
            waited_for = self._until
            seconds = waited_for - clock()
            turn.waited += seconds
            await self._sleep(seconds * (1 + JITTER * (seed % 1009) / 1009))
