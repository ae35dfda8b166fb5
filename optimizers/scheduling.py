"""Parameters by kind, their division into jobs, and schedulers, which choose the next job.

A scheduler is a function of the history, so that a resumed run makes the same choices. Every choice
has the numbers that it is based on in ``Job.reason``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from compound.execution.rng import generator
from compound.graph.configuration import component_of, components_of, segment_name
from compound.graph.space import Choice, Demos, Float, Int, Space, Text, Weights
from compound.graph.system import System
from compound.optimization.method import Job, JobRecord, Task

TUNED: tuple[type[Space], ...] = (Text, Demos, Choice, Int, Float)  # all spaces except weights


def keys_of(system: System, *kinds: type[Space]) -> tuple[str, ...]:
    """Return the keys of all parameters of the given kinds."""
    return tuple(key for key, space in system.parameters.items() if isinstance(space, kinds))


def demo_keys(task: Task) -> list[str]:
    """Return the job's keys of demonstrations."""
    spaces = task.system.parameters
    return [key for key in task.keys if isinstance(space := spaces[key], Demos) and space.max]


def text_keys(task: Task) -> list[str]:
    """Return the job's keys of texts."""
    return [key for key in task.keys if isinstance(task.system.parameters[key], Text)]


def by_component(optimizer: str, system: System) -> list[Job]:
    """Return two jobs per component: one for texts and demonstrations, one for choices and numbers."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for key, space in system.parameters.items():
        if not isinstance(space, Weights):
            groups.setdefault((component_of(key), isinstance(space, Text | Demos)), []).append(key)
    return [Job(optimizer, tuple(keys)) for keys in groups.values()]


def text_jobs(optimizer: str, system: System) -> list[Job]:
    """Return one job per component that has texts."""
    groups = itertools.groupby(keys_of(system, Text), component_of)
    return [Job(optimizer, tuple(keys)) for _, keys in groups]


History = Sequence[JobRecord]


@dataclass(frozen=True)
class InOrder:
    """Scheduler that cycles through the jobs in the given order."""

    def choose(self, jobs: Sequence[Job], history: History, seed: int) -> Job:
        """Return the next job of the cycle."""
        return jobs[len(history) % len(jobs)]


@dataclass(frozen=True)
class Uniform:
    """Scheduler that chooses all jobs equally often, in rounds with a new random order each.

    >>> jobs = [Job("a", ("x.p",)), Job("b", ("y.p",))]
    >>> first = Uniform().choose(jobs, [], seed=0)
    >>> history = [JobRecord(job=0, optimizer=first.optimizer, keys=first.keys)]
    >>> second = Uniform().choose(jobs, history, seed=0)
    >>> {first.optimizer, second.optimizer} == {"a", "b"}
    True
    """

    def choose(self, jobs: Sequence[Job], history: History, seed: int) -> Job:
        """Return the next job of the current round."""
        done = Counter((record.optimizer, record.keys) for record in history)
        fewest = min(done[job.optimizer, job.keys] for job in jobs)
        order = generator(seed, "schedule", fewest).permutation(len(jobs))
        waiting = [jobs[i] for i in order if done[jobs[i].optimizer, jobs[i].keys] == fewest]
        return _with_reason(waiting[0], {"rounds": float(fewest), "waiting": float(len(waiting))})


@dataclass(frozen=True)
class RewardGapScheduler:
    """Scheduler of OPTIMAS (appendix E): draws a component in proportion to its mean reward gap.

    The gaps are those of each component's latest pairs, as recorded by the last job that measured
    any. The paper measures all gaps before the first draw; here jobs measure them, so untried jobs
    of components without a measured gap come first, in random order. If none of them measured a
    gap, their component counts as the mean of the others. All other draws are independent, as in
    the paper: a component may be drawn several times in a row, and one with a gap of 0 is never
    drawn while another has a gap. The jobs of a component are equally likely.

    Example:
        >>> jobs = [Job("a", ("x.p",)), Job("b", ("y.p",))]
        >>> measured = JobRecord(job=0, optimizer="a", keys=("x.p",), facts={"gaps": {"x": 0.1, "y": 0.3}})
        >>> round(RewardGapScheduler().choose(jobs, [measured], seed=0).reason["probability"], 2)
        0.75
    """

    def choose(self, jobs: Sequence[Job], history: History, seed: int) -> Job:
        """Draw a job with probability proportional to its component's gap."""
        known: Mapping[str, float] = next(
            (record.facts["gaps"] for record in reversed(history) if record.facts.get("gaps")), {}
        )
        components = [segment_name(components_of(job.keys)) for job in jobs]
        done = {(record.optimizer, record.keys) for record in history}
        untried = [
            job
            for job, name in zip(jobs, components, strict=True)
            if name not in known and (job.optimizer, job.keys) not in done
        ]
        if untried:
            first = int(generator(seed, "schedule", len(history)).integers(len(untried)))
            return _with_reason(untried[first], {"unmeasured": float(len(untried))})
        sizes = Counter(components)
        mean_gap = sum(known.values()) / len(known) if known else 1.0
        gaps = {name: known.get(name, mean_gap) for name in sizes}
        weights = np.array([gaps[name] / sizes[name] for name in components])
        if not weights.any():
            weights = np.array([1 / sizes[name] for name in components])
        chances = weights / weights.sum()
        drawn = int(generator(seed, "schedule", len(history)).choice(len(jobs), p=chances))
        reason = {"gap": gaps[components[drawn]], "probability": float(chances[drawn])}
        return _with_reason(jobs[drawn], reason)


def _with_reason(job: Job, reason: Mapping[str, float]) -> Job:
    chosen: Job = replace(job, reason=reason)
    return chosen
