"""Prospects of a run before it starts: the gains it can detect and the candidates it can try.

This covers the smallest gain that the acceptance test can detect with the given validation
examples, the number of candidates that each job can compare with the given budget, and parameters
that cannot be tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from compound.core.formatting import plural
from compound.evaluation.acceptance import (
    POWER,
    detectable,
    examples_needed,
    least_improved,
    least_p,
    most_decisions,
)
from compound.evaluation.metrics.custom import bounds_hint
from compound.execution.rng import derive_seed
from compound.optimization.budget_plan import (
    BudgetPlan,
    baseline_runs,
    has_bounds,
    job_minibatch,
    make_plan,
    minimum_job_runs,
    plan_job,
    planning_prices,
    usable_runs,
)
from compound.optimization.method import Job, JobRecord
from compound.optimization.prices import Prices
from compound.optimization.role_checks import choose_job
from compound.optimization.settings.base import VALID_SIZES

if TYPE_CHECKING:
    from compound.optimization.method import Problem

GAINS = (0.05, 0.1)  # gains for which the number of required examples is reported
WORSE = 0.05  # assumed share of examples that get worse, in the second case
SMALL = 0.1  # warn if the smallest detectable gain is larger


class ProspectDocument(TypedDict):
    """A `Prospect` as JSON types; unlimited runs are ``None``."""

    job: str
    keys: list[str]
    runs: float | None
    candidates: int | None


class Detection(TypedDict):
    """Effects that a decision can detect.

    Attributes:
        bounded: whether the metric declares its range; the test depends on it.
        least_p: smallest p-value possible with this number of examples.
        least_improved: for scores of 0 and 1, the number of examples that must improve.
        power: probability of detecting the gains below.
        detectable_gain: smallest mean gain that is detected.
        examples_needed: number of examples required to detect some gains.
    """

    examples: int
    level: float
    bounded: bool
    least_p: float
    least_improved: int
    power: float
    detectable_gain: float | None
    detectable_gain_if_some_get_worse: float | None
    examples_needed: dict[str, int | None]


class ProspectsDocument(TypedDict):
    """The prospects of a run, as JSON types and as sentences."""

    detection: Detection
    jobs: list[ProspectDocument]
    told: list[str]


@dataclass(frozen=True)
class Prospect:
    """Resources of one job of the first round.

    Attributes:
        runs: system runs of the job (infinity without a limit).
        candidates: number of candidates it can compare; ``None`` if its optimizer does not declare
            it.
    """

    job: Job
    runs: float
    candidates: int | None

    @property
    def tries_nothing(self) -> bool:
        """Whether the job cannot try its parameters."""
        return self.runs == 0 or self.candidates == 0

    def to_json(self) -> ProspectDocument:
        """Return the prospect as JSON types."""
        return {
            "job": self.job.optimizer,
            "keys": list(self.job.keys),
            "runs": self.runs if math.isfinite(self.runs) else None,
            "candidates": self.candidates,
        }


def planned_jobs(problem: Problem) -> int:
    """Return the number of jobs in a round."""
    method = problem.method
    return len(method.jobs) if method.jobs_each is None else method.jobs_each


def plan_by_runs(problem: Problem) -> tuple[BudgetPlan, float]:
    """Return the plan based on the limit of system runs alone, and the runs left for jobs."""
    limit = problem.settings.budget.system_runs
    left = math.inf if limit is None else max(0.0, limit - baseline_runs(problem))
    plan = make_plan(problem, left, planned_jobs(problem), planning_prices(problem))
    return plan, max(0.0, left - plan.decisions * plan.cost)


def prospects(problem: Problem, plan: BudgetPlan, free: float) -> list[Prospect]:
    """Return the prospects of the jobs of the first round, in order."""
    method, settings = problem.method, problem.settings
    found, history = list[Prospect](), list[JobRecord]()
    if method.opening is not None:
        free -= free * method.opening.weight if math.isfinite(free) else 0.0
    total = sum(job.weight for job in method.jobs) * plan.decisions * plan.jobs / len(method.jobs)
    left, seed, prices = free, derive_seed(settings.seed, "scheduler"), planning_prices(problem)
    for _ in range(plan.jobs):
        chosen = choose_job(method, history, seed)
        job = next(
            j for j in method.jobs if (j.optimizer, j.keys) == (chosen.optimizer, chosen.keys)
        )
        needed = minimum_job_runs(job, settings.minibatch, prices, tried=True)
        tried = bool(found and found[0].runs)
        if job.step is None:
            least = job.least(settings.minibatch, prices.keys(job.keys))
            runs = usable_runs(free * job.weight / total, left, least, tried=tried)
        else:
            share = free * job.weight / total
            runs = share if share >= needed else 0.0
        left -= runs if math.isfinite(runs) else 0.0
        found.append(Prospect(job, runs, _candidates(problem, job, runs, prices)))
        history.append(
            JobRecord(job=len(history), optimizer=job.optimizer, keys=job.keys, runs=runs)
        )
    return found


def _candidates(problem: Problem, job: Job, runs: float, prices: Prices) -> int | None:
    if not runs:
        return 0
    if job.step is not None:
        return None
    minibatch = job_minibatch(problem.settings.minibatch, runs, prices.keys(job.keys))
    plan = plan_job(problem, job, runs, minibatch)
    return None if plan is None else plan.candidates


def detection(n: int, level: float, *, bounded: bool = True) -> Detection:
    """Return the effects that a decision at a level can detect with ``n`` validation examples."""
    return {
        "examples": n,
        "level": level,
        "bounded": bounded,
        "least_p": least_p(n, bounded=bounded),
        "least_improved": least_improved(level),
        "power": POWER,
        "detectable_gain": detectable(n, level),
        "detectable_gain_if_some_get_worse": detectable(n, level, WORSE),
        "examples_needed": {f"{gain:g}": examples_needed(gain, level) for gain in GAINS},
    }


def describe_prospects(
    facts: Detection, plan: BudgetPlan, found: Sequence[Prospect], limit: float | None
) -> list[str]:
    """Return the prospects as sentences; warnings come first."""
    margins = {prospect.job.margin for prospect in found}
    lines = [*_untried(found, limit), *([_detectable(facts, plan)] if 0.0 in margins else [])]
    lines += [
        f"{plural(facts['examples'], 'validation example')}: a loss of up to {margin:g} of the score is "
        "accepted for fewer tokens (margin)"
        for margin in sorted(margins - {0.0})
    ]
    compared = [p for p in found if p.candidates]
    if compared:
        each = "; ".join(
            f"{p.job.optimizer} {p.candidates} candidate{'s' * (p.candidates != 1)} ({', '.join(p.job.keys)})"
            for p in compared
        )
        budget = "" if limit is None else "with this budget "
        lines.append(f"{budget}each job can compare on train examples: {each}")
    return lines


def _smaller_splits(problem: Problem) -> list[str]:
    """Return the splits that are smaller than configured."""
    settings, chosen = problem.settings, problem.settings.model_fields_set
    splits = {"train": problem.train, "valid": problem.valid, "test": problem.test}
    asked = {role: getattr(settings, f"{role}_size") for role in splits if f"{role}_size" in chosen}
    return [
        f"optimize.{role}_size is {size}, but the {role} split has {plural(len(splits[role]), 'row')}: "
        "all rows are used"
        for role, size in asked.items()
        if size is not None and len(splits[role]) < size and splits[role]
    ]


def _automatic_size(problem: Problem) -> list[str]:
    """Return a line if the budget limits the number of validation examples."""
    settings, n = problem.settings, len(problem.valid)
    if settings.valid_size != "auto" or n >= VALID_SIZES[1]:
        return []
    if n != settings.valid_examples:
        return []  # the split is smaller, or a resumed run keeps its examples
    return [
        f"{plural(n, 'validation example')} are used, so that half of the "
        f"{settings.budget.system_runs:g} system runs is left for the search (optimize.valid_size)"
    ]


def _fewer_decisions(problem: Problem, plan: BudgetPlan) -> list[str]:
    """Return a line if the validation split is too small for the number of decisions wanted."""
    settings, n = problem.settings, len(problem.valid)
    wanted = settings.iterations if problem.method.decisions is None else problem.method.decisions
    possible = most_decisions(n, settings.alpha, bounded=has_bounds(problem))
    if plan.decisions < possible or wanted <= possible:
        return []
    needed = least_improved(settings.alpha / wanted)
    return [
        f"{plural(n, 'validation example')} can show an improvement in at most "
        f"{plural(possible, 'decision')} at alpha={settings.alpha:g}: {wanted} need at least "
        f"{needed} (optimize.valid_size)"
    ]


def _unknown_bounds(problem: Problem) -> list[str]:
    """Return a line if the acceptance test cannot rely on the range of the scores."""
    if has_bounds(problem):
        return []
    return [
        f"metric {problem.metric.name!r} declares no bounds: decisions use a sign-flip and a t-test, which "
        "can accept a change that makes a few examples much worse; if there are bounds, declare them: "
        f"{bounds_hint(problem.metric)}"
    ]


def _untried(found: Sequence[Prospect], limit: float | None) -> list[str]:
    keys = [key for p in found if p.tries_nothing for key in p.job.keys]
    if not keys:
        return []
    budget = "" if limit is None else f" with optimize.budget.system_runs={limit:g}"
    return [
        f"cannot be tried{budget}: {', '.join(keys)}; raise the budget, or lower optimize.valid_size"
    ]


def _detectable(facts: Detection, plan: BudgetPlan) -> str:
    n, level, gain = facts["examples"], facts["level"], facts["detectable_gain"]
    needed = ", ".join(
        f"+{gain} needs {n}" for gain, n in facts["examples_needed"].items() if n is not None
    )
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


def outlook(problem: Problem) -> ProspectsDocument:
    """Return the prospects of a run as JSON types: detectable gains, and the resources of its jobs."""
    plan, free = plan_by_runs(problem)
    found = prospects(problem, plan, free)
    power = detection(len(problem.valid), plan.level, bounded=has_bounds(problem))
    return {
        "detection": power,
        "jobs": [prospect.to_json() for prospect in found],
        "told": [
            *_smaller_splits(problem),
            *_automatic_size(problem),
            *_fewer_decisions(problem, plan),
            *_unknown_bounds(problem),
            *([problem.earlier.told] if problem.earlier.told else []),
            *problem.method.proposers,
            *describe_prospects(power, plan, found, problem.settings.budget.system_runs),
        ],
    }
