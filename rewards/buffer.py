"""The pair buffer: all draws of all components, with their origin and iteration.

It is stored in a run's memory as JSON records, and rejects records of another system.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, cast

from compound.errors import DataError
from compound.graph.configuration import canonical_json, digest, to_readable_json, to_readable_values
from compound.graph.system import System
from compound.narrowing import entry
from compound.rewards.pairs import Candidate, Draw, Pair, Sampling, ordered_pairs


class DrawDocument(TypedDict):
    """A `Draw` as JSON types; a candidate is its outputs, its rewards and its settings."""

    component: str
    address: str
    example: str
    configuration: str
    inputs: dict[str, object]
    candidates: list[tuple[dict[str, object], list[float], dict[str, object]]]


@dataclass(frozen=True)
class Entry:
    """A draw in the buffer, with its iteration."""

    draw: Draw
    iteration: int


@dataclass
class PairBuffer:
    """All draws, in the order in which they were added.

    Attributes:
        system: the identity of the system.
        sampling: the significance threshold for making a pair of two candidates.
    """

    system: str
    sampling: Sampling = field(default_factory=Sampling)
    entries: list[Entry] = field(default_factory=list)

    @staticmethod
    def read(records: Iterable[Mapping[str, object]], system: System | str, sampling: Sampling) -> PairBuffer:
        """Read a buffer from records.

        Args:
            records: the records that `add` returned.
            system: the system of the records, or its identity.
            sampling: the significance threshold for making a pair of two candidates.

        Raises:
            DataError: a record is damaged, or belongs to another system.
        """
        buffer = PairBuffer(system if isinstance(system, str) else system.identity, sampling)
        for number, record in enumerate(records, 1):
            if "kind" in record:  # a record of another kind in the run's memory
                continue
            try:
                source, iteration = str(record["system"]), entry(record, "iteration", int)
                draw = _draw(cast("DrawDocument", record["draw"]))  # raises if it is malformed
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"record {number} of the pair buffer is damaged: {error!r}") from None
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
        return [{"system": self.system, "iteration": iteration, "draw": _to_json(draw)} for draw in draws]

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

    def gap(self, component: str, iteration: int | None = None) -> float:
        """Return the mean gap of a component's draws: best minus worst candidate, over all its inputs.

        The paper's scheduler uses this gap. Draws with one candidate count as 0. The default iteration is the
        component's latest one.
        """
        found = self.of(component)
        if iteration is None:
            iteration = max((entry.iteration for entry in found), default=0)
        values = [
            [c.value for c in e.draw.candidates if c.rewards] for e in found if e.iteration == iteration
        ]
        gaps = [max(row) - min(row) if row else 0.0 for row in values]
        return sum(gaps) / len(gaps) if gaps else 0.0

    @property
    def digest(self) -> str:
        """Digest of the draws, which identifies the training data of a reward model."""
        return digest([[entry.iteration, _to_json(entry.draw)] for entry in self.entries])


def _to_json(draw: Draw) -> DrawDocument:
    return {
        "component": draw.component,
        "address": draw.address,
        "example": draw.example,
        "configuration": draw.configuration,
        "inputs": to_readable_values(draw.inputs),
        "candidates": [
            (to_readable_values(c.outputs), list(c.rewards), to_readable_values(c.settings))
            for c in draw.candidates
        ],
    }


def _draw(data: DrawDocument) -> Draw:
    return Draw(
        str(data["component"]),
        str(data["address"]),
        str(data["example"]),
        str(data["configuration"]),
        dict(data["inputs"]),
        tuple(
            Candidate(dict(outputs), tuple(map(float, rewards)), dict(settings))
            for outputs, rewards, settings in data["candidates"]
        ),
    )


def input_key(draw_or_pair: Draw | Pair) -> str:
    """Return the key of an input, by which equal inputs of different examples are grouped."""
    return canonical_json(to_readable_json(draw_or_pair.inputs))
