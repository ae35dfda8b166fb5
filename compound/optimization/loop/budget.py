"""Budget of a search in system runs: its division between decisions and jobs, and the remainder."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection

from compound.execution.budget import Meter
from compound.optimization.budget_plan import (
    BudgetPlan,
    all_jobs,
    make_plan,
    minimum_job_runs,
    reserved_cost,
    usable_runs,
)
from compound.optimization.job_plans import plan_jobs, runs_left, total_requests
from compound.optimization.method import Job
from compound.optimization.prices import Prices
from compound.optimization.problem import Problem
from compound.optimization.proposals import Proposals
from compound.optimization.runs.state import SearchState

__all__ = ["RunBudget"]


class RunBudget:
    """Budget of a search, in system runs."""

    def __init__(
        self,
        problem: Problem,
        meter: Meter,
        proposals: Proposals,
        plan: BudgetPlan,
        free_runs: float | None,
        prices: Prices,
    ) -> None:
        self._problem = problem
        self._meter = meter
        self._proposals = proposals
        self.plan = plan
        self.free_runs = free_runs
        self.prices = prices
        self._costs: dict[frozenset[str], float] = {}

    @classmethod
    def divide(
        cls,
        problem: Problem,
        meter: Meter,
        proposals: Proposals,
        prices: Prices,
    ) -> RunBudget:
        """Plan a new search: decisions, jobs, and their proposal requests."""
        method = problem.method
        jobs = len(method.jobs) if method.jobs_each is None else method.jobs_each
        left = meter.remaining_runs()
        for _ in range(2):  # requests and runs depend on each other
            plan = make_plan(problem, left, jobs, prices)
            free = max(0.0, left - plan.decisions * plan.cost)
            known = free if math.isfinite(free) else None
            found = cls(problem, meter, proposals, plan, known, prices)
            proposals.left = total_requests(plan_jobs(problem, free, plan.decisions))
            left = found.runs_left()
        return found

    def runs_left(self) -> float:
        """Return the system runs left in the budget after the outstanding proposal requests."""
        return runs_left(self._meter, self._proposals)

    def free(self, search: SearchState, job: Job | None = None) -> float:
        """Return the system runs left for jobs, excluding those reserved for decisions."""
        later = self.plan.decisions - search.decisions - 1
        reserved = self._next_decision(search, job) + later * self.plan.cost
        return max(0.0, self.runs_left() - reserved)

    def _next_decision(self, search: SearchState, job: Job | None) -> float:
        """Return the system runs to reserve for the next decision.

        After the last job of a round, it is about the parameters that the jobs of the round
        changed.
        """
        is_last = job is not None and search.jobs_in_round == self.plan.jobs - 1
        keys = {*search.working, *(job.keys if job is not None and is_last else self._keys)}
        return self._decision_cost(frozenset(keys))

    def _decision_cost(self, keys: frozenset[str]) -> float:
        if keys not in self._costs:
            self._costs[keys] = reserved_cost(self._problem, keys, self.prices)
        return self._costs[keys]

    @functools.cached_property
    def _keys(self) -> Collection[str]:
        """The parameters of all jobs."""
        return frozenset(key for job in all_jobs(self._problem.method) for key in job.keys)

    def fits_another_job(self, search: SearchState) -> bool:
        """Return whether the runs that are free allow another job."""
        return any(self.free(search, job) >= least for job, least in self._least(search))

    def smallest_job(self, search: SearchState) -> float:
        """Return the minimum system runs of any job."""
        return min(least for _, least in self._least(search))

    def _least(self, search: SearchState) -> list[tuple[Job, float]]:
        """Return each job with its minimum system runs."""
        minibatch, compared = self._problem.settings.minibatch, has_compared(search)
        return [
            (job, minimum_job_runs(job, minibatch, self.prices, tried=compared))
            for job in self._jobs().values()
        ]

    def runs_of(self, job: Job, opening: Job | None, search: SearchState) -> float:
        """Return the system runs of a job, or 0 if they would be too few."""
        declared = self._jobs()[job.optimizer, job.keys]
        needed = declared.least(self._problem.settings.minibatch, self.prices.keys(declared.keys))
        if opening is not None or declared.step is not None:
            share = (
                self._share(job, search) if opening is None else self.free(search) * opening.weight
            )
            return share if share >= needed else 0.0
        free = self.free(search, job)
        return usable_runs(self._share(job, search), free, needed, tried=has_compared(search))

    def _jobs(self) -> dict[tuple[str, tuple[str, ...]], Job]:
        """Return the method's jobs by optimizer and keys."""
        return {(job.optimizer, job.keys): job for job in all_jobs(self._problem.method)}

    def _share(self, job: Job, search: SearchState) -> float:
        """Return the job's share, by weight, of the runs left for jobs."""
        weights = {(j.optimizer, j.keys): j.weight for j in self._problem.method.jobs}
        part = self.plan.jobs / len(weights)  # share of all jobs before each decision
        finished = search.history[len(search.history) - search.jobs_in_round :]
        worked = sum(weights[record.optimizer, record.keys] for record in finished)
        total = sum(weights.values()) * part
        later_decisions = self.plan.decisions - search.decisions - 1
        ahead = max(total - worked, job.weight) + later_decisions * total
        return self.free(search, job) * job.weight / ahead


def has_compared(search: SearchState) -> bool:
    """Return whether a job has compared candidates yet."""
    return any(record.runs for record in search.history)
