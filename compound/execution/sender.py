"""Send requests to engines within the budget and the rate limits of servers, and charge their usage.

Everything that an engine returns is sanitized; see `compound.core.security.sanitize`. A rejection
because of a rate limit pauses all callers of the engine and halves the number of requests in
flight; each answer increases that number again (additive increase, multiplicative decrease).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from compound.core.engine import (
    NO_USAGE,
    Capabilities,
    Completion,
    Engine,
    OnText,
    Request,
    ToolCall,
    Usage,
)
from compound.core.errors import (
    CallError,
    CompoundError,
    DeclarationError,
    RateLimited,
    suggest_name,
)
from compound.core.security.sanitize import redact_secrets, sanitize_text
from compound.execution.budget import Meter, clip_usage
from compound.execution.observers import RequestFacts, traced
from compound.graph.registry.engines import (
    checked_completion,
    checked_engine,
    started_completion,
    worst_case,
)

WAIT_HINT = "lower the engine's concurrency, or raise its max_wait"
IN_PROCESS = Usage(calls=1)  # charge for a failed call in this process; its tokens are free

Engines = Mapping[str, Engine] | Callable[[str], Engine]
Notify = Callable[[str], object]


class Attempt:
    """One attempt of a call: its usage, and its time limit, which excludes the waits of its requests."""

    usage = NO_USAGE
    timer: asyncio.Timeout | None = None
    _queued = 0
    _seconds_left = 0.0

    def pause(self) -> None:
        """Stop the timeout's clock while a request is queued."""
        if self.timer is not None:
            if not self._queued:
                # concurrent requests of one component share the clock: the first one to wait stops
                # it
                self._seconds_left = (self.timer.when() or 0.0) - asyncio.get_running_loop().time()
                self.timer.reschedule(None)
            self._queued += 1

    def resume(self) -> None:
        """Restart the timeout's clock when the request is sent."""
        if self.timer is not None:
            self._queued -= 1
            if not self._queued:
                self.timer.reschedule(asyncio.get_running_loop().time() + self._seconds_left)


class Sender:
    """Sends requests to engines, opening each engine once."""

    def __init__(
        self,
        engines: Engines | None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        notify: Notify | None = None,
    ) -> None:
        self._find = find_in(engines)
        self._sleep = sleep
        self._notify = notify or logging.getLogger("compound").warning
        self._engines: dict[str, Engine] = {}
        self._throttles: dict[int, tuple[asyncio.AbstractEventLoop, Throttle]] = {}
        self._corrected: set[str] = set()

    def engine(self, lm: str) -> Engine:
        """Return the engine of a model name, opening it on first use."""
        if lm not in self._engines:
            self._engines[lm] = checked_engine(lm, self._find(lm))
        return self._engines[lm]

    @property
    def opened(self) -> Mapping[str, Engine]:
        """Engines that are open, by model name."""
        return self._engines

    async def send(
        self,
        lm: str,
        request: Request,
        meter: Meter,
        attempt: Attempt,
        on_text: OnText | None = None,
    ) -> Completion:
        """Send a request and return the answer; wait and retry while the server limits the rate.

        Raises:
            BudgetExhausted: the worst case of the request does not fit into the budget.
            CallError: the request failed, or the rate limit lasted longer than the engine's
                ``max_wait``.
            DeclarationError: the cost is limited, and the price of the model is unknown.
        """
        engine = self.engine(lm)
        attempt.pause()
        # the call's timeout excludes loading a model and waiting for the rate limit
        await Capabilities(engine).warm_up()
        if meter.budget.cost is not None and not engine.priced:
            raise unpriced(lm)
        most = Capabilities(engine).max_wait
        throttle = self.throttle(engine)
        worst = worst_case(engine, request)
        waited, tries = 0.0, 0
        while True:
            tries, refusal = tries + 1, ""
            try:
                async with throttle.admit(request.seed + tries, most, meter, worst) as (turn, used):
                    waited += turn.waited
                    meter.incidents["milliseconds_waited"] += round(1000 * turn.waited)
                    if engine.remote:
                        attempt.resume()
                    try:
                        completion = await traced(
                            self._answer(engine, lm, request, on_text, worst, meter),
                            lambda: RequestFacts(engine, lm, request),
                        )
                    except RateLimited as error:
                        used.append(NO_USAGE)
                        meter.incidents["rate_limited"] += 1
                        is_first = turn.round == throttle.round
                        ahead = throttle.slow_down(turn, error.retry_after)
                        if waited + ahead > most:
                            raise _waited_too_long(error, lm, waited, ahead, most) from error
                        if is_first:
                            wait = f"waiting {_seconds(ahead)}, {throttle.sent - 1} in flight"
                            refusal = f"{lm}: rate limit: {wait}"
                    except BaseException as error:
                        lost = self._charge_failure(error, engine, worst, meter)
                        used.append(lost)
                        attempt.usage += lost
                        raise
                    else:
                        throttle.speed_up()
                        used.append(completion.usage)
                        attempt.usage += completion.usage
                        return completion
                    finally:
                        if not engine.remote:
                            attempt.resume()
            except NeverAdmitted:
                raise CallError(
                    f"{lm}: rate limit: no request was admitted within max_wait, {_seconds(most)}",
                    hint=WAIT_HINT,
                    kind=RateLimited.kind,
                    charged=NO_USAGE,
                ) from None
            attempt.pause()
            if refusal:
                self._notify(refusal)

    async def _answer(
        self,
        engine: Engine,
        lm: str,
        request: Request,
        on_text: OnText | None,
        worst: Usage,
        meter: Meter,
    ) -> Completion:
        """Send one request; return its answer with sanitized text, charged at most its reservation."""
        completion = checked_completion(
            engine, await started_completion(engine, request, on_text), on_text
        )
        usage, wrong = clip_usage(completion.usage, worst)
        if wrong:
            meter.incidents["usage_corrected"] += 1
            if lm not in self._corrected:
                self._corrected.add(lm)
                self._notify(
                    f"{lm} reports impossible usage ({wrong}); charging the reserved maximum instead"
                )
        calls = tuple(_sanitized(call) for call in completion.tool_calls)
        text, body = sanitize_text(completion.text), redact_secrets(completion.body)
        # a sample without text is a sample, and a forwarded answer is read by its program
        if not (text.strip() or calls or request.want_tokens or request.forward):
            raise CallError(f"{lm} returned an answer without text", kind="empty", charged=usage)
        return replace(completion, text=text, usage=usage, tool_calls=calls, body=body)

    def _charge_failure(
        self, error: BaseException, engine: Engine, worst: Usage, meter: Meter
    ) -> Usage:
        """Return the usage charged for a failed request, and sanitize its error."""
        if isinstance(error, CompoundError):
            error.message, error.hint = sanitize_text(error.message), sanitize_text(error.hint)
            error.args = (error.message,)
        if isinstance(error, CallError) and error.charged is not None:
            return clip_usage(error.charged, worst)[0]
        if not engine.remote:
            return IN_PROCESS
        meter.incidents["lost"] += 1
        return worst

    def throttle(self, engine: Engine) -> Throttle:
        """Return the throttle of an engine, one per event loop and engine object."""
        loop = asyncio.get_running_loop()
        owner, throttle = self._throttles.get(id(engine), (None, None))
        if throttle is None or owner is not loop:
            throttle = Throttle(engine.concurrency, self._sleep)
            self._throttles[id(engine)] = (loop, throttle)
        return throttle

    async def aclose(self) -> None:
        """Close every engine opened by this sender."""
        for engine in self._engines.values():
            await engine.aclose()
        self._engines.clear()
        self._throttles.clear()


