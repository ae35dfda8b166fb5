"""Evaluations: input order, failures that count, bounded memory, and budgets that timing cannot move."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compound as cp
from compound import LLM, Example, Executor, Function, Input, Port, Score, System, Text
from compound.core.errors import (
    BudgetExhausted,
    CallError,
    DataError,
    DeclarationError,
    TooManyFailures,
)
from compound.core.narrowing import entry
from compound.evaluation.evaluate import (
    WINDOW,
    Evaluation,
    EvaluationRules,
    ScoredRun,
    evaluate,
    evaluate_all,
    gain_interval,
)
from compound.execution.budget import Budget, Meter
from compound.execution.cache import DiskCache, MemoryCache
from compound.execution.trace import Failure, Trace
from compound.ext import CallContext, Metric, Operation
from compound.metrics import custom, exact_match
from compound.testing import ScriptedLM

T = TypeVar("T")
HANGS = 120.0  # seconds after which something that should have ended counts as stuck


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; what waits for something that never comes raises instead."""

    async def guarded() -> T:
        async with asyncio.timeout(HANGS):
            return await work

    return asyncio.run(guarded())


def any_time(_: np.random.Generator) -> float:
    """Another latency at every call, whatever is asked: what must not matter."""
    return random.random() * 0.002


def examples(n: int, wanted: Callable[[int], Any] = str) -> list[Example]:
    return [Example(f"e{i}", {"x": i}, {"answer": wanted(i)}) for i in range(n)]


def plain(function: Callable[..., Any]) -> System:
    return System("plain", outputs={"answer": Function("step", function)(x=Input("x", int))})


def saying() -> System:
    """A system that asks the model ``lm`` for its input."""
    return System("s", outputs={"answer": LLM("a", prompt="Say")(x=Input("x", int))}, lm="lm")


RULES = ("concurrency", "failure_score", "max_failed", "cache")


def evaluated(
    system: System,
    rows: Sequence[Example],
    metric: Metric,
    *,
    lm: ScriptedLM | None = None,
    executor: Executor | None = None,
    **options: Any,
) -> Evaluation:
    """Evaluate to the end; options are those of `evaluate`, and the rules by name."""
    executor = executor or Executor({"lm": lm} if lm else None)
    rules = EvaluationRules(**{name: options.pop(name) for name in RULES if name in options})
    return finished(evaluate(executor, system, rows, metric, **{"rules": rules, **options}))


def asked_for(message: str) -> str:
    """Return the number in the message's last field."""
    found: list[str] = re.findall(r"\d+", message)
    return found[-1]


def number(outputs: Mapping[str, Any], example: Example) -> float:
    return float(outputs["answer"])


VALUE = custom(number)


class TestOrder:
    def test_results_come_in_input_order_whatever_finishes_first(self) -> None:
        async def slow(x: int) -> float:
            await asyncio.sleep(random.random() * 0.01)
            return float(x)

        seen: list[str] = []
        rows = examples(40)
        result = evaluated(
            plain(slow),
            rows,
            VALUE,
            samples=(3, 1),
            concurrency=16,
            on_trace=lambda example, _: seen.append(example.id),
        )
        assert [(row.example, row.sample) for row in result.rows] == [
            (e.id, s) for e in rows for s in (3, 1)
        ]
        assert [row.score for row in result.rows] == [float(i) for i in range(40) for _ in range(2)]
        assert seen == [row.example for row in result.rows]

    def test_d3_scores_stay_with_their_examples_under_random_latency(self) -> None:
        """The reference handed answers on as they came: most were compared with another row's gold."""
        lm = ScriptedLM(asked_for, latency=any_time)
        system = saying()
        result = evaluated(system, examples(60), exact_match("answer"), lm=lm, concurrency=8)
        assert result.mean == 1.0

    def test_nothing_to_run_is_refused(self) -> None:
        for rows, samples in (([], (0,)), (examples(1), ())):
            with pytest.raises(DeclarationError, match="at least one example"):
                evaluated(plain(_identity), rows, VALUE, samples=samples)


