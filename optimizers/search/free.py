"""Tuning of parameters that no counted call depends on, at no system runs.

Examples are weights of merged rankings, thresholds, and layouts. Runs that differ in these only have
equal calls of models and indexes, which come from the cache. Many values are therefore compared on the
examples that a configuration was run on: all of them on a quarter of these examples, and the best
quarter of the values on half of them. The best value is measured on the remaining examples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from compound.core.example import Example
from compound.evaluation.metrics.comparison import Comparison
from compound.execution.rng import generator
from compound.graph.configuration import canonical_json
from compound.graph.space import Float, Int
from compound.optimization.method import Task
from compound.optimizers.search.candidates import (
    JointProgress,
    SearchCandidate,
    Values,
    another,
    incumbent_values,
)
from compound.optimizers.search.gain_model import GainModel

# comparisons of values, as a multiple of the scored runs of the job's candidates: they cost no system
# runs, but functions and metrics take time, and a metric of the user may ask a service
SHARE, SHARE_OF_CUSTOM = 10.0, 4.0
SLOWEST = 0.1  # seconds of a run from the cache with its score; slower functions may ask a service
ROUNDS = 4  # per step
TUNED = 2  # configurations per step that new values are drawn for
FEWEST_VALUES, MOST_VALUES = 4, 64  # per configuration and round
OVERSAMPLING = (
    4  # values drawn per value compared; the model of gains selects half of those compared
)
FIRST_ROWS = 4  # least number of examples of a comparison
MOST_ROWS = 32
REDUCTION = 4  # ratio of the numbers of values in the first and the second comparison
LEARNED = 4  # values of the first comparison that the model of gains learns from
BEST = 4  # known values that are tried with other configurations
BOUND = 0.25  # probability that a random number is a bound, such as a weight of 0
SHIFT = 0.1  # standard deviation of small changes of numbers, relative to their range


async def are_fast(task: Task, examples: Sequence[Example]) -> bool:
    """Return whether functions and metric take little time, given examples that the incumbent was run on."""
    seconds = []
    for example in examples[:FIRST_ROWS]:
        start = time.perf_counter()
        await task.scorer.score([{}], [example], record=False)
        seconds.append(time.perf_counter() - start)
    # the minimum, since other processes may slow down single runs
    return min(seconds, default=math.inf) <= SLOWEST


@dataclass(frozen=True)
class FreeTuning:
    """Tuning of the free parameters of a job.

    Attributes:
        task: the job.
        state: its progress, which the values found are added to as candidates.
        examples: the examples that candidates were scored on, by their number.
        model: returns the model of all gains so far.
    """

    task: Task
    state: JointProgress
    examples: Sequence[Example]
    model: Callable[[], GainModel]

    async def step(self, best: Sequence[int]) -> None:
        """Tune the incumbent and the leader, and try what was found with other candidates of the step.

        Args:
            best: the scored candidates, the highest expected gain first; empty if none gains.
        """
        state = self.state
        start = SearchCandidate(
            values=incumbent_values(self.task),
            rows=[*map(int, state.scores)],
            differences=[0.0] * len(state.scores),
            failed=state.failed,
        )
        known = [state.candidates[number].values for number in best[:BEST]]
        bases: dict[str, tuple[int | None, SearchCandidate]] = {}
        for number in (None, *best[:1], *state.field):
            base = start if number is None else state.candidates[number]
            bases.setdefault(self._calls(base.values), (number, base))
        tuned, others = [*bases.values()][:TUNED], [*bases.values()][TUNED:]
        for turn in range(ROUNDS * len(tuned)):
            number, base = tuned[turn % len(tuned)]
            most = self._left() / _cost(len(base.rows)) / (ROUNDS * len(tuned) - turn)
            count = min(MOST_VALUES, max(FEWEST_VALUES, int(most)))
            if count * _cost(len(base.rows)) <= self._left():
                values = self._drawn(base, known, count, turn)
                known = [*await self._improve(base, number, values), *known]
        for number, base in others:
            if self._left() > 0:
                values = [self._moved(base, each) for each in known[:BEST]]
                known = [*await self._improve(base, number, values), *known]

    def _calls(self, values: Values) -> str:
        """Return what configurations with the same calls have in common."""
        return canonical_json({k: x for k, x in values.items() if k not in self.state.free})

    def _left(self) -> float:
        known = isinstance(self.task.context.metric, Comparison)
        return (SHARE if known else SHARE_OF_CUSTOM) * self.state.paid - self.state.compared

    def _moved(self, base: SearchCandidate, values: Values) -> Values:
        return {**base.values, **{key: values[key] for key in self.state.free}}

    def _drawn(
        self, base: SearchCandidate, known: Sequence[Values], count: int, turn: int
    ) -> list[Values]:
        """Return known values, and small changes of these and random values; the model draws half."""
        name = canonical_json(base.values)
        rng = generator(self.task.seed, "free", self.state.steps, turn, name)
        moved = [self._moved(base, each) for each in known[:BEST]]
        starts, pool = [base.values, *moved], list[Values]()
        for number in range(OVERSAMPLING * count):
            start = starts[number // 2 % len(starts)]
            pool.append(self._changed(start, rng, small=number % 2 == 0))
        ranked = np.argsort(-self.model().draw(pool, rng), kind="stable").tolist()
        order = dict.fromkeys([*ranked[: (count + 1) // 2], *range(len(pool))])
        return [*moved, *(pool[i] for i in order)][:count]

    def _changed(self, values: Values, rng: np.random.Generator, *, small: bool) -> Values:
        changed = dict(values)
        for key in self.state.free:
            space, levels = self.task.system.parameters[key], self.state.levels.get(key, ())
            if rng.random() < 0.5:
                if not isinstance(space, Int | Float):
                    changed[key] = another(self.task, key, levels, rng)
                elif small:
                    changed[key] = _near(space, values[key], rng)
                elif rng.random() < BOUND:
                    changed[key] = (space.low, space.high)[rng.integers(2)]
                else:
                    changed[key] = space.draw(rng)
        return changed

    async def _improve(
        self, base: SearchCandidate, number: int | None, values: Sequence[Values]
    ) -> list[Values]:
        """Add the best values as a candidate if they score more than the configuration; return them.

        Where the configuration failed, its values fail, too: failed calls are not cached, and values
        that are scored on the other examples alone would seem better.
        """
        known = {canonical_json(each.values) for each in (base, *self.state.candidates)}
        points = {canonical_json(each): each for each in values}
        field = [each for name, each in points.items() if name not in known]
        rows = [row for row in base.rows if row not in base.failed]
        order = generator(self.task.seed, "rows", self.state.steps).permutation(len(rows))
        rows = [rows[i] for i in order[:MOST_ROWS]]
        first, half = _parts(len(rows))
        if not rows or not field:
            return []
        if first < half:
            _, *others = await self._compare([base.values, *field], rows[:first])
            ranked = sorted(range(len(field)), key=lambda i: -others[i])
            for i in ranked[:: -(-len(field) // LEARNED)]:
                await self._add(field[i], number, base, rows[:first])
            field = [field[i] for i in ranked[: max(1, len(field) // REDUCTION)]]
        own, *others = await self._compare([base.values, *field], rows[:half])
        best = max(range(len(field)), key=others.__getitem__)
        if others[best] <= own:
            return []
        # the scores by which it was selected are biased
        await self._add(field[best], number, base, rows[half:] or rows)
        return [field[best]]

    async def _compare(self, values: Sequence[Values], rows: Sequence[int]) -> list[float]:
        """Return the mean scores of configurations, the first of which is the base."""
        self.state.compared += (len(values) - 1) * len(rows)
        examples = [self.examples[row] for row in rows]
        found = await self.task.scorer.score(values, examples, record=False)
        return [evaluation.mean for evaluation in found]

    async def _add(
        self, values: Values, number: int | None, base: SearchCandidate, rows: Sequence[int]
    ) -> None:
        """Add a candidate with its scores on some examples, which the record of the run gets, too."""
        candidate = SearchCandidate(values=values, parent=number)
        self.task.note_origin(values, *self.state.origin_of(candidate))
        (found,) = await self.task.scorer.score([values], [self.examples[row] for row in rows])
        self.state.record(candidate, found, rows)
        pairs = zip(base.rows, base.differences, strict=True)
        lost = [(row, difference) for row, difference in pairs if row in base.failed]
        candidate.rows += [row for row, _ in lost]
        candidate.failed += [row for row, _ in lost]
        candidate.differences += [difference for _, difference in lost]
        self.state.candidates.append(candidate)


def _parts(rows: int) -> tuple[int, int]:
    """Return the numbers of examples of the first and the second comparison."""
    return min(rows, max(FIRST_ROWS, rows // 4)), min(rows, max(FIRST_ROWS, rows // 2))


def _cost(rows: int) -> float:
    """Return the number of runs that compare one value, on average."""
    first, half = _parts(rows)
    return first + half / REDUCTION


def _near(space: Int | Float, value: object, rng: np.random.Generator) -> int | float:
    """Return a number close to another one."""
    assert isinstance(value, int | float)  # as checked by the space
    scale, back = (math.log, math.exp) if space.log else (float, float)
    low, high = scale(space.low), scale(space.high)
    moved = back(scale(value) + SHIFT * (high - low) * rng.normal())
    moved = min(max(moved, space.low), space.high)
    return round(moved) if isinstance(space, Int) else float(moved)
