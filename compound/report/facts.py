"""All facts of a run, computed from the files of its directory as JSON types.

Reports, terminals and other pages show these facts. They hold no markup; texts of the run are
complete and untrusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from compound.core.errors import CompoundError
from compound.core.security.untrusted import UntrustedFolder
from compound.graph.configuration import components_of
from compound.optimization.method import ROLLOUTS
from compound.optimization.proposals import describe_requests, requests_since
from compound.optimization.runs.candidate_record import (
    CandidateRecord,
    cost_name,
    describe_costs,
    describe_limits,
    front,
    read_candidates,
)
from compound.optimization.runs.directory import inconsistency_errors
from compound.optimization.runs.recorder import is_supported
from compound.report.record import (
    Facts,
    Record,
    compared,
    items_of,
    read_evidence,
    summary,
    to_strict_json,
)
from compound.report.rendering import render_text
from compound.report.training import training_facts
from compound.rewards.inspection import FOLDER, Inspection, inspect_search_reward

ONE_SIDED = 0.05  # below this p, explain why the two-sided interval can still include zero
SPLITS = {"test": "test", "valid": "validation"}
SPENDING = (
    *("system_runs", "test_runs", "calls", "prompt_tokens", "completion_tokens"),
    *("cost", "unpriced", "seconds"),
)
DECISION = (
    *("decision", "accepted", "level", "verdict", "probability", "margin", "examples", "p"),
    *("test", "before", "after", "gain", "changes", "note"),
)
SCORE = ("mean", "low", "high")
PLAN = ("decisions", "jobs", "cost", "level")
JOB = ("job", "optimizer", "keys", "tried", "runs", "note", "values")
RETRY = ("evaluation", "failed", "retried", "recovered", "before", "after", "note")


def summarize(path: str | Path, *, traces: bool = True, record: Record | None = None) -> Facts:
    """Return all facts of the report on a run, as JSON types.

    Unknown numbers are ``None``. Scores hold ``mean``, ``low``, ``high``, ``n`` and ``failed``;
    ``at`` is the number of system runs spent before an event.

    - ``title``, ``sentence``, ``verdict``: the result in words; ``notes`` are its caveats. The
      verdict is ``better``, ``worse``, ``unclear``, ``unchanged`` or ``unmeasured``; ``doubtful`` is
      the decision on a change that only scored higher.
    - ``valid``, ``test``: the scores ``before`` and ``after`` with the ``gain``.
    - ``requests``: tokens, cost and seconds of one request ``before`` and ``after``.
    - ``examples``: the compared examples as ``rows``, with inputs, gold, scores and their ``runs``;
      ``in_full`` of them have the ``calls`` of their runs.
    - ``candidates``: every configuration that was evaluated; ``None`` if they are not recorded.
    - ``methods``, ``changes``, ``decisions``, ``jobs``, ``components``, ``failures``: rows of the
      report's tables; ``detectable`` the gains that the run can detect.
    - ``training``, ``rewards``: what was learned; ``None`` without it.
    - ``spent``, ``provenance``: the costs and the origin of the run.

    Args:
        path: the directory of a finished or unfinished run.
        traces: whether to read the traces, for ``components``, ``failures``, ``requests`` and
            ``examples``.
        record: the contents of the directory, if they were read before.

    Raises:
        RunDirectoryError: the folder is not a run directory, or one of its files is broken.
    """
    with inconsistency_errors(path):
        record = record or Record.read(path)
        facts = _summarized(record, str(path), traces=traces)
        return {
            **describe_result(facts),
            **facts,
            "training": training_facts(path, record),
            "rewards": reward_facts(path),
        }


def _summarized(record: Record, path: str, *, traces: bool) -> Facts:
    config, state, search = record.config, record.state, record.state.search
    seed, first = config["optimize"]["seed"], record.evaluation("before")
    candidates, changes = read_candidates(record.folder), _changes(record)
    skipped = dict.fromkeys(e["skipped"] for e in record.events if e.get("skipped"))
    facts: Facts = {
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
        "plan": {name: getattr(search.plan, name) for name in PLAN} if search else None,
        "valid": _split(record, "before", "incumbent"),
        "test": _split(record, "test_before", "test_after"),
        "methods": _methods(record),
        "graph": config["graph"],
        "changes": changes,
        "start": [{"at": _runs(e), **items_of(e, SCORE)} for e in record.all("start")][:1],
        "decisions": [
            {**items_of(e, DECISION), "over": e.get("over", []), "at": _runs(e)}
            for e in record.all("decision")
        ],
        "detectable": _detectable(record),
        "candidates": candidate_facts(candidates),
        "cost_notes": describe_costs(candidates),
        "proposals": _proposals(record),
        "jobs": [_job(e) for e in record.all("job")],
        "retries": [items_of(e, RETRY) for e in record.all("retry")],
        "spent": _spent(record),
        "files": {
            name: record.folder.kind(name) is not None for name in ("best.json", "system.yaml")
        },
        "provenance": _provenance(record),
    }
    if traces:
        facts |= read_evidence(record, components_of(change["key"] for change in changes))
        if {"before", "after"} <= {name for name, side in facts["requests"].items() if side}:
            facts["cost_notes"] = describe_limits(candidates)  # requests state what changed
    return to_strict_json(facts)


def reward_facts(path: str | Path) -> Facts | None:
    """Return the facts on a run's local rewards as JSON types; ``None`` if it has none.

    If the records cannot be read, the reason is returned as ``problem``, and the rest of the report
    is still written.
    """
    folder = UntrustedFolder(path)
    if folder.kind(f"{FOLDER}/card.json") is None:
        if folder.kind(f"{FOLDER}/heads.safetensors") is None:
            return None
        return {"problem": f"{folder}/{FOLDER}/card.json is missing"}
    try:
        with inconsistency_errors(path):
            opened = Inspection.open(path)
            overview = opened.overview()
            heads = tuple(
                inspect_search_reward(opened, head.component).head
                if opened.searched(head.component)
                else head
                for head in overview.heads
            )
            return to_strict_json(asdict(replace(overview, heads=heads)))
    except CompoundError as error:
        return {"problem": str(error)}


def _runs(event: Facts) -> float:
    return float(event["spent"].get("system_runs", 0.0))


def _spent(record: Record) -> Facts:
    """Return the spending, with the number of incidents at servers by kind."""
    counts = [Counter(meter.incidents) for meter in record.state.meters]
    incidents = dict(sum(counts, Counter()))
    return {**record.spent, **({"incidents": incidents} if incidents else {})}


def _detectable(record: Record) -> Facts:
    """Return the gains that the run can detect; empty if they were not estimated."""
    for event in record.all("outlook")[:1]:
        names = ("detection", "jobs", "told", "duplicates")
        return {name: event[name] for name in names if name in event}
    return {}


def candidate_facts(candidates: Sequence[CandidateRecord]) -> Facts | None:
    """Return all evaluated configurations, and the front of gain against a cost, which all have."""
    if not candidates:
        return None
    cost = cost_name(candidates)
    best = front(candidates, cost)
    numbers = {candidate.digest: number for number, candidate in enumerate(candidates, 1)}
    rows = [
        {
            **asdict(candidate),
            "number": number,
            "parent": numbers.get(candidate.parent),
            "cost": getattr(candidate, cost),
            "on_front": candidate in best,
        }
        for number, candidate in enumerate(candidates, 1)
    ]
    return {"cost": cost, "rows": rows}


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
        **search.ledger.usage.to_json(),
        "models": requests_since(search.ledger),
        "stopped": stopped,
    }


def _methods(record: Record) -> list[Facts]:
    """Return a row for the unoptimized system, and for this method."""
    first = {"valid": record.evaluation("before"), "test": record.evaluation("test_before")}
    scores = {split: summary(evaluation) for split, evaluation in first.items()}
    rows: list[Facts] = [{"method": "unoptimized", **scores, "gain": None}, _method(record)]
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
        "accepted": sum(map(is_supported, decisions)),
        "decisions": len(decisions),
        "missing": record.missing,
        **items_of(record.spent, SPENDING),
    }


def _changes(record: Record) -> list[Facts]:
    """Return the changed parameters; the kind is ``text``, ``demos`` or ``value``."""
    before, after = record.start.to_json(), record.best.to_json()
    rows = []
    for key in (change.key for change in record.start.diff(record.best)):
        old, new = before.get(key), after.get(key)
        rows.append({"key": key, "kind": _kind(old, new), "before": old, "after": new})
    return rows


def _kind(before: object, after: object) -> str:
    values = [value for value in (before, after) if value]
    items = [item for value in values for item in (value if isinstance(value, list) else [None])]
    if items and all(isinstance(i, Mapping) and {"inputs", "outputs"} <= set(i) for i in items):
        return "demos"
    texts = [value for value in values if isinstance(value, str)]
    prose = any(" " in text or "\n" in text or len(text) > 40 for text in texts)
    return "text" if prose and len(texts) == len(values) else "value"


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


def _provenance(record: Record) -> Facts:
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


# --- the result in words --------------------------------------------------------------------------


def describe_result(facts: Facts) -> Facts:
    """Return ``title``, ``sentence`` and ``notes``, the caveats, with ``verdict`` and ``doubtful``."""
    split = "test" if facts["test"]["gain"] else "valid"
    if facts[split]["before"] is None:
        verdict = "unmeasured"
    else:
        verdict = _verdict(facts[split]["gain"]) if facts["changes"] else "unchanged"
    found = {"verdict": verdict, "doubtful": _doubtful(facts["decisions"])}
    context = {"facts": {**facts, **found}, "requests": describe_requests, "ONE_SIDED": ONE_SIDED}
    title, sentence, *notes = render_text("result.jinja", context).split("\n\n")
    return {"title": title, "sentence": sentence, **found, "notes": notes}


def _verdict(gain: Facts | None) -> str:
    if gain is None or gain["low"] is None or gain["high"] is None:
        return "unclear"
    return "better" if gain["low"] > 0 else "worse" if gain["high"] < 0 else "unclear"


def _doubtful(decisions: Sequence[Facts]) -> Facts | None:
    """Return the decision on a change that only scored higher, if there is one."""
    kept = next((d for d in reversed(decisions) if d["accepted"]), None)
    if kept is not None:
        found = kept if kept["verdict"] == "promising" else None
    else:
        promising = (d for d in decisions if d["verdict"] == "promising")
        found = max(promising, key=lambda d: float(d["probability"] or 0), default=None)
    return found if found and found["p"] is not None else None
