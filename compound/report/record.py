"""Read the files of a run for its report: configuration, events, state, scores and traces.

Validation and test runs record traces; train runs of the search count in the remaining costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypeVar, cast

from pydantic import TypeAdapter

from compound.core.engine import NO_USAGE, Usage
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.state import validated
from compound.evaluation.acceptance import paired_test
from compound.evaluation.evaluate import Evaluation, Summary, gain_interval, joint_bounds
from compound.execution.exchange import Exchange
from compound.execution.rng import generator
from compound.execution.trace import CallDocument, TraceDocument
from compound.graph.configuration import Configuration
from compound.optimization.proposals import difference
from compound.optimization.runs.directory import (
    as_folder,
    baselines,
    load_checkpoint,
    read_json,
    read_records,
)
from compound.optimization.runs.recorder import Event, read_events
from compound.optimization.runs.state import OptimizationState
from compound.report.text import shown

Facts = dict[str, Any]  # JSON types
Values = TypeVar("Values")
SHOWN = 5  # examples per group
GROUPS = 20  # reasons of failure to list
SIDES = {"test": ("test_before", "test_after"), "valid": ("before", "incumbent")}
COUNTS = ("calls", "prompt_tokens", "completion_tokens", "cost", "unpriced")


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
        """Spending of this method, without the baselines that ran after it."""
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

    def baselines(self) -> list[Record]:
        """Return the records of the run's baselines."""
        return [Record.read(folder) for folder in baselines(self.folder)]

    @property
    def missing(self) -> str:
        """Reason why a run is unfinished, or ``""`` if it is finished."""
        if self.state.done:
            return ""
        if self.state.search is None:
            return "there is no score yet"
        if not self.state.search.stopped:
            return "the search has not ended"
        if self.state.test_after:
            return "the baselines have not ended"
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


def totals(usage: Usage) -> Facts:
    """Return usage as JSON types."""
    return attributes_of(usage, "calls", "prompt_tokens", "completion_tokens", "cost", "unpriced")


def attributes_of(source: object, *names: str) -> Facts:
    """Return some attributes of an object by name."""
    return {name: getattr(source, name) for name in names}


def items_of(event: Mapping[str, Any], names: Sequence[str]) -> Facts:
    """Return some items of an event by name, ``None`` for those that it does not have."""
    return {name: event.get(name) for name in names}


def to_strict_json(facts: Values) -> Values:
    """Return facts as strict JSON: infinite limits and NaN become ``None``."""
    return cast("Values", _strict(facts))


