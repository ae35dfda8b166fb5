"""Proposal requests: model requests for a new prompt, criticism, or a verdict.

A budget of system runs does not count them. A ledger counts them by model and outcome, limits each
job to the number that its optimizer states, and stops querying a model whose calls keep failing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from compound.core.engine import NO_USAGE, Usage
from compound.core.errors import CallError
from compound.core.formatting import short_repr
from compound.core.storage.state import State
from compound.execution.budget import Meter

ProposalOutcome = Literal["proposed", "unusable", "duplicate", "failed"]
OUTCOMES: Sequence[ProposalOutcome] = ("proposed", "unusable", "duplicate", "failed")
UNUSABLE_FACTOR = 4  # consecutive unusable replies that weigh as much as one failed call
REASONS = 3  # maximum number of distinct reasons per model


class NotAsked(CallError):
    """A request was not sent: the model keeps failing, or the job has used all its requests."""

    kind = "not asked"


@dataclass
class Tally:
    """Requests to one model by outcome."""

    asked: int = 0
    answered: int = 0
    # number of requests by outcome; a reply that no optimizer judged is not counted
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    failed_in_a_row: int = 0  # failed calls since the last answer
    unusable_in_a_row: int = 0  # unusable replies since the last usable one
    reasons: dict[str, int] = field(default_factory=dict)
    stopped: str = ""  # why the model is no longer queried in this job, or `""`

    def add(self, outcome: ProposalOutcome, reason: str = "") -> None:
        """Count an outcome, and why there is no proposal."""
        self.counts[outcome] += 1
        if reason and (reason in self.reasons or len(self.reasons) < REASONS):
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if outcome == "unusable":
            self.unusable_in_a_row += 1
        elif outcome != "failed":
            self.unusable_in_a_row = 0

    def fail(self, error: CallError) -> None:
        """Count a failed call with its reason."""
        self.add("failed", f"{error.message}; {error.hint}" if error.hint else error.message)
        self.failed_in_a_row += 1


class LedgerState(State):
    """Proposal requests, as stored in a checkpoint."""

    models: dict[str, Tally] = Field(default_factory=dict)
    usage: Usage = NO_USAGE
    left: int | None = None  # requests left for the whole run; `None` without a limit
    job_left: int | None = None
    news: list[str] = Field(default_factory=list)  # notes not recorded yet


class Proposals:
    """Ledger of the proposal requests of a run.

    Args:
        meter: counts the cost of requests.
        give_up: consecutive failed calls after which a model is no longer queried in a job.
        left: requests left for the whole run; ``None`` without a limit.

    >>> ledger = Proposals(Meter(), give_up=5)
    >>> ledger.start_job(requests=2)
    >>> ledger.may_ask("lm")
    True
    """

    def __init__(self, meter: Meter, *, give_up: int = 5, left: int | None = None) -> None:
        self._meter = meter
        self._give_up = give_up
        self._in_flight = 0
        self._usage_before = NO_USAGE
        self._leaking: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._fits: Callable[[Usage], bool] = lambda usage: True
        self.state = LedgerState(left=left)

    def start_job(self, requests: int | None) -> None:
        """Start a job with a number of requests; a stopped model that has answered is queried again."""
        self.state.job_left = requests
        for tally in self.state.models.values():
            if tally.answered > tally.counts["unusable"]:
                tally.stopped, tally.failed_in_a_row, tally.unusable_in_a_row = "", 0, 0

    def limit(self, fits: Callable[[Usage], bool]) -> None:
        """Set a predicate on the total usage; requests that would violate it are rejected."""
        self._fits = fits

    def may_ask(self, lm: str) -> bool:
        """Return whether the job may send another request to a model."""
        tally = self.state.models.get(lm)
        return not (tally and tally.stopped) and self._requests_left() > 0

    def _requests_left(self) -> float:
        return min(float("inf") if n is None else n for n in (self.state.left, self.state.job_left))

    @asynccontextmanager
    async def request(self, lm: str, worst: Usage) -> AsyncIterator[None]:
        """Count one request around the block that sends it; until a model has answered, one at a time.

        Raises:
            NotAsked: the request must not be sent.
        """
        tally = self.state.models.setdefault(lm, Tally())
        alone = nullcontext() if tally.answered else self._locks.setdefault(lm, asyncio.Lock())
        async with alone:
            self._check_allowed(tally, lm, worst)
            tally.asked += 1
            left, job_left = self.state.left, self.state.job_left
            self.state.left = None if left is None else left - 1
            self.state.job_left = None if job_left is None else job_left - 1
            if not self._in_flight:
                self._usage_before = self._meter.usage
            self._in_flight += 1
            try:
                yield
                tally.answered += 1
                tally.failed_in_a_row = 0
            except CallError as error:
                tally.fail(error)
                if tally.failed_in_a_row >= self._give_up:
                    calls = f"{tally.failed_in_a_row} consecutive calls failed"
                    self._stop(tally, lm, f"{calls}: {error}")
                raise
            finally:
                self._in_flight -= 1
                if not self._in_flight:  # the system is idle while a job waits for proposals
                    self.state.usage += difference(self._meter.usage, self._usage_before)

    def _check_allowed(self, tally: Tally, lm: str, worst: Usage) -> None:
        if tally.stopped:
            raise NotAsked(f"{lm!r} is not queried again in this job: {tally.stopped}")
        if self._requests_left() < 1:
            raise NotAsked("the job has used all its planned proposal requests")
        if not self._fits(self.state.usage + worst):
            raise NotAsked(
                "another proposal request would exceed the share of the budget for proposals"
            )

    def record_outcome(self, lm: str, outcome: ProposalOutcome, reason: str = "") -> None:
        """Record the usefulness of an answer, and why it is unusable."""
        tally = self.state.models.setdefault(lm, Tally())
        tally.add(outcome, reason)
        if tally.unusable_in_a_row >= UNUSABLE_FACTOR * self._give_up:
            self._stop(tally, lm, f"{tally.unusable_in_a_row} consecutive replies were unusable")

    def report_leak(self, lm: str, answer: str) -> None:
        """Add a note on a refused prompt, once for each model."""
        if lm not in self._leaking:
            self._leaking.add(lm)
            what = f"it contains {short_repr(answer)}, the expected answer of a held-out example"
            self.state.news.append(f"a new prompt by {lm!r} was refused: {what}")

    def _stop(self, tally: Tally, lm: str, why: str) -> None:
        if not tally.stopped:
            tally.stopped = why
            self.state.news.append(f"stopped proposal requests to {lm!r} in this job: {why}")

    def snapshot(self) -> LedgerState:
        """Return the state stored in a checkpoint."""
        return self.state.model_copy(deep=True)

    def restore(self, state: LedgerState) -> None:
        """Continue from a `snapshot`."""
        self.state = state.model_copy(deep=True)


def difference(after: Usage, before: Usage) -> Usage:
    """Return the usage between two readings of a meter."""
    return Usage(
        after.calls - before.calls,
        after.prompt_tokens - before.prompt_tokens,
        after.completion_tokens - before.completion_tokens,
        after.cost - before.cost,
        after.unpriced - before.unpriced,
    )


def requests_since(
    state: LedgerState, earlier: LedgerState | None = None
) -> dict[str, dict[str, Any]]:
    """Return the requests of a ledger that an earlier one does not have, by model, as JSON types.

    >>> requests_since(LedgerState(models={"lm": Tally(2, counts={"failed": 2}, reasons={"401": 2})}))
    {'lm': {'asked': 2, 'failed': 2, 'reasons': {'401': 2}}}
    """
    known = earlier.models if earlier else {}
    found = {}
    for lm, tally in state.models.items():
        old = known.get(lm, Tally())
        counts = {name: n - old.counts.get(name, 0) for name, n in tally.counts.items()}
        reasons = {text: n - old.reasons.get(text, 0) for text, n in tally.reasons.items()}
        if asked := tally.asked - old.asked:
            reasons = {text: n for text, n in reasons.items() if n}
            found[lm] = {"asked": asked, **counts, "reasons": reasons}
    return found


def describe_requests(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Format requests as text: all outcomes of each model, and a reason of those without a proposal.

    >>> describe_requests({"lm": {"asked": 5, "failed": 5, "proposed": 0, "reasons": {"401 wrong key": 5}}})
    "5 of 5 calls to 'lm' failed (401 wrong key)"
    >>> describe_requests({"lm": {"asked": 5, "failed": 0, "proposed": 3, "unusable": 2}})
    "5 calls to 'lm': 3 proposed, 2 unusable"
    """
    parts = []
    for lm, tally in models.items():
        asked, reason = tally["asked"], next(iter(tally.get("reasons", {})), "")
        if tally.get("failed") == asked:
            parts.append(f"{asked} of {asked} calls to {lm!r} failed ({reason})")
            continue
        counts = [f"{tally[name]} {name}" for name in OUTCOMES if tally.get(name)]
        counts = counts or ["not judged"]
        parts.append(
            f"{asked} calls to {lm!r}: {', '.join(counts)}" + (f" ({reason})" if reason else "")
        )
    return "; ".join(parts)
