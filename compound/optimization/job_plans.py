"""Plan the proposal requests of a run, and share limits between them and system runs.

The dry run and the loop compute the numbers of requests in the same way, before the first candidate
is seen, and the loop enforces them on jobs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compound.core.engine import Usage
from compound.execution.budget import MARGIN, Budget, Meter
from compound.graph.call_counts import count_calls
from compound.optimization.method import Job, JobPlan, PlannedJob, PlanningOptimizer
from compound.optimization.prices import estimate_prices
from compound.optimization.proposals import Proposals

if TYPE_CHECKING:
    from compound.optimization.problem import Problem

MAX_SHARE = 0.5  # maximum share of a job's remaining calls, tokens or cost for its proposals
LIMITED = ("calls", "tokens", "cost")


@dataclass(frozen=True)
class RepeatedJob:
    """Jobs of one kind in a run."""

    job: Job
    times: int
    plan: JobPlan | None


def plan_jobs(problem: Problem, free: float, decisions: int) -> list[RepeatedJob]:
    """Return the jobs of a run with their requests."""
    method, jobs = problem.method, problem.method.jobs
    weights = sum(job.weight for job in jobs)
    times = problem.settings.iterations
    if method.jobs_each is not None:
        times = math.ceil(decisions * method.jobs_each / max(1, len(jobs)))
    shares = [(job, times, free * job.weight / weights / times) for job in jobs]
    if method.opening is not None:
        shares.insert(0, (method.opening, 1, free * method.opening.weight))
    return [RepeatedJob(job, n, plan_job(problem, job, runs)) for job, n, runs in shares]


def plan_job(
    problem: Problem, job: Job, runs: float, minibatch: int | None = None
) -> JobPlan | None:
    """Return the plan of a job with ``runs`` system runs; ``None`` if its optimizer states none."""
    optimizer = problem.method.optimizers[job.optimizer]
    if not isinstance(optimizer, PlanningOptimizer):
        return None
    settings, system = problem.settings, problem.system
    calls = count_calls(system, [*problem.train, *problem.valid, *problem.test])
    prices = estimate_prices(system, {name: count.most for name, count in calls.items()})
    return optimizer.plan(
        PlannedJob(
            system=system,
            keys=job.keys,
            train=problem.train,
            minibatch=settings.minibatch if minibatch is None else minibatch,
            candidates=settings.candidates,
            runs=runs,
            calls=calls,
            prices=prices,
        )
    )


def total_requests(jobs: Sequence[RepeatedJob]) -> int | None:
    """Return the number of requests of a run; ``None`` if it is unknown or unlimited."""
    counts = [None if each.plan is None else each.plan.most(each.times) for each in jobs]
    return None if None in counts else sum(filter(None, counts))


def runs_left(meter: Meter, proposals: Proposals) -> float:
    """Return the system runs left in a budget after the outstanding proposal requests.

    For each limit, the number is estimated from the average usage per run so far, minus `MARGIN`.
    Of calls, tokens and cost, outstanding requests are set aside first: at most `MAX_SHARE` of the
    remainder. Until the first request was made, one is taken to use as much as a run does.
    """
    budget, done = meter.budget, meter.system_runs
    lefts = [math.inf if budget.system_runs is None else budget.system_runs - done]
    asked = sum(tally.asked for tally in proposals.tallies.values())
    waiting = math.inf if proposals.left is None else proposals.left
    for name in LIMITED:
        limit = getattr(budget, name)
        if limit is None:
            continue
        used, theirs = getattr(meter.usage, name), getattr(proposals.usage, name)
        if done and used > theirs:
            one_run = (used - theirs) / done
            one = theirs / asked if asked else 1 if name == "calls" else one_run
            to_come = one * waiting if one and waiting else 0.0
            free = limit - used - min(MAX_SHARE * (limit - used), to_come)
            lefts.append(free / one_run * (1 - MARGIN))
    if budget.minutes is not None and done and meter.seconds:
        lefts.append((budget.minutes * 60 - meter.seconds) / (meter.seconds / done) * (1 - MARGIN))
    return max(0.0, min(lefts))


def proposal_caps(budget: Budget, used: Usage, proposals: Usage) -> dict[str, float]:
    """Return, for each limit, the maximum total usage of proposal requests by the end of a job."""
    found = {}
    for name in LIMITED:
        limit = getattr(budget, name)
        if limit is not None:
            found[name] = getattr(proposals, name) + MAX_SHARE * max(
                0.0, limit - getattr(used, name)
            )
    return found


def is_within(usage: Usage, most: Mapping[str, float]) -> bool:
    """Return whether usage is within the limits given by `proposal_caps`."""
    return all(getattr(usage, name) <= limit + 1e-12 for name, limit in most.items())
