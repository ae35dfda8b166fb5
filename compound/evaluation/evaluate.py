"""Run a system on many examples and score it, with bounded memory and results in input order.

A failed run scores ``failure_score``, is counted, and is part of the mean. If more than
``max_failed`` of the runs fail, the evaluation stops with the most frequent reason.
"""

from __future__ import annotations

import asyncio
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, cast
from weakref import WeakKeyDictionary

from pydantic import BaseModel, FiniteFloat, NonNegativeFloat, PositiveInt, ValidationError

from compound.core import notebook
from compound.core.engine import NO_USAGE, Usage
from compound.core.errors import (
    BudgetExhausted,
    CallError,
    CompoundError,
    DeclarationError,
    MissingOutput,
    TooManyFailures,
    TransientError,
    first_leaf,
)
from compound.core.example import Example, Metric
from compound.core.formatting import format_repr, plural
from compound.core.storage.state import first_problem
from compound.evaluation.metrics.custom import bounds_of, bounds_violation
from compound.evaluation.metrics.scoring import (
    MetricCalls,
    PassAt,
    apply_metric,
    copy_arguments,
    pass_at_of,
)
from compound.evaluation.statistics import (
    UNIT,
    Bounds,
    Interval,
    IntervalDocument,
    cluster_mean_interval,
    paired_interval,
)
from compound.execution.budget import StoredUsage
from compound.execution.executor import Executor
from compound.execution.graph_run import ComponentSettings
from compound.execution.trace import Failure, FailureRow, Trace
from compound.graph.registry.user_code import located, place_in
from compound.graph.system import System

# components with searches in vain
_WARNED: WeakKeyDictionary[Executor, set[str]] = WeakKeyDictionary()
ONE_LANGUAGE = "check that the corpus and the queries are in one language, and the setting language"
WINDOW = 4  # times the concurrency: maximum lead over the slowest run


class Summary(IntervalDocument):
    """Mean of an evaluation with its interval, and the number of failed runs, as JSON types."""

    failed: int


