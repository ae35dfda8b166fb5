"""Plan of an optimization before it runs: counts, the effects it can detect, and what a pilot measures."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from compound.api.description import resolved_settings
from compound.api.optimize import make_problem
from compound.api.runners import check_runner, executor_opener
from compound.core.engine import Message, Request
from compound.core.errors import CompoundError, MissingExtra, check_installed
from compound.core.loops import run_blocking
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.paths import run_folder
from compound.evaluation.evaluate import evaluate
from compound.evaluation.examples import check_no_overlaps, find_overlaps
from compound.evaluation.metrics.comparison import Comparison
from compound.evaluation.metrics.scoring import ModelMetric
from compound.execution.budget import Meter
from compound.execution.cache import DiskCache
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.call_counts import count_calls
from compound.graph.registry.engines import with_gpu_shares, worst_case
from compound.optimization.budget_plan import plan_jobs, stochastic
from compound.optimization.method import Job, Problem
from compound.optimization.preflight import missing_keys, models_of, outlook, plan_by_runs
from compound.optimization.runs.directory import PILOT
from compound.optimization.runs.recorder import CACHE, MEMORY_FOLDER
from compound.optimization.settings.base import BudgetSettings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.memory_plan import plan_memory

if TYPE_CHECKING:
    from compound.yaml import Program

UNKNOWN = "tokens, dollars and minutes; --pilot 3 measures them on 3 validation examples"
RETRIES = (
    "retries of failed requests, and requests to ask again after an answer that cannot be read"
)
METRIC = "calls made by a user-defined metric"


def estimate(
    program: Program,
    *,
    strict: bool = False,
    pilot: int = 0,
    run_dir: str | Path | None = None,
) -> dict[str, Any]:
    """Return the resolved settings, sizes, plan, prospects and counts of a program's optimization.

    Without a pilot, data are read, but no model is loaded and no request is sent. The counts cover
    system runs, calls per run, the test split, and proposal requests.

    Args:
        program: the program, with data and a metric.
        strict: whether to reject examples that occur in several splits.
        pilot: the number of validation examples to run, from which tokens, dollars and minutes are
            extrapolated. Each counts as one system run, and together they spend at most a tenth of
            every other limit of the budget.
        run_dir: the directory of the run, in which the calls of a pilot are stored; default:
            ``runs/<system name>``. The run uses them, and charges them to its budget like new
            calls.

    Raises:
        DataError: splits share examples, with ``strict``.
        DeclarationError: workers cannot run the system or a method, and a runner is set.
        CompoundError: models in this process do not fit into memory.
        BudgetExhausted: the limit of the pilot covers no run.
    """
    assert program.data is not None
    assert program.metric is not None
    find = program.find_engine
    problem = make_problem(
        program.system, program.data, program.metric, program.optimize, find, program.folder
    )
    settings = problem.settings
    check_runner(settings, problem.system, problem.method)
    plan, free = plan_by_runs(problem)
    memory = plan_memory(problem)
    memory.check()
    sizes = {"train": problem.train, "valid": problem.valid, "test": problem.test}
    equal = find_overlaps(sizes, program.data.id)
    if strict:
        check_no_overlaps(equal)
    limits, texts = settings.budget.limits(), BudgetSettings.model_fields
    runs, calls, requests = _system_runs(problem), _calls(problem), [*_requests(problem)]
    facts: dict[str, Any] = {
        "system": problem.system.name,
        "data": {"path": str(program.data.path), **{n: len(rows) for n, rows in sizes.items()}},
        "jobs": [f"{job.optimizer}: {', '.join(job.keys)}" for job in problem.method.jobs],
        "plan": {"decisions": plan.decisions, "level": plan.level, "runs_per_decision": plan.cost},
        "method": settings.method,
        "notes": [*missing_for_run(settings), *problem.method.notes],
        "steps": _steps(problem.method.jobs, free, [n for n in limits if n != "system_runs"]),
        "prospects": outlook(problem),
        "duplicates": [str(overlap) for overlap in equal],
        "shared": any(overlap.across for overlap in equal),
        "system_runs": runs,
        "calls": calls,
        "requests": requests,
        "model_calls": _model_calls(problem, runs, calls, requests),
        "budget": {
            name: {"limit": limit, "counts": _first_sentence(texts[name].description or "")}
            for name, limit in limits.items()
        },
        "memory": memory.lines(),
        "keys": missing_keys(problem),
        "not_counted": [
            RETRIES,
            *([] if isinstance(problem.metric, Comparison | ModelMetric) else [METRIC]),
        ],
        "not_known": [] if pilot else [UNKNOWN],
        "optimize": resolved_settings(problem),
    }
    if pilot:
        ready = replace(
            problem,
            engines=with_gpu_shares(problem.engines, memory.gpu_shares),
            open_executor=executor_opener(settings, problem.system, find, problem.method),
        )
        path = Path(run_dir) if run_dir is not None else run_folder(problem.system.name)
        facts["pilot"] = _run_pilot(ready, pilot, path, runs, requests)
    return facts


def _system_runs(problem: Problem) -> dict[str, Any]:
    """Return the maximum numbers of system runs; ``None`` without a limit."""
    settings, limit = problem.settings, problem.settings.budget.system_runs
    test = 2 * len(problem.test) * (settings.repeats if stochastic(problem.system) else 1)
    total = None if limit is None else limit + test
    return {"search": limit, "test": test, "total": total}


def _calls(problem: Problem) -> list[dict[str, Any]]:
    """Return the calls of each component in one system run, and those of the metric."""
    examples = [*problem.train, *problem.valid, *problem.test]
    metric = problem.metric
    rows = [
        {
            "component": name,
            "per_run": str(count),
            "at_most": count.most if math.isfinite(count.most) else None,
            "models": models_of(problem.system, name),
        }
        for name, count in count_calls(problem.system, examples).items()
    ]
    if isinstance(metric, ModelMetric):
        n = metric.calls_per_score
        models = list(metric.lms)
        name = f"metric {metric.name}"
        rows.append({"component": name, "per_run": str(n), "at_most": n, "models": models})
    return rows


def _model_calls(
    problem: Problem,
    runs: Mapping[str, Any],
    calls: Sequence[Mapping[str, Any]],
    requests: Sequence[Mapping[str, Any]],
) -> int | None:
    """Return the maximum number of calls of models; ``None`` if it has no limit.

    A system run may consist of several runs with cached calls, and all calls that these execute may
    be calls of models. Each of them is scored, so that the calls of a metric have no limit.
    """
    counts = [runs["total"], *(each["at_most"] for each in (*calls, *requests))]
    if None in counts or isinstance(problem.metric, ModelMetric):
        return None
    components = problem.system.components
    counted = [row for row in calls if components[row["component"]].cacheable] or calls
    per_run: float = sum(row["at_most"] for row in counted)
    total: float = runs["total"] * per_run
    total += sum(each["at_most"] for each in requests)
    return math.ceil(total)


def _requests(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield the maximum numbers of proposal requests; ``None`` if an optimizer does not state them."""
    plan, free = plan_by_runs(problem)
    own = next(iter(problem.system.lms), None)
    found: dict[tuple[str, str | None], int | None] = {}
    for each in plan_jobs(problem, free, plan.decisions):
        name = each.job.optimizer
        if each.plan is None:
            found[f"{name}: requests", own] = None
        for request in each.plan.requests if each.plan else ():
            key = (f"{name}: {request.purpose}", request.lm or own)
            before, more = found.get(key, 0), request.count * each.times
            known = before is not None and math.isfinite(more)
            found[key] = before + math.ceil(more) if known and before is not None else None
    for (what, lm), count in found.items():
        if count != 0:
            yield {"what": what, "model": lm, "at_most": count}