def _strict(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- traces ---------------------------------------------------------------------------------------

Run = tuple[str, str, int]  # configuration, example and sample


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


@dataclass
class _Cost:
    """Usage of the calls of a component."""

    component: str
    executed: int = 0
    reused: int = 0
    seconds: float = 0.0
    usage: Usage = NO_USAGE

    def add(self, call: CallDocument) -> None:
        """Add one call; a call answered from the cache costs nothing."""
        self.reused += call["reused"]
        if not call["reused"]:
            self.executed += 1
            self.seconds += call["seconds"]
            self.usage += Usage.from_json(call["usage"])

    def to_json(self) -> Facts:
        own = attributes_of(self, "component", "executed", "reused", "seconds")
        return {**own, **totals(self.usage)}


def read_traces(record: Record) -> Facts:
    """Read the traces once and return ``components``, ``failures`` and ``examples``."""
    split, before, after = _compared_split(record)
    wanted = {e.configuration for e in (before, after) if e}
    components: dict[str, _Cost] = {}
    failures: dict[tuple[str, str, str], Facts] = {}
    failed: dict[Run, Facts] = {}  # failed test runs, by the group of their failure
    texts: dict[Run, Facts] = {}
    for line in read_records(record.folder, "traces.jsonl"):
        trace = cast("RecordedTrace", line)  # it is sealed as the run wrote it
        for call in trace["calls"]:
            components.setdefault(call["component"], _Cost(call["component"])).add(call)
        run = trace["configuration"], trace["example"], trace["sample"]
        if trace.get("again") and run in failed:  # a retry replaces the failed run
            _count(failed.pop(run), trace["split"], -1)
        if trace["failure"]:
            group = _failure_group(failures, trace)
            _count(group, trace["split"], 1)
            if trace["split"] == "test":
                failed[run] = group
        if trace["split"] == split and trace["configuration"] in wanted:
            texts[run] = _texts(trace)
    common = sorted(
        (group for group in failures.values() if group["count"]), key=lambda group: -group["count"]
    )
    costs = components.values()
    return {
        "components": [*(cost.to_json() for cost in costs), *_rest(record, costs)],
        "failures": common[:GROUPS],
        "other_failures": sum(group["count"] for group in common[GROUPS:]),
        "examples": _examples(split, before, after, texts),
    }


def _compared_split(record: Record) -> tuple[str, Evaluation | None, Evaluation | None]:
    """Return the evaluations on the test split, or on the validation split if there are none."""
    for split, names in SIDES.items():
        before, after = map(record.evaluation, names)
        if before and after:
            return split, before, after
    return "valid", None, None


def _rest(record: Record, costs: Iterable[_Cost]) -> list[Facts]:
    """Return a row for the spending outside the recorded runs: train runs and prompt proposals."""
    spent = record.spent
    whole = Usage(*(spent.get(name, 0) for name in COUNTS))
    rest = difference(whole, sum((cost.usage for cost in costs), NO_USAGE))
    unknown = items_of({"component": ""}, ("component", "executed", "reused", "seconds"))
    return [{**unknown, **totals(rest)}] if rest.calls > 0 else []


def _failure_group(failures: dict[tuple[str, str, str], Facts], trace: RecordedTrace) -> Facts:
    kind, message = trace["failure"] or ("", "")
    where = next((call["component"] for call in trace["calls"] if call["failure"]), "")
    group = {"kind": kind, "message": shown(message), "where": where}
    return failures.setdefault((kind, message, where), {**group, "count": 0, "valid": 0, "test": 0})


def _count(group: Facts, split: str, runs: int) -> None:
    group["count"] += runs
    group[split] += runs


def _texts(trace: RecordedTrace) -> Facts:
    """Return the parts of a trace that the report shows, cut to a readable length."""
    inputs, failure = trace["inputs"], trace["failure"]
    gold = {key: value for key, value in trace["gold"].items() if inputs.get(key) != value}
    parts = {"inputs": inputs, "gold": gold, "outputs": trace["outputs"]}
    return {
        **{part: {k: shown(v) for k, v in values.items()} for part, values in parts.items()},
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


def _examples(
    split: str, before: Evaluation | None, after: Evaluation | None, texts: dict[Run, Facts]
) -> Facts:
    """Return the examples with the largest losses and gains, and the lowest scores."""
    if before is None or after is None:
        return {"split": split, "counts": None, "lost": [], "gained": [], "worst": []}
    old, new = before.by_example(), after.by_example()
    gains = {example: new[example] - old[example] for example in old if example in new}
    lost = sorted((e for e in gains if gains[e] < 0), key=lambda e: gains[e])
    gained = sorted((e for e in gains if gains[e] > 0), key=lambda e: -gains[e])
    worst = [
        e
        for e in sorted(gains, key=lambda e: new[e])
        if e not in lost[:SHOWN] and new[e] < max(new.values())
    ]
    first, last = _first_samples(before), _first_samples(after)

    def show(example: str) -> Facts:
        then = texts.get((before.configuration, example, first[example]), {})
        now = texts.get((after.configuration, example, last[example]), {})
        return {
            "example": example,
            "inputs": now.get("inputs") or then.get("inputs", {}),
            "gold": now.get("gold") or then.get("gold", {}),
            "before": {**then, "score": old[example]},
            "after": {**now, "score": new[example]},
        }

    groups = {"lost": lost, "gained": gained, "worst": worst}
    same = len(gains) - len(lost) - len(gained)
    return {
        "split": split,
        "counts": {"lost": len(lost), "gained": len(gained), "same": same},
        "repeats": len(after.rows) // max(1, len(new)),
        **{name: [show(e) for e in found[:SHOWN]] for name, found in groups.items()},
    }


def _first_samples(evaluation: Evaluation) -> dict[str, int]:
    return {row.example: row.sample for row in reversed(evaluation.rows)}
