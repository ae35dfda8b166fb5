"""Workers with other versions, code or data, that break the protocol, or that cannot be started or replaced."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from clusters.program import (
    evaluated,
    examples,
    local_result,
    remote_executor,
    requests,
    write_program,
)
from clusters.transports import LocalTransport
from compound.cluster.handshake import WorkerMismatch, rebuild
from compound.cluster.messages import ProtocolError, ToDriver, WorkerConnection, decode
from compound.cluster.pool import WorkersLost
from compound.cluster.wire import NotSendable, values_from_wire, values_to_wire
from compound.core.errors import CompoundError
from compound.execution.budget import Budget
from compound.execution.cache import MemoryCache
from compound.graph.types import Port
from compound.yaml.program import SystemFile


@pytest.fixture
def source(tmp_path: Path) -> SystemFile:
    return write_program(tmp_path)


def run(source: SystemFile, transport: LocalTransport, workers: int = 2, **settings: Any) -> object:
    executor = remote_executor(source, transport, workers, cache=MemoryCache(), **settings)
    return asyncio.run(evaluated(executor, rebuild(source).system))


def nothing_spent(source: SystemFile) -> bool:
    return requests(Path(source.path).parent) == 0


def edited(kind: str, change: Callable[[dict[str, Any]], object]) -> LocalTransport:
    """Return a transport that changes the messages of one kind that workers send."""

    def edit(text: str) -> str:
        message = json.loads(text)
        if message["type"] == kind:
            change(message)
        return json.dumps(message)

    return LocalTransport(edit=edit)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("protocol", 99, "it has protocol 99, but the driver has 6"),
        ("compound", "0.0.1", "it has compound 0.0.1, but the driver has"),
        ("python", "3.99", "it has Python 3.99, but the driver has"),
        ("source", "0123", "its source of compound .* differs from the driver's"),
        ("modules", {"parts": "0123"}, "its module 'parts' differs"),
        ("components", {}, "its component 'sorter' differs from the driver's in code or data"),
        ("system", "0123", "it has rebuilt another system"),
    ],
)
def test_a_worker_that_differs_is_refused_before_anything_is_spent(
    source: SystemFile, field: str, value: object, message: str
) -> None:
    with pytest.raises(WorkerMismatch, match=f"worker . cannot be used: {message}") as error:
        run(source, edited("Ready", lambda message: message["facts"].update({field: value})))
    assert "install the same versions" in error.value.hint
    assert nothing_spent(source)


def test_a_worker_without_the_code_is_refused(source: SystemFile) -> None:
    other = source.model_copy(
        update={"path": source.path.replace("system.yaml", "elsewhere/system.yaml")}
    )
    executor = remote_executor(source, LocalTransport(), 2)
    executor.pool._hello = executor.pool._hello.model_copy(update={"program": other})
    with pytest.raises(WorkerMismatch, match="cannot load the system: .*no module 'parts'"):
        asyncio.run(evaluated(executor, rebuild(source).system))
    assert nothing_spent(source)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"type": "Done"', '"type": "Don"'),
        ('"outputs": {"output": [', '"outputs": {"text": [['),
        ("{", "{["),
    ],
)
def test_a_message_of_another_version_ends_the_run_with_a_clear_error(
    source: SystemFile, old: str, new: str
) -> None:
    def edit(text: str) -> str:
        return text if '"Ready"' in text else text.replace(old, new)

    with pytest.raises(WorkerMismatch):
        run(source, LocalTransport(edit=edit))


USAGES: list[object] = [
    [1] * 9,
    {"cost": float("nan")},
    {"cost": -0.5},
    {"prompt_tokens": -5},
    {"calls": -1},
    {"unpriced": -1},
]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, 5) for field in ("outputs", "failure", "tokens", "usage")],
        *[("usage", usage) for usage in USAGES],
        ("outputs", {"output": 5}),
        ("exchanges", [None]),
        ("seconds", float("nan")),
        ("seconds", -1.0),
        ("attempts", -1),
    ],
    ids=str,
)
def test_a_result_with_any_content_ends_the_run_and_never_hangs(
    source: SystemFile, field: str, value: object
) -> None:
    transport = edited("Done", lambda message: message["result"].update({field: value}))
    executor = remote_executor(source, transport, 2, cache=MemoryCache())

    async def work() -> object:
        return await asyncio.wait_for(evaluated(executor, rebuild(source).system), 120)

    with pytest.raises(WorkerMismatch, match="does not fit the system"):
        asyncio.run(work())
    assert executor.meter.usage.calls >= 0


@pytest.mark.parametrize("usage", [{"prompt_tokens": 10**6}, {"cost": float("nan")}, {"calls": -1}])
def test_usage_of_a_model_that_is_impossible_is_charged_as_its_worst_case(
    tmp_path: Path, usage: dict[str, float]
) -> None:
    source = write_program(tmp_path, local=True)  # a model in the worker's process
    transport = edited(
        "Done",
        lambda message: (
            "usage" in message["result"] and message["result"]["usage"].update(usage)
            if "finish_reason" in message["result"]
            else None
        ),
    )
    executor = remote_executor(source, transport, 1, budget=Budget(tokens=10**6, cost=1e3))
    asyncio.run(evaluated(executor, rebuild(source).system))
    used = executor.meter.usage
    assert all(0 <= number < math.inf for number in astuple(used))
    assert used.tokens <= 10**6
    assert executor.meter.incidents["usage_corrected"]


def test_a_connection_that_fails_in_another_way_ends_the_run(source: SystemFile) -> None:
    class Broken(LocalTransport):
        async def connect(self, number: int) -> WorkerConnection:
            connection = await super().connect(number)
            works, count = connection.call, 0

            async def fails(text: str) -> str:
                nonlocal count
                count += 1
                if count > 1:  # after the handshake
                    raise ZeroDivisionError("of the transport")
                return await works(text)

            connection.call = fails  # type: ignore[method-assign]
            return connection

    with pytest.raises(
        CompoundError, match=r"calling worker \d failed: ZeroDivisionError: of the transport"
    ) as caught:
        run(source, Broken(), 2)
    assert "run the same command to resume" in caught.value.hint


def test_a_worker_that_cannot_be_replaced_for_any_reason_ends_the_run(source: SystemFile) -> None:
    class Broken(LocalTransport):
        async def connect(self, number: int) -> WorkerConnection:
            if len(self.workers):
                raise ZeroDivisionError("of the transport")
            return await super().connect(number)

    with pytest.raises(
        WorkersLost, match="no worker is left: replacing worker 1 failed: ZeroDivisionError"
    ):
        run(source, Broken([(1, False)]), 1)


@pytest.mark.parametrize("restarts", [0, 2])
def test_lost_workers_are_replaced_up_to_a_number(source: SystemFile, restarts: int) -> None:
    deaths = [(2, False)] * 3
    transport = LocalTransport(deaths)
    with pytest.raises(WorkersLost, match=r"was lost \(killed\), and max_restarts is used up"):
        run(source, transport, 1, max_restarts=restarts)
    assert len(transport.workers) == 1 + restarts
    assert run(source, LocalTransport(deaths), 1, max_restarts=3) == run(
        source, LocalTransport(), 1
    )


def test_a_notice_of_a_lost_worker_counts_its_examples(source: SystemFile) -> None:
    notices = list[str]()
    executor = remote_executor(source, LocalTransport([(1, False)]), 1, notify=notices.append)
    asyncio.run(evaluated(executor, rebuild(source).system, count=1, concurrency=1))
    assert notices == ["worker 1 was lost (killed), and 1 call will be sent again"]


def test_a_message_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ProtocolError, match="a message that cannot be read"):
        decode('{"type": "Done", "result": "x"}', *ToDriver)


def test_a_worker_that_does_not_start_is_reported(source: SystemFile) -> None:
    class Silent(LocalTransport):
        async def connect(self, number: int) -> WorkerConnection:
            connection = await super().connect(number)
            connection.call = lambda text: asyncio.sleep(60, text)  # type: ignore[method-assign]
            return connection

    with pytest.raises(WorkersLost, match=r"worker \d did not start within 0.05 s"):
        run(source, Silent(), start_seconds=0.05)
    assert nothing_spent(source)


def test_a_cluster_that_loses_too_many_workers_ends_the_run(source: SystemFile) -> None:
    with pytest.raises(
        WorkersLost, match="workers were lost while they ran 'judged' of example 'e0'"
    ) as error:
        run(source, LocalTransport([(0, False)] * 50), 1)
    assert "run the same command to resume" in error.value.hint


def test_a_worker_that_cannot_be_replaced_ends_the_run_only_if_none_is_left(
    source: SystemFile,
) -> None:
    class Full(LocalTransport):
        async def connect(self, number: int) -> WorkerConnection:
            if len(self.workers) == 2:
                raise CompoundError("the cluster is full", hint="add a machine")
            return await super().connect(number)

    expected = run(source, LocalTransport())
    assert run(source, Full([(2, False)])) == expected
    with pytest.raises(WorkersLost, match="no worker is left: the cluster is full"):
        run(source, Full([(2, False), (3, False)]))


DIES_IN_START = (-1, False)


@pytest.mark.parametrize(("deaths", "replaced"), [(1, True), (2, True), (3, False)])
def test_a_replacement_that_is_lost_while_it_starts_is_started_again(
    source: SystemFile, deaths: int, replaced: bool
) -> None:
    expected, notices = run(source, LocalTransport()), list[str]()
    transport = LocalTransport([(2, False), (1000, False), *[DIES_IN_START] * deaths])
    assert run(source, transport, notify=notices.append) == expected
    assert notices[1:] == [
        *["worker 1 ended while it started: killed; it will be started again"] * min(deaths, 2),
        *["worker 1 cannot be replaced: worker 1 ended while it started: killed"] * (not replaced),
    ]
    assert len(transport.workers) == 2 + min(deaths + 1, 3)


def test_errors_that_end_a_run_are_those_of_a_run_in_this_process(tmp_path: Path) -> None:
    source = write_program(tmp_path, local=True)
    with (tmp_path / "parts.py").open("a") as file:
        file.write(
            """
    async def generate(self, request):
        from compound.core.errors import QuotaExhausted
        raise QuotaExhausted("no credit", hint="add some")
