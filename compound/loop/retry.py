"""Rerun failed rows of a finished run's test evaluation.

Only failed measurements are repeated, with the same examples and random streams: a lost connection or a
crashed component says nothing about the configuration. Rows with an answer are kept, even if the answer could
not be parsed or has a wrong type: repeating them until they succeed would bias the score. Both configurations
of the comparison are treated alike. Acceptance decisions and validation scores are never changed, because the
search depended on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from compound.errors import BudgetExhausted
from compound.evaluation.evaluate import Evaluation, ScoredRun, evaluate
from compound.example import Example
from compound.execution.executor import Executor
from compound.graph.system import System
from compound.loop.context import RunContext
from compound.optimization.problem import Problem
from compound.runs.recorder import Recorder
from compound.runs.state import FinalEvaluation

EVENT = "retry"
ANSWERED_KINDS = ("parse", "type")  # failures of an answer that was received


def failed_rows(evaluation: Evaluation) -> list[ScoredRun]:
    """Return the rows that may be rerun.

    >>> from compound.execution.trace import Failure
    >>> failures = {"a": Failure("transient", "gone"), "b": Failure("parse", "?")}
    >>> rows = tuple(ScoredRun(name, 0, 0.0, failure) for name, failure in failures.items())
    >>> [row.example for row in failed_rows(Evaluation("digest", rows))]
    ['a']
    """
    return [row for row in evaluation.rows if row.failure and row.failure.kind not in ANSWERED_KINDS]


async def retry_failed(problem: Problem, recorder: Recorder) -> None:
    """Rerun the failed test rows of a finished run, and record the results.

    They are charged to the budget's share of the test split. Each evaluation is one event and one checkpoint.

    Args:
        problem: the problem of the run.
        recorder: recorder of the finished run.
    """
    context = RunContext.open(problem, recorder)
    context.meter.pause()
    context.test_meter.resume()
    executor = context.executor.with_meter(context.test_meter)
    state = recorder.state
    best = problem.bind(context.search.best)
    unchanged = best.configuration == problem.system.configuration
    try:
        await _retry("test_before", problem.system, executor, problem, recorder)
        if unchanged:
            state.test_after = state.test_before
        else:
            await _retry("test_after", best, executor, problem, recorder)
        context.test_meter.pause()
        recorder.save()
    finally:
        await context.executor.aclose()


async def _retry(
    name: Literal["test_before", "test_after"],
    system: System,
    executor: Executor,
    problem: Problem,
    recorder: Recorder,
) -> None:
    """Rerun the failed rows of one evaluation, and replace them by the results."""
    stored: FinalEvaluation | None = getattr(recorder.state, name)
    if stored is None or stored.evaluation is None or not (rows := failed_rows(stored.evaluation)):
        return
    evaluation = stored.evaluation
    rules = replace(problem.rules, max_failed=1.0)
    again: list[Evaluation] = []
    facts: dict[str, Any] = {}
    record = recorder.trace("test", again=True)
    try:
        for sample, examples in _by_sample(rows, problem.test).items():
            part = await evaluate(
                executor, system, examples, problem.metric, samples=[sample], rules=rules, on_trace=record
            )
            again.append(part)
    except BudgetExhausted as error:
        facts["note"] = error.message
    merged = _merged(evaluation, again)
    retried = sum(len(part.rows) for part in again)
    recovered = evaluation.failed - merged.failed
    setattr(recorder.state, name, stored.model_copy(update={"evaluation": merged}))
    recorder.event(
        EVENT, evaluation=name, failed=len(rows), retried=retried, recovered=recovered,
        before=evaluation.summary(), after=merged.summary(), **facts,
    )  # fmt: skip


def _by_sample(rows: Sequence[ScoredRun], examples: Sequence[Example]) -> Mapping[int, list[Example]]:
    """Return the examples to rerun, by sample index."""
    known = {example.id: example for example in examples}
    found: dict[int, list[Example]] = {}
    for row in rows:
        found.setdefault(row.sample, []).append(known[row.example])
    return found


def _merged(evaluation: Evaluation, again: Sequence[Evaluation]) -> Evaluation:
    """Return an evaluation with the rerun rows replaced, and the usage of both added."""
    new = {(row.example, row.sample): row for part in again for row in part.rows}
    rows = tuple(new.get((row.example, row.sample), row) for row in evaluation.rows)
    usage, runs = evaluation.usage, evaluation.system_runs
    for part in again:
        usage, runs = usage + part.usage, runs + part.system_runs
    violation = next((part.violation for part in (evaluation, *again) if part.violation), "")
    bounds = None if violation else evaluation.bounds
    return replace(evaluation, rows=rows, usage=usage, system_runs=runs, bounds=bounds, violation=violation)
