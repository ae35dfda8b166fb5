"""What an optimization can cost at most, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compound.component import Component, Composite
from compound.data import Dataset
from compound.loop import make_plan, stochastic
from compound.optimization import Job
from compound.optimizing import make_problem
from compound.settings import BudgetSettings
from compound.space import Choice, Int
from compound.system import System


def estimate(program: Any) -> dict[str, Any]:
    """Return the resolved settings, sizes, plan, and upper bounds of a program's optimization.

    Reads the data, loads no model. Calls are bounded by runs times the LLM calls of one run (a loop
    counts with all its turns; a map with one item, since its length is known only at run time). Retries
    come on top.
    """
    problem = make_problem(
        program.system, program.data, program.metric, program.optimize, program.find_engine, program.folder
    )
    settings = problem.settings
    valid = len(problem.valid) * (settings.repeats if stochastic(problem.system) else 1)
    limit = settings.budget.system_runs
    left = float("inf") if limit is None else max(0.0, limit - valid)
    plan = make_plan(problem, left, len(problem.method.jobs))
    per_run, tokens = _calls(problem.system), _completion_tokens(problem.system)
    test_runs = 2 * len(problem.test) * settings.repeats
    methods = 1 + len(settings.baselines)
    runs = None if limit is None else methods * (limit + test_runs)
    return {
        "system": problem.system.name,
        "data": _sizes(program.data, problem),
        "jobs": [f"{job.optimizer}: {', '.join(job.keys)}" for job in problem.method.jobs],
        "plan": {"decisions": plan.decisions, "level": plan.level, "runs_per_decision": plan.cost},
        "methods": [settings.method, *settings.baselines],
        "notes": list(problem.method.notes),
        "steps": _steps(problem.method.jobs, left - plan.decisions * plan.cost, _others(settings.budget)),
        "at_most": {
            "system_runs": runs,
            "llm_calls": None if runs is None else int(runs * per_run),
            "completion_tokens": None if runs is None else int(runs * tokens),
            "has_map": any(c.kind == "map" for c in problem.system.components.values()),
        },
        "optimize": settings.model_dump(mode="json"),
    }


def _others(budget: BudgetSettings) -> list[str]:
    """Return the limits other than system runs: what a run takes of these is not known beforehand."""
    return list(budget.model_dump(exclude={"test_share", "system_runs"}, exclude_none=True))


def _steps(jobs: Sequence[Job], free: float, others: Sequence[str]) -> list[dict[str, Any]]:
    """Return how many steps of each job the budget holds, of jobs that go by steps."""
    share = free / max(1, len(jobs))
    return [
        {
            "job": ", ".join(job.keys),
            "runs_per_step": job.step,
            "steps": job.steps,
            "budget_holds": int(min(job.steps, max(0.0, share) // job.step)),
            **({"unless_ended_by": list(others)} if others else {}),
        }
        for job in jobs
        if job.step
    ]


def _sizes(data: Dataset, problem: Any) -> dict[str, Any]:
    sizes = {"train": len(problem.train), "valid": len(problem.valid), "test": len(problem.test)}
    return {"path": str(data.path), **sizes}


def _calls(system: System) -> int:
    return sum(_weight(node.component, lambda c: int(c.kind == "llm")) for node in system.nodes.values())


def _completion_tokens(system: System) -> int:
    def tokens(component: Component) -> int:
        return _largest(component.settings.get("max_tokens")) if component.kind == "llm" else 0

    return sum(_weight(node.component, tokens) for node in system.nodes.values())


def _weight(component: Component, of: Any) -> int:
    if not isinstance(component, Composite):
        return int(of(component))
    inner = sum(_weight(node.component, of) for node in component.body.nodes.values())
    return inner * max(1, _largest(component.settings.get("max_turns", 1)))


def _largest(value: Any) -> int:
    if isinstance(value, Int):
        return value.high
    if isinstance(value, Choice):
        return max(option for option in value.options if isinstance(option, int))
    return int(value or 0)
