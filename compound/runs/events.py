"""The events of a run: one typed dictionary for each kind.

A run writes an event for whatever it does; its file is sealed line by line (`compound.storage.records`).
Only what is read of events is declared here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NotRequired, TypedDict, cast

from compound.engine import UsageDocument
from compound.evaluation.evaluate import Summary
from compound.optimization.prospects import Outlook
from compound.runs.directory import read_records
from compound.runs.formats import renamed
from compound.security.untrusted import UntrustedFolder

__all__ = ["ChangeRow", "Event", "JobEvent", "Spent", "read_events"]

FILE = "events.jsonl"
ChangeRow = tuple[str, object, object]  # a key of a configuration, its value before and after


class Spent(UsageDocument, total=False):
    """What a run has spent so far."""

    system_runs: float
    test_runs: float
    seconds: float


class Recorded(TypedDict):
    """What every event has: what was spent so far, and when it was."""

    spent: Spent
    at: NotRequired[float]
    skipped: NotRequired[str]


class StartEvent(Recorded, Summary):
    """The starting configuration was measured."""

    event: Literal["start"]


class OutlookEvent(Recorded, Outlook):
    """What the run can find was estimated."""

    event: Literal["outlook"]
    duplicates: NotRequired[list[str]]


class Gain(TypedDict):
    """A mean gain with its interval."""

    mean: float
    low: float | None
    high: float | None


class DecisionEvent(Recorded):
    """The working configuration was compared with the best, as far as the budget went."""

    event: Literal["decision"]
    decision: int
    level: float
    accepted: bool
    changes: list[ChangeRow]
    p: NotRequired[float]
    before: NotRequired[Summary]
    after: NotRequired[Summary]
    gain: NotRequired[Gain]
    note: NotRequired[str]


class AccuracyDocument(TypedDict):
    """The held-out ranking accuracy of a local reward, as JSON types."""

    mean: float
    low: float | None
    high: float | None
    pairs: int
    inputs: int


class JobFacts(TypedDict, total=False):
    """What optimizers tell of their jobs, as far as reports read it."""

    accuracy: dict[str, AccuracyDocument] | None
    missing: dict[str, str]
    iteration: int
    best_step: int | None
    evaluated: list[tuple[int, float]]
    of_rollouts: bool
    steered: bool
    why: str


class JobEvent(Recorded):
    """An optimizer's job has ended."""

    event: Literal["job"]
    job: int
    optimizer: str
    keys: list[str]
    values: dict[str, object]
    tried: int
    runs: float
    train_before: float | None
    train_after: float | None
    note: str
    facts: NotRequired[JobFacts]


class RetryEvent(Recorded):
    """Failed rows of an evaluation were run again."""

    event: Literal["retry"]
    evaluation: str
    failed: int
    retried: int
    recovered: int
    before: Summary
    after: Summary
    note: NotRequired[str]


class ProgressEvent(Recorded):
    """A job has come further: by a step, or by an evaluation of what it made so far."""

    event: Literal["progress"]
    job: int
    evaluation: NotRequired[object]


class OtherEvent(Recorded):
    """Anything else that is recorded."""

    event: Literal["done", "note", "proposals", "round", "test_after", "test_before"]


Event = StartEvent | OutlookEvent | DecisionEvent | JobEvent | RetryEvent | ProgressEvent | OtherEvent


def read_events(place: str | Path | UntrustedFolder) -> list[Event]:
    """Return the events of a run, in order.

    Raises:
        RunDirectoryError: a line is broken.
    """
    events = [renamed(event) for event in read_records(place, FILE)]
    return cast("list[Event]", events)  # they are sealed as the run wrote them