class TestFailures:
    def test_d10_crashed_runs_stay_in_the_mean(self) -> None:
        def half(x: int) -> str:
            if x % 2:
                raise RuntimeError("down")
            return str(x)

        result = evaluated(plain(half), examples(10), exact_match("answer"), concurrency=4)
        assert result.mean == 0.5
        assert result.failed == 5
        assert result.summary()["n"] == 10
        line = half.__code__.co_firstlineno + 2
        assert result.failures() == [
            (f"error: RuntimeError: down (test_evaluate.py:{line}, in half)", 5)
        ]

    @pytest.mark.parametrize("failure_score", [0.0, -1.0, 0.25])
    def test_a_failed_run_scores_what_the_rule_says(self, failure_score: float) -> None:
        def first(x: int) -> float:
            if x:
                return 1.0
            raise RuntimeError("down")

        result = evaluated(plain(first), examples(4), VALUE, failure_score=failure_score)
        assert result.scores == (failure_score, 1.0, 1.0, 1.0)
        assert result.mean == pytest.approx((3 + failure_score) / 4)

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (float("nan"), "must return a finite real number, got nan"),
            (Score(1.0, parts={"f1": float("nan")}), "part 'f1'"),
            (ZeroDivisionError("0/0"), "ZeroDivisionError: 0/0"),
            (CallError("the judge is down"), "the judge is down"),
        ],
        ids=repr,
    )
    def test_a_metric_that_raises_or_gives_no_number_fails_that_run_only(
        self, value: Any, reason: str
    ) -> None:
        def odd_one(outputs: Mapping[str, Any], example: Example) -> Any:
            if example.id == "e1":
                if isinstance(value, Exception):
                    raise value
                return value
            return 1.0

        traces: list[Trace] = []
        result = evaluated(
            plain(_identity),
            examples(4),
            custom(odd_one),
            on_trace=lambda _, trace: traces.append(trace),
        )
        assert result.scores == (1.0, 0.0, 1.0, 1.0)
        failure = result.rows[1].failure
        assert failure is not None
        assert failure.kind == "metric"
        assert reason in failure.message
        assert traces[1].outputs == {"answer": 1}
        assert reason in traces[1].feedback

    def test_a_mistake_in_the_data_is_an_error_and_no_score(self) -> None:
        """It would be wrong on every row; a mean of zeros would hide it."""
        with pytest.raises(DataError):
            evaluated(plain(_identity), examples(2), exact_match("answer", gold="missing"))

    def test_too_many_failures_end_the_evaluation_with_the_most_frequent_reason(self) -> None:
        def mostly(x: int) -> int:
            raise (TimeoutError("slow") if x % 3 else PermissionError("no key"))

        with pytest.raises(TooManyFailures) as caught:
            evaluated(plain(mostly), examples(30), VALUE, concurrency=5)
        assert "16 of 30 runs failed" in str(caught.value)
        assert "max_failed=0.5" in str(caught.value)
        assert "(10 times): transient: TimeoutError: slow" in str(caught.value)

    def test_exactly_the_stated_share_may_fail(self) -> None:
        def some(x: int) -> int:
            if x < 3:
                raise RuntimeError("down")
            return x

        rows = examples(10)
        evaluated(plain(some), rows, VALUE, max_failed=0.3)
        with pytest.raises(TooManyFailures, match="3 of 10"):
            evaluated(plain(some), rows, VALUE, max_failed=0.29)

    async def test_after_too_many_failures_no_task_is_left_and_nothing_more_is_asked(self) -> None:
        lm = ScriptedLM(_broken_for_few, latency=any_time, concurrency=100)
        executor = Executor({"lm": lm})
        system = saying()
        with pytest.raises(TooManyFailures):
            await evaluate(
                executor,
                system,
                examples(200),
                exact_match("answer"),
                rules=EvaluationRules(concurrency=10, max_failed=0.01),
            )
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert lm.in_flight == 0
        asked = len(lm.requests)
        assert asked < 200
        await asyncio.sleep(0.01)
        assert len(lm.requests) == asked

    def test_where_too_many_failures_stop_does_not_depend_on_timing(self) -> None:
        messages = set()
        for concurrency in (1, 3, 50):
            lm = ScriptedLM(_broken_for_few, latency=any_time)
            system = saying()
            with pytest.raises(TooManyFailures) as caught:
                evaluated(
                    system,
                    examples(60),
                    exact_match("answer"),
                    lm=lm,
                    concurrency=concurrency,
                    max_failed=0.05,
                )
            messages.add(str(caught.value))
        assert len(messages) == 1


