"""Compute the facts of a run that both report formats render."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from compound.evaluation.evaluate import Evaluation
from compound.optimization.budget_plan import BudgetPlan
from compound.optimization.method import ROLLOUTS
from compound.optimization.proposals import requests_since
from compound.report.facts.documents import (
    ChangeDocument,
    Curve,
    DecisionFacts,
    FrontFacts,
    JobRow,
    Measured,
    MethodRow,
    MethodSpending,
    OutlookFacts,
    PlanDocument,
    ProposalFacts,
    Provenance,
    RetryFacts,
    RunFacts,
    SplitFacts,
    TallyFacts,
    TrainPoint,
)
from compound.report.facts.record import Record, compared, summary, to_strict_json, totals
from compound.report.facts.traces import read_traces
from compound.report.facts.words import headline
from compound.runs.candidate_record import (
    Candidate,
    cost_name,
    describe_costs,
    front,
    hypervolume,
    read_candidates,
)
from compound.runs.directory import inconsistency_errors
from compound.runs.events import DecisionEvent, JobEvent, Recorded, RetryEvent, Spent, is_supported


def summarize(path: str | Path) -> RunFacts:
    """Return all facts of the report on a run, as JSON types.

    Args:
        path: the directory of a finished or unfinished run.

    Raises:
        RunDirectoryError: the folder is not a run directory, or one of its files is broken.
    """
    with inconsistency_errors(path):
        return _summarized(Record.read(path), str(path))


def _summarized(record: Record, path: str) -> RunFacts:
    seed, search = record.config["optimize"]["seed"], record.state.search
    candidates = read_candidates(record.folder)
    facts: Measured = {
        "run": path,
        "system": record.config["system"],
        "metric": record.config["metric"],
        "method": record.method,
        "seed": seed,
        "missing": record.missing,
        "bounds": list(first.bounds) if (first := record.evaluation("before")) and first.bounds else None,
        "bounds_violation": record.state.bounds_violation,
        "stopped": search.stopped if search else "",
        "test_skipped": "; ".join(dict.fromkeys(e["skipped"] for e in record.events if e.get("skipped"))),
        "alpha": record.config["optimize"]["alpha"],
        "plan": _plan(search.plan) if search else None,
        "valid": _split(record, "before", "incumbent", seed),
        "test": _split(record, "test_before", "test_after", seed),
        "methods": methods(record, seed),
        "graph": record.config["graph"],
        "curves": [curve(r) for r in (record, *record.baselines())],
        "changes": changes(record),
        "decisions": [decision(e) for e in record.all("decision")],
        "outlook": _outlook(record),
        "front": _front(candidates),
        "cost_notes": describe_costs(candidates),
        "proposals": proposals(record),
        "jobs": [job(e) for e in record.all("job")],
        "retries": [retry(r.method, e) for r in (record, *record.baselines()) for e in r.all("retry")],
        "spent": {**record.spent, **({"incidents": record.incidents} if record.incidents else {})},
        "files": {name: record.folder.kind(name) is not None for name in ("best.json", "system.yaml")},
        "provenance": provenance(record),
        **read_traces(record),
    }
    known = to_strict_json(facts)
    return {**headline(known), **known}


def _plan(plan: BudgetPlan) -> PlanDocument:
    return {"decisions": plan.decisions, "jobs": plan.jobs, "cost": plan.cost, "level": plan.level}


def _outlook(record: Record) -> OutlookFacts:
    """Return the gains that the run can detect; empty if they were not estimated."""
    for event in record.all("outlook")[:1]:
        found: OutlookFacts = {"detection": event["detection"], "jobs": event["jobs"], "told": event["told"]}
        return {**found, "duplicates": event["duplicates"]} if "duplicates" in event else found
    return {}


def _front(candidates: Sequence[Candidate]) -> FrontFacts | None:
    """Return the front of score against cost, with the initial and the chosen configuration."""
    if len(candidates) < 2:
        return None
    cost, best = cost_name(candidates), front(candidates)
    costs = [float(getattr(candidate, cost)) for candidate in candidates]
    worst = min(candidate.gain or 0.0 for candidate in candidates), max(costs)
    shown = [c for c in candidates if c in best or c.chosen or c.fate == "start"]
    return {
        "cost": cost,
        "candidates": len(candidates),
        "hypervolume": hypervolume([(c.gain or 0.0, getattr(c, cost)) for c in best], worst),
        "rows": [
            {"mean": c.mean, "low": c.low, "high": c.high, "gain": c.gain, "evaluations": c.evaluations,
             "cost": getattr(c, cost), "fate": c.fate, "chosen": c.chosen, "on_front": c in best,
             "changed": [*c.values]}
            for c in sorted(shown, key=lambda c: float(getattr(c, cost)))
        ],
    }  # fmt: skip


def _split(record: Record, before: str, after: str, seed: int) -> SplitFacts:
    first, last = record.evaluation(before), record.evaluation(after)
    return {"before": summary(first), "after": summary(last), "gain": compared(first, last, seed=seed)}


def proposals(record: Record) -> ProposalFacts | None:
    """Return the requests for proposals by model and outcome, and their usage; ``None`` without any."""
    search = record.state.search
    if search is None or not search.ledger.models:
        return None
    models = cast("dict[str, TallyFacts]", requests_since(search.ledger))  # every outcome is counted
    stopped = {lm: tally.stopped for lm, tally in search.ledger.models.items() if tally.stopped}
    return {**totals(search.ledger.usage), "models": models, "stopped": stopped}


def methods(record: Record, seed: int) -> list[MethodRow]:
    """Return a row for the unoptimized system, for this method, and for each baseline."""
    start: MethodRow = {
        "method": "unoptimized",
        "valid": summary(record.evaluation("before")),
        "test": summary(record.evaluation("test_before")),
        "gain": None,
        "versus": None,
        "failed": None,
    }
    rows = [start, _method(record, seed)]
    for other in record.baselines():
        ours, theirs = record.evaluation("test_after"), other.evaluation("test_after")
        rows.append({**_method(other, seed), "versus": compared(theirs, ours, seed=seed)})
    return [{**row, "failed": _failed(row)} for row in rows]


def _method(record: Record, seed: int) -> MethodRow:
    decisions = record.all("decision")
    first, last = record.evaluation("test_before"), record.evaluation("test_after")
    return {
        "method": record.method,
        "valid": summary(record.evaluation("incumbent")),
        "test": summary(last),
        "gain": compared(first, last, seed=seed) if record.best != record.start else None,
        "versus": None,
        "accepted": sum(map(is_supported, decisions)),
        "decisions": len(decisions),
        "missing": record.missing,
        "failed": None,
        **method_spending(record.spent),
    }


def method_spending(spent: Spent) -> MethodSpending:
    """Return the spending of a method; unknown numbers are ``None``."""
    return {
        "system_runs": spent.get("system_runs"),
        "test_runs": spent.get("test_runs"),
        "calls": spent.get("calls"),
        "prompt_tokens": spent.get("prompt_tokens"),
        "completion_tokens": spent.get("completion_tokens"),
        "cost": spent.get("cost"),
        "unpriced": spent.get("unpriced"),
        "seconds": spent.get("seconds"),
    }


def _failed(row: MethodRow) -> int | None:
    counts = [split["failed"] for split in (row["valid"], row["test"]) if split]
    return sum(counts) if counts else None


def changes(record: Record) -> list[ChangeDocument]:
    """Return the changed parameters: key, kind (``text``, ``demos`` or ``value``), before and after."""
    before, after = record.start.to_json(), record.best.to_json()
    return [
        {"key": c.key, "kind": _kind(before.get(c.key), after.get(c.key)),
         "before": before.get(c.key), "after": after.get(c.key)}
        for c in record.start.diff(record.best)
    ]  # fmt: skip


def _kind(before: object, after: object) -> str:
    values = [value for value in (before, after) if value]
    if values and all(isinstance(v, list) and all(_is_demo(item) for item in v) for v in values):
        return "demos"
    texts = [value for value in values if isinstance(value, str)]
    prose = any(" " in text or "\n" in text or len(text) > 40 for text in texts)
    return "text" if prose and len(texts) == len(values) else "value"


def _is_demo(value: object) -> bool:
    return isinstance(value, Mapping) and {"inputs", "outputs"} <= set(value)


def decision(event: DecisionEvent) -> DecisionFacts:
    """Return the facts of an acceptance decision, without a comparison if the budget ended before it."""
    return {
        "decision": event["decision"],
        "accepted": event["accepted"],
        "level": event["level"],
        "verdict": event.get("verdict"),
        "probability": event.get("probability"),
        "margin": event.get("margin"),
        "examples": event.get("examples"),
        "p": event.get("p"),
        "test": event.get("test"),
        "before": event.get("before"),
        "after": event.get("after"),
        "gain": event.get("gain"),
        "changes": event["changes"],
        "over": event.get("over", []),
        "note": event.get("note"),
        "at": _runs(event),
    }


def retry(method: str, event: RetryEvent) -> RetryFacts:
    """Return the facts of failed test rows that were retried after the end of the run."""
    return {
        "method": method,
        "evaluation": event["evaluation"],
        "failed": event["failed"],
        "retried": event["retried"],
        "recovered": event["recovered"],
        "before": event["before"],
        "after": event["after"],
        "note": event.get("note"),
    }


def job(event: JobEvent) -> JobRow:
    """Return the facts of an optimizer's job."""
    unlike = _of_rollouts(event)
    return {
        "job": event["job"],
        "optimizer": event["optimizer"],
        "keys": event["keys"],
        "tried": event.get("tried"),
        "train_before": None if unlike else event.get("train_before"),
        "train_after": None if unlike else event.get("train_after"),
        "runs": event["runs"],
        "note": event["note"],
        "values": event["values"],
        "best_step": event.get("facts", {}).get("best_step"),
        "at": _runs(event),
    }


