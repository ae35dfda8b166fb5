"""Candidates of the joint search: combinations of values, and the progress stored in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from pydantic import Field

from compound.core.formatting import plural
from compound.core.storage.state import State
from compound.evaluation.evaluate import Evaluation
from compound.evaluation.metrics.scoring import metric_lms
from compound.execution.rng import generator
from compound.graph.configuration import canonical_json, component_of
from compound.graph.space import Choice, Float, Int
from compound.optimization.method import Task
from compound.optimization.prices import estimate_prices

ATTEMPTS = 6  # per candidate, since duplicates are dropped
COMBINATIONS = 256  # of values, from which new candidates are chosen
DRAWS = 16  # random numbers of a range too large to enumerate
OPTIONS = 64  # random combinations of the values of one component

Values = dict[str, object]


def options_of(space: Choice | Int | Float, rng: np.random.Generator) -> Sequence[object]:
    """Return the values of a choice or of a small range, or numbers drawn from a large one."""
    if isinstance(space, Choice):
        return space.options
    if isinstance(space, Int) and not _is_large(space):
        return range(space.low, space.high + 1)
    return [space.draw(rng) for _ in range(DRAWS)]


def _is_large(space: Int | Float) -> bool:
    return isinstance(space, Float) or space.high - space.low >= DRAWS


def incumbent_values(task: Task) -> Values:
    """Return the current values of the job's parameters."""
    return {key: task.system.configuration[key] for key in task.keys}


def changed_values(task: Task, values: Values) -> Values:
    """Return the values that differ from the incumbent's."""
    current = incumbent_values(task)
    return {
        key: x for key, x in values.items() if canonical_json(x) != canonical_json(current[key])
    }


def balanced_design(
    task: Task, levels: Mapping[str, Sequence[object]], count: int, changed: float
) -> list[Values]:
    """Return distinct combinations in which each value of a parameter occurs about equally often."""
    current, seen = incumbent_values(task), {canonical_json(incumbent_values(task))}
    tried = {canonical_json(dict(known.values)) for known in task.tried}
    keys = [key for key in task.keys if levels.get(key)]
    design: list[Values] = []
    for attempt in range(ATTEMPTS if keys else 0):
        excluded = (
            tried if design or attempt < ATTEMPTS - 1 else set[str]()
        )  # rather again than nothing
        rng = generator(task.seed, "design", attempt)
        columns = {
            key: _column(task, key, levels[key], len(keys), count, changed, rng) for key in keys
        }
        for row in range(count):
            values = {**current, **{key: columns[key][row] for key in keys}}
            name = canonical_json(values)
            if len(design) < count and name not in seen and name not in excluded:
                seen.add(name)
                design.append(values)
    return design


def _column(
    task: Task,
    key: str,
    levels: Sequence[object],
    keys: int,
    count: int,
    changed: float,
    rng: np.random.Generator,
) -> list[object]:
    """Return the values of one parameter in each candidate of a design, in random order."""
    current = task.system.configuration[key]
    if isinstance(task.system.parameters[key], Choice | Int | Float):
        pattern = [*levels, current] if keys > 1 else list(levels)
        start = int(rng.integers(len(pattern)))
        values = [pattern[(start + row) % len(pattern)] for row in range(count)]
    else:
        new = math.ceil(count * max(changed, 1 / keys))
        values = [levels[row % len(levels)] for row in range(new)] + [current] * (count - new)
    return [values[i] for i in rng.permutation(count)]


def combinations(
    task: Task,
    candidates: Iterable[Values],
    levels: Mapping[str, Sequence[object]],
    start: Values,
    rng: np.random.Generator,
) -> list[Values]:
    """Return new random combinations of values: each parameter keeps that of ``start``, or gets another."""
    known = (incumbent_values(task), *(known.values for known in task.tried))
    seen = {canonical_json(values) for values in known}
    seen |= {canonical_json(values) for values in candidates}
    found: list[Values] = []
    for _ in range(COMBINATIONS):
        values = dict(start)
        for key in task.keys:
            if rng.random() < 0.5:
                values[key] = another(task, key, levels.get(key, ()), rng)
        if canonical_json(values) not in seen:
            seen.add(canonical_json(values))
            found.append(values)
    return found


def another(task: Task, key: str, levels: Sequence[object], rng: np.random.Generator) -> object:
    """Draw a value of a parameter: a known one, the incumbent's, or a new number of a large range."""
    space, current = task.system.parameters[key], task.system.configuration[key]
    if isinstance(space, Int | Float) and _is_large(space):
        return space.draw(rng)
    options = [*levels, current]
    return options[rng.integers(len(options))]


