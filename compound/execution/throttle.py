"""Admission control of one engine: the number of requests in flight, and pauses after rate limits.

A rejection because of a rate limit pauses all callers of the engine and halves the number of requests in
flight; each answer increases that number again (additive increase, multiplicative decrease).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from compound.engine import Usage
from compound.execution.budget import Meter

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds, if the server requests no wait
JITTER = 0.25  # maximum jitter, as a share of the wait


class NeverAdmitted(Exception):
    """A server has rejected all requests for longer than a request may wait."""


@dataclass(slots=True)
class Turn:
    """Permission to send one request.

    Attributes:
        round: number of slowdowns of the engine before the request was sent.
        waited: seconds that the sender waited for the rate limit.
    """

    round: int = 0
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Consequence of a rejection because of the rate limit.

    Attributes:
        ahead: seconds that all callers of the engine wait.
        first: whether it is the first of the requests that were in flight together.
        in_flight: number of other requests in flight.
    """

    ahead: float
    first: bool
    in_flight: int


class Gate(Protocol):
    """Admission control of one engine, here or in another process."""

    def admit(
        self, seed: int, patience: float, meter: Meter, worst: Usage
    ) -> AbstractAsyncContextManager[tuple[Turn, list[Usage]]]:
        """Wait for a turn and a reservation, and hold both; see `Throttle.admit`."""
        ...

    def speed_up(self, turn: Turn) -> None:
        """Record the answer to the request of a turn."""
        ...

    async def refuse(self, turn: Turn, retry_after: float | None) -> Refusal:
        """Record that the request of a turn was rejected because of the rate limit."""
        ...


class Throttle:
    """Limits the requests in flight to one engine, in one event loop.

    Args:
        most: maximum number of requests in flight without rejections.
        sleep: async sleep function.

    Attributes:
        limit: current maximum number of requests in flight.
        sent: number of requests in flight.
        round: number of slowdowns.

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
        self._held = 0  # turns granted, including those that wait for the rate limit
        self._queue: deque[asyncio.Future[None]] = deque()
        self._sleep = sleep
        self.round = 0
        self._until = float("-inf")  # end of the pause, in loop time
        self._refused = 0  # consecutive slowdowns
        self._refusing_since = float("inf")  # loop time of the first rejection after the last answer

    @asynccontextmanager
    async def turn(self, seed: int = 0, patience: float = float("inf")) -> AsyncIterator[Turn]:
        """Wait for a turn and hold it.

        Args:
            seed: seed of the wait's jitter.
            patience: maximum seconds of continuous rejection to wait through.

        Raises:
            NeverAdmitted: the patience is exceeded, and the next request may not be sent yet.
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

    @asynccontextmanager
    async def admit(
        self, seed: int, patience: float, meter: Meter, worst: Usage
    ) -> AsyncIterator[tuple[Turn, list[Usage]]]:
        """Wait for a turn and then for a reservation, and hold both; see `turn` and `Meter.reserve`.

        Yields:
            The turn, and the list to which the actual usage is appended.
        """
        async with self.turn(seed, patience) as turn, meter.reserve(worst) as used:
            yield turn, used

    def speed_up(self, turn: Turn | None = None) -> None:
        """Record an answer: end the series of rejections and raise the limit."""
        self._refused, self._refusing_since = 0, float("inf")
        if self.limit < self.most:
            # about one more request in flight per round of answers
            self.limit = min(float(self.most), self.limit + 1 / self.limit)
            self._admit()

    async def refuse(self, turn: Turn, retry_after: float | None) -> Refusal:
        """Record a rejection because of the rate limit; see `slow_down`."""
        first = turn.round == self.round
        return Refusal(self.slow_down(turn, retry_after), first, self.sent - 1)

    def slow_down(self, turn: Turn, retry_after: float | None) -> float:
        """Record a rejection because of the rate limit; return the seconds that all callers wait.

        Requests in flight together that are all rejected slow the engine down once. A server that rejects
        again after the wait that it requested gets a pause of at least `FIRST_WAIT`: a wait of 0 would repeat
        the requests without any pause.
        """
        now = asyncio.get_running_loop().time()
        if now - self._until > LONGEST_WAIT:  # an earlier series ended, perhaps without an answer
            self._refused, self._refusing_since = 0, float("inf")
        self._refusing_since = min(self._refusing_since, now)
        if turn.round == self.round:
            self.round += 1
            self._refused += 1
            self.limit = max(1.0, self.limit / 2)
            if retry_after is None:
                retry_after = min(FIRST_WAIT * 2.0 ** (self._refused - 1), LONGEST_WAIT)
            elif self._refused > 1:
                retry_after = max(retry_after, FIRST_WAIT)
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
            if waiter.done() and not waiter.cancelled():  # the granted turn will not be used
                self._held -= 1
                self._admit()
            with contextlib.suppress(ValueError):
                self._queue.remove(waiter)
            raise

    def _admit(self) -> None:
        """Grant free turns to waiters in their order."""
        while self._queue and self._held < int(self.limit):
            waiter = self._queue.popleft()
            if not waiter.done():
                self._held += 1
                waiter.set_result(None)

    async def _wait(self, turn: Turn, seed: int, patience: float) -> None:
        """Wait until the rate limit ends, including extensions in the meantime."""
        clock, waited_for = asyncio.get_running_loop().time, float("-inf")
        while self._until > max(clock(), waited_for):
            if self._until - self._refusing_since > patience:
                raise NeverAdmitted
            waited_for = self._until
            seconds = waited_for - clock()
            turn.waited += seconds
            await self._sleep(
                seconds * (1 + JITTER * (seed % 1009) / 1009)
            )  # 1009: a prime, to spread consecutive seeds
