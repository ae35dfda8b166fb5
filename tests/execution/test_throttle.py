"""Rate limits: requests wait, rejected ones are not charged, and every request is answered in the end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.server import Fault, FaultyServer, Limiter
from compound import LLM, Executor, Input, System, Trace
from compound.core.engine import NO_USAGE, Engine, Message, Request, Usage
from compound.core.errors import BudgetExhausted, CallError, RateLimited
from compound.engines.litellm import LiteLLMEngine
from compound.engines.vllm.engine import VLLMEngine
from compound.execution.budget import Budget, Meter
from compound.execution.cache import MemoryCache
from compound.execution.sender import LONGEST_WAIT, Throttle
from compound.testing import ScriptedLM
from virtual_time import in_virtual_time

litellm_speaks = pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict:UserWarning")


def asking(retries: int = 0, timeout: float | None = 60.0) -> System:
    answerer = LLM("llm", prompt="Say only the number:", retries=retries, timeout=timeout)
    return System("s", outputs={"y": answerer(q=Input("q"))}, lm="m")


class Limited(ScriptedLM):
    """A model behind a token bucket, by the loop's clock."""

    def __init__(
        self, per_second: float, retry_after: float | None = 1.0, *, max_wait: float = 600.0
    ) -> None:
        self.refused, self.retry_after, self.max_wait = 0, retry_after, max_wait
        self._limiter: Limiter | None = None
        self._per_second, self._takes = per_second, 0.05
        if not per_second:
            self.admit(0.0)
        super().__init__(self._reply_to)

    def admit(self, per_second: float, *clock: Callable[[], float]) -> None:
        """Begin with an empty bucket."""
        self._limiter = Limiter(per_second, *clock)
        self._limiter._tokens = 0.0

    async def _reply_to(self, message: str) -> str:
        if self._limiter is None:
            self._limiter = Limiter(self._per_second, asyncio.get_running_loop().time)
        await asyncio.sleep(self._takes / 10)
        if not self._limiter.admits():
            self.refused += 1
            raise RateLimited("slow down", retry_after=self.retry_after, charged=NO_USAGE)
        await asyncio.sleep(self._takes)
        return str(re.findall(r"\d+", message)[-1])


async def sixty(
    lm: Engine, notes: list[str] | None = None, meter: Meter | None = None, calls: int = 60
) -> list[Trace]:
    kept: list[str] = [] if notes is None else notes
    executor = Executor({"m": lm}, meter=meter, on_notice=kept.append)
    system = asking()
    try:
        return await asyncio.gather(
            *(executor.run(system, {"q": f"what is {i}"}) for i in range(calls))
        )
    finally:
        await executor.aclose()


@pytest.mark.parametrize("retry_after", [1.0, None])
@pytest.mark.parametrize("per_second", [3, 8, 20])
@in_virtual_time
async def test_sixty_of_sixty_calls_are_answered(
    per_second: int, retry_after: float | None
) -> None:
    lm, meter = Limited(per_second, retry_after), Meter(Budget(calls=60))
    notes: list[str] = []
    traces = await sixty(lm, notes, meter)
    seconds = asyncio.get_running_loop().time()
    assert [trace.outputs.get("y") for trace in traces] == [str(i) for i in range(60)]
    assert lm.refused > 0
    assert meter.incidents["rate_limited"] == lm.refused
    assert meter.usage.calls == 60, "refused requests are not charged"
    assert sum(trace.usage.calls for trace in traces) == 60
    assert seconds < 6 * 60 / per_second, "the server was kept busy"
    assert notes
    assert re.fullmatch(r"m: rate limit: waiting \d+(\.\d)? s, \d+ in flight", notes[0])


@litellm_speaks
@pytest.mark.parametrize("kind", ["litellm", "vllm"])
def test_a_limited_rate_answers_every_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "a-key-of-the-tests")
    refused = [Fault.RATE_LIMIT] * 8
    with FaultyServer(per_second=16, retry_after="0.2", first=refused) as server:
        engine: Engine
        if kind == "litellm":
            engine = LiteLLMEngine(
                "openai/tiny",
                api_base=server.url,
                api_key_env="TINY_KEY",
                concurrency=24,
                price=(1.0, 2.0),
            )
        else:
            engine = VLLMEngine("tiny", api_base=server.url, api_key_env="TINY_KEY", concurrency=24)
        meter = Meter()
        traces = asyncio.run(sixty(engine, meter=meter, calls=24))
        billed = server.billed
    assert [trace.outputs.get("y") for trace in traces] == [str(i) for i in range(24)]
    assert server.faults[Fault.RATE_LIMIT] == meter.incidents["rate_limited"] >= 8
    assert meter.usage.calls == billed.calls == 24
    assert meter.usage.tokens == billed.tokens


