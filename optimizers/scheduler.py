"""Which job comes next. A scheduler sees only the history, so a resumed run chooses the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compound.optimization import Job
from compound.streams import generator


@dataclass(frozen=True)
class Uniform:
    """Every job equally often: rounds, each in a fresh seeded order.

    >>> jobs = [Job("a", ("x.p",)), Job("b", ("y.p",))]
    >>> first = Uniform().choose(jobs, [], seed=0)
    >>> second = Uniform().choose(jobs, [{"optimizer": first.optimizer, "keys": list(first.keys)}], seed=0)
    >>> {first.optimizer, second.optimizer} == {"a", "b"}
    True
    """

    def choose(self, jobs: Sequence[Job], history: Sequence[Mapping[str, Any]], seed: int) -> Job:
        """Return the next job of the current round."""
        done = Counter((step["optimizer"], tuple(step["keys"])) for step in history)
        fewest = min(done[job.optimizer, job.keys] for job in jobs)
        order = generator(seed, "schedule", fewest).permutation(len(jobs))
        waiting = [jobs[i] for i in order if done[jobs[i].optimizer, jobs[i].keys] == fewest]
        chosen: Job = replace(waiting[0], reason={"rounds": float(fewest), "waiting": float(len(waiting))})
        return chosen
