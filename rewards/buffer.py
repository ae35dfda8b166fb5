"""The pair buffer: all draws of all components, stored in a run's memory as JSON records.

Feedback on served runs becomes draws. Two runs with equal inputs and different ratings are compared;
the rating is attributed to a call if it is the only one that received equal inputs in both runs and
produced other outputs.

An optimization takes over configurations and draws of an earlier run: it starts from its result, and
its other configurations are candidates. Draws of rows that are not train examples of the new run are
left out, and so are prompts and demonstrations that contain a text of a validation or test row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import special

from compound.core.errors import DataError, RunDirectoryError
from compound.core.example import Example
from compound.core.formatting import plural
from compound.core.narrowing import entry
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.artifacts import is_reference
from compound.evaluation.feedback import FeedbackLog
from compound.execution.trace import Call, Trace
from compound.graph.configuration import (
    canonical_json,
    digest,
    to_readable_json,
    to_readable_values,
)
from compound.graph.space import Demos, Text
from compound.graph.system import System
from compound.optimization.method import EarlierRun
from compound.optimization.runs.directory import (
    CONFIG,
    inconsistency_errors,
    load_checkpoint,
    read_json,
    read_records,
)
from compound.optimization.scorer import HeldOutAnswers
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
        records: Iterable[Mapping[str, object]],
        system: System | str,
        sampling: Sampling,
        place: str = "",
    ) -> PairBuffer:
        """Read a buffer from records; messages start with ``place``.

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
                    f"{place}record {number} of the pair buffer is damaged: {error!r}"
                ) from None
            if source != buffer.system:
                raise DataError(
                    f"{place}the pair buffer belongs to another system (record {number}: "
                    f"{source[:12]}, expected {buffer.system[:12]})",
                    hint="pairs are valid only for the system that produced them; start a new run",
                )
            buffer.entries.append(Entry(draw, iteration))
        return buffer

    def add(self, draws: Sequence[Draw], iteration: int) -> list[dict[str, object]]:
        """Add draws of an iteration, and return the records to store."""
        self.entries += [Entry(draw, iteration) for draw in draws]
        origin = {"system": self.system, "iteration": iteration}
        return [{**origin, "draw": to_document(draw)} for draw in draws]

    @property
    def components(self) -> list[str]:
        """The components of the draws."""
        return list(dict.fromkeys(entry.draw.component for entry in self.entries))

    def of(self, component: str) -> list[Entry]:
        """Return the draws of a component."""
        return [entry for entry in self.entries if entry.draw.component == component]

    def pairs(self, component: str) -> list[tuple[Pair, int]]:
        """Return the decided pairs of a component, each with its iteration."""
        pairs = ((entry, ordered_pairs(entry.draw, self.sampling)) for entry in self.of(component))
        return [(pair, entry.iteration) for entry, found in pairs for pair in found]

    def weighted_pairs(self, component: str) -> list[tuple[Pair, int, float]]:
        """Return the pairs of a component that a reward is fitted to, with their iterations and weights.

        Decided pairs have weight 1; those of one run each before random components have ``2 Φ(gap / s) − 1``,
        where s is the root mean square gap of these pairs.
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

        Outputs whose order is not decided have a gap of 0; draws that decide nothing are left out.
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


def row_digest(example: Example) -> str:
    """Return the digest of an example's inputs, by which another run finds the row under another name."""
    return digest(to_readable_json(example.inputs))


def to_document(draw: Draw) -> dict[str, object]:
    """Return a draw as JSON types; a candidate omits what is false or empty at its end."""
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


def read_earlier(
    path: Path, system: System, train: Sequence[Example], held_out: Sequence[Example] = ()
) -> EarlierRun:
    """Read an earlier run of the same system, or of one that shares components with it.

    ``train`` and ``held_out`` are the train examples, and the validation and test examples, of the new
    run.

    Raises:
        RunDirectoryError: it is not a run directory, has no result yet, or one of its files is damaged.
    """
    folder = UntrustedFolder(path)
    read_json(folder, CONFIG)  # raises for a folder that is not a run directory
    stored = load_checkpoint(folder)
    if stored is None or stored.state.search is None:
        raise RunDirectoryError(
            f"{path} has nothing to start from yet", hint="name a run with a decision"
        )
    search = stored.state.search
    answers = HeldOutAnswers(held_out, train)
    values = [
        _usable(each, system) for each in (search.best, search.supported, search.promising or {})
    ]
    texts = {key for key, space in system.parameters.items() if isinstance(space, Text | Demos)}
    written = [item for each in values for item in each.items() if item[0] in texts]
    leaking = {key for key, value in written if answers.found_in(value)}
    values = [{k: value for k, value in each.items() if k not in leaking} for each in values]
    draws, unusable = _draws(path, system, train)
    result = "the result of " if values[0] else ""
    told = f"starts from {result}{path}, with {plural(len(draws), 'draw')} of its local rewards"
    if unusable:
        why = "their rows are no train examples of this run, or their component differs"
        told += f"; {unusable} are left out, since {why}"
    if leaking:
        held = "which contains texts of validation or test rows"
        told += "".join(f"; without {key}, {held}" for key in sorted(leaking))
    if not any(values) and not draws:
        raise RunDirectoryError(
            f"{path} has nothing that this run could start from: no parameter and no component in common",
            hint="start from a run of the same system",
        )
    others = [each for each in (*values[1:], _usable(system.configuration, system)) if each]
    found = digest([values[0], others, [to_document(draw) for draw in draws]])
    return EarlierRun(values[0], others, draws, told, found)


def _usable(values: Mapping[str, object], system: System) -> dict[str, object]:
    """Return the values that the system may have; trained weights and stored rewards stay where they are."""
    return {
        key: value
        for key, value in values.items()
        if key in system.parameters
        and not is_reference(value)
        and not system.parameters[key].problem(value)
    }


def _draws(path: Path, system: System, train: Sequence[Example]) -> tuple[list[Draw], int]:
    """Return the draws that a run may use, under the names of its examples, and the number of the others."""
    folder = UntrustedFolder(path)
    if folder.kind("memory.jsonl") is None:
        return [], 0
    names = {row_digest(example): example.id for example in train}
    with inconsistency_errors(folder):
        records = [record for record in read_records(folder, "memory.jsonl") if "draw" in record]
        whose = str(records[0]["system"]) if records else ""
        entries = PairBuffer.read(records, whose, Sampling(), f"{path}: ").entries
    found: list[Draw] = []
    for record, draw in zip(records, (each.draw for each in entries), strict=True):
        name = names.get(str(record.get("row")))
        if name is not None and _draw_fits(draw, system):
            found.append(replace(draw, example=name))
    return found, len(records) - len(found)


def _draw_fits(draw: Draw, system: System) -> bool:
    component = system.components.get(draw.component)
    if component is None:
        return False
    nodes = [node for node in system.all_nodes() if node.component is component]
    read = {name for node in nodes for name in node.wires if name not in component.settings}
    written = {name for candidate in draw.candidates for name in candidate.outputs}
    return set(draw.inputs) <= read and written <= set(component.outputs)
