"""Division of the train examples: no candidate is scored on an example that its values are made of."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from compound.example import Example
from compound.execution.rng import generator
from compound.graph.space import Demos
from compound.graph.system import System
from compound.optimization.method import Task
from compound.optimizers.scheduling.jobs import demo_keys, text_keys
from compound.optimizers.search.sources import CandidateSources

MAX_POOL = 48  # examples that demonstrations are bootstrapped from, in `split`
POOL_SHARE = 0.4  # of a job's system runs, for bootstrapping demonstrations, in `split`
POOL, POOL_WITH_WRITER = 16, 8  # examples that the incumbent is run on for demonstrations, in `divide`
RESERVED = 0.25  # of the train examples, for descriptions, if there are no demonstrations


@dataclass(frozen=True)
class Rows:
    """Division of the train examples; the same in all jobs of a run, so that no example changes its part.

    Attributes:
        pool: examples that the incumbent is run on for demonstrations and the first reflections.
        read: examples that descriptions and labelled demonstrations are made of, including the pool.
        scored: examples that candidates are scored on, in random order.
    """

    pool: Sequence[Example]
    read: Sequence[Example]
    scored: Sequence[Example]


def divide(task: Task, sources: CandidateSources) -> Rows:
    """Divide the train examples between the sources of candidates and their scores."""
    ordered = pool_order(task)
    has_demos = _has_demos(task.system)
    reads = "describe" in sources.names and bool(text_keys(task))
    read = len(ordered) // 2 if has_demos else int(RESERVED * len(ordered)) if reads else 0
    most = POOL_WITH_WRITER if sources.writes else POOL
    uses_pool = has_demos and (("demos" in sources.names and demo_keys(task)) or "reflect" in sources.names)
    count = int(min(read, most, task.scorer.runs_left / 4)) if uses_pool else 0
    return Rows(ordered[:count], ordered[:read], _shuffled(task, ordered[read:]))


def split(task: Task) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return the pool examples, to bootstrap demonstrations from, and the examples to score candidates on.

    The two are disjoint in all jobs of a run: no candidate is scored on an example that a demonstration of
    the system came from.
    """
    ordered, runs = pool_order(task), task.scorer.runs_left
    count = pool_size(task.system, demo_keys(task), len(ordered), runs, task.minibatch)
    kept = len(ordered) // 2 if _has_demos(task.system) else 0
    return ordered[:count], _shuffled(task, ordered[kept:])


def pool_size(system: System, keys: Collection[str], train: int, runs: float, minibatch: int) -> int:
    """Return the number of pool examples that `split` takes of ``train`` examples.

    Args:
        system: the system.
        keys: the parameters of the job.
        train: the number of train examples.
        runs: system runs of the job.
        minibatch: the minibatch of the job.
    """
    if not any(isinstance(system.parameters[key], Demos) for key in keys):
        return 0
    most = min(train // 2, MAX_POOL)
    return min(most, max(int(runs * POOL_SHARE), minibatch)) if math.isfinite(runs) else most


def pool_order(task: Task) -> list[Example]:
    """Return the train examples in an order that is the same in all jobs of a run."""
    return [task.train[i] for i in generator(task.pool_seed, "pool").permutation(len(task.train))]


def _shuffled(task: Task, examples: Sequence[Example]) -> list[Example]:
    order = generator(task.seed, "examples").permutation(len(examples))
    return [examples[i] for i in order]


def _has_demos(system: System) -> bool:
    return any(isinstance(space, Demos) for space in system.parameters.values())