def _identity(x: int) -> int:
    return x


def _broken_for_few(message: str) -> Any:
    said = asked_for(message)
    return CallError(f"refused {int(said) % 2}") if int(said) % 7 == 0 else said


class TestMetrics:
    def test_repeats_are_averaged_for_each_example(self) -> None:
        def noisy(x: int, rng: np.random.Generator) -> float:
            return float(rng.integers(0, 100))

        result = evaluated(plain(noisy), examples(5), VALUE, samples=(0, 1, 2))
        assert len(result.rows) == 15
        expected = [np.mean([r.score for r in result.rows[3 * i : 3 * i + 3]]) for i in range(5)]
        assert result.scores == pytest.approx(expected)
        assert result.mean == pytest.approx(np.mean(expected))
        assert result.interval.n == 5
        assert len({row.score for row in result.rows}) > 5

    def test_examples_weigh_the_same_when_some_of_their_repeats_fail(self) -> None:
        rows = (
            ScoredRun("a", 0, 1.0),
            ScoredRun("a", 1, 0.0, Failure("error", "x")),
            ScoredRun("b", 0, 1.0),
            ScoredRun("b", 1, 1.0),
        )
        result = Evaluation("digest", rows)
        assert result.scores == (0.5, 1.0)
        assert result.mean == 0.75
        assert result.failed == 1


class TestTogether:
    def test_candidates_scored_together_score_what_each_scores_alone(self) -> None:
        def said(message: str, rng: np.random.Generator) -> str:
            return (
                asked_for(message) if rng.random() < len(message.split(maxsplit=1)[0]) / 6 else "no"
            )

        def fresh() -> Executor:
            return Executor({"lm": ScriptedLM(said, latency=any_time)}, seed=5)

        asked = LLM("a", prompt=Text("Say"), temperature=1.0)
        system = System("s", outputs={"answer": asked(x=Input("x", int))}, lm="lm")
        bound = [system.bind({"a.prompt": text}) for text in ("Say", "Tell", "Speak", "Say")]
        rows = examples(20)
        together = finished(
            evaluate_all(
                fresh(),
                bound,
                rows,
                exact_match("answer"),
                samples=(0, 1),
                rules=EvaluationRules(7),
            )
        )
        alone = [
            evaluated(one, rows, exact_match("answer"), executor=fresh(), samples=(0, 1))
            for one in bound
        ]
        assert [t.to_json() for t in together] == [a.to_json() for a in alone]
        assert len({t.mean for t in together}) > 1

    def test_records_without_bounds_and_with_wrong_ones_have_unknown_bounds(self) -> None:
        stored = Evaluation(
            "digest", (ScoredRun("a", 0, 0.1), ScoredRun("b", 0, 3.0)), bounds=(0.0, 4.0)
        ).to_json()
        assert Evaluation.from_json(stored).bounds == (0.0, 4.0)
        assert Evaluation.from_json({**stored, "bounds": [0.0, 1.0]}).bounds is None
        del stored["bounds"]
        assert Evaluation.from_json(stored).bounds is None


