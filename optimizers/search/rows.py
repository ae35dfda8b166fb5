"""Division of the train examples: no candidate is scored on an example that its values are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compound.core.example import Example
from compound.execution.rng import generator
from compound.graph.space import Demos
from compound.graph.system import System
from compound.optimization.method import Task
from compound.optimizers.scheduling.jobs import demo_keys, text_keys
from compound.optimizers.search.sources import CandidateSources

POOL, POOL_WITH_WRITER = 16, 8  # examples that the incumbent is run on for demonstrations
RESERVED = 0.25  # of the train examples, for descriptions, if there are no demonstrations


@dataclass(frozen=True)
class Rows:
    """Division of the train examples; the same in all jobs of a run, so that no example changes its part.

    Attributes:
        pool: examples that the incumbent is run on for demonstrations and the first reflections.
        read: examples that descriptions and labelled demonstrations are made of, including the
            pool.
        scored: examples that candidates are scored on, in random order.
    """

    pool: Sequence[Example]
    read: Sequence[Example]
    scored: Sequence[Example]


def divide(task: Task, sources: CandidateSources) -> Rows:
    """Divide the train examples between the sources of candidates and their scores."""
    ordered = pool_order(task)
    demos = has_demos(task.system)
    reads = "describe" in sources.names and bool(text_keys(task))
    read = len(ordered) // 2 if demos else int(RESERVED * len(ordered)) if reads else 0
    most = POOL_WITH_WRITER if sources.writes else POOL
    uses_pool = demos and (
        ("demos" in sources.names and demo_keys(task)) or "reflect" in sources.names
    )
    count = int(min(read, most, task.scorer.runs_left / 4)) if uses_pool else 0
    return Rows(ordered[:count], ordered[:read], shuffled(task, ordered[read:]))


def pool_order(task: Task) -> list[Example]:
    """Return the train examples in an order that is the same in all jobs of a run."""
    return [task.train[i] for i in generator(task.pool_seed, "pool").permutation(len(task.train))]


def shuffled(task: Task, examples: Sequence[Example]) -> list[Example]:
    """Return examples in an order that depends on the job."""
    order = generator(task.seed, "examples").permutation(len(examples))
    return [examples[i] for i in order]


def has_demos(system: System) -> bool:
    """Return whether a component of a system has demonstrations."""
    return any(isinstance(space, Demos) for space in system.parameters.values())
