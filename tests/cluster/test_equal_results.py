"""Laws of runs on workers: results equal those of one process, whatever dies, and nothing paid is repeated."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters.program import (
    evaluated,
    examples,
    local_executor,
    local_result,
    remote_executor,
    requests,
    write_program,
)
from clusters.transports import LocalTransport, PipeTransport
from compound import Budget, Executor, System, Trace
from compound.cluster.handshake import rebuild
from compound.core.errors import BudgetExhausted
from compound.execution.cache import MemoryCache
from compound.graph.component import Output
from compound.yaml.program import SystemFile


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, SystemFile]:
    """Return the program with a model behind a server, and with one in the process."""
    return {
        local: write_program(tmp_path_factory.mktemp("program"), local=local)
        for local in (False, True)
    }


@pytest.fixture
def source(programs: Mapping[bool, SystemFile]) -> SystemFile:
    return programs[False]


def folder(source: SystemFile) -> Path:
    return Path(source.path).parent


def sent(source: SystemFile) -> int:
    return requests(folder(source))


def resent(notices: Iterable[str]) -> int:
    return sum(map(int, re.findall(r"(\d+) calls? will be sent again", "\n".join(notices))))


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_every_number_of_workers_gives_the_results_of_one_process(
    source: SystemFile, workers: int
) -> None:
    start = sent(source)
    evaluations, traces, meter = local_result(source)
    alone = sent(source) - start
    transport = LocalTransport()
    executor = remote_executor(source, transport, workers, cache=MemoryCache())
    found = asyncio.run(evaluated(executor, rebuild(source).system))
    assert found == (evaluations, traces)
    functions = sum(call.component in ("judged", "short") for t in traces for call in t.calls)
    jobs = transport.jobs()
    assert [job for each in jobs for job in each].count("MakeCall") == functions
    assert len(jobs) == workers
    assert sum(map(bool, jobs)) >= min(workers, 2)
    assert sent(source) - start == 2 * alone  # equal calls are shared between workers
    assert executor.meter.usage.calls == meter.usage.calls
    assert executor.meter.usage.cost == pytest.approx(meter.usage.cost)
    assert executor.meter.system_runs == meter.system_runs


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True], ids=["server", "in the process"])
@settings(max_examples=20)
@given(
    workers=st.integers(1, 4),
    deaths=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=4),
    concurrency=st.integers(1, 8),
    cached=st.booleans(),
)
def test_no_schedule_of_deaths_changes_a_result(
    programs: Mapping[bool, SystemFile],
    local: bool,
    workers: int,
    deaths: list[tuple[int, bool]],
    concurrency: int,
    cached: bool,
) -> None:
    def cache() -> MemoryCache | None:
        return MemoryCache() if cached else None

    source = programs[local]
    system, sizes = rebuild(source).system, {"count": 5, "concurrency": concurrency}
    here = local_executor(source, cache=cache())
    expected = asyncio.run(evaluated(here, system, **sizes))
    start, notices = sent(source), list[str]()
    executor = remote_executor(
        source, LocalTransport(deaths), workers, cache=cache(), notify=notices.append
    )
    assert asyncio.run(evaluated(executor, system, **sizes)) == expected
    assert executor.meter.system_runs == here.meter.system_runs
    assert executor.meter.usage.tokens == here.meter.usage.tokens
    assert sent(source) - start <= here.meter.usage.calls + resent(notices)


def test_by_default_each_machine_has_a_worker(source: SystemFile) -> None:
    transport = LocalTransport()
    executor = remote_executor(source, transport, None)
    asyncio.run(evaluated(executor, rebuild(source).system, count=2))
    assert len(transport.workers) == asyncio.run(transport.machines())


def test_killed_processes_change_nothing(tmp_path: Path) -> None:
    source = write_program(tmp_path, seconds=0.02, local=True)
    evaluations, traces, meter = local_result(source)
    start, notices = sent(source), list[str]()
    transport = PipeTransport()
    executor = remote_executor(source, transport, 2, cache=MemoryCache(), notify=notices.append)
    killed = list[asyncio.subprocess.Process]()

    async def kill() -> None:
        while len(killed) < 3:
            await asyncio.sleep(0.01)
            alive = [process for process in transport.processes if process.returncode is None]
            if sent(source) - start > 15 * (1 + len(killed)) and alive and alive[0] not in killed:
                killed.append(alive[0])
                alive[0].send_signal(signal.SIGKILL)

    async def both() -> object:
        killing = asyncio.create_task(kill())
        try:
            return await evaluated(executor, rebuild(source).system)
        finally:
            killing.cancel()

    assert asyncio.run(both()) == (evaluations, traces)
    assert killed
    assert len(transport.processes) > 2
    assert executor.meter.usage.tokens == meter.usage.tokens
    assert meter.usage.calls <= sent(source) - start <= meter.usage.calls + resent(notices)


def test_forks_and_resampled_calls_are_equal(source: SystemFile) -> None:
    system = rebuild(source).system

    async def work(executor: Executor) -> list[object]:
        example = examples(3)[1]
        try:
            trace = await executor.run(system, example.inputs, example=example.id)
            forks = [
                await executor.fork(system, trace, "writer", outputs={"output": "another text"}),
                await executor.fork(
                    system, trace, "writer", resample=3, settings={"max_tokens": 2}
                ),
                await executor.fork(
                    system, trace, "judged", outputs=dict(trace.call("judged").outputs), sample=4
                ),
            ]
            call = await executor.resample_call(system, trace, "closer", sample=9)
        finally:
            await executor.aclose()
        return [_untimed(each) for each in (trace, *forks)] + [
            call.outputs,
            call.usage,
            call.sample,
        ]

    def _untimed(trace: Trace) -> Trace:
        for call in trace.calls:
            call.seconds = 0.0
        return trace

    expected = asyncio.run(work(local_executor(source)))
    assert asyncio.run(work(remote_executor(source, LocalTransport(), 2))) == expected


@pytest.mark.parametrize(
    "budget",
    [Budget(calls=20), Budget(tokens=900), Budget(cost=0.9)],
    ids=["calls", "tokens", "cost"],
)
def test_limits_hold_across_workers_and_deaths(source: SystemFile, budget: Budget) -> None:
    start = sent(source)
    executor = remote_executor(source, LocalTransport([(3, True), (4, False)]), 3, budget=budget)
    with pytest.raises(BudgetExhausted):
        asyncio.run(evaluated(executor, rebuild(source).system))
    used = executor.meter.usage
    assert sent(source) - start <= used.calls
    for name in ("calls", "tokens", "cost"):
        limit = getattr(budget, name)
        assert limit is None or getattr(used, name) <= limit + 1e-9


def test_a_budget_that_suffices_in_one_process_suffices_on_workers(source: SystemFile) -> None:
    evaluations, traces, meter = local_result(source)
    budget = Budget(calls=meter.usage.calls)
    executor = remote_executor(source, LocalTransport(), 3, cache=MemoryCache(), budget=budget)
    assert asyncio.run(evaluated(executor, rebuild(source).system)) == (evaluations, traces)


def test_the_minutes_end_a_run_on_workers(tmp_path: Path) -> None:
    source = write_program(tmp_path, seconds=30)
    executor = remote_executor(source, LocalTransport(), 2, budget=Budget(minutes=0.01))
    with pytest.raises(BudgetExhausted, match="in flight were cancelled"):
        asyncio.run(evaluated(executor, rebuild(source).system))


def test_the_minutes_end_the_start_of_workers(source: SystemFile) -> None:
    class Slow(LocalTransport):
        async def machines(self) -> int:
            await asyncio.sleep(2)
            raise AssertionError

    executor = remote_executor(source, Slow(), None, budget=Budget(minutes=0.001))
    with pytest.raises(BudgetExhausted, match="minutes are used"):
        asyncio.run(evaluated(executor, rebuild(source).system))


def test_models_in_the_process_of_a_worker_have_a_queue_per_worker(tmp_path: Path) -> None:
    source = write_program(tmp_path, local=True, limit=1, seconds=0.001)
    evaluations, traces, _ = local_result(source)
    transport = LocalTransport()
    executor = remote_executor(source, transport, 3, cache=MemoryCache())
    assert asyncio.run(evaluated(executor, rebuild(source).system)) == (evaluations, traces)
    assert all("Generate" in kinds for kinds in transport.jobs())
    assert not requests(tmp_path) % 2  # each request was answered once by a worker, as before here


CUSTOM = """