class TestSharing:
    """Equal deterministic calls run once; who pays is the first in order, not the first in time."""

    def system(self) -> System:
        asked = LLM("a", prompt=Text("Say"))(x=Input("x", int))
        checked = LLM("b", prompt="Check")(text=asked)
        return System("s", outputs={"answer": checked}, lm="lm")

    def rows(self) -> list[Example]:
        return [Example(f"e{i}", {"x": i % 7 if i % 3 else i % 2}) for i in range(40)]

    def outcome(self, concurrency: int, cached: bool = True) -> tuple[Any, ...]:
        lm = ScriptedLM(lambda message: f"{int(asked_for(message)) // 2}", latency=any_time)
        executor = Executor({"lm": lm}, cache=MemoryCache() if cached else None)
        traces: list[Trace] = []
        result = evaluated(
            self.system(),
            self.rows(),
            VALUE,
            executor=executor,
            concurrency=concurrency,
            on_trace=lambda _, trace: traces.append(trace),
        )
        reused = [tuple(call.reused for call in trace.calls) for trace in traces]
        spent = (executor.meter.system_runs, executor.meter.usage)
        return len(lm.requests), result.to_json(), reused, spent

    def test_who_pays_for_a_shared_call_does_not_depend_on_latency(self) -> None:
        alone = self.outcome(1)
        for concurrency in (2, 8, 64):
            assert self.outcome(concurrency) == alone

    def test_each_distinct_call_is_made_and_counted_once(self) -> None:
        requests, result, _, (runs, usage) = self.outcome(16)
        assert requests == 7 + 4  # questions 0 to 6, of which come answers 0 to 3
        assert usage.calls == requests
        assert runs == pytest.approx(requests / 2)
        assert result["system_runs"] == runs
        assert result["usage"]["calls"] == requests
        requests, _, reused, (runs, _) = self.outcome(16, cached=False)
        assert (requests, runs) == (80, 40.0)
        assert not any(any(calls) for calls in reused)


class TestMemory:
    @pytest.mark.parametrize("stuck", [None, 0, 57], ids=["even", "first is slow", "one is slow"])
    def test_little_more_traces_are_alive_than_are_in_flight(self, stuck: int | None) -> None:
        """A slow run must not make all the finished ones behind it wait in memory."""
        concurrency, total = 4, 400
        done = 0

        async def step(x: int) -> int:
            nonlocal done
            while x == stuck and done < 100 and asyncio.current_task() is not None:
                await asyncio.sleep(0.0005)
                waited.append(x)
                if len(waited) > 200:
                    break
            await asyncio.sleep(0)
            done += 1
            return x

        waited: list[int] = []
        most = 0

        def count(example: Example, trace: Trace) -> None:
            nonlocal most
            if entry(trace.inputs, "x", int) % 8 == 0:
                most = max(most, sum(type(thing) is Trace for thing in gc.get_objects()))

        gc.collect()
        gc.freeze()  # what is there already, millions of things perhaps, is not looked at again
        result = evaluated(
            plain(step), examples(total), VALUE, concurrency=concurrency, on_trace=count
        )
        assert len(result.rows) == total
        assert 0 < most <= (WINDOW + 1) * concurrency


class Stamp(Operation):
    """A counted step whose cost repeats: equal inputs are free the second time."""

    name = "stamp"
    kind = "stamp"
    cacheable = True
    inputs = {"x": Port(int)}  # noqa: RUF012
    outputs = {"output": Port(int)}  # noqa: RUF012
    version = "1"

    async def run(
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> Mapping[str, Any]:
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)
        return {"output": inputs["x"]}


def spend(
    kinds: Sequence[int], known: Sequence[int], limit: float, concurrency: int
) -> tuple[Any, ...]:
    """Evaluate rows of some kinds, of which a few are in the cache already, within a budget."""
    system = System("s", outputs={"answer": Stamp()(x=Input("x", int))})
    cache = MemoryCache()
    evaluated(
        system, [Example(f"k{k}", {"x": k}) for k in known], VALUE, executor=Executor(cache=cache)
    ) if known else None
    executor = Executor(cache=cache, meter=Meter(Budget(system_runs=limit)))
    rows = [Example(f"e{i}", {"x": kind}) for i, kind in enumerate(kinds)]
    recorded: list[str] = []
    ended = "finished"
    try:
        evaluated(
            system,
            rows,
            VALUE,
            executor=executor,
            concurrency=concurrency,
            on_trace=lambda example, _: recorded.append(example.id),
        )
    except BudgetExhausted as error:
        ended = str(error)
    return ended, executor.meter.system_runs, recorded


