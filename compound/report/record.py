"""Read the files of a run for its report: configuration, events, state, scores and traces.

Traces are read once: for costs, failures, and each compared example with its calls. Validation and
test runs record them; train runs of the search count in the remaining costs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NotRequired, TypeVar, cast

from pydantic import TypeAdapter

from compound.core.engine import NO_USAGE
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.state import validated
from compound.evaluation.acceptance import paired_test
from compound.evaluation.evaluate import Evaluation, Summary, gain_interval, joint_bounds
from compound.execution.rng import generator
from compound.execution.trace import CallDocument, Failure, TraceDocument, whole_amounts
from compound.graph.configuration import Configuration
from compound.optimization.runs.directory import (
    as_folder,
    load_checkpoint,
    read_json,
    read_records,
)
from compound.optimization.runs.recorder import Event, read_events
from compound.optimization.runs.state import OptimizationState

Facts = dict[str, Any]  # JSON types
Values = TypeVar("Values")
IN_FULL = 200  # examples to include with their calls
CHARACTERS = 4_000_000  # of calls and messages to include
REASONS = 20  # reasons of failure to list
GROUPS = ("worse", "better", "failed", "equal")
SIDES = {"test": ("test_before", "test_after"), "valid": ("before", "incumbent")}
COUNTS = ("calls", "prompt_tokens", "completion_tokens", "cost", "unpriced")

Run = tuple[str, str, int]  # configuration, example and sample


@dataclass(frozen=True)
class Record:
    """Contents of the directory of a finished or unfinished run."""

    folder: UntrustedFolder
    config: Facts
    state: OptimizationState
    events: Sequence[Event]

    @classmethod
    def read(cls, place: str | Path | UntrustedFolder) -> Record:
        """Read a run directory.

        Raises:
            RunDirectoryError: the folder is not a run directory, or one of its files is broken.
        """
        folder = as_folder(place)
        config = read_json(folder, "config.json")
        stored = load_checkpoint(folder)
        return cls(
            folder, config, stored.state if stored else OptimizationState(), read_events(folder)
        )

    @property
    def method(self) -> str:
        """Name of the run's method."""
        return str(self.config["optimize"]["method"])

    def all(self, event: str) -> list[Any]:
        """Return the events of one kind, in order."""
        return [e for e in self.events if e["event"] == event]

    @property
    def spent(self) -> Facts:
        """Spending of the run."""
        own = [e["spent"] for e in self.events if e["event"] != "done"]
        return {**own[-1]} if own else {}

    @property
    def start(self) -> Configuration:
        """Initial configuration of the search."""
        return Configuration(self.config["start"])

    @property
    def best(self) -> Configuration:
        """Best configuration so far."""
        return Configuration(self.config["start"] if self.state.best is None else self.state.best)

    def evaluation(self, name: str) -> Evaluation | None:
        """Return an evaluation: ``before``, ``incumbent``, ``test_before`` or ``test_after``."""
        state = self.state
        if name == "before":
            return state.before
        if name == "incumbent":
            return state.search.incumbent if state.search else None
        final = state.test_before if name == "test_before" else state.test_after
        return final.evaluation if final else None

    @property
    def missing(self) -> str:
        """Reason why a run is unfinished, or ``""`` if it is finished."""
        if self.state.done:
            return ""
        if self.state.search is None:
            return "there is no score yet"
        if not self.state.search.stopped:
            return "the search has not ended"
        return "the test split is not read yet"


def summary(evaluation: Evaluation | None) -> Summary | None:
    """Return ``mean, low, high, n, failed``."""
    return evaluation.summary() if evaluation else None


def compared(record: Record, before: Evaluation | None, after: Evaluation | None) -> Facts | None:
    """Compare two evaluations example by example: the gain's mean, interval, n, and one-sided p."""
    if before is None or after is None:
        return None
    old, new = before.by_example(), after.by_example()
    both = [example for example in old if example in new]
    if not both:
        return None
    p = paired_test(
        [old[example] for example in both],
        [new[example] for example in both],
        bounds=joint_bounds(before.bounds, after.bounds),
        rng=generator(record.config["optimize"]["seed"], "report"),
    )
    return {**gain_interval(before, after).to_json(), "p": p}


def items_of(event: Mapping[str, Any], names: Sequence[str]) -> Facts:
    """Return some items of an event by name, ``None`` for those that it does not have."""
    return {name: event.get(name) for name in names}


def to_strict_json(facts: Values) -> Values:
    """Return facts as strict JSON: infinite limits and NaN become ``None``."""
    return cast("Values", json.loads(json.dumps(facts), parse_constant=lambda _: None))


