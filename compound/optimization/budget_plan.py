"""Divide a budget between decisions and jobs, and check that it suffices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compound.errors import DeclarationError
from compound.evaluation.power import least_p
from compound.execution.schedule import setting_values
from compound.graph.component import Component
from compound.graph.space import Choice, Float, Int
from compound.graph.system import System
from compound.optimization.method import Job
from compound.optimization.scorer import has_free_repeats

if TYPE_CHECKING:
    from compound.optimization.problem import Problem

MIN_EXAMPLES = 2  # minimum number of examples for comparing candidates
MINIBATCHES = 4  # minibatches per job: demonstrations, the incumbent, a candidate, and a reserve
MIN_RUNS = MIN_EXAMPLES * MINIBATCHES  # minimum system runs of a job that compares anything


@dataclass(frozen=True)
class BudgetPlan:
    """Division of a budget, computed once before the first candidate is seen.

    Attributes:
        decisions: number of comparisons on the validation split.
        jobs: number of jobs before each decision.
        cost: system runs per decision.
        level: the significance level of each decision; they sum to ``alpha``.
    """

    decisions: int
    jobs: int
    cost: float
    level: float


def make_plan(problem: Problem, left: float, jobs: int) -> BudgetPlan:
    """Divide ``left`` system runs: a round of all jobs before each decision, at most half for decisions.

    A deterministic incumbent whose runs are cached need not be rerun, which halves the cost of a
    decision.
    """
    settings = problem.settings
    repeats = settings.repeats if stochastic(problem.system) else 1
    fresh = stochastic(problem.system) or not has_free_repeats(problem.system)
    cost = len(problem.valid) * repeats * (2 if fresh else 1)
    least = 2 * cost + jobs * problem.method.least * settings.minibatch
    affordable = settings.iterations if left == float("inf") else int(left // least)
    decidable = int(settings.alpha / least_p(len(problem.valid)))
    most = settings.iterations if problem.method.decisions is None else problem.method.decisions
    decisions = max(1, min(most, affordable, decidable))
    return BudgetPlan(decisions, jobs, cost, settings.alpha / decisions)


def stochastic(system: System) -> bool:
    """Return whether two samples of one example can differ, under this or another configuration."""
    return any(
        not component.deterministic({**values, **change})
        for component in system.components.values()
        for values in [setting_values(component, system)]
        for change in [{}, *_extremes(component), *_wired(component, system)]
    )


def _extremes(component: Component) -> Iterator[dict[str, Any]]:
    """Yield extreme values of each parameter: a temperature that starts at 0 may be changed."""
    for name, space in component.parameters.items():
        if isinstance(space, Choice):
            yield from ({name: option} for option in space.options)
        elif isinstance(space, Int | Float):
            yield from ({name: space.low}, {name: space.high})


def _wired(component: Component, system: System) -> Iterator[dict[str, Any]]:
    """Yield a value for each wired setting: its actual value is unknown, so a nonzero one is assumed."""
    for node in system.all_nodes():
        if node.component is component:
            yield from ({name: 1} for name in node.wires if name in component.settings)


def usable_runs(share: float, free: float, needed: float, *, tried: bool) -> float:
    """Return the system runs of a job: its share, unless that is too small to compare anything.

    Runs that no job can use would remain unspent. A job may therefore take what it needs from the runs free
    for all jobs; with fewer, it uses smaller minibatches, down to half of its need, or to `MIN_RUNS` if
    nothing was compared yet.

    Args:
        share: the job's share.
        free: system runs left for all jobs.
        needed: `Job.least`.
        tried: whether a job of the run has compared anything yet.

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


def job_minibatch(minibatch: int, runs: float) -> int:
    """Return the minibatch size of a job with ``runs`` system runs.

    >>> job_minibatch(8, 100), job_minibatch(8, 13)
    (8, 3)
    """
    return (
        minibatch
        if runs >= MINIBATCHES * minibatch
        else max(min(MIN_EXAMPLES, minibatch), int(runs // MINIBATCHES))
    )


def runs_needed(problem: Problem) -> float:
    """Return the minimum system runs for one job and one decision."""
    plan = make_plan(problem, 0.0, 1)
    minibatch = problem.settings.minibatch
    least = min(minimum_job_runs(job, minibatch, tried=False) for job in problem.method.jobs)
    return baseline_runs(problem) + plan.cost + least


def minimum_job_runs(job: Job, minibatch: int, *, tried: bool) -> float:
    """Return the minimum system runs of a job; steps have a fixed size."""
    return job.step if job.step is not None else minimum_runs(job.least(minibatch), tried=tried)


def baseline_runs(problem: Problem) -> int:
    """Return the system runs for evaluating the initial configuration."""
    return len(problem.valid) * (problem.settings.repeats if stochastic(problem.system) else 1)


def check_budget(problem: Problem) -> None:
    """Raise if the budget of system runs is too small for any job.

    Raises:
        DeclarationError: the budget is too small; the hint states a sufficient one.
    """
    limit, needed = problem.settings.budget.system_runs, runs_needed(problem)
    if limit is None or limit >= needed:
        return
    baseline, cost = baseline_runs(problem), make_plan(problem, 0.0, 1).cost
    fits = int((limit - (needed - baseline - cost)) / ((baseline + cost) / len(problem.valid)))
    smaller = f", or lower optimize.valid_size to {fits}" if least_p(fits) <= problem.settings.alpha else ""
    raise DeclarationError(
        f"optimize.budget.system_runs={limit:g} is too small to try anything: with {len(problem.valid)} "
        f"validation examples, the initial evaluation takes {baseline} system runs, a decision {cost:g}, and "
        f"the smallest job {needed - baseline - cost:g}",
        hint=f"set at least {needed:g}{smaller}",
    )