class TestBudget:
    @settings(max_examples=80)
    @given(
        st.lists(st.integers(0, 12), min_size=1, max_size=25),
        st.lists(st.integers(0, 12), max_size=6),
        st.integers(0, 12),
        st.sampled_from([2, 3, 5, 64]),
    )
    def test_system_runs_are_never_exceeded_and_where_they_end_does_not_depend_on_timing(
        self, kinds: list[int], known: list[int], limit: int, concurrency: int
    ) -> None:
        alone = spend(kinds, known, limit, 1)
        together = spend(kinds, known, limit, concurrency)
        assert together == alone
        assert alone[1] <= limit
        if alone[0] == "finished":
            assert alone[1] == len(set(kinds) - set(known))

    @settings(max_examples=30)
    @given(
        st.integers(1, 12),
        st.integers(1, 25),
        st.integers(1, 20),
        st.sampled_from([1, 3, 8, 64]),
        st.sampled_from([1, 2]),
    )
    def test_a_partial_evaluation_ends_with_the_first_examples(
        self, runs: int, calls: int, rows: int, concurrency: int, samples: int
    ) -> None:
        """Regression test: workers that found the budget exhausted kept what they had reserved, and it hung."""
        lm = ScriptedLM(asked_for, latency=any_time)
        system = saying()
        meter = Meter(Budget(system_runs=runs, calls=calls))
        covered = min(runs, calls, rows * samples) // samples
        work = evaluate(
            Executor({"lm": lm}, meter=meter),
            system,
            examples(rows),
            exact_match("answer"),
            samples=range(samples),
            rules=EvaluationRules(concurrency, cache=False),
            partial=True,
        )
        if not covered:
            with pytest.raises(BudgetExhausted):
                finished(work)
        else:
            found = finished(work)
            assert [*found.by_example()] == [e.id for e in examples(rows)][: len(found.scores)]
            assert len(found.rows) == samples * len(found.scores)
            assert bool(found.cut) == (len(found.scores) < rows)
            assert len(found.scores) == covered
        assert meter.system_runs <= runs
        assert len(lm.requests) <= calls

    @pytest.mark.parametrize("concurrency", [1, 64])
    def test_examples_behind_one_that_did_not_end_are_left_out(self, concurrency: int) -> None:
        """Regression test: examples on which a change is slow or expensive, and bad, would not count."""

        class Third(Stamp):
            async def run(
                self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
            ) -> Mapping[str, Any]:
                for _ in range(200 * (inputs["x"] == 2)):  # the others end before it
                    await asyncio.sleep(0)
                return {"output": inputs["x"]}

        def scored(outputs: Mapping[str, Any], example: Example) -> float:
            if example.id == "e2":
                raise BudgetExhausted("no calls left")
            return 1.0

        seen: list[str] = []
        system = System("s", outputs={"answer": Third()(x=Input("x", int))})
        found = evaluated(
            system,
            examples(6),
            custom(scored, "scored"),
            partial=True,
            concurrency=concurrency,
            on_trace=lambda example, _: seen.append(example.id),
        )
        assert [*found.by_example()] == ["e0", "e1"]
        assert found.cut == "no calls left"
        assert "e2" not in seen

    def test_what_an_aborted_evaluation_held_is_given_back(self) -> None:
        def broken(x: int) -> int:
            raise RuntimeError("down")

        executor = Executor(meter=Meter(Budget(system_runs=100)))
        with pytest.raises(TooManyFailures):
            evaluated(plain(broken), examples(20), VALUE, executor=executor, concurrency=8)
        spent = executor.meter.system_runs
        rows = examples(int(100 - spent))
        evaluated(plain(_identity), rows, VALUE, executor=executor, concurrency=8)
        assert executor.meter.system_runs == 100


