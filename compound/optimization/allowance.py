"""Limits on proposal requests, and the system runs that remain besides them.

The dry run and the loop compute them in the same way, before the first candidate is seen, and the loop
enforces them on jobs. The numbers of the dry run are therefore bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compound.engine import Engine, Usage
from compound.execution.budget import MARGIN, Budget, Meter
from compound.graph.bounds import CallBound, scaled
from compound.graph.space import Text
from compound.graph.survey import RunLimits, Survey, survey
from compound.optimization.bounds import Amount, Bounded, JobBound, Outlook, amount_of
from compound.optimization.method import Job
from compound.optimization.prices import estimate_prices
from compound.optimization.proposals import Proposals

if TYPE_CHECKING:
    from collections.abc import Callable

    from compound.optimization.problem import Problem

MAX_SHARE = 0.5  # maximum share of a job's remaining calls, tokens or cost for its proposals
LIMITED = ("calls", "tokens", "cost")


@dataclass(frozen=True)
class JobAllowance:
    """Proposal requests allowed to all jobs of one kind.

    Attributes:
        job: the optimizer and keys of the jobs.
        times: number of such jobs in the plan.
        bound: bound of one job; ``None`` if its optimizer declares none.
    """

    job: Job
    times: int
    bound: JobBound | None

    @property
    def requests(self) -> Sequence[CallBound]:
        """Requests of all these jobs."""
        found = self.bound.requests if self.bound else ()
        return [replace(request, calls=request.calls * self.times) for request in found]


@dataclass(frozen=True)
class Allowance:
    """Proposal requests allowed to the jobs of a run, and the longest values of the system they work on."""

    jobs: Sequence[JobAllowance]
    survey: Survey
    outlook: Outlook

    @property
    def undeclared(self) -> list[str]:
        """Optimizers that declare no bound."""
        return sorted({allowed.job.optimizer for allowed in self.jobs if allowed.bound is None})

    @property
    def calls(self) -> int | None:
        """Number of requests of the whole run; ``None`` if an optimizer declares no bound."""
        if self.undeclared:
            return None
        return math.ceil(sum(request.calls for allowed in self.jobs for request in allowed.requests))


def allowance(
    problem: Problem, free: float, decisions: int, *, read_corpora: bool = False, lms: tuple[str, ...] = ()
) -> Allowance:
    """Compute the requests allowed to the jobs of a run.

    Args:
        problem: the problem, including the method.
        free: system runs available for jobs.
        decisions: number of planned decisions.
        read_corpora: whether to read corpora for their longest passages.
        lms: the system's default model.
    """
    examples = [*problem.train, *problem.valid, *problem.test]
    limits = RunLimits(examples, lms, problem.system.configuration, read_corpora=read_corpora)
    planned = _planned(problem, free, decisions)
    first = [_bound(problem, job, share, _outlook(problem, limits)) for job, _, share in planned]
    growth = max((bound.growth for bound in first if bound), default=0)
    written = max((bound.written for bound in first if bound), default=0)
    if any(bound is None for bound in first):
        growth = math.inf
    limits = replace(limits, growth=growth, written=written)
    outlook = _outlook(problem, limits)
    found = [JobAllowance(job, times, _bound(problem, job, share, outlook)) for job, times, share in planned]
    return Allowance(found, survey(problem.system, limits), outlook)


def _planned(problem: Problem, free: float, decisions: int) -> list[tuple[Job, int, float]]:
    """Return each kind of job, its number of repetitions, and the system runs of each."""
    method = problem.method
    jobs, weights = method.jobs, sum(job.weight for job in method.jobs)
    times = problem.settings.iterations
    if method.jobs_each is not None:
        times = math.ceil(decisions * method.jobs_each / max(1, len(jobs)))
    opening = [] if method.opening is None else [(method.opening, 1, free * method.opening.weight)]
    return [*opening, *((job, times, free * job.weight / weights / times) for job in jobs)]


def _outlook(problem: Problem, limits: RunLimits) -> Outlook:
    found = survey(problem.system, limits)
    texts = {
        key: limits.text(key, space)
        for key, space in problem.system.parameters.items()
        if isinstance(space, Text)
    }
    settings = problem.settings
    return Outlook(
        problem.system, (), problem.train, settings.minibatch, settings.candidates, math.inf,
        found.uses, found.outputs, texts,
        estimate_prices(problem.system, {name: use.calls for name, use in found.uses.items()}),
    )  # fmt: skip


def _bound(problem: Problem, job: Job, runs: float, outlook: Outlook) -> JobBound | None:
    optimizer = problem.method.optimizers[job.optimizer]
    if not isinstance(optimizer, Bounded):
        return None
    return optimizer.bound(replace(outlook, keys=job.keys, runs=runs))


def requests_allowed(problem: Problem, job: Job, runs: float, outlook: Outlook) -> int | None:
    """Return the number of requests allowed to a job with ``runs`` system runs; ``None`` without a bound."""
    bound = _bound(problem, job, runs, outlook)
    return None if bound is None else math.ceil(bound.calls)


def max_request_cost(
    requests: Sequence[CallBound], find: Callable[[str], Engine], own: tuple[str, ...]
) -> Amount:
    """Return the maximum cost of any of the requests, component-wise."""
    found = Amount()
    for request in requests:
        for lm in request.lms or own:
            found = found.maximum(amount_of(find(lm), request))
    return found


def runs_left(meter: Meter, proposals: Proposals, each: Amount) -> float:
    """Return the system runs left in a budget after the outstanding proposal requests.

    For each limit, the number is estimated from the average usage per run so far, minus `MARGIN`. Of calls,
    tokens and cost, outstanding requests are set aside first: at most `MAX_SHARE` of the remainder.

    Args:
        meter: meter of the search.
        proposals: ledger with the requests made so far, and the number of requests left.
        each: upper bound of one request, used until the first request.
    """
    budget, done = meter.budget, meter.system_runs
    lefts = [math.inf if budget.system_runs is None else budget.system_runs - done]
    asked = sum(tally.asked for tally in proposals.tallies.values())
    for name in LIMITED:
        limit = getattr(budget, name)
        if limit is None:
            continue
        used, theirs = getattr(meter.usage, name), getattr(proposals.usage, name)
        mean = theirs / asked if asked else (getattr(each, name) or 0)
        to_come = scaled(mean, math.inf if proposals.left is None else proposals.left)
        if done and used > theirs:
            free = limit - used - min(MAX_SHARE * (limit - used), to_come)
            lefts.append(free / ((used - theirs) / done) * (1 - MARGIN))
    if budget.minutes is not None and done and meter.seconds:
        lefts.append((budget.minutes * 60 - meter.seconds) / (meter.seconds / done) * (1 - MARGIN))
    return max(0.0, min(lefts))


def proposal_caps(budget: Budget, used: Usage, proposals: Usage) -> dict[str, float]:
    """Return, for each limit, the maximum total usage of proposal requests by the end of a job."""
    found = {}
    for name in LIMITED:
        limit = getattr(budget, name)
        if limit is not None:
            found[name] = getattr(proposals, name) + MAX_SHARE * max(0.0, limit - getattr(used, name))
    return found


def is_within(usage: Usage, most: Mapping[str, float]) -> bool:
    """Return whether usage is within the limits given by `proposal_caps`."""
    return all(getattr(usage, name) <= limit + 1e-12 for name, limit in most.items())
