"""The optimization loop: evaluate, run jobs, decide, test; every step is an event and a checkpoint.

A round consists of one or more jobs, each improving the working configuration on train examples. A decision
then compares it with the best configuration on validation examples and accepts it at a level that sums to
``alpha`` over all planned decisions. The test split is evaluated once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compound.execution.trace import Trace
from compound.graph.configuration import Configuration
from compound.loop.context import RunContext
from compound.loop.decisions import decide, stop_if_undecidable
from compound.loop.final_evaluation import evaluate_test_split
from compound.loop.jobs import Jobs
from compound.optimization.prices import measure_prices
from compound.optimization.problem import Problem
from compound.runs.recorder import Recorder
from compound.runs.state import RunState, SearchState

__all__ = ["OptimizationLoop", "final_configuration"]


class OptimizationLoop:
    """One optimization run.

    Attributes:
        context: state and resources shared by the parts of the run.
    """

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
            if context.proposals.news:  # from an interrupted or just finished job
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
                await evaluate_test_split(context)
            context.test_meter.pause()
        finally:
            await context.executor.aclose()

    async def _measure_start(self) -> None:
        """Evaluate the initial configuration on the validation split, and divide the remaining budget."""
        self._announce()
        context = self.context
        start = context.problem.system
        traces: list[Trace] = []
        evaluation = await context.validate(start, context.samples(0), lambda _, trace: traces.append(trace))
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
        context.recorder.event("start", split="valid", plan=asdict(budget.plan), **evaluation.summary())
        context.record_violation(evaluation.violation)
        stop_if_undecidable(context)

    def _announce(self) -> None:
        """Record what is known before the first run: each note once, across all attempts."""
        problem, state = self.context.problem, self.context.state
        notes: list[tuple[str, Mapping[str, Any]]] = [("note", {"note": n}) for n in problem.method.notes]
        notes += [("outlook", problem.outlook)] if problem.outlook else []
        for number in range(state.announced, len(notes)):
            state.announced = number + 1
            event, facts = notes[number]
            self.context.recorder.event(event, **facts)


def final_configuration(state: RunState, folder: Path) -> Configuration:
    """Return the best configuration of a run; ``folder`` is the run's memory."""
    if state.search is None:
        raise ValueError("the run has no best configuration before the initial evaluation")
    return Configuration(state.search.best).located(folder)
