"""Read the files of a run for the report: its configuration, its events and its scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast, overload

from compound.engine import Usage
from compound.evaluation.evaluate import Evaluation, Summary, gain_interval, joint_bounds
from compound.evaluation.paired_tests import paired_test
from compound.execution.rng import generator
from compound.graph.configuration import Configuration
from compound.report.facts.documents import GainFacts, RunConfig, UsageTotals
from compound.runs.directory import as_folder, baselines, load_checkpoint, read_json
from compound.runs.events import (
    DecisionEvent,
    Event,
    JobEvent,
    OutlookEvent,
    RetryEvent,
    Spent,
    StartEvent,
    read_events,
)
from compound.runs.state import RunState
from compound.security.untrusted import UntrustedFolder

Facts = TypeVar("Facts")


@dataclass(frozen=True)
class Record:
    """Contents of the directory of a finished or unfinished run.

    Attributes:
        folder: access to its files.
        config: the configuration of the run.
        state: the state at the last checkpoint.
        events: all events recorded so far.
    """

    folder: UntrustedFolder
    config: RunConfig
    state: RunState
    events: Sequence[Event]

    @classmethod
    def read(cls, place: str | Path | UntrustedFolder) -> Record:
        """Read a run directory.

        Raises:
            RunDirectoryError: the folder is not a run directory, or one of its files is broken.
        """
        folder = as_folder(place)
        config = cast("RunConfig", read_json(folder, "config.json"))  # it is sealed as the run wrote it
        stored = load_checkpoint(folder)
        return cls(folder, config, stored.state if stored else RunState(), read_events(folder))

    @property
    def path(self) -> Path:
        """Path of the run directory."""
        return self.folder.path

    @property
    def method(self) -> str:
        """Name of the run's method."""
        return str(self.config["optimize"]["method"])

    @overload
    def all(self, event: Literal["start"]) -> list[StartEvent]: ...
    @overload
    def all(self, event: Literal["decision"]) -> list[DecisionEvent]: ...
    @overload
    def all(self, event: Literal["job"]) -> list[JobEvent]: ...
    @overload
    def all(self, event: Literal["outlook"]) -> list[OutlookEvent]: ...
    @overload
    def all(self, event: Literal["retry"]) -> list[RetryEvent]: ...
    def all(self, event: str) -> Sequence[Event]:
        """Return the events of one kind, in order."""
        return [e for e in self.events if e["event"] == event]

    @property
    def spent(self) -> Spent:
        """Spending of this method, without the baselines that ran after it."""
        own = [e["spent"] for e in self.events if e["event"] != "done"]
        return own[-1] if own else {}

    @property
    def incidents(self) -> dict[str, int]:
        """Number of incidents at servers, such as rate limits, by kind.

        See `compound.execution.budget.Meter`.
        """
        counts = [Counter(meter.incidents) for meter in self.state.meters]
        return dict(sum(counts, Counter()))

    @property
    def start(self) -> Configuration:
        """Initial configuration of the search."""
        return Configuration(self.config["start"])

    @property
    def best(self) -> Configuration:
        """Best configuration so far."""
        return Configuration(self.config["start"] if self.state.best is None else self.state.best)

    def evaluation(self, name: str) -> Evaluation | None:
        """Return an evaluation of the state: ``before``, ``incumbent``, ``test_before`` or ``test_after``."""
        state = self.state
        match name:
            case "before":
                return state.before
            case "incumbent":
                return state.search.incumbent if state.search else None
            case _:
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
        return "the baselines have not ended" if self.state.test_after else "the test split is not read yet"


def summary(evaluation: Evaluation | None) -> Summary | None:
    """Return ``mean, low, high, n, failed``."""
    return evaluation.summary() if evaluation else None


def compared(before: Evaluation | None, after: Evaluation | None, *, seed: int = 0) -> GainFacts | None:
    """Compare two evaluations example by example: the gain's mean, interval, n, and one-sided p."""
    if before is None or after is None:
        return None
    old, new = before.by_example(), after.by_example()
    both = [example for example in old if example in new]
    if not both:
        return None
    scores = [old[e] for e in both], [new[e] for e in both]
    bounds = joint_bounds(before.bounds, after.bounds)
    p = paired_test(*scores, bounds=bounds, rng=generator(seed, "report"))
    return {**gain_interval(before, after).to_json(), "p": p}


def totals(usage: Usage) -> UsageTotals:
    """Return usage as JSON types."""
    return {
        "calls": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cost": usage.cost,
        "unpriced": usage.unpriced,
    }


def to_strict_json(facts: Facts) -> Facts:
    """Return facts as strict JSON: infinite and NaN limits (one example has no variance) become ``None``."""
    return cast("Facts", _to_strict_json(facts))  # the types declare these limits as optional


def _to_strict_json(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _to_strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_strict_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
