"""State and resources of a run, shared by its jobs, decisions and final test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from compound.core.example import Example
from compound.evaluation.evaluate import Evaluation, OnTrace, evaluate
from compound.execution.budget import Meter
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.configuration import Configuration
from compound.graph.system import System
from compound.optimization.budget_plan import stochastic
from compound.optimization.loop.budget import RunBudget
from compound.optimization.prices import Prices
from compound.optimization.problem import Problem
from compound.optimization.proposals import Proposals
from compound.optimization.runs.candidates import FILE, Candidates
from compound.optimization.runs.recorder import MEMORY_FOLDER, Recorder
from compound.optimization.runs.state import OptimizationState, SearchState

__all__ = ["RunContext"]

UNBOUNDED_NOTE = (
    "decisions use the test for scores of unknown range, which may accept rare large losses more often than "
    "alpha states; correct the metric, or the bounds it declares, and start a new run"
)


@dataclass
class RunContext:
    """A run in progress.

    Attributes:
        recorder: writes events and checkpoints; holds the state.
        executor: runs the system and charges the search.
    """

    problem: Problem
    recorder: Recorder
    meter: Meter
    test_meter: Meter
    executor: Executor
    proposals: Proposals
    candidates: Candidates
    _budget: RunBudget | None = field(default=None, init=False)

    @classmethod
    def open(cls, problem: Problem, recorder: Recorder) -> RunContext:
        """Create the context of a new or resumed run from the recorder's state."""
        budget = problem.settings.budget
        meter = Meter(
            budget.search(), whole=budget.total(), rest="the rest is reserved for the test split"
        )
        test_meter = Meter(
            budget.test(), whole=budget.total(), rest="the rest is reserved for the search"
        )
        test_meter.pause()  # its clock starts with the test
        executor = problem.open_executor(
            problem.engines,
            cache=recorder.cache,
            meter=meter,
            seed=problem.settings.seed,
            on_call=recorder.on_call,
            on_notice=recorder.on_notice,
            folder=recorder.run.path / MEMORY_FOLDER,
        )
        recorder.attach_meters(meter, test_meter)
        proposals = Proposals(meter, give_up=problem.settings.budget.max_proposal_failures)
        if (search := recorder.state.search) is not None:
            proposals.restore(search.ledger)
        limits = problem.settings.objective.limits
        candidates = Candidates(problem.system.configuration, recorder.state.candidates, limits)
        return cls(problem, recorder, meter, test_meter, executor, proposals, candidates)

    @property
    def state(self) -> OptimizationState:
        """State stored in checkpoints."""
        return self.recorder.state

    @property
    def search(self) -> SearchState:
        """State of the search, which must have started."""
        if self.state.search is None:
            raise RuntimeError("the initial configuration is not evaluated yet")
        return self.state.search

    @property
    def budget(self) -> RunBudget:
        """Budget of the search, which must be planned or restored."""
        if self._budget is None:
            parts = self.problem, self.meter, self.proposals
            search = self.search
            self._budget = RunBudget(*parts, search.plan, search.free_runs, search.prices)
        return self._budget

    def plan_budget(self, prices: Prices) -> RunBudget:
        """Divide the budget of a new search, given the prices of changes."""
        parts = self.problem, self.meter, self.proposals
        self._budget = RunBudget.divide(*parts, prices)
        return self._budget

    def working(self) -> System:
        """Return the system with all changes of jobs since the last decision."""
        return self.problem.bind({**self.search.best, **self.search.working})

    def samples(self, decision: int) -> list[int]:
        """Return sample indices unique to a decision; one index if the system is deterministic."""
        repeats = self.problem.settings.repeats
        if not stochastic(self.problem.system):
            return [0]
        return [decision * repeats + i for i in range(repeats)]

    async def validate(
        self,
        system: System,
        samples: Sequence[int],
        on_trace: OnTrace | None = None,
        *,
        examples: Sequence[Example] | None = None,
        partial: bool = False,
        max_failed: float | None = None,
    ) -> Evaluation:
        """Evaluate a configuration on validation examples."""
        problem, record = self.problem, self.recorder.trace("valid")
        rules = (
            problem.rules if max_failed is None else replace(problem.rules, max_failed=max_failed)
        )
        observed = self.candidates.observer("valid")([system])

        def receive(example: Example, trace: Trace) -> None:
            record(example, trace)
            observed(example, trace)
            if on_trace is not None:
                on_trace(example, trace)

        return await evaluate(
            self.executor,
            system,
            examples or problem.valid,
            problem.metric,
            samples=samples,
            rules=rules,
            on_trace=receive,
            partial=partial,
        )

    def write_candidates(self) -> None:
        """Write the file of candidates."""
        bounds = None if self.state.before is None else self.state.before.bounds
        text = self.candidates.text(Configuration(self.search.best).digest, bounds)
        self.recorder.run.write(FILE, text)

    def record_violation(self, *violations: str) -> None:
        """Record the first score outside the declared bounds; later decisions do not rely on the bounds."""
        for violation in filter(None, violations):
            if not self.state.bounds_violation:
                self.state.bounds_violation = violation
                self.recorder.event("note", note=f"{violation}; {UNBOUNDED_NOTE}")

    def record_news(self, job: int) -> None:
        """Record each note about proposal requests once."""
        news = self.proposals.news
        while news:
            note = news.pop(0)
            self.search.ledger = self.proposals.snapshot()  # without the note being recorded
            self.recorder.event("proposals", job=job, note=note)
