"""Run a few examples within a stated limit, and extrapolate the usage of a whole optimization from them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compound.core.engine import NO_USAGE, Message, Request, Usage
from compound.core.errors import CompoundError
from compound.core.loops import run_blocking
from compound.core.security.untrusted import UntrustedFolder
from compound.evaluation.evaluate import evaluate
from compound.execution.budget import Meter
from compound.execution.cache import DiskCache
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.registry.engines import worst_case
from compound.optimization.method import Problem
from compound.optimization.runs.directory import PILOT
from compound.optimization.runs.recorder import CACHE, MEMORY_FOLDER

__all__ = ["run_pilot"]

SHARE = 0.1  # of each limit of the budget except system runs, for the pilot
ANSWER = 1000  # tokens that a proposal request is taken to answer
QUANTITIES = ("tokens", "dollars", "minutes")


@dataclass(frozen=True)
class _Measured:
    """One run of the pilot: tokens, dollars (``None`` if a price is unknown) and seconds."""

    tokens: int
    dollars: float | None
    seconds: float


def run_pilot(
    problem: Problem,
    count: int,
    path: Path,
    runs: Sequence[Mapping[str, Any]],
    requests: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Run the initial configuration on the first validation examples, and extrapolate.

    Args:
        problem: the problem; its engines and executor are those of the run.
        count: the number of examples.
        path: the run directory, which stores the calls.
        runs: the system runs of each method; see `compound.api.estimate`.
        requests: the proposal requests.

    Raises:
        BudgetExhausted: the limit covers no run.
    """
    examples = problem.valid[:count]
    budget = replace(problem.settings.budget.total().share(SHARE), system_runs=len(examples))
    meter, traces = Meter(budget), list[Trace]()
    started = time.monotonic()
    run_blocking(_evaluate(problem, len(examples), path, meter, traces))
    wall = time.monotonic() - started
    measured = [_measure(trace) for trace in traces]
    failures = sorted({str(trace.failure.message) for trace in traces if trace.failure})
    totals, unknown = _extrapolate(problem, measured, runs, requests)
    per_run = {
        "tokens": _summary([each.tokens for each in measured]),
        "dollars": _summary([each.dollars for each in measured]),
        "seconds": _summary([each.seconds for each in measured]),
    }
    return {
        "examples": len(examples),
        "runs": len(measured),
        "failures": failures,
        "limit": {k: v for k, v in vars(budget).items() if v is not None},
        "spent": {**meter.usage.to_json(), "system_runs": meter.system_runs, "seconds": wall},
        "per_run": per_run,
        "total": totals,
        "extrapolated": [
            "all planned system runs are made, each at the cost of the cheapest to the dearest run of the "
            "pilot",
            "proposal requests: none of them to all of them, each as one that shows all runs of the pilot "
            f"and answers in {ANSWER:,} tokens",
            f"minutes: between {_at_a_time(problem)} runs at a time and one after another",
        ],
        "not_known": [
            "how much longer tuned prompts and demonstrations make the requests",
            *unknown,
        ],
    }


async def _evaluate(
    problem: Problem, count: int, path: Path, meter: Meter, traces: list[Trace]
) -> None:
    folder = UntrustedFolder(path).below(PILOT).make()
    cache = DiskCache(folder.path / CACHE)
    executor = problem.open_executor(
        problem.engines,
        cache=cache,
        meter=meter,
        seed=problem.settings.seed,
        folder=path / MEMORY_FOLDER,
    )
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


def _measure(trace: Trace) -> _Measured:
    usage = trace.whole_usage + sum((call.usage for call in trace.metric_calls), NO_USAGE)
    seconds = trace.seconds + sum(call.seconds for call in trace.metric_calls)
    return _Measured(usage.tokens, None if usage.unpriced else usage.cost, seconds)


def _summary(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return the minimum, mean and maximum of values; ``None`` if one is unknown."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return None
    return {"lowest": min(known), "mean": sum(known) / len(known), "highest": max(known)}


def _at_a_time(problem: Problem) -> int:
    return min(problem.settings.concurrency, len(problem.valid))


def _extrapolate(
    problem: Problem,
    measured: Sequence[_Measured],
    runs: Sequence[Mapping[str, Any]],
    requests: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], list[str]]:
    """Return the range of each quantity over all methods, and what is not known."""
    unknown: list[str] = []
    total = sum(math.inf if each["total"] is None else each["total"] for each in runs)
    if math.isinf(total):
        unknown.append("the number of system runs: optimize.budget.system_runs is not set")
    asked = sum(math.inf if each["at_most"] is None else each["at_most"] for each in requests)
    if math.isinf(asked):
        unknown.append("the number of proposal requests: an optimizer does not state it")
    shown = sum(each.tokens for each in measured)
    seconds = [each.seconds for each in measured]
    tokens = [each.tokens for each in measured]
    dollars = [each.dollars for each in measured]
    proposal_cost = _proposal_cost(problem, requests, shown + ANSWER)
    if any(job.step for job in problem.method.jobs):
        unknown.append("the minutes of training steps, in addition to their system runs")
    found = {
        "tokens": (
            _times(total, min(tokens)),
            _times(total, max(tokens)) + _times(asked, shown + ANSWER),
        ),
        "minutes": (
            _times(total, min(seconds)) / _at_a_time(problem) / 60,
            (_times(total, max(seconds)) + _times(asked, max(seconds))) / 60,
        ),
    }
    known = [each for each in dollars if each is not None]
    if len(known) < len(dollars) or proposal_cost is None:
        unknown.append("dollars: a model has no known price")
    else:
        found["dollars"] = (
            _times(total, min(known)),
            _times(total, max(known)) + proposal_cost,
        )
    limits = problem.settings.budget
    caps = {"tokens": limits.tokens, "dollars": limits.cost, "minutes": limits.minutes}
    return {
        name: _range(found[name], caps[name], len(runs)) for name in QUANTITIES if name in found
    }, unknown


def _times(count: float, each: float) -> float:
    return count * each if each else 0.0


def _range(found: tuple[float, float], cap: float | None, methods: int) -> dict[str, float | None]:
    """Return both ends of a range, within the limit of the budget for each method; ``None`` if infinite."""
    limit = math.inf if cap is None else cap * methods
    low, high = (min(value, limit) for value in found)
    ends = {"from": low, "to": high}
    return {name: value if math.isfinite(value) else None for name, value in ends.items()}


def _proposal_cost(
    problem: Problem, requests: Sequence[Mapping[str, Any]], tokens: int
) -> float | None:
    """Return the dollars of all proposal requests, each of a number of tokens; ``None`` if unknown."""
    engine_of, total = Executor(problem.engines).engine, 0.0
    for each in requests:
        rate = None
        with suppress(CompoundError):  # the run reports why an engine cannot be opened
            rate = _dollars_per_token(engine_of(each["model"])) if each["model"] else None
        if rate is None:
            return None
        count = math.inf if each["at_most"] is None else each["at_most"]
        total += _times(count, rate * tokens)
    return total


def _dollars_per_token(engine: Any) -> float | None:  # noqa: ANN401
    """Return the price of a token in a request with a prompt four times as long as its answer."""
    if not engine.priced:
        return None
    request = Request((Message("user", "word " * 4 * ANSWER),), max_tokens=ANSWER)
    worst: Usage = worst_case(engine, request)
    return worst.cost / worst.tokens if worst.tokens else 0.0
