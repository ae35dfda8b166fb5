"""Where synchronous functions of users run: on the event loop, or in threads."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any, ClassVar

import pytest

import compound as cp
from compound.core import threads
from compound.core.errors import DeclarationError
from compound.core.threads import all_in_threads, run_in_thread
from compound.graph.component import Operation
from compound.graph.types import Port

WAIT = 60.0  # seconds until a test that should not wait fails


def place() -> int:
    return threading.get_ident()


def system(function: Any, **options: Any) -> cp.System:
    return cp.System("s", {"y": cp.Function("f", function, **options)(x=cp.Input("x", int))})


def where(x: int) -> int:
    return place()


def run_twice(made: cp.System) -> tuple[int, int, int]:
    async def runs() -> tuple[int, int, int]:
        executor = cp.Executor()
        found: list[Any] = [(await executor.run(made, {"x": x})).outputs["y"] for x in range(2)]
        return place(), found[0], found[1]

    return asyncio.run(runs())


@pytest.mark.parametrize(
    ("thread", "slow", "on_the_loop"),
    [
        ("auto", WAIT, (True, True)),
        ("auto", -1.0, (True, False)),
        ("always", WAIT, (False, False)),
        ("never", -1.0, (True, True)),
    ],
    ids=["fast", "slow once", "always, though fast", "never, though slow"],
)
def test_a_function_runs_on_the_event_loop_or_in_threads(
    monkeypatch: pytest.MonkeyPatch, thread: str, slow: float, on_the_loop: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(threads, "SLOW", slow)
    loop, first, second = run_twice(system(where, thread=thread))
    assert (first == loop, second == loop) == on_the_loop


def test_a_failed_slow_call_counts_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SLOW", -1.0)
    places: list[int] = []

    def fails(x: int) -> int:
        places.append(place())
        raise ValueError("no")

    made = system(fails)

    async def runs() -> int:
        for _ in range(2):
            await cp.Executor().run(made, {"x": 1})
        return place()

    loop = asyncio.run(runs())
    assert places[0] == loop != places[1]


def test_a_server_calls_every_function_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SLOW", WAIT)
    with all_in_threads():
        loop, first, second = run_twice(system(where))
    assert loop not in (first, second)


def test_rows_with_a_slow_function_are_evaluated_at_the_same_time() -> None:
    meeting = threading.Barrier(4)

    @cp.component(thread="always")
    def meet(x: int) -> int:
        meeting.wait(WAIT)  # passes only if four calls run at the same time
        return x

    made = cp.System("s", {"y": meet(x=cp.Input("x", int))})
    rows = [{"x": x, "y": x} for x in range(4)]
    found = cp.evaluate(
        made, rows, lambda outputs, example: float(outputs["y"] == example.gold["y"]), cache=False
    )
    assert found.mean == 1.0


def test_an_async_function_runs_on_the_event_loop() -> None:
    async def here(x: int) -> int:
        return place()

    class Callable:
        async def __call__(self, x: int) -> int:
            return place()

    for function in (here, Callable()):
        loop, first, second = run_twice(system(function, thread="always"))
        assert first == second == loop


def test_invalid_settings_are_explained() -> None:
    with pytest.raises(DeclarationError, match=r"thread must be .* \['auto', 'always', 'never'\]"):
        cp.Function("f", where, thread="sometimes")  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="has a timeout, which needs a thread"):
        cp.Function("f", where, timeout=1.0, thread="never")


@pytest.mark.parametrize("thread", ["always", "never"])
def test_a_function_that_exits_fails_its_call(thread: str) -> None:
    def leave(x: int) -> int:
        sys.exit(3)

    trace = cp.run(system(leave, thread=thread), {"x": 1}, check=False)
    assert trace.failure is not None
    assert trace.failure.message == "f called sys.exit(3)"


def test_a_component_or_a_metric_that_exits_fails_the_run() -> None:
    class Leaves(Operation):
        name = "leaves"
        inputs: ClassVar[Any] = {"x": Port(int)}
        outputs: ClassVar[Any] = {"output": Port(int)}
        version = "1"

        async def run(self, inputs: Any, values: Any, call: Any) -> Any:
            sys.exit(4)

    made = cp.System("s", {"y": Leaves()(x=cp.Input("x", int))})
    trace = cp.run(made, {"x": 1}, check=False)
    assert trace.failure is not None
    assert trace.failure.message == "leaves called sys.exit(4)"

    def score(outputs: Any, example: Any) -> float:
        sys.exit(5)

    found = cp.evaluate(
        system(where), [{"x": 1}], score, cache=False, settings=cp.OptimizeSettings(max_failed=1)
    )
    (row,) = found.rows
    assert row.failure is not None
    assert "score called sys.exit(5)" in row.failure.message


def test_the_number_of_threads_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_THREADS", 2)
    lock, counts, pairs = threading.Lock(), [0, 0], threading.Barrier(2)

    def work() -> None:
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        pairs.wait(WAIT)  # passes only if two run at the same time
        with lock:
            counts[0] -= 1

    async def all_of_them() -> None:
        await asyncio.gather(*(run_in_thread(work, "work") for _ in range(20)))

    asyncio.run(all_of_them())
    assert counts == [0, 2]


def test_an_abandoned_call_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_THREADS", 1)
    go = threading.Event()

    async def abandon() -> bool:
        first = asyncio.create_task(run_in_thread(lambda: go.wait(WAIT), "first"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(run_in_thread(go.is_set, "second"))
        await asyncio.sleep(0)
        go.set()
        return await second

    assert asyncio.run(abandon())


def test_a_function_in_a_thread_may_raise_stop_iteration() -> None:
    def ends(x: int) -> int:
        return int(next(iter([])))

    trace = cp.run(system(ends, thread="always"), {"x": 1}, check=False)
    assert trace.failure is not None
    assert "StopIteration" in trace.failure.message
