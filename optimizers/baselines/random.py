"""Random search: the simplest baseline, with the same loop, budget and acceptance test as other methods.

The random configurations are compared by sequential halving (Karnin, Koren and Somekh 2013): each
round spends an equal part of the system runs on further examples, and the better half of its
candidates reaches the next one.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compound.core.example import Example
from compound.core.formatting import plural
from compound.core.narrowing import entry
from compound.core.storage.state import State
from compound.execution.rng import generator
from compound.graph.configuration import canonical_json
from compound.graph.space import Choice, Demos, Float, Int, Text
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, Task
from compound.optimizers.search.proposers.demos import WeightedDemo, bootstrap_pools, draw_demos
from compound.optimizers.search.proposers.edits import bounded_edit, clauses_for
from compound.optimizers.search.sources import pool_size, split

ATTEMPTS = 6  # per candidate, since duplicates are dropped
EDITS = 2  # maximum number of edits of a text
FEWEST = 0.5  # of a minibatch: examples of the first round, below which there are fewer candidates
EXTENSION = 0.05  # of its examples: smallest extension of the last round


class Halving(State):
    """Progress of `RandomSearch`."""

    candidates: list[dict[str, object]]
    alive: list[int]  # the numbers of the candidates of the next round, best first
    rounds: int
    # system runs that a candidate took per example of the last round; at first, the expected ones
    price: float
    seen: int = 0
    mean: float = 0.0
    incumbent: float = 0.0

    def note(self) -> str:
        """Return the progress note of the last round."""
        size = plural(self.seen, "example")
        return f"the best on {size}: {self.mean:.3f}, incumbent {self.incumbent:.3f}"


@dataclass(frozen=True)
class RandomSearch:
    """Optimizer that draws random configurations; every parameter changes with probability 0.5."""

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return the number of candidates; the job sends no requests except the runs of the system."""
        pool = pool_size(job.system, job.keys, len(job.train), job.runs, job.minibatch)
        price = job.prices.keys(job.keys)
        return JobPlan(candidates=affordable(job.candidates, job.runs - pool, price, job.minibatch))

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Draw candidates, compare them, and propose the winner."""
        pool_examples, examples = split(task)
        if task.resume is not None:
            state = Halving.from_json(task.resume)
        else:
            found = _candidates(task, await bootstrap_pools(task, pool_examples))
            price = _price(task, found)
            count = affordable(len(found), task.scorer.runs_left, price, task.minibatch)
            state = Halving(
                candidates=found, alive=list(range(count)), rounds=rounds_of(count), price=price
            )
            yield Progress(state.to_json(), f"{len(found)} random configurations")
        while size := _next_size(task, state, len(examples)):
            await _score_round(task, state, examples[:size])
            yield Progress(state.to_json(), state.note())
        if not state.seen:
            yield Proposal({}, tried=len(state.candidates), note="no candidate could be scored")
            return
        values = state.candidates[state.alive[0]] if state.mean > state.incumbent else {}
        note = "" if values else "no candidate beat the incumbent"
        yield Proposal(values, state.incumbent, state.mean, len(state.candidates), note)


def rounds_of(candidates: int) -> int:
    """Return the number of rounds: half of the candidates, rounded up, reach the next one.

    >>> [rounds_of(n) for n in (1, 2, 3, 4, 6, 8, 9)]
    [1, 2, 3, 3, 4, 4, 5]
    """
    return 1 + math.ceil(math.log2(candidates)) if candidates else 0


def affordable(candidates: int, runs: float, price: float, minibatch: int) -> int:
    """Return how many candidates some system runs can compare, with the incumbent.

    >>> [affordable(8, runs, price=1.0, minibatch=8) for runs in (144, 50, 2, 1)]
    [8, 3, 1, 0]
    """
    fewest = max(1, math.ceil(FEWEST * minibatch))
    for count in range(candidates, 1, -1):
        if runs / rounds_of(count) >= fewest * (count * price + 1):
            return count
    return int(candidates > 0 and runs >= price + 1)


def _next_size(task: Task, state: Halving, examples: int) -> int:
    """Return the number of examples of the next round; 0 after the last one.

    The last one is extended while runs are left and its candidate is better than the incumbent.
    """
    is_extension = state.rounds < 1
    if not state.alive or (is_extension and state.mean <= state.incumbent):
        return 0
    runs, free = task.scorer.runs_left, task.scorer.has_free_repeats
    seen = state.seen if free else 0
    if not math.isfinite(runs):
        new = examples if is_extension else max(state.seen, task.minibatch)
    else:
        alive = [state.candidates[number] for number in state.alive]
        sure = len(alive) * max(state.price, _price(task, alive)) + 1
        expected = len(state.alive) * state.price + 1
        new = int(min(runs / sure, max(1.0, runs / max(1, state.rounds) / expected)))
    size = min(seen + new, examples)
    least = max(1, math.ceil(EXTENSION * state.seen)) if is_extension else 1
    return size if size - state.seen >= least else 0


def _price(task: Task, candidates: Sequence[Mapping[str, object]]) -> float:
    if not candidates or not task.scorer.has_free_repeats:
        return 1.0
    return sum(map(task.prices.keys, candidates)) / len(candidates)


async def _score_round(task: Task, state: Halving, examples: Sequence[Example]) -> None:
    candidates = [{}, *(state.candidates[number] for number in state.alive)]
    incumbent, *scored = await task.scorer.score(candidates, examples)
    new = len(examples) - (state.seen if task.scorer.has_free_repeats else 0)
    state.price = sum(found.system_runs for found in scored) / (len(scored) * new)
    means = {number: found.mean for number, found in zip(state.alive, scored, strict=True)}
    ranked = sorted(state.alive, key=lambda number: (-means[number], number))
    state.alive = ranked[: math.ceil(len(ranked) / 2)]
    state.rounds, state.seen = state.rounds - 1, len(examples)
    state.mean, state.incumbent = means[ranked[0]], incumbent.mean


def _candidates(task: Task, pools: Mapping[str, Sequence[WeightedDemo]]) -> list[dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for attempt in range(ATTEMPTS * task.candidates):
        if len(found) == task.candidates:
            break
        rng = generator(task.seed, "random", attempt)
        changed = [key for key in task.keys if rng.random() < 0.5]
        values = {
            key: v for key in changed if (v := _random_value(task, key, pools, rng)) is not None
        }
        if values:
            found.setdefault(canonical_json(values), values)
    return list(found.values())


def _random_value(
    task: Task, key: str, pools: Mapping[str, Sequence[WeightedDemo]], rng: np.random.Generator
) -> object:
    space = task.system.parameters[key]
    if isinstance(space, Choice | Int | Float):
        return space.draw(rng)
    if isinstance(space, Demos):
        return draw_demos(pools[key], space.max, rng) if pools.get(key) else None
    assert isinstance(space, Text)  # the method passes no weights
    current, clauses = entry(task.system.configuration, key, str), clauses_for(task.system, key)
    return bounded_edit(current, rng, space, EDITS, clauses)
