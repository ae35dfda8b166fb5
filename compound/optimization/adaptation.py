"""Adapt the jobs of a method to the number of train examples and to the budget."""

from __future__ import annotations

from dataclasses import replace

from compound.optimization.allowance import allowance
from compound.optimization.method import Method
from compound.optimization.problem import Problem
from compound.optimization.prospects import plan_by_runs, prospects

JOINT_NOTE = "the budget is too small for a job of each component: all are searched together, by whole runs"


def with_method(problem: Problem, method: Method) -> Problem:
    """Return the problem with a method whose jobs fit the train examples and the budget.

    A training step uses no more examples than there are. `Method.joint` replaces the jobs of its parameters
    if the system runs of the budget are too few for one of them.
    """
    jobs = [job.within(len(problem.train)) for job in method.jobs]
    separate = replace(problem, method=replace(method, jobs=jobs))
    joint = method.joint
    if joint is None:
        return separate
    covered = [job for job in jobs if set(job.keys) <= set(joint.keys)]
    if len(covered) < 2 or not _leaves_out(separate, joint.keys):
        return separate
    others = [job for job in jobs if job not in covered]
    together = replace(method, jobs=[joint, *others], notes=[*method.notes, JOINT_NOTE])
    return replace(problem, method=together)


def _leaves_out(problem: Problem, keys: tuple[str, ...]) -> bool:
    """Return whether a job of some of the parameters cannot try anything with the budget."""
    plan, free = plan_by_runs(problem)
    found = prospects(problem, plan, free, allowance(problem, free, plan.decisions))
    return any(each.tries_nothing for each in found if set(each.job.keys) <= set(keys))