class _StoredEvaluation(BaseModel):
    """JSON of an `Evaluation`; a row lists the values of a `ScoredRun` in order."""

    configuration: str
    rows: list[tuple[str, int, float, FailureRow | None]]
    usage: StoredUsage
    system_runs: NonNegativeFloat
    bounds: tuple[float, float] | None = None
    violation: str = ""
    metric_usage: StoredUsage | None = None
    pass_at: tuple[PositiveInt, FiniteFloat] | None = None


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """A scored run."""

    example: str
    sample: int
    score: float
    failure: Failure | None = None


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Scores of one configuration on some examples, in input order, with their usage.

    ``bounds`` are the minimum and maximum possible score, or ``None`` if they are unknown: the
    metric does not declare them, or a score is outside. In the second case ``violation`` names
    metric, score and example. ``usage`` is that of the system, and ``metric_usage`` that of a
    metric that asks a model. ``pass_at`` is set for pass@k: then the score of an example is not the
    mean over its repeats. ``cached_calls`` were answered from the cache, at no cost. ``cut`` is the
    limit of the budget that left out examples, if any. A stored evaluation states neither.
    """

    configuration: str
    rows: tuple[ScoredRun, ...]
    usage: Usage = NO_USAGE
    system_runs: float = 0.0
    bounds: Bounds | None = None
    violation: str = ""
    metric_usage: Usage = NO_USAGE
    pass_at: PassAt | None = None
    cached_calls: int = 0
    cut: str = ""

    @functools.cached_property
    def scores(self) -> tuple[float, ...]:
        """One score per example: the mean over its repeats, or pass@k."""
        groups = self._groups.values()
        if self.pass_at is not None:
            return tuple(map(self.pass_at.estimate, groups))
        return tuple(sum(group) / len(group) for group in groups)

    def by_example(self) -> dict[str, float]:
        """Return the score of each example, the mean over its repeats or pass@k."""
        return dict(zip(self._groups, self.scores, strict=True))

    @functools.cached_property
    def _groups(self) -> dict[str, list[float]]:
        groups: dict[str, list[float]] = {}
        for row in self.rows:
            groups.setdefault(row.example, []).append(row.score)
        return groups

    @functools.cached_property
    def interval(self) -> Interval:
        """Mean over examples with its 95 % confidence interval."""
        groups = [*self._groups.values()] if self.pass_at is None else [[s] for s in self.scores]
        return cluster_mean_interval(groups, bounds=self.range)

    @property
    def range(self) -> Bounds | None:
        """Range for intervals: the bounds, or 0 to 1 if none are known and no score lies outside."""
        if self.bounds is not None or self.violation:
            return self.bounds
        return UNIT if all(0 <= row.score <= 1 for row in self.rows) else None

    @property
    def mean(self) -> float:
        """Mean over examples."""
        return sum(self.scores) / len(self.scores)

    @property
    def failed(self) -> int:
        """Number of failed runs."""
        return sum(row.failure is not None for row in self.rows)

    def failures(self) -> list[tuple[str, int]]:
        """Return failure kinds and messages with their counts, most frequent first."""
        return Counter(
            f"{r.failure.kind}: {r.failure.message}" for r in self.rows if r.failure
        ).most_common()

    def on(self, examples: Iterable[str]) -> Evaluation:
        """Return the evaluation on some of the examples, in the given order, with the usage of all."""
        rows: dict[str, list[ScoredRun]] = {}
        for row in self.rows:
            rows.setdefault(row.example, []).append(row)
        return replace(self, rows=tuple(row for name in examples for row in rows[name]))

    def shared(self, other: Evaluation) -> Evaluation:
        """Return the evaluation on the examples that another one has too, or all of them if it has none."""
        others = other.by_example()
        names = [name for name in self.by_example() if name in others]
        return self.on(names) if 0 < len(names) < len(self.scores) else self

    def joined(self, other: Evaluation) -> Evaluation:
        """Return the evaluation of the same configuration on the examples of both."""
        violation = self.violation or other.violation
        return replace(
            self,
            rows=(*self.rows, *other.rows),
            usage=self.usage + other.usage,
            system_runs=self.system_runs + other.system_runs,
            bounds=None if violation else self.bounds,
            violation=violation,
            metric_usage=self.metric_usage + other.metric_usage,
            cached_calls=self.cached_calls + other.cached_calls,
        )

    def summary(self) -> Summary:
        """Return ``mean, low, high, n, failed`` for reports; unknown limits are ``None``."""
        return {**self.interval.to_json(), "failed": self.failed}

    def __repr__(self) -> str:
        if not self.rows:
            return "Evaluation(n=0)"
        interval = self.interval.to_json()
        low, high = interval["low"], interval["high"]
        return format_repr(
            "Evaluation",
            mean=f"{interval['mean']:.4g}",
            **({} if low is None else {"interval": f"[{low:.4g}, {high:.4g}]"}),
            n=str(interval["n"]),
            failed=str(self.failed),
            system_runs=f"{self.system_runs:g}",
            calls=str(self.usage.calls),
            cached_calls=str(self.cached_calls or ""),
            metric_calls=str(self.metric_usage.calls or ""),
        )

    def _repr_html_(self) -> str:
        """Return the mean, its interval and the failures, for notebooks."""
        facts: list[tuple[str, object]] = [("mean", str(self.interval) if self.rows else "unknown")]
        facts += [
            ("examples", len(self.scores)),
            ("failed runs", self.failed),
            ("system runs", f"{self.system_runs:g}"),
        ]
        facts += [("calls", self.usage.calls), ("from the cache", self.cached_calls or "")]
        facts += [("tokens", self.usage.tokens)]
        facts += [("metric calls", self.metric_usage.calls or ""), ("note:", self.violation)]
        failures = self.failures()
        shown = notebook.table(["failure", "runs"], failures) if failures else ""
        return notebook.block("Evaluation", shown, facts=facts)

    def to_json(self) -> dict[str, object]:
        """Return the evaluation as JSON types."""
        rows = ((r.example, r.sample, r.score, r.failure) for r in self.rows)
        optional = {
            "violation": self.violation,
            "metric_usage": self.metric_usage != NO_USAGE and self.metric_usage.to_json(),
            "pass_at": self.pass_at and [self.pass_at.k, self.pass_at.threshold],
        }
        return {
            "configuration": self.configuration,
            "rows": [(*row, failure.row if failure else None) for *row, failure in rows],
            "usage": self.usage.to_json(),
            "system_runs": self.system_runs,
            "bounds": self.bounds,
            **{name: value for name, value in optional.items() if value},
        }

    @staticmethod
    def from_json(data: Mapping[str, object]) -> Evaluation:
        """Parse the output of `to_json`; bounds violated by a score count as unknown.

        Raises:
            ValueError: a value is missing or of another type; the message names the first one.
        """
        try:
            given = _StoredEvaluation.model_validate(data)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error
        rows = tuple(ScoredRun(e, s, v, Failure(*f) if f else None) for e, s, v, f in given.rows)
        low, high = given.bounds or (math.inf, -math.inf)
        return Evaluation(
            given.configuration,
            rows,
            given.usage,
            given.system_runs,
            given.bounds if all(low <= row.score <= high for row in rows) else None,
            given.violation,
            given.metric_usage or NO_USAGE,
            given.pass_at and PassAt(*given.pass_at),
        )


def gain_interval(before: Evaluation, after: Evaluation) -> Interval:
    """Return the mean gain over the examples in both evaluations, with its 95 % interval."""
    old, new = before.by_example(), after.by_example()
    both = [example for example in old if example in new]
    bounds = joint_bounds(before.range, after.range)
    return paired_interval([old[e] for e in both], [new[e] for e in both], bounds=bounds)


def joint_bounds(*bounds: Bounds | None) -> Bounds | None:
    """Return bounds that cover all given ones, or ``None`` if one of them is unknown.

    >>> joint_bounds((0.0, 1.0), (-1.0, 0.5)), joint_bounds((0.0, 1.0), None)
    ((-1.0, 1.0), None)
    """
    known = [pair for pair in bounds if pair is not None]
    if not known or len(known) < len(bounds):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def score_bounds(metric: Metric, rules: EvaluationRules) -> Bounds | None:
    """Return the range of an evaluation's scores, including the score of a failed run."""
    return joint_bounds(bounds_of(metric), (rules.failure_score, rules.failure_score))


