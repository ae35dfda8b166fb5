"""Events of a run: a typed dictionary for each kind.

A run writes an event for every step; its file has a checksum per line
(`compound.core.storage.records`). Only fields that are read are declared here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NotRequired, TypedDict, cast

from compound.core.engine import UsageDocument
from compound.core.security.untrusted import UntrustedFolder
from compound.evaluation.acceptance import TestName
from compound.evaluation.evaluate import Summary
from compound.optimization.prospects import ProspectsDocument
from compound.optimization.runs.directory import read_records

__all__ = ["ChangeRow", "Event", "JobEvent", "Spent", "read_events"]

FILE = "events.jsonl"
ChangeRow = tuple[str, object, object]  # configuration key, value before, value after


class Spent(UsageDocument, total=False):
    """Amounts that a run has spent so far; those of a metric that asks a model are a part of the others."""

    metric_calls: int
    metric_tokens: int
    metric_cost: float
    system_runs: float
    test_runs: float
    seconds: float


class Recorded(TypedDict):
    """Fields of every event: the amounts spent so far, and the time."""

    spent: Spent
    at: NotRequired[float]
    skipped: NotRequired[str]


class StartEvent(Recorded, Summary):
    """The initial configuration was evaluated."""

    event: Literal["start"]


class OutlookEvent(Recorded, ProspectsDocument):
    """The prospects of the run were estimated."""

    event: Literal["outlook"]
    duplicates: NotRequired[list[str]]


class Gain(TypedDict):
    """A mean gain with its confidence interval."""

    mean: float
    low: float | None
    high: float | None


Verdict = Literal["supported", "promising", "rejected", "feasible"]


class DecisionEvent(Recorded):
    """The working configuration was compared with the last supported one, if the budget allowed.

    ``verdict`` is ``supported`` if the test supports the change, ``promising`` if it only scored
    higher, with the ``probability`` that it is better and about how many ``examples`` would support
    it, ``feasible`` if it meets the limits, which the best configuration so far does not. ``over``
    are limits that it exceeds. ``lost`` is the number of examples with runs of the reference that
    were lost to transient failures; they are no evidence for the change. ``level`` is that of the
    last of the ``looks``. If a loss of up to ``margin`` is accepted, verdict, ``p`` and
    ``probability`` are about larger losses.
    """

    event: Literal["decision"]
    decision: int
    level: float
    accepted: bool
    changes: list[ChangeRow]
    verdict: NotRequired[Verdict]
    looks: NotRequired[int]
    probability: NotRequired[float]
    margin: NotRequired[float]
    examples: NotRequired[int]
    p: NotRequired[float]
    test: NotRequired[TestName]
    before: NotRequired[Summary]
    after: NotRequired[Summary]
    gain: NotRequired[Gain]
    lost: NotRequired[int]
    over: NotRequired[list[str]]
    note: NotRequired[str]


def is_supported(event: DecisionEvent) -> bool:
    """Return whether a test supported a change; earlier versions accepted only such changes."""
    return event["verdict"] == "supported" if "verdict" in event else event["accepted"]


class AccuracyDocument(TypedDict):
    """Held-out ranking accuracy of a local reward, as JSON types."""

    mean: float
    low: float | None
    high: float | None
    pairs: int
    inputs: int


class LocalFacts(TypedDict):
    """Use of a component's local reward in a joint search.

    ``slope`` is the expected gain of the score per unit of the reward, ``trust`` says how sure it
    is that the slope is positive, from 0 to 1, and the prices are those of an evaluation, in system
    runs.
    """

    trust: float
    slope: float
    evaluations: int
    price: float
    global_price: float


class JobFacts(TypedDict, total=False):
    """Facts reported by optimizers, as far as reports use them."""

    component: str
    local: dict[str, LocalFacts]
    accuracy: dict[str, AccuracyDocument] | None
    missing: dict[str, str]
    iteration: int
    best_step: int | None
    evaluated: list[tuple[int, float]]
    of_rollouts: bool
    steered: bool
    why: str


class JobEvent(Recorded):
    """A job has ended."""

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
    """Failed rows of an evaluation were rerun."""

    event: Literal["retry"]
    evaluation: str
    failed: int
    retried: int
    recovered: int
    before: Summary
    after: Summary
    note: NotRequired[str]


class ProgressEvent(Recorded):
    """A job has advanced by a step or by an evaluation of its result so far."""

    event: Literal["progress"]
    job: int
    evaluation: NotRequired[object]


class OtherEvent(Recorded):
    """Any other event."""

    event: Literal["done", "note", "proposals", "round", "test_after", "test_before"]


Event = (
    StartEvent | OutlookEvent | DecisionEvent | JobEvent | RetryEvent | ProgressEvent | OtherEvent
)


def read_events(place: str | Path | UntrustedFolder) -> list[Event]:
    """Return the events of a run, in order.

    Raises:
        RunDirectoryError: a line is damaged.
    """
    return cast(
        "list[Event]", [*read_records(place, FILE)]
    )  # checksums guarantee what the run wrote