@in_virtual_time
async def test_requests_beside_the_graph_wait_as_well() -> None:
    lm = Limited(3)
    request = [Request((Message("user", f"write {i}"),), seed=i) for i in range(30)]

    executor = Executor({"m": lm}, cache=MemoryCache(), on_notice=lambda _: None)
    assert [
        c.text for c in await asyncio.gather(*(executor.request("m", each) for each in request))
    ] == [str(i) for i in range(30)]
    assert lm.refused > 0


@in_virtual_time
async def test_a_call_waits_no_longer_than_the_engine_allows() -> None:
    lm, meter = Limited(0.0, max_wait=90.0), Meter()
    executor = Executor({"m": lm}, meter=meter, on_notice=lambda _: None)
    trace = await executor.run(asking(retries=3), {"q": "1"})
    seconds = asyncio.get_running_loop().time()
    assert trace.failure is not None
    assert trace.failure.kind == "rate_limit"
    assert (
        "within max_wait, 90 s; lower the engine's concurrency, or raise" in trace.failure.message
    )
    assert 60 < seconds < 140
    assert meter.usage == NO_USAGE


@in_virtual_time
async def test_a_wait_that_is_too_long_is_not_begun() -> None:
    lm = Limited(0.0, retry_after=86_400.0)

    executor = Executor({"m": lm}, on_notice=lambda _: None)
    trace = await executor.run(asking(), {"q": "1"})
    assert trace.failure is not None
    assert "requests another 86400 s" in trace.failure.message
    assert asyncio.get_running_loop().time() < 1


@in_virtual_time
async def test_calls_do_not_wait_one_after_another_for_a_server_that_admits_none() -> None:
    lm, notes = Limited(0.0, max_wait=10.0), list[str]()
    traces = await sixty(lm, notes)
    seconds = asyncio.get_running_loop().time()
    assert {trace.failure.kind for trace in traces if trace.failure} == {"rate_limit"}
    assert "no request was admitted within max_wait, 10 s" in str(traces[-1].failure)
    assert seconds < 25
    assert len(notes) < 20, "one notice for each time that all wait"


@pytest.mark.parametrize("retry_after", [0.0, 0.001])
@in_virtual_time
async def test_a_server_that_requests_no_wait_is_asked_with_pauses(retry_after: float) -> None:
    lm = Limited(0.0, retry_after=retry_after, max_wait=10.0)

    executor = Executor({"m": lm}, on_notice=lambda _: None)
    async with asyncio.timeout(60):
        trace = await executor.run(asking(), {"q": "1"})
    assert trace.failure is not None
    assert trace.failure.kind == "rate_limit"
    assert lm.refused <= 25


@in_virtual_time
async def test_a_rejection_long_after_the_last_one_starts_a_new_series() -> None:
    lm = Limited(0.0, max_wait=10.0)

    executor = Executor({"m": lm}, on_notice=lambda _: None)
    cancelled = asyncio.ensure_future(executor.run(asking(), {"q": "1"}))
    await asyncio.sleep(0.5)
    cancelled.cancel()  # it was rejected, and waits: no answer ends the series
    await asyncio.sleep(3600)
    lm.admit(1.0, asyncio.get_running_loop().time)
    assert (await executor.run(asking(), {"q": "2"})).outputs == {"y": "2"}


@in_virtual_time
async def test_a_wait_for_the_rate_limit_is_no_part_of_the_time_limit_of_a_try() -> None:
    lm = Limited(1, retry_after=30.0)

    executor = Executor({"m": lm}, on_notice=lambda _: None)
    system = asking(timeout=2.0)
    assert [
        trace.failure
        for trace in await asyncio.gather(*(executor.run(system, {"q": f"{i}"}) for i in range(3)))
    ] == [None] * 3