# --- traces ---------------------------------------------------------------------------------------


class RecordedTrace(TraceDocument):
    """A trace as a run records it; ``again`` marks a retry, which replaces an earlier trace."""

    split: Literal["valid", "test"]
    gold: dict[str, object]
    again: NotRequired[bool]


_RECORDED = TypeAdapter(RecordedTrace)


def recorded_trace(line: Mapping[str, object]) -> RecordedTrace:
    """Return a line of the recorded traces, checked to have their form.

    Raises:
        Damaged: it has another form.
    """
    return validated(_RECORDED, line, "a trace of a run")


def own_gold(trace: RecordedTrace) -> dict[str, object]:
    """Return the recorded fields of an example that are neither its inputs nor its id."""
    inputs, name = trace["inputs"], trace["example"]
    return {
        key: value
        for key, value in trace["gold"].items()
        if not (key in inputs and inputs[key] == value) and (key, str(value)) != ("id", name)
    }


def read_evidence(record: Record, changed: Collection[str]) -> Facts:
    """Return ``components``, ``failures``, ``requests`` and ``examples``.

    ``requests`` are the means of one request before and after, with calls from the cache counted
    like executed ones. The first `IN_FULL` examples, taken from all groups in turn, have ``calls``.

    Args:
        record: the run.
        changed: components whose messages are included; all components if it is empty.
    """
    split, before, after = _compared(record)
    sides = {"before": before, "after": after} if before and after else {}
    if before and after and before.configuration == after.configuration:
        del sides["before"]
    by_configuration = {e.configuration: e for e in sides.values() if e}
    rows = _rows(before, after) if before and after else []
    in_full = {row["example"] for row in _in_turn(rows)[:IN_FULL]}
    components: dict[str, Facts] = {}
    failures: dict[tuple[str, str, str], Facts] = {}
    failed: dict[Run, Facts] = {}  # failed test runs, by the group of their failure
    traces: dict[Run, Facts] = {}
    for line in read_records(record.folder, "traces.jsonl"):
        trace = cast("RecordedTrace", line)  # it is sealed as the run wrote it
        for call in trace["calls"]:
            _add(components, call)
        run = trace["configuration"], trace["example"], trace["sample"]
        if trace.get("again") and run in failed:  # a retry replaces the failed run
            failed.pop(run)[trace["split"]] -= 1
        if trace["failure"]:
            group = _failure_group(failures, trace)
            group[trace["split"]] += 1
            if trace["split"] == "test":
                failed[run] = group
        if trace["split"] == split and trace["configuration"] in by_configuration:
            calls = trace["example"] in in_full
            traces[run] = _run(trace, changed, calls=calls)
    shown = {name: _first_runs(e) for name, e in sides.items() if e}
    for row in rows:
        runs = {name: traces.get(first[row["example"]], {}) for name, first in shown.items()}
        row |= {"inputs": {}, "gold": {}, "runs": runs}
        for facts in runs.values():
            row |= {name: facts.pop(name) for name in ("inputs", "gold") if name in facts}
    for group in failures.values():
        group["count"] = group["valid"] + group["test"]
    common = sorted((g for g in failures.values() if g["count"]), key=lambda g: -g["count"])
    return {
        "components": [*components.values(), *_rest(record, [*components.values()])],
        "failures": common[:REASONS],
        "other_failures": sum(group["count"] for group in common[REASONS:]),
        "requests": {
            "split": split,
            **{name: _request(traces, e, rows) for name, e in sides.items() if e},
        },
        "examples": {
            "split": split,
            "counts": {name: sum(r["group"] == name for r in rows) for name in GROUPS},
            "repeats": len(after.rows) // max(1, len(rows)) if after else 1,
            "in_full": _limit(rows),
            "rows": rows,
        },
    }


def _compared(record: Record) -> tuple[str, Evaluation | None, Evaluation | None]:
    """Return the evaluations on the test split, or on the validation split if there are none."""
    for split, names in SIDES.items():
        before, after = map(record.evaluation, names)
        if before and after:
            return split, before, after
    return "valid", None, None


def _rows(before: Evaluation, after: Evaluation) -> list[Facts]:
    """Return the scores of each example, the largest losses first, then the largest gains."""
    old, new = before.by_example(), after.by_example()
    failed = {row.example for row in after.rows if row.failure}
    rows = []
    for example in (example for example in old if example in new):
        gain = new[example] - old[example]
        group = "failed" if example in failed else "worse" if gain < 0 else "better"
        rows.append(
            {
                "example": example,
                "group": group if gain or example in failed else "equal",
                "before": old[example],
                "after": new[example],
                "difference": gain,
            }
        )
    return sorted(
        rows, key=lambda r: (GROUPS.index(r["group"]), -abs(float(r["difference"])), r["after"])
    )


