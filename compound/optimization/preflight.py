"""Check a run before it starts: its models, the gains that it can detect, and what cannot be tried."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from compound.core.engine import Capabilities, Engine
from compound.core.errors import (
    CompoundError,
    MissingExtra,
    SeveralErrors,
    libraries_of,
    missing_libraries,
)
from compound.core.formatting import plural
from compound.core.security.sanitize import sanitize_text
from compound.engines import models
from compound.evaluation.acceptance import (
    POWER,
    detectable,
    examples_needed,
    least_improved,
    least_p,
    most_decisions,
)
from compound.evaluation.metrics.custom import bounds_hint
from compound.evaluation.metrics.scoring import metric_lms
from compound.execution.rng import derive_seed
from compound.execution.schedule import setting_values
from compound.execution.sender import Sender, unpriced
from compound.graph.space import Choice
from compound.graph.system import System
from compound.optimization.budget_plan import (
    BudgetPlan,
    baseline_runs,
    has_bounds,
    job_minibatch,
    jobs_in_round,
    make_plan,
    minimum_job_runs,
    plan_job,
    plan_jobs,
    planning_prices,
    usable_runs,
)
from compound.optimization.method import Job, JobRecord, Problem
from compound.optimization.prices import Prices
from compound.optimization.registration import choose_job
from compound.optimization.settings.base import VALID_SIZES, references


def list_models(problem: Problem) -> list[str]:
    """Return the names of the models that a run may call, as given by the system and the settings."""
    found = [*system_models(problem.system), *metric_lms(problem.metric)]
    plan, free = plan_by_runs(problem)
    jobs = plan_jobs(problem, free, plan.decisions)
    for each in jobs:
        for request in each.plan.requests if each.plan else ():
            if request.count:
                found += [request.lm] if request.lm else problem.system.lms[:1]
    if any(each.plan is None for each in jobs):
        named = (r for section in problem.method.sections.values() for r in references(section))
        found += [each.name for each in named if each.kind == "model" and each.name]
    return sorted(set(found))


def system_models(system: System) -> list[str]:
    """Return the names of the models that a run of a system may call, as far as settings name them."""
    return list(dict.fromkeys(lm for name in system.components for lm in models_of(system, name)))


def models_of(system: System, name: str) -> list[str]:
    """Return the names of the models that a component may call; none if it has no setting ``lm``."""
    found: dict[str, None] = {}
    for node in system.all_nodes():
        component = node.component
        if component.name != name or "lm" not in component.settings:
            continue
        setting = component.settings["lm"]
        if "lm" in node.wires:
            values: Iterable[object] = get_args(node.wires["lm"].type)
        elif isinstance(setting, Choice):
            values = setting.options
        else:
            values = [setting_values(component, system).get("lm")]
        found |= {value: None for value in values if isinstance(value, str)}
    return list(found)


def open_engines(problem: Problem) -> dict[str, Engine]:
    """Return the engines of a run by name, except those that cannot be opened; no model is loaded."""
    sender, found = Sender(problem.engines), {}
    for lm in list_models(problem):
        with suppress(CompoundError):
            found[lm] = sender.engine(lm)
    return found


def engine_names(problem: Problem) -> dict[str, str]:
    """Return `Engine.name` by model name, with API keys removed."""
    found = {}
    for lm, engine in open_engines(problem).items():
        with suppress(CompoundError):  # the name depends on a missing library
            found[lm] = sanitize_text(engine.name)
    return found


def model_digests(problem: Problem) -> dict[str, str]:
    """Return digests of the models that are folders, by model name: their files may change."""
    opened = {lm: Capabilities(engine).trainable for lm, engine in open_engines(problem).items()}
    folders = {lm: Path(model) for lm, model in opened.items() if model and Path(model).is_dir()}
    return {lm: models.folder_digest(folder) for lm, folder in folders.items()}


def check_prices(problem: Problem) -> None:
    """Reject a limit of dollars if a model has no known price: for a budget, as the first call would.

    A limit of dollars per run needs the prices of the system's own models.

    Raises:
        DeclarationError: a price is unknown; the message names the model.
    """
    settings, limited = problem.settings, dict[str, str]()
    if settings.objective.limits.usd_per_run is not None:
        limited |= dict.fromkeys(system_models(problem.system), "objective.limits.usd_per_run")
    for lm, engine in (
        open_engines(problem).items() if limited or settings.budget.cost is not None else ()
    ):
        if not engine.priced and (lm in limited or settings.budget.cost is not None):
            raise unpriced(lm, limited.get(lm, "budget.cost"))


def check_libraries(problem: Problem) -> None:
    """Reject a run that needs a library that is not installed, before anything is spent.

    Raises:
        MissingExtra: one is missing.
        SeveralErrors: several are.
    """
    system, method = problem.system, problem.method
    find = problem.engines if callable(problem.engines) else problem.engines.get
    needed: list[tuple[str, Sequence[str]]] = []
    for lm in list_models(problem):
        with suppress(CompoundError):  # the run reports why it cannot be opened
            needed.append((f"the engine of {lm!r}", libraries_of(find(lm))))
    for job in (*method.jobs, *filter(None, [method.opening])):
        optimizer = method.optimizers[job.optimizer]
        spaces = [system.parameters[key] for key in job.keys]
        requires_for = getattr(
            optimizer, "requires_for", lambda _, own=optimizer: libraries_of(own)
        )
        learning = libraries_of(getattr(optimizer, "learning", None))
        needed.append((f"the method {method.name!r}", [*requires_for(spaces), *learning]))
    missing = missing_libraries([*system_parts(system), *needed])
    if missing:
        raise missing[0] if len(missing) == 1 else SeveralErrors(missing)


def system_parts(system: System) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the components of a system, and the modules of optional libraries that each needs."""
    for name, component in system.components.items():
        index = getattr(component, "index", None)
        yield f"component {name!r}", [*libraries_of(component), *libraries_of(index)]