def _of_rollouts(event: JobEvent) -> bool:
    return bool(event.get("facts", {}).get(ROLLOUTS))


def _runs(event: Recorded) -> float:
    return float(event["spent"].get("system_runs", 0.0))


def curve(record: Record) -> Curve:
    """Return the scores of a method over its search: the start, train comparisons and decisions."""
    return {
        "method": record.method,
        "start": [
            {"at": _runs(e), "mean": e["mean"], "low": e["low"], "high": e["high"]}
            for e in record.all("start")
        ],
        "train": [point for e in record.all("job") if (point := _trained(e)) is not None],
        "decisions": [
            {"at": _runs(e), "accepted": e["accepted"], "before": e["before"], "after": e["after"],
             "changed": [change[0] for change in e["changes"]]}
            for e in record.all("decision")
            if "after" in e and "before" in e
        ],
        "end": record.spent.get("system_runs", 0.0),
    }  # fmt: skip


def _trained(event: JobEvent) -> TrainPoint | None:
    """Return a job's comparison on train examples, if it made one."""
    before, after = event["train_before"], event["train_after"]
    if before is None or after is None or _of_rollouts(event):
        return None
    return {"at": _runs(event), "before": before, "after": after, "proposed": bool(event["values"])}


def provenance(record: Record) -> Provenance:
    """Return the information for reproducing the run."""
    config, evaluated = record.config, record.evaluation("before")
    times = [e["at"] for e in record.events if "at" in e]
    return {
        "signature": config["signature"],
        "defaults": config["defaults"],
        "engines": config.get("engines", {}),
        "data": config["data"],
        "settings": config["optimize"],
        "versions": config["versions"],
        "start": evaluated.configuration if isinstance(evaluated, Evaluation) else record.start.digest,
        "best": record.best.digest,
        "began": times[0] if times else None,
        "ended": times[-1] if times else None,
    }