@dataclass(frozen=True)
class EvaluationRules:
    """Rules for running an evaluation and counting failures.

    ``settings`` override the settings of components, as in `Executor.run`.
    """

    concurrency: int = 64
    failure_score: float = 0.0
    max_failed: float = 0.5
    cache: bool = True
    settings: ComponentSettings = field(default_factory=dict)


OnTrace = Callable[[Example, Trace], None]


async def evaluate(
    executor: Executor,
    system: System,
    examples: Collection[Example],
    metric: Metric,
    *,
    samples: Sequence[int] = (0,),
    rules: EvaluationRules | None = None,
    on_trace: OnTrace | None = None,
    partial: bool = False,
) -> Evaluation:
    """Run and score ``system`` on every example, once for each sample index.

    Args:
        executor: with its cache and budget.
        system: bound to the configuration to evaluate.
        examples: at least one example.
        metric: scores the outputs.
        samples: several indices repeat each example.
        rules: concurrency and the treatment of failures.
        on_trace: called with each scored trace, in input order.
        partial: whether to return the evaluation of the examples that the budget covers.

    Raises:
        TooManyFailures: more than ``rules.max_failed`` of the runs failed.
        BudgetExhausted: the budget did not cover all examples; with ``partial``, any.
    """
    results = await evaluate_all(
        executor,
        [system],
        examples,
        metric,
        samples=samples,
        rules=rules,
        on_trace=on_trace,
        partial=partial,
    )
    return results[0]