def missing_keys(problem: Problem) -> list[str]:
    """Return one line for each model without an API key; its first call would fail."""
    found: dict[str, None] = {}
    for engine in open_engines(problem).values():
        try:
            Capabilities(engine).require_key()
        except MissingExtra:  # not about the key
            continue
        except CompoundError as error:
            found[str(error)] = None
    return list(found)


GAINS = (0.05, 0.1)  # gains for which the number of required examples is reported
WORSE = 0.05  # assumed share of examples that get worse, in the second case

Prospect = tuple[Job, float, int | None]
"""A job of the first round, its system runs (infinity without a limit), and the number of candidates
that it can compare; ``None`` if its optimizer does not declare it."""


def plan_by_runs(problem: Problem) -> tuple[BudgetPlan, float]:
    """Return the plan based on the limit of system runs alone, and the runs left for jobs."""
    limit = problem.settings.budget.system_runs
    left = math.inf if limit is None else max(0.0, limit - baseline_runs(problem))
    plan = make_plan(problem, left, jobs_in_round(problem.method), planning_prices(problem))
    return plan, max(0.0, left - plan.decisions * plan.cost)


def outlook(problem: Problem) -> dict[str, Any]:
    """Return the prospects of a run as JSON types, and as sentences (``told``), warnings first."""
    plan, free = plan_by_runs(problem)
    found = [*_first_round(problem, plan, free)]
    return {
        "detection": _detection(problem, plan.level),
        "jobs": [
            {
                "job": job.optimizer,
                "keys": list(job.keys),
                "runs": runs if math.isfinite(runs) else None,
                "candidates": candidates,
            }
            for job, runs, candidates in found
        ],
        "told": [
            *_warnings(problem, plan),
            *([problem.earlier.told] if problem.earlier.told else []),
            *problem.method.proposers,
            *_prospects(problem, plan, found),
        ],
    }


def _first_round(problem: Problem, plan: BudgetPlan, free: float) -> Iterator[Prospect]:
    method, settings, prices = problem.method, problem.settings, planning_prices(problem)
    if method.opening is not None:
        free -= free * method.opening.weight if math.isfinite(free) else 0.0
    total = sum(job.weight for job in method.jobs) * plan.decisions * plan.jobs / len(method.jobs)
    left, seed, history = free, derive_seed(settings.seed, "scheduler"), list[JobRecord]()
    known = {(job.optimizer, job.keys): job for job in method.jobs}
    for number in range(plan.jobs):
        chosen = choose_job(method, history, seed)
        job = known[chosen.optimizer, chosen.keys]
        share, tried = free * job.weight / total, bool(history and history[0].runs)
        if job.step is None:
            least = job.least(settings.minibatch, prices.keys(job.keys))
            runs = usable_runs(share, left, least, tried=tried)
        else:
            needed = minimum_job_runs(job, settings.minibatch, prices, tried=True)
            runs = share if share >= needed else 0.0
        left -= runs if math.isfinite(runs) else 0.0
        yield job, runs, _candidates(problem, job, runs, prices)
        history.append(JobRecord(job=number, optimizer=job.optimizer, keys=job.keys, runs=runs))


