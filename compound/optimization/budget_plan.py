"""Divide a budget between decisions, jobs and proposal requests, and check that it suffices."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compound.core.engine import Usage
from compound.core.errors import DataError, DeclarationError
from compound.core.formatting import plural
from compound.evaluation.acceptance import least_improved, least_p, most_decisions
from compound.evaluation.evaluate import score_bounds
from compound.evaluation.metrics.custom import bounds_hint
from compound.execution.budget import MARGIN, Budget, Meter
from compound.execution.schedule import setting_values
from compound.graph.call_counts import count_calls
from compound.graph.component import Output
from compound.graph.composite import Composite
from compound.graph.configuration import component_of
from compound.graph.space import Choice, Float, Int
from compound.graph.system import System
from compound.optimization.method import (
    Job,
    JobPlan,
    Method,
    PlannedJob,
    PlanningOptimizer,
    Problem,
)
from compound.optimization.prices import Prices, estimate_prices
from compound.optimization.proposals import Proposals
from compound.optimization.scorer import has_free_repeats

MIN_EXAMPLES = 2  # minimum number of examples for comparing candidates
MINIBATCHES = 4  # minibatches per job: demonstrations, the incumbent, a candidate, and a reserve
MIN_RUNS = MIN_EXAMPLES * MINIBATCHES  # minimum system runs of a job that compares anything


@dataclass(frozen=True)
class BudgetPlan:
    """Division of a budget, computed once before the first candidate is seen."""

    decisions: int  # number of comparisons on the validation split
    jobs: int
    cost: float  # system runs per decision
    level: float  # the significance level of each decision; they sum to `alpha`


def make_plan(problem: Problem, left: float, jobs: int, prices: Prices) -> BudgetPlan:
    """Divide ``left`` system runs between decisions and jobs, at most half for decisions."""
    settings, method = problem.settings, problem.method
    cost = reserved_cost(problem, {key for job in all_jobs(method) for key in job.keys}, prices)
    most = settings.iterations if method.decisions is None else method.decisions
    least = 2 * cost + jobs * planned_job_runs(problem, prices)
    affordable = most if math.isinf(left) else int(left // least)
    decidable = most_decisions(len(problem.valid), settings.alpha, bounded=has_bounds(problem))
    decisions = max(1, min(most, affordable, decidable))
    return BudgetPlan(decisions, jobs, cost, settings.alpha / decisions)


def jobs_in_round(method: Method) -> int:
    """Return the number of jobs before each decision."""
    return len(method.jobs) if method.jobs_each is None else method.jobs_each


def all_jobs(method: Method) -> list[Job]:
    """Return all jobs of a method, with the opening one."""
    return [*([method.opening] if method.opening else []), *method.jobs]


def decision_cost(problem: Problem, keys: Collection[str], prices: Prices) -> float:
    """Return the system runs to reserve for a decision about a change of some parameters.

    A deterministic incumbent whose runs are cached is not rerun. The candidate executes the calls that
    depend on the change: their number is its price. Whole runs are reserved if the change may lead to
    more calls, by a condition, a loop or the items of a map. The last run needs the rest of a whole
    one, since each is reserved as one until it has ended.
    """
    system, settings = problem.system, problem.settings
    random = stochastic(system)
    fresh = random or not has_free_repeats(system)
    price = 1.0
    if not _may_add_calls(system, map(component_of, keys)):
        price = min(1.0, max(prices.keys(keys), estimate_prices(system).keys(keys)))
    repeats = settings.repeats if random else 1
    cost = len(problem.valid) * repeats * (price + fresh) + (1 - price)
    return round(cost, 9)  # sums of shares may exceed a whole number by rounding


def further_cost(problem: Problem, keys: Collection[str], prices: Prices) -> float:
    """Return the system runs for one further example of a decision, which both configurations execute."""
    dynamic = _may_add_calls(problem.system, map(component_of, keys))
    price = 1.0 if dynamic else min(1.0, prices.keys(keys))
    return (1 + price) * (problem.settings.repeats if stochastic(problem.system) else 1)


def reserved_cost(problem: Problem, keys: Collection[str], prices: Prices) -> float:
    """Return the system runs to reserve for a decision, with its second look if there may be one."""
    further = 0.0
    if problem.settings.accept == "supported":
        count = min(len(problem.further), len(problem.valid))
        further = count * further_cost(problem, keys, prices)
    return decision_cost(problem, keys, prices) + further


def _may_add_calls(system: System, components: Iterable[str]) -> bool:
    """Return whether a change of some components may change which calls a run makes."""
    changed = set(components)
    affected: set[str] = set()  # nodes whose outputs may change
    for name, node in system.nodes.items():
        sources = {source.node.name for source in node.sources if isinstance(source, Output)}
        condition = node.when.source if node.when else None
        if isinstance(condition, Output) and condition.node.name in affected:
            return True
        depends = node.component.name in changed or not sources.isdisjoint(affected)
        if isinstance(node.component, Composite):
            body = node.component.body
            inside = not changed.isdisjoint(body.components)
            if depends or (inside and node.component.over is None) or _may_add_calls(body, changed):
                return True
            depends = inside
        if depends:
            affected.add(name)
    return False


def planning_prices(problem: Problem) -> Prices:
    """Return the prices that a plan assumes before there are traces; unknown numbers of calls count as 1."""
    calls = count_calls(problem.system, [*problem.train, *problem.valid, *problem.test])
    return estimate_prices(problem.system, {name: count.most for name, count in calls.items()})


def planned_job_runs(problem: Problem, prices: Prices) -> float:
    """Return the minimum mean system runs of the jobs of a round; cheap candidates need fewer of them."""
    # relative to jobs whose candidates take whole runs
    jobs = problem.method.jobs
    sizes = [job.least(1, prices.keys(job.keys)) / 2 if job.step is None else 1.0 for job in jobs]
    relative = sum(sizes) / len(sizes) if sizes else 1.0
    return problem.method.least * problem.settings.minibatch * relative


def stochastic(system: System) -> bool:
    """Return whether two samples of one example can differ, under this or another configuration."""
    for component in system.components.values():
        values, changes = setting_values(component, system), list[dict[str, Any]]([{}])
        for name, space in component.parameters.items():
            if isinstance(space, Choice):
                changes += [{name: option} for option in space.options]
            elif isinstance(space, Int | Float):
                changes += [{name: space.low}, {name: space.high}]
        for node in system.all_nodes():  # the value of a wired setting is unknown, so not 0
            if node.component is component:
                changes += [{name: 1} for name in node.wires if name in component.settings]
        if not all(component.deterministic({**values, **change}) for change in changes):
            return True
    return False


def usable_runs(share: float, free: float, needed: float, *, tried: bool) -> float:
    """Return the system runs of a job: its share, unless that is too small to compare anything.

    A job may then take ``needed`` (`Job.least`) from the runs free for all jobs; with fewer, it uses
    smaller minibatches, down to half of its need, or to `MIN_RUNS` if nothing was compared yet (not
    ``tried``).

    >>> [usable_runs(5, free, needed=16, tried=True) for free in (40, 12, 5)]
    [16, 12, 0.0]
    """
    if share >= needed:
        return share
    if free >= needed:
        return needed
    return free if free >= minimum_runs(needed, tried=tried) else 0.0


def minimum_runs(needed: float, *, tried: bool) -> float:
    """Return the minimum system runs of a job."""
    return max(needed / 2, MIN_RUNS) if tried else min(needed, MIN_RUNS)


def job_minibatch(minibatch: int, runs: float, price: float = 1.0) -> int:
    """Return the size of a minibatch: the runs cover one for demonstrations and one each of 3 configurations.

    >>> job_minibatch(8, 100), job_minibatch(8, 13), job_minibatch(8, 13, price=0.25)
    (8, 3, 5)
    """
    minibatches = MINIBATCHES * (1 + price) / 2
    if runs >= minibatches * minibatch:
        return minibatch
    return max(min(MIN_EXAMPLES, minibatch), int(runs // minibatches))


def runs_needed(problem: Problem) -> float:
    """Return the minimum system runs for one job and one decision."""
    prices = planning_prices(problem)
    plan = make_plan(problem, 0.0, 1, prices)
    minibatch = problem.settings.minibatch
    least = min(
        minimum_job_runs(job, minibatch, prices, tried=False) for job in problem.method.jobs
    )
    return baseline_runs(problem) + plan.cost + least


def minimum_job_runs(job: Job, minibatch: int, prices: Prices, *, tried: bool) -> float:
    """Return the minimum system runs of a job; steps have a fixed size."""
    if job.step is not None:
        return job.step
    return minimum_runs(job.least(minibatch, prices.keys(job.keys)), tried=tried)


def baseline_runs(problem: Problem) -> int:
    """Return the system runs for evaluating the initial configuration."""
    return len(problem.valid) * (problem.settings.repeats if stochastic(problem.system) else 1)


def has_bounds(problem: Problem) -> bool:
    """Return whether the metric declares its range, on which the acceptance test depends."""
    return score_bounds(problem.metric, problem.rules) is not None


def check_decidable(problem: Problem) -> None:
    """Raise if no decision could accept a change, not even one that improves every validation example.

    Raises:
        DataError: the validation split is too small for ``alpha``; the hint states a sufficient
            size.
        DeclarationError: ``alpha`` is below the smallest p-value of the test for scores of unknown
            range.
    """
    n, alpha = len(problem.valid), problem.settings.alpha
    if most_decisions(n, alpha) == 0:
        raise DataError(
            f"{plural(n, 'validation example')} cannot show an improvement at alpha={alpha:g}: the smallest "
            f"p-value is {least_p(n):.3g}",
            hint=f"provide at least {least_improved(alpha)}; 40 is a good default",
        )
    if most_decisions(n, alpha, bounded=has_bounds(problem)) == 0:
        raise DeclarationError(
            f"no decision can accept a change at alpha={alpha:g}: without the bounds of metric "
            f"{problem.metric.name!r}, the smallest p-value is {least_p(n, bounded=False):.3g}",
            hint=f"declare the bounds of the metric ({bounds_hint(problem.metric)}), or raise optimize.alpha",
        )


def check_budget(problem: Problem) -> None:
    """Raise if the budget of system runs is too small for any job.

    Raises:
        DeclarationError: the budget is too small; the hint states a sufficient one.
    """
    limit, needed = problem.settings.budget.system_runs, runs_needed(problem)
    if limit is None or limit >= needed:
        return
    baseline = baseline_runs(problem)
    cost = make_plan(problem, 0.0, 1, planning_prices(problem)).cost
    fits = int((limit - (needed - baseline - cost)) / ((baseline + cost) / len(problem.valid)))
    fewer = f", or lower optimize.valid_size to {fits}"
    smaller = fewer if least_p(fits) <= problem.settings.alpha else ""
    raise DeclarationError(
        f"optimize.budget.system_runs={limit:g} is too small to try anything: with {len(problem.valid)} "
        f"validation examples, the initial evaluation takes {baseline} system runs, a decision {cost:g}, and "
        f"the smallest job {needed - baseline - cost:g}",
        hint=f"set at least {needed:g}{smaller}",
    )


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

    For each limit, it is estimated from the mean usage per run so far, minus `MARGIN`, after at most
    `MAX_SHARE` for requests. Until the first request was made, one is taken to use as much as a run.
    """
    budget, done = meter.budget, meter.system_runs
    lefts = [math.inf if budget.system_runs is None else budget.system_runs - done]
    asked = sum(tally.asked for tally in proposals.state.models.values())
    waiting = math.inf if proposals.state.left is None else proposals.state.left
    for name in LIMITED:
        limit = getattr(budget, name)
        if limit is None:
            continue
        used, theirs = getattr(meter.usage, name), getattr(proposals.state.usage, name)
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