def _first_sentence(text: str) -> str:
    """Return the first sentence of a description, as a part of a sentence."""
    first = " ".join(text.split()).partition(". ")[0].rstrip(".")
    return first[:1].lower() + first[1:]


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


# --- the pilot ------------------------------------------------------------------------------------

SHARE = 0.1  # of each limit of the budget except system runs, for the pilot
ANSWER = 1000  # tokens that a proposal request is taken to answer


def _run_pilot(
    problem: Problem,
    count: int,
    path: Path,
    runs: Mapping[str, Any],
    requests: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Run the initial configuration on the first validation examples, and extrapolate."""
    examples, limits = problem.valid[:count], problem.settings.budget.total()
    budget = replace(limits.share(SHARE), system_runs=len(examples))
    meter = Meter(budget, whole=limits, rest=f"a pilot spends at most {SHARE:.0%}")
    started = time.monotonic()
    traces = run_blocking(_evaluate(problem, len(examples), path, meter))
    wall = time.monotonic() - started
    usages = [sum((c.usage for c in each.metric_calls), each.whole_usage) for each in traces]
    is_priced = not any(usage.unpriced for usage in usages)
    measured: dict[str, list[float]] = {
        "tokens": [usage.tokens for usage in usages],
        "dollars": [usage.cost for usage in usages] if is_priced else [],
        "seconds": [each.seconds + sum(c.seconds for c in each.metric_calls) for each in traces],
    }
    totals, unknown = _extrapolate(problem, measured, runs, requests)
    at_a_time = _at_a_time(problem)
    return {
        "examples": len(examples),
        "runs": len(traces),
        "failures": sorted({each.failure.message for each in traces if each.failure}),
        "limit": {k: v for k, v in vars(budget).items() if v is not None},
        "spent": {**meter.usage.to_json(), "system_runs": meter.system_runs, "seconds": wall},
        "per_run": {
            name: {"lowest": min(values), "mean": fmean(values), "highest": max(values)}
            if values
            else None
            for name, values in measured.items()
        },
        "total": totals,
        "extrapolated": [
            "system runs: all that are planned; from the least to the most expensive run of the pilot",
            "proposal requests: from none to all that are planned, each with the text of all runs of the "
            f"pilot and an answer of {ANSWER:,} tokens",
            f"minutes: from {at_a_time} concurrent runs to one run at a time",
        ],
        "not_known": [
            "how much longer tuned prompts and demonstrations make the requests",
            *unknown,
        ],
    }


async def _evaluate(problem: Problem, count: int, path: Path, meter: Meter) -> list[Trace]:
    cache = DiskCache(UntrustedFolder(path).below(PILOT).make().path / CACHE)
    folder, seed = path / MEMORY_FOLDER, problem.settings.seed
    executor = problem.open_executor(
        problem.engines, cache=cache, meter=meter, seed=seed, folder=folder
    )
    traces = list[Trace]()
    try:
        await evaluate(
            executor,
            problem.system,
            problem.valid[:count],
            problem.metric,
            rules=replace(problem.rules, max_failed=1.0),
            on_trace=lambda _, trace: traces.append(trace),
            partial=True,
        )
    finally:
        await executor.aclose()
        cache.close()
    return traces


def _at_a_time(problem: Problem) -> int:
    return min(problem.settings.concurrency, len(problem.valid))


def _extrapolate(
    problem: Problem,
    measured: Mapping[str, Sequence[float]],
    runs: Mapping[str, Any],
    requests: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], list[str]]:
    """Return the range of each quantity within the budget, and what is not known."""
    total = math.inf if runs["total"] is None else runs["total"]
    asked = sum(math.inf if each["at_most"] is None else each["at_most"] for each in requests)
    text = sum(measured["tokens"]) + ANSWER
    rates = [_dollars_per_token(problem, each["model"]) for each in requests]
    is_priced = bool(measured["dollars"]) and None not in rates
    proposals: dict[str, float] = {  # the most that all proposal requests take
        "tokens": _times(asked, text),
        "dollars": sum(
            _times(math.inf if each["at_most"] is None else each["at_most"], (rate or 0.0) * text)
            for each, rate in zip(requests, rates, strict=True)
        ),
        "minutes": _times(asked, max(measured["seconds"])) / 60,
    }
    budget = problem.settings.budget
    limits = {"tokens": budget.tokens, "dollars": budget.cost, "minutes": budget.minutes}
    found: dict[str, Any] = {}
    for name, limit in limits.items():
        if name == "dollars" and not is_priced:
            continue
        values = measured.get(name) or [each / 60 for each in measured["seconds"]]
        low, high = _times(total, min(values)), _times(total, max(values)) + proposals[name]
        low = low / _at_a_time(problem) if name == "minutes" else low
        ends = (min(end, math.inf if limit is None else limit) for end in (low, high))
        found[name] = {
            side: end if math.isfinite(end) else None
            for side, end in zip(("from", "to"), ends, strict=True)
        }
    unknown = {
        "the number of system runs: optimize.budget.system_runs is not set": math.isinf(total),
        "the number of proposal requests: an optimizer does not state it": math.isinf(asked),
        "the minutes of training steps, in addition to their system runs": any(
            job.step for job in problem.method.jobs
        ),
        "dollars: a model has no known price": not is_priced,
    }
    return found, [reason for reason, is_unknown in unknown.items() if is_unknown]


def _times(count: float, each: float) -> float:
    return count * each if each else 0.0


def _dollars_per_token(problem: Problem, model: str | None) -> float | None:
    """Return the price of a token in a request with a prompt four times as long as its answer."""
    try:
        engine = Executor(problem.engines).engine(model) if model else None
    except CompoundError:  # the run reports why it cannot be opened
        return None
    if engine is None or not engine.priced:
        return None
    request = Request((Message("user", "word " * 4 * ANSWER),), max_tokens=ANSWER)
    worst = worst_case(engine, request)
    return worst.cost / worst.tokens if worst.tokens else 0.0
