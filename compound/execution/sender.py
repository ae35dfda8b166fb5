"""Send requests to engines within the budget and the rate limits of servers, and charge their usage.

Everything that an engine returns is sanitized; see `compound.security.sanitize`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Protocol

from compound.engine import NO_USAGE, Completion, Engine, OnText, Request, ToolCall, Usage
from compound.errors import CallError, CompoundError, DeclarationError, RateLimited, suggest_name
from compound.execution.budget import Meter, clip_usage
from compound.execution.observers.spans import active_tracer, within
from compound.execution.throttle import Gate, NeverAdmitted, Throttle
from compound.registry.engine_checks import checked_engine, worst_case
from compound.registry.engine_checks import completion as completion_of
from compound.security.sanitize import redact_secrets, sanitize_text

MAX_WAIT = 600.0  # default maximum seconds that a call waits for rate limits
WAIT_HINT = "lower the engine's concurrency, or raise its max_wait"
IN_PROCESS = Usage(calls=1)  # charge for a failed call in this process; its tokens are free

Engines = Mapping[str, Engine] | Callable[[str], Engine]
Notify = Callable[[str], object]


class Clock(Protocol):
    """Clock of a call's timeout, and the usage of the call."""

    usage: Usage

    def pause(self) -> None:
        """Stop the clock."""

    def resume(self) -> None:
        """Restart the clock."""


class Sender:
    """Sends requests to engines, opening each engine once.

    Args:
        engines: model name -> `Engine`, or a function that returns one.
        sleep: async sleep function.
        notify: receives one-line notices during the run.
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
        """Return the engine of a model name, opening it on first use."""
        if lm not in self._engines:
            self._engines[lm] = checked_engine(lm, self._find(lm))
        return self._engines[lm]

    @property
    def opened(self) -> Mapping[str, Engine]:
        """Engines that are open, by model name."""
        return self._engines

    async def send(
        self, lm: str, request: Request, meter: Meter, clock: Clock, on_text: OnText | None = None
    ) -> Completion:
        """Send a request and return the answer; wait and retry while the server limits the rate.

        Args:
            lm: the name of the model.
            request: the request.
            meter: the budget.
            clock: the timeout of the call.
            on_text: receives pieces of the text, if the engine can stream.

        Raises:
            BudgetExhausted: the worst case of the request does not fit into the budget.
            CallError: the request failed, or the rate limit lasted longer than the engine's ``max_wait``.
            DeclarationError: the cost is limited, and the price of the model is unknown.
        """
        engine = self.engine(lm)
        clock.pause()
        # the call's timeout excludes loading a model and waiting for the rate limit
        if warm_up := getattr(engine, "warm_up", None):
            await warm_up()
        if meter.budget.cost is not None and not engine.priced:
            raise unpriced(lm)
        most = getattr(engine, "max_wait", MAX_WAIT)
        try:
            return await self._send_when_admitted(engine, lm, request, meter, clock, on_text)
        except NeverAdmitted:
            most = getattr(engine, "max_wait", MAX_WAIT)
            raise CallError(
                f"{lm}: rate limit: no request was admitted within max_wait, {_seconds(most)}",
                hint=WAIT_HINT,
                kind=RateLimited.kind,
                charged=NO_USAGE,
            ) from None

    async def _send_when_admitted(
        self,
        engine: Engine,
        lm: str,
        request: Request,
        meter: Meter,
        clock: Clock,
        on_text: OnText | None,
    ) -> Completion:
        """Send a request, and retry while the server rejects it because of its rate limit."""
        most = getattr(engine, "max_wait", MAX_WAIT)
        gate, worst = self._gate(lm, engine), worst_case(engine, request)
        waited, tries, refusal = 0.0, 0, ""
        while True:
            tries += 1
            async with gate.admit(request.seed + tries, most, meter, worst) as (turn, used):
                waited += turn.waited
                meter.incidents["milliseconds_waited"] += round(1000 * turn.waited)
                if engine.remote:
                    clock.resume()
                try:
                    answer = self._answer(engine, lm, request, on_text, worst, meter)
                    tracer = active_tracer()
                    traced = answer if tracer is None else within(tracer.request(engine, lm, request), answer)
                    completion = await traced
                except RateLimited as error:
                    used.append(NO_USAGE)
                    meter.incidents["rate_limited"] += 1
                    found = await gate.refuse(turn, error.retry_after)
                    if waited + found.ahead > most:
                        raise _waited_too_long(error, lm, waited, found.ahead, most) from error
                    wait = f"waiting {_seconds(found.ahead)}, {found.in_flight} in flight"
                    refusal = f"{lm}: rate limit: {wait}" if found.first else ""
                except BaseException as error:
                    lost = self._charge_failure(error, engine, worst, meter)
                    used.append(lost)
                    clock.usage += lost
                    raise
                else:
                    gate.speed_up(turn)
                    used.append(completion.usage)
                    clock.usage += completion.usage
                    return completion
                finally:
                    if not engine.remote:
                        clock.resume()
            clock.pause()
            if refusal:
                self._notify(refusal)

    def _charge_failure(self, error: BaseException, engine: Engine, worst: Usage, meter: Meter) -> Usage:
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

    async def _answer(
        self, engine: Engine, lm: str, request: Request, on_text: OnText | None, worst: Usage, meter: Meter
    ) -> Completion:
        """Send one request; tracers record the answer that this returns, with the usage that is charged."""
        completion = self._charge_completion(await completion_of(engine, request, on_text), lm, worst, meter)
        # a sample without text is a sample, and a forwarded answer is read by its program
        is_answer = completion.text.strip() or completion.tool_calls or request.want_tokens or request.forward
        if not is_answer:
            raise CallError(f"{lm} returned an answer without text", kind="empty", charged=completion.usage)
        return completion

    def _charge_completion(self, completion: Completion, lm: str, worst: Usage, meter: Meter) -> Completion:
        """Return an answer with sanitized text, charged at most its reservation."""
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
        return replace(completion, text=text, usage=usage, tool_calls=calls, body=body)

    def _gate(self, lm: str, engine: Engine) -> Gate:
        """Return the admission control of an engine."""
        return self.throttle(engine)

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


def _waited_too_long(error: RateLimited, lm: str, waited: float, ahead: float, most: float) -> CallError:
    return CallError(
        f"{lm}: rate limit: waited {_seconds(waited)}, and the server requests another {_seconds(ahead)}, "
        f"but max_wait is {_seconds(most)} ({sanitize_text(error.message)})",
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
            raise DeclarationError(f"no engine for the model {lm!r}", hint=suggest_name(lm, known))
        return known[lm]

    return find
