"""The driver's answers to one worker: a question for each call, and what is given back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from clusters.program import evaluated, local_executor, remote_executor, requests, write_program
from clusters.transports import LocalTransport
from compound.cluster.handshake import rebuild
from compound.cluster.messages import (
    Claim,
    Enter,
    Finished,
    Leave,
    Reply,
    Start,
    Withdraw,
    WorkerMessage,
)
from compound.cluster.services import ExampleJob, ExampleServices
from compound.cluster.wire import CallCodec
from compound.core.engine import NO_USAGE, Usage
from compound.execution.cache import MemoryCache

RESULT: dict[str, object] = {
    "outputs": {"output": ["text"]},
    "failure": None,
    "usage": {"calls": 1, "prompt_tokens": 2, "completion_tokens": 3},
    "tokens": [],
    "attempts": 1,
    "seconds": 0.5,
    "reused": False,
    "exchanges": [],
}


@pytest.mark.parametrize("cached", [False, True])
def test_a_call_asks_for_its_result_and_its_request(tmp_path: Path, cached: bool) -> None:
    source, transport = write_program(tmp_path), LocalTransport()
    executor = remote_executor(source, transport, 2, cache=MemoryCache() if cached else None)
    _, traces = asyncio.run(evaluated(executor, rebuild(source).system))
    messages = [each for worker in transport.sent for text in worker for each in json.loads(text)]
    asked = sum(each["type"] == "reply" for each in messages)
    models = ("sorter", "writer", "closer")  # functions ask nothing
    calls = [call for trace in traces for call in trace.calls if call.component in models]
    assert asked == len(calls) + (sum(not call.reused for call in calls) if cached else 0)


def test_calls_that_the_driver_has_are_not_made_again(tmp_path: Path) -> None:
    source, cache = write_program(tmp_path), MemoryCache()
    executor = remote_executor(source, LocalTransport(), 2, cache=cache)
    _, first = asyncio.run(evaluated(executor, rebuild(source).system))
    made = requests(tmp_path)
    executor = remote_executor(source, LocalTransport(), 2, cache=cache)
    _, second = asyncio.run(evaluated(executor, rebuild(source).system))
    assert [trace.outputs for trace in second] == [trace.outputs for trace in first]
    assert requests(tmp_path) == made
    assert executor.meter.usage == NO_USAGE


def served(
    tmp_path: Path, scenario: Callable[[ExampleServices, list[WorkerMessage]], Awaitable[None]]
) -> None:
    """Run a scenario with the services of a job, and check that nothing is held or reserved after it."""

    async def work() -> None:
        source = write_program(tmp_path)
        system, executor = rebuild(source).system, local_executor(source, cache=MemoryCache())
        start = Start(
            job=1,
            configuration={},
            inputs={},
            example="e",
            sample=0,
            seed=0,
            bypass=False,
            caches=True,
            shares=False,
            settings={},
            samples={},
            priced=False,
        )
        result = asyncio.get_running_loop().create_future()
        job = ExampleJob(start, system, CallCodec(system), executor._caller, executor.meter, result)
        replies = list[WorkerMessage]()
        await scenario(ExampleServices(job, replies.append), replies)
        await turns()
        assert executor._caller.throttle("simulated").sent == 0
        assert executor.meter._reserved == NO_USAGE
        await executor.aclose()

    asyncio.run(work())


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def claim(number: int) -> Claim:
    return Claim(job=1, id=number, key="k", component="writer")


def enter(number: int) -> Enter:
    return Enter(job=1, id=number, lm="simulated", seed=0, patience=1.0, worst=Usage(1, 10, 10))


def test_equal_calls_get_the_result_of_the_first(tmp_path: Path) -> None:
    async def scenario(services: ExampleServices, replies: list[WorkerMessage]) -> None:
        services.handle(claim(1))
        services.handle(claim(3))
        await turns()
        assert replies == [Reply(id=1, value={"result": None})]
        services.handle(enter(2))
        await turns()
        assert replies[1:] == [Reply(id=2, value={"admitted": True, "round": 0, "waited": 0.0})]
        services.handle(Leave(job=1, turn=2, answered=True, used=[Usage(1, 2, 3)]))
        services.handle(
            Finished(job=1, id=1, key="k", address="writer", component="writer", result=RESULT)
        )
        await turns()
        assert [reply.id for reply in replies[2:] if isinstance(reply, Reply)] == [3]
        assert services.job.meter.usage.calls == 1

    served(tmp_path, scenario)


@pytest.mark.parametrize("arrived", [False, True], ids=["before the grant", "after the grant"])
def test_a_withdrawn_call_gives_back_what_its_request_was_granted(
    tmp_path: Path, arrived: bool
) -> None:
    async def scenario(services: ExampleServices, _: list[WorkerMessage]) -> None:
        services.handle(claim(1))
        services.handle(enter(2))
        if arrived:
            await turns()
        services.handle(Withdraw(job=1, id=2))
        services.handle(Withdraw(job=1, id=1))
        await turns()
        assert services.job.meter.usage == NO_USAGE  # it was not sent

    served(tmp_path, scenario)


def test_the_request_of_a_lost_worker_is_charged_its_worst_case(tmp_path: Path) -> None:
    async def scenario(services: ExampleServices, _: list[WorkerMessage]) -> None:
        services.handle(enter(2))
        await turns()
        services.close()
        await turns()
        assert services.job.meter.usage.tokens == 20
        assert services.job.meter.incidents["lost"] == 1

    served(tmp_path, scenario)
