"""Turn feedback on served runs into draws, from which preference pairs for the local rewards are made.

Two runs with equal inputs and different ratings are compared. The rating is attributed to a call if it is
the only one that received equal inputs in both runs and produced other outputs: everything after it differs
because of it. If parallel branches differ, it is unknown which one made the difference, and the runs are left
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from compound.evaluation.feedback import FeedbackLog
from compound.execution.trace import Trace
from compound.graph.configuration import canonical_json, to_readable_json
from compound.graph.system import System
from compound.rewards.pairs import Draw, draws_from_runs
from compound.rewards.sampling.candidates import Sampling


@dataclass(frozen=True)
class FeedbackDraws:
    """Draws from feedback.

    Attributes:
        draws: the draws.
        comparisons: the number of compared pairs of runs.
        unattributed: the number of comparisons that no single call explains.
        foreign: the number of rated runs that the system cannot have made, such as with another component.
    """

    draws: tuple[Draw, ...]
    comparisons: int = 0
    unattributed: int = 0
    foreign: int = 0


def draws_from_feedback(log: FeedbackLog, system: System, sampling: Sampling) -> FeedbackDraws:
    """Return a draw for each comparison of two runs that a single call explains.

    Args:
        log: the feedback.
        system: the system that is optimized; runs with other components or ports are left out.
        sampling: the number of candidates of a draw.
    """
    rated = {run for pair in log.preferences for run in pair}
    rated |= {run for run, said in log.about.items() if said.score is not None}
    usable = {run for run in rated if run in log.runs and _fits(log.runs[run], system)}
    draws: list[Draw] = []
    comparisons = unattributed = 0
    for better, worse in _compared(log, usable):
        comparisons += 1
        component = _explaining(better, worse)
        found = draws_from_runs(component, [({}, better), ({}, worse)], sampling, system) if component else []
        draws += found
        unattributed += not found
    return FeedbackDraws(tuple(draws), comparisons, unattributed, len(rated) - len(usable))


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


def _explaining(one: Trace, other: Trace) -> str:
    """Return the component of the only call with equal inputs and different outputs; ``""`` if none is."""
    if _key(one.inputs) != _key(other.inputs):
        return ""
    calls = {call.address: call for call in other.calls}
    differing = [
        call.component
        for call in one.calls
        if (twin := calls.get(call.address)) is not None
        and twin.component == call.component
        and call.failure is twin.failure is None
        and _key(call.inputs) == _key(twin.inputs)
        and _key(call.outputs) != _key(twin.outputs)
    ]
    return differing[0] if len(differing) == 1 else ""


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