"""
        )
    with pytest.raises(CompoundError, match="no credit") as error:
        run(source, LocalTransport())
    assert type(error.value).__name__ == "QuotaExhausted"
    assert error.value.hint == "add some"


def test_keys_of_a_workers_machine_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_program(tmp_path)
    with (tmp_path / "parts.py").open("a") as file:
        file.write(
            "\ndef judge(text: str) -> Verdict:\n    raise OSError(os.environ['THERE_KEY'])\n"
        )
    executor = remote_executor(source, LocalTransport(), 1)
    monkeypatch.setenv("THERE_KEY", "key-of-another-machine")
    with pytest.raises(CompoundError, match=r"runs failed, .*OSError: \[key removed\]"):
        asyncio.run(evaluated(executor, rebuild(source).system, count=1))


def test_the_end_of_the_traceback_of_a_worker_is_a_hint(
    source: SystemFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr("compound.cluster.worker.CallWorker._run", broken)
    with pytest.raises(CompoundError, match=r"worker \d: ZeroDivisionError: of the test") as caught:
        run(source, LocalTransport())
    assert caught.value.hint.endswith("ZeroDivisionError: of the test")
    assert 'raise ZeroDivisionError("of the test")' in caught.value.hint


def test_calls_with_values_that_cannot_travel_are_made_here(tmp_path: Path) -> None:
    source = write_program(tmp_path)
    code = (tmp_path / "parts.py").read_text()
    code = code.replace("-> Verdict:\n    return", "-> tuple:\n    return").replace(
        "verdict: Verdict) -> str", "verdict: tuple) -> str"
    )
    code = code.replace('Verdict(text.strip("-").split()[0], len(text))', "({1, 2}, text)").replace(
        'f"{verdict.word}{verdict.length}"', "str(len(verdict))"
    )
    (tmp_path / "parts.py").write_text(code)
    transport = LocalTransport()
    assert run(source, transport) == local_result(source)[:2]
    assert 0 < sum(map(len, transport.jobs())) <= 6  # until the first answer


def test_a_failing_batch_leaves_no_task_behind(source: SystemFile) -> None:
    executor = remote_executor(source, LocalTransport(), 2)

    async def work() -> int:
        system = rebuild(source).system
        task = asyncio.create_task(executor.run(system, examples(1)[0].inputs))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await executor.aclose()
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(work()) == 1


def test_an_integer_that_json_cannot_write_is_not_sent() -> None:
    ports = {"n": Port(int)}
    assert values_from_wire(values_to_wire({"n": 2**64}, ports), ports) == {"n": 2**64}
    with pytest.raises(NotSendable):
        values_to_wire({"n": 10**5000}, ports)
