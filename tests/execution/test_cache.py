"""The cache: what it answers is what executing again would give, and one call is made once."""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
import shutil
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import compound as cp
from compound import LLM, Executor, Function, Input, Port, Retriever, System, Text
from compound.api.verify import verify
from compound.core.errors import BudgetExhausted, CallError, RunDirectoryError, TransientError
from compound.engines.openai import OpenAIEngine
from compound.execution.budget import Budget, Meter
from compound.execution.cache import Cache, DiskCache, MemoryCache, row_checksum
from compound.execution.trace import Failure, Trace
from compound.ext import CallContext, Completion, Message, Operation, Request, Usage
from compound.optimization.runs.directory import RunDirectory
from compound.testing import ScriptedLM

Q = Input("q", str)


def run(system: System, inputs: Mapping[str, Any], executor: Executor, **options: Any) -> Trace:
    return asyncio.run(executor.run(system, inputs, **options))


def ask(name: str = "llm", **settings: Any) -> System:
    return System("ask", outputs={"y": LLM(name, **settings)(q=Q)}, lm="m")


def told_by_seed(_: str, rng: np.random.Generator) -> str:
    return str(rng.integers(10**12))


def stored(value: object) -> dict[str, Any]:
    """Return the row of an answer."""
    return {"text": str(value), "usage": {"calls": 1}}


class Bench:
    """One scripted model behind one cached executor."""

    def __init__(
        self, script: Any = told_by_seed, *, cache: Cache | None = None, **options: Any
    ) -> None:
        self.lm = ScriptedLM(script)
        self.cache = cache or MemoryCache()
        self.executor = Executor(
            {"m": self.lm, "other": ScriptedLM(script, name="other")}, cache=self.cache, **options
        )

    def answer(self, system: System, q: str = "?", **options: Any) -> Any:
        return run(system, {"q": q}, self.executor, **options).outputs["y"]

    @property
    def requests(self) -> int:
        return len(self.lm.requests)


def test_an_equal_call_comes_from_the_cache_and_costs_nothing() -> None:
    bench = Bench()
    first = run(ask(), {"q": "?"}, bench.executor)
    second = run(ask(), {"q": "?"}, bench.executor)
    assert (bench.requests, second.outputs) == (1, first.outputs)
    assert (first.call("llm").reused, second.call("llm").reused) == (False, True)
    assert (first.usage.calls, second.usage, second.call("llm").usage) == (1, Usage(), first.usage)
    assert (first.equivalents, second.equivalents) == (1.0, 0.0)
    assert bench.executor.meter.usage == first.usage


def test_a_greedy_call_is_shared_between_examples_and_samples_and_a_sampled_one_is_not() -> None:
    greedy = Bench()
    answers = {greedy.answer(ask(), example=e, sample=s) for e in "ab" for s in (0, 1)}
    assert (len(answers), greedy.requests) == (1, 1)
    sampled = Bench()
    system = ask(temperature=0.7)
    drawn = [sampled.answer(system, example=e, sample=s) for e in "ab" for s in (0, 1)]
    assert (len(set(drawn)), sampled.requests) == (4, 4)
    assert [sampled.answer(system, example=e, sample=s) for e in "ab" for s in (0, 1)] == drawn
    assert sampled.requests == 4


def test_bypassing_asks_again_and_stores_nothing() -> None:
    answers = iter(["first", "second", "third"])
    bench = Bench(lambda _: next(answers))
    assert [bench.answer(ask(), cache=False) for _ in range(2)] == ["first", "second"]
    assert [bench.answer(ask()) for _ in range(2)] == ["third", "third"]
    assert bench.requests == 3


def test_equal_components_share_their_calls_whatever_they_are_called() -> None:
    bench = Bench()
    assert bench.answer(ask("one")) == bench.answer(ask("two"))
    assert bench.requests == 1


BASE: dict[str, Any] = {"prompt": "Answer.", "max_tokens": 20}


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": "Reply."},
        {"prompt": Text("Reply.")},
        {"max_tokens": 21},
        {"system": "Be brief."},
        {"stop": ("x",)},
        {"lm": "other"},
        {"demos": ({"inputs": {"q": "1"}, "outputs": {"output": "2"}},)},
        {"output": int},
        {"output": {"answer": str}},
        {"format": "json"},
        {"temperature": 0.5},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_changes_the_answer_changes_the_key(changed: dict[str, Any]) -> None:
    def system(**settings: Any) -> System:
        node = LLM("llm", **{**BASE, **settings})(q=Q)
        return System("s", outputs={"y": node}, lm="m")

    bench = Bench(lambda _: '{"output": "1", "answer": "2"}')
    run(system(), {"q": "?"}, bench.executor)
    again = run(system(), {"q": "?"}, bench.executor)
    other = run(system(**changed), {"q": "?"}, bench.executor)
    assert (again.calls[0].reused, other.calls[0].reused) == (True, False)