def free_keys(task: Task) -> list[str]:
    """Return the parameters that no counted call depends on: their values can be compared at no run.

    A condition may depend on a parameter and have skipped a call so far, so that the graph counts
    as well. A metric that asks a model would be asked about every new output.
    """
    if not task.scorer.has_free_repeats or metric_lms(task.context.metric):
        return []
    estimated = estimate_prices(task.system)
    return [key for key in task.keys if not task.prices.keys([key]) + estimated.keys([key])]


def values_of(
    component: str,
    task: Task,
    candidates: Iterable[Values],
    levels: Mapping[str, Sequence[object]],
    rng: np.random.Generator,
) -> list[Values]:
    """Return combinations of values of one component's parameters: those of candidates, and random ones."""
    keys = [key for key in task.keys if component_of(key) == component]
    found = [{key: values[key] for key in keys} for values in candidates]
    found += [
        {key: another(task, key, levels.get(key, ()), rng) for key in keys} for _ in range(OPTIONS)
    ]
    return list({canonical_json(values): values for values in found}.values())


class SearchCandidate(State):
    """A configuration with its comparison to the incumbent."""

    values: Values
    parent: int | None = None
    rows: list[int] = Field(default_factory=list)
    differences: list[float] = Field(default_factory=list)  # its scores minus the incumbent's
    failed: list[int] = Field(default_factory=list)


def failed_on(evaluation: Evaluation, rows: Sequence[int]) -> list[int]:
    """Return the examples on which a candidate failed."""
    pairs = zip(rows, evaluation.rows, strict=True)
    return [row for row, run in pairs if run.failure is not None]


class LocalCell(State):
    """Evaluations of values of one component without the components after it."""

    component: str
    values: Values
    context: Values
    rows: list[int] = Field(default_factory=list)
    failed: list[int] = Field(default_factory=list)


class JointProgress(State):
    """Progress of `compound.optimizers.search.joint.JointSearch`."""

    FORMAT = 4
    # values of each parameter to combine, other than the incumbent's
    levels: dict[str, list[object]]
    # the source that proposed each of them; `""` for options and numbers
    origins: dict[str, list[str]]
    runs: float | None
    width: int  # maximum number of candidates of a step
    block: int
    candidates: list[SearchCandidate] = Field(default_factory=list)
    # the numbers of the candidates to score in the next step, the most important ones first
    field: list[int] = Field(default_factory=list)
    steps: int = 0
    # system runs that a candidate took per example; before the first step, the predicted ones
    price: float = 1.0
    scores: dict[str, float] = Field(default_factory=dict)
    failed: list[int] = Field(default_factory=list)
    variance: float = 0.0
    cells: list[LocalCell] = Field(default_factory=list)
    # the examples that choices for each input were fitted to, by their value as JSON; a candidate
    # with such a value is not scored on them
    fitted: dict[str, list[int]] = Field(default_factory=dict)
    free: list[str] = Field(default_factory=list)  # parameters that are tuned at no run
    paid: int = 0  # runs of the incumbent and of candidates
    compared: int = 0  # further runs, of values of free parameters

    @property
    def scored(self) -> list[int]:
        """The numbers of the candidates that were scored."""
        return [number for number, candidate in enumerate(self.candidates) if candidate.rows]

    @property
    def before(self) -> float | None:
        """The incumbent's mean score; ``None`` before the first step."""
        return float(np.mean([*self.scores.values()])) if self.scores else None

    def global_runs(self, examples: int) -> list[GlobalRuns]:
        """Return the scored runs on the first examples, without those that failed."""
        found: list[tuple[Values, dict[int, float], list[int]]] = []
        found.append(({}, {int(row): score for row, score in self.scores.items()}, self.failed))
        for candidate in (self.candidates[number] for number in self.scored):
            pairs = zip(candidate.rows, candidate.differences, strict=True)
            scores = {row: self.scores[str(row)] + difference for row, difference in pairs}
            found.append((candidate.values, scores, candidate.failed))
        return [
            (
                values,
                {
                    row: score
                    for row, score in scores.items()
                    if row < examples and row not in failed
                },
            )
            for values, scores, failed in found
        ]

    def record(
        self, candidate: SearchCandidate, evaluation: Evaluation, rows: Sequence[int]
    ) -> None:
        """Add the scores of a candidate on some examples that the incumbent was scored on."""
        candidate.rows += rows
        candidate.failed += failed_on(evaluation, rows)
        candidate.differences += [
            score - self.scores[str(row)]
            for row, score in zip(rows, evaluation.scores, strict=True)
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
