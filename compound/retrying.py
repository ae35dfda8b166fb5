"""Run the failed rows of a finished run's test evaluation again.

Only measurements that failed are repeated, with the examples and random streams they had: a lost connection
or a crashed component says nothing about the configuration. What a model did answer stays as it is, also
where the answer could not be parsed or has a wrong type: repeating that until it succeeds would bias the
score. Both configurations of the comparison are treated alike. Acceptance decisions and validation scores are
never touched, since the search went on from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from compound.contracts import Example
from compound.errors import BudgetExhausted
from compound.evaluation import Evaluation, Row, evaluate
from compound.executor import Executor
from compound.loop import Loop, Problem
from compound.recorder import Recorder
from compound.system import System

EVENT = "retry"
ANSWERED = ("parse", "type")  # failures of an answer that was received
EVALUATIONS = ("test_before", "test_after")


def failed_rows(evaluation: Evaluation) -> list[Row]:
    """Return the rows that may be run again.

    >>> from compound.trace import Failure
    >>> rows = (Row("a", 0, 0.0, Failure("transient", "gone")), Row("b", 0, 0.0, Failure("parse", "?")))
    >>> [row.example for row in failed_rows(Evaluation("digest", rows))]
    ['a']
    """
    return [row for row in evaluation.rows if row.failure and row.failure.kind not in ANSWERED]


async def retry_failed(problem: Problem, recorder: Recorder) -> None:
    """Run the failed test rows of one finished run again, and record what came of it.

    They count towards the budget's share of the test split. Each evaluation is one event and one checkpoint.

    Args:
        problem: the problem of the run.
        recorder: of the finished run.
    """
    loop = Loop(problem, recorder)
    loop.meter.pause()
    loop.test_meter.proceed()
    executor = loop.executor.charging(loop.test_meter)
    state = recorder.state
    systems = {"test_before": problem.system, "test_after": problem.bind(state["best"])}
    unchanged = systems["test_after"].configuration == problem.system.configuration
    try:
        for name in EVALUATIONS:
            evaluation = Evaluation.from_json(state[name]) if state.get(name) else None
            if name == "test_after" and unchanged:
                state[name] = state["test_before"]
            elif evaluation is not None and (rows := failed_rows(evaluation)):
                await _retry(name, evaluation, rows, systems[name], executor, problem, recorder)
        loop.test_meter.pause()
        recorder.save()
    finally:
        await loop.executor.aclose()


async def _retry(
    name: str, evaluation: Evaluation, rows: Sequence[Row], system: System, executor: Executor,
    problem: Problem, recorder: Recorder,
) -> None:  # fmt: skip
    """Run rows of one evaluation again, and put what they gave in their places."""
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
    recorder.state[name] = merged.to_json()
    recorder.event(
        EVENT, evaluation=name, failed=len(rows), retried=retried, recovered=recovered,
        before=evaluation.summary(), after=merged.summary(), **facts,
    )  # fmt: skip


def _by_sample(rows: Sequence[Row], examples: Sequence[Example]) -> Mapping[int, list[Example]]:
    """Return the examples to run again, by sample index."""
    known = {example.id: example for example in examples}
    found: dict[int, list[Example]] = {}
    for row in rows:
        found.setdefault(row.sample, []).append(known[row.example])
    return found


def _merged(evaluation: Evaluation, again: Sequence[Evaluation]) -> Evaluation:
    """Return an evaluation with new rows in the places of the old, and with what both cost."""
    new = {(row.example, row.sample): row for part in again for row in part.rows}
    rows = tuple(new.get((row.example, row.sample), row) for row in evaluation.rows)
    usage, runs = evaluation.usage, evaluation.system_runs
    for part in again:
        usage, runs = usage + part.usage, runs + part.system_runs
    return replace(evaluation, rows=rows, usage=usage, system_runs=runs)