def test_a_killed_evaluation_is_not_paid_for_twice(tmp_path: Path) -> None:
    """What the cache holds since the last checkpoint is charged once, as if it were called now."""
    lm = ScriptedLM(asked_for)
    system = saying()
    rows = examples(10)

    async def first_half() -> None:
        cache = DiskCache(tmp_path / "cache.sqlite", step=0)
        await evaluate(Executor({"lm": lm}, cache=cache), system, rows[:5], exact_match("answer"))
        cache.close()

    finished(first_half())
    cache = DiskCache(tmp_path / "cache.sqlite", step=0)
    resumed = Executor({"lm": lm}, cache=cache)
    result = evaluated(system, rows, exact_match("answer"), executor=resumed, concurrency=4)
    assert len(lm.requests) == 10
    assert (result.system_runs, resumed.meter.system_runs) == (10.0, 10.0)
    assert resumed.meter.usage.calls == 10
    again = evaluated(system, rows, exact_match("answer"), executor=resumed, concurrency=4)
    assert (again.system_runs, again.usage.calls) == (0.0, 0)
    cache.close()


def spelled(x: int) -> str:
    return str(x)


class TestBounds:
    def score(self, value: float, bounds: Any, **rules: Any) -> Evaluation:
        metric = custom(lambda outputs, example: value, "own", bounds=bounds)
        return evaluated(plain(spelled), examples(3), metric, **rules)

    def test_the_range_holds_the_score_of_a_failed_run(self) -> None:
        assert self.score(0.5, (0, 1)).bounds == (0.0, 1.0)
        assert self.score(0.5, (0, 1), failure_score=-1.0).bounds == (-1.0, 1.0)
        assert self.score(0.5, None).bounds is None

    @pytest.mark.parametrize(
        ("scores", "within"),
        [
            ([1.0] * 9 + [0.0], True),
            ([1.0] * 5, True),
            ([0.2, 0.9, 1.0], True),
            ([0.5, 1.01, 0.9], False),
        ],
    )
    def test_intervals_of_an_undeclared_range_hold_no_impossible_scores(
        self, scores: list[float], within: bool
    ) -> None:
        rows = tuple(ScoredRun(str(i), 0, score) for i, score in enumerate(scores))
        worse = tuple(replace(row, score=min(row.score, 0.1)) for row in rows)
        found = Evaluation("c", rows)
        gain = gain_interval(Evaluation("c", worse), found)
        assert found.bounds is None  # decisions do not rely on it
        assert (found.range == (0.0, 1.0)) == within
        assert (0 <= found.interval.low <= found.interval.high <= 1) == within
        assert not within or -1 <= gain.low <= gain.high <= 1

    def test_a_score_outside_the_bounds_is_named_and_they_count_as_unknown(
        self,
    ) -> None:
        values = iter([0.5, 1.5, 7.0])
        metric = custom(lambda outputs, example: next(values), "own", bounds=(0, 1))
        rules = EvaluationRules(concurrency=1)
        found = evaluated(plain(spelled), examples(3), metric, rules=rules)
        second = examples(3)[1].id
        assert found.violation == (
            f"metric 'own' returned 1.5 on example {second!r}, outside its declared bounds [0, 1]"
        )
        assert (found.bounds, found.failed, found.mean) == (None, 0, 3.0)
        failed = ScoredRun("a", 0, 0.1, Failure("error", "x"))
        for each in (found, Evaluation("d", (failed,), system_runs=1.5, bounds=(0.0, 1.0))):
            assert Evaluation.from_json(json.loads(json.dumps(each.to_json()))) == each

    @pytest.mark.parametrize("failure_score", [-1.0, 2.0])
    def test_the_score_of_a_failed_run_violates_no_bounds(self, failure_score: float) -> None:
        metric = custom(lambda outputs, example: 1 / 0, "own", bounds=(0, 1))
        rules = EvaluationRules(failure_score=failure_score, max_failed=1.0)
        found = evaluated(plain(spelled), examples(3), metric, rules=rules)
        assert (found.failed, found.violation) == (3, "")
        assert found.bounds == (min(0.0, failure_score), max(1.0, failure_score))

    def test_rounding_beyond_a_bound_is_no_failure(self) -> None:
        found = self.score(1 + 1e-12, (0, 1))
        assert (found.mean, found.failed) == (1.0, 0)

    @pytest.mark.parametrize("bounds", [(1, 0), (0, 0), (0,), (0, float("inf")), "01", (0, "1")])
    def test_bounds_that_are_none_are_refused_when_they_are_stated(self, bounds: Any) -> None:
        with pytest.raises(DeclarationError, match="bounds must be the minimum and maximum score"):
            self.score(0.5, bounds)

    def test_bounds_of_a_metric_class_are_read_from_its_attribute(self) -> None:
        class Judge:
            name = "judge"
            bounds = (1, 5)

            def score(self, outputs: Mapping[str, Any], example: Example) -> Score:
                return Score(4.0)

        found = evaluated(plain(spelled), examples(3), Judge())
        assert found.bounds == (0.0, 5.0)  # a failed run would score 0
        assert 0 <= found.interval.low < 4 < found.interval.high <= 5