@in_virtual_time
async def test_what_an_engine_prepares_is_no_part_of_the_time_limit_of_a_try() -> None:
    class Slow(ScriptedLM):
        async def warm_up(self) -> None:
            await asyncio.sleep(30)

    trace = await Executor({"m": Slow(["4"])}).run(asking(timeout=2.0), {"q": "2 + 2"})
    seconds = asyncio.get_running_loop().time()
    assert (trace.failure, trace.outputs) == (None, {"y": "4"})
    assert seconds == pytest.approx(30.0)


@in_virtual_time
async def test_the_minutes_of_a_run_end_a_wait() -> None:
    lm = Limited(1, retry_after=50.0)

    loop = asyncio.get_running_loop()
    meter = Meter(Budget(minutes=0.5), clock=loop.time)
    executor = Executor({"m": lm}, meter=meter, on_notice=lambda _: None)
    await executor.run(asking(), {"q": "1"})
    with pytest.raises(BudgetExhausted, match=r"0\.5 of 0\.5 minutes .*in flight were cancelled"):
        await executor.run(asking(), {"q": "2"})
    assert meter.usage.calls == 1
    assert loop.time() == pytest.approx(30.0)


@in_virtual_time
async def test_it_halves_once_for_requests_in_flight_together_and_grows_with_answers() -> None:

    throttle = Throttle(16)
    turns = []
    for _ in range(4):
        manager = throttle.turn()
        turns.append((manager, await manager.__aenter__()))
    limits = [throttle.limit]
    for _, turn in turns:
        throttle.slow_down(turn, 1.0)
        limits.append(throttle.limit)
    for manager, _ in turns:
        await manager.__aexit__(None, None, None)
    for _ in range(200):
        throttle.speed_up()
    assert (limits, throttle.limit) == ([16.0, 8.0, 8.0, 8.0, 8.0], 16.0)


@in_virtual_time
async def test_without_a_wish_of_the_server_waits_double_up_to_a_minute() -> None:
    throttle, waits = Throttle(4), []
    for _ in range(10):
        async with throttle.turn() as turn:
            waits.append(throttle.slow_down(turn, None))
    assert waits[:4] == pytest.approx([0.5, 1.0, 2.0, 4.0])
    assert waits[-1] == pytest.approx(LONGEST_WAIT)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["answer", "refuse", "cancel"])), max_size=40
    )
)
@in_virtual_time
async def test_turns_are_never_lost_whatever_happens(jobs: list[tuple[int, str]]) -> None:
    throttle = Throttle(3)
    most = 0

    async def job(delay: int, end: str) -> None:
        nonlocal most
        await asyncio.sleep(delay)
        async with throttle.turn() as turn:
            most = max(most, throttle.sent)
            await asyncio.sleep(1)
            if end == "refuse":
                throttle.slow_down(turn, 2.0)
            else:
                throttle.speed_up()

    tasks = [asyncio.create_task(job(*each)) for each in jobs]
    await asyncio.sleep(1.5)
    for task, (_, end) in zip(tasks, jobs, strict=True):
        if end == "cancel":
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most <= 3
    assert throttle.sent == throttle._held == 0
    async with asyncio.timeout(100), throttle.turn():
        pass


@in_virtual_time
async def test_a_cancelled_call_leaves_its_place_in_the_queue_to_the_next() -> None:
    throttle, order = Throttle(1), []

    async def job(name: str, work: Callable[[], Awaitable[Any]]) -> None:
        async with throttle.turn():
            order.append(name)
            await work()

    holder = asyncio.create_task(job("a", lambda: asyncio.sleep(5)))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(job(name, lambda: asyncio.sleep(0))) for name in "bcd"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.gather(holder, *waiting, return_exceptions=True)
    assert order == ["a", "c", "d"]


def test_usage_of_a_failed_request_is_what_its_error_says() -> None:
    def charged(error: Exception) -> Usage:
        executor = Executor({"m": ScriptedLM([error])})
        asyncio.run(executor.run(asking(), {"q": "1"}))
        return executor.meter.usage

    worst = ScriptedLM([]).worst_case(Request((Message("user", "Say only the number:\n\nq: 1"),)))
    assert charged(CallError("refused", charged=NO_USAGE)) == NO_USAGE
    assert charged(CallError("cut", charged=Usage(1, 3, 2))) == Usage(1, 3, 2)
    assert charged(CallError("lost")).completion_tokens == worst.completion_tokens == 256
    assert charged(ValueError("odd")).completion_tokens == 256