import asyncio

from compound import Example
from compound.core.engine import Message, Request
from compound.core.errors import CallError
from compound.graph.component import Operation, Port


class Asker(Operation):
    inputs, outputs = {"text": Port(str)}, {"output": Port(str)}
    settings, version = {"model": "simulated"}, "asker:1"

    def __init__(self, name):
        self.name = name

    async def run(self, inputs, values, call):
        request = Request((Message("user", inputs["text"]),), seed=call.seed)
        asking = call.generate(values["model"], request)
        ASK
"""
ASKING = """
system: asking
inputs: {topic: str, kind: str}
components:
  judged: {function: {call: "parts:judge"}, in: {text: $kind}}
  asker: {class: "parts:Asker", settings: {}, in: {text: $topic}}
outputs: {answer: $asker, verdict: $judged}
engines: {simulated: {class: "parts:Simulated", settings: {}}}
"""


@pytest.mark.parametrize(
    "lines",
    [
        [
            "try:",
            "    found = await asking",
            "except Exception:",
            "    raise CallError('no model')",
        ],
        ["found, = await asyncio.gather(asking, return_exceptions=True)"],
        [
            "async with asyncio.TaskGroup() as group:",
            "    task = group.create_task(asking)",
            "found = task.result()",
        ],
    ],
    ids=["caught", "gathered", "grouped"],
)
def test_components_that_ask_a_model_themselves_run_in_this_process(
    tmp_path: Path, lines: list[str]
) -> None:
    source = write_program(tmp_path, ASKING)
    ask = ("\n" + 8 * " ").join([*lines, "return {'output': getattr(found, 'text', '')}"])
    with (tmp_path / "parts.py").open("a") as file:
        file.write(CUSTOM.replace("ASK", ask))
    transport = LocalTransport()

    async def outputs(executor: Executor) -> list[object]:
        system = rebuild(source).system
        try:
            traces = [await executor.run(system, each.inputs) for each in examples(3)]
            return [(trace.outputs, trace.usage) for trace in traces]
        finally:
            await executor.aclose()

    expected = asyncio.run(outputs(local_executor(source)))
    assert asyncio.run(outputs(remote_executor(source, transport, 1))) == expected
    assert transport.jobs() == [["MakeCall"] * 4]  # a worker declined the first call of the asker


def test_parts_of_a_system_run_in_this_process(source: SystemFile) -> None:
    system, transport = rebuild(source).system, LocalTransport()
    part = System("pair", {"text": Output(system.nodes["writer"], "output")}, lm="simulated")

    async def once(executor: Executor) -> object:
        try:
            return (await executor.run(part, examples(2)[1].inputs)).outputs
        finally:
            await executor.aclose()

    found = asyncio.run(once(remote_executor(source, transport, 2)))
    assert found == asyncio.run(once(local_executor(source)))
    assert transport.jobs() == [[], []]