def test_another_engine_behind_the_same_name_is_asked_again() -> None:
    cache = MemoryCache()
    engines = [ScriptedLM([name], name=name) for name in ("version 1", "version 2")]
    answers = [
        run(ask(), {"q": "?"}, Executor({"m": lm}, cache=cache)).outputs["y"] for lm in engines
    ]
    assert answers == ["version 1", "version 2"]


def test_inputs_in_another_order_make_another_prompt_and_another_call() -> None:
    bench = Bench(lambda message: message)
    llm = LLM("llm")
    first, second = llm(q=Q, context=Q), llm(context=Q, q=Q, name="second")
    trace = run(System("s", outputs={"a": first, "b": second}, lm="m"), {"q": "?"}, bench.executor)
    assert trace.outputs["a"] != trace.outputs["b"]
    assert bench.requests == 2


def test_the_seed_names_the_samples_and_leaves_greedy_calls_alone() -> None:
    cache = MemoryCache()
    one, two = Bench(cache=cache, seed=1), Bench(cache=cache, seed=2)
    assert one.answer(ask()) == two.answer(ask())
    assert (one.requests, two.requests) == (1, 0)
    assert one.answer(ask(temperature=1.0)) != two.answer(ask(temperature=1.0))


class Shelf:
    """An index that counts its searches."""

    digest = "shelf-1"

    def __init__(self) -> None:
        self.searches = 0

    def open(self) -> Shelf:
        return self

    def search(self, query: str, k: int) -> Sequence[Mapping[str, Any]]:
        self.searches += 1
        return [{"text": f"{query} {i}"} for i in range(k)]


def test_searches_are_cached_and_functions_run_again() -> None:
    shelf, ran = Shelf(), []

    def note(passages: list[dict[str, Any]]) -> int:
        ran.append(len(passages))
        return len(passages)

    passages = Retriever("searcher", index=shelf, k=2)(query=Q)
    system = System("s", outputs={"y": Function("note", note)(passages=passages)})
    bench = Bench()
    assert [bench.answer(system) for _ in range(3)] == [2, 2, 2]
    assert (shelf.searches, ran) == (1, [2, 2, 2])