def _sanitized(call: ToolCall) -> ToolCall:
    return ToolCall(sanitize_text(call.id), sanitize_text(call.name), sanitize_text(call.arguments))


def unpriced(lm: str, limit: str = "budget.cost") -> DeclarationError:
    """Return the error for a model without a price under a limit of dollars."""
    return DeclarationError(
        f"{limit} is set, but the price of {lm!r} is unknown",
        hint="set the model's price under engines: price: [dollars per million prompt tokens, "
        "dollars per million completion tokens]; [0, 0] for your own server",
    )


def _waited_too_long(
    error: RateLimited, lm: str, waited: float, ahead: float, most: float
) -> CallError:
    return CallError(
        f"{lm}: rate limit: waited {_seconds(waited)}, and the server requests another {_seconds(ahead)}, "
        f"but max_wait is {_seconds(most)} ({sanitize_text(error.message)})",
        hint=WAIT_HINT,
        kind=error.kind,
        charged=NO_USAGE,
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def find_in(engines: Engines | None) -> Callable[[str], Engine]:
    """Return a function that finds engines by the names of models."""
    if callable(engines):
        return engines
    known = dict(engines or {})

    def find(lm: str) -> Engine:
        if lm not in known:
            raise DeclarationError(f"no engine for the model {lm!r}", hint=suggest_name(lm, known))
        return known[lm]

    return find


FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds, if the server requests no wait
JITTER = 0.25  # maximum jitter, as a share of the wait


class NeverAdmitted(Exception):
    """A server has rejected all requests for longer than a request may wait."""


@dataclass(slots=True)
class Turn:
    """Permission to send one request."""

    round: int = 0
    waited: float = 0.0


class Throttle:
    """Limits the requests in flight to one engine, in one event loop.

    Attributes:
        limit: current maximum number of requests in flight.
        sent: number of requests in flight.
        round: number of slowdowns.
    """

    def __init__(
        self, most: int, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self.most = most
        self.limit = float(most)
        self.sent = 0
        self._held = 0  # turns granted, including those that wait for the rate limit
        self._queue: deque[asyncio.Future[None]] = deque()
        self._sleep = sleep
        self.round = 0
        self._until = float("-inf")  # end of the pause, in loop time
        self._refused = 0  # consecutive slowdowns
        # loop time of the first rejection after the last answer
        self._refusing_since = float("inf")

    @asynccontextmanager
    async def turn(self, seed: int = 0, patience: float = float("inf")) -> AsyncIterator[Turn]:
        """Wait for a turn and hold it.

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
        """Wait for a turn and then for a reservation, and hold both; see `turn` and `Meter.reserve`."""
        async with self.turn(seed, patience) as turn, meter.reserve(worst) as used:
            yield turn, used

    def speed_up(self) -> None:
        """Record an answer: end the series of rejections and raise the limit."""
        self._refused, self._refusing_since = 0, float("inf")
        if self.limit < self.most:
            # about one more request in flight per round of answers
            self.limit = min(float(self.most), self.limit + 1 / self.limit)
            self._admit()

    def slow_down(self, turn: Turn, retry_after: float | None) -> float:
        """Record a rejection because of the rate limit; return the seconds that all callers wait.

        Requests in flight together that are all rejected slow the engine down once. A server that
        rejects again after the wait that it requested gets a pause of at least `FIRST_WAIT`: a wait
        of 0 would repeat the requests without any pause.
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
            # 1009: a prime, to spread consecutive seeds
            await self._sleep(seconds * (1 + JITTER * (seed % 1009) / 1009))