class TestFailuresOfOneBatch:
    """Two configurations that share a component which fails on every third example."""

    def spent(self, concurrency: int, latency: float) -> tuple[int, float, int]:
        def says(message: str) -> str:
            number = int(re.findall(r"\d+", message)[-1])
            if "first" in message and number % 3 == 0:
                raise RuntimeError("down")
            return str(number)

        lm = ScriptedLM(says, latency=latency)
        first = LLM("first", prompt="first", lm="lm")(question=Input("question", str))
        second = LLM("second", prompt=Text("second"), lm="lm")(text=first)
        system = System("two", outputs={"answer": second})
        executor = Executor({"lm": lm}, cache=MemoryCache())
        systems = [system, system.bind({"second.prompt": "another"})]
        rows = [Example(str(i), {"question": str(i)}, {"answer": str(i)}) for i in range(9)]
        rules = EvaluationRules(concurrency=concurrency, max_failed=1.0)
        for _ in range(2):
            asyncio.run(evaluate_all(executor, systems, rows, exact_match("answer"), rules=rules))
        return len(lm.requests), executor.meter.system_runs, executor.meter.usage.calls

    def test_they_are_made_once_however_many_are_in_flight(self) -> None:
        """Nine calls of the first, three of them failing, and two of the second for each of the others …"""
        found = self.spent(1, 0.0)
        assert found[0] == 9 + 2 * 6 + 3  # … and those that failed once more in the next batch
        assert self.spent(64, 0.005) == self.spent(3, 0.001) == found


def test_a_metric_may_modify_its_arguments() -> None:
    """Matching removes items from lists: neither traces nor the rows of later evaluations lose them."""

    def split(words: list[str]) -> list[str]:
        return sorted(words)

    def match(outputs: Mapping[str, Any], example: Example) -> float:
        gold, given = entry(example.gold, "items", list), entry(example.inputs, "words", list)
        found, right = outputs["items"], 0
        while found and gold and given:
            right += found.pop() == gold.pop() == given.pop()
        return right / 2

    system = System("s", {"items": Function("split", split)(words=Input("words", list[str]))})
    example = Example("e", {"words": ["a", "b"]}, {"items": ["a", "b"]})
    traces: list[Trace] = []

    async def score() -> float:
        found = await evaluate(
            Executor(),
            system,
            [example],
            custom(match),
            on_trace=lambda _, trace: traces.append(trace),
        )
        return found.mean

    assert [asyncio.run(score()) for _ in range(2)] == [1.0, 1.0]
    assert [trace.outputs["items"] for trace in traces] == [["a", "b"]] * 2
    assert traces[0].calls[0].inputs["words"] == traces[0].calls[0].outputs["output"] == ["a", "b"]


def _count(passages: list[dict[str, Any]]) -> int:
    return len(passages)


def test_searches_without_passages_are_counted_once(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "Lima lies on the Rimac."}\n')
    search = cp.Retriever("search", cp.components.BM25(corpus))
    join = cp.Function("join", _count)
    system = cp.System("s", {"answer": join(passages=search(query=cp.Input("question")))})
    rows = [{"question": q, "answer": n} for q, n in (("Lima", 1), ("Quito", 0), ("Bogotá", 0))]
    with pytest.warns(UserWarning, match="'search' found no passage in 2 of 3 searches") as caught:
        found = cp.evaluate(system, rows, "accuracy", cache=False)
    assert found.mean == 1.0
    assert len(caught) == 1
    cp.evaluate(system, rows[:1], "accuracy", cache=False)  # a warning would be an error


