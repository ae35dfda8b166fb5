"""Estimate the cost of an optimization and the effects it can detect, before it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compound.api.description import resolved_settings
from compound.api.optimize import make_problem
from compound.api.runners import check_runner
from compound.engine import Completion, Engine, Request, Usage
from compound.errors import CompoundError, MissingExtra
from compound.evaluation.dataset import Dataset
from compound.evaluation.duplicates import check_no_overlaps, find_overlaps
from compound.evaluation.metrics.comparison import Comparison
from compound.evaluation.metrics.models import ModelMetric
from compound.execution.executor import Executor
from compound.extras import check_installed
from compound.graph.bounds import CallBound, Use
from compound.optimization.allowance import Allowance, allowance
from compound.optimization.bounds import Amount, amount_of, unbounded
from compound.optimization.budget_plan import stochastic
from compound.optimization.method import Job
from compound.optimization.preflight import missing_keys
from compound.optimization.problem import Problem
from compound.optimization.prospects import outlook, plan_by_runs
from compound.optimizers import methods
from compound.optimizers.memory_plan import plan_memory
from compound.settings.common import COUNTS, BudgetSettings
from compound.settings.optimize import OptimizeSettings

if TYPE_CHECKING:
    from compound.spec import Program

ASSUMPTIONS = (
    "Retries of failed requests, and runs that are cancelled when too many fail, are not included.",
    "Prompts without a known tokenizer are counted in bytes, about four times their tokens in English; "
    "every call is counted as the longest one, and a cached run as a new one.",
)
METRIC_ASSUMPTION = "Calls made by a user-defined metric are neither counted nor bounded."


def estimate(program: Program, *, strict: bool = False) -> dict[str, Any]:
    """Return the resolved settings, sizes, plan, prospects and upper bounds of a program's optimization.

    Reads the data and corpora but loads no model. The bounds cover system runs, the test split, proposal
    requests, and the same for each baseline.

    Args:
        program: the program, with data and a metric.
        strict: whether to reject examples that occur in several splits.

    Raises:
        DataError: splits share examples, with ``strict``.
        DeclarationError: workers cannot run the system or a method, and a runner is set.
        CompoundError: models in this process do not fit into memory.
    """
    assert program.data is not None
    assert program.metric is not None
    problem = make_problem(
        program.system, program.data, program.metric, program.optimize, program.find_engine, program.folder
    )
    settings = problem.settings
    others = [
        methods.method(n, problem.system, settings, problem.folder, problem.engines)
        for n in settings.baselines
    ]
    check_runner(settings, problem.system, [problem.method, *others])
    bounds = [bound(problem)]
    for name, method in zip(settings.baselines, others, strict=True):
        own = settings.model_copy(update={"method": name, "baselines": ()})
        bounds.append(bound(replace(problem, settings=own).with_method(method)))
    plan, free = plan_by_runs(problem)
    memory = plan_memory(problem, others)
    memory.check()
    declared = isinstance(problem.metric, Comparison | ModelMetric)
    # usage of these is unknown in advance
    other_limits = [name for name in settings.budget.limits() if name != "system_runs"]
    splits = {"train": problem.train, "valid": problem.valid, "test": problem.test}
    equal = find_overlaps(splits, program.data.id)
    if strict:
        check_no_overlaps(equal)
    return {
        "system": problem.system.name,
        "data": _sizes(program.data, problem),
        "jobs": [f"{job.optimizer}: {', '.join(job.keys)}" for job in problem.method.jobs],
        "plan": {"decisions": plan.decisions, "level": plan.level, "runs_per_decision": plan.cost},
        "methods": [settings.method, *settings.baselines],
        "notes": [
            *missing_for_run(settings),
            *problem.method.notes,
            *(f"{m.name}: {line}" for m in others for line in m.proposers),
        ],
        "steps": _steps(problem.method.jobs, free, other_limits),
        "prospects": outlook(problem),
        "duplicates": [str(overlap) for overlap in equal],
        "shared": any(overlap.across for overlap in equal),
        "bounds": [row.to_json() for each in bounds for row in each.rows],
        "at_most": _total(bounds),
        "budget": {
            name: {"limit": limit, "counts": COUNTS[name]} for name, limit in settings.budget.limits().items()
        },
        "memory": memory.lines(),
        "keys": missing_keys(problem),
        "assumed": [
            *ASSUMPTIONS,
            *([] if declared else [METRIC_ASSUMPTION]),
        ],
        "optimize": resolved_settings(problem),
    }


@dataclass(frozen=True)
class BoundRow:
    """A row of the table of bounds.

    Attributes:
        method: name of the method.
        what: description of the bounded activity.
        runs: number of system runs, if applicable.
        amount: upper bound of the usage.
    """

    method: str
    what: str
    runs: float | None
    amount: Amount

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON types; infinite numbers become ``None``."""
        runs = None if self.runs is None or not math.isfinite(self.runs) else self.runs
        return {"method": self.method, "what": self.what, "system_runs": runs, **_amount(self.amount)}


