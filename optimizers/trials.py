"""Trials of joint choices on minibatches; after every round the best by mean meets a larger set.

The search of Opsahl-Ong et al. 2024, "Optimizing Instructions and Demonstrations for Multi-Stage Language
Model Programs". Its state is JSON: ``values`` by parameter, the sizes ``wanted``, ``batch`` and ``larger``,
the ``round``, the ``trials`` and what was ``scored`` on the larger set, each a list of ``[point, mean]``.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from compound.configuration import canonical
from compound.contracts import Example
from compound.optimization import Task
from compound.optimizers.tpe import next_point
from compound.space import Choice
from compound.streams import generator

ROUND = 4  # trials scored at once, on one minibatch
LARGER = 3  # minibatches in the larger set

Point = Mapping[str, int]  # for each parameter, the number of one of its values; 0 is the incumbent's


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


async def rounds(
    task: Task, state: Mapping[str, Any], larger: Sequence[Example]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the state after the incumbent's score, and after every round of trials."""
    again = 0 if task.scorer.free_repeats else 1
    values = dict(sorted(state["values"].items()))  # TPE draws in order, which a checkpoint need not keep
    spaces = {key: Choice(*range(len(some) + 1)) for key, some in values.items()}
    final = (1 + again) * len(larger)  # what it costs to score one more point on the larger set
    if not state["scored"]:
        if task.scorer.left < len(larger) + final + (1 + again) * state["batch"]:
            return
        (incumbent,) = await task.scorer.score([{}], larger)
        state = {**state, "scored": [[dict.fromkeys(spaces, 0), incumbent.mean]]}
        yield state
    while len(state["trials"]) < state["wanted"]:
        spare = (task.scorer.left - final) / state["batch"] - again
        count = int(min(spare, ROUND, state["wanted"] - len(state["trials"])))
        if count < 1:
            return
        points: list[dict[str, int]] = []
        for _ in range(count):
            points.append(next_point(spaces, state["scored"] + state["trials"], points, task.seed, "mipro"))
        order = generator(task.seed, "minibatch", state["round"]).permutation(len(larger))
        batch = [larger[i] for i in order[: state["batch"]]]
        means = await _means(task, state, points, batch)
        trials = state["trials"] + [list(pair) for pair in zip(points, means, strict=True)]
        state = {**state, "round": state["round"] + 1, "trials": trials}
        best = promising(trials, [point for point, _ in state["scored"]])
        if best is not None:
            (mean,) = await _means(task, state, [best], larger)
            state = {**state, "scored": [*state["scored"], [best, mean]]}
        yield state


async def _means(
    task: Task, state: Mapping[str, Any], points: Sequence[Point], examples: Sequence[Example]
) -> list[float]:
    """Score points beside the incumbent, so that a round of nothing but broken ones only loses."""
    candidates = [changes(state, point) for point in points]
    return [e.mean for e in (await task.scorer.score([{}, *candidates], examples))[1:]]


def promising(trials: Sequence[Any], scored: Sequence[Point]) -> Point | None:
    """Return the point with the best mean over its trials, besides those on the larger set already.

    >>> promising([[{"a": 1}, 0.9], [{"a": 2}, 0.6], [{"a": 1}, 0.2]], scored=[{"a": 0}])
    {'a': 2}
    """
    found: dict[str, list[float]] = {}
    points: dict[str, Point] = {canonical(point): point for point, _ in trials}
    for point, mean in trials:
        if point not in scored:
            found.setdefault(canonical(point), []).append(mean)
    if not found:
        return None
    return points[max(found, key=lambda name: sum(found[name]) / len(found[name]))]


def changes(state: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """Return the values of a point that are not the incumbent's."""
    return {key: state["values"][key][number - 1] for key, number in point.items() if number}
