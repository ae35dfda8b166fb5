"""Trials of joint choices on minibatches; after every round the best by mean meets a larger set.

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
from compound.graph.configuration import canonical
from compound.graph.space import Choice
from compound.optimization.method import Task
from compound.optimizers.search.tpe import next_point
from compound.storage.state import State

ROUND = 4  # trials scored at once, on one minibatch
LARGER = 3  # minibatches in the larger set

Point = dict[str, int]  # for each parameter, the number of one of its values; 0 is the incumbent's


class Trial(State):
    """A point with its mean score on some examples."""

    point: Point
    mean: float


class JointSearch(State):
    """The progress of a search of joint choices.

    Attributes:
        values: the values of each parameter besides the incumbent's.
        wanted: how many trials there should be.
        batch: the number of examples of a minibatch.
        larger: the number of examples of the larger set.
        round: how many rounds of trials are completed.
        trials: the trials on minibatches, in order.
        scored: the points that were scored on the larger set, in order; the first one is the incumbent.
    """

    values: dict[str, list[object]]
    wanted: int
    batch: int
    larger: int
    round: int = 0
    trials: list[Trial] = Field(default_factory=list)
    scored: list[Trial] = Field(default_factory=list)

    def changes(self, point: Point) -> dict[str, object]:
        """Return the values of a point that are not the incumbent's."""
        return {key: self.values[key][number - 1] for key, number in point.items() if number}


def trials_for(options: Sequence[int]) -> int:
    """Return how many trials a search should have: the paper's code takes 2 n log2(k), or 1.5 k if more.

    >>> trials_for([6, 6]), trials_for([8]), trials_for([])
    (11, 12, 0)
    """
    most = max(options, default=1)
    return math.ceil(max(2 * len(options) * math.log2(most), 1.5 * most)) if options else 0


def sizes(
    trials: int, least: int, most: int, examples: int, runs: float, free_repeats: bool = True
) -> tuple[int, int]:
    """Return the examples of a minibatch and of the larger set, which contains the minibatches.

    The minibatch is the largest between ``least`` and ``most`` with which all trials and their rounds'
    larger sets fit into ``runs``. Where none is, the larger set shrinks, to leave something for trials.

    >>> sizes(12, 8, 35, 200, 840), sizes(12, 8, 35, 200, 839), sizes(12, 8, 35, 20, 100)
    ((35, 105), (34, 102), (8, 20))
    """
    again = 0 if free_repeats else 1  # the incumbent, beside every group of candidates
    times = math.ceil(trials / ROUND)
    batch = most
    while batch > least:
        larger = min(LARGER * batch, examples)
        if (trials + again * times) * batch + (1 + times * (1 + again)) * larger <= runs:
            break
        batch -= 1
    spared = (runs - (1 + again) * batch) / (2 + again)  # for one trial
    return batch, int(min(LARGER * batch, examples, max(batch, spared)))


async def rounds(task: Task, state: JointSearch, larger: Sequence[Example]) -> AsyncIterator[JointSearch]:
    """Advance a search; yield it after the incumbent's score, and after every round of trials."""
    again = 0 if task.scorer.free_repeats else 1
    final = (1 + again) * len(larger)  # what it costs to score one more point on the larger set
    if not state.scored:
        if task.scorer.left < len(larger) + final + (1 + again) * state.batch:
            return
        (incumbent,) = await task.scorer.score([{}], larger)
        state.scored.append(Trial(point=dict.fromkeys(sorted(state.values), 0), mean=incumbent.mean))
        yield state
    while len(state.trials) < state.wanted:
        spare = (task.scorer.left - final) / state.batch - again
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
    """Return the points that TPE would try next."""
    values = sorted(state.values.items())  # TPE draws in order, which a checkpoint need not keep
    spaces = {key: Choice(*range(len(some) + 1)) for key, some in values}
    known = [(trial.point, trial.mean) for trial in [*state.scored, *state.trials]]
    points: list[Point] = []
    for _ in range(count):
        point = next_point(spaces, known, points, task.seed, "mipro")
        points.append(cast("Point", point))  # the options are numbers
    return points


async def _means(
    task: Task, state: JointSearch, points: Sequence[Point], examples: Sequence[Example]
) -> list[float]:
    """Score points beside the incumbent, so that a round of nothing but broken ones only loses."""
    candidates = [state.changes(point) for point in points]
    return [e.mean for e in (await task.scorer.score([{}, *candidates], examples))[1:]]


def promising(trials: Sequence[Trial], scored: Sequence[Point]) -> Point | None:
    """Return the point with the best mean over its trials, besides those on the larger set already.

    >>> trials = [Trial(point={"a": a}, mean=mean) for a, mean in [(1, 0.9), (2, 0.6), (1, 0.2)]]
    >>> promising(trials, scored=[{"a": 0}])
    {'a': 2}
    """
    points = {canonical(trial.point): trial.point for trial in trials}
    means: dict[str, list[float]] = {}
    for trial in trials:
        if trial.point not in scored:
            means.setdefault(canonical(trial.point), []).append(trial.mean)
    if not means:
        return None
    return points[max(means, key=lambda name: sum(means[name]) / len(means[name]))]
