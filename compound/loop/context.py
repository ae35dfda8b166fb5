"""The parts of a run that its jobs, its decisions and its test share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from compound.evaluation.evaluate import Evaluation, evaluate
from compound.execution.budget import Meter
from compound.execution.executor import Executor
from compound.graph.system import System
from compound.loop.budget import RunBudget
from compound.optimization.budget_plan import stochastic
from compound.optimization.problem import Problem
from compound.optimization.proposals import Proposals
from compound.runs.recorder import MEMORY_FOLDER, Recorder
from compound.runs.state import RunState, SearchState

__all__ = ["RunContext"]


@dataclass
class RunContext:
    """One run under way.

    Attributes:
        problem: what is optimized, and how.
        recorder: writes events and checkpoints; holds the state.
        meter: spending of the search.
        test_meter: spending of the test split.
        executor: runs the system; charges the search.
        proposals: the ledger of requests for proposals.
    """

    problem: Problem
    recorder: Recorder
    meter: Meter
    test_meter: Meter
    executor: Executor
    proposals: Proposals
    _budget: RunBudget | None = field(default=None, init=False)

    @classmethod
    def open(cls, problem: Problem, recorder: Recorder) -> RunContext:
        """Prepare to run, or to continue, what the recorder's state says."""
        budget = problem.settings.budget
        meter = Meter(budget.search(), whole=budget.total(), rest="the rest is kept for the test split")
        test_meter = Meter(budget.test(), whole=budget.total(), rest="the rest is for the search")
        test_meter.pause()  # its minutes begin with the test
        executor = Executor(
            problem.engines,
            cache=recorder.cache,
            meter=meter,
            seed=problem.settings.seed,
            on_call=recorder.called,
            on_notice=recorder.noticed,
            folder=recorder.run.path / MEMORY_FOLDER,
        )
        recorder.watch(meter, test_meter)
        proposals = Proposals(meter, give_up=problem.settings.budget.max_proposal_failures)
        if recorder.state.search is not None:
            proposals.restore(recorder.state.search.ledger)
        return cls(problem, recorder, meter, test_meter, executor, proposals)

    @property
    def state(self) -> RunState:
        """The state that checkpoints hold."""
        return self.recorder.state

    @property
    def search(self) -> SearchState:
        """The state of the search, which has begun."""
        if self.state.search is None:
            raise RuntimeError("the starting configuration is not measured yet")
        return self.state.search

    @property
    def budget(self) -> RunBudget:
        """The system runs of the search, as planned; they are planned when first asked for."""
        if self._budget is None:
            parts = self.problem, self.meter, self.proposals, self.executor.engine
            search = self.state.search
            self._budget = (
                RunBudget.divide(*parts)
                if search is None
                else RunBudget(*parts, search.plan, search.free_runs)
            )
        return self._budget

    def working(self) -> System:
        """Return the system with everything that jobs changed since the last decision."""
        return self.problem.bind({**self.search.best, **self.search.working})

    def samples(self, decision: int) -> list[int]:
        """Return sample indices that no other decision uses; without chance, one is enough."""
        repeats = self.problem.settings.repeats
        if not stochastic(self.problem.system):
            return [0]
        return [decision * repeats + i for i in range(repeats)]

    async def validate(self, system: System, samples: Sequence[int]) -> Evaluation:
        """Measure a configuration on the validation split."""
        problem = self.problem
        return await evaluate(
            self.executor, system, problem.valid, problem.metric, samples=samples, rules=problem.rules,
            on_trace=self.recorder.trace("valid"),
        )  # fmt: skip

    def record_news(self, job: int) -> None:
        """Record each note about requests for proposals once."""
        news = self.proposals.news
        while news:
            note = news.pop(0)
            self.search.ledger = self.proposals.snapshot()  # without the note that is recorded now
            self.recorder.event("proposals", job=job, note=note)