async def evaluate_all(
    executor: Executor,
    systems: Sequence[System],
    examples: Collection[Example],
    metric: Metric,
    *,
    samples: Sequence[int] = (0,),
    rules: EvaluationRules | None = None,
    on_trace: OnTrace | None = None,
    partial: bool = False,
) -> list[Evaluation]:
    """Evaluate several configurations concurrently on the same examples; `partial` needs a single one."""
    if not examples or not samples:
        raise DeclarationError("an evaluation needs at least one example and one sample index")
    rules = rules or EvaluationRules()
    bounds = score_bounds(metric, rules)  # rejects invalid bounds before any run
    jobs = (  # one at a time: the examples may be read from a file
        (system, example, sample)
        for system in systems
        for example in examples
        for sample in samples
    )
    total = len(examples) * len(samples)
    collectors = [
        _Collector(executor, rules, total, len(samples), on_trace, system) for system in systems
    ]
    in_order = _InOrder(collectors, WINDOW * rules.concurrency)
    waiting = iter(enumerate(jobs))
    turn = asyncio.Lock()
    exhausted: BudgetExhausted | None = None

    async def next_job() -> tuple[int, tuple[System, Example, int]] | None:
        """Take the next job when the budget allows it, in order, so that no later job overtakes."""
        async with turn:
            numbered = None if exhausted else next(waiting, None)
            if numbered is not None:
                await in_order.wait_until_near(numbered[0])
                await executor.meter.reserve_run()
                if exhausted:  # meanwhile
                    executor.meter.release_runs()
                    return None
            return numbered

    async def work() -> None:
        while (numbered := await next_job()) is not None:
            number, (system, example, sample) = numbered
            trace = await executor.run(
                system,
                example.inputs,
                example=example.id,
                sample=sample,
                cache=rules.cache,
                settings=rules.settings,
            )
            in_order.add(number, example, await score(executor, trace, metric, example, rules))

    async def worker() -> None:
        nonlocal exhausted
        try:
            await work()
        except BudgetExhausted as error:
            if not partial:
                raise
            exhausted = exhausted or error
            in_order.skip_gaps()
            executor.meter.release_runs()

    try:
        with executor.sharing_failures():
            async with asyncio.TaskGroup() as group:
                for _ in range(min(rules.concurrency, total * len(systems))):
                    group.create_task(worker())
    except BaseExceptionGroup as errors:
        executor.meter.release_runs()
        raise first_leaf(errors) from None
    if exhausted is not None:
        in_order.finish()
        if not collectors[0].rows:
            raise exhausted
    for collector in collectors:
        collector.warn_of_empty_searches()
    evaluations = [
        Evaluation(
            system.configuration.digest,
            tuple(c.rows),
            c.usage,
            c.system_runs,
            bounds,
            metric_usage=c.metric_usage,
            pass_at=pass_at_of(metric),
            cached_calls=c.cached_calls,
            cut="" if exhausted is None else exhausted.message,
        )
        for system, c in zip(systems, collectors, strict=True)
    ]
    return [_with_checked_bounds(evaluation, metric) for evaluation in evaluations]


def _with_checked_bounds(evaluation: Evaluation, metric: Metric) -> Evaluation:
    for row in evaluation.rows:
        if row.failure is None and (violation := bounds_violation(metric, row.score, row.example)):
            return replace(evaluation, bounds=None, violation=violation)
    return evaluation


