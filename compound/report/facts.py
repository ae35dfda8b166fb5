"""The facts of a run that both forms of the report render, computed in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compound.evaluation import Evaluation
from compound.optimization import ROLLOUTS
from compound.proposals import since
from compound.report.record import Facts, Record, compared, plain, summary
from compound.report.traces import read_traces
from compound.report.words import headline
from compound.store import understood

OUTLOOK = ("detection", "jobs", "told", "duplicates")
METHOD_FACTS = (
    "system_runs",
    "test_runs",
    "calls",
    "prompt_tokens",
    "completion_tokens",
    "cost",
    "unpriced",
    "seconds",
)


def summarize(path: str | Path) -> Facts:
    """Return everything the report says about a run, as JSON types.

    Args:
        path: the run directory, of a finished or an unfinished run.

    Raises:
        RunDirectoryError: it is no run directory, or one of its files is broken.
    """
    with understood(path):
        return _summarized(Record.read(path), str(path))


def _summarized(record: Record, path: str) -> Facts:
    seed, search = record.config["optimize"]["seed"], record.state.search
    facts: Facts = {
        "run": path,
        "system": record.config["system"],
        "metric": record.config["metric"],
        "method": record.method,
        "seed": seed,
        "missing": record.missing,
        "bounds": _bounds(record),
        "stopped": search.stopped if search else "",
        "test_skipped": "; ".join(dict.fromkeys(e["skipped"] for e in record.events if e.get("skipped"))),
        "alpha": record.config["optimize"]["alpha"],
        "plan": asdict(search.plan) if search else None,
        "valid": _split(record, "before", "incumbent", seed),
        "test": _split(record, "test_before", "test_after", seed),
        "methods": methods(record, seed),
        "graph": record.config["graph"],
        "curves": [curve(r) for r in (record, *record.baselines())],
        "changes": changes(record),
        "decisions": [decision(e) for e in record.all("decision")],
        "outlook": {k: v for e in record.all("outlook")[:1] for k, v in e.items() if k in OUTLOOK},
        "proposals": proposals(record),
        "jobs": [job(e) for e in record.all("job")],
        "retries": [retry(r.method, e) for r in (record, *record.baselines()) for e in r.all("retry")],
        "spent": {**record.spent, **({"incidents": record.incidents} if record.incidents else {})},
        "files": {name: record.folder.kind(name) is not None for name in ("best.json", "system.yaml")},
        "provenance": provenance(record),
        **read_traces(record),
    }
    facts = plain(facts)
    return {**headline(facts), **facts}


def _split(record: Record, before: str, after: str, seed: int) -> Facts:
    first, last = record.evaluation(before), record.evaluation(after)
    return {"before": summary(first), "after": summary(last), "gain": compared(first, last, seed=seed)}


def proposals(record: Record) -> Facts | None:
    """Return the requests for proposals by model and outcome, and what they took; ``None`` without any."""
    search = record.state.search
    if search is None or not search.ledger.models:
        return None
    stopped = {lm: tally.stopped for lm, tally in search.ledger.models.items() if tally.stopped}
    return {**search.ledger.usage.to_json(), "models": since(search.ledger), "stopped": stopped}


def methods(record: Record, seed: int) -> list[Facts]:
    """Return a row for the unoptimized system, for this method, and for each baseline."""
    start = {
        "method": "unoptimized",
        "valid": summary(record.evaluation("before")),
        "test": summary(record.evaluation("test_before")),
        "gain": None,
        "versus": None,
    }
    rows = [start, _method(record, seed)]
    for other in record.baselines():
        ours, theirs = record.evaluation("test_after"), other.evaluation("test_after")
        rows.append({**_method(other, seed), "versus": compared(theirs, ours, seed=seed)})
    return [{**row, "failed": _failed(row)} for row in rows]


def _method(record: Record, seed: int) -> Facts:
    decisions = record.all("decision")
    first, last = record.evaluation("test_before"), record.evaluation("test_after")
    return {
        "method": record.method,
        "valid": summary(record.evaluation("incumbent")),
        "test": summary(last),
        "gain": compared(first, last, seed=seed) if record.best != record.start else None,
        "versus": None,
        "accepted": sum(bool(e["accepted"]) for e in decisions),
        "decisions": len(decisions),
        "missing": record.missing,
        **{name: record.spent.get(name) for name in METHOD_FACTS},
    }


def _bounds(record: Record) -> list[float] | None:
    """Return the least and the greatest score that the metric states."""
    found = record.evaluation("before")
    return list(found.bounds) if found and found.bounds else None


def _failed(row: Facts) -> int | None:
    counts = [split["failed"] for split in (row["valid"], row["test"]) if split]
    return sum(counts) if counts else None


def changes(record: Record) -> list[Facts]:
    """Return what the search changed: key, kind (``text``, ``demos`` or ``value``), before and after."""
    before, after = record.start.to_json(), record.best.to_json()
    return [
        {"key": c.key, "kind": _kind(before.get(c.key), after.get(c.key)),
         "before": before.get(c.key), "after": after.get(c.key)}
        for c in record.start.diff(record.best)
    ]  # fmt: skip


def _kind(before: Any, after: Any) -> str:
    values = [value for value in (before, after) if value]
    if values and all(isinstance(v, list) and all(_is_demo(item) for item in v) for v in values):
        return "demos"
    texts = [value for value in values if isinstance(value, str)]
    prose = any(" " in text or "\n" in text or len(text) > 40 for text in texts)
    return "text" if prose and len(texts) == len(values) else "value"


def _is_demo(value: Any) -> bool:
    return isinstance(value, Mapping) and {"inputs", "outputs"} <= set(value)


def decision(event: Mapping[str, Any]) -> Facts:
    """Return the facts of one acceptance decision; the comparison is missing when the budget ended."""
    wanted = ("decision", "accepted", "level", "p", "before", "after", "gain", "changes", "note")
    return {**{name: event.get(name) for name in wanted}, "at": _runs(event)}


def retry(method: str, event: Mapping[str, Any]) -> Facts:
    """Return the facts of failed test rows that were run again after the run had ended."""
    wanted = ("evaluation", "failed", "retried", "recovered", "before", "after", "note")
    return {"method": method, **{name: event.get(name) for name in wanted}}


def job(event: Mapping[str, Any]) -> Facts:
    """Return the facts of one optimizer's job."""
    wanted = ("job", "optimizer", "keys", "tried", "train_before", "train_after", "runs", "note", "values")
    unlike = dict.fromkeys(("train_before", "train_after")) if _of_rollouts(event) else {}
    best = (event.get("facts") or {}).get("best_step")
    return {**{name: event.get(name) for name in wanted}, **unlike, "best_step": best, "at": _runs(event)}


def _of_rollouts(event: Mapping[str, Any]) -> bool:
    return bool(event.get("facts", {}).get(ROLLOUTS))


def _runs(event: Mapping[str, Any]) -> float:
    return float(event["spent"].get("system_runs", 0.0))


def curve(record: Record) -> Facts:
    """Return the course of one method: its start, its train comparisons and its decisions."""
    start = [{"at": _runs(e), **{k: e[k] for k in ("mean", "low", "high")}} for e in record.all("start")]
    trained = [
        {
            "at": _runs(e),
            "before": e["train_before"],
            "after": e["train_after"],
            "proposed": bool(e["values"]),
        }
        for e in record.all("job")
        if e["train_before"] is not None and e["train_after"] is not None and not _of_rollouts(e)
    ]
    decided = [
        {"at": _runs(e), "accepted": e["accepted"], "before": e["before"], "after": e["after"],
         "changed": [change[0] for change in e["changes"]]}
        for e in record.all("decision")
        if "after" in e
    ]  # fmt: skip
    end = record.spent.get("system_runs", 0.0)
    return {"method": record.method, "start": start, "train": trained, "decisions": decided, "end": end}


def provenance(record: Record) -> Facts:
    """Return what a reader needs to make the same run again."""
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