@dataclass(frozen=True)
class MethodBounds:
    """Upper bounds of one method.

    Attributes:
        rows: the components, and last the total within the budget.
        runs: number of system runs, including the test split.
        allowed: proposal requests of its jobs.
    """

    rows: Sequence[BoundRow]
    runs: float
    allowed: Allowance


def bound(problem: Problem) -> MethodBounds:
    """Return the bounds of a problem's method."""
    settings, find = problem.settings, _Engines(problem)
    name, system = settings.method, problem.system
    own = system.lms[:1]
    plan, free = plan_by_runs(problem)
    allowed = allowance(problem, free, plan.decisions, read_corpora=True, lms=own)
    limit = settings.budget.system_runs
    runs = math.inf if limit is None else limit
    search = _search(allowed, find).times(runs)
    if limit is None and search.calls:
        search = replace(search, why=(*search.why, "optimize.budget.system_runs is not set"))
    tests = 2 * len(problem.test) * (settings.repeats if stochastic(system) else 1)
    test = _whole_run(allowed, find).times(tests)
    scoring = _scoring(problem, allowed, find)
    test += scoring.times(tests)
    rows = [
        BoundRow(name, "system runs on train and validation examples", runs, search),
        *_scoring_rows(name, scoring, limit, runs),
        *(BoundRow(name, what, None, amount) for what, amount in _proposals(allowed, find, own)),
    ]
    sum_ = sum((row.amount for row in rows), Amount())
    rows.append(BoundRow(name, "system runs on the test split", tests, test))
    total = _capped(sum_, settings.budget, 1 - settings.budget.test_share)
    total += _capped(test, settings.budget, settings.budget.test_share)
    return MethodBounds([*rows, BoundRow(name, "total", runs + tests, total)], runs + tests, allowed)


def _search(allowed: Allowance, find: _Engines) -> Amount:
    """Return the upper bound of one system run, where runs are counted by executed calls.

    A run whose other calls are cached counts as a fraction of a run, and all fractions may consist of
    the most expensive call.
    """
    largest = Amount()
    for name, use in allowed.survey.uses.items():
        each = _call(name, use, find)
        uncached = not allowed.outlook.system.components[name].cacheable
        if use.requests is not None and each.calls and uncached and allowed.survey.counted:
            each = unbounded(f"{name!r} calls a model in every run, even a cached one")
        largest = largest.maximum(each)
    return largest.times(allowed.survey.counted) if allowed.survey.counted else _whole_run(allowed, find)


def _scoring(problem: Problem, allowed: Allowance, find: _Engines) -> Amount:
    """Return the upper bound of the calls of the metric for one run."""
    if not isinstance(problem.metric, ModelMetric):
        return Amount()
    examples = [*problem.train, *problem.valid, *problem.test]
    requests = problem.metric.requests(allowed.outlook.outputs, examples)
    return sum((find.max_request_cost(request).times(request.calls) for request in requests), Amount())


def _scoring_rows(name: str, scoring: Amount, limit: float | None, runs: float) -> list[BoundRow]:
    """Return the row of the metric's calls: every scored run executes at least one call of the system.

    A run that executes only a part of the system counts as a fraction of a run, but is scored as a whole.
    """
    if not scoring.calls:
        return []
    why = "a run that reuses cached calls counts as a fraction of a run, but its outputs are scored anew"
    bound = unbounded(why)
    return [BoundRow(name, "calls of the metric on train and validation examples", None, bound)]


def _whole_run(allowed: Allowance, find: _Engines) -> Amount:
    """Return the upper bound of a run without cached calls."""
    calls = (_call(name, use, find).times(use.calls) for name, use in allowed.survey.uses.items())
    return sum(calls, Amount())


def _call(name: str, use: Use, find: _Engines) -> Amount:
    """Return the upper bound of one call of a component."""
    if use.requests is None:
        return unbounded(f"component {name!r} does not declare its model requests (Component.reach)")
    if not math.isfinite(use.calls) and use.requests:
        return unbounded(f"the number of calls of {name!r} is known only at run time")
    return sum((find.max_request_cost(request).times(request.calls) for request in use.requests), Amount())


