"""Division of the train examples into a pool for demonstrations, and those that candidates are scored on."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from compound.core.example import Example
from compound.graph.space import Demos
from compound.graph.system import System
from compound.optimization.method import Task
from compound.optimizers.scheduling import demo_keys
from compound.optimizers.search.sources import has_demos, pool_order, shuffled

MAX_POOL = 48  # examples that demonstrations are bootstrapped from
POOL_SHARE = 0.4  # of a job's system runs, for bootstrapping demonstrations


def split(task: Task) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return the pool examples, to bootstrap demonstrations from, and the examples to score candidates on.

    The two are disjoint in all jobs of a run: no candidate is scored on an example that a
    demonstration of the system came from.
    """
    ordered, runs = pool_order(task), task.scorer.runs_left
    count = pool_size(task.system, demo_keys(task), len(ordered), runs, task.minibatch)
    kept = len(ordered) // 2 if has_demos(task.system) else 0
    return ordered[:count], shuffled(task, ordered[kept:])


def pool_size(
    system: System, keys: Collection[str], train: int, runs: float, minibatch: int
) -> int:
    """Return the number of pool examples that `split` takes of ``train`` examples."""
    if not any(isinstance(system.parameters[key], Demos) for key in keys):
        return 0
    most = min(train // 2, MAX_POOL)
    return min(most, max(int(runs * POOL_SHARE), minibatch)) if math.isfinite(runs) else most
