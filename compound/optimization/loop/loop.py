"""The optimization loop: evaluate, run jobs, decide, test; every step is an event and a checkpoint.

A round consists of jobs, which improve the working configuration on train examples. A decision then
compares it with the best one on validation examples. The test split is evaluated once, at the end;
failed rows of that evaluation can later be run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from compound.core.errors import BudgetExhausted
from compound.core.example import Example
from compound.evaluation.evaluate import Evaluation, ScoredRun, evaluate
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.configuration import Configuration
from compound.graph.system import System
from compound.optimization.budget_plan import stochastic
from compound.optimization.loop.context import RunContext
from compound.optimization.loop.decisions import decide, stop_if_undecidable
from compound.optimization.loop.jobs import Jobs
from compound.optimization.method import Problem
from compound.optimization.prices import measure_prices
from compound.optimization.runs.recorder import Recorder
from compound.optimization.runs.state import FinalEvaluation, OptimizationState, SearchState

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
    return [
        row for row in evaluation.rows if row.failure and row.failure.kind not in ANSWERED_KINDS
    ]


async def retry_failed(problem: Problem, recorder: Recorder) -> None:
    """Rerun the failed test rows of a finished run, charged to the test split, and record the results."""
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
    stored: FinalEvaluation | None = getattr(recorder.state, name)
    if stored is None or stored.evaluation is None or not (rows := failed_rows(stored.evaluation)):
        return
    evaluation = stored.evaluation
    rules = replace(problem.rules, max_failed=1.0)
    again: list[Evaluation] = []
    facts: dict[str, Any] = {}
    record = recorder.trace("test", again=True)
    known, samples = {example.id: example for example in problem.test}, dict[int, list[Example]]()
    for row in rows:
        samples.setdefault(row.sample, []).append(known[row.example])
    try:
        for sample, examples in samples.items():
            inputs = executor, system, examples, problem.metric
            part = await evaluate(*inputs, samples=[sample], rules=rules, on_trace=record)
            again.append(part)
    except BudgetExhausted as error:
        facts["note"] = error.message
    merged = _merged(evaluation, again)
    retried = sum(len(part.rows) for part in again)
    recovered = evaluation.failed - merged.failed
    setattr(recorder.state, name, stored.model_copy(update={"evaluation": merged}))
    recorder.event(
        EVENT,
        evaluation=name,
        failed=len(rows),
        retried=retried,
        recovered=recovered,
        before=evaluation.summary(),
        after=merged.summary(),
        **facts,
    )


def _merged(evaluation: Evaluation, again: Sequence[Evaluation]) -> Evaluation:
    new = {(row.example, row.sample): row for part in again for row in part.rows}
    rows = tuple(new.get((row.example, row.sample), row) for row in evaluation.rows)
    usage, runs = evaluation.usage, evaluation.system_runs
    for part in again:
        usage, runs = usage + part.usage, runs + part.system_runs
    violation = next((part.violation for part in (evaluation, *again) if part.violation), "")
    bounds = None if violation else evaluation.bounds
    return replace(
        evaluation, rows=rows, usage=usage, system_runs=runs, bounds=bounds, violation=violation
    )


FIRST_SAMPLE = 1_000_000  # first sample index reserved for the test split


async def evaluate_test_split(context: RunContext) -> None:
    """Evaluate both configurations unless already done; each evaluation is one event and one checkpoint."""
    state, problem = context.state, context.problem
    executor = context.executor.with_meter(context.test_meter)
    if state.test_before is None:
        state.test_before = await _evaluate(context, executor, problem.system)
        _record(context, "test_before", state.test_before)
    if state.test_after is None:
        best = problem.bind(context.search.best)
        unchanged = best.configuration == problem.system.configuration
        before = FinalEvaluation(evaluation=state.test_before.evaluation)
        state.test_after = before if unchanged else await _evaluate(context, executor, best)
        _record(context, "test_after", state.test_after)


async def _evaluate(context: RunContext, executor: Executor, system: System) -> FinalEvaluation:
    """Evaluate a configuration on the test split, if the budget allows; failed runs are counted only."""
    problem = context.problem
    if not problem.test:
        return FinalEvaluation()
    samples = [0]
    if stochastic(problem.system):
        samples = [FIRST_SAMPLE + sample for sample in context.samples(0)]
    try:
        evaluation = await evaluate(
            executor,
            system,
            problem.test,
            problem.metric,
            samples=samples,
            rules=replace(problem.rules, max_failed=1.0),
            on_trace=context.recorder.trace("test"),
        )
    except BudgetExhausted as error:
        return FinalEvaluation(skipped=error.message)
    return FinalEvaluation(evaluation=evaluation)


def _record(context: RunContext, name: str, reading: FinalEvaluation) -> None:
    facts: Mapping[str, object] = reading.evaluation.summary() if reading.evaluation else {}
    context.recorder.event(
        name, **facts, **({"skipped": reading.skipped} if reading.skipped else {})
    )


class OptimizationLoop:
    """One optimization run."""

    def __init__(self, problem: Problem, recorder: Recorder) -> None:
        self.context = RunContext.open(problem, recorder)
        self._jobs = Jobs(self.context)

    async def run(self) -> None:
        """Run to the end, starting from the recorder's state."""
        context, state = self.context, self.context.state
        try:
            if state.search is None:
                await self._measure_start()
            search = context.search
            if context.proposals.state.news:  # from an interrupted or just finished job
                under_way = search.job is not None and search.job.progress is not None
                context.record_news(len(search.history) - (not under_way))
            # a job that changed the working configuration must be followed by a decision
            while not search.stopped or search.jobs_in_round or search.working:
                await self._jobs.run_round()
                await decide(context)
            context.write_candidates()
            # the minutes of the test count against its own meter
            context.meter.pause()
            if state.test_after is None:
                context.test_meter.resume()
                context.enter("testing")
                await evaluate_test_split(context)
            context.test_meter.pause()
        finally:
            await context.executor.aclose()

    async def _measure_start(self) -> None:
        self._announce()
        context = self.context
        context.enter("evaluating the start")
        start = context.problem.system
        traces: list[Trace] = []
        evaluation = await context.validate(
            start, context.samples(0), lambda _, trace: traces.append(trace)
        )
        context.state.before = evaluation
        budget = context.plan_budget(measure_prices(start, traces))
        context.state.search = SearchState(
            plan=budget.plan,
            free_runs=budget.free_runs,
            best=start.configuration.to_json(),
            supported=start.configuration.to_json(),
            incumbent=evaluation,
            prices=budget.prices,
            ledger=context.proposals.snapshot(),
        )
        context.candidates.check_priced()
        context.write_candidates()
        context.recorder.event(
            "start", split="valid", plan=asdict(budget.plan), **evaluation.summary()
        )
        context.record_violation(evaluation.violation)
        stop_if_undecidable(context)

    def _announce(self) -> None:
        """Record what is known before the first run: each note once, across all attempts."""
        problem, state = self.context.problem, self.context.state
        notes: list[tuple[str, Mapping[str, Any]]] = [
            ("note", {"note": n}) for n in problem.method.notes
        ]
        notes += [("outlook", problem.outlook)] if problem.outlook else []
        for number in range(state.announced, len(notes)):
            state.announced = number + 1
            event, facts = notes[number]
            self.context.recorder.event(event, **facts)


def final_configuration(state: OptimizationState, folder: Path) -> Configuration:
    """Return the best configuration of a run; ``folder`` is the run's memory."""
    if state.search is None:
        raise ValueError("the run has no best configuration before the initial evaluation")
    return Configuration(state.search.best).located(folder)