def _proposals(allowed: Allowance, find: _Engines, own: tuple[str, ...]) -> list[tuple[str, Amount]]:
    """Return the upper bounds of proposal requests, by optimizer and purpose."""
    found: dict[str, Amount] = {}
    for each in allowed.jobs:
        if each.bound is None:
            hint = f"optimizer {each.job.optimizer!r} declares no bound; set a budget of calls"
            found[f"requests by {each.job.optimizer}"] = unbounded(hint)
        for request in each.requests:
            what = f"{each.job.optimizer}: {request.purpose}"
            each_one = find.max_request_cost(replace(request, lms=request.lms or own))
            found[what] = found.get(what, Amount()) + each_one.times(request.calls)
    return [(what, amount) for what, amount in found.items() if amount.calls]


def _capped(amount: Amount, budget: BudgetSettings, part: float) -> Amount:
    """Return an amount capped by a share of the budget's limits."""

    def least(name: str, value: float) -> float:
        limit = getattr(budget, name)
        return value if limit is None else min(value, limit * part)

    cost = amount.cost if amount.cost is None else least("cost", amount.cost)
    prompt, completion = (least("tokens", n) for n in (amount.prompt_tokens, amount.completion_tokens))
    found = replace(
        amount, calls=least("calls", amount.calls), prompt_tokens=prompt, completion_tokens=completion,
        cost=cost,
    )  # fmt: skip
    numbers = (found.calls, found.prompt_tokens, found.completion_tokens, found.cost or 0)
    return replace(found, why=() if all(map(math.isfinite, numbers)) else amount.why)


class _Engines:
    """Engines of a problem that can be opened without loading a model."""

    def __init__(self, problem: Problem) -> None:
        self._find = Executor(problem.engines).engine

    def max_request_cost(self, request: CallBound) -> Amount:
        """Return the upper bound of one request, over all models that it may be sent to."""
        found = Amount()
        for lm in request.lms:
            found = found.maximum(amount_of(self._engine(lm), request))
        return found if request.lms else unbounded("no model is named")

    def _engine(self, lm: str) -> Engine:
        try:
            return self._find(lm)
        except CompoundError:  # reported by the run; here its prompts are counted in bytes
            return _UnknownEngine()


class _UnknownEngine:
    """Placeholder for an engine that cannot be opened: no price, and one token per byte."""

    name, concurrency, remote, priced = "", 1, True, False

    def worst_case(self, request: Request) -> Usage:
        """Return one token per byte of the prompt."""
        size = request.size + 16 * len(request.messages) + 128
        return Usage(1, size, request.max_tokens)

    async def generate(self, request: Request) -> Completion:
        """Raise: an estimate sends no requests."""
        raise CompoundError("an estimate sends no requests to a model")

    async def aclose(self) -> None:
        """Do nothing."""


def _amount(amount: Amount) -> dict[str, Any]:
    def finite(value: float | None) -> float | int | None:
        return None if value is None or not math.isfinite(value) else value

    whole = {
        # float sums may exceed a whole number by rounding
        name: None if (value := finite(getattr(amount, name))) is None else math.ceil(value - 1e-9)
        for name in ("calls", "prompt_tokens", "completion_tokens", "tokens")
    }
    return {**whole, "cost": finite(amount.cost), "priced": amount.cost is not None, "why": list(amount.why)}


def _total(bounds: Sequence[MethodBounds]) -> dict[str, Any]:
    """Return the total over all methods."""
    amount = sum((each.rows[-1].amount for each in bounds), Amount())
    runs = sum(each.runs for each in bounds)
    return {"system_runs": runs if math.isfinite(runs) else None, **_amount(amount)}


def _steps(jobs: Sequence[Job], free: float, others: Sequence[str]) -> list[dict[str, Any]]:
    """Return the number of steps of each job that the budget allows, for jobs with steps."""
    share = free / max(1, len(jobs))
    return [
        {
            "job": ", ".join(job.keys),
            "runs_per_step": job.step,
            "steps": job.steps,
            "budget_holds": job.holds(max(0.0, share)),
            **({"unless_ended_by": list(others)} if others else {}),
        }
        for job in jobs
        if job.step
    ]


def _sizes(data: Dataset, problem: Problem) -> Mapping[str, Any]:
    sizes = {"train": len(problem.train), "valid": len(problem.valid), "test": len(problem.test)}
    return {"path": str(data.path), **sizes}


def missing_for_run(settings: OptimizeSettings) -> Iterator[str]:
    """Yield the settings whose library is not installed on this machine."""
    modules: dict[str, str] = {f"optimize.trackers: {name}": name for name in settings.trackers}
    if settings.runner is not None:
        modules["optimize.runner: ray"] = "ray"
    for setting, module in modules.items():
        try:
            check_installed(module, setting)
        except MissingExtra as error:
            yield str(error)