def together(executor: Executor, system: System, inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
    async def scenario() -> list[Any]:
        runs = (executor.run(system, g, example=str(i)) for i, g in enumerate(inputs))
        results = await asyncio.gather(*runs, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return results

    return asyncio.run(scenario())


async def slow(message: str) -> str:
    await asyncio.sleep(0.001)
    return message


def test_equal_calls_at_once_make_one_request() -> None:
    bench = Bench(slow)
    traces = together(bench.executor, ask(), [{"q": "?"}] * 5)
    assert len({trace.outputs["y"] for trace in traces}) == 1
    assert bench.requests == 1
    assert [trace.call("llm").reused for trace in traces].count(False) == 1
    assert sum(trace.usage.calls for trace in traces) == 1


def test_without_a_cache_every_call_is_made() -> None:
    lm = ScriptedLM(slow)
    together(Executor({"m": lm}), ask(), [{"q": "?"}] * 5)
    assert len(lm.requests) == 5


def test_who_waits_for_an_equal_call_gets_its_failure_too() -> None:
    async def fails(_: str) -> str:
        await asyncio.sleep(0.001)
        raise CallError("refused")

    bench = Bench(fails)
    traces = together(bench.executor, ask(), [{"q": "?"}] * 3)
    assert bench.requests == 1
    assert [trace.failure for trace in traces] == [Failure("error", "refused")] * 3


async def test_when_the_first_of_equal_calls_is_cancelled_another_is_made() -> None:
    gates: list[asyncio.Event] = []

    async def gated(message: str) -> str:
        gates.append(asyncio.Event())
        await gates[-1].wait()
        return "done"

    bench = Bench(gated)
    first, *others = [asyncio.create_task(bench.executor.run(ask(), {"q": "?"})) for _ in range(3)]
    while not gates:  # noqa: ASYNC110
        await asyncio.sleep(0)
    first.cancel()
    while len(gates) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    gates[1].set()
    with pytest.raises(asyncio.CancelledError):
        await first
    second, third = await asyncio.gather(*others)
    assert (second.outputs, third.outputs, bench.requests) == ({"y": "done"}, {"y": "done"}, 2)


def test_when_the_budget_ends_all_who_wait_for_one_call_are_told() -> None:
    bench = Bench(slow, meter=Meter(Budget(calls=0)))
    results = together(bench.executor, ask(), [{"q": "?"}] * 3)
    assert [type(result) for result in results] == [BudgetExhausted] * 3
    assert bench.requests == 0


def test_a_text_that_does_not_parse_is_stored_with_what_did() -> None:
    bench = Bench(lambda _: "a: 1\nb: many")
    node = LLM("llm", output={"a": int, "b": int}, reasks=0)(q=Q)
    system = System("s", outputs={"y": node.a, "z": node.b}, lm="m")
    first, second = (run(system, {"q": "?"}, bench.executor) for _ in range(2))
    assert bench.requests == 1
    assert first.failure is not None
    assert (second.failure, second.call("llm").outputs) == (first.failure, {"a": 1})
    assert first.failure.kind == "parse"


@pytest.mark.parametrize("error", [TransientError("busy"), CallError("refused"), ValueError("odd")])
def test_a_failure_that_may_pass_is_not_stored(error: Exception) -> None:
    bench = Bench([error, "fine"])
    system = ask(retries=0)
    assert run(system, {"q": "?"}, bench.executor).failure is not None
    assert bench.answer(system) == "fine"


def test_a_cached_call_remembers_how_often_it_was_tried_and_what_it_cost() -> None:
    async def no_sleep(seconds: float) -> None:
        await asyncio.sleep(0)

    bench = Bench([TransientError("busy"), "fine"], sleep=no_sleep)
    first, second = (run(ask(), {"q": "?"}, bench.executor) for _ in range(2))
    assert (first.call("llm").attempts, first.call("llm").usage.calls) == (2, 2)
    assert (second.call("llm").attempts, second.call("llm").usage) == (2, first.call("llm").usage)


class Person(BaseModel):
    name: str
    tags: list[str] = []


class Gives(Operation):
    """A cacheable component that returns a given value and counts its runs."""

    kind = "gives"
    inputs = None
    cacheable = True
    version = "1"

    def __init__(self, kind: Any, make: Callable[[], Any]) -> None:
        self.name, self.ran, self._kind, self._make = "gives", 0, kind, make

    @property
    def outputs(self) -> Mapping[str, Port]:
        return {"output": Port(self._kind)}

    async def run(
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> Any:
        self.ran += 1
        return {"output": self._make()}


class Color(str, enum.Enum):  # noqa: UP042 - an equal text is no member
    RED = "red"


def disk(path: Path) -> DiskCache:
    return DiskCache(path / "cache.sqlite")


@pytest.mark.parametrize(
    ("kind", "value", "requests"),
    [
        (list[dict[str, Any]], [{"b": 1, "a": [None, 2.5]}], 1),
        (str, "é \x00 \U0001f600", 1),
        (float, 1e308, 1),
        (Person, Person(name="Ada", tags=["x"]), 1),
        (list[Person], [Person(name="Ada")], 1),
        (dict[int, str], {1: "a"}, 1),
        (tuple[int, str], (1, "a"), 1),
        (set[int], {1, 2}, 1),
        (datetime.date, datetime.date(2024, 1, 2), 1),
        (Color, Color.RED, 1),
        (Any, {1, 2}, 2),
        (Any, (1, 2), 2),
        (Any, object, 2),
        (Any, {1: "a"}, 2),
    ],
)
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_value_comes_back_as_it_was_or_is_not_cached(
    kind: Any, value: Any, requests: int, where: str, tmp_path: Path
) -> None:
    component = Gives(kind, lambda: value)
    system = System("s", outputs={"y": component(q=Q)})
    bench = Bench(cache=disk(tmp_path) if where == "disk" else None)
    answers = [bench.answer(system) for _ in range(2)]
    assert answers == [value, value]
    assert type(answers[1]) is type(value)
    assert json.dumps(answers, default=repr) == json.dumps([value, value], default=repr)
    assert component.ran == requests


def test_changing_what_came_from_the_cache_does_not_change_the_cache() -> None:
    component = Gives(list[int], lambda: [1, 2])
    system = System("s", outputs={"y": component(q=Q)})
    bench = Bench()
    for _ in range(3):
        answer = bench.answer(system)
        assert answer == [1, 2]
        answer.append(3)


def test_a_disk_cache_survives_reopening(tmp_path: Path) -> None:
    first = Bench(cache=disk(tmp_path))
    answers = [first.answer(ask(temperature=1.0), sample=i) for i in range(3)]
    assert isinstance(first.cache, DiskCache)
    first.cache.close()
    second = Bench(cache=disk(tmp_path))
    assert [second.answer(ask(temperature=1.0), sample=i) for i in range(3)] == answers
    assert (first.requests, second.requests) == (3, 0)


@given(
    st.dictionaries(
        st.text(),
        st.none() | st.integers() | st.text() | st.lists(st.floats(allow_nan=False)),
        max_size=4,
    )
)
def test_a_cache_gives_back_what_was_put(row: dict[str, Any]) -> None:
    memory, on_disk = MemoryCache(), DiskCache(":memory:")
    for cache in (memory, on_disk):
        assert cache.get("key") is None
        cache.put("key", row)
        assert cache.get("key") == row
        assert cache.get("other") is None
    on_disk.close()


def test_what_is_stored_first_stays(tmp_path: Path) -> None:
    cache = disk(tmp_path)
    cache.put("k", stored(1))
    cache.put("k", stored(2))
    assert cache.get("k") == stored(1)


def test_threads_may_share_a_cache(tmp_path: Path) -> None:
    cache = disk(tmp_path)

    def work(part: int) -> None:
        for i in range(50):
            cache.put(f"{part}.{i}", stored(i))
            assert cache.get(f"{part}.{i}") == stored(i)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [cache.get(f"{part}.{i}") for part in range(4) for i in range(50)] == [
        stored(i) for i in range(50)
    ] * 4


def sqlite_file(path: Path, *statements: str) -> None:
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


@pytest.mark.parametrize("foreign", ["text", "folder"])
def test_a_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path, foreign: str) -> None:
    path = tmp_path / "cache.sqlite"
    if foreign == "text":
        path.write_text("not a database, but long enough to look like something: " * 20)
    else:
        path.mkdir()
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(RunDirectoryError) as error:
        DiskCache(path)
    assert f"{path} is not a usable cache" in str(error.value)
    assert "delete the file to start an empty one" in str(error.value)
    assert not path.is_file() or path.read_bytes() == before


def test_what_was_stored_after_the_checkpoint_is_pending_once(tmp_path: Path) -> None:
    cache = disk(tmp_path)
    for step in range(3):
        cache.step = step
        cache.put(f"k{step}", stored(step))
    assert not any(cache.take_pending(f"k{step}") for step in range(3))
    cache.close()
    resumed = DiskCache(tmp_path / "cache.sqlite", step=1)
    assert [resumed.take_pending(f"k{step}") for step in range(3)] == [False, True, True]
    assert not any(resumed.take_pending(f"k{step}") for step in range(3))
    resumed.put("new", stored(3))
    assert not resumed.take_pending("new")
    resumed.close()
    again = DiskCache(tmp_path / "cache.sqlite", step=2)
    assert [again.take_pending(key) for key in ("k0", "k1", "k2", "new")] == [
        False,
        False,
        True,
        False,
    ]
    assert not MemoryCache().take_pending("k0")


def test_what_is_asked_beside_the_calls_counts_every_try_again(tmp_path: Path) -> None:
    """A run that was killed after an answer that took two tries counts both when it goes on."""
    request = Request((Message("user", "write a prompt"),))

    async def at_once(_: float) -> None:
        pass

    def asked(replies: list[Any], cache: DiskCache) -> tuple[Completion, Usage]:
        executor = Executor({"m": ScriptedLM(replies)}, cache=cache, sleep=at_once)
        completion = asyncio.run(executor.request("m", request))
        cache.close()
        return completion, executor.meter.usage

    whole = asked([TransientError("busy"), "a prompt"], DiskCache(tmp_path / "cache.sqlite"))
    assert whole[0].usage == whole[1] == Usage(2, 6, 258)  # the first try may have been billed
    assert asked([], DiskCache(tmp_path / "cache.sqlite", step=0)) == whole


class Renamed(OpenAIEngine):
    """A subclass of an engine with a stable name that answers by itself."""

    def __init__(self, reply: str) -> None:
        super().__init__("m", api_base="http://127.0.0.1:9/v1")
        self.reply = reply

    async def generate(self, request: Request) -> Completion:
        return Completion(self.reply, Usage(1))


@pytest.mark.parametrize(
    ("make", "is_shared"),
    [
        (lambda reply: ScriptedLM(lambda _: reply), False),
        (Renamed, False),
        (lambda reply: ScriptedLM(lambda _: reply, stable_name=True), True),
    ],
)
def test_evaluations_share_answers_only_of_engines_with_a_stable_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, is_shared: bool
) -> None:
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path))
    rows = [{"q": "a", "y": "yes"}]
    first, second = ({"m": make(reply)} for reply in ("yes", "no"))
    assert cp.evaluate(ask(), rows, "exact_match", engines=first).mean == 1
    assert cp.evaluate(ask(), rows, "exact_match", engines=second).mean == is_shared