def _in_turn(rows: Sequence[Facts]) -> list[Facts]:
    """Return rows by their rank in their group, so that the first ones are of all groups."""
    places = dict.fromkeys(GROUPS, 0)
    ranks = []
    for row in rows:
        places[row["group"]] += 1
        ranks.append((places[row["group"]], row))
    return [row for _, row in sorted(ranks, key=lambda ranked: ranked[0])]


def _first_runs(evaluation: Evaluation) -> dict[str, Run]:
    rows = reversed(evaluation.rows)
    return {row.example: (evaluation.configuration, row.example, row.sample) for row in rows}


def _failure_group(failures: dict[tuple[str, str, str], Facts], trace: RecordedTrace) -> Facts:
    kind, message = trace["failure"] or ("", "")
    where = next((call["component"] for call in trace["calls"] if call["failure"]), "")
    group = {"kind": kind, "message": message, "where": where}
    return failures.setdefault((kind, message, where), {**group, "valid": 0, "test": 0})


def _add(components: dict[str, Facts], call: CallDocument) -> None:
    """Add a call to the costs of its component; a call answered from the cache costs nothing."""
    name = call["component"]
    empty = {"component": name, "executed": 0, "reused": 0, "seconds": 0.0, **NO_USAGE.to_json()}
    cost = components.setdefault(name, empty)
    cost["reused"] += call["reused"]
    if not call["reused"]:
        cost["executed"] += 1
        for key, amount in {**call["usage"], "seconds": call["seconds"]}.items():
            cost[key] += amount


def _rest(record: Record, components: Sequence[Facts]) -> list[Facts]:
    """Return a row for the spending outside the recorded runs: train runs and prompt proposals."""
    spent = record.spent
    rest = {k: spent.get(k, 0) - sum(cost[k] for cost in components) for k in COUNTS}
    unknown = items_of({"component": ""}, ("component", "executed", "reused", "seconds"))
    return [{**unknown, **rest}] if rest["calls"] > 0 else []


def _request(
    traces: Mapping[Run, Facts], evaluation: Evaluation, rows: Sequence[Facts]
) -> Facts | None:
    """Return the means of one request over the compared examples, ``None`` without traces."""
    examples = {row["example"] for row in rows}
    found = [
        run
        for (configuration, example, _), run in traces.items()
        if configuration == evaluation.configuration and example in examples
    ]
    if not found:
        return None
    usual = [run for run in found if not run["lost"]] or found
    return {
        "runs": len(found),
        "failed": sum(run["failure"] is not None for run in found),
        **{name: fmean(run[name] for run in usual) for name in (*COUNTS[1:], "seconds")},
        "median_seconds": median(run["seconds"] for run in usual),
    }


# --- examples -------------------------------------------------------------------------------------


def _run(trace: RecordedTrace, changed: Collection[str], *, calls: bool) -> Facts:
    usage, seconds = whole_amounts(trace)
    return {
        **{name: trace[name] for name in ("inputs", "outputs", "failure")},
        "gold": own_gold(trace),
        "feedback": "" if trace["failure"] else trace["feedback"],
        "seconds": seconds,
        "lost": any(map(_has_lost_request, trace["calls"])),
        **usage.to_json(),
        "calls": [_call(call, changed) for call in trace["calls"]] if calls else [],
    }


def _has_lost_request(call: CallDocument) -> bool:
    """Return whether a request may have had no answer; it is charged at its maximum, not at its cost."""
    failure = call["failure"]
    return call["attempts"] > 1 or (failure is not None and Failure(*failure).is_transient)


def _call(call: CallDocument, changed: Collection[str]) -> Facts:
    """Return a call as it is recorded, without tokens, and with the messages of changed components."""
    is_changed = call["component"] in changed
    shown = call.get("exchanges", []) if is_changed or not changed else []
    kept = {name: value for name, value in call.items() if name != "tokens"}
    return {**kept, "changed": is_changed, "exchanges": shown}


def _limit(rows: Sequence[Facts]) -> int:
    """Remove calls beyond `CHARACTERS`, and return the number of examples that have their calls."""
    size = kept = 0
    for row in _in_turn(rows):
        runs = [run for run in row["runs"].values() if run.get("calls")]
        size += sum(len(str(run["calls"])) for run in runs)
        if size > CHARACTERS:
            for run in runs:
                run["calls"] = []
        else:
            kept += bool(runs)
    return kept
