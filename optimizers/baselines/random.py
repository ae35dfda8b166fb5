"""Random search: the simplest baseline, with the same loop, budget and acceptance test as other methods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np

from compound.execution.rng import generator
from compound.graph.configuration import canonical_json
from compound.graph.space import Choice, Demos, Float, Int, Text
from compound.narrowing import entry
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.search.prompts import (
    ATTEMPTS,
    CandidateRace,
    Pools,
    bootstrap_pools,
    first_rung_size,
    race_incumbent,
    split,
)
from compound.optimizers.search.proposers.demos import draw_demos
from compound.optimizers.search.proposers.edits import GROWTH, bounded_edit, clauses_for

EDITS = 2  # maximum number of edits of a text


@dataclass(frozen=True)
class RandomSearch:
    """Optimizer that draws random configurations; every parameter changes with probability 0.5."""

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare that the job sends no requests except the runs of the system."""
        return JobBound(growth=GROWTH, candidates=first_rung_size(outlook))

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Draw candidates, race them, and propose the winner."""
        pool_examples, examples = split(task)
        if task.resume is not None:
            state = CandidateRace.from_json(task.resume)
        else:
            pools = await bootstrap_pools(task, pool_examples)
            state = CandidateRace(candidates=self._candidates(task, pools))
            yield Progress(state.to_json(), f"{len(state.candidates)} random configurations")
        async for event in race_incumbent(task, state.candidates, examples, state):
            yield event

    def _candidates(self, task: Task, pools: Pools) -> list[dict[str, object]]:
        seen: set[str] = set()
        candidates: list[dict[str, object]] = []
        for attempt in range(ATTEMPTS * task.candidates):
            if len(candidates) == task.candidates:
                break
            rng = generator(task.seed, "random", attempt)
            changed = [key for key in task.keys if rng.random() < 0.5]
            values = {key: v for key in changed if (v := _random_value(task, key, pools, rng)) is not None}
            if values and canonical_json(values) not in seen:
                seen.add(canonical_json(values))
                candidates.append(values)
        return candidates


def _random_value(task: Task, key: str, pools: Pools, rng: np.random.Generator) -> object:
    space = task.system.parameters[key]
    if isinstance(space, Choice | Int | Float):
        return space.draw(rng)
    if isinstance(space, Demos):
        return draw_demos(pools[key], space.max, rng) if pools.get(key) else None
    assert isinstance(space, Text)  # the method passes no weights
    current, clauses = entry(task.system.configuration, key, str), clauses_for(task.system, key)
    return bounded_edit(current, rng, space, EDITS, clauses)
