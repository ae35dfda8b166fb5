"""Estimate the cost of an optimization, and what it can detect, before it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compound.api.optimize import make_problem, resolved
from compound.engine import Completion, Engine, Request, Usage
from compound.errors import CompoundError
from compound.evaluation.dataset import Dataset
from compound.evaluation.duplicates import check_no_overlaps, overlaps
from compound.evaluation.metrics import Comparison
from compound.execution.executor import Executor
from compound.graph.bounds import CallBound, Use
from compound.optimization.allowance import Allowance, allowance
from compound.optimization.bounds import Amount, amount_of, unbounded
from compound.optimization.budget_plan import stochastic
from compound.optimization.method import Job
from compound.optimization.preflight import missing_keys
from compound.optimization.problem import Problem
from compound.optimization.prospects import outlook, planned
from compound.optimizers import methods
from compound.settings.common import COUNTS, BudgetSettings

if TYPE_CHECKING:
    from compound.spec import Program

ASSUMED = (
    "Tries of a request that failed come on top, and so do runs that are cancelled when too many fail.",
    "Prompts are counted by bytes where no tokenizer has seen them, about four times their tokens in "
    "English; every call is counted as the longest one, and a cached run as a new one.",
)
OF_METRIC = "Calls that a metric of your own makes are neither counted nor bounded."


def estimate(program: Program, *, strict: bool = False) -> dict[str, Any]:
    """Return the resolved settings, sizes, plan, prospects and upper bounds of a program's optimization.

    Reads the data and corpora, loads no model. The bounds cover system runs, the test split, requests for
    proposals, and the same for each baseline.

    Args:
        program: says what is to be optimized, with data and a metric.
        strict: whether to refuse examples that are in several splits.

    Raises:
        DataError: some are, with ``strict``.
    """
    assert program.data is not None
    assert program.metric is not None
    problem = make_problem(
        program.system, program.data, program.metric, program.optimize, program.find_engine, program.folder
    )
    settings = problem.settings
    others = [methods.method(n, problem.system, settings, problem.folder) for n in settings.baselines]
    bounds = [bound(problem)]
    for name, method in zip(settings.baselines, others, strict=True):
        own = settings.model_copy(update={"method": name, "baselines": ()})
        bounds.append(bound(replace(problem, settings=own, method=method)))
    plan, free = planned(problem)
    splits = {"train": problem.train, "valid": problem.valid, "test": problem.test}
    equal = overlaps(splits, program.data.id)
    if strict:
        check_no_overlaps(equal)
    return {
        "system": problem.system.name,
        "data": _sizes(program.data, problem),
        "jobs": [f"{job.optimizer}: {', '.join(job.keys)}" for job in problem.method.jobs],
        "plan": {"decisions": plan.decisions, "level": plan.level, "runs_per_decision": plan.cost},
        "methods": [settings.method, *settings.baselines],
        "notes": list(problem.method.notes),
        "steps": _steps(problem.method.jobs, free, _others(settings.budget)),
        "prospects": outlook(problem),
        "duplicates": [str(overlap) for overlap in equal],
        "shared": any(overlap.across for overlap in equal),
        "bounds": [row.to_json() for each in bounds for row in each.rows],
        "at_most": _total(bounds),
        "budget": {
            name: {"limit": limit, "counts": COUNTS[name]} for name, limit in settings.budget.limits().items()
        },
        "keys": missing_keys(problem),
        "assumed": [*ASSUMED, *([] if isinstance(problem.metric, Comparison) else [OF_METRIC])],
        "optimize": resolved(problem),
    }


@dataclass(frozen=True)
class Row:
    """One line of the table of bounds.

    Attributes:
        method: whose.
        what: is bounded.
        runs: system runs, where it is made of these.
        amount: what they can take.
    """

    method: str
    what: str
    runs: float | None
    amount: Amount

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types; infinite numbers are ``None``."""
        runs = None if self.runs is None or not math.isfinite(self.runs) else self.runs
        return {"method": self.method, "what": self.what, "system_runs": runs, **_amount(self.amount)}


@dataclass(frozen=True)
class Bound:
    """The bounds of one method.

    Attributes:
        rows: what it is made of, and last the sum within the budget.
        runs: system runs, those on the test split included.
        allowed: what its jobs may ask for.
    """

    rows: Sequence[Row]
    runs: float
    allowed: Allowance


def bound(problem: Problem) -> Bound:
    """Return the bounds of the method of a problem."""
    settings, find = problem.settings, _Opened(problem)
    name, system = settings.method, problem.system
    own = (system.lm,) if system.lm else ()
    plan, free = planned(problem)
    allowed = allowance(problem, free, plan.decisions, read_corpora=True, lms=own)
    limit = settings.budget.system_runs
    runs = math.inf if limit is None else limit
    search = _search(allowed, find).times(runs)
    if limit is None and search.calls:
        search = replace(search, why=(*search.why, "optimize.budget.system_runs is not set"))
    tests = 2 * len(problem.test) * (settings.repeats if stochastic(system) else 1)
    test = _whole_run(allowed, find).times(tests)
    rows = [
        Row(name, "system runs on train and validation examples", runs, search),
        *(Row(name, what, None, amount) for what, amount in _proposals(allowed, find, own)),
    ]
    sum_ = sum((row.amount for row in rows), Amount())
    rows.append(Row(name, "system runs on the test split", tests, test))
    total = _within(sum_, settings.budget, 1 - settings.budget.test_share)
    total += _within(test, settings.budget, settings.budget.test_share)
    return Bound([*rows, Row(name, "total", runs + tests, total)], runs + tests, allowed)


