"""Send requests to engines: within the budget, at the rate that servers admit, charged for what they cost.

What an engine returns is made harmless here, whichever engine it is: see `compound.security.sanitize`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Protocol

from compound.engine import NO_USAGE, Completion, Engine, Request, Usage
from compound.errors import CallError, CompoundError, DeclarationError, RateLimited, nearest
from compound.execution.budget import Meter, bounded
from compound.execution.throttle import NeverAdmitted, Throttle
from compound.registry.engine_checks import checked_engine, worst_case
from compound.registry.engine_checks import completion as completion_of
from compound.security.sanitize import safe

MAX_WAIT = 600.0  # seconds that a call may wait for rate limits, where the engine does not say
WAIT_HINT = "lower the engine's concurrency, or raise its max_wait"
IN_PROCESS = Usage(calls=1)  # charged for a failed call of a model in this process: nobody bills its tokens

Engines = Mapping[str, Engine] | Callable[[str], Engine]
Notify = Callable[[str], object]


class Clock(Protocol):
    """The clock of a call's time limit, and what the call has cost."""

    usage: Usage

    def wait(self) -> None:
        """Stop the clock."""

    def go(self) -> None:
        """Start the clock again."""


class Sender:
    """Sends requests to engines, each opened once.

    Args:
        engines: model name -> `Engine`, or a function that finds one.
        sleep: how to wait.
        notify: receives what a user should know while it happens, as one line of text.
    """

    def __init__(
        self,
        engines: Engines | None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        notify: Notify | None = None,
    ) -> None:
        self._find = _finder(engines)
        self._sleep = sleep
        self._notify = notify or logging.getLogger("compound").warning
        self._engines: dict[str, Engine] = {}
        self._throttles: dict[int, tuple[asyncio.AbstractEventLoop, Throttle]] = {}
        self._corrected: set[str] = set()

    def engine(self, lm: str) -> Engine:
        """Return the engine of a model, opening it once."""
        if lm not in self._engines:
            self._engines[lm] = checked_engine(lm, self._find(lm))
        return self._engines[lm]

    async def send(self, lm: str, request: Request, meter: Meter, clock: Clock) -> Completion:
        """Send a request and return the answer; wait and send it again while the server limits the rate.

        Raises:
            BudgetExhausted: the worst case of the request does not fit into the budget.
            CallError: the request failed, or waited longer than the engine's ``max_wait`` for the rate limit.
            DeclarationError: the cost is limited, and the model has no price.
        """
        engine = self.engine(lm)
        clock.wait()
        if warm_up := getattr(engine, "warm_up", None):
            await warm_up()
        if meter.budget.cost is not None and not engine.priced:
            raise unpriced(lm)
        most = getattr(engine, "max_wait", MAX_WAIT)
        try:
            return await self._admitted(engine, lm, request, meter, clock)
        except NeverAdmitted:
            most = getattr(engine, "max_wait", MAX_WAIT)
            raise CallError(
                f"{lm} limits the rate: it has admitted no request for as long as max_wait allows, "
                f"{_seconds(most)}",
                hint=WAIT_HINT,
                kind=RateLimited.kind,
                charged=NO_USAGE,
            ) from None

    async def _admitted(
        self, engine: Engine, lm: str, request: Request, meter: Meter, clock: Clock
    ) -> Completion:
        """Send a request as often as the server refuses it because of its rate limit."""
        most = getattr(engine, "max_wait", MAX_WAIT)
        throttle, worst = self._throttle(engine), worst_case(engine, request)
        waited, tries, refusal = 0.0, 0, ""
        while True:
            tries += 1
            turns = throttle.turn(request.seed + tries, patience=most)
            async with turns as turn, meter.reserve(worst) as used:
                waited += turn.waited
                meter.incidents["milliseconds_waited"] += round(1000 * turn.waited)
                if engine.remote:
                    clock.go()
                try:
                    completion = await completion_of(engine, request)
                except RateLimited as error:
                    used.append(NO_USAGE)
                    meter.incidents["rate_limited"] += 1
                    first = turn.round == throttle.round
                    ahead = throttle.slow_down(turn, error.retry_after)
                    if waited + ahead > most:
                        raise _waited_too_long(error, lm, waited, ahead, most) from error
                    in_flight = f"{throttle.sent - 1} in flight"
                    refusal = f"{lm} limits the rate: waiting {_seconds(ahead)}, {in_flight}" if first else ""
                except BaseException as error:
                    lost = self._failed(error, engine, worst, meter)
                    used.append(lost)
                    clock.usage += lost
                    raise
                else:
                    throttle.speed_up()
                    completion = self._received(completion, lm, worst, meter)
                    used.append(completion.usage)
                    clock.usage += completion.usage
                    return completion
                finally:
                    if not engine.remote:
                        clock.go()
            clock.wait()
            if refusal:
                self._notify(refusal)

    def _failed(self, error: BaseException, engine: Engine, worst: Usage, meter: Meter) -> Usage:
        """Return what a failed request is charged; make its error harmless."""
        if isinstance(error, CompoundError):
            error.message, error.hint = safe(error.message), safe(error.hint)
            error.args = (error.message,)
        if isinstance(error, CallError) and error.charged is not None:
            return bounded(error.charged, worst)[0]
        if not engine.remote:
            return IN_PROCESS
        meter.incidents["lost"] += 1
        return worst

    def _received(self, completion: Completion, lm: str, worst: Usage, meter: Meter) -> Completion:
        """Return an answer with harmless text, charged no more than was reserved."""
        usage, wrong = bounded(completion.usage, worst)
        if wrong:
            meter.incidents["usage_corrected"] += 1
            if lm not in self._corrected:
                self._corrected.add(lm)
                self._notify(f"{lm} reports impossible usage ({wrong}); charging what is possible")
        return replace(completion, text=safe(completion.text), usage=usage)

    def _throttle(self, engine: Engine) -> Throttle:
        """Return the throttle of an engine: one in each event loop, whatever names it goes by."""
        loop = asyncio.get_running_loop()
        owner, throttle = self._throttles.get(id(engine), (None, None))
        if throttle is None or owner is not loop:
            throttle = Throttle(engine.concurrency, self._sleep)
            self._throttles[id(engine)] = (loop, throttle)
        return throttle

    async def aclose(self) -> None:
        """Close every engine opened here."""
        for engine in self._engines.values():
            await engine.aclose()
        self._engines.clear()
        self._throttles.clear()


def unpriced(lm: str) -> DeclarationError:
    """Return the error of a model without a price under a limit of cost."""
    return DeclarationError(
        f"budget.cost is set, but the price of {lm!r} is not known",
        hint="give the model a price under engines: price: [dollars per million prompt tokens, "
        "dollars per million completion tokens]; [0, 0] for a server of your own",
    )


def _waited_too_long(error: RateLimited, lm: str, waited: float, ahead: float, most: float) -> CallError:
    return CallError(
        f"{lm} limits the rate: after {_seconds(waited)} of waiting it asks for another {_seconds(ahead)}, "
        f"and max_wait is {_seconds(most)} ({safe(error.message)})",
        hint=WAIT_HINT,
        kind=error.kind,
        charged=NO_USAGE,
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _finder(engines: Engines | None) -> Callable[[str], Engine]:
    if callable(engines):
        return engines
    known = dict(engines or {})

    def find(lm: str) -> Engine:
        if lm not in known:
            raise DeclarationError(f"no engine for the model {lm!r}", hint=nearest(lm, known))
        return known[lm]

    return find
