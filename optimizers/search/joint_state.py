"""Progress of the joint search, as stored in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from pydantic import Field

from compound.core.formatting import plural
from compound.core.storage.state import State
from compound.graph.configuration import canonical_json
from compound.optimizers.search.design import Values


class SearchCandidate(State):
    """A configuration with its comparison to the incumbent.

    Attributes:
        differences: its scores minus the incumbent's.
    """

    values: Values
    parent: int | None = None
    rows: list[int] = Field(default_factory=list)
    differences: list[float] = Field(default_factory=list)
    failed: list[int] = Field(default_factory=list)


class LocalCell(State):
    """Evaluations of values of one component without the components after it."""

    component: str
    values: Values
    context: Values
    rows: list[int] = Field(default_factory=list)
    failed: list[int] = Field(default_factory=list)


class JointProgress(State):
    """Progress of `compound.optimizers.search.joint.JointSearch`.

    Attributes:
        levels: values of each parameter to combine, other than the incumbent's.
        origins: the source that proposed each of them; ``""`` for options and numbers.
        runs: system runs of the search; ``None`` without a limit.
        width: maximum number of candidates of a step.
        field: the numbers of the candidates to score in the next step, the most important ones
            first.
        price: system runs that a candidate took per example; before the first step, the predicted
            ones.
        scores: the incumbent's score on each example so far.
        variance: variance of the scores of the last step.
        fitted: the examples that choices for each input were fitted to, by their value as JSON; a
            candidate with such a value is not scored on them.
    """

    FORMAT = 3
    levels: dict[str, list[object]]
    origins: dict[str, list[str]]
    runs: float | None
    width: int
    block: int
    candidates: list[SearchCandidate] = Field(default_factory=list)
    field: list[int] = Field(default_factory=list)
    steps: int = 0
    price: float = 1.0
    scores: dict[str, float] = Field(default_factory=dict)
    failed: list[int] = Field(default_factory=list)
    variance: float = 0.0
    cells: list[LocalCell] = Field(default_factory=list)
    fitted: dict[str, list[int]] = Field(default_factory=dict)

    @property
    def scored(self) -> list[int]:
        """The numbers of the candidates that were scored."""
        return [number for number, candidate in enumerate(self.candidates) if candidate.rows]

    @property
    def before(self) -> float | None:
        """The incumbent's mean score; ``None`` before the first step."""
        return float(np.mean([*self.scores.values()])) if self.scores else None

    @property
    def global_runs(self) -> list[GlobalRuns]:
        """The scored runs of the incumbent and all candidates, without those that failed."""
        found: list[tuple[Values, dict[int, float], list[int]]] = []
        found.append(({}, {int(row): score for row, score in self.scores.items()}, self.failed))
        for candidate in (self.candidates[number] for number in self.scored):
            pairs = zip(candidate.rows, candidate.differences, strict=True)
            scores = {row: self.scores[str(row)] + difference for row, difference in pairs}
            found.append((candidate.values, scores, candidate.failed))
        return [
            (values, {row: score for row, score in scores.items() if row not in failed})
            for values, scores, failed in found
        ]

    def usable(self, candidate: SearchCandidate, rows: Iterable[int]) -> list[int]:
        """Return the examples that a candidate may still be scored on."""
        seen = set(candidate.rows)
        for value in candidate.values.values():
            seen |= {*self.fitted.get(canonical_json(value), ())} if self.fitted else set()
        return [row for row in rows if row not in seen]

    def note(self, best: float) -> str:
        """Return the progress note of the last step; ``best`` is the highest expected gain."""
        most = max((len(candidate.rows) for candidate in self.candidates), default=0)
        size = plural(most, "example")
        return f"{plural(len(self.scored), 'candidate')}, the best on up to {size}: expected gain {best:+.3f}"

    def add_level(self, key: str, value: object, current: object, source: str = "") -> bool:
        """Add a value of a parameter to combine, unless it is ``None`` or known; return whether it is new."""
        levels, origins = self.levels.setdefault(key, []), self.origins.setdefault(key, [])
        known = {canonical_json(known) for known in (current, *levels)}
        if value is None or canonical_json(value) in known:
            return False
        levels.append(value)
        origins.append(source)
        return True

    def origin_of(self, candidate: SearchCandidate) -> tuple[Values, str]:
        """Return the values that a candidate changes, and the sources of the values that it adds."""
        parent = {} if candidate.parent is None else self.candidates[candidate.parent].values
        found = set[str]()
        for key, levels in self.levels.items():
            own = canonical_json(candidate.values.get(key))
            if key not in parent or canonical_json(parent[key]) != own:
                pairs = zip(levels, self.origins[key], strict=True)
                found |= {
                    origin for value, origin in pairs if origin and canonical_json(value) == own
                }
        return parent, " + ".join(sorted(found))

    def contributions(self, chosen: Values) -> dict[str, object]:
        """Return what each source contributed: new values, candidates that have one, and the chosen ones."""
        found: dict[str, dict[str, int]] = {}
        scored = [self.candidates[number].values for number in self.scored]
        for key, levels in self.levels.items():
            for value, origin in zip(levels, self.origins[key], strict=True):
                if not origin:
                    continue
                name = canonical_json(value)
                tally = found.setdefault(origin, {"values": 0, "scored": 0, "chosen": 0})
                tally["values"] += 1
                tally["scored"] += sum(
                    canonical_json(candidate[key]) == name for candidate in scored
                )
                tally["chosen"] += canonical_json(chosen[key]) == name
        return {"sources": found} if found else {}


GlobalRuns = tuple[Values, Mapping[int, float]]  # values of the parameters, and scores by example
