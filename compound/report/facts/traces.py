"""Summarize recorded traces: costs by component, failures by reason, and examples whose score changed.

Validation and test runs record traces; train runs of the search do not, and count in the remaining costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NotRequired, cast

from compound.engine import NO_USAGE, Usage
from compound.evaluation.evaluate import Evaluation
from compound.execution.exchange import Exchange
from compound.execution.trace import CallDocument, FailureRow, TraceDocument
from compound.optimization.proposals import difference
from compound.report.facts.documents import (
    ComponentCost,
    ExampleFacts,
    ExamplesFacts,
    FailureGroup,
    Shown,
    TraceFacts,
)
from compound.report.facts.record import Record, totals
from compound.report.facts.text import shown
from compound.runs.directory import read_records

SHOWN = 5  # examples per group
GROUPS = 20  # reasons of failure to list

Texts = dict[tuple[str, str, int], Shown]  # by configuration, example and sample
Failures = dict[tuple[str, str, str], FailureGroup]  # by kind, message and component


class RecordedTrace(TraceDocument):
    """A trace as a run records it; ``again`` marks a retry, which replaces an earlier trace."""

    split: Literal["valid", "test"]
    gold: dict[str, object]
    again: NotRequired[bool]


@dataclass
class _Cost:
    """Usage of the calls of a component."""

    component: str
    executed: int = 0
    reused: int = 0
    seconds: float = 0.0
    usage: Usage = NO_USAGE

    def to_json(self) -> ComponentCost:
        return {
            "component": self.component,
            "executed": self.executed,
            "reused": self.reused,
            "seconds": self.seconds,
            **totals(self.usage),
        }


def read_traces(record: Record) -> TraceFacts:
    """Read the traces once and return ``components``, ``failures`` and ``examples``."""
    split, before, after = _compared_split(record)
    wanted = {e.configuration for e in (before, after) if e}
    components: dict[str, _Cost] = {}
    failures: Failures = {}
    failed: dict[tuple[str, str, int], FailureGroup] = {}
    texts: Texts = {}
    for line in read_records(record.folder, "traces.jsonl"):
        trace = cast("RecordedTrace", line)  # it is sealed as the run wrote it
        for call in trace["calls"]:
            _add_cost(components, call)
        row = trace["configuration"], trace["example"], trace["sample"]
        if trace.get("again") and row in failed:  # a retry replaces the failed run
            group = failed.pop(row)
            _add(group, trace["split"], -1)
        if trace["failure"]:
            group = _add_failure(failures, trace, trace["failure"])
            if trace["split"] == "test":
                failed[row] = group
        if trace["split"] == split and trace["configuration"] in wanted:
            texts[row] = _texts(trace)
    common = sorted(
        (group for group in failures.values() if group["count"]), key=lambda group: -group["count"]
    )
    return {
        "components": [
            *(cost.to_json() for cost in components.values()),
            *_rest(record, components.values()),
        ],
        "failures": common[:GROUPS],
        "other_failures": sum(group["count"] for group in common[GROUPS:]),
        "examples": _examples(split, before, after, texts),
    }


def _compared_split(record: Record) -> tuple[str, Evaluation | None, Evaluation | None]:
    """Return the evaluations on the test split, or on the validation split if there are none."""
    pairs = {"test": ("test_before", "test_after"), "valid": ("before", "incumbent")}
    for split, (first, last) in pairs.items():
        before, after = record.evaluation(first), record.evaluation(last)
        if before and after:
            return split, before, after
    return "valid", None, None


def _add_cost(components: dict[str, _Cost], call: CallDocument) -> None:
    """Add one call to its component; a call answered from the cache costs nothing."""
    cost = components.setdefault(call["component"], _Cost(call["component"]))
    if call["reused"]:
        cost.reused += 1
        return
    cost.executed += 1
    cost.seconds += call["seconds"]
    cost.usage += Usage.from_json(call["usage"])


def _rest(record: Record, rows: Iterable[_Cost]) -> list[ComponentCost]:
    """Return a row for the spending outside the recorded runs: train runs and prompt proposals."""
    spent = record.spent
    whole = Usage(
        spent.get("calls", 0),
        spent.get("prompt_tokens", 0),
        spent.get("completion_tokens", 0),
        spent.get("cost", 0.0),
        spent.get("unpriced", 0),
    )
    rest = difference(whole, sum((row.usage for row in rows), NO_USAGE))
    if rest.calls <= 0:
        return []
    return [{"component": "", "executed": None, "reused": None, "seconds": None, **totals(rest)}]


def _add(group: FailureGroup, split: Literal["valid", "test"], runs: int) -> None:
    group["count"] += runs
    group[split] += runs


def _add_failure(failures: Failures, trace: RecordedTrace, failure: FailureRow) -> FailureGroup:
    kind, message = failure
    where = next((call["component"] for call in trace["calls"] if call["failure"]), "")
    group = failures.setdefault(
        (kind, message, where),
        {"kind": kind, "message": shown(message), "where": where, "count": 0, "valid": 0, "test": 0},
    )
    _add(group, trace["split"], 1)
    return group


def _texts(trace: RecordedTrace) -> Shown:
    """Return the parts of a trace that the report shows, cut to a readable length."""
    inputs = trace["inputs"]
    gold = {key: value for key, value in trace["gold"].items() if inputs.get(key) != value}
    failure = trace["failure"]
    return {
        "inputs": {key: shown(value) for key, value in inputs.items()},
        "gold": {key: shown(value) for key, value in gold.items()},
        "outputs": {key: shown(value) for key, value in trace["outputs"].items()},
        "failure": f"{failure[0]}: {shown(failure[1])}" if failure else "",
        "messages": _messages(trace),
        "feedback": "" if failure else shown(trace["feedback"]),
    }


def _messages(trace: RecordedTrace) -> dict[str, str]:
    """Return the last message to each model call and the answer, by call."""
    found: dict[str, str] = {}
    for call in trace["calls"]:
        for exchange in map(Exchange.from_json, call.get("exchanges", ())):
            found[f"{call['address']} was sent"] = shown(exchange.messages[-1].text)
            cut = " (cut at max_tokens)" if exchange.finish_reason == "length" else ""
            found[f"{call['address']} answered"] = shown(exchange.completion) + cut
    return found


def _examples(split: str, before: Evaluation | None, after: Evaluation | None, texts: Texts) -> ExamplesFacts:
    """Return the examples with the largest losses and gains and the lowest scores, and the counts."""
    if before is None or after is None:
        return {"split": split, "counts": None, "lost": [], "gained": [], "worst": []}
    old, new = before.by_example(), after.by_example()
    gains = {example: new[example] - old[example] for example in old if example in new}
    lost = sorted((e for e in gains if gains[e] < 0), key=lambda e: gains[e])
    gained = sorted((e for e in gains if gains[e] > 0), key=lambda e: -gains[e])
    worst = [
        e for e in sorted(gains, key=lambda e: new[e]) if e not in lost[:SHOWN] and new[e] < max(new.values())
    ]
    first, last = _first_samples(before), _first_samples(after)

    def show(example: str) -> ExampleFacts:
        then = texts.get((before.configuration, example, first[example]), {})
        now = texts.get((after.configuration, example, last[example]), {})
        return {
            "example": example,
            "inputs": now.get("inputs") or then.get("inputs", {}),
            "gold": now.get("gold") or then.get("gold", {}),
            "before": {**then, "score": old[example]},
            "after": {**now, "score": new[example]},
        }

    return {
        "split": split,
        "counts": {"lost": len(lost), "gained": len(gained), "same": len(gains) - len(lost) - len(gained)},
        "repeats": len(after.rows) // max(1, len(new)),
        "lost": [show(e) for e in lost[:SHOWN]],
        "gained": [show(e) for e in gained[:SHOWN]],
        "worst": [show(e) for e in worst[:SHOWN]],
    }


def _first_samples(evaluation: Evaluation) -> dict[str, int]:
    return {row.example: row.sample for row in reversed(evaluation.rows)}