def _candidates(problem: Problem, job: Job, runs: float, prices: Prices) -> int | None:
    if not runs:
        return 0
    if job.step is not None:
        return None
    minibatch = job_minibatch(problem.settings.minibatch, runs, prices.keys(job.keys))
    plan = plan_job(problem, job, runs, minibatch)
    return None if plan is None else plan.candidates


def _detection(problem: Problem, level: float) -> dict[str, Any]:
    """Return the effects that a decision at a level can detect, also if `WORSE` of the examples get worse."""
    n, bounded = len(problem.valid), has_bounds(problem)
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


def _warnings(problem: Problem, plan: BudgetPlan) -> Iterator[str]:
    """Yield lines on small splits, fewer decisions than wanted, and a metric without bounds."""
    settings, n = problem.settings, len(problem.valid)
    examples = plural(n, "validation example")
    for role, rows in (("train", problem.train), ("valid", problem.valid), ("test", problem.test)):
        size = getattr(settings, f"{role}_size")
        is_given = isinstance(size, int) and f"{role}_size" in settings.model_fields_set
        if is_given and 0 < len(rows) < size:
            count = plural(len(rows), "row")
            yield f"optimize.{role}_size is {size}, but the {role} split has {count}: all rows are used"
    # another number if the split is smaller, or a resumed run keeps its examples
    if settings.valid_size == "auto" and n < VALID_SIZES[1] and n == settings.valid_examples:
        runs = f"{settings.budget.system_runs:g} system runs"
        yield f"{examples} are used, so that half of the {runs} is left for the search (optimize.valid_size)"
    wanted = settings.iterations if problem.method.decisions is None else problem.method.decisions
    possible = most_decisions(n, settings.alpha, bounded=has_bounds(problem))
    if plan.decisions >= possible and wanted > possible:
        yield (
            f"{examples} can show an improvement in at most {plural(possible, 'decision')} at "
            f"alpha={settings.alpha:g}: {wanted} need at least {least_improved(settings.alpha / wanted)} "
            "(optimize.valid_size)"
        )
    if not has_bounds(problem):
        yield (
            f"metric {problem.metric.name!r} declares no bounds: decisions use a sign-flip and a t-test, "
            "which can accept a change that makes a few examples much worse; if there are bounds, declare "
            f"them: {bounds_hint(problem.metric)}"
        )


def _prospects(problem: Problem, plan: BudgetPlan, found: Sequence[Prospect]) -> Iterator[str]:
    """Yield lines on what the jobs cannot try, the gains that decisions detect, and the candidates."""
    limit = problem.settings.budget.system_runs
    keys = [key for job, runs, candidates in found if 0 in (runs, candidates) for key in job.keys]
    if keys:
        budget = "" if limit is None else f" with optimize.budget.system_runs={limit:g}"
        advice = "raise the budget, or lower optimize.valid_size"
        yield f"cannot be tried{budget}: {', '.join(keys)}; {advice}"
    facts, margins = _detection(problem, plan.level), {job.margin for job, _, _ in found}
    n, gain = plural(facts["examples"], "validation example"), facts["detectable_gain"]
    if 0.0 in margins:
        found_gain = "no gain is" if gain is None else f"a mean gain of {gain:.2f} or more is"
        sizes = facts["examples_needed"].items()
        needed = [f"{n} for {size}" for size, n in sizes if (n or 0) > len(problem.valid)]
        more = f"; for smaller gains, use more examples: {', '.join(needed)}" if needed else ""
        yield (
            f"with {n}, {found_gain} supported with a probability of {POWER:.0%}, in "
            f"{plural(plan.decisions, 'decision')} at level {plan.level:.3g}{more}"
        )
    for margin in sorted(margins - {0.0}):
        yield f"{n}: a loss of up to {margin:g} of the score is accepted for fewer tokens (margin)"
    compared = [(job, plural(count, "candidate")) for job, _, count in found if count]
    if compared:
        each = "; ".join(
            f"{job.optimizer} {count} ({', '.join(job.keys)})" for job, count in compared
        )
        budget = "" if limit is None else "with this budget "
        yield f"{budget}each job can compare on train examples: {each}"
