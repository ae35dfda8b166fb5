"""Facts of a run for its report, computed from the files of its directory as JSON types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from compound.optimization.method import ROLLOUTS
from compound.optimization.proposals import requests_since
from compound.optimization.runs.candidate_record import (
    CandidateRecord,
    cost_name,
    describe_costs,
    front,
    hypervolume,
    read_candidates,
)
from compound.optimization.runs.directory import inconsistency_errors
from compound.optimization.runs.recorder import is_supported
from compound.report.headline import headline
from compound.report.record import (
    Facts,
    Record,
    attributes_of,
    compared,
    items_of,
    read_traces,
    summary,
    to_strict_json,
    totals,
)

SPENDING = (
    "system_runs",
    "test_runs",
    "calls",
    "prompt_tokens",
    "completion_tokens",
    "cost",
    "unpriced",
    "seconds",
)
DECISION = (
    "decision",
    "accepted",
    "level",
    "verdict",
    "probability",
    "margin",
    "examples",
    "p",
    "test",
    "before",
    "after",
    "gain",
    "changes",
    "note",
)
JOB = ("job", "optimizer", "keys", "tried", "runs", "note", "values")
RETRY = ("evaluation", "failed", "retried", "recovered", "before", "after", "note")


def summarize(path: str | Path, *, traces: bool = True) -> Facts:
    """Return all facts of the report on a run, as JSON types.

    ``title``, ``sentence``, ``verdict`` and ``notes`` are the result in words; ``valid`` and
    ``test`` the scores ``before`` and ``after`` with the ``gain``; ``methods``, ``changes``,
    ``decisions``, ``jobs``, ``components``, ``failures`` and ``examples`` the rows of the report's
    sections; ``spent`` and ``provenance`` the costs and the origin of the run. Scores hold
    ``mean``, ``low``, ``high``, ``n`` and ``failed``; ``at`` is the number of system runs spent
    before an event. Unknown numbers are ``None``.

    Args:
        path: the directory of a finished or unfinished run.
        traces: whether to read the traces, for ``components``, ``failures`` and ``examples``.

    Raises:
        RunDirectoryError: the folder is not a run directory, or one of its files is broken.
    """
    with inconsistency_errors(path):
        record = Record.read(path)
        facts = _summarized(record, str(path)) | (read_traces(record) if traces else {})
        known = to_strict_json(facts)
        return {**headline(known), **known}


def _summarized(record: Record, path: str) -> Facts:
    config, state, search = record.config, record.state, record.state.search
    seed, first = config["optimize"]["seed"], record.evaluation("before")
    candidates = read_candidates(record.folder)
    records = (record, *record.baselines())
    skipped = dict.fromkeys(e["skipped"] for e in record.events if e.get("skipped"))
    return {
        "run": path,
        "system": config["system"],
        "metric": config["metric"],
        "method": record.method,
        "seed": seed,
        "missing": record.missing,
        "bounds": list(first.bounds) if first and first.bounds else None,
        "bounds_violation": state.bounds_violation,
        "stopped": search.stopped if search else "",
        "test_skipped": "; ".join(skipped),
        "alpha": config["optimize"]["alpha"],
        "plan": attributes_of(search.plan, "decisions", "jobs", "cost", "level")
        if search
        else None,
        "valid": _split(record, "before", "incumbent"),
        "test": _split(record, "test_before", "test_after"),
        "methods": _methods(record),
        "graph": config["graph"],
        "curves": [_curve(each) for each in records],
        "changes": _changes(record),
        "decisions": [
            {**items_of(e, DECISION), "over": e.get("over", []), "at": _runs(e)}
            for e in record.all("decision")
        ],
        "outlook": _outlook(record),
        "front": _front(candidates),
        "cost_notes": describe_costs(candidates),
        "proposals": _proposals(record),
        "jobs": [_job(e) for e in record.all("job")],
        "retries": [
            {"method": r.method, **items_of(e, RETRY)} for r in records for e in r.all("retry")
        ],
        "spent": _spent(record),
        "files": {
            name: record.folder.kind(name) is not None for name in ("best.json", "system.yaml")
        },
        "provenance": _provenance(record),
    }


def _runs(event: Facts) -> float:
    return float(event["spent"].get("system_runs", 0.0))


def _spent(record: Record) -> Facts:
    """Return the spending, with the number of incidents at servers by kind."""
    counts = [Counter(meter.incidents) for meter in record.state.meters]
    incidents = dict(sum(counts, Counter()))
    return {**record.spent, **({"incidents": incidents} if incidents else {})}


def _outlook(record: Record) -> Facts:
    """Return the gains that the run can detect; empty if they were not estimated."""
    for event in record.all("outlook")[:1]:
        names = ("detection", "jobs", "told", "duplicates")
        return {name: event[name] for name in names if name in event}
    return {}


def _front(candidates: Sequence[CandidateRecord]) -> Facts | None:
    """Return the front of score against cost, with the initial and the chosen configuration."""
    if len(candidates) < 2:
        return None
    cost, best = cost_name(candidates), front(candidates)
    worst = (
        min(candidate.gain or 0.0 for candidate in candidates),
        max(float(getattr(candidate, cost)) for candidate in candidates),
    )
    shown = [c for c in candidates if c in best or c.chosen or c.fate == "start"]
    names = ("mean", "low", "high", "gain", "evaluations", "fate", "chosen")
    rows = [
        {
            **attributes_of(c, *names),
            "cost": getattr(c, cost),
            "on_front": c in best,
            "changed": [*c.values],
        }
        for c in shown
    ]
    return {
        "cost": cost,
        "candidates": len(candidates),
        "hypervolume": hypervolume([(c.gain or 0.0, getattr(c, cost)) for c in best], worst),
        "rows": sorted(rows, key=lambda row: float(row["cost"])),
    }


def _split(record: Record, before: str, after: str) -> Facts:
    first, last = record.evaluation(before), record.evaluation(after)
    if first and last:  # the budget may have left out examples of the last one
        first = first.shared(last)
    return {"before": summary(first), "after": summary(last), "gain": compared(record, first, last)}


def _proposals(record: Record) -> Facts | None:
    """Return the requests for proposals by model, and their usage; ``None`` without any."""
    search = record.state.search
    if search is None or not search.ledger.models:
        return None
    stopped = {lm: tally.stopped for lm, tally in search.ledger.models.items() if tally.stopped}
    return {
        **totals(search.ledger.usage),
        "models": requests_since(search.ledger),
        "stopped": stopped,
    }


def _methods(record: Record) -> list[Facts]:
    """Return a row for the unoptimized system, for this method, and for each baseline."""
    start: Facts = {
        "method": "unoptimized",
        "valid": summary(record.evaluation("before")),
        "test": summary(record.evaluation("test_before")),
        "gain": None,
        "versus": None,
    }
    rows = [start, _method(record)]
    ours = record.evaluation("test_after")
    for other in record.baselines():
        gap = compared(record, other.evaluation("test_after"), ours)
        rows.append({**_method(other), "versus": gap})
    for row in rows:
        counts = [split["failed"] for split in (row["valid"], row["test"]) if split]
        row["failed"] = sum(counts) if counts else None
    return rows


def _method(record: Record) -> Facts:
    decisions = record.all("decision")
    first, last = record.evaluation("test_before"), record.evaluation("test_after")
    return {
        "method": record.method,
        "valid": summary(record.evaluation("incumbent")),
        "test": summary(last),
        "gain": compared(record, first, last) if record.best != record.start else None,
        "versus": None,
        "accepted": sum(map(is_supported, decisions)),
        "decisions": len(decisions),
        "missing": record.missing,
        **items_of(record.spent, SPENDING),
    }


def _changes(record: Record) -> list[Facts]:
    """Return the changed parameters; the kind is ``text``, ``demos`` or ``value``."""
    before, after = record.start.to_json(), record.best.to_json()
    values = {
        change.key: (before.get(change.key), after.get(change.key))
        for change in record.start.diff(record.best)
    }
    return [
        {"key": key, "kind": _kind(*both), "before": both[0], "after": both[1]}
        for key, both in values.items()
    ]


def _kind(before: object, after: object) -> str:
    values = [value for value in (before, after) if value]
    if values and all(isinstance(v, list) and all(_is_demo(item) for item in v) for v in values):
        return "demos"
    texts = [value for value in values if isinstance(value, str)]
    prose = any(" " in text or "\n" in text or len(text) > 40 for text in texts)
    return "text" if prose and len(texts) == len(values) else "value"


def _is_demo(value: object) -> bool:
    return isinstance(value, Mapping) and {"inputs", "outputs"} <= set(value)


def _job(event: Facts) -> Facts:
    """Return an optimizer's job; scores of rollouts are no comparison on train examples."""
    facts = event.get("facts", {})
    scores = ("train_before", "train_after")
    return {
        **items_of(event, JOB),
        **(dict.fromkeys(scores) if facts.get(ROLLOUTS) else items_of(event, scores)),
        "best_step": facts.get("best_step"),
        "at": _runs(event),
    }


def _curve(record: Record) -> Facts:
    """Return the scores of a method over its search: the start, train comparisons and decisions."""
    jobs = [job for job in map(_job, record.all("job")) if job.get("train_after") is not None]
    return {
        "method": record.method,
        "start": [
            {"at": _runs(e), **items_of(e, ("mean", "low", "high"))} for e in record.all("start")
        ],
        "train": [
            {
                "at": job["at"],
                "before": job["train_before"],
                "after": job["train_after"],
                "proposed": bool(job["values"]),
            }
            for job in jobs
            if job["train_before"] is not None
        ],
        "decisions": [
            {
                "at": _runs(e),
                **items_of(e, ("decision", "accepted", "before", "after")),
                "changed": [change[0] for change in e["changes"]],
            }
            for e in record.all("decision")
            if "after" in e and "before" in e
        ],
        "end": record.spent.get("system_runs", 0.0),
    }


def _provenance(record: Record) -> Facts:
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
        "start": evaluated.configuration if evaluated else record.start.digest,
        "best": record.best.digest,
        "began": times[0] if times else None,
        "ended": times[-1] if times else None,
    }
