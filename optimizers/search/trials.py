"""Joint search by trials on minibatches; after each round, the best point is scored on a larger set.

The search of Opsahl-Ong et al. 2024, "Optimizing Instructions and Demonstrations for Multi-Stage Language
Model Programs".
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import cast

from pydantic import Field

from compound.example import Example
from compound.execution.rng import generator
from compound.graph.configuration import canonical_json
from compound.graph.space import Choice
from compound.optimization.method import Task
from compound.optimizers.search.tpe import next_point
from compound.storage.state import State

ROUND = 4  # trials per round, scored on the same minibatch
LARGER = 3  # size of the larger set, in minibatches

Point = dict[str, int]  # by parameter, the number of one of its values; 0 is the incumbent's


class Trial(State):
    """A point with its mean score on some examples."""

    point: Point
    mean: float


class JointSearch(State):
    """Progress of a joint search.

    Attributes:
        values: the values of each parameter, without the incumbent's.
        wanted: the planned number of trials.
        batch: the size of a minibatch.
        larger: the size of the larger set.
        round: the number of completed rounds.
        trials: the trials on minibatches, in order.
        scored: the points scored on the larger set, in order; the first one is the incumbent.
    """

    values: dict[str, list[object]]
    wanted: int
    batch: int
    larger: int
    round: int = 0
    trials: list[Trial] = Field(default_factory=list)
    scored: list[Trial] = Field(default_factory=list)

    def changes(self, point: Point) -> dict[str, object]:
        """Return the values of a point that differ from the incumbent's."""
        return {key: self.values[key][number - 1] for key, number in point.items() if number}


def trials_for(options: Sequence[int]) -> int:
    """Return the number of trials of a search, as in the paper's code: max(2 n log2(k), 1.5 k).

    Args:
        options: the number of values of each of the n parameters, k being the largest.

    >>> trials_for([6, 6]), trials_for([8]), trials_for([])
    (11, 12, 0)
    """
    most = max(options, default=1)
    return math.ceil(max(2 * len(options) * math.log2(most), 1.5 * most)) if options else 0


def sizes(
    trials: int, least: int, most: int, examples: int, runs: float, free_repeats: bool = True
) -> tuple[int, int]:
    """Return the sizes of a minibatch and of the larger set, which contains the minibatches.

    The minibatch is the largest between ``least`` and ``most`` for which ``runs`` covers all trials and the
    scoring on the larger set after each round. If there is none, the larger set is reduced, so that the
    budget covers at least one trial.

    >>> sizes(12, 8, 35, 200, 840), sizes(12, 8, 35, 200, 839), sizes(12, 8, 35, 20, 100)
    ((35, 105), (34, 102), (8, 20))
    """
    repeats = 0 if free_repeats else 1  # the incumbent is scored again with every group of candidates
    times = math.ceil(trials / ROUND)
    batch = most
    while batch > least:
        larger = min(LARGER * batch, examples)
        if (trials + repeats * times) * batch + (1 + times * (1 + repeats)) * larger <= runs:
            break
        batch -= 1
    affordable = (runs - (1 + repeats) * batch) / (2 + repeats)  # size of the larger set with a single trial
    return batch, int(min(LARGER * batch, examples, max(batch, affordable)))


async def rounds(task: Task, state: JointSearch, larger: Sequence[Example]) -> AsyncIterator[JointSearch]:
    """Advance a search; yield its progress after scoring the incumbent, and after each round of trials."""
    repeats = 0 if task.scorer.has_free_repeats else 1
    final = (1 + repeats) * len(larger)  # cost of scoring one more point on the larger set
    if not state.scored:
        if task.scorer.runs_left < len(larger) + final + (1 + repeats) * state.batch:
            return
        (incumbent,) = await task.scorer.score([{}], larger)
        state.scored.append(Trial(point=dict.fromkeys(sorted(state.values), 0), mean=incumbent.mean))
        yield state
    while len(state.trials) < state.wanted:
        spare = (task.scorer.runs_left - final) / state.batch - repeats
        count = int(min(spare, ROUND, state.wanted - len(state.trials)))
        if count < 1:
            return
        points = _suggested(task, state, count)
        order = generator(task.seed, "minibatch", state.round).permutation(len(larger))
        means = await _means(task, state, points, [larger[i] for i in order[: state.batch]])
        trials = [Trial(point=point, mean=mean) for point, mean in zip(points, means, strict=True)]
        state.trials += trials
        state.round += 1
        best = promising(state.trials, [trial.point for trial in state.scored])
        if best is not None:
            (mean,) = await _means(task, state, [best], larger)
            state.scored.append(Trial(point=best, mean=mean))
        yield state


def _suggested(task: Task, state: JointSearch, count: int) -> list[Point]:
    """Return the next suggestions of TPE."""
    values = sorted(state.values.items())  # draws depend on the order, which checkpoints do not preserve
    spaces = {key: Choice(*range(len(some) + 1)) for key, some in values}
    known = [(trial.point, trial.mean) for trial in [*state.scored, *state.trials]]
    points: list[Point] = []
    for _ in range(count):
        point = next_point(spaces, known, points, task.seed, "mipro")
        points.append(cast("Point", point))  # all options are integers
    return points


async def _means(
    task: Task, state: JointSearch, points: Sequence[Point], examples: Sequence[Example]
) -> list[float]:
    """Score points together with the incumbent, since the scorer raises if all candidates fail."""
    candidates = [state.changes(point) for point in points]
    return [e.mean for e in (await task.scorer.score([{}, *candidates], examples))[1:]]


def promising(trials: Sequence[Trial], scored: Sequence[Point]) -> Point | None:
    """Return the point with the best mean over its trials that was not scored on the larger set yet.

    >>> trials = [Trial(point={"a": a}, mean=mean) for a, mean in [(1, 0.9), (2, 0.6), (1, 0.2)]]
    >>> promising(trials, scored=[{"a": 0}])
    {'a': 2}
    """
    points = {canonical_json(trial.point): trial.point for trial in trials}
    means: dict[str, list[float]] = {}
    for trial in trials:
        if trial.point not in scored:
            means.setdefault(canonical_json(trial.point), []).append(trial.mean)
    if not means:
        return None
    return points[max(means, key=lambda name: sum(means[name]) / len(means[name]))]
