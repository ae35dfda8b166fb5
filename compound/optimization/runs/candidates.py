"""Candidates of a run: every configuration that was run, with its scores, its costs and its fate.

The ledger receives each trace of whole runs on train and validation examples. It is a part of the
checkpoint; ``candidates.jsonl`` is written from it as a whole after each job and each decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import Field

from compound.core.engine import NO_USAGE, Usage
from compound.core.errors import DeclarationError
from compound.core.example import Example
from compound.core.storage.records import to_line
from compound.core.storage.state import State
from compound.evaluation.evaluate import Evaluation, OnTrace, ScoredRun
from compound.evaluation.statistics import Bounds
from compound.execution.trace import Failure, Trace
from compound.graph.configuration import Configuration
from compound.graph.system import System
from compound.optimization.settings.base import LimitSettings

FILE = "candidates.jsonl"
Fate = Literal[
    "start",
    "not proposed",
    "proposed",
    "supported",
    "promising",
    "rejected",
    "feasible",
    "over limit",
]
Split = Literal["train", "valid"]
SPLITS: Sequence[Split] = ("train", "valid")
Observer = Callable[[Sequence[System]], OnTrace]  # called before systems are run


@dataclass(frozen=True)
class Costs:
    """Means per run, as if no call came from the cache; ``usd`` is ``None`` if a price is unknown."""

    prompt_tokens: float
    completion_tokens: float
    usd: float | None
    seconds: float

    def broken(self, limits: LimitSettings) -> list[str]:
        """Return a phrase for each limit that they exceed."""
        tokens = self.prompt_tokens + self.completion_tokens
        return limits.broken(usd=self.usd, tokens=tokens, seconds=self.seconds)


class SplitRuns(State):
    """Distinct runs of a candidate on the examples of one split."""

    # example, sample, score, and whether the run failed
    rows: list[tuple[str, int, float, bool]] = Field(default_factory=list)
    # number of runs without lost requests; usage and seconds are theirs, or of all if there are none
    answered: int = 0
    usage: Usage = NO_USAGE
    seconds: float = 0.0

    @property
    def costs(self) -> Costs | None:
        """Means per run; ``None`` without runs."""
        n, usage = self.answered or len(self.rows), self.usage
        if not n:
            return None
        usd = None if usage.unpriced else usage.cost / n
        return Costs(usage.prompt_tokens / n, usage.completion_tokens / n, usd, self.seconds / n)


class CandidateState(State):
    """A candidate; the fields of its record have the same meaning."""

    digest: str
    values: dict[str, object]
    parent: str = ""
    source: str = ""
    job: int | None = None
    fate: Fate = "not proposed"
    train: SplitRuns = Field(default_factory=SplitRuns)
    valid: SplitRuns = Field(default_factory=SplitRuns)

    def split(self, name: Split) -> SplitRuns:
        """Return the runs on the examples of a split."""
        return self.train if name == "train" else self.valid

    @property
    def costs(self) -> Costs | None:
        """Costs per run: on validation examples if there are any runs, which all decisions share."""
        return self.valid.costs or self.train.costs

    def scores(self, bounds: Bounds | None = None) -> Evaluation:
        """Return the scores on all examples; ``bounds`` is the range of the metric, if it is known."""
        rows = [
            ScoredRun(f"{split} {example}", sample, score, Failure("error", "") if failed else None)
            for split in SPLITS
            for example, sample, score, failed in self.split(split).rows
        ]
        low, high = bounds or (-math.inf, math.inf)
        is_inside = bounds is not None and all(low <= row.score <= high for row in rows)
        return Evaluation(self.digest, tuple(rows), bounds=bounds if is_inside else None)


class Candidates:
    """Ledger of the candidates of a run."""

    def __init__(
        self, start: Configuration, stored: list[CandidateState], limits: LimitSettings
    ) -> None:
        self._start = start
        self._stored = stored
        self._limits = limits
        self._known = {candidate.digest: candidate for candidate in stored}
        self._seen = {
            (c.digest, s, *row[:2]) for c in stored for s in SPLITS for row in c.split(s).rows
        }
        self.entry(start).fate = "start"

    def entry(self, configuration: Configuration) -> CandidateState:
        """Return the candidate of a configuration, which is added if it is new."""
        found = self._known.get(configuration.digest)
        if found is None:
            values = configuration.to_json()
            changed = {change.key: values[change.key] for change in self._start.diff(configuration)}
            found = CandidateState(digest=configuration.digest, values=changed)
            self._known[found.digest] = found
            self._stored.append(found)
        return found

    def observer(self, split: Split, job: int | None = None, source: str = "") -> Observer:
        """Return a function that takes the systems to run, and returns the receiver of their traces."""

        def observe(systems: Sequence[System]) -> OnTrace:
            for system in systems:
                found = self.entry(system.configuration)
                if found.job is None and found.fate != "start" and job is not None:
                    found.job, found.source = job, found.source or source
            return lambda example, trace: self._add(split, example, trace)

        return observe

    def _add(self, split: Split, example: Example, trace: Trace) -> None:
        run = trace.configuration, split, example.id, trace.sample
        if run in self._seen:
            return
        self._seen.add(run)
        assert trace.score is not None  # traces of evaluations are scored
        runs = self._known[trace.configuration].split(split)
        runs.rows.append((example.id, trace.sample, trace.score, trace.failure is not None))
        is_answered = not trace.has_lost_requests
        if is_answered and not runs.answered:
            runs.usage, runs.seconds = NO_USAGE, 0.0
        if is_answered or not runs.answered:
            runs.usage += trace.whole_usage
            runs.seconds += trace.seconds
        runs.answered += is_answered

    def note_origin(self, configuration: Configuration, parent: Configuration, source: str) -> None:
        """Record what an optimizer knows about a candidate, at its first mention."""
        found = self.entry(configuration)
        if not found.parent and found.fate != "start":
            found.parent, found.source = parent.digest, source or found.source

    def propose(self, configuration: Configuration) -> None:
        """Record that a job proposed a configuration."""
        found = self.entry(configuration)
        found.fate = "proposed" if found.fate == "not proposed" else found.fate

    def broken_limits(self, configuration: Configuration) -> list[str]:
        """Return the limits that the runs of a configuration exceed; none if it was not run."""
        found = self._known.get(configuration.digest)
        return found.costs.broken(self._limits) if found is not None and found.costs else []

    def best_within_limits(
        self, incumbent: Configuration, keys: Sequence[str]
    ) -> Configuration | None:
        """Return the candidate with the highest mean gain of those that meet the limits.

        It must have common examples with the incumbent, differ from it in the given parameters only, and
        gain unless the incumbent exceeds a limit.
        """
        gains = {}
        for each in self._stored:
            configuration = self._start.replace(each.values)
            changed = {change.key for change in incumbent.diff(configuration)}
            over = each.costs is None or each.costs.broken(self._limits)
            if changed and changed <= {*keys} and not over:
                gain = mean_gain(self.entry(incumbent), each)
                if gain is not None and (gain > 0 or self.broken_limits(incumbent)):
                    gains[configuration] = gain
        return max(gains, key=gains.__getitem__, default=None)

    def check_priced(self) -> None:
        """Reject a limit of dollars if the price of a call of the initial configuration is unknown.

        Raises:
            DeclarationError: it is, such as of a component that sends its own requests.
        """
        costs = self._stored[0].costs
        if self._limits.usd_per_run is not None and costs is not None and costs.usd is None:
            raise DeclarationError(
                "optimize.objective.limits.usd_per_run is set, but the dollars of some calls are unknown",
                hint="give the component price=(…, …), in dollars per million prompt and completion tokens, "
                "or limit tokens_per_run",
            )

    def text(self, best: str, bounds: Bounds | None) -> str:
        """Return the content of the file of candidates."""
        lines, checksum = list[bytes](), ""
        for record in self._records(best, bounds):
            line, checksum = to_line(record, checksum)
            lines.append(line)
        return b"".join(lines).decode()

    def _records(self, best: str, bounds: Bounds | None) -> Iterator[Mapping[str, object]]:
        known = [(each, each.costs) for each in self._stored if each.costs is not None]
        for number, (each, costs) in enumerate(known, 1):
            interval = each.scores(bounds).interval.to_json()
            yield {
                "number": number,
                "of": len(known),
                "digest": each.digest,
                "values": each.values,
                "parent": each.parent,
                "source": each.source,
                "job": each.job,
                "fate": each.fate,
                "chosen": each.digest == best,
                "evaluations": len(each.train.rows) + len(each.valid.rows),
                "mean": interval["mean"],
                "low": interval["low"],
                "high": interval["high"],
                "gain": mean_gain(self._stored[0], each),
                **asdict(costs),
                "broken_limits": costs.broken(self._limits),
            }


def mean_gain(before: CandidateState, after: CandidateState) -> float | None:
    """Return the mean gain on the examples that both were run on; ``None`` without any."""
    old, new = before.scores().by_example(), after.scores().by_example()
    gains = [score - old[name] for name, score in new.items() if name in old]
    return math.fsum(gains) / len(gains) if gains else None