class OwnSearch(Stamp):
    """A component of one's own that returns passages as texts."""

    name, kind = "search", "retriever"
    inputs = {"question": Port(str)}  # noqa: RUF012
    outputs = {"passages": Port(list[str])}  # noqa: RUF012

    async def run(
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> Mapping[str, Any]:
        return {"passages": [inputs["question"]] if inputs["question"] == "Lima" else []}


def test_passages_of_a_retriever_of_ones_own_may_be_texts() -> None:
    system = cp.System("s", {"answer": OwnSearch()(question=cp.Input("question"))})
    rows = [{"question": "Lima"}, {"question": "Quito"}]
    with pytest.warns(UserWarning, match="'search' found no passage in 1 of 2 searches"):
        assert cp.evaluate(system, rows, custom(lambda outputs, _: 1.0), cache=False).mean == 1.0


def test_rankings_without_a_common_word_count_as_searches_without_passages() -> None:
    rank = cp.Retriever("rank", cp.components.PassageIndex())
    ranked = rank(query=cp.Input("question"), passages=cp.Input("context", list))
    system = cp.System("s", {"answer": cp.Function("join", _count)(passages=ranked)})
    rows = [
        {"question": q, "context": ["Lima lies on the Rimac.", "Quito"], "answer": 2}
        for q in ("Lima", "利马")
    ]
    with pytest.warns(UserWarning, match="'rank' found no passage in 1 of 2 searches"):
        assert cp.evaluate(system, rows, "accuracy", cache=False).mean == 1.0


def test_two_evaluations_are_compared_on_the_examples_of_both() -> None:
    first = Evaluation(
        "a", tuple(ScoredRun(f"e{i}", s, float(i)) for i in range(4) for s in (0, 1))
    )
    last = Evaluation(
        "b", (ScoredRun("e3", 0, 1.0), ScoredRun("e1", 0, 1.0), ScoredRun("e9", 0, 1.0))
    )
    assert first.shared(last).by_example() == {"e1": 1.0, "e3": 3.0}
    assert [row.example for row in first.on(["e3", "e0"]).rows] == ["e3", "e3", "e0", "e0"]
    other = Evaluation("c", (ScoredRun("x", 0, 1.0),))
    assert first.shared(other) is first
    assert first.shared(first) is first


def test_rows_of_a_large_file_are_evaluated_without_keeping_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compound.evaluation.examples.CHECKED", 10)
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"text {i}" + " more" * (i % 3), "answer": str(2 + i % 3)} for i in range(95)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def count(text: str) -> str:
        return str(len(text.split()))

    system = System("count", {"answer": Function("count", count)(text=Input("text"))})
    found = cp.evaluate(system, path, "exact_match", repeats=2, concurrency=8, cache=False)
    kept = cp.evaluate(system, rows, "exact_match", repeats=2, concurrency=8, cache=False)
    assert [row.score for row in found.rows] == [row.score for row in kept.rows] == [1.0] * 190
    assert found.rows[-1].example == "rows.jsonl-95"
    most, alive = 0, 0

    def seen(example: Example, _: Trace) -> None:
        nonlocal most, alive
        if int(example.id.partition("-")[2]) % 19 == 0:
            alive = sum(isinstance(each, Example) for each in gc.get_objects())
            most = max(most, alive)

    gc.collect()
    before = sum(isinstance(each, Example) for each in gc.get_objects())
    cp.evaluate(system, path, "exact_match", concurrency=1, cache=False, on_trace=seen)
    assert most - before < 40  # two parts of ten, and a window of four


def test_a_large_file_that_changes_during_an_evaluation_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compound.evaluation.examples.CHECKED", 10)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"x": i, "answer": "1"}) + "\n" for i in range(300)))

    def one(x: int) -> str:
        if x == 5:
            with path.open("r+") as file:
                file.truncate(path.read_text().index('{"x": 200'))
        return "1"

    system = System("one", {"answer": Function("one", one)(x=Input("x", int))})
    with pytest.raises(DataError, match="rows.jsonl, valid split: it was changed while it was"):
        cp.evaluate(system, path, "exact_match", concurrency=2, cache=False)