def altered(path: Path, statement: str) -> None:
    sqlite_file(path / "cache.sqlite", statement)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE outcome SET value = replace(value, '1', '3')",
        "UPDATE outcome SET value = 'no JSON'",
        "UPDATE outcome SET value = NULL",
        "UPDATE outcome SET value = x'ff00'",
        "UPDATE outcome SET value = CAST(x'7bff7d' AS TEXT)",
        "UPDATE outcome SET step = 7",
        "UPDATE outcome SET step = 'seven'",
        "UPDATE outcome SET checksum = NULL",
        "UPDATE outcome SET checksum = 'x'",
        "UPDATE outcome SET key = 'other' WHERE key = 'k'",
    ],
)
def test_a_damaged_row_is_a_miss_that_is_named(
    tmp_path: Path, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: a row that was no JSON ended every run, and a changed digit changed the result."""
    cache = disk(tmp_path)
    cache.put("k", stored(1))
    cache.close()
    altered(tmp_path, statement)
    again = disk(tmp_path)
    key = "other" if "other" in statement else "k"
    assert again.get(key) is None
    assert len(again.problems) == 1
    assert f"cache.sqlite: the recorded call {key}… is damaged" in caplog.text
    again.put(key, stored(2))
    assert again.get(key) == stored(2)
    again.close()


FORGED: list[dict[str, Any]] = [
    {"usage": {"calls": -50}},
    {"usage": {"calls": 1, "cost": float("nan")}},
    {"usage": {"calls": 1, "prompt_tokens": "many"}},
    {"usage": "none"},
    {"outputs": ["yes"]},
    {"outputs": {}},
    {"outputs": {"output": "yes", "z": 1}},
    {"outputs": {"output": 5}},
    {"outputs": {"output": {"deep": [float("nan")]}}},
    {"failure": "error"},
    {"tokens": [1]},
    {"tokens": [[[1], [2], [], "stop", ""]]},
    {"tokens": [[[-1], [2], [-0.5], "stop", ""]]},
    {"tokens": [[[1], [2], [float("-inf")], "stop", ""]]},
    {"attempts": -1},
    {"attempts": None},
    {"seconds": float("nan")},
    {"exchanges": [{"model": "m"}]},
    {"exchanges": [{"model": "m", "messages": [{"role": "user", "content": 5}]}]},
]


def forge(folder: Path, change: Mapping[str, Any]) -> None:
    """Change the only row of a cache, with its checksum."""
    database = sqlite3.connect(folder / "cache.sqlite")
    [(key, value)] = database.execute("SELECT key, value FROM outcome")
    value = json.dumps({**json.loads(value), **change})
    row = value, row_checksum(key, 0, value)
    database.execute("UPDATE outcome SET value = ?, checksum = ?", row)
    database.commit()
    database.close()


@pytest.mark.parametrize("change", FORGED, ids=str)
def test_a_row_that_no_call_can_have_is_repeated_and_charged(
    tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: a forged row gave its usage back to the budget, or ended with a traceback."""
    engine, limit = ScriptedLM(lambda _: "yes"), Budget(calls=2)
    cache = DiskCache(tmp_path / "cache.sqlite", step=0)
    whole = run(ask(), {"q": "?"}, Executor({"m": engine}, cache=cache))
    cache.close()
    forge(tmp_path, change)
    cache = DiskCache(tmp_path / "cache.sqlite", step=0)
    executor = Executor({"m": engine}, cache=cache, meter=Meter(limit))
    again = run(ask(), {"q": "?"}, executor)
    assert (again.outputs, again.failure) == (whole.outputs, None)
    assert executor.meter.usage == whole.usage
    assert "is damaged (it" in caplog.text
    assert cache.count == 1
    assert run(ask(), {"q": "?"}, executor).outputs == whole.outputs
    assert executor.meter.usage == whole.usage
    cache.close()


@pytest.mark.parametrize("row", [{"text": 5, "usage": {}}, {"text": "a", "usage": {"calls": -9}}])
def test_a_forged_answer_is_asked_for_again(tmp_path: Path, row: dict[str, Any]) -> None:
    request = Request((Message("user", "write a prompt"),))
    cache = DiskCache(tmp_path / "cache.sqlite", step=0)

    def asked(cache: DiskCache) -> tuple[Completion, Usage]:
        executor = Executor({"m": ScriptedLM(lambda _: "a prompt")}, cache=cache)
        completion = asyncio.run(executor.request("m", request))
        cache.close()
        return completion, executor.meter.usage

    whole = asked(cache)
    forge(tmp_path, row)
    assert asked(DiskCache(tmp_path / "cache.sqlite", step=0)) == whole


def test_lost_recorded_calls_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression test: whoever deleted ``cache.sqlite-wal`` paid for those calls again, unknowingly."""
    cache = DiskCache(tmp_path / "cache.sqlite", step=0)
    for i in range(5):
        cache.put(f"k{i}", stored(i))
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / "cache.sqlite", copy)  # as a kill leaves it, without its log
    cache.close()
    DiskCache(tmp_path / "cache.sqlite", step=1, recorded=5).close()
    assert caplog.text == ""
    lost = DiskCache(copy / "cache.sqlite", step=1, recorded=5)
    assert "cache.sqlite: 5 of 5 recorded calls are missing" in caplog.text
    assert "cache.sqlite-wal was deleted" in lost.problems[0]
    lost.close()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    cache = disk(tmp_path)
    cache._db.execute("PRAGMA query_only = ON")
    with pytest.raises(RunDirectoryError, match=r"cache\.sqlite is not .*readonly.*permissions"):
        cache.put("k", stored(1))
    cache.close()


OUTCOME = "CREATE TABLE outcome (key TEXT PRIMARY KEY, step INTEGER, value TEXT, checksum TEXT) WITHOUT ROWID"
COUNTING = "WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < 30000000)"
FOREIGN = {
    "earlier format": (OUTCOME, "PRAGMA user_version = 0"),
    "no checksums": (OUTCOME.replace(", checksum TEXT", ""),),
    "another table": ("CREATE TABLE users (name TEXT)",),
    "trigger": (
        OUTCOME,
        "CREATE TABLE fill (x)",
        f"CREATE TRIGGER t AFTER INSERT ON outcome BEGIN INSERT INTO fill {COUNTING} "
        "SELECT zeroblob(10000000) FROM c LIMIT 4; END",
    ),
    "view": (
        "CREATE TABLE other (x)",
        f"CREATE VIEW outcome AS {COUNTING} "
        "SELECT 'k' || i AS key, 0 AS step, '{}' AS value, 'x' AS checksum FROM c",
    ),
    "only a view": (
        "CREATE VIEW outcome AS SELECT 'k' AS key, 0 AS step, '{}' AS value, 'x' AS checksum",
    ),
    "view beside it": (OUTCOME, "CREATE VIEW v AS SELECT 1"),
    "index": (OUTCOME, "CREATE INDEX i ON outcome (step, value)"),
    "index of expressions": (OUTCOME, "CREATE INDEX i ON outcome (hex(value))"),
    "table beside it": (OUTCOME, "CREATE TABLE fill (x)"),
    "statistics": (OUTCOME, "INSERT INTO outcome VALUES ('k', 0, '{}', 'x')", "ANALYZE"),
    "virtual table": (OUTCOME, "CREATE VIRTUAL TABLE v USING fts5(x)"),
    "default": (
        OUTCOME.replace("step INTEGER", "step INTEGER DEFAULT (hex(zeroblob(100000000)))"),
    ),
    "check": (OUTCOME.replace("value TEXT", "value TEXT CHECK (length(value) < 10)"),),
    "generated": (OUTCOME.replace("checksum TEXT", "checksum TEXT AS (hex(value))"),),
    "with rowid": (OUTCOME.replace(" WITHOUT ROWID", ""),),
    "other order of keys": (
        OUTCOME.replace("TEXT PRIMARY KEY", "TEXT COLLATE NOCASE PRIMARY KEY"),
    ),
}


def run_with(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return the path of a cache that is made in a new run directory."""
    made = RunDirectory.create(folder / "run", "", {"seed": 0})
    made.close()
    make(made.path / "cache.sqlite")
    return made.path / "cache.sqlite"


def refused(path: Path, reason: str) -> None:
    """Assert that a cache is neither opened nor called well, and that it stays as it is."""
    before = {p.name: p.read_bytes() for p in path.parent.iterdir() if p.suffix != ".sqlite-shm"}
    with pytest.raises(RunDirectoryError, match=reason) as error:
        DiskCache(path)
    assert f"{path} is not a usable cache" in str(error.value)
    assert "delete the file to start an empty one" in str(error.value)
    problems = verify(path.parent)
    assert [
        p
        for p in problems
        if f"{path} is not a usable cache" in p and str(error.value).startswith(p)
    ]
    after = {p.name: p.read_bytes() for p in path.parent.iterdir() if p.suffix != ".sqlite-shm"}
    assert after == before


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_cache_holds_its_own_table_and_nothing_else(tmp_path: Path, kind: str) -> None:
    """Regression test: a trigger wrote 400 MB when one call was stored, and a view made each call slow."""
    path = run_with(
        tmp_path, lambda path: sqlite_file(path, "PRAGMA user_version = 2", *FOREIGN[kind])
    )
    start = time.process_time()
    reasons = r"it holds the (table|view|index|trigger) '\w+'|its table is not that of a cache|has format 0"
    refused(path, reasons)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("what", ["table", "schema"])
def test_a_cache_whose_pages_repeat_without_end_is_refused(tmp_path: Path, what: str) -> None:
    """Some pages of 4 KiB that name one other page 300 times each hold hundreds of millions of rows."""

    def repeated(path: Path) -> None:
        cache = DiskCache(path)
        for i in range(10):
            cache.put(f"k{i}", stored(i))
        cache.close()
        raw = path.read_bytes()
        pages = [bytearray(raw[at : at + 4096]) for at in range(0, len(raw), 4096)]
        at, start = (1, 0) if what == "table" else (0, 100)
        leaf = bytearray(4096)
        cells = 2 * int.from_bytes(pages[at][start + 3 : start + 5])
        leaf[: 8 + cells] = pages[at][start : start + 8 + cells]
        content = int.from_bytes(pages[at][start + 5 : start + 7])
        leaf[content:] = pages[at][content:]
        pages.append(leaf)
        for _ in range(2):
            pages.append(many(what, len(pages), 0))
        pages[at] = pages[at][:start] + many(what, len(pages), start)[start:]
        pages[0][28:32] = struct.pack(">I", len(pages))
        path.write_bytes(b"".join(pages))

    def many(what: str, child: int, start: int) -> bytearray:
        """Return an inner page that names one child 300 times."""
        kind, key = (2, b"\6\5\x0f\x08\x0d\x0dk") if what == "table" else (5, b"\1")
        cell = struct.pack(">I", child) + key
        first = 4096 - 300 * len(cell)
        places = struct.pack(">300H", *range(first, 4096, len(cell)))
        head = struct.pack(">BHHHBI", kind, 0, 300, first, 0, child)
        page = bytes(start) + head + places
        return bytearray(page + bytes(first - len(page)) + 300 * cell)

    path = run_with(tmp_path, repeated)
    start = time.process_time()
    with pytest.raises(RunDirectoryError, match=r"cache\.sqlite is not a usable .*endlessly"):
        DiskCache(path, step=0)
    assert any("cache.sqlite is not a usable cache" in problem for problem in verify(path.parent))
    assert time.process_time() - start < 20


def test_a_large_cache_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on the work follows the size: the smallest entries that there can be stay below it."""
    monkeypatch.setattr("compound.execution.cache.SPARE", 0)
    monkeypatch.setattr("compound.execution.cache.BETWEEN", 1000)

    def many(path: Path) -> None:
        cache = DiskCache(path)
        cache._db.execute("BEGIN")
        for i in range(20_000):
            cache.put(f"{i:064}", {"text": "", "usage": {}})
        cache._db.execute("COMMIT")
        cache.close()

    path = run_with(tmp_path, many)
    cache = DiskCache(path, step=0)
    assert cache.count == 20_000
    assert verify(path.parent) == []  # the log is not empty
    cache.close()
    assert verify(path.parent) == []


def test_an_entry_beyond_the_limit_is_a_miss_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(path: Path) -> None:
        cache = DiskCache(path)
        cache.put("large", stored("x" * 2**21))
        cache.put("small", stored(1))
        cache.close()

    path = run_with(tmp_path, large)
    assert verify(path.parent) == []
    monkeypatch.setenv("COMPOUND_MAX_LINE_MB", "1")
    (problem,) = verify(path.parent)
    assert f"{path}: a recorded call is larger than 1 MiB" in problem
    assert "COMPOUND_MAX_LINE_MB" in problem
    cache = DiskCache(path, step=0)
    assert (cache.get("large"), cache.get("small")) == (None, stored(1))
    assert [
        p
        for p in cache.problems
        if "the recorded call large… is damaged (the entry is larger than 1 MiB)" in p
    ]
    cache.put("large", stored(2))
    assert (cache.get("large"), cache.count) == (stored(2), 2)
    cache.close()


def test_of_many_damaged_entries_some_are_named_and_the_others_counted(tmp_path: Path) -> None:
    def damaged(path: Path) -> None:
        cache = DiskCache(path)
        for i in range(9):
            cache.put(f"k{i}", stored(i))
        cache._db.execute("UPDATE outcome SET value = '[]' WHERE key <> 'k3'")
        cache.close()

    path = run_with(tmp_path, damaged)
    problems = verify(path.parent)
    assert [problem.split("…")[0][-2:] for problem in problems[:5]] == [
        "k0",
        "k1",
        "k2",
        "k4",
        "k5",
    ]
    assert problems[5:] == [f"{path}: 3 more recorded calls are damaged"]


def test_an_outcome_beyond_the_limit_is_not_recorded_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOUND_MAX_LINE_MB", "1")
    cache = DiskCache(tmp_path / "cache.sqlite", step=0)
    cache.put("large", stored("x" * 2**21))
    assert (cache.get("large"), cache.count) == (None, 0)
    (problem,) = cache.problems
    assert "the call large… is larger than 1 MiB and is not recorded" in problem
    assert "COMPOUND_MAX_LINE_MB" in problem
    cache.put("small", stored(1))
    assert cache.get("small") == stored(1)
    cache.close()


def test_a_file_does_not_say_how_much_memory_is_used(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    disk(tmp_path).close()
    sqlite_file(path, "PRAGMA default_cache_size = 2000000000")
    cache = disk(tmp_path)
    assert cache._db.execute("PRAGMA cache_size").fetchone() == (-2000,)
    cache.close()


def test_a_cache_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    """Regression test: of two processes that made one cache at the same time, one ended with an error."""
    other = sqlite3.connect(
        tmp_path / "cache.sqlite", isolation_level=None, check_same_thread=False
    )
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.3, other.execute, ["COMMIT"])
    timer.start()
    try:
        cache = disk(tmp_path)
    finally:
        timer.join()
        other.close()
    cache.put("k", stored(1))
    assert cache.get("k") == stored(1)
    cache.close()


def test_a_cache_that_is_used_elsewhere_for_long_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compound.execution.cache.WAIT", 0.2)
    other = sqlite3.connect(tmp_path / "cache.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(RunDirectoryError, match="another process is using it"):
        disk(tmp_path)
    other.close()


MAGIC = bytes.fromhex("d9d505f920a163d7")  # what the journals of SQLite begin with


@pytest.mark.parametrize("moment", ["opened", "journal", "synced", "half", "written", "done"])
def test_a_cache_whose_making_was_killed_is_used(tmp_path: Path, moment: str) -> None:
    """SQLite writes the first page of a new file with a journal; what is left of both is harmless."""
    sqlite_file(tmp_path / "made", "PRAGMA journal_mode = WAL")
    page = (tmp_path / "made").read_bytes()
    assert len(page) == 4096
    other = sqlite3.connect(tmp_path / "other", isolation_level=None)
    other.execute("BEGIN")
    other.execute("CREATE TABLE t (x)")
    journal = (tmp_path / "other-journal").read_bytes()
    other.close()
    assert len(journal) >= 512
    synced = MAGIC + bytes(4) + journal[12:]  # until then there are zeros in their place
    written, left = {
        "opened": (0, None),
        "journal": (0, journal),
        "synced": (0, synced),
        "half": (2048, synced),
        "written": (4096, synced),
        "done": (4096, None),
    }[moment]

    def killed(path: Path) -> None:
        path.write_bytes(page[:written])
        if left is not None:
            path.with_name("cache.sqlite-journal").write_bytes(left)

    path = run_with(tmp_path, killed)
    assert verify(path.parent) == []
    cache = DiskCache(path, step=0)
    cache.put("k", stored(1))
    cache.close()
    assert verify(path.parent) == []
    assert not path.with_name("cache.sqlite-journal").exists()


def test_the_table_and_its_version_are_made_together(tmp_path: Path) -> None:
    """Else a kill in between leaves a file whose entries need no checksums."""
    seen: list[str] = []

    class Noting(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            seen.append(sql.split("(", maxsplit=1)[0].strip())
            return super().execute(sql, *values)

    connect = sqlite3.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sqlite3, "connect", lambda *args, **options: connect(*args, **options, factory=Noting)
        )
        disk(tmp_path).close()
    at = seen.index("BEGIN IMMEDIATE")
    assert seen[at + 1 : at + 4] == [
        "CREATE TABLE IF NOT EXISTS outcome",
        "PRAGMA user_version=2",
        "COMMIT",
    ]
