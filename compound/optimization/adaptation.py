"""Adapt the jobs of a method to the number of train examples and to the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compound.optimization.allowance import allowance
from compound.optimization.method import Job, Method
from compound.optimization.problem import Problem
from compound.optimization.prospects import plan_by_runs, prospects


def with_method(problem: Problem, method: Method) -> Problem:
    """Return the problem with a method whose jobs fit the train examples and the budget.

    A training step uses no more examples than there are. `Method.joint` replaces the jobs of its parameters
    if the system runs of the budget are too few for one of them, but not for the joint job.
    """
    jobs = [job.within(len(problem.train)) for job in method.jobs]
    separate = replace(problem, method=replace(method, jobs=jobs))
    covered = _covered(separate.method)
    if len(covered) < 2 or not _leaves_out(separate, covered):
        return separate
    joint = replace(problem, method=searched_jointly(separate.method))
    return separate if _leaves_out(joint, joint.method.jobs[:1]) else joint


def searched_jointly(method: Method) -> Method:
    """Return a method whose first job, the joint one, replaces those of its parameters."""
    assert method.joint is not None
    covered = _covered(method)
    joint = replace(method.joint, weight=sum(job.weight for job in covered))
    others = [job for job in method.jobs if job not in covered]
    return replace(method, jobs=[joint, *others], least=Method.least, separate=method)


def follow(problem: Problem, *, joint: bool) -> Problem:
    """Return the problem with the jobs of a run that is resumed, which may have had another budget."""
    method = problem.method
    if joint and method.separate is None:
        return replace(problem, method=searched_jointly(method))
    if not joint and method.separate is not None:
        return replace(problem, method=method.separate)
    return problem


def _covered(method: Method) -> list[Job]:
    """Return the jobs that the joint job can replace."""
    keys = set(method.joint.keys if method.joint else ())
    return [job for job in method.jobs if set(job.keys) <= keys]


def _leaves_out(problem: Problem, jobs: Sequence[Job]) -> bool:
    """Return whether one of the jobs is planned without the system runs to compare anything."""
    plan, free = plan_by_runs(problem)
    found = prospects(problem, plan, free, allowance(problem, free, plan.decisions))
    names = {(job.optimizer, job.keys) for job in jobs}
    return any(each.tries_nothing for each in found if (each.job.optimizer, each.job.keys) in names)
