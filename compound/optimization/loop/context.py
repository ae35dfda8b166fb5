"""State, resources and budget of a run, shared by its jobs, decisions and final test."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from compound.core.errors import CompoundError
from compound.core.example import Example
from compound.evaluation.evaluate import Evaluation, OnTrace, evaluate
from compound.execution.budget import Meter
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.configuration import Configuration
from compound.graph.system import System
from compound.optimization.budget_plan import (
    BudgetPlan,
    all_jobs,
    jobs_in_round,
    make_plan,
    minimum_job_runs,
    plan_jobs,
    reserved_cost,
    runs_left,
    stochastic,
    total_requests,
    usable_runs,
)
from compound.optimization.method import Job, Problem
from compound.optimization.prices import Prices
from compound.optimization.proposals import Proposals
from compound.optimization.runs.candidates import FILE, Candidates
from compound.optimization.runs.recorder import MEMORY_FOLDER, Recorder
from compound.optimization.runs.state import OptimizationState, SearchState


@dataclass
class RunBudget:
    """Budget of a search, in system runs."""

    problem: Problem
    meter: Meter
    proposals: Proposals
    plan: BudgetPlan
    free_runs: float | None
    prices: Prices
    _costs: dict[frozenset[str], float] = field(default_factory=dict, init=False)

    @classmethod
    def divide(
        cls, problem: Problem, meter: Meter, proposals: Proposals, prices: Prices
    ) -> RunBudget:
        """Plan a new search: decisions, jobs, and their proposal requests."""
        left = meter.remaining_runs()
        for _ in range(2):  # requests and runs depend on each other
            plan = make_plan(problem, left, jobs_in_round(problem.method), prices)
            free = max(0.0, left - plan.decisions * plan.cost)
            known = free if math.isfinite(free) else None
            found = cls(problem, meter, proposals, plan, known, prices)
            proposals.state.left = total_requests(plan_jobs(problem, free, plan.decisions))
            left = found.runs_left()
        return found

    def runs_left(self) -> float:
        """Return the system runs left in the budget after the outstanding proposal requests."""
        return runs_left(self.meter, self.proposals)

    def free(self, search: SearchState, job: Job | None = None) -> float:
        """Return the system runs left for jobs, excluding those reserved for decisions.

        After the last job of a round, the next decision is about the parameters that its jobs changed.
        """
        later = self.plan.decisions - search.decisions - 1
        is_last = job is not None and search.jobs_in_round == self.plan.jobs - 1
        keys = {*search.working, *(job.keys if job is not None and is_last else self._keys)}
        reserved = self._decision_cost(frozenset(keys)) + later * self.plan.cost
        return max(0.0, self.runs_left() - reserved)

    def _decision_cost(self, keys: frozenset[str]) -> float:
        if keys not in self._costs:
            self._costs[keys] = reserved_cost(self.problem, keys, self.prices)
        return self._costs[keys]

    @functools.cached_property
    def _keys(self) -> Collection[str]:
        return frozenset(key for job in all_jobs(self.problem.method) for key in job.keys)

    def fits_another_job(self, search: SearchState) -> bool:
        """Return whether the runs that are free allow another job."""
        return any(self.free(search, job) >= least for job, least in self._least(search))

    def smallest_job(self, search: SearchState) -> float:
        """Return the minimum system runs of any job."""
        return min(least for _, least in self._least(search))

    def _least(self, search: SearchState) -> list[tuple[Job, float]]:
        minibatch, compared = self.problem.settings.minibatch, has_compared(search)
        return [
            (job, minimum_job_runs(job, minibatch, self.prices, tried=compared))
            for job in self._jobs().values()
        ]

    def runs_of(self, job: Job, opening: Job | None, search: SearchState) -> float:
        """Return the system runs of a job, or 0 if they would be too few."""
        declared = self._jobs()[job.optimizer, job.keys]
        needed = declared.least(self.problem.settings.minibatch, self.prices.keys(declared.keys))
        if opening is not None or declared.step is not None:
            share = (
                self._share(job, search) if opening is None else self.free(search) * opening.weight
            )
            return share if share >= needed else 0.0
        free = self.free(search, job)
        return usable_runs(self._share(job, search), free, needed, tried=has_compared(search))

    def _jobs(self) -> dict[tuple[str, tuple[str, ...]], Job]:
        return {(job.optimizer, job.keys): job for job in all_jobs(self.problem.method)}

    def _share(self, job: Job, search: SearchState) -> float:
        weights = {(j.optimizer, j.keys): j.weight for j in self.problem.method.jobs}
        part = self.plan.jobs / len(weights)  # share of all jobs before each decision
        finished = search.history[len(search.history) - search.jobs_in_round :]
        worked = sum(weights[record.optimizer, record.keys] for record in finished)
        total = sum(weights.values()) * part
        later_decisions = self.plan.decisions - search.decisions - 1
        ahead = max(total - worked, job.weight) + later_decisions * total
        return self.free(search, job) * job.weight / ahead


def must_load(executor: Executor, system: System) -> bool:
    """Return whether a model of a system is loaded before its first call, and is not yet."""
    with suppress(CompoundError):  # the first call reports it
        return not all(getattr(executor.engine(lm), "loaded", True) for lm in system.lms)
    return False


def has_compared(search: SearchState) -> bool:
    """Return whether a job has compared candidates yet."""
    return any(record.runs for record in search.history)


UNBOUNDED_NOTE = (
    "decisions use the test for scores of unknown range, which may accept rare large losses more often than "
    "alpha states; correct the metric, or the bounds it declares, and start a new run"
)


@dataclass
class RunContext:
    """A run in progress."""

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
            on_notice=lambda note: recorder.tell("notice", note=note),
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

    def enter(self, phase: str, rest: float | None = None) -> None:
        """Tell the listener what the run does now; ``rest`` are the system runs after the last job."""
        problem, search = self.problem, self.state.search
        total, test = problem.settings.budget.system_runs, 2 * len(problem.test)
        if phase == "testing":
            unchanged = search and self.problem.system.configuration.to_json() == search.best
            total, test = self.meter.system_runs, test // 2 if unchanged else test
        test *= len(self.samples(0))
        self.recorder.tell(
            "phase",
            name=phase,
            best=search and search.incumbent.mean,
            total=None if total is None else total + test,
            rest=None if rest is None else rest + test,
            loads=must_load(self.executor, problem.system),
        )

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
        news = self.proposals.state.news
        while news:
            note = news.pop(0)
            self.search.ledger = self.proposals.snapshot()  # without the note being recorded
            self.recorder.event("proposals", job=job, note=note)
