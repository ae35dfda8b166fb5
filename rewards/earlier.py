"""Evidence from before the run: feedback on a served system, and an earlier optimization.

Feedback on served runs becomes draws, from which preference pairs for the local rewards are made.
Two runs with equal inputs and different ratings are compared. The rating is attributed to a call if
it is the only one that received equal inputs in both runs and produced other outputs: everything
after it differs because of it. If parallel branches differ, it is unknown which one made the
difference, and the runs are left out.

An optimization takes over configurations and draws of an earlier run. Nothing is trusted because it
is from an earlier run: the configurations are candidates like others, and a local reward is used as
far as the first whole runs of the new search confirm it. Draws of rows that are not train examples
of the new run are left out, so that no reward knows a validation or test row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from compound.core.errors import RunDirectoryError
from compound.core.example import Example
from compound.core.formatting import plural
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.artifacts import is_reference
from compound.evaluation.feedback import FeedbackLog
from compound.execution.trace import Call, Trace
from compound.graph.configuration import canonical_json, digest, to_readable_json
from compound.graph.system import System
from compound.optimization.method import EarlierRun
from compound.optimization.runs.directory import inconsistency_errors, load_checkpoint, read_records
from compound.rewards.buffer import PairBuffer, row_digest, to_document
from compound.rewards.candidates import Sampling
from compound.rewards.pairs import Draw, candidate_of


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


def read_earlier(path: Path, system: System, train: Sequence[Example]) -> EarlierRun:
    """Read an earlier run of the same system, or of one that shares components with it.

    Args:
        path: its run directory.
        system: the system to optimize.
        train: the train examples of the new run.

    Raises:
        RunDirectoryError: it is not a run directory, or has no result yet, or one of its files is
            damaged.
    """
    stored = load_checkpoint(UntrustedFolder(path))
    if stored is None or stored.state.search is None:
        raise RunDirectoryError(
            f"{path} has nothing to start from yet", hint="name a run with a decision"
        )
    search = stored.state.search
    values = [
        _usable(found, system) for found in (search.best, search.supported, search.promising or {})
    ]
    draws, unusable = _draws(path, system, train)
    told = f"starts from {path}: {plural(len(draws), 'draw')} of its local rewards"
    if unusable:
        why = "their rows are no train examples of this run, or their component differs"
        told += f"; {unusable} are left out, since {why}"
    if not any(values) and not draws:
        raise RunDirectoryError(
            f"{path} has nothing that this run could start from: no parameter and no component in common",
            hint="start from a run of the same system",
        )
    usable = [each for each in values if each]
    found = digest([usable, [to_document(draw) for draw in draws]])
    return EarlierRun(usable, draws, told, found)


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
        entries = PairBuffer.read(records, whose, Sampling()).entries
    found: list[Draw] = []
    for record, draw in zip(records, (entry.draw for entry in entries), strict=True):
        name = names.get(str(record.get("row")))
        if name is not None and _draw_fits(draw, system):
            found.append(replace(draw, example=name))
    return found, len(records) - len(found)


def _draw_fits(draw: Draw, system: System) -> bool:
    """Return whether a component of the system has the ports of a draw."""
    component = system.components.get(draw.component)
    if component is None:
        return False
    read = {
        name
        for node in system.all_nodes()
        if node.component is component
        for name in node.wires
        if name not in component.settings
    }
    written = {name for candidate in draw.candidates for name in candidate.outputs}
    return set(draw.inputs) <= read and written <= set(component.outputs)