def _search(allowed: Allowance, find: _Opened) -> Amount:
    """Return what one system run can take, when runs are counted by the calls that were really made.

    A run whose other calls come from the cache counts as a part of one: so many parts may all be the most
    expensive call.
    """
    largest = Amount()
    for name, use in allowed.survey.uses.items():
        each = _call(name, use, find)
        uncached = not allowed.outlook.system.components[name].cacheable
        if use.requests is not None and each.calls and uncached and allowed.survey.counted:
            each = unbounded(f"{name!r} asks a model in every run, even in one that is cached")
        largest = largest.joined(each)
    return largest.times(allowed.survey.counted) if allowed.survey.counted else _whole_run(allowed, find)


def _whole_run(allowed: Allowance, find: _Opened) -> Amount:
    """Return what one run can take in which nothing is cached."""
    calls = (_call(name, use, find).times(use.calls) for name, use in allowed.survey.uses.items())
    return sum(calls, Amount())


def _call(name: str, use: Use, find: _Opened) -> Amount:
    """Return what one call of a component can take."""
    if use.requests is None:
        return unbounded(f"component {name!r} does not declare what it asks of models (Component.reach)")
    if not math.isfinite(use.calls) and use.requests:
        return unbounded(f"how often {name!r} is called is known only at run time")
    return sum((find.max_request_cost(request).times(request.calls) for request in use.requests), Amount())


def _proposals(allowed: Allowance, find: _Opened, own: tuple[str, ...]) -> list[tuple[str, Amount]]:
    """Return what requests for proposals can take, by optimizer and purpose."""
    found: dict[str, Amount] = {}
    for each in allowed.jobs:
        if each.bound is None:
            hint = f"optimizer {each.job.optimizer!r} declares no bound: give a budget of calls"
            found[f"requests by {each.job.optimizer}"] = unbounded(hint)
        for request in each.requests:
            what = f"{each.job.optimizer}: {request.purpose}"
            each_one = find.max_request_cost(replace(request, lms=request.lms or own))
            found[what] = found.get(what, Amount()) + each_one.times(request.calls)
    return [(what, amount) for what, amount in found.items() if amount.calls]


def _within(amount: Amount, budget: BudgetSettings, part: float) -> Amount:
    """Return an amount that a part of the budget's limits ends."""

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


class _Opened:
    """The engines of a problem, as far as they can be opened without loading a model."""

    def __init__(self, problem: Problem) -> None:
        self._find = Executor(problem.engines).engine

    def max_request_cost(self, request: CallBound) -> Amount:
        """Return what one request can take, of any of the models that it may go to."""
        found = Amount()
        for lm in request.lms:
            found = found.joined(amount_of(self._engine(lm), request))
        return found if request.lms else unbounded("no model is named")

    def _engine(self, lm: str) -> Engine:
        try:
            return self._find(lm)
        except CompoundError:  # the run will say so; here its prompts are counted by bytes
            return _Unknown()


class _Unknown:
    """Stands for an engine that cannot be opened here: it has no price, and a token for each byte."""

    name, concurrency, remote, priced = "", 1, True, False

    def worst_case(self, request: Request) -> Usage:
        """Return a token for each byte of the prompt."""
        size = sum(len(message.content.encode()) + 16 for message in request.messages) + 128
        return Usage(1, size, request.max_tokens)

    async def generate(self, request: Request) -> Completion:
        """Refuse: an estimate sends no requests."""
        raise CompoundError("an estimate sends no requests to a model")

    async def aclose(self) -> None:
        """Do nothing."""


def _amount(amount: Amount) -> dict[str, Any]:
    def finite(value: float | None) -> float | int | None:
        return None if value is None or not math.isfinite(value) else value

    whole = {
        name: None if (value := finite(getattr(amount, name))) is None else math.ceil(value - 1e-9)
        for name in ("calls", "prompt_tokens", "completion_tokens", "tokens")
    }
    return {**whole, "cost": finite(amount.cost), "priced": amount.cost is not None, "why": list(amount.why)}


def _total(bounds: Sequence[Bound]) -> dict[str, Any]:
    """Return the sum over all methods."""
    amount = sum((each.rows[-1].amount for each in bounds), Amount())
    runs = sum(each.runs for each in bounds)
    return {"system_runs": runs if math.isfinite(runs) else None, **_amount(amount)}


def _others(budget: BudgetSettings) -> list[str]:
    """Return the limits other than system runs: what a run takes of these is not known beforehand."""
    return [name for name in budget.limits() if name != "system_runs"]


def _steps(jobs: Sequence[Job], free: float, others: Sequence[str]) -> list[dict[str, Any]]:
    """Return how many steps of each job the budget holds, of jobs that go by steps."""
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