class _InOrder:
    """Passes traces to the collectors in job order; jobs start within ``window`` of the next one."""

    def __init__(self, collectors: Sequence[_Collector], window: int) -> None:
        self._collectors = collectors
        self._window = window
        self._early: dict[int, tuple[Example, Trace]] = {}
        self._next = 0
        self._ended = False
        self._moved = asyncio.Event()

    async def wait_until_near(self, number: int) -> None:
        while number >= self._next + self._window and not self._ended:
            self._moved.clear()
            await self._moved.wait()

    def skip_gaps(self) -> None:
        self._ended = True
        self._moved.set()

    def finish(self) -> None:
        """Drop the jobs from the first one on that did not end: those behind it were fast or cheap."""
        for number in sorted(self._early):
            self._collectors[0].drop(*self._early.pop(number))
        self._collectors[0].keep_complete()

    def add(self, number: int, example: Example, trace: Trace) -> None:
        self._early[number] = (example, trace)
        while self._next in self._early:
            collector = self._collectors[self._next // self._collectors[0].total]
            collector.add(*self._early.pop(self._next))
            self._next += 1
            self._moved.set()


class _Collector:
    def __init__(
        self,
        executor: Executor,
        rules: EvaluationRules,
        total: int,
        samples: int,
        on_trace: OnTrace | None,
        system: System,
    ) -> None:
        self._executor = executor
        self._rules = rules
        self.total = total
        self._samples = samples
        self._on_trace = on_trace
        self._failures: Counter[str] = Counter()
        components = (node.component for node in system.all_nodes())
        self._retrievers = frozenset(
            c.name for c in components if c.kind == "retriever" and "passages" in c.outputs
        )
        # by component, and whether it found passages
        self._searches: Counter[tuple[str, bool]] = Counter()
        self.rows: list[ScoredRun] = []
        self.usage = NO_USAGE
        self.metric_usage = NO_USAGE
        self.cached_calls = 0
        self.system_runs = 0.0

    def add(self, example: Example, trace: Trace) -> None:
        # in job order, so that equal calls are charged to the first one
        self._executor.settle(trace)
        assert trace.score is not None  # callers score traces first
        self.rows.append(ScoredRun(example.id, trace.sample, trace.score, trace.failure))
        self.usage += trace.usage
        self.metric_usage += trace.metric_usage
        self.cached_calls += trace.cached_calls
        self.system_runs += trace.equivalents
        for call in trace.calls:
            if call.component in self._retrievers and call.failure is None:
                # of any form, if it is custom
                passages = cast("Sequence[object]", call.outputs["passages"])
                found = any(not isinstance(p, Mapping) or p.get("score") != 0 for p in passages)
                self._searches[call.component, found] += 1
        if self._on_trace is not None:
            self._on_trace(example, trace)
        if trace.failure is not None:
            self._failures[f"{trace.failure.kind}: {trace.failure.message}"] += 1
            if self._failures.total() > self._rules.max_failed * self.total:
                raise_too_many_failures(self._failures.most_common(), self.total, self._rules)

    def drop(self, example: Example, trace: Trace) -> None:
        """Settle and report a trace that is not part of the evaluation."""
        kept, failures = len(self.rows), self._failures.copy()
        self._failures.clear()
        self.add(example, trace)
        self._failures = failures
        del self.rows[kept:]

    def keep_complete(self) -> None:
        """Drop the rows of the last example if it lacks samples."""
        del self.rows[len(self.rows) // self._samples * self._samples :]

    def warn_of_empty_searches(self) -> None:
        """Warn of searches without passages, once for each component and executor."""
        warned = _WARNED.setdefault(self._executor, set())
        for name in sorted(self._retrievers - warned):
            empty = self._searches[name, False]
            if empty:
                warned.add(name)
                searches = empty + self._searches[name, True]
                text = (
                    f"{name!r} found no passage in {empty} of {searches} searches; {ONE_LANGUAGE}"
                )
                warnings.warn(text, stacklevel=2)


def raise_too_many_failures(
    failures: Sequence[tuple[str, int]],
    total: int,
    rules: EvaluationRules,
    hint: str = "fix the cause, or raise max_failed",
) -> NoReturn:
    """Raise `TooManyFailures` with the most frequent failure."""
    reason, count = failures[0]
    raise TooManyFailures(
        f"{sum(times for _, times in failures)} of {total} runs failed, more than max_failed="
        f"{rules.max_failed:g} allows; most frequent ({plural(count, 'time')}): {reason}",
        hint=hint,
    )


async def score(
    executor: Executor, trace: Trace, metric: Metric, example: Example, rules: EvaluationRules
) -> Trace:
    """Score a trace before `Executor.settle`; failed runs, and failures of the metric, get the failure score.

    Transient errors of the metric, such as an unreachable judge, are recorded as transient failures.
    """
    if trace.failure is not None:
        return trace.with_score(rules.failure_score, f"the run failed: {trace.failure.message}")
    models = MetricCalls(executor, example.id)
    scored = await _scored(trace, metric, example, rules, models)
    return replace(scored, metric_calls=tuple(models.calls)) if models.calls else scored


async def _scored(
    trace: Trace, metric: Metric, example: Example, rules: EvaluationRules, models: MetricCalls
) -> Trace:
    try:
        found = await apply_metric(metric, *copy_arguments(trace.outputs, example), models)
    except (TransientError, ConnectionError, TimeoutError) as error:
        return _metric_failed(trace, Failure(TransientError.kind, f"metric: {error}"), rules)
    except CallError as error:
        message = f"{error.message}{place_in(error, metric)}"
        message = f"{message}; {error.hint}" if error.hint else message
        return _metric_failed(trace, Failure("metric", message), rules)
    except MissingOutput as error:
        raise MissingOutput(f"{error.message}{place_in(error, metric)}", hint=error.hint) from error
    except CompoundError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's metric may raise anything; it fails that run
        return _metric_failed(
            trace, Failure("metric", located(error, metric, "score(outputs, example)")), rules
        )
    return trace.with_score(found.value, found.feedback, found.parts)


def _metric_failed(trace: Trace, failure: Failure, rules: EvaluationRules) -> Trace:
    return replace(trace, failure=failure).with_score(rules.failure_score, failure.message)
