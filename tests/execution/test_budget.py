"""Budgets: the worst case is held before a request is sent, and no limit is ever exceeded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound import LLM, Executor, Function, Input, Map, System, Trace
from compound.core.engine import NO_USAGE, Usage
from compound.core.errors import BudgetExhausted, CallError, DeclarationError
from compound.execution.budget import Budget, Meter, MeterState
from compound.graph.component import Operation
from compound.graph.types import Port
from compound.testing import ScriptedLM

T = TypeVar("T")


class Clock:
    """A clock the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def spend(meter: Meter, worst: Usage, used: Usage | None = None, turns: int = 0) -> None:
    """Make a request that yields to the loop ``turns`` times."""
    async with meter.reserve(worst) as report:
        for _ in range(turns):
            await asyncio.sleep(0)
        if used is not None:
            report.append(used)


def settled(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; a reservation that is never given back fails here and does not hang."""

    async def within_reason() -> T:
        async with asyncio.timeout(20):
            return await work

    return asyncio.run(within_reason())


def refusal(make: Callable[[], Awaitable[object]]) -> str:
    async def scenario() -> None:
        await make()

    with pytest.raises(BudgetExhausted) as error:
        settled(scenario())
    return str(error.value)


@pytest.mark.parametrize(
    ("budget", "spent", "worst", "message"),
    [
        (
            Budget(calls=2),
            Usage(2),
            Usage(1),
            "the next call would raise the calls to 3, above the limit of 2",
        ),
        (
            Budget(tokens=10),
            Usage(0, 3, 3),
            Usage(1, 4, 1),
            "the next call could raise the tokens to 11, above the limit of 10",
        ),
        (
            Budget(cost=0.5),
            Usage(cost=0.4),
            Usage(1, cost=0.2),
            "could raise the cost to $0.6000, above the limit of $0.5000",
        ),
    ],
)
def test_a_worst_case_that_does_not_fit_is_refused_before_the_request(
    budget: Budget, spent: Usage, worst: Usage, message: str
) -> None:
    meter = Meter(budget)
    meter.usage += spent
    assert message in refusal(lambda: spend(meter, worst, worst))
    assert meter.usage == spent


@pytest.mark.parametrize("error", [CallError("refused"), asyncio.CancelledError()])
async def test_a_request_lost_on_its_way_is_charged_in_full(error: BaseException) -> None:
    meter = Meter(Budget(calls=3, tokens=90))

    async def failing() -> None:
        async with meter.reserve(Usage(1, 20, 10)):
            raise error

    for _ in range(2):
        with pytest.raises(type(error)):
            await failing()
    await spend(meter, Usage(1, 20, 10), Usage(1, 20, 10))
    assert meter.usage == Usage(3, 60, 30)


def test_a_request_waits_only_as_long_as_waiting_can_help() -> None:
    refused_at_once: list[bool] = []

    async def scenario() -> tuple[Meter, list[Any]]:
        meter = Meter(Budget(tokens=100))

        async def never_fits() -> None:
            try:
                await spend(meter, Usage(1, 0, 101), Usage(1, 0, 1))
            finally:
                refused_at_once.append(meter.usage == NO_USAGE)

        jobs = [
            spend(meter, Usage(1, 0, 60), Usage(1, 0, 60), turns=5),
            never_fits(),
            spend(meter, Usage(1, 0, 50), Usage(1, 0, 1)),  # fits no more once the first is settled
            spend(meter, Usage(1, 0, 40), Usage(1, 0, 40)),  # fits beside the first
        ]
        return meter, await asyncio.gather(*jobs, return_exceptions=True)

    meter, results = settled(scenario())
    assert [type(result) for result in results] == [
        type(None),
        BudgetExhausted,
        BudgetExhausted,
        type(None),
    ]
    assert meter.usage == Usage(2, 0, 100)
    assert refused_at_once == [True]


async def test_a_cancelled_waiter_holds_nothing_up() -> None:
    meter = Meter(Budget(calls=2))
    first = asyncio.create_task(spend(meter, Usage(2), Usage(1), turns=5))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(spend(meter, Usage(1), Usage(1))) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    results = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert [type(result) for result in results] == [
        type(None),
        asyncio.CancelledError,
        type(None),
    ]
    assert meter.usage == Usage(2)


@dataclass(frozen=True)
class Job:
    """A request: how long it waits, takes, and what it uses of what it reserves."""

    before: int
    turns: int
    worst: Usage
    used: Usage | None


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    worst = Usage(
        draw(st.integers(1, 3)),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 8)) / 8,
    )
    used = Usage(
        draw(st.integers(0, worst.calls)),
        draw(st.integers(0, worst.prompt_tokens)),
        draw(st.integers(0, worst.completion_tokens)),
        draw(st.integers(0, int(worst.cost * 8))) / 8,
    )
    failed = draw(st.booleans()) and draw(st.booleans())
    return Job(draw(st.integers(0, 4)), draw(st.integers(0, 4)), worst, None if failed else used)


LIMITS = st.builds(
    Budget,
    calls=st.none() | st.integers(0, 12),
    tokens=st.none() | st.integers(0, 60),
    cost=st.none() | st.integers(0, 24).map(lambda n: n / 8),
)


def within(usage: Usage, budget: Budget) -> bool:
    return (
        (budget.calls is None or usage.calls <= budget.calls)
        and (budget.tokens is None or usage.tokens <= budget.tokens)
        and (budget.cost is None or usage.cost <= budget.cost + 1e-9)
    )


@given(LIMITS, st.lists(jobs(), max_size=8))
def test_no_limit_is_exceeded_whatever_the_interleaving(budget: Budget, work: list[Job]) -> None:
    async def scenario() -> None:
        meter = Meter(budget)
        held = NO_USAGE

        async def make(job: Job) -> None:
            nonlocal held
            for _ in range(job.before):
                await asyncio.sleep(0)
            async with meter.reserve(job.worst) as report:
                held += job.worst
                assert within(meter.usage + held, budget)  # what is spent and what may be, together
                for _ in range(job.turns):
                    await asyncio.sleep(0)
                held = Usage(
                    held.calls - job.worst.calls,
                    held.prompt_tokens - job.worst.prompt_tokens,
                    held.completion_tokens - job.worst.completion_tokens,
                    held.cost - job.worst.cost,
                )
                if job.used is None:
                    raise CallError("failed on the way")
                report.append(job.used)
            assert within(meter.usage, budget)

        tasks = [asyncio.create_task(make(job)) for job in work]
        _, stuck = await asyncio.wait(tasks, timeout=120) if tasks else (set(), set())
        assert not stuck
        errors = [task.exception() for task in tasks]
        assert {type(error) for error in errors} <= {type(None), CallError, BudgetExhausted}
        sent = [
            job.used or job.worst for job, e in zip(work, errors, strict=True) if not _refused(e)
        ]
        assert meter.usage == sum(sent, NO_USAGE)
        assert within(meter.usage, budget)
        # nothing is refused that would still fit now that all has settled
        for job, error in zip(work, errors, strict=True):
            if _refused(error):
                assert not within(meter.usage + job.worst, budget)
        if within(sum((job.worst for job in work), NO_USAGE), budget):
            assert not any(_refused(error) for error in errors)

    settled(scenario())


def _refused(error: BaseException | None) -> bool:
    return isinstance(error, BudgetExhausted)


def test_ten_tenths_are_one_run() -> None:
    meter = Meter(Budget(system_runs=2))
    for _ in range(10):
        meter.charge_runs(0.1)
    settled(meter.reserve_run())


async def test_a_part_of_a_run_is_held_as_a_part() -> None:
    meter = Meter(Budget(system_runs=1))
    for _ in range(4):
        await meter.reserve_run(0.25)
    fifth = asyncio.create_task(meter.reserve_run(0.25))
    await asyncio.sleep(0)
    assert not fifth.done()
    meter.charge_runs(0.0, held=0.25)  # it was in the cache
    await fifth
    for _ in range(4):
        meter.charge_runs(0.25, held=0.25)
    with pytest.raises(BudgetExhausted, match=r"1\.0 of 1 system runs"):
        await meter.reserve_run(0.25)


def test_a_cap_holds_in_its_block_and_no_longer() -> None:
    meter = Meter(Budget(system_runs=5))
    meter.charge_runs(1.0)
    with meter.cap_runs(1.5):
        settled(meter.reserve_run())
        meter.charge_runs(1.0)
        refused = refusal(lambda: meter.reserve_run())
    assert "2.0 of 2.5 system runs" in refused
    settled(meter.reserve_run())
    meter.charge_runs(1.0)
    with meter.cap_runs(float("inf")), meter.cap_runs(0.0):
        assert "system runs" in refusal(lambda: meter.reserve_run(0.1))


@pytest.mark.parametrize("limit", ["system_runs", "calls", "tokens", "cost", "minutes"])
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_a_limit_below_zero_is_refused(limit: str, value: float) -> None:
    with pytest.raises(DeclarationError, match=f"budget: {limit} must be >= 0, but got {value}"):
        Budget(**{limit: value})  # type: ignore[arg-type]


def test_a_share_of_a_budget_rounds_counts_down_and_leaves_runs() -> None:
    assert Budget(10, 9, 99, 1.0, 5.0).share(0.5) == Budget(10, 4, 49, 0.5, 2.5)
    assert Budget().share(0.5) == Budget()


def test_a_paused_clock_stands_still() -> None:
    clock = Clock()
    meter = Meter(Budget(minutes=1), clock=clock)
    clock.now += 50
    meter.pause()
    meter.pause()
    clock.now += 500
    assert meter.seconds == 50
    settled(spend(meter, Usage(1), Usage(1)))
    meter.restore(meter.snapshot())  # paused before, paused after
    clock.now += 500
    assert meter.seconds == 50
    meter.resume()
    clock.now += 10
    assert "1.0 of 1 minutes are used" in refusal(lambda: spend(meter, Usage(1), Usage(1)))


def test_a_meter_continues_from_its_snapshot() -> None:
    clock = Clock()
    meter = Meter(Budget(calls=3, minutes=2), clock=clock)
    settled(spend(meter, Usage(1, 5, 5, 0.5), Usage(1, 5, 2, 0.25)))
    meter.charge_runs(0.5)
    clock.now += 90
    state = MeterState.from_json(json.loads(json.dumps(meter.snapshot().to_json())))
    clock.now += 1000  # between two attempts no time counts
    resumed = Meter(Budget(calls=3, minutes=2), clock=clock)
    resumed.restore(state)
    assert (resumed.usage, resumed.system_runs, resumed.runs) == (Usage(1, 5, 2, 0.25), 0.5, 1)
    assert resumed.seconds == 90
    clock.now += 30
    assert "2.0 of 2 minutes" in refusal(lambda: spend(resumed, Usage(1), Usage(1)))
    assert resumed.snapshot().seconds == 120


X = Input("x", int)
XS = Input("xs", list[int])


def asking_often() -> System:
    body = System("one", outputs={"y": LLM("llm", max_tokens=5)(x=X)})
    return System("s", outputs={"ys": Map("each", body, over="x")(x=XS)}, lm="m")


def run(system: System, xs: list[int], executor: Executor) -> Trace:
    async def scenario() -> Trace:
        try:
            return await executor.run(system, {"xs": xs})
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return settled(scenario())


@pytest.mark.parametrize("latency", [0.0, 0.001])
def test_an_exhausted_budget_ends_the_run_and_leaves_no_task_behind(latency: float) -> None:
    lm = ScriptedLM(lambda message: message, latency=latency)
    executor = Executor({"m": lm}, meter=Meter(Budget(calls=3)))
    with pytest.raises(BudgetExhausted, match="next call would .* to 4, above the limit of 3"):
        run(asking_often(), list(range(8)), executor)
    assert len(lm.requests) <= 3
    assert lm.in_flight == 0
    assert executor.meter.usage.calls <= 3


def test_a_run_that_fits_exactly_is_not_refused_although_its_worst_cases_do_not() -> None:
    lm = ScriptedLM(lambda message: "one", latency=0.001)
    system = asking_often()
    prompt = 3  # words of "X: 1\nAnswer:"
    executor = Executor({"m": lm}, meter=Meter(Budget(tokens=4 * (prompt + 1) + 4)))
    assert run(system, [1, 2, 3, 4], executor).failure is None
    assert executor.meter.usage == Usage(4, 4 * prompt, 4)
    assert lm.most_in_flight == 2


def test_what_needs_no_engine_runs_on_an_empty_budget() -> None:
    def plus(x: int) -> int:
        return x + 1

    body = System("one", outputs={"y": Function("plus", plus)(x=X)})
    system = System("s", outputs={"ys": Map("each", body, over="x")(x=XS)})
    assert run(system, [1], Executor(meter=Meter(Budget(calls=0)))).outputs == {"ys": [2]}


def test_an_executor_can_charge_another_budget_and_shares_the_rest() -> None:
    lm = ScriptedLM(lambda message: message)
    search = Executor({"m": lm}, meter=Meter(Budget(calls=1)))
    test = search.with_meter(Meter(Budget(calls=2)))
    run(asking_often(), [1, 2], test)
    run(asking_often(), [1], search)
    assert (search.meter.usage.calls, test.meter.usage.calls, len(lm.requests)) == (1, 2, 3)
    for executor in (search, test):
        with pytest.raises(BudgetExhausted):
            run(asking_often(), [1], executor)


def test_limits_say_how_many_runs_they_hold_by_what_the_runs_so_far_took() -> None:
    meter = Meter(Budget(calls=100, tokens=1000))
    assert meter.remaining_runs() == float("inf")  # nothing is known yet
    meter.usage += Usage(20, 200, 100)
    meter.charge_runs(10.0)
    # 80 calls at 2 a run: 40; 700 tokens at 30 a run: 23.3; four fifths of the smaller
    assert meter.remaining_runs() == pytest.approx(700 / 30 * 0.8)
    assert Meter(Budget(calls=5)).remaining_runs() == float("inf")


def test_time_ends_runs_that_call_no_model() -> None:
    clock = Clock()
    meter = Meter(Budget(minutes=1), clock=clock)
    settled(meter.reserve_run())
    clock.now += 60
    assert "1.0 of 1 minutes are used" in refusal(lambda: meter.reserve_run())


class Sending(Operation):
    """A component whose library sends the requests."""

    kind, version, name = "sending", "1", "sending"
    inputs: ClassVar[Any] = {}
    outputs: ClassVar[Any] = {"y": Port(str)}
    settings: ClassVar[Any] = {}

    def __init__(self, used: Usage) -> None:
        self.used = used
        self.sent = 0

    async def run(self, inputs: Any, values: Any, call: Any) -> dict[str, str]:
        async with call.reserve(Usage(1, 20, 10, cost=0.1)) as used:
            self.sent += 1
            used.append(self.used)
        return {"y": "a"}


@pytest.mark.parametrize(
    ("budget", "used", "error", "sent"),
    [
        (Budget(tokens=29), Usage(1, 9, 9), (BudgetExhausted, "above the limit of 29"), 0),
        (Budget(tokens=60), Usage(1, 9, 9), None, 1),
        (
            Budget(cost=1.0),
            Usage(1, 9, 9, unpriced=1),
            (DeclarationError, "price of the component's own requests is unknown"),
            1,
        ),
    ],
)
def test_requests_that_a_component_sends_itself_are_charged(
    budget: Budget, used: Usage, error: tuple[type[Exception], str] | None, sent: int
) -> None:
    component, meter = Sending(used), Meter(budget)
    run = Executor(meter=meter).run(System("s", {"y": component()}), {})
    if error is None:
        assert settled(run).usage == used
    else:
        with pytest.raises(error[0], match=error[1]):
            settled(run)
    assert meter.usage == (used if sent else NO_USAGE)
    assert component.sent == sent
