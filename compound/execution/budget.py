"""Budgets as hard limits: the worst case of a request is reserved before the request is sent.

Unused reservations are released. If a request does not fit, it waits for reservations in flight to
settle; the budget is exhausted only if it still does not fit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt

from compound.core.engine import NO_USAGE, Usage
from compound.core.errors import BudgetExhausted, DeclarationError
from compound.core.narrowing import report_wrong_arguments
from compound.core.storage.state import State

T = TypeVar("T")
HINT = "raise the limit, and run the same command to resume"
MARGIN = 0.2  # share of the runs estimated from other limits that is held back


@report_wrong_arguments
@dataclass(frozen=True)
class Budget:
    """Hard limits; ``None`` means no limit.

    Attributes:
        system_runs: system runs; forks and cached runs count as the fraction executed.
        calls: engine calls.
        tokens: prompt and completion tokens.
        cost: US dollars.
        minutes: wall-clock minutes, over all attempts of a run.

    >>> Budget(calls=-1)
    Traceback (most recent call last):
    compound.core.errors.DeclarationError: budget: calls must be >= 0, but got -1
    """

    system_runs: float | None = None
    calls: int | None = None
    tokens: int | None = None
    cost: float | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and not value >= 0:
                raise DeclarationError(f"budget: {item.name} must be >= 0, but got {value!r}")

    def share(self, part: float) -> Budget:
        """Return this budget with all limits except ``system_runs`` scaled; counts are rounded down."""
        return replace(
            self,
            calls=self.calls and int(self.calls * part),
            tokens=self.tokens and int(self.tokens * part),
            cost=self.cost and self.cost * part,
            minutes=self.minutes and self.minutes * part,
        )


def _checked_usage(usage: Usage) -> Usage:
    numbers = usage.calls, usage.prompt_tokens, usage.completion_tokens, usage.cost, usage.unpriced
    if not all(0 <= number < math.inf for number in numbers):
        raise ValueError("must hold finite numbers that are not negative")
    return usage


StoredUsage = Annotated[Usage, AfterValidator(_checked_usage)]


class MeterState(State):
    """Spending as stored in a checkpoint; see the attributes of `Meter`."""

    usage: StoredUsage
    system_runs: NonNegativeFloat
    runs: NonNegativeInt
    seconds: NonNegativeFloat
    incidents: dict[str, int] = Field(default_factory=dict)
    metric_usage: StoredUsage = NO_USAGE


class Meter:
    """Tracks usage and reservations against a `Budget`.

    Args:
        budget: the limits.
        clock: function that returns the time in seconds.
        whole: budget that this one is a part of; messages then also quote its limits.
        rest: text that says what the other part is reserved for.

    Attributes:
        incidents: counts of server incidents: ``rate_limited`` and ``lost`` requests,
            ``usage_corrected`` answers, and the ``milliseconds_waited`` for rate limits.
        metric_usage: the part of ``usage`` that metrics spent, such as the calls of a judge.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        whole: Budget | None = None,
        rest: str = "",
    ) -> None:
        self.budget = budget or Budget()
        self._whole, self._rest = whole or self.budget, rest
        self.usage = NO_USAGE
        self.metric_usage = NO_USAGE
        self.system_runs = 0.0
        self.runs = 0
        self.incidents: Counter[str] = Counter()
        self._reserved = NO_USAGE
        self._runs_held = 0.0
        self._cap = float("inf")
        self._clock = clock
        self._started: float | None = clock()
        self._earlier_seconds = 0.0
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of this and earlier attempts, excluding pauses."""
        return self._earlier_seconds + (
            0.0 if self._started is None else self._clock() - self._started
        )

    def pause(self) -> None:
        """Stop the clock until `resume`."""
        self._earlier_seconds, self._started = self.seconds, None

    def resume(self) -> None:
        """Restart the clock after `pause`."""
        if self._started is None:
            self._started = self._clock()

    def seconds_left(self) -> float | None:
        """Return the seconds left until the limit of minutes; ``None`` without such a limit."""
        return None if self.budget.minutes is None else self.budget.minutes * 60 - self.seconds

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Cancel the block when the limit of minutes is reached.

        Raises:
            BudgetExhausted: the limit is reached.
        """
        left = self.seconds_left()
        if left is None:
            yield
            return
        try:
            async with asyncio.timeout(left) as timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            minutes = self.budget.minutes
            raise BudgetExhausted(
                f"budget: {minutes:g} of {minutes:g} minutes are used{self._of_whole('minutes')}; "
                "calls in flight were cancelled",
                hint=HINT,
            ) from None

    def before_deadline(self, work: Coroutine[object, object, T]) -> Awaitable[T]:
        """Return work that is cancelled when the limit of minutes is reached; see `deadline`."""
        return work if self.budget.minutes is None else self._before_deadline(work)

    async def _before_deadline(self, work: Coroutine[object, object, T]) -> T:
        try:
            async with self.deadline():
                return await work
        finally:
            work.close()  # it may not have been started

    def remaining_runs(self) -> float:
        """Return the number of system runs left (infinity without a limit).

        For each other limit, the number is estimated from the average usage per run so far, minus a
        margin (`MARGIN`), since other configurations may use more.
        """
        budget, usage, done = self.budget, self.usage, self.system_runs
        lefts = [float("inf") if budget.system_runs is None else budget.system_runs - done]
        minutes = None if budget.minutes is None else budget.minutes * 60
        for limit, used in [
            (budget.calls, usage.calls),
            (budget.tokens, usage.tokens),
            (budget.cost, usage.cost),
            (minutes, self.seconds),
        ]:
            if limit is not None and used and done:
                lefts.append((limit - used) / (used / done) * (1 - MARGIN))
        return max(0.0, min(lefts))

    @contextmanager
    def cap_runs(self, runs: float) -> Iterator[None]:
        """Limit the system runs spent in a block, in addition to the budget."""
        before, self._cap = self._cap, min(self._cap, self.system_runs + runs)
        try:
            yield
        finally:
            self._cap = before

    async def reserve_run(self, size: float = 1.0) -> None:
        """Reserve a system run, or a fraction of one, until `charge_runs` reports the actual amount.

        Raises:
            BudgetExhausted: it does not fit, even after every run in flight has settled.
        """
        budget = self.budget.system_runs
        limit = min(self._cap, float("inf") if budget is None else budget)
        if problem := self._time_limit_problem():
            raise BudgetExhausted(f"budget: {problem}", hint=HINT)
        # tolerance: fractional runs are summed as floats
        while self.system_runs + self._runs_held + size > limit + 1e-9:
            if self._runs_held < 1e-9:
                raise BudgetExhausted(
                    f"budget: {self.system_runs:.1f} of {limit:g} system runs are used",
                    hint=HINT,
                )
            await self._wait_for_settlement()
        self._runs_held += size

    def charge_runs(self, equivalents: float, held: float = 1.0) -> None:
        """Charge a finished run, and release the rest of its reservation."""
        self.runs += 1
        self.system_runs += equivalents
        self._runs_held = max(0.0, self._runs_held - held)
        self._wake_waiters()

    def release_runs(self) -> None:
        """Release all reserved runs, because none of them will finish."""
        self._runs_held = 0.0
        self._wake_waiters()

    async def charge_recorded(self, usage: Usage) -> None:
        """Charge recorded usage, subject to the same limits as a new call.

        Raises:
            BudgetExhausted: it does not fit.
        """
        async with self.reserve(usage) as used:
            used.append(usage)

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[list[Usage]]:
        """Reserve ``worst`` while a request is in flight; append its actual usage to the yielded list.

        A request without reported usage (it failed in transit) is charged its worst case.

        Raises:
            BudgetExhausted: the worst case does not fit, even after all requests in flight have
                settled.
        """
        while problem := self._limit_problem(self._reserved + worst):
            # waiting can only help if a reservation in flight may be released
            if self._reserved == NO_USAGE or self._limit_problem(worst):
                raise BudgetExhausted(f"budget: {problem}", hint=HINT)
            await self._wait_for_settlement()
        self._reserved += worst
        used: list[Usage] = []
        try:
            yield used
        finally:
            self._reserved = _subtract(self._reserved, worst)
            for item in used or [worst]:
                self.usage += item
            self._wake_waiters()

    async def _wait_for_settlement(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _wake_waiters(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _time_limit_problem(self) -> str:
        """Return that the minutes are used, as text, or ``""``."""
        minutes = self.budget.minutes
        if minutes is not None and self.seconds >= minutes * 60:
            return f"{self.seconds / 60:.1f} of {minutes:g} minutes are used{self._of_whole('minutes')}"
        return ""

    def _of_whole(self, name: str) -> str:
        """Return the user's own limit for messages, if this one is a part of it."""
        whole = getattr(self._whole, name)
        if whole is None or whole == getattr(self.budget, name):
            return ""
        return f" ({_shown(name, whole)} in total; {self._rest})"

    def _limit_problem(self, more: Usage) -> str:
        """Return the limit that further usage would exceed, as text, or ``""``."""
        if late := self._time_limit_problem():
            return late
        total = self.usage + more
        for name, may in ("calls", "would"), ("tokens", "could"), ("cost", "could"):
            limit, amount = getattr(self.budget, name), getattr(total, name)
            if limit is not None and amount > limit + 1e-12:  # costs are float sums
                return (
                    f"the next call {may} raise the {name} to {_shown(name, amount)}, above the limit "
                    f"of {_shown(name, limit)}{self._of_whole(name)}"
                )
        return ""

    def snapshot(self) -> MeterState:
        """Return the state stored in a checkpoint."""
        return MeterState(
            usage=self.usage,
            system_runs=self.system_runs,
            runs=self.runs,
            seconds=self.seconds,
            incidents=dict(+self.incidents),
            metric_usage=self.metric_usage,
        )

    def restore(self, state: MeterState) -> None:
        """Continue from a `snapshot`."""
        self.usage = state.usage
        self.system_runs = state.system_runs
        self.runs = state.runs
        self._earlier_seconds = state.seconds
        self.incidents = Counter(state.incidents)
        self.metric_usage = state.metric_usage
        if self._started is not None:
            self._started = self._clock()


def clip_usage(usage: Usage, worst: Usage) -> tuple[Usage, str]:
    """Clip usage to the worst case; return it with a description of the invalid numbers.

    Invalid numbers, such as fractional token counts, are replaced by the worst case.

    >>> clip_usage(Usage(1, -5, 20), Usage(1, 100, 50))
    (Usage(calls=1, prompt_tokens=100, completion_tokens=20, cost=0.0, unpriced=0), 'prompt_tokens -5')
    """
    found, wrong = [], []
    for name in ("calls", "prompt_tokens", "completion_tokens", "cost"):
        value, most = getattr(usage, name), getattr(worst, name)
        fits = isinstance(value, float | int) if name == "cost" else type(value) is int
        slack = 1e-12 + 1e-9 * most if name == "cost" else 0
        if fits and math.isfinite(value) and 0 <= value <= most + slack:
            found.append(value)
        else:
            found.append(most)
            wrong.append(f"{name} {str(value)[:40]}")
    calls, prompt, completion, cost = found
    return Usage(calls, prompt, completion, cost, worst.unpriced if calls else 0), ", ".join(wrong)


def _shown(name: str, amount: float) -> str:
    return {"cost": "${:.4f}", "minutes": "{:g}"}.get(name, "{}").format(amount)


def _subtract(a: Usage, b: Usage) -> Usage:
    rest = Usage(
        a.calls - b.calls,
        a.prompt_tokens - b.prompt_tokens,
        a.completion_tokens - b.completion_tokens,
        a.cost - b.cost,
        a.unpriced - b.unpriced,
    )
    return NO_USAGE if rest.calls == 0 and rest.tokens == 0 else rest
