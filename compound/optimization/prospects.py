"""Prospects of a run: the gains it can detect and the candidates it can try, before anything is spent.

How small a gain the acceptance test can detect with the validation examples there are, how many candidates
each job can compare with the budget there is, and which parameters cannot be tried at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

from compound.evaluation.power import POWER, detectable, examples_needed, least_improved, least_p
from compound.execution.rng import derive_seed
from compound.formatting import plural
from compound.optimization.allowance import Allowance, allowance
from compound.optimization.bounds import Bounded
from compound.optimization.budget_plan import (
    BudgetPlan,
    baseline_runs,
    fewest_of,
    job_minibatch,
    make_plan,
    usable,
)
from compound.optimization.method import Job, JobRecord
from compound.optimization.role_checks import choose_job

if TYPE_CHECKING:
    from compound.optimization.problem import Problem

GAINS = (0.05, 0.1)  # for which the examples needed are said
WORSE = 0.05  # the share of examples that an improvement makes worse, in the second of two cases
SMALL = 0.1  # a larger gain than this being the least detectable one is worth a warning


class ProspectDocument(TypedDict):
    """A `Prospect` as JSON types; runs without a limit are ``None``."""

    job: str
    keys: list[str]
    runs: float | None
    candidates: int | None


class Detection(TypedDict):
    """What a decision can detect.

    Attributes:
        examples: how many validation examples there are.
        level: the level of the decision.
        least_p: the smallest p-value that so many examples can give.
        least_improved: for scores of 0 and 1, how many examples must improve.
        power: the probability with which the gains below are found.
        detectable_gain: the smallest mean gain that is found.
        detectable_gain_if_some_get_worse: the same where some examples get worse.
        examples_needed: how many examples some gains need.
    """

    examples: int
    level: float
    least_p: float
    least_improved: int
    power: float
    detectable_gain: float | None
    detectable_gain_if_some_get_worse: float | None
    examples_needed: dict[str, int | None]


class Outlook(TypedDict):
    """The prospects of a run, as JSON types and in sentences."""

    detection: Detection
    jobs: list[ProspectDocument]
    told: list[str]


@dataclass(frozen=True)
class Prospect:
    """What one job of the first round can do.

    Attributes:
        job: its optimizer and keys.
        runs: system runs it gets (infinity without a limit).
        candidates: how many it can compare; ``None`` when its optimizer does not say.
    """

    job: Job
    runs: float
    candidates: int | None

    @property
    def tries_nothing(self) -> bool:
        """Whether its parameters are not tried."""
        return self.runs == 0 or self.candidates == 0

    def to_json(self) -> ProspectDocument:
        """Return it as JSON types."""
        return {
            "job": self.job.optimizer,
            "keys": list(self.job.keys),
            "runs": self.runs if math.isfinite(self.runs) else None,
            "candidates": self.candidates,
        }


def planned_jobs(problem: Problem) -> int:
    """Return how many jobs precede each decision."""
    method = problem.method
    return len(method.jobs) if method.jobs_each is None else method.jobs_each


def planned(problem: Problem) -> tuple[BudgetPlan, float]:
    """Return the plan by the limit of system runs alone, and the runs left for jobs."""
    limit = problem.settings.budget.system_runs
    left = math.inf if limit is None else max(0.0, limit - baseline_runs(problem))
    plan = make_plan(problem, left, planned_jobs(problem))
    return plan, max(0.0, left - plan.decisions * plan.cost)


def prospects(problem: Problem, plan: BudgetPlan, free: float, allowed: Allowance) -> list[Prospect]:
    """Return what the jobs of the first round can do, in the order in which they come."""
    method, settings = problem.method, problem.settings
    found, history = list[Prospect](), list[JobRecord]()
    if method.opening is not None:
        free -= free * method.opening.weight if math.isfinite(free) else 0.0
    total = sum(job.weight for job in method.jobs) * plan.decisions
    if method.jobs_each is not None:
        total *= method.jobs_each / len(method.jobs)
    left, seed = free, derive_seed(settings.seed, "scheduler")
    for _ in range(plan.jobs):
        chosen = choose_job(method, history, seed)
        job = next(j for j in method.jobs if (j.optimizer, j.keys) == (chosen.optimizer, chosen.keys))
        needed, tried = fewest_of(job, settings.minibatch, tried=True), bool(found and found[0].runs)
        if job.step is None:
            runs = usable(free * job.weight / total, left, job.least(settings.minibatch), tried=tried)
        else:
            share = free * job.weight / total
            runs = share if share >= needed else 0.0
        left -= runs if math.isfinite(runs) else 0.0
        found.append(Prospect(job, runs, _candidates(problem, job, runs, allowed)))
        history.append(JobRecord(job=len(history), optimizer=job.optimizer, keys=job.keys, runs=runs))
    return found


def _candidates(problem: Problem, job: Job, runs: float, allowed: Allowance) -> int | None:
    if not runs:
        return 0
    optimizer = problem.method.optimizers[job.optimizer]
    if job.step is not None or not isinstance(optimizer, Bounded):
        return None
    minibatch = job_minibatch(problem.settings.minibatch, runs)
    outlook = replace(allowed.outlook, keys=job.keys, runs=runs, minibatch=minibatch)
    return optimizer.bound(outlook).candidates


def detection(n: int, level: float) -> Detection:
    """Return what a decision at a level can detect with ``n`` validation examples."""
    return {
        "examples": n,
        "level": level,
        "least_p": least_p(n),
        "least_improved": least_improved(level),
        "power": POWER,
        "detectable_gain": detectable(n, level),
        "detectable_gain_if_some_get_worse": detectable(n, level, WORSE),
        "examples_needed": {f"{gain:g}": examples_needed(gain, level) for gain in GAINS},
    }


def told(facts: Detection, plan: BudgetPlan, found: Sequence[Prospect], limit: float | None) -> list[str]:
    """Return the prospects in sentences; what a user should know before spending comes first."""
    lines = [*_untried(found, limit), _detectable(facts, plan)]
    compared = [p for p in found if p.candidates]
    if compared:
        each = "; ".join(
            f"{p.job.optimizer} {p.candidates} candidate{'s' * (p.candidates != 1)} ({', '.join(p.job.keys)})"
            for p in compared
        )
        budget = "" if limit is None else "with this budget "
        lines.append(f"{budget}each job can compare on train examples: {each}")
    return lines


def _smaller(problem: Problem) -> list[str]:
    """Return which splits are smaller than the file asks for."""
    settings, chosen = problem.settings, problem.settings.model_fields_set
    splits = {"train": problem.train, "valid": problem.valid, "test": problem.test}
    asked = {role: getattr(settings, f"{role}_size") for role in splits if f"{role}_size" in chosen}
    return [
        f"optimize.{role}_size is {size}, but the {role} split has {plural(len(splits[role]), 'row')}: "
        "all are used"
        for role, size in asked.items()
        if size is not None and len(splits[role]) < size and splits[role]
    ]


def _untried(found: Sequence[Prospect], limit: float | None) -> list[str]:
    keys = [key for p in found if p.tries_nothing for key in p.job.keys]
    if not keys:
        return []
    budget = "" if limit is None else f" with optimize.budget.system_runs={limit:g}"
    return [f"cannot be tried{budget}: {', '.join(keys)}; raise the budget, or lower optimize.valid_size"]


def _detectable(facts: Detection, plan: BudgetPlan) -> str:
    n, level, gain = facts["examples"], facts["level"], facts["detectable_gain"]
    needed = ", ".join(f"+{gain} needs {n}" for gain, n in facts["examples_needed"].items() if n is not None)
    times = plural(plan.decisions, "decision")
    start = f"{plural(n, 'validation example')} and {times} at level {level:.3g}"
    if gain is None:
        return f"{start} detect no gain with {POWER:.0%} probability; {needed} examples"
    rest = facts["detectable_gain_if_some_get_worse"]
    worse = f", +{rest:.2f} if {WORSE:.0%} of the examples get worse" if rest is not None else ""
    return (
        f"{start}: for scores of 0 and 1, at least {facts['least_improved']} examples must improve, and a "
        f"mean gain of +{gain:.2f} is found with {POWER:.0%} probability{worse}; {needed} examples"
    )


def outlook(problem: Problem) -> Outlook:
    """Return the prospects of a run as JSON types: what it can detect, and what its jobs can do."""
    plan, free = planned(problem)
    found = prospects(problem, plan, free, allowance(problem, free, plan.decisions))
    power = detection(len(problem.valid), plan.level)
    return {
        "detection": power,
        "jobs": [prospect.to_json() for prospect in found],
        "told": [*_smaller(problem), *told(power, plan, found, problem.settings.budget.system_runs)],
    }
