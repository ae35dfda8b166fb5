"""The pair buffer: all draws of all components, with their origin and iteration.

It is stored in a run's memory as JSON records, and rejects records of another system.

Feedback on served runs becomes draws, from which preference pairs for the local rewards are made.
Two runs with equal inputs and different ratings are compared. The rating is attributed to a call if
it is the only one that received equal inputs in both runs and produced other outputs: everything
after it differs because of it. If parallel branches differ, it is unknown which one made the
difference, and the runs are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
from scipy import special

from compound.core.errors import DataError
from compound.core.narrowing import entry
from compound.evaluation.feedback import FeedbackLog
from compound.execution.trace import Call, Trace
from compound.graph.configuration import (
    canonical_json,
    digest,
    to_readable_json,
    to_readable_values,
)
from compound.graph.system import System
from compound.rewards.candidates import Candidate, Sampling, is_comparable
from compound.rewards.pairs import Draw, Pair, candidate_of, ordered_pairs


@dataclass(frozen=True)
class Entry:
    """A draw in the buffer, with its iteration."""

    draw: Draw
    iteration: int


@dataclass
class PairBuffer:
    """All draws, in the order in which they were added."""

    system: str
    sampling: Sampling = field(default_factory=Sampling)
    entries: list[Entry] = field(default_factory=list)

    @staticmethod
    def read(
        records: Iterable[Mapping[str, object]], system: System | str, sampling: Sampling
    ) -> PairBuffer:
        """Read a buffer from records.

        Raises:
            DataError: a record is damaged, or belongs to another system.
        """
        buffer = PairBuffer(system if isinstance(system, str) else system.identity, sampling)
        for number, record in enumerate(records, 1):
            if "kind" in record:  # a record of another kind in the run's memory
                continue
            try:
                source, iteration = str(record["system"]), entry(record, "iteration", int)
                draw = _draw(entry(record, "draw", dict))  # raises if it is malformed
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"record {number} of the pair buffer is damaged: {error!r}"
                ) from None
            if source != buffer.system:
                raise DataError(
                    f"the pair buffer belongs to another system (record {number}: {source[:12]}, expected "
                    f"{buffer.system[:12]})",
                    hint="pairs are valid only for the system that produced them; start a new run",
                )
            buffer.entries.append(Entry(draw, iteration))
        return buffer

    def add(self, draws: Sequence[Draw], iteration: int) -> list[dict[str, object]]:
        """Add draws of an iteration, and return the records to store."""
        self.entries += [Entry(draw, iteration) for draw in draws]
        return [
            {"system": self.system, "iteration": iteration, "draw": to_document(draw)}
            for draw in draws
        ]

    @property
    def components(self) -> list[str]:
        """The components of the draws."""
        return list(dict.fromkeys(entry.draw.component for entry in self.entries))

    def of(self, component: str) -> list[Entry]:
        """Return the draws of a component."""
        return [entry for entry in self.entries if entry.draw.component == component]

    def pairs(self, component: str) -> list[tuple[Pair, int]]:
        """Return the decided pairs of a component, each with its iteration."""
        return [
            (pair, entry.iteration)
            for entry in self.of(component)
            for pair in ordered_pairs(entry.draw, self.sampling)
        ]

    def weighted_pairs(self, component: str) -> list[tuple[Pair, int, float]]:
        """Return the pairs of a component that a reward is fitted to, with their iterations and weights.

        Decided pairs have weight 1. Candidates that ran once each, as in races, are not decided if
        what follows them is random; their order is still more likely right than wrong. Such a pair
        has the weight ``2 Φ(gap / s) − 1``, where s is the root mean square gap of these pairs.
        """
        entries = self.of(component)
        single = [ordered_pairs(entry.draw, self.sampling, decided=False) for entry in entries]
        gaps = np.array([pair.gap for pairs in single for pair in pairs])
        scale = float(np.sqrt(np.mean(gaps**2))) if len(gaps) else 1.0
        return [
            row
            for entry, uncertain in zip(entries, single, strict=True)
            for row in (
                *(
                    (pair, entry.iteration, 1.0)
                    for pair in ordered_pairs(entry.draw, self.sampling)
                ),
                *(
                    (p, entry.iteration, 2 * float(special.ndtr(p.gap / scale)) - 1)
                    for p in uncertain
                ),
            )
        ]

    def gap(self, component: str) -> float | None:
        """Return the mean gap between two outputs of a component, over the inputs of its latest draws.

        The paper's scheduler uses this gap. Two outputs whose order is not decided have a gap of 0,
        and so has an input with one output. Draws whose rewards decide nothing, such as of one run
        each before random components, are left out. An iteration has no gap if all of its draws
        with several outputs are; ``None`` if no iteration has one.
        """
        by_iteration: dict[int, list[Draw]] = {}
        for item in self.of(component):
            by_iteration.setdefault(item.iteration, []).append(item.draw)
        for iteration in sorted(by_iteration, reverse=True):
            draws = by_iteration[iteration]
            gaps = [gap for draw in draws if (gap := self._gap_of(draw)) is not None]
            several = [self._gap_of(draw) is not None for draw in draws if len(draw.candidates) > 1]
            if gaps and (any(several) or not several):
                return fmean(gaps)
        return None

    def _gap_of(self, draw: Draw) -> float | None:
        """Return the mean gap between two outputs of a draw; ``None`` if its rewards decide nothing."""
        compared = list(combinations(draw.candidates, 2))
        if compared and not any(is_comparable(a, b, self.sampling.level) for a, b in compared):
            return None
        return sum(pair.gap for pair in ordered_pairs(draw, self.sampling)) / max(1, len(compared))

    @property
    def digest(self) -> str:
        """Digest of the draws, which identifies the training data of a reward model."""
        return digest([[entry.iteration, to_document(entry.draw)] for entry in self.entries])


def to_document(draw: Draw) -> dict[str, object]:
    """Return a draw as JSON types.

    A candidate is its outputs, its rewards and its settings, followed by whether its downstream
    components were deterministic, and by its signals; the last two are left out if they are false
    and empty.
    """
    return {
        "component": draw.component,
        "address": draw.address,
        "example": draw.example,
        "configuration": draw.configuration,
        "inputs": to_readable_values(draw.inputs),
        "candidates": [
            [
                to_readable_values(c.outputs),
                list(c.rewards),
                to_readable_values(c.settings),
                c.certain,
                dict(c.signals),
            ][: 5 if c.signals else 3 + c.certain]
            for c in draw.candidates
        ],
    }


def _draw(data: Mapping[str, Any]) -> Draw:
    return Draw(
        str(data["component"]),
        str(data["address"]),
        str(data["example"]),
        str(data["configuration"]),
        dict(data["inputs"]),
        tuple(map(_candidate, data["candidates"])),
    )


def _candidate(row: Sequence[Any]) -> Candidate:
    absent: tuple[Any, ...] = (False, {})
    outputs, rewards, settings, certain, signals = (*row, *absent[len(row) - 3 :])
    numbers = {name: float(number) for name, number in signals.items()}
    found = Candidate(
        dict(outputs), tuple(map(float, rewards)), dict(settings), certain is True, numbers
    )
    if not all(map(math.isfinite, (*found.rewards, *numbers.values()))):
        raise ValueError("a reward or a signal is not finite")
    return found


def input_key(draw_or_pair: Draw | Pair) -> str:
    """Return the key of an input, by which equal inputs of different examples are grouped."""
    return canonical_json(to_readable_json(draw_or_pair.inputs))


def draws_from_feedback(log: FeedbackLog, system: System) -> list[Draw]:
    """Return a draw for each comparison of two runs that a single call explains."""
    rated = {run for pair in log.preferences for run in pair}
    rated |= {run for run, said in log.about.items() if said.score is not None}
    usable = {run for run in rated if run in log.runs and _fits(log.runs[run], system)}
    draws: list[Draw] = []
    for better, worse in _compared(log, usable):
        if (call := _explaining(better, worse)) is not None:
            made = tuple(candidate_of(system, trace, call.address) for trace in (better, worse))
            origin = better.example, better.configuration, dict(call.inputs)
            draws.append(Draw(call.component, call.address, *origin, made))
    return draws


def _compared(log: FeedbackLog, usable: set[str]) -> Iterator[tuple[Trace, Trace]]:
    """Yield pairs of runs with equal inputs, scored, the better one first."""
    explicit = {frozenset(pair) for pair in log.preferences}
    for better, worse in log.preferences:
        if {better, worse} <= usable:
            yield log.runs[better].with_score(1.0), log.runs[worse].with_score(0.0)
    groups: dict[str, list[tuple[str, float]]] = {}
    for run, said in log.about.items():
        if run in usable and said.score is not None:
            groups.setdefault(_key(log.runs[run].inputs), []).append((run, said.score))
    for group in groups.values():
        for (one, first), (other, second) in combinations(group, 2):
            if first != second and frozenset((one, other)) not in explicit:
                pair = log.runs[one].with_score(first), log.runs[other].with_score(second)
                yield pair if first > second else (pair[1], pair[0])


def _explaining(one: Trace, other: Trace) -> Call | None:
    """Return the only call with equal inputs and different outputs, if there is one."""
    if _key(one.inputs) != _key(other.inputs):
        return None
    calls = {call.address: call for call in other.calls}
    differing = [
        call
        for call in one.calls
        if (twin := calls.get(call.address)) is not None
        and twin.component == call.component
        and call.failure is twin.failure is None
        and _key(call.inputs) == _key(twin.inputs)
        and _key(call.outputs) != _key(twin.outputs)
    ]
    return differing[0] if len(differing) == 1 else None


def _fits(trace: Trace, system: System) -> bool:
    """Return whether every call is one of a component of the system, with its output ports."""
    return trace.failure is None and all(
        call.component in system.components
        and (
            call.failure is not None
            or call.outputs.keys() == system.components[call.component].outputs.keys()
        )
        for call in trace.calls
    )


def _key(values: object) -> str:
    return canonical_json(to_readable_json(values))
